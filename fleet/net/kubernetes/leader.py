"""Lease leader: reads and writes the Lease as `fleet.net.kubernetes.election` decides.

Rules:

1. The Lease belongs to the candidate's Deployment, if one is named, so that garbage collection removes it with the
   Deployment, in whatever order the two are deleted, and also if a terminating pod has just created it again. Every
   write repeats the owner, so that a Lease of an older operator or of a recreated Deployment gets the right owner too.
2. Nobody leads if that Deployment does not exist, because objects written then would stay for ever.
3. `renewTime` is for people. No clock is compared with it (`fleet.net.kubernetes.election`, rule 1).
"""

import asyncio
import logging
from datetime import UTC, datetime
from typing import Annotated, Any, Never

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.election import Election, ElectionStep, ObservedLease
from fleet.net.kubernetes.ports import (
    KubernetesApi,
    KubernetesError,
    ObjectConflict,
    ObjectMissing,
    RequestDenied,
    WallClock,
)
from fleet.net.kubernetes.views import KubernetesLease, NamedObject

log = logging.getLogger(__name__)

GIVE_BACK_SECONDS = 5.0

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class LeaseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the Lease that elects the acting operator. The defaults are those of Kubernetes' own controllers."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet-operator"

    namespace: str = ""
    """The namespace of the Lease; empty: the pod's namespace."""

    owner: Annotated[str, Meta(max_length=253)] = ""
    """The Deployment in that namespace to which the operator's pods belong: the Lease is removed with it. Empty: the Lease
    stays."""

    duration_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15
    """How long the others wait for a leader that does not renew any more."""

    renew_within_seconds: Seconds = 10.0
    """A leader that could not renew for this time stops acting."""

    retry_seconds: Seconds = 2.0
    """The time between two renewals, and between two checks of a standby."""

    def __post_init__(self) -> None:
        if not self.retry_seconds < self.renew_within_seconds < self.duration_seconds:
            raise ValueError(
                "retry_seconds: must be shorter than renew_within_seconds, which must be shorter than duration_seconds"
            )


class LeaseLeader:
    """One candidate for one Lease."""

    def __init__(
        self,
        cluster: KubernetesApi,
        settings: LeaseSettings,
        namespace: str,
        identity: str,
        clock: Clock,
        wall: WallClock,
    ) -> None:
        self.changed = asyncio.Event()
        """Set when it begins to act, and when the Lease that it wrote is another object than before, because objects owned by
        the former Lease go with that. The waiting task clears it."""

        self.waits = False
        """True if another candidate held the Lease when it was last read."""

        self._cluster = cluster
        self._settings = settings
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._wall = wall
        self.election = Election(identity, Nanos(int(settings.renew_within_seconds * SECOND)))
        self._owner_uid: str | None = None
        self._lease_uid = ""  # of the Lease that this candidate wrote last
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
                # A faster candidate is normal; another error may last for ever, such as a missing right.
                level = logging.DEBUG if isinstance(error, ObjectConflict) else logging.WARNING
                log.log(level, "lease not written", extra={"lease": self._settings.name, "cause": str(error)})
            self.tell()
            await asyncio.sleep(self._settings.retry_seconds)

    async def give_back(self) -> None:
        """Give the Lease back, so that the next leader need not wait. Nothing may be written afterwards."""
        if not self.leads():
            return
        self.election.gave_back()
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                lease = await self._read()
                if lease is not None and lease.spec.holder_identity == self._identity:
                    await self._write(lease, ElectionStep.RENEW, holder="")
                    log.info("lease given back", extra={"lease": self._settings.name})
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
        # A new Lease is detected by its uid. If the answer to its creation was lost, this step is only a renewal.
        if written.metadata.uid != self._lease_uid:
            self._lease_uid = written.metadata.uid
            self.changed.set()

    async def _read(self) -> KubernetesLease | None:
        try:
            return await self._cluster.get(kinds.LEASE, KubernetesLease, self._namespace, self._settings.name)
        except ObjectMissing:
            return None

    async def _owner(self) -> str:
        """Return the owner's uid; empty if none is named, or if reading it is forbidden."""
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

    def tell(self) -> None:
        leads = self.leads()
        if leads != self._led:
            log.info("leader election won" if leads else "leader election lost", extra={"identity": self._identity})
            self._led = leads
            if leads:
                self.changed.set()


def _found(lease: KubernetesLease) -> ObservedLease:
    return ObservedLease(
        holder=lease.spec.holder_identity or "",
        version=lease.metadata.resource_version,
        duration=Nanos((lease.spec.lease_duration_seconds or 1) * SECOND),
    )


def rfc3339(now: datetime) -> str:
    """Return a time as conditions spell it, in whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
