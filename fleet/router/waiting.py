"""Requests that wait for room: who is next, who has to go when the room is full, how long it will take.

Rules:

1. Requests wait by model: busy workers of one model hold nobody up who wants another.
2. Between tenants: who was served least is next, in prompt tokens computed over the tenant's weight (start-time fair
   queueing, Goyal, Vin and Cheng, SIGCOMM 1996). A tenant that begins to wait starts where the one served last stands:
   idleness earns nothing. When nobody waits all debts are forgotten.
3. Within a tenant: by rank, an instant. Whoever prefers one request to another says by how much earlier it would have
   had to arrive, so nobody is overtaken for ever.
4. When the room is full the lowest ranked request goes of the tenant that has most tokens waiting over its weight. That
   may be the newcomer. A request that had been placed before stays: somebody has begun to read its answer.
5. How long a request will wait is what waits before it over the pace at which requests have been leaving. Without
   enough evidence nothing is said.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from math import exp, inf

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from fleet.ids import ModelName, RequestId
from fleet.router.ranked import Ranked

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
    """Tokens a second that leave while somebody waits, recent ones counting more."""

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

    def charge(self, name: str, tokens: int, now: Nanos) -> None:
        """A request that waited here has left for a worker, which has to compute so many tokens of it."""
        clock = max(self._clock, self._clocks.get(name, -inf))
        self._clock = clock
        after = clock + tokens / self.weight(name)
        if (tenant := self._tenants.get(name)) is not None:
            self._order.remove((self._clocks[name], tenant.seq, name))
            insort(self._order, (after, tenant.seq, name))
        self._clocks[name] = after
        self._pace.left(tokens, now)
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

    def seconds_to_wait(self, name: str, now: Nanos) -> float | None:
        """About how long a new request of this tenant would wait.

        It has its share of the pace for its own backlog, but never waits longer than everybody's backlog takes.
        """
        if (pace := self._pace.tokens_per_second(now)) is None:
            return None
        if pace <= 0:
            return inf
        own = self._tenants[name].tokens if name in self._tenants else 0
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


class WaitingRoom:
    """All that wait at one router. Weights may be changed in place; who is not named weighs 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[ModelName, FairQueue] = {}  # one a model that ever had to wait
        self._waiting: dict[RequestId, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def first(self, model: ModelName) -> RequestId | None:
        """Who is next; None when nobody waits for this model."""
        queue = self._queues.get(model)
        return None if queue is None else queue.first

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

    def served(self, request_id: RequestId, tokens: int, now: Nanos) -> None:
        """If it waited, it waits no more: a worker computes `tokens` tokens for it."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        queue = self._queues[waiting.model]
        queue.charge(waiting.tenant, tokens, now)
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

    def seconds_to_wait(self, model: ModelName, tenant: str, now: Nanos) -> float | None:
        """About how long a new request would wait (rule 5); None when nobody can say."""
        queue = self._queues.get(model)
        return None if queue is None else queue.seconds_to_wait(tenant, now)

    def models(self) -> list[ModelName]:
        """That somebody waits for."""
        return [model for model, queue in self._queues.items() if queue.first is not None]

    def ids(self) -> list[RequestId]:
        return list(self._waiting)

    def check(self) -> None:
        assert len(self._waiting) == sum(map(len, self._queues.values()))
        for queue in self._queues.values():
            queue.check()
