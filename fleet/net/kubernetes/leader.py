"""Lease leader: reads and writes the Lease as `fleet.net.kubernetes.election` decides.

Rules:

1. The Lease is owned by the candidate's Deployment, if the settings name one. Kubernetes' garbage collection then removes
   the Lease with the Deployment, even if a terminating pod has just created the Lease again. Every write repeats the
   owner, so that a Lease of an older operator, or of a Deployment that was created again, gets the right owner too.
2. If that Deployment does not exist, no candidate takes the Lease, because the Lease and the objects that it owns would
   then stay for ever.
3. A change of the leader is recorded as an Event of the Lease, if a controller name is given. An Event that cannot be
   written has no other consequence.
4. `renewTime` is only information for people. No clock is compared with it (`fleet.net.kubernetes.election`, rule 1).
"""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Annotated, Any, Never

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.election import Election, ElectionStep, ObservedLease
from fleet.net.kubernetes.events import KubernetesEvent, event_manifest
from fleet.net.kubernetes.ports import (
    KubernetesApi,
    KubernetesError,
    ObjectConflict,
    ObjectMissing,
    RequestDenied,
    WallClock,
)
from fleet.net.kubernetes.views import KubernetesLease, NamedObject, ObjectMetadata

log = logging.getLogger(__name__)

GIVE_BACK_SECONDS = 5.0

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class LeaseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a Lease that elects the acting operator, planner or endpoint picker; the defaults are those of kube-scheduler."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet-operator"
    """The name of the Lease."""

    namespace: str = ""
    """The namespace of the Lease; empty: the pod's namespace."""

    owner: Annotated[str, Meta(max_length=253)] = ""
    """The Deployment to which the candidates' pods belong, in the namespace of the Lease. Kubernetes removes the Lease together with
    this Deployment. Empty: the Lease stays."""

    duration_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15
    """A candidate takes the Lease from its holder if the candidate has seen no renewal of the Lease for this time."""

    renew_within_seconds: Seconds = 10.0
    """A leader that could not renew for this time stops acting."""

    retry_seconds: Seconds = 2.0
    """The time between two renewals by the leader, and between two checks by each other candidate."""

    def __post_init__(self) -> None:
        if not self.retry_seconds < self.renew_within_seconds < self.duration_seconds:
            raise ValueError(
                "retry_seconds: must be shorter than renew_within_seconds, which must be shorter than duration_seconds"
            )


