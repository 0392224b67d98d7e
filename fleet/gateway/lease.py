"""Leader election of endpoint pickers: the holder of a Kubernetes Lease leads.

Rules:

1. The election is the same as the operator's (`fleet.net.kubernetes.election`). A candidate takes the Lease over when
   nobody holds it, or when it has not changed for its whole duration, measured by the candidate's own clock. A picker
   that ends gives the Lease back and serves until another picker has it, but at most a few seconds.
2. The holder stops leading when it could not renew the Lease for two thirds of the duration, so at most one picker
   leads at any time. A picker that does not lead rejects requests only while it knows another holder. So if the API
   server cannot be reached, the pickers report that they are not ready, but still pick endpoints for requests.
3. If the settings name a Service, the holder of the Lease writes an EndpointSlice, which makes the holder the only endpoint
   of this Service. So gateways find the leader, while all routers stay ready for other clients and for Deployments, disruption
   budgets and autoscalers. The Lease owns the EndpointSlice, so Kubernetes removes the EndpointSlice together with the Lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.net.kubernetes import endpoint_slices, kinds
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.endpoint_slices import endpoint_slice
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.leader import LeaseLeader, LeaseSettings
from fleet.net.kubernetes.own_pod import own_namespace, own_pod
from fleet.net.kubernetes.ports import KubernetesApi, KubernetesError, WallClock
from fleet.net.kubernetes.views import KubernetesLease, NamedObject
from fleet.router.settings.endpoint_picker import PickerLease

log = logging.getLogger(__name__)

AGENT = "fleet-picker"
SLICE = ApiKind(endpoint_slices.GROUP, endpoint_slices.VERSION, endpoint_slices.PLURAL, endpoint_slices.KIND)
# The EndpointSlice is written again after this time, because somebody may have removed it.
WRITTEN_ANEW = Nanos(60 * SECOND)


class LeaseCandidate:
    """Takes part in the leader election for one endpoint picker.

    Implements `fleet.gateway.endpoints.PickerLeadership`.
    """

    def __init__(
        self, settings: PickerLease, namespace: str, cluster: KubernetesApi, clock: Clock, wall: WallClock
    ) -> None:
        """Create a candidate; nothing is read from the API server yet.

        Args:
            settings: The Lease, and the identity of this candidate.
            namespace: Namespace of the Lease.
            cluster: Client of the API server.
            clock: Measures the duration of the Lease.
            wall: Wall clock for the times in the Lease, which are only for people who read it.
        """
        self._settings = settings
        self._namespace = namespace
        self._cluster = cluster
        self._clock = clock
        duration = settings.duration_seconds
        self._pause = duration * 2 / 15
        lease = LeaseSettings(
            name=settings.name,
            namespace=namespace,
            owner=settings.owner,
            duration_seconds=duration,
            renew_within_seconds=duration * 2 / 3,
            retry_seconds=self._pause,
        )
        self._leader = LeaseLeader(cluster, lease, namespace, settings.identity, clock, wall)
        self._resigned = asyncio.Event()
        self._ended = asyncio.Event()

    def leads(self) -> bool:
        return self._leader.leads()

    def follows(self) -> bool:
        return self._leader.waits

    async def run(self) -> None:
        """Take part in the election until this picker resigns."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._leader.run()), tasks.create_task(self._point())]
                await self._resigned.wait()
                for task in running:
                    task.cancel()
        finally:
            self._ended.set()

    async def resign(self) -> None:
        if not self._resigned.is_set():
            self._resigned.set()
            led = self.leads()
            await self._ended.wait()  # wait, because a running election would take the Lease again
            await self._leader.give_back()
            if led:
                await self._succeeded()

    async def _succeeded(self) -> None:
        """Wait until another picker leads, because gateways still send requests here until then.

        The wait is limited to twice the time between two readings of the Lease by a candidate.
        """
        with suppress(TimeoutError, KubernetesError):
            async with asyncio.timeout(2 * self._pause):
                while True:
                    if (await self._lease()).spec.holder_identity not in (None, "", self._settings.identity):
                        return
                    await asyncio.sleep(self._pause / 8)

    async def _point(self) -> None:
        """Make this picker the endpoint of the Service while it leads, until cancelled. Do nothing if the settings name no Service."""
        written: Nanos | None = None
        while self._settings.service:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self._leader.changed.wait()
            # The event is also checked after a timeout, because it may have been set in the same moment.
            if self._leader.changed.is_set():
                self._leader.changed.clear()
                written = None
            now = self._clock.now()
            if not self.leads() or (written is not None and now < written + WRITTEN_ANEW):
                continue
            try:
                await self._apply_slice()
                written = now
            except KubernetesError as error:
                log.warning(
                    "endpoint of the leading picker not written",
                    extra={"service": self._settings.service, "cause": str(error)},
                )

    async def _apply_slice(self) -> None:
        uid = (await self._lease()).metadata.uid
        owner = {"name": self._settings.name, "namespace": self._namespace, "uid": uid}
        made = endpoint_slice(
            self._settings.endpoint, owner, service=self._settings.service, port="picker", pod=own_pod()
        )
        await self._cluster.apply(SLICE, NamedObject, made)

    async def _lease(self) -> KubernetesLease:
        return await self._cluster.get(kinds.LEASE, KubernetesLease, self._namespace, self._settings.name)


@asynccontextmanager
async def open_candidate(settings: PickerLease, clock: Clock, wall: WallClock) -> AsyncIterator[LeaseCandidate]:
    """Take part in the election until the context ends or the candidate resigns.

    Raises:
        ConfigurationRefused: The settings do not say how to reach the API server, or which namespace to use.
    """
    namespace = settings.namespace or own_namespace()
    if not namespace:
        raise ConfigurationRefused("endpoint_picker.lease.namespace: is needed outside of a pod")
    agent = f"{AGENT}/{settings.identity}"
    async with _api_server(settings.kubeconfig, agent) as cluster, asyncio.TaskGroup() as tasks:
        candidate = LeaseCandidate(settings, namespace, cluster, clock, wall)
        tasks.create_task(candidate.run())
        try:
            yield candidate
        finally:
            await candidate.resign()


@asynccontextmanager
async def _api_server(kubeconfig: str, agent: str) -> AsyncIterator[KubernetesApi]:
    async with AsyncExitStack() as held:
        try:
            cluster = await held.enter_async_context(open_api_client(kubeconfig, agent, AGENT))
        except KubernetesError as error:
            raise ConfigurationRefused(f"endpoint_picker.lease.{error}") from error
        yield cluster
