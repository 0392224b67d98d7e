"""Requests that wait for room: who is next, who has to go when the room is full, how long it will take.

Rules:

1. Requests wait by model: busy workers of one model hold nobody up who wants another. Nor does who asks for particular workers, by
   its *wish*, hold up those who ask for others: where its own are busy, it is passed over until something has changed. Where there are
   more wishes than can be tried at once, those further back have their turns one after the other (`Search`).
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

from bisect import insort
from collections.abc import Hashable, Iterator, Mapping
from math import exp, inf

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from fleet.ids import ModelName, RequestId
from fleet.router.ranked import Place, Ranked

PACE_SECONDS = 10.0  # memory of the pace; a burst is over in less, a change of load is noticed in a few of them
EVIDENCE = 8  # departures before a pace is believed
LONGEST_SECONDS = 1e9  # thirty years; more is the same, and infinitely much is no number to reckon with
LAGGARDS = 64  # tenants not waiting whose clocks are kept without looking


class Waiting(Struct, frozen=True, kw_only=True):
    """One request in the room."""

    request_id: RequestId
    model: ModelName
    tenant: str = ""
    rank: int  # nanoseconds; lower is first
    seq: int  # order of arrival, for equal ranks
    tokens: int  # of the prompt
    wish: Hashable = None  # who may serve it, as far as that is not anybody; equal ones wait for the same
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
    step, thousand = min(priority_seconds, LONGEST_SECONDS), min(size_seconds, LONGEST_SECONDS)
    return arrived - round(priority * step * SECOND) + round(tokens * thousand * SECOND / 1000)


class Pace:
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
        keep = exp(-seconds / PACE_SECONDS)
        return self._tokens * keep, self._seconds * keep + seconds


class _Tenant:
    """One tenant's requests for one model; there is no such object for a tenant of whom none waits."""

    def __init__(self, seq: int) -> None:
        self.seq = seq  # of the request with which it began to wait: among equal clocks the earlier is first
        self.ranked = Ranked()
        self.tokens = 0


