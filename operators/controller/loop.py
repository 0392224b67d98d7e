"""Controller: reconciles one key. It reads the caches, decides, writes, and enqueues the key again if it has to."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.events import KubernetesEvent
from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.leader import rfc3339
from fleet.net.kubernetes.ports import WallClock
from fleet.net.kubernetes.status_errors import lacks_right
from fleet.net.kubernetes.views import CustomObject, KubernetesLease, ObjectMetadata, Pod
from operators.api.disagg_deployment import DisaggDeploymentSpec, DisaggDeploymentStatus, ScalingMode
from operators.api.fields import Condition
from operators.api.serving_request import ServingRequestSpec
from operators.controller import events, serving_request
from operators.controller.applier import Applier
from operators.controller.control_secrets import ControlSecret, ControlSecrets, UnusableSecret
from operators.controller.gate_keeper import GateKeeper
from operators.controller.group_placer import FailedDomains
from operators.controller.reconcile import reconcile
from operators.controller.renderings import Renderings
from operators.controller.room_reader import RoomReader
from operators.controller.work_queue import IMMEDIATELY
from operators.keys import ReconcileKey, deployment_key
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images
from operators.observed.caches import InformerCaches
from operators.observed.observe import conditions_of, observe, scalers_of
from operators.observed.registrations import SKEW_SECONDS, ReportedWorkers
from operators.observed.state import ApiRefusal, ObservedState
from operators.probes.prober import Prober
from operators.proposals import propose
from operators.status.deployment import PASSING, TRUE, unreadable_conditions, with_obstacle
from operators.status.rate_limiter import StatusRateLimiter
from operators.status.scaler import plan_status, scaler_status
from operators.telemetry import ReconcileOutcome

WRITES_BEFORE_PAUSE = 20
"""After a reconcile that has written something, the key is usually due again at once. After this number of such reconciles
in a row, the key is due only after a second. A possible reason is another program that undoes the operator's writes. The
pause limits how often the two programs write."""

TROUBLE_RECHECK = Nanos(15 * SECOND)
"""The time between two reconciles of a deployment whose pods do not start, or with a worker group that fits into no domain. The deployment
is reconciled without a change, because no watch event tells the controller that a time limit has passed. It is also the time until the
control Secret of a deployment that is not Ready is created again if it is missing."""

TURN_RECHECK = SECOND
"""The time between two reconciles of a deployment with groups that wait for their turn (`operators.controller.gate_keeper`)."""

MOST_AVOIDED = 64
"""The maximum number of nodes that the controller remembers as too full for the groups of one role. Beyond it, the nodes that were
noted first are forgotten."""

DERIVED_CONDITIONS = frozenset({"Available", "Progressing", "RolesRegistered", "Rebalancing"})
"""Types of the conditions that follow from the requested replicas and from Ready. A change of such a condition need not be
written at once. The only exception is the condition Available when it stops being True."""

PROGRESS_REASONS = frozenset({"RolesNotReady", "RollingOut", "Suspending", "RegistrationUnknown", "NotRegistered"})
"""Reasons of the condition Ready that follow one another during a start or a rollout. A change from one of these reasons
to another one need not be written at once."""

NOTHING = Condition(type="Ready", status="Unknown", reason="")
AFTER_LEASE_END = Nanos(SECOND // 10)


class Controller:
    def __init__(
        self,
        store: InformerCaches,
        applier: Applier,
        images: Images,
        clock: Clock,
        wall: WallClock,
        enqueue: Callable[[ReconcileKey, Nanos], None],
        prober: Prober | None = None,
        *,
        secrets: ControlSecrets,
        room: RoomReader,
        plans_obeyed: bool = False,
    ) -> None:
        """Create the controller.

        `enqueue` is called with a key and the delay after which the key is due. If `prober` is None, no probes are sent.
        If `plans_obeyed` is true, a planner writes the statuses of ServingPlans, and the controller does not.
        """
        self._plans_obeyed = plans_obeyed
        self._secrets = secrets
        self._store = store
        self._applier = applier
        self._images = images
        self._clock = clock
        self._wall = wall
        self._enqueue = enqueue
        self._prober = prober
        self._limiter: StatusRateLimiter[ReconcileKey] = StatusRateLimiter()
        self._room = room
        self._gates = GateKeeper()
        self._failed_domains = FailedDomains(clock)
        self._avoided: dict[ReconcileKey, dict[str, tuple[str, ...]]] = {}
        self._sizes: dict[ReconcileKey, tuple[str, Mapping[str, int]]] = {}
        self._renderings = Renderings(images)
        self._write_streaks: dict[ReconcileKey, int] = {}
        self._edits: dict[ReconcileKey, tuple[KubernetesEvent, ...]] = {}

    def edited(self, before: CustomObject, after: CustomObject) -> None:
        """Remember the Kubernetes events about an edit without effect; the next reconcile of the deployment records them."""
        if edit_events := tuple(events.replicas_ignored(before, after)):
            self._edits[deployment_key(after.metadata.namespace, after.metadata.name)] = edit_events

    async def reconcile_key(
        self, key: ReconcileKey, reports: ReportedWorkers | None, served: OptionalKinds, *, afresh: bool = False
    ) -> ReconcileOutcome:
        """Reconcile the object that a key names once; return the outcome.

        Args:
            key: The key.
            reports: Workers that the deployment's routers report, or None if no router has reported.
            served: The optional kinds that the API server has.
            afresh: If true, apply all objects, even those that look unchanged: somebody may have edited them.

        Raises:
            KubernetesError: The API server failed, or another writer changed an object at the same time.
            NotLeading: This process does not hold the Lease, so it must not write.
        """
        if key.kind == kinds.SERVING_REQUEST.name:
            return await self._reconcile_request(key, afresh=afresh)
        custom = self._store.of(kinds.DISAGG_DEPLOYMENT, CustomObject).get(key.namespace, key.name)
        if custom is None or custom.metadata.deleted:
            self._write_streaks.pop(key, None)
            self._edits.pop(key, None)
            self._avoided.pop(key, None)
            self._failed_domains.forget(key)
            self._gates.forget(key)
            self._sizes.pop(key, None)
            self._renderings.forget(key.namespace, key.name)
            self._limiter.rests(key)
            if self._prober is not None:
                self._prober.forget(key)
            await self._write_scaler_status(key, None, None)
            return ReconcileOutcome.SETTLED
        try:
            spec = msgspec.convert(custom.spec, DisaggDeploymentSpec)
        except msgspec.ValidationError as error:
            await self._report_unreadable(key, custom, error)
            return ReconcileOutcome.SETTLED
        try:
            await self._secrets.load()
        # Without a control secret, new pods would accept calls from anybody. So the deployment stays unchanged.
        except UnusableSecret as error:
            await self._report_missing_secret(key, custom, str(error))
            return ReconcileOutcome.REFUSED
        desired = DesiredDeployment(name=key.name, namespace=key.namespace, spec=spec, uid=custom.metadata.uid)
        secret = ControlSecret(self._secrets.of(key.namespace, key.name))
        desired = msgspec.structs.replace(desired, control_secret=secret.name(key.name))
        evidence = None if self._prober is None else self._prober.of(key)
        drift = self._applier.drift
        observed = observe(self._store, custom, spec, reports, self._wall(), served, evidence, drift)
        edited = {key: self._metadata(*key, custom) for key in observed.drifted}
        sizes = {**observed.sizes, **self._last_sizes(key, desired, observed.scalers)}
        observed = msgspec.structs.replace(
            observed, avoided=self._avoided.get(key, {}), failed_domains=self._failed_domains.of(key), sizes=sizes
        )
        observed_afresh = msgspec.structs.replace(observed, afresh=afresh)
        decided = reconcile(desired, observed_afresh, self._images, self._now(), self._renderings)
        if decided.needs_room:
            observed = msgspec.structs.replace(observed, room=await self._room.read())
            observed_afresh = msgspec.structs.replace(observed, afresh=afresh)
            decided = reconcile(desired, observed_afresh, self._images, self._now(), self._renderings)
        room = observed.room
        self._avoid_nodes(key, observed)
        groups = [group for child in observed.children for group in child.gated]
        passed = self._gates.decide(key, groups, self._store.of(kinds.POD, Pod), self._clock.now())
        refusals = await self._applier.perform((*passed, *decided.actions), key.namespace)
        refused = {each.name for each in refusals}
        for placed in decided.placed:
            if placed.name not in refused:
                self._room.promise(key.namespace, placed)
        denied: tuple[ApiRefusal, ...] = ()
        if secret.content and (decided.actions or afresh or not _is_ready(decided.status)):
            # No cache shows whether the Secret exists, so `make_secret` is called whenever something else was written
            # or the deployment is not ready. It can be called last, because pods do not start before the Secret exists.
            denied = await self._applier.make_secret(secret.manifest(desired), again=afresh)
            refusals = (*refusals, *denied)
            # Reconcile again soon: an existing Secret of this name may belong to a deleted deployment. Kubernetes then deletes
            # it soon, and it has to be created again.
            if not _is_ready(decided.status):
                self._enqueue(key, TROUBLE_RECHECK)
        status, wanted = decided.status, decided.wanted
        if passed or decided.actions or denied:  # the writes may have changed whether the deployment is Ready
            observed = observe(self._store, custom, spec, reports, self._wall(), served, evidence)
            observed = msgspec.structs.replace(observed, refusals=refusals, room=room, sizes=sizes)
            after = reconcile(desired, observed, self._images, self._now(), self._renderings)
            status, wanted = after.status, after.wanted
        if self._prober is not None:
            self._prober.want(key, wanted)
        await self._write_status(key, kinds.DISAGG_DEPLOYMENT, custom, status)
        await self._write_scaler_status(key, desired, status)
        acted = len(passed) + len(decided.actions) > len(refusals) - len(denied)
        happened = [
            *self._edits.pop(key, ()),
            *(
                events.restored(kind, name, was.ownership.managers, custom.metadata.generation)
                for (kind, name), was in sorted(edited.items())
                if self._metadata(kind, name, custom).ownership.ours != was.ownership.ours
            ),
        ]
        if not refusals:
            happened += events.steps((*passed, *decided.actions), custom.metadata.generation)
        await self._applier.record(kinds.DISAGG_DEPLOYMENT, custom, happened, self._wall())
        self._schedule_next(key, acted and not afresh, troubled=bool(observed.troubles) or decided.unfit)
        return ReconcileOutcome.REFUSED if refusals else ReconcileOutcome.ACTED if acted else ReconcileOutcome.SETTLED

    def _last_sizes(
        self, key: ReconcileKey, desired: DesiredDeployment, scalers: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the number of replicas that the RoleScaler of each role requested last, by role; Static roles have none.

        This process remembers these numbers, even after a RoleScaler was deleted. The numbers may be newer than the
        numbers in the deployment's status, which is written later.
        """
        uid, before = self._sizes.get(key, ("", {}))
        now = {**(before if uid == desired.uid else {}), **scalers}
        roles = {role.name for role in desired.spec.roles if role.scaling.mode is not ScalingMode.STATIC}
        sizes = {role: size for role, size in now.items() if role in roles}
        self._sizes[key] = (desired.uid, sizes)
        return sizes

    def _avoid_nodes(self, key: ReconcileKey, observed: ObservedState) -> None:
        """Remember the nodes on which only a part of a group found room, so that the next group of the role avoids them.

        Also remember the domain that was chosen for the group. If no pod of the group found a node, the avoided nodes may
        be the obstacle, so forget the nodes that the role has avoided so far.
        """
        for child in observed.children:
            for name in child.half_scheduled[-1:]:
                if domain := child.placements[name].domain:
                    self._failed_domains.add(key, child.role, domain)
                avoided = self._avoided.setdefault(key, {})
                nodes = (*avoided.get(child.role, ()), *child.nodes[name]) if child.nodes[name] else ()
                avoided[child.role] = tuple(dict.fromkeys(nodes))[-MOST_AVOIDED:]

    def _metadata(self, kind: str, name: str, custom: CustomObject) -> ObjectMetadata:
        found = self._store.any(kinds.BY_NAME[kind]).get(custom.metadata.namespace, name)
        return found.metadata if found is not None else ObjectMetadata(name=name)

    async def _reconcile_request(self, key: ReconcileKey, *, afresh: bool) -> ReconcileOutcome:
        custom = self._store.of(kinds.SERVING_REQUEST, CustomObject).get(key.namespace, key.name)
        if custom is None or custom.metadata.deleted:
            return ReconcileOutcome.SETTLED
        try:
            asked = msgspec.convert(custom.spec, ServingRequestSpec)
        except msgspec.ValidationError as error:
            said = serving_request.unreadable_status(custom, _faulty_field(error), self._now())
            await self._write_status(key, kinds.SERVING_REQUEST, custom, said)
            return ReconcileOutcome.SETTLED
        deployments, reply = self._store.of(kinds.DISAGG_DEPLOYMENT, CustomObject), propose(asked)
        there = deployments.get(key.namespace, key.name)
        actions = serving_request.actions(custom, asked, reply, there, afresh=afresh)
        refusals = await self._applier.perform(actions, key.namespace)
        # The results of the operator's own writes are in the cache already, so no watch event enqueues the deployment.
        if actions and not refusals:
            self._enqueue(deployment_key(key.namespace, key.name), IMMEDIATELY)
        there = deployments.get(key.namespace, key.name)
        said = serving_request.status(custom, asked, reply, there, refusals, self._now())
        await self._write_status(key, kinds.SERVING_REQUEST, custom, said)
        return ReconcileOutcome.REFUSED if refusals else ReconcileOutcome.ACTED if actions else ReconcileOutcome.SETTLED

    async def _write_scaler_status(
        self, key: ReconcileKey, desired: DesiredDeployment | None, status: DisaggDeploymentStatus | None
    ) -> None:
        """Write the status of a deployment's RoleScalers, and of its ServingPlans if no planner writes those.

        The deployment itself need not exist.
        """
        now = self._now()
        for role, scaler in scalers_of(self._store, key.namespace, key.name).items():
            said = scaler_status(
                scaler.status,
                conditions_of(scaler),
                scaler.metadata.generation,
                scaler.spec.get("replicas", 1),
                role,
                desired,
                status,
                now,
            )
            await self._write_status(key, kinds.ROLE_SCALER, scaler, said)
        if self._plans_obeyed:
            return
        for plan in self._store.of(kinds.SERVING_PLAN, CustomObject).of(key.namespace, key.name).values():
            planned = plan_status(conditions_of(plan), plan.metadata.generation, desired is not None, now)
            await self._write_status(key, kinds.SERVING_PLAN, plan, planned)

    async def _report_unreadable(self, key: ReconcileKey, custom: CustomObject, error: msgspec.ValidationError) -> None:
        conditions = unreadable_conditions(
            conditions_of(custom), custom.metadata.generation, _faulty_field(error), self._now()
        )
        said = DisaggDeploymentStatus(observed_generation=custom.metadata.generation, conditions=conditions)
        await self._write_status(key, kinds.DISAGG_DEPLOYMENT, custom, said)
        await self._write_scaler_status(key, None, None)

    async def _report_missing_secret(self, key: ReconcileKey, custom: CustomObject, problem: str) -> None:
        """Report in the conditions that the deployment has no control secret.

        The other fields of the status stay as they are.
        """
        generation = custom.metadata.generation
        try:
            before = msgspec.convert(custom.status, DisaggDeploymentStatus)
        except msgspec.ValidationError:
            before = DisaggDeploymentStatus(observed_generation=generation)
        conditions = with_obstacle(conditions_of(custom), generation, problem, self._now())
        said = msgspec.structs.replace(before, observed_generation=generation, conditions=conditions)
        await self._write_status(key, kinds.DISAGG_DEPLOYMENT, custom, said)

    async def _write_status(self, key: ReconcileKey, kind: ApiKind, custom: CustomObject, said: Any) -> None:
        """Write the status `said` if `custom` has another status and `operators.status.rate_limiter` allows it now.

        If it may be written only later, enqueue `key` for that time.
        """
        try:
            there = _sorted(msgspec.convert(custom.status, type(said)))
        except msgspec.ValidationError:
            there = None
        written, here = ReconcileKey(kind.name, custom.metadata.namespace, custom.metadata.name), _sorted(said)
        if there == here:
            self._limiter.rests(written)
            return
        now = self._clock.now()
        due = self._limiter.due(written, now, urgent=_urgent(there, here), brief=_brief(there, here))
        if due > now:
            self._enqueue(key, Nanos(due - now))
            return
        before = conditions_of(custom)
        content = {name: value for name, value in msgspec.to_builtins(said).items() if value != ""}
        await self._applier.write_status(kind, custom, content)
        self._limiter.wrote(written, now)
        await self._applier.record(kind, custom, tuple(events.turns(before, said.conditions)), self._wall())
        if kind == kinds.DISAGG_DEPLOYMENT and self._store.any(kinds.SERVING_REQUEST).get(key.namespace, key.name):
            # The status of the ServingRequest depends on the written status, and the operator's own writes enqueue no key.
            self._enqueue(ReconcileKey(kinds.SERVING_REQUEST.name, key.namespace, key.name), IMMEDIATELY)

    def _schedule_next(self, key: ReconcileKey, acted: bool, *, troubled: bool) -> None:
        if acted:
            self._write_streaks[key] = self._write_streaks.get(key, 0) + 1
            self._enqueue(key, IMMEDIATELY if self._write_streaks[key] < WRITES_BEFORE_PAUSE else SECOND)
            return
        self._write_streaks.pop(key, None)
        if troubled:
            self._enqueue(key, TROUBLE_RECHECK)
        if self._gates.waits(key):
            self._enqueue(key, TURN_RECHECK)
        now = self._wall()
        ends = [
            each.renewed + timedelta(seconds=(each.spec.lease_duration_seconds or 0) + SKEW_SECONDS) - now
            for each in self._store.of(kinds.LEASE, KubernetesLease).of(key.namespace, key.name).values()
            if each.spec.holder_identity
        ]
        if upcoming := [each for each in ends if each > timedelta(0)]:
            self._enqueue(key, Nanos(int(min(upcoming).total_seconds() * SECOND) + AFTER_LEASE_END))

    def _now(self) -> str:
        return rfc3339(self._wall())


