"""Endpoints that a gateway may use, and leadership among pickers (rules 5 and 6 of `endpoint_picker.py`)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.router.api import RouterApi
from fleet.router.settings.endpoint_picker import EndpointPickerSettings, endpoint_of

KNOWN_ADDRESSES = 4096
SERVING = "serving"
DEFAULT_PORTS = {"http": 80, "https": 443}


class PickerLeadership(Protocol):
    """Port to the election of one leader among several endpoint pickers (rule 6 of `endpoint_picker.py`)."""

    def leads(self) -> bool:
        """Return True if this picker is the leader, which gateways should call."""
        ...

    def follows(self) -> bool:
        """Return True if this picker knows that another picker leads."""
        ...

    async def resign(self) -> None:
        """Leave the election. If this picker was the leader, wait until another picker leads, but at most a few seconds."""
        ...


class SolePicker:
    """Leadership of the only endpoint picker, which always leads. Implements `PickerLeadership`."""

    def leads(self) -> bool:
        return True

    def follows(self) -> bool:
        return False

    async def resign(self) -> None:
        """Do nothing, because there is no other picker."""


class PickerEndpoints:
    """Knows the endpoints of the router's workers, and decides which of them a gateway's request may use."""

    def __init__(self, settings: EndpointPickerSettings, router: RouterApi, standing: PickerLeadership) -> None:
        """Create the object.

        Args:
            settings: How gateways reach workers.
            router: The router, which knows the workers and their addresses.
            standing: The election, which decides whether this picker leads.
        """
        self._settings = settings
        self._own_endpoint = settings.own_endpoint
        self._router = router
        self._standing = standing
        self._leaving = False

    def ready(self) -> bool:
        """Return True if this picker leads, is not leaving, and its router has a worker for at least one model."""
        return self._standing.leads() and not self._leaving and bool(self._router.models())

    async def leave(self) -> None:
        """Stop being ready and let another picker lead.

        Gateways notice the change with a delay. Requests that still arrive are therefore placed as before. If `router_endpoint` is
        set, they are rejected instead.
        """
        self._leaving = True
        await self._standing.resign()

    def within(self, subset: Sequence[str] | None) -> dict[WorkerId, str]:
        """Return the workers that the gateway allows for a request, with their endpoints.

        Args:
            subset: The endpoints that the gateway allows; None: it allows all endpoints.

        Raises:
            RequestRejected: No worker has an endpoint that the gateway allows.
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
        """Return the workers to which placement is restricted: those in `endpoints`, or None if these are all workers of the router."""
        return None if len(endpoints) == len(self._router.addresses()) else tuple(endpoints)

    def idlest(self, subset: Sequence[str] | None) -> str:
        """Return the allowed endpoint with the fewest requests, prefill workers left out (rule 5 of `endpoint_picker.py`).

        Raises:
            RequestRejected: No allowed worker that is no prefill worker serves now.
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
        """Return the router's own endpoint. When the request arrives there, the router places it.

        Raises:
            RequestRejected: The gateway does not allow this endpoint, or this picker is not ready (`ready`).
        """
        endpoint = self._own_endpoint
        if not self.ready() or (subset is not None and endpoint not in subset):
            raise self.nobody(subset)
        return endpoint

    def check(self) -> None:
        """Check that this picker may accept a request.

        Raises:
            RequestRejected: Another picker leads, and this one is not leaving (DRAINING).
        """
        if self._standing.follows() and not self._leaving:
            raise RequestRejected(
                Reason.DRAINING, "this endpoint picker is a follower; ask the one that is ready", retry_after_ms=1
            )

    def nobody(self, subset: Sequence[str] | None) -> RequestRejected:
        """Build the rejection of a request for which no endpoint is ready."""
        cause = "no endpoint is ready"
        if subset is not None:
            cause = f"none of the {len(subset)} endpoints that the gateway allows is ready"
        return RequestRejected(
            Reason.NO_WORKER, f"{cause}; retry when one is", retry_after_ms=self._settings.retry_after_ms
        )


@lru_cache(maxsize=KNOWN_ADDRESSES)
def endpoint_at(address: str, port: int) -> str:
    """Return a worker's endpoint as ``ip:port``; empty if the address has no IP address or no port.

    Args:
        address: The worker's address as ``host:port`` or a URL.
        port: The port of the endpoint; 0: the port in `address`.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return endpoint_of(parts.hostname or "", port or parts.port or DEFAULT_PORTS.get(parts.scheme, 0))
    except ValueError:
        return ""
