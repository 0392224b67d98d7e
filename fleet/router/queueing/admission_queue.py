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
    wait_key: Hashable = None  # who may serve it, as far as length and session do not decide that; None: anybody
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
        self.queues: dict[
            WaitGroup, OrderedRequests
        ] = {}  # where there has been one wish only, its queue is `ranked` itself
        self._heads: list[GroupHead] = []  # else: the first of each, in order

    def add(self, waiting: QueuedRequest, group: WaitGroup) -> None:
        if (queue := self.queues.get(group)) is None:
            queue = self.queues[group] = self._another_queue()
        if queue is not self.ranked:
            first = queue.place if queue else None
            queue.add(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(group, queue, first)
        self.ranked.add(waiting.rank, waiting.seq, waiting.request_id)
        self.tokens += waiting.tokens

    def remove(self, waiting: QueuedRequest, group: WaitGroup) -> None:
        queue = self.queues[group]
        if queue is not self.ranked:
            first = queue.place
            queue.discard(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(group, queue, first)
        self.ranked.discard(waiting.rank, waiting.seq, waiting.request_id)
        if not queue:
            del self.queues[group]
        self.tokens -= waiting.tokens

    def heads(self) -> Sequence[GroupHead]:
        """The first of each wish, in order."""
        return self._heads or [(*self.ranked.place, group) for group in self.queues]

    def _another_queue(self) -> OrderedRequests:
        if not self.queues:
            return self.ranked
        for group, queue in self.queues.items():
            if queue is self.ranked:
                self.queues[group] = queue.copy()
                self._heads = [(*queue.place, group)]
        return OrderedRequests()

    def _note_head(self, group: WaitGroup, queue: OrderedRequests, was: QueuePosition | None) -> None:
        """Another may be the first of a wish now."""
        if queue and queue.place == was:
            return
        if was is not None:
            del self._heads[bisect_left(self._heads, (*was, group))]
        if queue:
            insort(self._heads, (*queue.place, group))

    def check(self, wish_of: Mapping[RequestId, WaitGroup]) -> None:
        assert self.heads() == sorted((*queue.place, group) for group, queue in self.queues.items())
        assert sorted(self.ranked) == sorted(each for queue in self.queues.values() for each in queue)
        assert all(wish_of[each] is group for group, queue in self.queues.items() for each in queue)


class FairQueue:
    """Rules 2 to 5 for one model."""

    def __init__(self, weights: Mapping[str, float], sizes: WorkerSizes) -> None:
        self._weights = weights
        self._tenants: dict[str, _TenantQueue] = {}
        self._order: list[tuple[float, int, str]] = []  # of the tenants that wait: clock, seq, name
        self.clocks: dict[str, float] = {}  # missing: not ahead of `_clock`
        self._clock = 0.0  # of the tenant served last
        self._tokens = 0
        self._rate = DepartureRate()
        self._sizes = sizes
        self._group_of_request: dict[RequestId, WaitGroup] = {}
        self.groups = WaitGroups()

    def __len__(self) -> int:
        return len(self._group_of_request)

    def add(self, waiting: QueuedRequest, now: Nanos) -> WaitGroup:
        """It waits from now on, with others of its wish."""
        name = waiting.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(waiting.seq)
            clock = max(self._clock, self.clocks.get(name, -inf))
            self.clocks[name] = clock
            insort(self._order, (clock, tenant.seq, name))
        group = self._group_of_request[waiting.request_id] = self._group_of(waiting)
        tenant.add(waiting, group)
        self._tokens += waiting.tokens
        self._rate.busy(now)
        return group

    def _group_of(self, waiting: QueuedRequest) -> WaitGroup:
        """It has one more."""
        reach = self._sizes.reach(waiting.tokens, waiting.whole_tokens)
        return self.groups.join((waiting.wait_key, waiting.session, reach), waiting.session)

    @property
    def first(self) -> RequestId | None:
        return self._tenants[self._order[0][2]].ranked.first if self._order else None

    def remove(self, waiting: QueuedRequest) -> None:
        """It waits no more, for whatever reason."""
        name = waiting.tenant
        tenant = self._tenants[name]
        group = self._group_of_request.pop(waiting.request_id)
        tenant.remove(waiting, group)
        group.waiting -= 1
        if not group.waiting:
            self.groups.over(group)
        self._tokens -= waiting.tokens
        if not tenant.ranked:
            del self._tenants[name]
            self._order.remove((self.clocks[name], tenant.seq, name))
            if not self._tenants:  # a busy period is over, and with it all debts
                self.clocks.clear()
                self._clock = 0.0
                self._rate.idle()

    def sized(self, sizes: WorkerSizes, waiting: Mapping[RequestId, QueuedRequest]) -> None:
        """Lengths are told apart by these from now on.

        Args:
            sizes: Of the workers.
            waiting: Those who wait, and maybe others.
        """
        if sizes == self._sizes:
            return
        self._sizes = sizes
        self.groups = WaitGroups()
        self._tenants = {name: _TenantQueue(tenant.seq) for name, tenant in self._tenants.items()}
        for request_id in self._group_of_request:
            each = waiting[request_id]
            group = self._group_of_request[request_id] = self._group_of(each)
            self._tenants[each.tenant].add(each, group)

    def heads(self) -> Iterator[tuple[RequestId, WaitGroup]]:
        """Of each tenant and each wish that is before no gate the first, the next one first; until somebody comes or leaves."""
        for _, _, name in self._order:
            for _, _, request_id, group in self._tenants[name].heads():
                if not group.blocked_on.closed:
                    yield request_id, group

    def left(self, tokens: int, now: Nanos) -> None:
        """A prompt of so many tokens has left for a worker, whether it waited or found one that nobody waits for."""
        self._rate.left(tokens, now)

    def charge(self, name: str, tokens: int) -> None:
        """A tenant's request has left for a worker, which has to compute so many tokens of it."""
        clock = max(self._clock, self.clocks.get(name, -inf))
        self._clock = clock
        after = clock + tokens / self.weight(name)
        if (tenant := self._tenants.get(name)) is not None:
            self._order.remove((self.clocks[name], tenant.seq, name))
            insort(self._order, (after, tenant.seq, name))
        self.clocks[name] = after
        if len(self.clocks) > len(self._tenants) + MAX_IDLE_CLOCKS:
            self.clocks = {
                other: clock for other, clock in self.clocks.items() if other in self._tenants or clock > self._clock
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
        if (rate := self._rate.tokens_per_second(now)) is None:
            return None
        own = 0.0
        if (tenant := self._tenants.get(name)) is not None:
            own = tenant.tokens * (1.0 if place is None else tenant.ranked.before(place) / len(tenant.ranked))
        if own == 0:
            return 0.0
        if rate <= 0:
            return inf
        weights = sum(map(self.weight, self._tenants.keys() | {name}))
        return min(float(self._tokens), own * weights / self.weight(name)) / rate

    def check(self) -> None:
        assert sorted(self._order) == self._order
        assert {name for _, _, name in self._order} == set(self._tenants)
        for clock, seq, name in self._order:
            assert self.clocks[name] == clock, name
            assert self._tenants[name].seq == seq, name
        assert all(tenant.ranked for tenant in self._tenants.values())
        assert self._tokens == sum(tenant.tokens for tenant in self._tenants.values())
        self.groups.check()
        assert Counter(group.value for group in self._group_of_request.values()) == {
            group.value: group.waiting for group in self.groups
        }
        for tenant in self._tenants.values():
            tenant.check(self._group_of_request)


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
        self._groups = groups = queue.groups
        groups.searches += 1
        self._number = groups.searches
        self._has_room = has_room
        self._most = inf if most is None else most
        self._tries = 0  # in vain
        self._first = MAX_FIRST_TRIES if most is not None else 0  # tries that are left for those who are untried
        self._open = 0  # of these wishes, those that stand before no gate
        self._tried: WaitGroup | None = None

    def candidates(self) -> Iterator[RequestId]:
        """Whom to try, until somebody leaves; then ask anew. Who was tried and stays is told to `mark_rejected` before the next is asked for."""
        groups = self._groups
        while groups.open > self._open:
            for request_id, group in self._queue.heads():
                if group.rejected_in == self._number or (
                    group.blocked_on.changed and groups.still_blocked(group, self._has_room)
                ):
                    continue
                first = not group.rejected_in and self._first > 0
                further = not first and 2 * self._tries >= self._most
                if further and group.turn == groups.turn:
                    continue
                if not first and self._tries >= self._most:
                    if groups.untried and self._first:
                        continue
                    return
                self._tried = group
                yield request_id
                if further:
                    group.turn = groups.turn
                    groups.had_turn += 1
                if groups.open <= self._open:
                    break
            if not groups.had_turn or self._tries >= self._most:
                return
            groups.next_turn()  # all had theirs

    def mark_rejected(self, busy: BusyWorkers) -> None:
        """The latest candidate waits on, for one of these to change."""
        assert self._tried is not None
        if not self._tried.rejected_in and self._first:
            self._first -= 1
        else:
            self._tries += 1
        self._groups.mark_rejected(self._tried, busy)
        self._open += not self._tried.blocked_on.closed


class AdmissionQueue:
    """All that wait at one router. Weights may be changed in place; who is not named weighs 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.queues: dict[ModelName, FairQueue] = {}  # one a model that ever had to wait
        self._waiting: dict[RequestId, QueuedRequest] = {}
        self._sizes: dict[ModelName, WorkerSizes] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, model: ModelName) -> RequestId | None:
        """Who is next; None when nobody waits for this model."""
        queue = self.queues.get(model)
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
        group = queue.add(waiting, now)
        if busy:
            queue.groups.mark_rejected(group, busy)

    def _queue(self, model: ModelName) -> FairQueue:
        if (queue := self.queues.get(model)) is None:
            queue = self.queues[model] = FairQueue(self._weights, self._sizes.get(model, WorkerSizes()))
        return queue

    def changed(self, model: ModelName, worker_id: WorkerId) -> None:
        """A worker may have room again."""
        if (queue := self.queues.get(model)) is not None and queue.groups.blockages:
            queue.groups.changed(worker_id)

    def gone(self, model: ModelName, worker_id: WorkerId) -> None:
        """A worker takes no more requests."""
        if (queue := self.queues.get(model)) is not None:
            queue.groups.changed(worker_id, gone=True)

    def moved(self, session: SessionKey) -> list[ModelName]:
        """A session's requests may go elsewhere than before; returns the models that some of them wait for."""
        return [model for model, queue in self.queues.items() if queue.groups.moved(session)]

    def all_changed(self, *models: ModelName) -> None:
        """Anybody of these may have room for whoever waits."""
        for model in models:
            if (queue := self.queues.get(model)) is not None:
                queue.groups.all_changed()

    def sized(self, model: ModelName, sizes: WorkerSizes) -> None:
        """Requests that the workers of a model can serve are told apart by these lengths, from now on."""
        self._sizes[model] = sizes
        if (queue := self.queues.get(model)) is not None:
            queue.sized(sizes, self._waiting)

    def discard(self, request_id: RequestId) -> QueuedRequest | None:
        """It waits no more, and was not served; None when it did not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.queues[waiting.model].remove(waiting)
        return waiting

    def served(self, request_id: RequestId, model: ModelName, tokens: int, computed: int, now: Nanos) -> None:
        """A worker gets a prompt of so many tokens, and has to compute some of them; if the request waited, it waits no more."""
        if (queue := self.queues.get(model)) is None:
            return
        queue.left(tokens, now)
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            queue.charge(waiting.tenant, computed)
            queue.remove(waiting)

    def request_to_drop(self) -> RequestId | None:
        """Who has to go when one is too many (rule 4); None when all have to stay."""
        tenants = [
            (backlog, model, name) for model, queue in self.queues.items() for backlog, name in queue.by_backlog()
        ]
        for _, model, name in sorted(tenants, reverse=True):
            for request_id in self.queues[model].worst(name):
                if not self._waiting[request_id].stays:
                    return request_id
        return None

    def seconds_to_wait(self, model: ModelName, tenant: str, now: Nanos, place: int | None = None) -> float | None:
        """About how long a new request would wait (rule 5), by its rank or behind all others; None when nobody can say."""
        queue = self.queues.get(model)
        return None if queue is None else queue.seconds_to_wait(tenant, now, place)

    def search(self, model: ModelName, most: int | None, has_room: HasRoom) -> QueueSearch:
        """For those who need not wait on, now that something has changed.

        Args:
            model: Of which somebody has room, or is gone, and for which somebody waits.
            most: Tries in vain; None: any number.
            has_room: Whether a worker has.
        """
        return QueueSearch(self.queues[model], most, has_room)

    def models(self) -> list[ModelName]:
        """That somebody waits for."""
        return [model for model, queue in self.queues.items() if queue.first is not None]

    def ids(self) -> list[RequestId]:
        return list(self._waiting)

    def check(self) -> None:
        assert len(self._waiting) == sum(map(len, self.queues.values()))
        for queue in self.queues.values():
            queue.check()
