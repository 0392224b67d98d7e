"""A cluster in virtual time: the router's machine that runs in production, on simulated engines, links and clients.

Rules:

1. Every decision is `fleet.router.machine`'s. The world tells it what a router would hear: arrivals and new workers at once, what
   workers and stores say a message later than it happened; and what it commands reaches a worker a message later too.
   What is said on one way between the router and a worker arrives in the order in which it was said, as on the wire.
2. What a sequence generates is told with its first token, when it begins another block, and with its end, not step by step: the
   instants of first tokens and ends are exact, and the router counts blocks. What was generated before a fault is told too.
3. A worker that is lost takes its sequences, its cache and its transfers with it. What it told before arrives. What else can happen
   to the cluster is in `fleet.sim.faults`; none of it loses a request.
4. What lies around an engine (`front`: HTTP, tokenizer) is added to what the client sees of an answer; nothing else waits for it.
5. The digest is over every request's end, in order: two runs are the same if, and as far as anybody can tell only if, it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from random import Random
from typing import assert_never

from msgspec import Struct, structs

from fleet.clock import SECOND, Nanos
from fleet.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.requests import TOKEN_BYTES, Finish, KvReport, Sampling
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
    StoreChanged,
    Ticked,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    request_of,
)
from fleet.router.observed import Observer
from fleet.router.policies.ports import Policy
from fleet.router.settings import RouterSettings
from fleet.sim.answers import Answers
from fleet.sim.engine import Job, SimulatedEngine, Told
from fleet.sim.faults import Fault, NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.handoffs import End, Handoffs, params
from fleet.sim.kernel import Event, Kernel
from fleet.sim.network import Lane, Network
from fleet.sim.pools import PoolProfile, node_of
from fleet.sim.prompts import Blank, hashes_of, keys_of
from fleet.sim.results import Ended, PoolLook, Timeline
from fleet.sim.store import Borrower, Changed, NodeStore, StoreProfile, Tier
from fleet.sim.ways import Way
from fleet.work import Description, Handoff, Progress, Start
from kvstore.replay import Request

MODEL = ModelName("model")
FINGERPRINT = "simulated"
TOKEN = (0,)
JUST_BEFORE = 1000  # nanoseconds: before a fault, what was generated is on its way


class _Prefill(Struct, frozen=True):
    """Prefill work that a worker has."""

    prompt_tokens: int
    keys: Sequence[int]
    kv_path: KvPath


class _Worker:
    """One worker of the world."""

    def __init__(self, profile: PoolProfile, worker_id: WorkerId, node: StoreId, incarnation: int, since: Nanos):
        self.profile = profile
        self.id = worker_id
        self.node = node
        self.role = profile.role
        self.flips_to: Role | None = None  # once it is idle
        self.incarnation = incarnation
        self.since = since  # that it has its GPUs
        self.until: Nanos | None = None
        self.engine: SimulatedEngine
        self.says: Way[RouterEvent]
        self.hears: Way[Dispatch | CancelWork]
        self.borrower: Borrower | None = None  # as its node's store knows it
        self.prefilled: dict[RequestId, _Prefill] = {}  # prefill work that runs here


class _Client(Struct, kw_only=True, eq=False):
    """What the client of one request has seen, and what its prompt is."""

    request: Request
    keys: Mapping[int, tuple[int, ...]]
    answer_keys: Sequence[int]
    ended: Callable[[Ended], None]
    first_token: Nanos | None = None
    tokens: int = 0
    tier_tokens: dict[str, int] | None = None  # that were loaded from a store


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
        record: Observer | None = None,
        store: StoreProfile | None = None,
        verbatim_answers: bool = False,
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
            store: Of each node; None: there is none.
            verbatim_answers: Whether a next turn repeats the answer before it (`fleet.sim.answers`).
        """
        self._kernel = kernel
        # Nobody asks why a request that is over went where it went, and each answer would keep a table.
        self._machine = RouterMachine(structs.replace(settings, explained_requests=1), Random(seed), policy, keys_of)
        self._network = Network(kernel)
        self._handoffs = Handoffs(kernel, self._network, block_tokens, self._flip_if_idle)
        self._silence = Nanos(round(settings.heartbeat_timeout_seconds * SECOND))  # after which a worker is lost
        self._block_tokens = block_tokens
        self._answers = Answers(block_tokens) if verbatim_answers else None
        self._delay = message_delay
        self._ended = ended
        self._record = record
        self._digest = blake2b(digest_size=16)
        self._clients: dict[RequestId, _Client] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._left: list[_Worker] = []
        self._store = store
        self._stores: dict[StoreId, NodeStore] = {}
        self._shared_tiers = {} if store is None else {tier.name: Tier(tier) for tier in store.tiers if tier.shared}
        self._stores_say: Way[RouterEvent] = Way(kernel, message_delay, self._hear)
        self._tick: Event | None = None
        self._ticks_at: Nanos | None = None
        self._numbered = 0
        self.finished = 0
        self.last_end = Nanos(0)  # of a request
        serving = [profile for profile in pools if profile.role is not Role.DECODE] or list(pools)
        self._front_base = sum(profile.front for profile in serving) / len(serving)
        self._front_per_token = sum(profile.front_per_token for profile in serving) / len(serving)
        for profile in pools:
            for number in range(profile.workers):
                worker_id = WorkerId(f"{profile.name}-{number}")
                self._join(_Worker(profile, worker_id, node_of(profile, number), 1, kernel.now()))

    # What clients do.

    def send(
        self, request: Request, ended: Callable[[Ended], None] | None = None, deadline: Nanos | None = None
    ) -> RequestId:
        """A request arrives now.

        Args:
            request: Of the client.
            ended: Told when it is over, unless it is cancelled, in place of the world's.
            deadline: Instant at which the client gives it up.
        """
        self._numbered += 1
        request_id = RequestId(str(self._numbered))
        answer_keys: Sequence[int] = ()
        chain = request.chain[: request.prompt_tokens // self._block_tokens]
        if self._answers is not None:
            chain, answer_keys = self._answers.named(request)
        keys = {self._block_tokens: chain}
        self._clients[request_id] = _Client(
            request=request, keys=keys, answer_keys=answer_keys, ended=ended or self._ended
        )
        arrived = Arrived(
            request_id=request_id,
            model=MODEL,
            tokens=Blank(request.prompt_tokens, keys),
            sampling=_sampling(request.output_tokens),
            session=str(request.session) if request.session else "",
            keys=keys,
            deadline=deadline,
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
        """Have something happen to the cluster in time. What it happens to may be gone then, and nothing happens."""
        if isinstance(fault, WorkerLost | NodeLost | NetworkCut):
            self._kernel.at(max(0, fault.at - JUST_BEFORE), partial(self._tell_progress, fault))
        self._kernel.at(fault.at, partial(self._happen, fault))

    def _tell_progress(self, fault: WorkerLost | NodeLost | NetworkCut) -> None:
        """What workers have generated until now, tokens that would have been sent one by one."""
        for worker in list(self._workers.values()):
            if worker.node == fault.node if isinstance(fault, NodeLost) else worker.id == fault.worker:
                self._told(worker, worker.engine.progress())

    def _happen(self, fault: Fault) -> None:
        if isinstance(fault, NodeLost | StoreLost):
            if isinstance(fault, NodeLost):
                for lost in [worker for worker in self._workers.values() if worker.node == fault.node]:
                    self._die(lost, fault.down, lost.profile.start_time)
            if (store := self._stores.get(fault.node)) is not None:
                store.go()
                self._kernel.after(fault.down, store.come)
            return
        if (worker := self._workers.get(fault.worker)) is None:
            return
        match fault:
            case WorkerLost():
                self._die(worker, fault.down, worker.profile.start_time if fault.start is None else fault.start)
            case WorkerSlow():
                worker.engine.slow(fault.factor)
                self._kernel.after(fault.lasting, partial(worker.engine.recover, fault.factor))
            case NetworkCut():
                self._cut(worker, fault.lasting)
            case RoleFlip() if fault.role is worker.role:
                pass
            case RoleFlip():
                worker.flips_to = fault.role
                worker.says.say(WorkerDraining(worker_id=worker.id))
                # Until then something that was sent before the router heard of it may arrive.
                self._kernel.after(2 * self._delay + 1, partial(self._flip_if_idle, worker.id))
            case _:
                assert_never(fault)

    def _die(self, worker: _Worker, down: Nanos, start: Nanos) -> None:
        del self._workers[worker.id]
        worker.until = self._kernel.now()
        worker.engine.stop()
        self._left.append(worker)
        self._network.leave(worker.id)
        self._handoffs.leave(worker.id)
        if worker.borrower is not None:
            self._network.close(worker.borrower.load_lane)
            self._network.close(worker.borrower.save_lane)
        worker.says.forget()
        worker.says.mend()  # nobody hears of a cut any more
        worker.says.say(WorkerLeft(worker_id=worker.id))
        begun = Nanos(worker.until + down)
        successor = _Worker(worker.profile, worker.id, worker.node, worker.incarnation + 1, begun)
        successor.role = worker.flips_to or worker.role
        heard = worker.until + self._delay + 1  # only then it may come: the router goes by names
        self._kernel.at(max(begun + start, heard), partial(self._join, successor))

    def _cut(self, worker: _Worker, lasting: Nanos) -> None:
        if worker.says.is_cut:
            return
        worker.says.cut()
        worker.hears.cut()
        if lasting > self._silence:
            self._kernel.after(self._silence, partial(self._lose_touch, worker))
        self._kernel.after(lasting, partial(self._regain_touch, worker, lasting > self._silence))

    def _lose_touch(self, worker: _Worker) -> None:
        """Router and worker give each other up."""
        if self._workers.get(worker.id) is not worker:
            return
        for work_id in worker.engine.forget_all():
            self._handoffs.cancel(work_id)
        worker.prefilled.clear()
        worker.hears.forget()
        self._hear(WorkerLeft(worker_id=worker.id))

    def _regain_touch(self, worker: _Worker, was_lost: bool) -> None:
        if self._workers.get(worker.id) is not worker:
            return
        if was_lost:
            worker.says.forget()
        worker.says.mend()
        worker.hears.mend()
        if was_lost:
            self._announce(worker, worker.says.say)
            self._flip_if_idle(worker.id)

    def _flip_if_idle(self, worker_id: WorkerId) -> None:
        """A worker that drains goes on in its new role, once it has nothing left to do in the old one."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.flips_to is None or not worker.engine.idle:
            return
        worker.role, worker.flips_to = worker.flips_to, None
        worker.incarnation += 1
        worker.says.say(WorkerLeft(worker_id=worker.id))
        self._announce(worker, worker.says.say)

    def _join(self, worker: _Worker) -> None:
        profile = worker.profile
        worker.engine = SimulatedEngine(
            self._kernel,
            profile.times,
            profile.limits,
            tell=partial(self._told, worker),
            cache_changed=partial(self._cache_changed, worker),
            supply=_Supply(self._handoffs, self._note_loaded, worker, self._stores),
        )
        worker.says = Way(self._kernel, self._delay, self._hear)
        worker.hears = Way(self._kernel, self._delay, partial(self._obey, worker))
        self._workers[worker.id] = worker
        self._network.join(worker.id, profile.bandwidth)
        end = End(engine=worker.engine, bytes_per_token=profile.kv_bytes_per_token, latency=profile.link_latency)
        self._handoffs.join(worker.id, end)
        if self._store is not None:
            self._open_store(worker, self._store)
        self._announce(worker, self._hear)

    def _open_store(self, worker: _Worker, store: StoreProfile) -> None:
        profile, node = worker.profile, worker.node
        if node not in self._stores:
            self._stores[node] = NodeStore(
                self._kernel, self._network, node, store, self._shared_tiers, self._store_changed
            )
        worker.borrower = Borrower(
            times=profile.times,
            load_lane=Lane(f"{worker.id} load"),
            save_lane=Lane(f"{worker.id} save"),
        )
        self._network.open(worker.borrower.load_lane, profile.host_bandwidth)
        self._network.open(worker.borrower.save_lane, profile.host_bandwidth)

    def _announce(self, worker: _Worker, say: Callable[[RouterEvent], None]) -> None:
        """A worker says what it is, and what it has."""
        profile, limits = worker.profile, worker.profile.limits
        has_store = worker.borrower is not None
        description = Description(
            worker_id=worker.id,
            incarnation=Incarnation(str(worker.incarnation)),
            model=MODEL,
            role=worker.role,
            block_tokens=limits.block_tokens,
            max_model_len=(limits.kv_blocks - 1) * limits.block_tokens,
            kv_blocks=limits.kv_blocks,
            max_running=limits.max_running,
            fingerprint=FINGERPRINT,
            kv_paths=(KvPath.STORE, KvPath.DIRECT) if has_store else (KvPath.DIRECT,),
            store_id=worker.node if has_store else None,
            engine="simulated",
            prefill_speed=profile.prefill_speed,
            decode_speed=profile.decode_speed,
        )
        say(WorkerJoined(description=description, address=""))
        if names := worker.engine.names():
            say(CacheAssumed(worker_id=worker.id, stored=names, removed=[]))

    def _told(self, worker: _Worker, told: list[Told]) -> None:
        """A worker's engine has made a step."""
        if worker.prefilled:
            told = [each for each in told if not self._told_when_saved(worker, each)]
        if told:
            progress = tuple([self._progress(worker, each) for each in told])
            worker.says.say(Stepped(worker_id=worker.id, progress=progress))
        if worker.flips_to is not None:
            self._flip_if_idle(worker.id)

    def _told_when_saved(self, worker: _Worker, told: Told) -> bool:
        """Prefill work that hands over by the store has ended when that has its blocks."""
        prefill, store = worker.prefilled.get(told.work_id), self._stores.get(worker.node)
        if prefill is None or prefill.kv_path is not KvPath.STORE or store is None:
            return False
        event = Stepped(worker_id=worker.id, progress=(self._progress(worker, told),))
        store.when_saved(prefill.keys, partial(self._say_if_there, worker, event))
        return True

    def _say_if_there(self, worker: _Worker, event: Stepped) -> None:
        if self._workers.get(worker.id) is worker:
            worker.says.say(event)

    def _progress(self, worker: _Worker, told: Told) -> Progress:
        handoff = None
        if worker.prefilled and (prefill := worker.prefilled.pop(told.work_id, None)) is not None:
            handoff = Handoff(
                kv_path=prefill.kv_path,
                prefill_worker=worker.id,
                fingerprint=FINGERPRINT,
                num_tokens=prefill.prompt_tokens - 1,  # one has to be computed for its logits
                params=params(told.work_id),
            )
            if worker.engine.keeps(told.work_id):
                self._handoffs.computed(worker.id, told.work_id)
        return Progress(
            request_id=told.work_id,
            token_ids=TOKEN * told.tokens,
            finish=Finish.LENGTH if told.ended else None,
            kv=None if told.cached_tokens is None else _report(told.cached_tokens),
            handoff=handoff,
        )

    def _cache_changed(self, worker: _Worker, stored: list[int], removed: list[int]) -> None:
        worker.says.say(CacheAssumed(worker_id=worker.id, stored=stored, removed=removed))
        if worker.borrower is not None and stored:
            self._stores[worker.node].save(worker.borrower, stored)

    def _store_changed(self, store: NodeStore, tier: Tier, changed: Changed) -> None:
        stores = [each for each in self._stores.values() if each.up] if tier.profile.shared else [store]
        for each in stores:
            self._stores_say.say(
                StoreChanged(
                    store_id=each.id,
                    fingerprint=FINGERPRINT,
                    tier=changed.tier,
                    stored=hashes_of(changed.stored),
                    removed=hashes_of(changed.removed),
                    reset=changed.reset,
                )
            )

    def _note_loaded(self, work_id: RequestId, tokens: Mapping[str, int]) -> None:
        if (client := self._clients.get(request_of(work_id))) is not None:
            client.tier_tokens = dict(tokens)

    # The router.

    def _hear(self, event: RouterEvent) -> None:
        """What a router hears; `_obey` is what comes of it. `fleet.sim.shell` puts production's servers between the two."""
        now = self._kernel.instant
        commands = self._machine.handle(event, now)
        if self._record is not None:
            self._record(now, event, commands)
        for command in commands:
            match command:
                case Dispatch() | CancelWork():
                    if (worker := self._workers.get(command.worker_id)) is not None:
                        worker.hears.say(command)  # else it has died, and the router hears of that by itself
                case Emit():
                    self._emitted(command, now)
                case Complete():
                    self._over(command.request_id, now, command.cached_tokens, "")
                case Refuse():
                    self._over(command.request_id, now, 0, command.reason.value)
                case CacheDrifts():
                    pass  # for metrics
                case _:
                    assert_never(command)
        if (due := self._machine.next_deadline()) != self._ticks_at:
            self._tick_at(due)

    def _tick_at(self, due: Nanos | None) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._ticks_at = due
        self._tick = None if due is None else self._kernel.at(due, self._ticked)

    def _ticked(self) -> None:
        self._ticks_at = self._tick = None
        self._hear(Ticked())

    def _obey(self, worker: _Worker, command: Dispatch | CancelWork) -> None:
        """What the router said reaches a worker."""
        if self._workers.get(worker.id) is not worker:
            return  # it died meanwhile
        if isinstance(command, Dispatch):
            self._start(worker, command.start)
        else:
            worker.prefilled.pop(command.request_id, None)
            worker.engine.cancel(command.request_id)
            self._handoffs.cancel(command.request_id)
            if worker.flips_to is not None:
                self._flip_if_idle(worker.id)

    def _start(self, worker: _Worker, start: Start) -> None:
        client = self._clients.get(request_of(start.request_id))
        if client is None:
            return  # cancelled meanwhile
        prompt_tokens, handoff = len(start.tokens) // TOKEN_BYTES, start.handoff
        keys = client.keys[self._block_tokens]
        direct = handoff is not None and handoff.kv_path is KvPath.DIRECT
        job = Job(
            work_id=start.request_id,
            prompt_tokens=prompt_tokens,
            answer_tokens=start.sampling.max_tokens,
            keys=keys,
            answer_keys=() if start.phase is Phase.PREFILL else client.answer_keys,
            fetched_tokens=min(handoff.num_tokens, prompt_tokens - 1) if handoff is not None and direct else 0,
            handed_off=start.phase is Phase.PREFILL and start.kv_path is KvPath.DIRECT,
        )
        if start.phase is Phase.PREFILL:
            assert start.kv_path is not None
            worker.prefilled[job.work_id] = _Prefill(prompt_tokens, keys, start.kv_path)
        if handoff is not None and direct:
            self._handoffs.take(worker.id, job, handoff)
        else:
            worker.engine.submit(job)

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
        front = 0 if client.first_token is None else self._front(request.prompt_tokens)
        ended = Ended(
            request_id=request_id,
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=client.tokens,
            cached_tokens=cached_tokens,
            first_token=None if client.first_token is None else Nanos(client.first_token + front),
            end=Nanos(now + front),
            refused=refused,
            session=request.session,
            max_tokens=request.output_tokens,
            chain=request.chain,
            tier_tokens=client.tier_tokens,
        )
        self._digest.update(
            f"{request_id} {ended.first_token} {now} {client.tokens} {cached_tokens} {refused}\n".encode()
        )
        client.ended(ended)

    def _front(self, prompt_tokens: int) -> int:
        """What a client sees besides: nothing that happens here depends on it."""
        return round(self._front_base + self._front_per_token * prompt_tokens)

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
            pools=self._pools(),
        )

    def _pools(self) -> tuple[PoolLook, ...]:
        pools: dict[str, list[_Worker]] = {}
        for worker in self._workers.values():
            pools.setdefault(worker.profile.name, []).append(worker)
        return tuple(
            PoolLook(
                name=name,
                workers=len(workers),
                running=sum(worker.engine.held for worker in workers),
                waiting=sum(worker.engine.waiting for worker in workers),
                kv_share=sum(worker.engine.kv_blocks_used for worker in workers)
                / sum(worker.profile.limits.kv_blocks for worker in workers),
            )
            for name, workers in pools.items()
        )

    def check(self) -> None:
        """Assert that all books are in order; with nothing live, that nothing is held."""
        self._machine.check()
        for worker in self._workers.values():
            worker.engine.check()
            if not self._clients:
                assert not worker.engine.held, worker.id
                assert not worker.engine.kv_blocks_used, worker.id
        for store in self._stores.values():
            store.check()


class _Supply:
    """What a worker's engine need not compute: what a prefill worker keeps for it, and what its node's store holds."""

    __slots__ = ("_handoffs", "_note", "_stores", "_worker")

    def __init__(
        self,
        handoffs: Handoffs,
        note: Callable[[RequestId, Mapping[str, int]], None],
        worker: _Worker,
        stores: Mapping[StoreId, NodeStore],
    ):
        self._handoffs, self._note, self._worker, self._stores = handoffs, note, worker, stores

    def offer(self, job: Job, here: int) -> int:
        if job.fetched_tokens and (tokens := self._handoffs.offered(job)):
            return tokens
        if (borrower := self._worker.borrower) is None:
            return 0
        keys = job.keys[: (job.prompt_tokens - 1) // self._worker.profile.limits.block_tokens]
        blocks = self._stores[self._worker.node].offer(borrower, keys, here)
        return blocks * self._worker.profile.limits.block_tokens

    def fetch(self, job: Job, here: int) -> None:
        if job.fetched_tokens and self._handoffs.offered(job):
            self._handoffs.fetch(job, here)
            return
        borrower, engine = self._worker.borrower, self._worker.engine
        assert borrower is not None
        keys = job.keys[: (job.prompt_tokens - 1) // self._worker.profile.limits.block_tokens]

        def ended(tokens: Mapping[str, int] | None) -> None:
            if tokens is None:
                engine.not_fetched(job.work_id)
            else:
                self._note(job.work_id, tokens)
                engine.fetched(job.work_id)

        self._stores[self._worker.node].load(borrower, keys, here, ended)


@lru_cache(4096)
def _sampling(output_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max(1, output_tokens), ignore_eos=True)


@lru_cache(4096)
def _report(cached_tokens: int) -> KvReport:
    """The router looks at the number of cached tokens alone."""
    return KvReport(prompt_blocks=0, origins=(), cached_tokens=cached_tokens)
