"""One worker of the simulated cluster: its engine, what it says to the router, and what it does of what the router says.

Rules:

1. What it says and what it hears takes the way between the two, a message's time each (`fleet.sim.cluster.channels`).
2. What a sequence generates is told with its first token, when it begins another block, and with its end: as the engine tells it.
3. Prefill work ends with a hand-off. Where that goes through the node's store, it has ended when the store has its blocks.
4. What it was told to do for a request that is over meanwhile, it does not do. New work is rejected while it drains, and lost
   between two roles, when routers know it in neither.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

from msgspec import Struct

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
    request_of,
)
from fleet.sim.cluster.channels import Channel
from fleet.sim.cluster.handoffs import Handoffs, params
from fleet.sim.cluster.node_store import AttachedWorker, NodeStore
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.engine.attempts import Job, StepProgress
from fleet.sim.engine.virtual_engine import VirtualEngine
from fleet.sim.kernel import Kernel

MODEL = ModelName("model")
FINGERPRINT = "simulated"
TOKEN = (0,)


class SimulatedPrompt(Protocol):
    """Names of blocks of one request."""

    chain: Sequence[int]  # the prompt's full blocks
    answer_keys: Sequence[int]  # those that the answer fills, as far as they are known


class SimulatedRequests(Protocol):
    """What workers have to know of requests, and tell of them besides."""

    def prompt(self, request_id: RequestId) -> SimulatedPrompt | None:
        """None: it is over."""
        ...

    def loaded(self, request_id: RequestId, tokens: Mapping[str, int]) -> None:
        """So many tokens of its prompt came from a store, by tier."""
        ...


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    """What is around a worker."""

    kernel: Kernel
    message_delay: Nanos
    hear: Callable[[RouterEvent], None]  # the router
    handoffs: Handoffs
    requests: SimulatedRequests
    ended: Callable[[WorkerId], None]  # told of a worker that is to change its role, when some of its work has ended


class _Prefill(Struct, frozen=True):
    """Prefill work that a worker has."""

    prompt_tokens: int
    chain: Sequence[int]
    kv_path: KvPath


class SimulatedWorker:
    """One incarnation, or several that a change of role has made of it."""

    def __init__(
        self,
        around: WorkerEnvironment,
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
        """A worker that is up, and has told nobody.

        Args:
            around: What is around it.
            profile: Of its pool.
            worker_id: Its name; another one comes under it when it is gone.
            node: Where it is.
            role: For now.
            incarnation: A number that no other of this name had.
            since: That it has its GPUs.
            store: Of its node.
            attached_worker: As which that knows it.
        """
        self._requests, self._handoffs, self._ended = around.requests, around.handoffs, around.ended
        self._store, self.attached_worker = store, attached_worker
        self._prefilled: dict[RequestId, _Prefill] = {}  # prefill work that runs here
        self.profile = profile
        self.id = worker_id
        self.node = node
        self.role = role
        self.flips_to: Role | None = None  # once it is idle, and takes no new work until then
        self.away = False  # between two roles
        self.incarnation = incarnation
        self.since = since
        self.until: Nanos | None = None  # that it is gone
        supply = _WorkerBlockSupply(around.handoffs, around.requests, self, store)
        self.engine = VirtualEngine(
            around.kernel,
            profile.times,
            profile.limits,
            tell=self._told,
            cache_changed=self._cache_changed,
            supply=supply,
        )
        self.to_router: Channel[RouterEvent] = Channel(around.kernel, around.message_delay, around.hear)
        self.from_router: Channel[Dispatch | CancelAttempt] = Channel(around.kernel, around.message_delay, self.execute)

    # What it says.

    def announce(self, say: Callable[[RouterEvent], None]) -> None:
        """Say what it is, and what it has."""
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
        say(WorkerJoined(description=description, address=""))
        if names := self.engine.names():
            say(CacheAssumed(worker_id=self.id, stored=names, removed=[]))

    def tell_progress(self) -> None:
        """Say what was generated until now: tokens that would have been sent one by one."""
        self._told(self.engine.progress())

    def _told(self, told: list[StepProgress]) -> None:
        """The engine has made a step."""
        if self._prefilled:
            told = [each for each in told if not self._told_when_saved(each)]
        if told:
            progress = tuple([self._progress(each) for each in told])
            self.to_router.say(WorkerStepped(worker_id=self.id, progress=progress))
        if self.flips_to is not None:
            self._ended(self.id)

    def _told_when_saved(self, told: StepProgress) -> bool:
        """Whether it is told later, since the store has not all of its blocks."""
        prefill, store = self._prefilled.get(told.attempt_id), self._store
        if prefill is None or prefill.kv_path is not KvPath.STORE or store is None:
            return False
        event = WorkerStepped(worker_id=self.id, progress=(self._progress(told),))
        store.when_saved(prefill.chain, partial(self._say_if_there, event))
        return True

    def _say_if_there(self, event: WorkerStepped) -> None:
        if self.until is None:
            self.to_router.say(event)

    def _progress(self, told: StepProgress) -> Progress:
        handoff = None
        if self._prefilled and (prefill := self._prefilled.pop(told.attempt_id, None)) is not None:
            handoff = Handoff(
                kv_path=prefill.kv_path,
                prefill_worker=self.id,
                fingerprint=FINGERPRINT,
                num_tokens=prefill.prompt_tokens - 1,  # one has to be computed for its logits
                params=params(told.attempt_id),
            )
            if self.engine.keeps(told.attempt_id):
                self._handoffs.computed(self.id, told.attempt_id)
        return Progress(
            request_id=told.attempt_id,
            token_ids=TOKEN * told.tokens,
            finish=Finish.LENGTH if told.ended else None,
            kv=None if told.cached_tokens is None else _report(told.cached_tokens),
            handoff=handoff,
        )

    def _cache_changed(self, stored: list[int], removed: list[int]) -> None:
        self.to_router.say(CacheAssumed(worker_id=self.id, stored=stored, removed=removed))
        if stored and self._store is not None and self.attached_worker is not None:
            self._store.save(self.attached_worker, stored)

    # What it does.

    def execute(self, command: Dispatch | CancelAttempt) -> None:
        """What the router said has come."""
        if self.until is not None or self.away:
            return  # routers hear of that by themselves
        if isinstance(command, Dispatch):
            if self.flips_to is None:
                self._start(command.start)
            else:
                self._reject(command.start)
        else:
            self._prefilled.pop(command.request_id, None)
            self.engine.cancel(command.request_id)
            self._handoffs.cancel(command.request_id)
            if self.flips_to is not None:
                self._ended(self.id)

    def _start(self, start: Start) -> None:
        prompt = self._requests.prompt(request_of(start.request_id))
        if prompt is None:
            return  # cancelled meanwhile
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
            self._prefilled[job.attempt_id] = _Prefill(prompt_tokens, prompt.chain, start.kv_path)
        if handoff is not None and direct:
            self._handoffs.take(self.id, job, handoff)
        else:
            self.engine.submit(job)

    def _reject(self, start: Start) -> None:
        rejected = Rejected(request_id=start.request_id, reason=Reason.DRAINING, message="this worker drains")
        self.to_router.say(AttemptRejected(worker_id=self.id, rejected=rejected))

    def give_up_all(self) -> None:
        """Do nothing more of what the router said."""
        for attempt_id in self.engine.forget_all():
            self._handoffs.cancel(attempt_id)
        self._prefilled.clear()
        self.from_router.forget()


class _WorkerBlockSupply:
    """What a worker's engine need not compute: what a prefill worker keeps for it, and what its node's store holds."""

    __slots__ = ("_block_tokens", "_handoffs", "_requests", "_store", "_worker")

    def __init__(
        self, handoffs: Handoffs, requests: SimulatedRequests, worker: SimulatedWorker, store: NodeStore | None
    ):
        self._handoffs, self._requests, self._worker, self._store = handoffs, requests, worker, store
        self._block_tokens = worker.profile.limits.block_tokens

    def offer(self, job: Job, here: int) -> int:
        if job.fetched_tokens and (tokens := self._handoffs.offered(job)):
            return tokens
        attached_worker = self._worker.attached_worker
        if self._store is None or attached_worker is None:
            return 0
        return self._store.offer(attached_worker, self._loadable(job), here) * self._block_tokens

    def fetch(self, job: Job, here: int) -> None:
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

    def _loadable(self, job: Job) -> Sequence[int]:
        """Of a prompt one token has to be computed for its logits."""
        return job.keys[: (job.prompt_tokens - 1) // self._block_tokens]


@lru_cache(4096)
def _report(cached_tokens: int) -> KvReport:
    """The router looks at the number of cached tokens alone."""
    return KvReport(prompt_blocks=0, origins=(), cached_tokens=cached_tokens)
