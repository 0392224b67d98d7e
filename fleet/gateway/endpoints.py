"""Which endpoints a gateway may be sent to, and whether this picker is the one to ask (rules 5 and 6 of `fleet.gateway.endpoint_picker`)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import WorkerId
from fleet.core.requests import ModelCard
from fleet.core.roles import Role
from fleet.router.settings.endpoint_picker import EndpointPickerSettings, endpoint_of
from fleet.router.state.snapshot import RouterSnapshot

KNOWN_ADDRESSES = 4096
SERVING = "serving"
DEFAULT_PORTS = {"http": 80, "https": 443}


class RouterApi(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    def models(self) -> tuple[ModelCard, ...]: ...

    def addresses(self) -> Mapping[WorkerId, str]: ...

    def status(self) -> RouterSnapshot: ...


class PickerLeadership(Protocol):
    """Of this picker, among several that do not know of each other's bookings."""

    def leads(self) -> bool:
        """Whether gateways are to ask this one."""
        ...

    def follows(self) -> bool:
        """Whether another one leads, as far as is known."""
        ...

    async def resign(self) -> None:
        """Have another one lead from now on; takes a few seconds at most."""
        ...


class SolePicker:
    """There is no other. Implements `PickerLeadership`."""

    def leads(self) -> bool:
        return True

    def follows(self) -> bool:
        return False

    async def resign(self) -> None:
        """To nobody."""


class PickerEndpoints:
    """Those of the workers that a router knows, for gateways."""

    def __init__(self, settings: EndpointPickerSettings, router: RouterApi, standing: PickerLeadership) -> None:
        """Nothing is started.

        Args:
            settings: Where gateways reach workers.
            router: Knows the workers.
            standing: Of this picker among others.
        """
        self._settings = settings
        self._own_endpoint = settings.own_endpoint
        self._router = router
        self._standing = standing
        self._leaving = False

    def ready(self) -> bool:
        """Whether a request sent now would find a worker."""
        return self._standing.leads() and not self._leaving and bool(self._router.models())

    async def leave(self) -> None:
        """Be ready no more, and have another picker lead. Who still asks is answered: gateways hear of it later."""
        self._leaving = True
        await self._standing.resign()

    def within(self, subset: Sequence[str] | None) -> dict[WorkerId, str]:
        """The workers that may be picked, with their endpoints.

        Raises:
            Refused: There is none.
        """
        port = self._settings.target_port
        every = {worker_id: endpoint_at(address, port) for worker_id, address in self._router.addresses().items()}
        allowed = None if subset is None else set(subset)
        found = {
            worker_id: endpoint
            for worker_id, endpoint in every.items()
            if endpoint and (allowed is None or endpoint in allowed)
        }
        if not found:
            raise self.nobody(subset)
        return found

    def allowed(self, endpoints: Mapping[WorkerId, str]) -> tuple[WorkerId, ...] | None:
        """Which workers may take part; None: all."""
        return None if len(endpoints) == len(self._router.addresses()) else tuple(endpoints)

    def idlest(self, subset: Sequence[str] | None) -> str:
        """The one with the fewest requests (rule 5).

        Raises:
            Refused: There is none.
        """
        endpoints = self.within(subset)
        answering = [
            worker
            for pool in self._router.status().pools
            if pool.role is not Role.PREFILL
            for worker in pool.workers
            if worker.worker_id in endpoints and worker.state == SERVING
        ]
        if not answering:
            raise self.nobody(subset)
        return endpoints[min(answering, key=lambda each: each.booked_requests + each.booked_elsewhere).worker_id]

    def own(self, subset: Sequence[str] | None) -> str:
        """The router's own, where requests are placed when they come.

        Raises:
            Refused: It may not be picked, or has no worker.
        """
        endpoint = self._own_endpoint
        if not self.ready() or (subset is not None and endpoint not in subset):
            raise self.nobody(subset)
        return endpoint

    def check(self) -> None:
        """Let a request in.

        Raises:
            Refused: DRAINING; another picker has to be asked.
        """
        if self._standing.follows() and not self._leaving:
            raise RequestRejected(
                Reason.DRAINING, "this endpoint picker is a follower; ask the one that is ready", retry_after_ms=1
            )

    def nobody(self, subset: Sequence[str] | None) -> RequestRejected:
        """Why a request goes nowhere."""
        cause = "no endpoint is ready"
        if subset is not None:
            cause = f"none of the {len(subset)} endpoints that the gateway allows is ready"
        return RequestRejected(
            Reason.NO_WORKER, f"{cause}; retry when one is", retry_after_ms=self._settings.retry_after_ms
        )


@lru_cache(maxsize=KNOWN_ADDRESSES)
def endpoint_at(address: str, port: int) -> str:
    """``ip:port`` of a worker; empty where it is known by no IP address.

    Args:
        address: As the worker is known: ``host:port`` or a URL.
        port: In place of its own; 0: its own.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return endpoint_of(parts.hostname or "", port or parts.port or DEFAULT_PORTS.get(parts.scheme, 0))
    except ValueError:
        return ""