def _sorted(status: Any) -> Any:
    """Return the status with its lists sorted.

    The API server keeps the order in which the items of a list were first written, so unsorted lists would look changed
    after every write.
    """
    lists = {name: value for name in status.__struct_fields__ if isinstance(value := getattr(status, name), tuple)}
    ordered = {name: tuple(sorted(value, key=msgspec.json.encode)) for name, value in lists.items()}
    return msgspec.structs.replace(status, **ordered)


def _urgent(there: Any, said: Any) -> bool:
    """Return whether the status `said` should be written at once.

    It can wait if it only shows the progress of a start or a rollout, for the same specification as the last status.
    """
    if there is None or there.observed_generation != said.observed_generation:
        return True
    if isinstance(said, DisaggDeploymentStatus):
        return _reports(said) != _reports(there) or _lost(there, said)
    return True


def _lost(there: DisaggDeploymentStatus, said: DisaggDeploymentStatus) -> bool:
    """Return whether a deployment was Available in the last written status `there`, and is not Available in `said`."""
    was, now = _condition(there, "Available"), _condition(said, "Available")
    return was.status == TRUE != now.status


def _brief(there: Any, said: Any) -> bool:
    """Return whether a new status shows a state that usually lasts only a moment, so that writing it can wait."""
    if there is None or not isinstance(said, DisaggDeploymentStatus):
        return False
    # A restarted API server refuses all requests until it has read the Roles, usually for a moment. So such a refusal can wait.
    if lacks_right(_condition(said, "Ready").message):
        return not lacks_right(_condition(there, "Ready").message)
    return (
        there.observed_generation == said.observed_generation
        and _condition(said, "Ready").reason in PASSING
        and _condition(there, "Ready").status != TRUE
        and not _lost(there, said)
    )