class LeaseLeader:
    """Takes part in the election as one candidate for one Lease."""

    def __init__(
        self,
        cluster: KubernetesApi,
        settings: LeaseSettings,
        namespace: str,
        identity: str,
        clock: Clock,
        wall: WallClock,
        *,
        controller: str = "",
    ) -> None:
        """Create a candidate, which takes part in the election when `run` is called.

        Args:
            cluster: The API server.
            settings: The settings of the Lease.
            namespace: The namespace of the Lease.
            identity: The candidate's name; candidates with the same name lead together.
            clock: Monotonic clock for the election.
            wall: Wall clock for the times in objects.
            controller: Name under which Events report changes of the leader; empty: no Events are written.
        """
        self.changed = asyncio.Event()
        """Set when this candidate begins to act. Also set when the Lease is another object than before: Kubernetes
        removes the objects that the former Lease owned, so they must be written again. The task that waits for the
        event clears it."""

        self.waits = False
        """True if, when the Lease was last read, a different candidate held the Lease and its time had not ended."""

        self._cluster = cluster
        self._settings = settings
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._wall = wall
        self.election = Election(identity, Nanos(int(settings.renew_within_seconds * SECOND)))
        self._owner_uid: str | None = None
        self._controller = controller
        self._lease_uid = ""  # uid of the Lease that this candidate wrote last
        self._transitions = 0  # number of changes of the leader (`leaseTransitions`) in the Lease that was written last
        self._led = False

    def leads(self) -> bool:
        """Return whether this process may act as the leader now."""
        return self.election.leads(self._clock.now())

    async def run(self) -> Never:
        """Take part in the election until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._settings.renew_within_seconds):
                    await self._round()
            except TimeoutError:
                log.warning("lease call timed out", extra={"lease": self._settings.name})
            except KubernetesError as error:
                # A conflict with a faster candidate is normal. Another error, such as a missing right, may last for ever.
                level = logging.DEBUG if isinstance(error, ObjectConflict) else logging.WARNING
                log.log(level, "lease not written", extra={"lease": self._settings.name, "cause": str(error)})
            if self.tell():
                await self._record("became leader" if self._led else "stopped leading")
            await asyncio.sleep(self._settings.retry_seconds)

    async def give_back(self) -> None:
        """Give the Lease back if this candidate leads, so that the next leader need not wait. The caller must write no objects afterwards."""
        if not self.leads():
            return
        self.election.gave_back()
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                lease = await self._read()
                if lease is not None and lease.spec.holder_identity == self._identity:
                    await self._write(lease, ElectionStep.RENEW, holder="")
                    log.info("lease given back", extra={"lease": self._settings.name})
                    await self._record("stopped leading")
        except (KubernetesError, TimeoutError):
            log.info("lease not given back, it will end", extra={"lease": self._settings.name})

    async def _round(self) -> None:
        lease = await self._read()
        began = self._clock.now()
        step = self.election.step(None if lease is None else _found(lease), began)
        self.waits = step is ElectionStep.WAIT
        if self.waits:
            return
        if step is not ElectionStep.RENEW or self._owner_uid is None:
            self._owner_uid = await self._owner()
        written = await self._write(lease, step, holder=self._identity)
        self.election.wrote(began)
        self._transitions = written.spec.lease_transitions or 0
        # A new Lease is detected by its uid, and not by the step: if the API server created it but its answer was lost, the
        # next round only renews it.
        if written.metadata.uid != self._lease_uid:
            self._lease_uid = written.metadata.uid
            self.changed.set()

    async def _read(self) -> KubernetesLease | None:
        try:
            return await self._cluster.get(kinds.LEASE, KubernetesLease, self._namespace, self._settings.name)
        except ObjectMissing:
            return None

    async def _owner(self) -> str:
        """Return the uid of the owner; empty if the settings name no owner, or if the API server forbids reading it.

        Raises:
            KubernetesError: The owner does not exist, or the API server did not answer.
        """
        if not (name := self._settings.owner):
            return ""
        try:
            return (await self._cluster.get(kinds.DEPLOYMENT, NamedObject, self._namespace, name)).metadata.uid
        except RequestDenied as error:
            log.warning("lease has no owner and will stay", extra={"owner": name, "cause": str(error)})
            return ""

    async def _write(self, lease: KubernetesLease | None, step: ElectionStep, holder: str) -> KubernetesLease:
        now = self._wall().astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        before = None if lease is None else lease.spec
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._settings.duration_seconds if holder else 1,
            "acquireTime": before.acquire_time if before is not None and step is ElectionStep.RENEW else now,
            "renewTime": now,
            "leaseTransitions": ((before.lease_transitions or 0) if before is not None else 0)
            + (step is ElectionStep.TAKE),
        }
        metadata: dict[str, Any] = {"name": self._settings.name, "namespace": self._namespace}
        if self._owner_uid:
            owner = {"apiVersion": kinds.DEPLOYMENT.api_version, "kind": kinds.DEPLOYMENT.name}
            metadata["ownerReferences"] = [owner | {"name": self._settings.owner, "uid": self._owner_uid}]
        manifest: dict[str, Any] = {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.name,
            "metadata": metadata,
            "spec": spec,
        }
        if lease is None:
            return await self._cluster.create(kinds.LEASE, KubernetesLease, self._namespace, manifest)
        metadata["resourceVersion"] = lease.metadata.resource_version
        return await self._cluster.replace(kinds.LEASE, KubernetesLease, self._namespace, self._settings.name, manifest)

    def tell(self) -> bool:
        """Set `changed` if this candidate has begun to lead; return True if it has begun or stopped leading."""
        leads = self.leads()
        if leads == self._led:
            return False
        log.info("leader election won" if leads else "leader election lost", extra={"identity": self._identity})
        self._led = leads
        if leads:
            self.changed.set()
        return True

    async def _record(self, what: str) -> None:
        """Record a change of leadership as an Event of the Lease (rule 3)."""
        if not self._controller:
            return
        now = self._wall()
        event = KubernetesEvent(reason="LeaderElection", note=f"{self._identity} {what}", generation=self._transitions)
        about = ObjectMetadata(name=self._settings.name, namespace=self._namespace, uid=self._lease_uid)
        manifest = event_manifest(
            event, kinds.LEASE, about, now, controller=self._controller, identity=self._identity, action="Elect"
        )
        try:
            # The time is limited, because a slow server must not delay the next renewal for long.
            async with asyncio.timeout(self._settings.retry_seconds):
                await self._cluster.create(kinds.EVENT, NamedObject, self._namespace, manifest)
        except (KubernetesError, TimeoutError) as error:
            cause = str(error) or "no answer in time"
            log.warning("leader event not written", extra={"lease": self._settings.name, "cause": cause})


def _found(lease: KubernetesLease) -> ObservedLease:
    return ObservedLease(
        holder=lease.spec.holder_identity or "",
        version=lease.metadata.resource_version,
        duration=Nanos((lease.spec.lease_duration_seconds or 1) * SECOND),
    )


def rfc3339(now: datetime) -> str:
    """Return a time as the conditions of Kubernetes objects contain it (RFC 3339), in whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
