"""Requests that wait for room: who is next, who has to go when the room is full, how long it will take.

Rules:

1. Requests wait by model: busy workers of one model hold nobody up who wants another. Nor does who asks for particular workers, by
   its *wish*, hold up those who ask for others: all with its wish are passed over until something has changed for them
   (`fleet.router.queueing.wait_groups`). Where that is so for more wishes than can be tried at once, those further back have their turns one after
   the other (`QueueSearch`).
2. Between tenants: who was served least is next, in prompt tokens computed over the tenant's weight (start-time fair
   queueing, Goyal, Vin and Cheng, SIGCOMM 1996). A tenant that begins to wait starts where the one served last stands:
   idleness earns nothing. When nobody waits all debts are forgotten.
3. Within a tenant: by rank, an instant. Whoever prefers one request to another says by how much earlier it would have
   had to arrive, so nobody is overtaken for ever.
4. When the room is full the lowest ranked request goes of the tenant that has most tokens waiting over its weight. That
   may be the newcomer. A request that had been placed before stays: somebody has begun to read its answer.
5. How long a request will wait is what waits before it, by rules 2 and 3, over the pace at which requests have been leaving: both in
   prompt tokens, whatever of them was cached. Without enough evidence nothing is said.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import exp, inf

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.router.placement.topology import WorkerSizes
from fleet.router.queueing.ordered_requests import OrderedRequests, QueuePosition
from fleet.router.queueing.wait_groups import UNKNOWN_WORKERS, BusyWorkers, HasRoom, WaitGroup, WaitGroups
from fleet.router.sessions import SessionKey

RATE_MEMORY_SECONDS = 10.0  # memory of the pace; a burst is over in less, a change of load is noticed in a few of them
EVIDENCE = 8  # departures before a pace is believed
MAX_SECONDS = 1e9  # thirty years; more is the same, and infinitely much is no number to reckon with
MAX_FIRST_TRIES = 1024  # some 35 ms, after as many others have come
MAX_IDLE_CLOCKS = 64  # tenants not waiting whose clocks are kept without looking

GroupHead = tuple[int, int, RequestId, WaitGroup]
"""Rank, order of arrival, and whose place it is; and its wish."""


class QueuedRequest(Struct, frozen=True, kw_only=True):
    """One request in the room."""

    request_id: RequestId
    model: ModelName
    tenant: str = ""
    rank: int  # nanoseconds; lower is first
    seq: int  # order of arrival, for equal ranks
    tokens: int  # of the prompt
    whole_tokens: int = 0  # of the prompt and the longest answer
    wish: Hashable = None  # who may serve it, as far as length and session do not decide that; None: anybody
    session: SessionKey | None = None  # that has to stay where it is
    stays: bool = False  # rule 4


def rank(arrived: Nanos, priority: int, tokens: int, *, priority_seconds: float, size_seconds: float) -> int:
    """Where a request stands among those of its tenant, as an instant.

    Args:
        arrived: When it did.
        priority: Higher is sooner.
        tokens: Of the prompt.
        priority_seconds: What a step of priority is worth in waiting. Zero: arrival alone counts; very much: strict.
        size_seconds: By how much a thousand tokens put a request back. Zero: size does not count; much: the shortest
            first, which has the lowest mean wait (W. E. Smith, Naval Research Logistics 1956).
    """
    step, thousand = min(priority_seconds, MAX_SECONDS), min(size_seconds, MAX_SECONDS)
    return arrived - round(priority * step * SECOND) + round(tokens * thousand * SECOND / 1000)


class DepartureRate:
    """Prompt tokens a second that leave while somebody waits, recent ones counting more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._departures = 0
        self._since: Nanos | None = None  # somebody has waited all the time since

    def busy(self, now: Nanos) -> None:
        """Somebody waits from now on."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        self._since = None

    def left(self, tokens: int, now: Nanos) -> None:
        if self._since is None:
            return
        left, seconds = self._faded(now)
        self._tokens, self._seconds = left + tokens, seconds
        self._departures += 1
        self._since = now

    def tokens_per_second(self, now: Nanos) -> float | None:
        """None: too little was seen."""
        tokens, seconds = self._faded(now)
        return None if self._departures < EVIDENCE or seconds <= 0 else tokens / seconds

    def _faded(self, now: Nanos) -> tuple[float, float]:
        """Tokens and seconds as they count now; a wait that has seen nobody leave counts too."""
        if self._since is None:
            return self._tokens, self._seconds
        seconds = max(0, now - self._since) / SECOND
        keep = exp(-seconds / RATE_MEMORY_SECONDS)
        return self._tokens * keep, self._seconds * keep + seconds


class _TenantQueue:
    """One tenant's requests for one model; there is no such object for a tenant of whom none waits."""

    def __init__(self, seq: int) -> None:
        self.seq = seq  # of the request with which it began to wait: among equal clocks the earlier is first
        self.tokens = 0
        self.ranked = OrderedRequests()
        self._queues: dict[
            WaitGroup, OrderedRequests
        ] = {}  # where there has been one wish only, its queue is `ranked` itself
        self._heads: list[GroupHead] = []  # else: the first of each, in order

    def add(self, waiting: QueuedRequest, wish: WaitGroup) -> None:
        if (queue := self._queues.get(wish)) is None:
            queue = self._queues[wish] = self._another_queue()
        if queue is not self.ranked:
            first = queue.place if queue else None
            queue.add(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(wish, queue, first)
        self.ranked.add(waiting.rank, waiting.seq, waiting.request_id)
        self.tokens += waiting.tokens

    def remove(self, waiting: QueuedRequest, wish: WaitGroup) -> None:
        queue = self._queues[wish]
        if queue is not self.ranked:
            first = queue.place
            queue.discard(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(wish, queue, first)
        self.ranked.discard(waiting.rank, waiting.seq, waiting.request_id)
        if not queue:
            del self._queues[wish]
        self.tokens -= waiting.tokens

    def heads(self) -> Sequence[GroupHead]:
        """The first of each wish, in order."""
        return self._heads or [(*self.ranked.place, wish) for wish in self._queues]

    def _another_queue(self) -> OrderedRequests:
        if not self._queues:
            return self.ranked
        for wish, queue in self._queues.items():
            if queue is self.ranked:
                self._queues[wish] = queue.copy()
                self._heads = [(*queue.place, wish)]
        return OrderedRequests()

    def _note_head(self, wish: WaitGroup, queue: OrderedRequests, was: QueuePosition | None) -> None:
        """Another may be the first of a wish now."""
        if queue and queue.place == was:
            return
        if was is not None:
            del self._heads[bisect_left(self._heads, (*was, wish))]
        if queue:
            insort(self._heads, (*queue.place, wish))

    def check(self, wish_of: Mapping[RequestId, WaitGroup]) -> None:
        assert self.heads() == sorted((*queue.place, wish) for wish, queue in self._queues.items())
        assert sorted(self.ranked) == sorted(each for queue in self._queues.values() for each in queue)
        assert all(wish_of[each] is wish for wish, queue in self._queues.items() for each in queue)


class FairQueue:
    """Rules 2 to 5 for one model."""

    def __init__(self, weights: Mapping[str, float], sizes: WorkerSizes) -> None:
        self._weights = weights
        self._tenants: dict[str, _TenantQueue] = {}
        self._order: list[tuple[float, int, str]] = []  # of the tenants that wait: clock, seq, name
        self._clocks: dict[str, float] = {}  # missing: not ahead of `_clock`
        self._clock = 0.0  # of the tenant served last
        self._tokens = 0
        self._pace = DepartureRate()
        self._sizes = sizes
        self._wish_of: dict[RequestId, WaitGroup] = {}
        self.wishes = WaitGroups()

    def __len__(self) -> int:
        return len(self._wish_of)

    def add(self, waiting: QueuedRequest, now: Nanos) -> WaitGroup:
        """It waits from now on, with others of its wish."""
        name = waiting.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(waiting.seq)
            clock = max(self._clock, self._clocks.get(name, -inf))
            self._clocks[name] = clock
            insort(self._order, (clock, tenant.seq, name))
        wish = self._wish_of[waiting.request_id] = self._wish(waiting)
        tenant.add(waiting, wish)
        self._tokens += waiting.tokens
        self._pace.busy(now)
        return wish

    def _wish(self, waiting: QueuedRequest) -> WaitGroup:
        """It has one more."""
        reach = self._sizes.reach(waiting.tokens, waiting.whole_tokens)
        return self.wishes.wished((waiting.wish, waiting.session, reach), waiting.session)

    @property
    def first(self) -> RequestId | None:
        return self._tenants[self._order[0][2]].ranked.first if self._order else None

    def remove(self, waiting: QueuedRequest) -> None:
        """It waits no more, for whatever reason."""
        name = waiting.tenant
        tenant = self._tenants[name]
        wish = self._wish_of.pop(waiting.request_id)
        tenant.remove(waiting, wish)
        wish.waiting -= 1
        if not wish.waiting:
            self.wishes.over(wish)
        self._tokens -= waiting.tokens
        if not tenant.ranked:
            del self._tenants[name]
            self._order.remove((self._clocks[name], tenant.seq, name))
            if not self._tenants:  # a busy period is over, and with it all debts
                self._clocks.clear()
                self._clock = 0.0
                self._pace.idle()

    def sized(self, sizes: WorkerSizes, waiting: Mapping[RequestId, QueuedRequest]) -> None:
        """Lengths are told apart by these from now on.

        Args:
            sizes: Of the workers.
            waiting: Those who wait, and maybe others.
        """
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self.wishes = WaitGroups()
        self._tenants = {name: _TenantQueue(tenant.seq) for name, tenant in self._tenants.items()}
        for request_id in self._wish_of:
            each = waiting[request_id]
            wish = self._wish_of[request_id] = self._wish(each)
            self._tenants[each.tenant].add(each, wish)

    def heads(self) -> Iterator[tuple[RequestId, WaitGroup]]:
        """Of each tenant and each wish that is before no gate the first, the next one first; until somebody comes or leaves."""
        for _, _, name in self._order:
            for _, _, request_id, wish in self._tenants[name].heads():
                if not wish.gate.shut:
                    yield request_id, wish

    def left(self, tokens: int, now: Nanos) -> None:
        """A prompt of so many tokens has left for a worker, whether it waited or found one that nobody waits for."""
        self._pace.left(tokens, now)

    def charge(self, name: str, tokens: int) -> None:
        """A tenant's request has left for a worker, which has to compute so many tokens of it."""
        clock = max(self._clock, self._clocks.get(name, -inf))
        self._clock = clock
        after = clock + tokens / self.weight(name)
        if (tenant := self._tenants.get(name)) is not None:
            self._order.remove((self._clocks[name], tenant.seq, name))
            insort(self._order, (after, tenant.seq, name))
        self._clocks[name] = after
        if len(self._clocks) > len(self._tenants) + MAX_IDLE_CLOCKS:
            self._clocks = {
                other: clock for other, clock in self._clocks.items() if other in self._tenants or clock > self._clock
            }

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def by_backlog(self) -> list[tuple[float, str]]:
        """Tenants that wait, with their tokens over their weight."""
        return [(tenant.tokens / self.weight(name), name) for name, tenant in self._tenants.items()]

    def worst(self, name: str) -> Iterator[RequestId]:
        """A tenant's requests, last first."""
        return reversed(self._tenants[name].ranked)

    def seconds_to_wait(self, name: str, now: Nanos, place: int | None = None) -> float | None:
        """About how long a new request of this tenant would wait, at a rank or, with None, behind all others.

        It has its share of the pace for what its tenant has before it, but never waits longer than everybody's backlog takes.
        """
        if (pace := self._pace.tokens_per_second(now)) is None:
            return None
        own = 0.0
        if (tenant := self._tenants.get(name)) is not None:
            own = tenant.tokens * (1.0 if place is None else tenant.ranked.before(place) / len(tenant.ranked))
        if own == 0:
            return 0.0
        if pace <= 0:
            return inf
        weights = sum(map(self.weight, self._tenants.keys() | {name}))
        return min(float(self._tokens), own * weights / self.weight(name)) / pace

    def check(self) -> None:
        assert sorted(self._order) == self._order
        assert {name for _, _, name in self._order} == set(self._tenants)
        for clock, seq, name in self._order:
            assert self._clocks[name] == clock, name
            assert self._tenants[name].seq == seq, name
        assert all(tenant.ranked for tenant in self._tenants.values())
        assert self._tokens == sum(tenant.tokens for tenant in self._tenants.values())
        self.wishes.check()
        assert Counter(wish.value for wish in self._wish_of.values()) == {
            wish.value: wish.waiting for wish in self.wishes
        }
        for tenant in self._tenants.values():
            tenant.check(self._wish_of)


class QueueSearch:
    """For those of one model who need not wait on, after something has changed; the next one first.

    Each try takes time, so only `most` are made in vain after a change. Half of these are of the foremost wishes. The others are of those
    that were not tried since all had their turn last: however many ask in vain before it, a wish is not passed over for ever. Of wishes
    that are untried (`fleet.router.queueing.wait_groups`, rule 3) `MAX_FIRST_TRIES` are tried beside these: the worker that has room now may be theirs alone.
    """

    def __init__(self, queue: FairQueue, most: int | None, has_room: HasRoom) -> None:
        """Nobody was tried.

        Args:
            queue: Where they wait.
            most: Tries in vain; None: any number.
            has_room: Whether a worker has.
        """
        self._queue = queue
        self._wishes = wishes = queue.wishes
        wishes.searches += 1
        self._number = wishes.searches
        self._has_room = has_room
        self._most = inf if most is None else most
        self._tries = 0  # in vain
        self._first = MAX_FIRST_TRIES if most is not None else 0  # tries that are left for those who are untried
        self._open = 0  # of these wishes, those that stand before no gate
        self._tried: WaitGroup | None = None

    def candidates(self) -> Iterator[RequestId]:
        """Whom to try, until somebody leaves; then ask anew. Who was tried and stays is told to `mark_rejected` before the next is asked for."""
        wishes = self._wishes
        while wishes.open > self._open:
            for request_id, wish in self._queue.heads():
                if wish.vain_in == self._number or (wish.gate.changed and wishes.still_busy(wish, self._has_room)):
                    continue
                first = not wish.vain_in and self._first > 0
                further = not first and 2 * self._tries >= self._most
                if further and wish.turn == wishes.turn:
                    continue
                if not first and self._tries >= self._most:
                    if wishes.untried and self._first:
                        continue
                    return
                self._tried = wish
                yield request_id
                if further:
                    wish.turn = wishes.turn
                    wishes.had_turn += 1
                if wishes.open <= self._open:
                    break
            if not wishes.had_turn or self._tries >= self._most:
                return
            wishes.next_turn()  # all had theirs

    def mark_rejected(self, busy: BusyWorkers) -> None:
        """The latest candidate waits on, for one of these to change."""
        assert self._tried is not None
        if not self._tried.vain_in and self._first:
            self._first -= 1
        else:
            self._tries += 1
        self._wishes.mark_rejected(self._tried, busy)
        self._open += not self._tried.gate.shut


class AdmissionQueue:
    """All that wait at one router. Weights may be changed in place; who is not named weighs 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[ModelName, FairQueue] = {}  # one a model that ever had to wait
        self._waiting: dict[RequestId, QueuedRequest] = {}
        self._sizes: dict[ModelName, WorkerSizes] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, model: ModelName) -> RequestId | None:
        """Who is next; None when nobody waits for this model."""
        queue = self._queues.get(model)
        return None if queue is None else queue.first

    def add(self, waiting: QueuedRequest, now: Nanos, busy: BusyWorkers = UNKNOWN_WORKERS) -> None:
        """It waits from now on.

        Args:
            waiting: The request.
            now: The instant.
            busy: For whom it waits, where it was tried in vain just now and that is known.
        """
        assert waiting.request_id not in self._waiting, waiting.request_id
        self._waiting[waiting.request_id] = waiting
        queue = self._queue(waiting.model)
        wish = queue.add(waiting, now)
        if busy:
            queue.wishes.mark_rejected(wish, busy)

    def _queue(self, model: ModelName) -> FairQueue:
        if (queue := self._queues.get(model)) is None:
            queue = self._queues[model] = FairQueue(self._weights, self._sizes.get(model, WorkerSizes()))
        return queue

    def changed(self, model: ModelName, worker_id: WorkerId) -> None:
        """A worker may have room again."""
        if (queue := self._queues.get(model)) is not None and queue.wishes.gates:
            queue.wishes.changed(worker_id)

    def gone(self, model: ModelName, worker_id: WorkerId) -> None:
        """A worker takes no more requests."""
        if (queue := self._queues.get(model)) is not None:
            queue.wishes.changed(worker_id, gone=True)

    def moved(self, session: SessionKey) -> list[ModelName]:
        """A session's requests may go elsewhere than before; returns the models that some of them wait for."""
        return [model for model, queue in self._queues.items() if queue.wishes.moved(session)]

    def all_changed(self, *models: ModelName) -> None:
        """Anybody of these may have room for whoever waits."""
        for model in models:
            if (queue := self._queues.get(model)) is not None:
                queue.wishes.all_changed()

    def sized(self, model: ModelName, sizes: WorkerSizes) -> None:
        """Requests that the workers of a model can serve are told apart by these lengths, from now on."""
        self._sizes[model] = sizes
        if (queue := self._queues.get(model)) is not None:
            queue.sized(sizes, self._waiting)

    def discard(self, request_id: RequestId) -> QueuedRequest | None:
        """It waits no more, and was not served; None when it did not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._queues[waiting.model].remove(waiting)
        return waiting

    def served(self, request_id: RequestId, model: ModelName, tokens: int, computed: int, now: Nanos) -> None:
        """A worker gets a prompt of so many tokens, and has to compute some of them; if the request waited, it waits no more."""
        if (queue := self._queues.get(model)) is None:
            return
        queue.left(tokens, now)
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            queue.charge(waiting.tenant, computed)
            queue.remove(waiting)

    def supernumerary(self) -> RequestId | None:
        """Who has to go when one is too many (rule 4); None when all have to stay."""
        tenants = [
            (backlog, model, name) for model, queue in self._queues.items() for backlog, name in queue.by_backlog()
        ]
        for _, model, name in sorted(tenants, reverse=True):
            for request_id in self._queues[model].worst(name):
                if not self._waiting[request_id].stays:
                    return request_id
        return None

    def seconds_to_wait(self, model: ModelName, tenant: str, now: Nanos, place: int | None = None) -> float | None:
        """About how long a new request would wait (rule 5), by its rank or behind all others; None when nobody can say."""
        queue = self._queues.get(model)
        return None if queue is None else queue.seconds_to_wait(tenant, now, place)

    def search(self, model: ModelName, most: int | None, has_room: HasRoom) -> QueueSearch:
        """For those who need not wait on, now that something has changed.

        Args:
            model: Of which somebody has room, or is gone, and for which somebody waits.
            most: Tries in vain; None: any number.
            has_room: Whether a worker has.
        """
        return QueueSearch(self._queues[model], most, has_room)

    def models(self) -> list[ModelName]:
        """That somebody waits for."""
        return [model for model, queue in self._queues.items() if queue.first is not None]

    def ids(self) -> list[RequestId]:
        return list(self._waiting)

    def check(self) -> None:
        assert len(self._waiting) == sum(map(len, self._queues.values()))
        for queue in self._queues.values():
            queue.check()
