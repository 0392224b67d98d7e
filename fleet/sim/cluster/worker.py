"""Simulated worker: runs a virtual engine, sends events to the router, and executes the router's commands.

Rules:

1. Events and commands travel through channels (`fleet.sim.cluster.channels`) and take a message delay each.
2. The worker sends progress as the engine reports it: with the first token, when an answer begins a new block, and at its end.
3. A prefill ends with a handoff. If the handoff goes through the node's store, the prefill ends when the blocks have been saved there, or
   when the store has died.
4. A worker ignores an attempt whose request is over, and rejects new attempts while it drains. To change its role, a worker leaves after
   its drain and joins again. In between, it is not registered, and commands that arrive are lost.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

from msgspec import Struct

from fleet.batching.attempts import Job
from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, KvReport
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import Handoff, Progress, Rejected, Start, WorkerDescription
from fleet.router.messages import (
    AttemptRejected,
    CacheAssumed,
    CancelAttempt,
    Dispatch,
    RouterEvent,
    WorkerJoined,
    WorkerStepped,
)
from fleet.router.state.live_requests import request_of
from fleet.sim.cluster.channels import Channel
from fleet.sim.cluster.handoffs import Handoffs, handoff_params
from fleet.sim.cluster.node_store import AttachedWorker, NodeStore
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_engine import StepProgress, VirtualEngine

MODEL = ModelName("model")
FINGERPRINT = "simulated"
TOKEN = (0,)


class SimulatedPrompt(Protocol):
    """Names of the blocks of one request's prompt and answer."""

    chain: Sequence[int]  # block names of the prompt's full blocks
    answer_keys: Sequence[int]  # names of the blocks that the answer will fill; empty: its blocks get no names


class SimulatedRequests(Protocol):
    """Port by which workers read block names of the world's requests, and note the tokens that were loaded from stores."""

    def prompt(self, request_id: RequestId) -> SimulatedPrompt | None:
        """Return the block names of a request, or None if it is over."""
        ...

    def loaded(self, request_id: RequestId, tokens: Mapping[str, int]) -> None:
        """Note how many prompt tokens of a request were loaded from each tier of a store."""
        ...


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    """Objects and callbacks that the workers of a cluster share."""

    kernel: Kernel
    message_delay: Nanos
    to_router: Callable[[RouterEvent], None]
    handoffs: Handoffs
    requests: SimulatedRequests
    # called with the id of a draining worker whenever attempts on this worker may have ended
    attempts_ended: Callable[[WorkerId], None]


class _Prefill(Struct, frozen=True):
    """Data of a running prefill attempt from which the handoff is made at the end of the attempt."""

    prompt_tokens: int
    chain: Sequence[int]
    kv_path: KvPath


