"""Placer: places live requests, with the bindings of sessions and the measured times of handoffs.

Rules:

1. The settings decide whether the worker of a session's last request is preferred, required or ignored. If this worker is required and is
   gone, the request is rejected and the session is forgotten, so its next request may go to any worker.
2. The first placement has to satisfy the client's demands. After a failed attempt, and for a resumed answer, a pin, a KV path and a
   demanded pair are dropped if no worker satisfies them, because any answer is better than none.
3. The measured prefill break-even is used if the settings enable it. For external requests it is used only when enough
   was measured with other requests, because the timing of external requests is never measured
   (`fleet.router.placement.break_even`, rule 3).
"""

from collections.abc import Iterable

from msgspec import structs

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Placement
from fleet.core.work import WorkerDescription
from fleet.router.placement.break_even import PrefillBreakEven
from fleet.router.placement.candidate_table import CandidateTable
from fleet.router.placement.decision import Decision, decide, decide_decode
from fleet.router.placement.wait_or_reject import Rejection, RejectionCause, WaitForRoom
from fleet.router.policy import PlacementPolicy, PlacementRequest, RandomSource
from fleet.router.sessions import SessionTable
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.snapshot import BreakEvenSnapshot, RemotePrefillSnapshot


class Placer:
    """Chooses the workers of the live requests of one router."""

    def __init__(self, settings: RouterSettings, policy: PlacementPolicy, rng: RandomSource) -> None:
        self.settings = settings
        self._policy = policy
        self._rng = rng
        self.sessions = SessionTable(
            settings.session_ttl_seconds, settings.max_sessions, telling=bool(settings.replicas_listen)
        )
        self._break_even = PrefillBreakEven()

    def choose(
        self, live: LiveRequest, candidate_table: CandidateTable, now: Nanos
    ) -> Decision | WaitForRoom | Rejection:
        """Choose the workers of a request, for its first or a later placement (rules 1 to 3).

        A caller that carries out the decision has to call `taken`.
        """
        settings, break_even = self.settings, self._break_even
        placement_request = self.with_session(live, now)
        counts = settings.learn_remote_prefill and (break_even.measured or not live.arrived.external)
        learned = break_even if counts else None
        outcome = decide(placement_request, candidate_table, self._policy, settings, self._rng, learned)
        if isinstance(outcome, Rejection) and (live.failures or live.arrived.answered or live.arrived.fingerprint):
            # Drop the client's demands (rule 2).
            anyhow = Placement.AGGREGATED if placement_request.continues else Placement.AUTO
            free = structs.replace(placement_request, placement=anyhow, kv_path=None, pin=None)
            relaxed = decide(free, candidate_table, self._policy, settings, self._rng, learned)
            if not isinstance(relaxed, Rejection):
                outcome = relaxed
            elif live.failures:
                message = f"the worker was lost; {relaxed.message}"
                outcome = structs.replace(relaxed, reason=Reason.WORKER_LOST, message=message, field="")
        if isinstance(outcome, Rejection) and outcome.cause is RejectionCause.SESSION_LOST:
            self.sessions.forget(live.session_key, now)
        return outcome

    def choose_decode(
        self,
        live: LiveRequest,
        candidate_table: CandidateTable,
        prefill: WorkerDescription,
        kv_path: KvPath,
        now: Nanos,
    ) -> WorkerId | None:
        """Return another decode worker that can fetch, by `kv_path`, what `prefill` has computed; None if there is no such worker."""
        return decide_decode(
            prefill, kv_path, live.placement_request(now), candidate_table, self._policy, self.settings, self._rng
        )

    def taken(self, live: LiveRequest, decision: Decision, now: Nanos) -> None:
        """Bind the session of a request, if it has one, to the decode worker of a decision, unless the settings ignore sessions."""
        if live.arrived.session and self.settings.session_affinity != "off":
            self.sessions.bind(live.session_key, decision.decode, now)

    def handed_over(self, live: LiveRequest, now: Nanos) -> None:
        """Learn the duration of a handoff, unless the request is external. The caller calls this at the decode worker's first token."""
        if not live.arrived.external:
            self._break_even.handed_over(Nanos(now - live.handed_over_at))

    def remote_prefill(self, paces: Iterable[tuple[WorkerId, int, float]]) -> RemotePrefillSnapshot:
        """Return what was measured about remote prefill. The router measures it even if the setting `learn_remote_prefill` is off.

        Args:
            paces: For each answering worker its id, its number of requests and its seconds per prompt token.
        """
        break_even = self._break_even
        return RemotePrefillSnapshot(
            learned=self.settings.learn_remote_prefill,
            handoffs=break_even.samples,
            handoff_seconds=break_even.handoff_seconds,
            workers=tuple(
                BreakEvenSnapshot(
                    worker_id=worker_id,
                    requests=requests,
                    token_seconds=seconds,
                    min_tokens=break_even.even_tokens(seconds, requests),
                )
                for worker_id, requests, seconds in paces
            ),
        )

    def with_session(self, live: LiveRequest, now: Nanos) -> PlacementRequest:
        """Return what placement has to know of a request, with the worker of its session (rule 1)."""
        affinity = self.settings.session_affinity
        if affinity == "off" or not live.arrived.session:
            return live.placement_request(now)
        bound = self.sessions.bound(live.session_key, now)
        return live.placement_request(now, bound=bound, must_keep=affinity == "hard" and bound is not None)