def _condition(status: DisaggDeploymentStatus, kind: str) -> Condition:
    return next((each for each in status.conditions if each.type == kind), NOTHING)


def _reports(status: DisaggDeploymentStatus) -> tuple[list[tuple[str, int]], list[tuple[str, str, str]]]:
    return [(each.name, each.desired) for each in status.roles], _stable_turns(status.conditions)


def _stable_turns(conditions: Sequence[Condition]) -> list[tuple[str, str, str]]:
    """Return type, status and reason of each condition whose type is not in DERIVED_CONDITIONS.

    A reason in PROGRESS_REASONS is replaced by an empty text.
    """
    return [
        (each.type, each.status, "" if each.reason in PROGRESS_REASONS else each.reason)
        for each in conditions
        if each.type not in DERIVED_CONDITIONS
    ]


def _faulty_field(error: msgspec.ValidationError) -> str:
    """Return the path of the invalid field, and what is wrong with it.

    The result never contains the value of the field.
    """
    cause, _, path = str(error).partition(" - at `$")
    if cause.startswith("Invalid enum value"):
        cause = "Invalid enum value"
    return f"spec{path.rstrip('`')}: {cause}"


def _is_ready(status: DisaggDeploymentStatus) -> bool:
    return _condition(status, "Ready").status == TRUE