class SimulatedWorker:
    """Simulates one worker from its start until it dies or leaves for good. After a change of its role, the object is the same."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        profile: PoolProfile,
        worker_id: WorkerId,
        node: StoreId,
        *,
        role: Role,
        incarnation: int,
        since: Nanos,
        store: NodeStore | None,
        attached_worker: AttachedWorker | None,
    ):
        """Create a running worker that is not announced to the router yet. The worker has occupied its GPUs since the instant `since`."""
        self._requests, self._handoffs = environment.requests, environment.handoffs
        self._attempts_ended = environment.attempts_ended
        self._store, self.attached_worker = store, attached_worker
        self._prefills: dict[RequestId, _Prefill] = {}
        self.profile = profile
        self.id = worker_id
        self.node = node
        self.role = role
        self.flips_to: Role | None = None  # the role that the worker takes when it is idle; None: no change is planned
        self.away = False  # True after the worker has left to change its role, until it joins again
        self.leaves = False  # True: the worker drains, and leaves for good when it is idle
        self.incarnation = incarnation
        self.since = since
        self.until: Nanos | None = None  # instant at which the worker died or left; None: it is up
        supply = _WorkerBlockSupply(environment.handoffs, environment.requests, self, store)
        self.engine = VirtualEngine(
            environment.kernel,
            profile.times,
            profile.limits,
            report=self._report,
            cache_changed=self._cache_changed,
            supply=supply,
        )
        kernel, delay = environment.kernel, environment.message_delay
        self.to_router: Channel[RouterEvent] = Channel(kernel, delay, environment.to_router)
        self.from_router: Channel[Dispatch | CancelAttempt] = Channel(kernel, delay, self.execute)

    @property
    def draining(self) -> bool:
        """True if the worker takes no new attempts, because it leaves or changes its role."""
        return self.leaves or self.flips_to is not None

    # Events to the router.

    def announce(self, send: Callable[[RouterEvent], None]) -> None:
        """Send the description of the worker, and then the names of the blocks in its cache, by the function `send`."""
        profile, limits = self.profile, self.profile.limits
        description = WorkerDescription(
            worker_id=self.id,
            incarnation=Incarnation(str(self.incarnation)),
            model=MODEL,
            role=self.role,
            block_tokens=limits.block_tokens,
            max_model_len=(limits.kv_blocks - 1) * limits.block_tokens,
            kv_blocks=limits.kv_blocks,
            max_running=limits.max_running,
            fingerprint=FINGERPRINT,
            kv_paths=(KvPath.DIRECT,) if self._store is None else (KvPath.STORE, KvPath.DIRECT),
            store_id=None if self._store is None else self.node,
            engine="simulated",
            prefill_speed=profile.prefill_speed,
            decode_speed=profile.decode_speed,
        )
        send(WorkerJoined(description=description, address=""))
        if names := self.engine.names():
            send(CacheAssumed(worker_id=self.id, stored=names, removed=[]))

    def report_progress(self) -> None:
        """Send the progress that the engine has made and not reported yet.

        The cluster calls this before a fault, because a real worker would have sent these tokens already.
        """
        self._report(self.engine.progress())

    def _report(self, reports: list[StepProgress]) -> None:
        """Send the progress that the engine reports, except for prefills whose blocks must be saved to the store first."""
        if self._prefills:
            reports = [each for each in reports if not self._reported_when_saved(each)]
        if reports:
            progress = tuple([self._progress(each) for each in reports])
            self.to_router.send(WorkerStepped(worker_id=self.id, progress=progress))
        if self.draining:
            self._attempts_ended(self.id)

    def _reported_when_saved(self, report: StepProgress) -> bool:
        """Return True if a report has to wait, because it ends a prefill whose blocks go through the store.

        The report is then sent when the blocks have been saved, or when the store has died.
        """
        prefill, store = self._prefills.get(report.attempt_id), self._store
        if prefill is None or prefill.kv_path is not KvPath.STORE or store is None:
            return False
        event = WorkerStepped(worker_id=self.id, progress=(self._progress(report),))
        store.when_saved(prefill.chain, partial(self._send_if_up, event))
        return True

    def _send_if_up(self, event: WorkerStepped) -> None:
        if self.until is None:
            self.to_router.send(event)

    def _progress(self, report: StepProgress) -> Progress:
        handoff = None
        if self._prefills and (prefill := self._prefills.pop(report.attempt_id, None)) is not None:
            handoff = Handoff(
                kv_path=prefill.kv_path,
                prefill_worker=self.id,
                fingerprint=FINGERPRINT,
                # minus 1: the decode engine computes the last prompt token anyway, because the logits of this token are needed
                num_tokens=prefill.prompt_tokens - 1,
                params=handoff_params(report.attempt_id),
            )
            if self.engine.keeps(report.attempt_id):
                self._handoffs.computed(self.id, report.attempt_id)
        return Progress(
            request_id=report.attempt_id,
            token_ids=TOKEN * report.tokens,
            finish=Finish.LENGTH if report.ended else None,
            kv=None if report.cached_tokens is None else _kv_report(report.cached_tokens),
            handoff=handoff,
        )

    def _cache_changed(self, stored: list[int], removed: list[int]) -> None:
        self.to_router.send(CacheAssumed(worker_id=self.id, stored=stored, removed=removed))
        if stored and self._store is not None and self.attached_worker is not None:
            self._store.save(self.attached_worker, stored)

    # Commands from the router.

    def execute(self, command: Dispatch | CancelAttempt) -> None:
        """Execute a command that has arrived. Ignore it if the worker is dead, or has left and will join again in another role."""
        if self.until is not None or self.away:
            return
        if isinstance(command, Dispatch):
            if self.draining:
                self._reject(command.start)
            else:
                self._start(command.start)
        else:
            self._prefills.pop(command.request_id, None)
            self.engine.cancel(command.request_id)
            self._handoffs.cancel(command.request_id)
            if self.draining:
                self._attempts_ended(self.id)

    def _start(self, start: Start) -> None:
        prompt = self._requests.prompt(request_of(start.request_id))
        if prompt is None:
            return  # the request ended while the command was under way
        prompt_tokens, handoff, prefills = len(start.tokens) // TOKEN_BYTES, start.handoff, start.phase is Phase.PREFILL
        direct = handoff is not None and handoff.kv_path is KvPath.DIRECT
        job = Job(
            attempt_id=start.request_id,
            prompt_tokens=prompt_tokens,
            answer_tokens=start.sampling.max_tokens,
            keys=prompt.chain,
            answer_keys=() if prefills else prompt.answer_keys,
            fetched_tokens=min(handoff.num_tokens, prompt_tokens - 1) if handoff is not None and direct else 0,
            handed_off=prefills and start.kv_path is KvPath.DIRECT,
        )
        if prefills:
            assert start.kv_path is not None
            self._prefills[job.attempt_id] = _Prefill(prompt_tokens, prompt.chain, start.kv_path)
        if handoff is not None and direct:
            self._handoffs.take(self.id, job, handoff)
        else:
            self.engine.submit(job)

    def _reject(self, start: Start) -> None:
        rejected = Rejected(request_id=start.request_id, reason=Reason.DRAINING, message="this worker drains")
        self.to_router.send(AttemptRejected(worker_id=self.id, rejected=rejected))

    def drop_all(self) -> None:
        """Drop all attempts, and all commands that were held back by a cut."""
        for attempt_id in self.engine.forget_all():
            self._handoffs.cancel(attempt_id)
        self._prefills.clear()
        self.from_router.drop_held()


class _WorkerBlockSupply:
    """Fetches prompt blocks for a worker's engine: from a prefill worker that keeps them, or else from the node's store."""

    __slots__ = ("_block_tokens", "_handoffs", "_requests", "_store", "_worker")

    def __init__(
        self, handoffs: Handoffs, requests: SimulatedRequests, worker: SimulatedWorker, store: NodeStore | None
    ):
        self._handoffs, self._requests, self._worker, self._store = handoffs, requests, worker, store
        self._block_tokens = worker.profile.limits.block_tokens

    def offer(self, job: Job[int], here: int) -> int:
        if job.fetched_tokens and (tokens := self._handoffs.offered(job)):
            return tokens
        attached_worker = self._worker.attached_worker
        if self._store is None or attached_worker is None:
            return 0
        return self._store.offer(attached_worker, self._loadable(job), here) * self._block_tokens

    def fetch(self, job: Job[int], here: int) -> None:
        if job.fetched_tokens and self._handoffs.offered(job):
            self._handoffs.fetch(job, here)
            return
        engine, requests, attached_worker = self._worker.engine, self._requests, self._worker.attached_worker
        assert self._store is not None
        assert attached_worker is not None

        def ended(tokens: Mapping[str, int] | None) -> None:
            if tokens is None:
                engine.not_fetched(job.attempt_id)
            else:
                requests.loaded(request_of(job.attempt_id), tokens)
                engine.fetched(job.attempt_id)

        self._store.load(attached_worker, self._loadable(job), here, ended)

    def _loadable(self, job: Job[int]) -> Sequence[int]:
        """Return the names of the full blocks before the last prompt token. The engine must compute this token for its logits."""
        return job.keys[: (job.prompt_tokens - 1) // self._block_tokens]


@lru_cache(4096)
def _kv_report(cached_tokens: int) -> KvReport:
    """Return a KV report that states only the cached tokens, because nothing in a simulation reads its other fields."""
    return KvReport(prompt_blocks=0, origins=(), cached_tokens=cached_tokens)