class FairQueue:
    """Rules 2 to 5 for one model."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._order: list[tuple[float, int, str]] = []  # of the tenants that wait: clock, seq, name
        self._clocks: dict[str, float] = {}  # missing: not ahead of `_clock`
        self._clock = 0.0  # of the tenant served last
        self._tokens = 0
        self._pace = Pace()

    def __len__(self) -> int:
        return sum(len(tenant.ranked) for tenant in self._tenants.values())

    def add(self, waiting: Waiting, now: Nanos) -> None:
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self._tenants[waiting.tenant] = _Tenant(waiting.seq)
            clock = max(self._clock, self._clocks.get(waiting.tenant, -inf))
            self._clocks[waiting.tenant] = clock
            insort(self._order, (clock, tenant.seq, waiting.tenant))
        tenant.ranked.add(waiting.rank, waiting.seq, waiting.request_id)
        tenant.tokens += waiting.tokens
        self._tokens += waiting.tokens
        self._pace.busy(now)

    @property
    def first(self) -> RequestId | None:
        return self._tenants[self._order[0][2]].ranked.first if self._order else None

    def remove(self, waiting: Waiting) -> None:
        """It waits no more, for whatever reason."""
        name = waiting.tenant
        tenant = self._tenants[name]
        tenant.ranked.discard(waiting.rank, waiting.seq, waiting.request_id)
        tenant.tokens -= waiting.tokens
        self._tokens -= waiting.tokens
        if not tenant.ranked:
            del self._tenants[name]
            self._order.remove((self._clocks[name], tenant.seq, name))
            if not self._tenants:  # a busy period is over, and with it all debts
                self._clocks.clear()
                self._clock = 0.0
                self._pace.idle()

    def in_order(self, behind: dict[str, Place]) -> Iterator[RequestId]:
        """All that wait behind these places of their tenants, the next one first; whoever was passed over is noted there."""
        for _, _, name in self._order:
            for place in self._tenants[name].ranked.behind(behind.get(name)):
                yield place[-1]
                behind[name] = place

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
        if len(self._clocks) > len(self._tenants) + LAGGARDS:
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
        return reversed(self._tenants[name].ranked.ids())

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


class Search:
    """For those of one model who need not wait on, after something has changed; the next one first.

    Each try takes time, so only `most` wishes are tried in vain after a change. Half of these are the foremost. The others are those
    that were not tried since all had their turn last: however many ask in vain before it, a wish is not passed over for ever.
    """

    def __init__(self, room: "WaitingRoom", model: ModelName, turn: set[Hashable], most: int | None) -> None:
        """Nobody was tried.

        Args:
            room: Where they wait.
            model: The one.
            turn: Wishes that had their turn; is kept from search to search, empty at first.
            most: Wishes that are tried in vain; None: all.
        """
        self._room = room
        self._model = model
        self._turn = turn
        self._most = inf if most is None else most
        self._vain: set[Hashable] = set()
        self._behind: dict[str, Place] = {}

    def candidates(self) -> Iterator[Waiting]:
        """Whom to try, until somebody leaves; then ask anew. Who is tried and stays has asked in vain."""
        vain, turn = self._vain, self._turn
        while True:
            for waiting in self._room.in_order(self._model, self._behind):
                wish = waiting.wish
                further = 2 * len(vain) >= self._most
                if wish in vain or (further and wish in turn):
                    continue
                if len(vain) >= self._most:
                    return
                yield waiting
                vain.add(wish)
                if further:
                    turn.add(wish)
            if not turn:
                return
            turn.clear()  # all had theirs
            self._behind.clear()


class WaitingRoom:
    """All that wait at one router. Weights may be changed in place; who is not named weighs 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[ModelName, FairQueue] = {}  # one a model that ever had to wait
        self._waiting: dict[RequestId, Waiting] = {}
        self._turns: dict[ModelName, set[Hashable]] = {}  # of each one's latest searches

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def first(self, model: ModelName) -> RequestId | None:
        """Who is next; None when nobody waits for this model."""
        queue = self._queues.get(model)
        return None if queue is None else queue.first

    def in_order(self, model: ModelName, behind: dict[str, Place]) -> Iterator[Waiting]:
        """All that wait for a model, the next one first; until somebody comes or leaves.

        Args:
            model: Of the room.
            behind: Places, by tenant, up to which nobody is looked at; is moved behind each that was passed over. So who looks
                again after somebody has left does not look at the same ones again.
        """
        if (queue := self._queues.get(model)) is not None:
            for request_id in queue.in_order(behind):
                yield self._waiting[request_id]

    def add(self, waiting: Waiting, now: Nanos) -> None:
        assert waiting.request_id not in self._waiting, waiting.request_id
        self._waiting[waiting.request_id] = waiting
        if (queue := self._queues.get(waiting.model)) is None:
            queue = self._queues[waiting.model] = FairQueue(self._weights)
        queue.add(waiting, now)

    def discard(self, request_id: RequestId) -> Waiting | None:
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
        if (waiting := self._waiting.get(request_id)) is not None:
            queue.charge(waiting.tenant, computed)
            self.discard(request_id)

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

    def search(self, model: ModelName, most: int | None) -> Search:
        """For those who need not wait on, now that something has changed.

        Args:
            model: Of which somebody has room, or is gone.
            most: Wishes that are tried in vain; None: all.
        """
        turn = self._turns.setdefault(model, set())
        if len(turn) > len(self._waiting):  # most of these are over
            turn.clear()
        return Search(self, model, turn, most)

    def models(self) -> list[ModelName]:
        """That somebody waits for."""
        return [model for model, queue in self._queues.items() if queue.first is not None]

    def ids(self) -> list[RequestId]:
        return list(self._waiting)

    def check(self) -> None:
        assert len(self._waiting) == sum(map(len, self._queues.values()))
        for queue in self._queues.values():
            queue.check()
