"""A cluster in virtual time: the router's machine that runs in production, on simulated engines, links and clients.

Rules:

1. Every decision is `fleet.router.machine`'s. The world tells it what a router would hear (arrivals, steps, caches, workers that
   come and go), each a message later than it happened, and does what it commands, a message later too.
2. What a sequence generates is told with its first token, each `TOLD_EVERY` tokens, and with its end, not step by step: the instants
   of first tokens and ends are exact, and the router sees answers grow, in coarser steps than in production.
3. A worker that is lost takes its sequences, its cache and its transfers with it. What it told before arrives.
4. The digest is over every request's end, in order: two runs are the same if, and as far as anybody can tell only if, it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any, Self, assert_never

from msgspec import Struct

from fleet.clock import Nanos
from fleet.ids import Incarnation, ModelName, RequestId, WorkerId
from fleet.requests import Finish, KvReport, Sampling
from fleet.roles import KvPath, Phase, Role
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    CacheAssumed,
    CacheDrifts,
    Cancelled,
    CancelWork,
    Complete,
    Dispatch,
    Emit,
    Refuse,
    RouterEvent,
    Stepped,
    Ticked,
    WorkerJoined,
    WorkerLeft,
)
from fleet.router.policies.ports import Policy
from fleet.router.settings import RouterSettings
from fleet.sim.engine import EngineLimits, Job, SimulatedEngine, StepTimes, Told
from fleet.sim.kernel import Event, Kernel
from fleet.sim.network import Network
from fleet.sim.results import Ended, Timeline
from fleet.work import Description, Handoff, Progress, Start
from kvstore.replay import Request

MODEL = ModelName("model")
FINGERPRINT = "simulated"
TOKEN = (0,)


class PoolProfile(Struct, frozen=True, kw_only=True):
    """Workers that are alike: what the simulation has to know of their hardware, model and engine."""

    name: str
    role: Role
    workers: int
    times: StepTimes
    limits: EngineLimits
    gpus: int  # of one worker
    dollars_per_hour: float  # of one GPU
    busy_watts: float  # of one GPU
    idle_watts: float
    kv_bytes_per_token: float  # of one worker
    bandwidth: float  # bytes a second that a worker sends to others, and gets
    link_latency: Nanos
    start_time: Nanos  # from asking for a worker to its first request
    prefill_speed: float = 1.0  # in proportion to the other pools
    decode_speed: float = 1.0


class Fault(Struct, frozen=True, kw_only=True):
    """A worker dies, and another takes its place."""

    at: Nanos
    worker: WorkerId
    down: Nanos  # until its successor begins to start


class _Worker:
    """One worker of the world."""

    def __init__(self, profile: PoolProfile, worker_id: WorkerId, incarnation: int, since: Nanos):
        self.profile = profile
        self.id = worker_id
        self.incarnation = incarnation
        self.since = since  # that it has its GPUs
        self.until: Nanos | None = None
        self.engine: SimulatedEngine
        self.prefilled: dict[RequestId, int] = {}  # prompt tokens of prefill work that runs here


class _Client(Struct, kw_only=True, eq=False):
    """What the client of one request has seen, and what its prompt is."""

    request: Request
    keys: Mapping[int, tuple[int, ...]]
    done: Callable[[], None] | None
    first_token: Nanos | None = None
    tokens: int = 0
    cached_tokens: int = 0


class World:
    """The cluster."""

    def __init__(
        self,
        kernel: Kernel,
        pools: Sequence[PoolProfile],
        settings: RouterSettings,
        *,
        seed: int,
        block_tokens: int,
        message_delay: Nanos,
        ended: Callable[[Ended], None],
        policy: Policy | None = None,
        record: Callable[[Nanos, RouterEvent, list[object]], None] | None = None,
    ):
        """All workers have joined.

        Args:
            kernel: Its time.
            pools: Its workers.
            settings: Of its router.
            seed: Of the router's luck.
            block_tokens: Of all engines.
            message_delay: Between router and workers, one way.
            ended: Told of each request that is over.
            policy: In place of one of those that settings can name.
            record: Told of each event that the router hears, and its commands.
        """
        self._kernel = kernel
        self._machine = RouterMachine(settings, Random(seed), policy)
        self._network = Network(kernel)
        self._block_tokens = block_tokens
        self._delay = message_delay
        self._ended = ended
        self._record = record
        self._digest = blake2b(digest_size=16)
        self._clients: dict[RequestId, _Client] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._left: list[_Worker] = []
        self._fetches: dict[RequestId, int] = {}
        self._tick: Event | None = None
        self._ticks_at: Nanos | None = None
        self._numbered = 0
        self.finished = 0
        self.drifts = 0  # alarms of the router: what it believed of caches was wrong too often
        self.last_end = Nanos(0)  # of a request
        for profile in pools:
            for number in range(profile.workers):
                self._join(_Worker(profile, WorkerId(f"{profile.name}-{number}"), 1, kernel.now()))

    # What clients do.

    def send(self, request: Request, done: Callable[[], None] | None = None) -> RequestId:
        """A request arrives now; `done` is called when it is over, unless it is cancelled."""
        self._numbered += 1
        request_id = RequestId(str(self._numbered))
        keys = {self._block_tokens: request.chain[: request.prompt_tokens // self._block_tokens]}
        self._clients[request_id] = _Client(request=request, keys=keys, done=done)
        arrived = Arrived(
            request_id=request_id,
            model=MODEL,
            tokens=_Blank(request.prompt_tokens),
            sampling=Sampling(temperature=0.0, max_tokens=max(1, request.output_tokens), ignore_eos=True),
            session=str(request.session) if request.session else "",
            keys=keys,
        )
        self._hear(arrived)
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """Its client goes away now; nothing happens if it is over."""
        if self._clients.pop(request_id, None) is not None:
            self._hear(Cancelled(request_id=request_id))

    @property
    def live(self) -> int:
        """Requests that are not over."""
        return len(self._clients)

    # Workers.

    def fail(self, fault: Fault) -> None:
        """Have a worker die in time, and another one take its place."""
        self._kernel.at(fault.at, partial(self._die, fault))

    def _die(self, fault: Fault) -> None:
        worker = self._workers.pop(fault.worker, None)
        if worker is None:
            return  # it is down already
        worker.until = self._kernel.now()
        worker.engine.stop()
        self._left.append(worker)
        self._network.leave(worker.id)
        self._hear_later(WorkerLeft(worker_id=worker.id))
        begun = Nanos(worker.until + fault.down)
        successor = _Worker(worker.profile, worker.id, worker.incarnation + 1, begun)
        self._kernel.at(Nanos(begun + worker.profile.start_time), partial(self._join, successor))

    def _join(self, worker: _Worker) -> None:
        profile, limits = worker.profile, worker.profile.limits
        worker.engine = SimulatedEngine(
            self._kernel,
            profile.times,
            limits,
            tell=partial(self._told, worker),
            cache_changed=partial(self._cache_changed, worker),
        )
        self._workers[worker.id] = worker
        self._network.join(worker.id, profile.bandwidth)
        description = Description(
            worker_id=worker.id,
            incarnation=Incarnation(str(worker.incarnation)),
            model=MODEL,
            role=profile.role,
            block_tokens=limits.block_tokens,
            max_model_len=(limits.kv_blocks - 1) * limits.block_tokens,
            kv_blocks=limits.kv_blocks,
            max_running=limits.max_running,
            fingerprint=FINGERPRINT,
            kv_paths=(KvPath.DIRECT,),
            engine="simulated",
            prefill_speed=profile.prefill_speed,
            decode_speed=profile.decode_speed,
        )
        self._hear(WorkerJoined(description=description, address=""))

    def _told(self, worker: _Worker, told: list[Told]) -> None:
        """A worker's engine has made a step."""
        self._hear_later(Stepped(worker_id=worker.id, progress=tuple([self._progress(worker, each) for each in told])))

    def _progress(self, worker: _Worker, told: Told) -> Progress:
        handoff = None
        if (prompt_tokens := worker.prefilled.pop(told.work_id, None)) is not None:
            handoff = Handoff(
                kv_path=KvPath.DIRECT,
                prefill_worker=worker.id,
                fingerprint=FINGERPRINT,
                num_tokens=prompt_tokens - 1,  # one has to be computed for its logits
            )
        return Progress(
            request_id=told.work_id,
            token_ids=TOKEN * told.tokens,
            finish=Finish.LENGTH if told.ended else None,
            kv=None if told.cached_tokens is None else _report(told.cached_tokens),
            handoff=handoff,
        )

    def _cache_changed(self, worker: _Worker, stored: list[int], removed: list[int]) -> None:
        self._hear_later(CacheAssumed(worker_id=worker.id, stored=stored, removed=removed))

    # The router.

    def _hear_later(self, event: RouterEvent) -> None:
        self._kernel.after(self._delay, partial(self._hear, event))

    def _hear(self, event: RouterEvent) -> None:
        now = self._kernel.now()
        commands = self._machine.handle(event, now)
        if self._record is not None:
            self._record(now, event, list(commands))
        for command in commands:
            match command:
                case Dispatch():
                    self._kernel.after(self._delay, partial(self._start, command.worker_id, command.start))
                case CancelWork():
                    self._kernel.after(self._delay, partial(self._cancel, command.worker_id, command.request_id))
                case Emit():
                    self._emitted(command, now)
                case Complete():
                    self._over(command.request_id, now, command.cached_tokens, "")
                case Refuse():
                    self._over(command.request_id, now, 0, command.reason.value)
                case CacheDrifts():
                    self.drifts += command.drifting
                case _:
                    assert_never(command)
        self._watch_deadlines()

    def _watch_deadlines(self) -> None:
        due = self._machine.next_deadline()
        if due == self._ticks_at:
            return
        if self._tick is not None:
            self._tick.cancel()
        self._ticks_at = due
        self._tick = None if due is None else self._kernel.at(due, self._ticked)

    def _ticked(self) -> None:
        self._ticks_at = self._tick = None
        self._hear(Ticked())

    def _start(self, worker_id: WorkerId, start: Start) -> None:
        """Work reaches its worker."""
        if (worker := self._workers.get(worker_id)) is None:
            return  # it died meanwhile; the router hears of that by itself
        client = self._clients.get(_request_of(start.request_id))
        if client is None:
            return  # cancelled meanwhile
        prompt_tokens = len(start.tokens) // 4
        job = Job(
            work_id=start.request_id,
            prompt_tokens=prompt_tokens,
            answer_tokens=start.sampling.max_tokens,
            keys=client.keys[self._block_tokens],
            fetched_tokens=0 if start.handoff is None else min(start.handoff.num_tokens, prompt_tokens - 1),
        )
        if start.phase is Phase.PREFILL:
            worker.prefilled[job.work_id] = prompt_tokens
        if start.handoff is None or start.handoff.prefill_worker not in self._workers:
            worker.engine.submit(job)
        else:
            self._fetch(worker, start.handoff, job)

    def _fetch(self, worker: _Worker, handoff: Handoff, job: Job) -> None:
        blocks = worker.engine.fetch(job)
        if blocks is None:
            return  # no room now: it waits, and computes its prompt
        if not blocks:
            worker.engine.fetched(job.work_id)
            return
        num_bytes = blocks * self._block_tokens * worker.profile.kv_bytes_per_token
        self._network.send(
            handoff.prefill_worker,
            worker.id,
            num_bytes,
            worker.profile.link_latency,
            partial(worker.engine.fetched, job.work_id),
        )

    def _cancel(self, worker_id: WorkerId, work_id: RequestId) -> None:
        if (worker := self._workers.get(worker_id)) is not None:
            worker.prefilled.pop(work_id, None)
            worker.engine.cancel(work_id)

    # What clients see.

    def _emitted(self, emit: Emit, now: Nanos) -> None:
        client = self._clients[emit.request_id]
        client.tokens += len(emit.progress.token_ids)
        if client.first_token is None:
            client.first_token = now

    def _over(self, request_id: RequestId, now: Nanos, cached_tokens: int, refused: str) -> None:
        client = self._clients.pop(request_id)
        request = client.request
        self.finished += 1
        self.last_end = now
        ended = Ended(
            request_id=request_id,
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=client.tokens,
            cached_tokens=cached_tokens,
            first_token=client.first_token,
            end=now,
            refused=refused,
        )
        self._digest.update(
            f"{request_id} {ended.first_token} {now} {client.tokens} {cached_tokens} {refused}\n".encode()
        )
        self._ended(ended)
        if client.done is not None:
            client.done()

    # Looks from outside.

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def moved_bytes(self) -> float:
        return self._network.moved_bytes

    @property
    def machine(self) -> RouterMachine:
        return self._machine

    def workers(self) -> Iterator[tuple[PoolProfile, Nanos, SimulatedEngine]]:
        """All workers that were ever there: profile, how long they had their GPUs by now, engine."""
        for worker in [*self._left, *self._workers.values()]:
            until = self.last_end if worker.until is None else min(worker.until, self.last_end)
            yield worker.profile, Nanos(max(0, until - worker.since)), worker.engine

    def look(self, seconds: float, finished: int) -> Timeline:
        """How the cluster stands now."""
        engines = [worker.engine for worker in self._workers.values()]
        held = sum(engine.held for engine in engines)
        blocks = sum(worker.profile.limits.kv_blocks for worker in self._workers.values())
        return Timeline(
            seconds=seconds,
            running=held,
            queued=max(0, len(self._clients) - held),
            kv_share=sum(engine.kv_blocks_used for engine in engines) / blocks if blocks else 0.0,
            finished=self.finished - finished,
        )

    def check(self) -> None:
        """Assert that all books are in order; with nothing live, that nothing is held."""
        self._machine.check()
        for worker in self._workers.values():
            worker.engine.check()
            if not self._clients:
                assert not worker.engine.held, worker.id
                assert not worker.engine.kv_blocks_used, worker.id


class _Blank(bytes):
    """Token ids that nobody looks at: as long as a prompt, without its memory."""

    _length: int

    def __new__(cls, tokens: int) -> Self:
        blank = super().__new__(cls)
        blank._length = 4 * tokens
        return blank

    def __len__(self) -> int:
        return self._length

    def __add__(self, more: Any) -> Self:  # what the client has, when another worker goes on
        return type(self)((self._length + memoryview(more).nbytes) // 4)


def _request_of(work_id: RequestId) -> RequestId:
    return RequestId(work_id.partition("#")[0])


def _report(cached_tokens: int) -> KvReport:
    """The router looks at the number of cached tokens alone."""
    return KvReport(prompt_blocks=0, origins=(), cached_tokens=cached_tokens)
