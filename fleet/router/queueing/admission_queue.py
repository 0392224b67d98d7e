"""Admission queue: requests that wait for room, their order, the request to drop when the queue is full, and the predicted wait.

Rules:

1. Each model has a queue of its own, so busy workers of one model do not delay requests for another model. A request that demands
   particular workers does not delay others either: all requests of its *wait group* are skipped until something changes for them
   (`fleet.router.queueing.wait_groups`). If there are more wait groups than can be tried after a change, the groups that are not at the
   front take turns (`QueueSearch`).
2. Among the tenants, the least served one is next. Its service is measured in the prompt tokens that workers compute for its requests from
   the queue, divided by the tenant's weight (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996). This measure is the tenant's
   *clock*. A tenant that begins to wait starts at least at the clock of the tenant that was served last, so it gains nothing by having been
   idle. When the queue is empty, all clocks start again at 0.
3. Among the requests of a tenant, the lowest queue position is next. The position is a fixed instant: the arrival, made earlier by a
   priority and, if the settings say so, later by a long prompt (`queue_position` in `fleet.router.state.live_requests`). So no request is
   overtaken for ever.
4. When the queue is full, the last request of the tenant with the most waiting tokens, divided by its weight, is dropped. That may be the
   new request. A request that had been placed before stays, because its client may have begun to read the answer.
5. The predicted wait is the backlog before a request (by rules 2 and 3), divided by the rate at which requests have left the queue. Both
   count prompt tokens, cached or not. There is no prediction until enough requests have left.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.router.placement.candidate_table import WorkerSizes
from fleet.router.queueing.wait_groups import UNKNOWN_WORKERS, BusyWorkers, HasRoom, WaitGroup, WaitGroups
from fleet.router.sessions import SessionKey
from fleet.router.state.departure_rate import DepartureRate
from fleet.router.state.live_requests import OrderedRequests, QueuePosition

# Maximum number of untried wait groups (`fleet.router.queueing.wait_groups`, rule 3) that one `QueueSearch` tries without success, in
# addition to its limited number of other failing tries. 1024 tries take about 35 ms.
MAX_FIRST_TRIES = 1024
# Number of clocks that are kept for tenants without waiting requests. If there are more, those clocks are removed that are not ahead of the
# clock of the tenant that was served last, because they make no difference (rule 2).
MAX_IDLE_CLOCKS = 64

GroupHead = tuple[int, int, RequestId, WaitGroup]
"""Queue position of the first request of a wait group, and the group."""


class QueuedRequest(Struct, frozen=True, kw_only=True):
    """One request in the admission queue."""

    request_id: RequestId
    model: ModelName
    tenant: str = ""
    rank: int  # queue position as an instant in nanoseconds; the lowest goes first
    seq: int  # number in the order of arrival, for requests with equal positions
    tokens: int  # number of tokens of the prompt
    whole_tokens: int = 0  # number of tokens of the prompt and of the longest possible answer together
    wait_key: Hashable = (
        # Equal for requests that the same workers may serve if lengths and sessions do not count. None: every worker may serve the request.
        None
    )
    # The session, if only the worker to which it is bound may serve the request; otherwise None.
    session: SessionKey | None = None
    stays: bool = False  # True if the request must not be dropped when the queue is full (rule 4)


class _TenantQueue:
    """Keeps the requests of one tenant for one model. The object exists only while the tenant has waiting requests."""

    def __init__(self, seq: int) -> None:
        # Arrival number of the tenant's first request; of tenants with equal clocks, the one with the lowest number goes first.
        self.seq = seq
        self.tokens = 0
        self.requests = OrderedRequests()
        # The requests of each wait group. As long as the tenant has had only one group, its value is `requests` itself.
        self.queues: dict[WaitGroup, OrderedRequests] = {}
        # The first request of each group, in order; empty as long as the tenant has had only one group.
        self._heads: list[GroupHead] = []

    def add(self, waiting: QueuedRequest, group: WaitGroup) -> None:
        if (queue := self.queues.get(group)) is None:
            queue = self.queues[group] = self._another_queue()
        if queue is not self.requests:
            first = queue.place if queue else None
            queue.add(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(group, queue, first)
        self.requests.add(waiting.rank, waiting.seq, waiting.request_id)
        self.tokens += waiting.tokens

    def remove(self, waiting: QueuedRequest, group: WaitGroup) -> None:
        queue = self.queues[group]
        if queue is not self.requests:
            first = queue.place
            queue.discard(waiting.rank, waiting.seq, waiting.request_id)
            self._note_head(group, queue, first)
        self.requests.discard(waiting.rank, waiting.seq, waiting.request_id)
        if not queue:
            del self.queues[group]
        self.tokens -= waiting.tokens

    def heads(self) -> Sequence[GroupHead]:
        """Return the first request of each wait group, with the group, in the order of queue positions."""
        return self._heads or [(*self.requests.place, group) for group in self.queues]

    def _another_queue(self) -> OrderedRequests:
        if not self.queues:
            return self.requests
        for group, queue in self.queues.items():
            if queue is self.requests:
                self.queues[group] = queue.copy()
                self._heads = [(*queue.place, group)]
        return OrderedRequests()

    def _note_head(self, group: WaitGroup, queue: OrderedRequests, was: QueuePosition | None) -> None:
        """Enter the first request of a wait group into `_heads` after a change of the group.

        Args:
            group: The wait group that has changed.
            queue: Its requests after the change.
            was: Position of its first request before the change; None if the group was empty.
        """
        if queue and queue.place == was:
            return
        if was is not None:
            del self._heads[bisect_left(self._heads, (*was, group))]
        if queue:
            insort(self._heads, (*queue.place, group))

    def check(self, group_of: Mapping[RequestId, WaitGroup]) -> None:
        assert self.heads() == sorted((*queue.place, group) for group, queue in self.queues.items())
        assert sorted(self.requests) == sorted(each for queue in self.queues.values() for each in queue)
        assert all(group_of[each] is group for group, queue in self.queues.items() for each in queue)


class FairQueue:
    """Orders the queued requests of one model by tenants, and within a tenant by queue positions (rules 2 to 5)."""

    def __init__(self, weights: Mapping[str, float], sizes: WorkerSizes) -> None:
        self._weights = weights
        self._tenants: dict[str, _TenantQueue] = {}
        # Clock, arrival number and name of each tenant with waiting requests, in the order in which the tenants are served.
        self._order: list[tuple[float, int, str]] = []
        self.clocks: dict[str, float] = {}  # clock of each tenant; a tenant without an entry is not ahead of `_clock`
        self._clock = 0.0  # clock of the tenant that was served last
        self._tokens = 0
        self._rate = DepartureRate()
        self._sizes = sizes
        self._group_of_request: dict[RequestId, WaitGroup] = {}
        self.groups = WaitGroups()

    def __len__(self) -> int:
        return len(self._group_of_request)

    def add(self, waiting: QueuedRequest, now: Nanos) -> WaitGroup:
        """Add a request to its tenant and its wait group. Return the group."""
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
        """Add a request to the wait group of all requests that the same workers can serve, and return the group."""
        reach = self._sizes.reach(waiting.tokens, waiting.whole_tokens)
        return self.groups.join((waiting.wait_key, waiting.session, reach), waiting.session)

    @property
    def first(self) -> RequestId | None:
        return self._tenants[self._order[0][2]].requests.first if self._order else None

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a request, whether it was served or not."""
        name = waiting.tenant
        tenant = self._tenants[name]
        group = self._group_of_request.pop(waiting.request_id)
        tenant.remove(waiting, group)
        group.waiting -= 1
        if not group.waiting:
            self.groups.remove(group)
        self._tokens -= waiting.tokens
        if not tenant.requests:
            del self._tenants[name]
            self._order.remove((self.clocks[name], tenant.seq, name))
            if not self._tenants:  # the queue is empty, so all tenants start again with equal clocks
                self.clocks.clear()
                self._clock = 0.0
                self._rate.idle()

    def set_sizes(self, sizes: WorkerSizes, waiting: Mapping[RequestId, QueuedRequest]) -> None:
        """Form new wait groups if the sizes of the workers have changed, because other prompts then fit on them than before.

        Args:
            sizes: The sizes of the workers.
            waiting: The queued requests by id. Requests for other models may be among them.
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
        """Yield, for each tenant, the first request of each of its wait groups that is not blocked, in the order of the queue.

        The iterator becomes invalid when the queue changes.
        """
        for _, _, name in self._order:
            for _, _, request_id, group in self._tenants[name].heads():
                if not group.blocked_on.closed:
                    yield request_id, group

    def departed(self, tokens: int, now: Nanos) -> None:
        """Record that a prompt of `tokens` tokens was given to a worker, whether the request had waited in the queue or not."""
        self._rate.departed(tokens, now)

    def charge(self, name: str, tokens: int) -> None:
        """Advance the clock of a tenant that is served, by the tokens that a worker has to compute for it, divided by its weight."""
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
        """Return, for each tenant with waiting requests, their prompt tokens divided by the tenant's weight, and the tenant's name."""
        return [(tenant.tokens / self.weight(name), name) for name, tenant in self._tenants.items()]

    def from_last(self, name: str) -> Iterator[RequestId]:
        """Return an iterator over a tenant's requests, the last one first."""
        return reversed(self._tenants[name].requests)

    def seconds_to_wait(self, name: str, now: Nanos, place: int | None = None) -> float | None:
        """Estimate how long a new request of this tenant would wait, in seconds, at the queue position `place` (None: last).

        The backlog of the tenant is served with the tenant's share of the departure rate. The estimate is never longer than the time that
        the whole queue takes. The result is None if too little was measured, 0 if no request of the tenant is before the new one, and
        infinite if the departure rate is 0.
        """
        if (rate := self._rate.per_second(now)) is None:
            return None
        own = 0.0
        if (tenant := self._tenants.get(name)) is not None:
            own = tenant.tokens * (1.0 if place is None else tenant.requests.before(place) / len(tenant.requests))
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
        assert all(tenant.requests for tenant in self._tenants.values())
        assert self._tokens == sum(tenant.tokens for tenant in self._tenants.values())
        self.groups.check()
        assert Counter(group.value for group in self._group_of_request.values()) == {
            group.value: group.waiting for group in self.groups
        }
        for tenant in self._tenants.values():
            tenant.check(self._group_of_request)


class QueueSearch:
    """Searches the queue of one model, after a change, for requests that need not wait any longer. It goes in the order of the queue.

    Each try takes time, so at most `most` tries may fail after a change. Half of these tries are for the wait groups at the front. The
    other half is for the groups that were not tried yet in this *turn*, so that no group is skipped for ever. A new turn begins when all
    groups were tried. In addition, up to `MAX_FIRST_TRIES` untried groups (`fleet.router.queueing.wait_groups`, rule 3) are tried, because
    the worker that has room now may be one that only these groups can use.
    """

    def __init__(self, queue: FairQueue, most: int | None, has_room: HasRoom) -> None:
        """Begin a search.

        Args:
            queue: The queue to search.
            most: The number of tries that may fail; None: any number.
            has_room: A function that returns whether a worker has room.
        """
        self._queue = queue
        self._groups = groups = queue.groups
        groups.searches += 1
        self._number = groups.searches
        self._has_room = has_room
        self._most = inf if most is None else most
        self._tries = 0  # number of tries in this search that have failed, without the first tries of untried groups
        # How many more untried groups may be tried in addition to the tries that may fail.
        self._first = MAX_FIRST_TRIES if most is not None else 0
        # Number of groups that were rejected in this search and are not blocked, because the workers that they wait for are not known.
        self._open = 0
        self._tried: WaitGroup | None = None

    def candidates(self) -> Iterator[RequestId]:
        """Yield requests to try. When a request has left the queue, call this method again.

        If a request stays in the queue, call `mark_rejected` before the next step of the iteration.
        """
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
            groups.next_turn()  # all groups were tried in this turn

    def mark_rejected(self, busy: BusyWorkers) -> None:
        """Record that the request that `candidates` yielded last still waits, for one of the workers `busy` (empty: they are not known)."""
        assert self._tried is not None
        if not self._tried.rejected_in and self._first:
            self._first -= 1
        else:
            self._tries += 1
        self._groups.mark_rejected(self._tried, busy)
        self._open += not self._tried.blocked_on.closed


class AdmissionQueue:
    """Keeps all queued requests of one router.

    The mapping `weights` has the weight of each tenant; a tenant without an entry has weight 1. The caller may change the mapping later.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.queues: dict[ModelName, FairQueue] = {}  # the queue of each model that has ever had a queued request
        self.waiting: dict[RequestId, QueuedRequest] = {}
        """The queued requests by id; callers must not change it. While it is empty, callers need not report that room was released."""

        self._sizes: dict[ModelName, WorkerSizes] = {}
        self.may_move: dict[ModelName, bool] = {}
        """Models whose queued requests may be placed after a change. The value is True if a worker has gone."""

    def first(self, model: ModelName) -> RequestId | None:
        """Return the first queued request of a model; None if no request waits for the model."""
        queue = self.queues.get(model)
        return None if queue is None else queue.first

    def add(self, waiting: QueuedRequest, now: Nanos, busy: BusyWorkers = UNKNOWN_WORKERS) -> None:
        """Add a request to the queue of its model.

        Args:
            waiting: The request.
            now: The present instant.
            busy: The workers that the request waits for; empty if it was not tried yet, or if they are not known.
        """
        assert waiting.request_id not in self.waiting, waiting.request_id
        self.waiting[waiting.request_id] = waiting
        queue = self._queue(waiting.model)
        group = queue.add(waiting, now)
        if busy:
            queue.groups.mark_rejected(group, busy)

    def _queue(self, model: ModelName) -> FairQueue:
        if (queue := self.queues.get(model)) is None:
            queue = self.queues[model] = FairQueue(self._weights, self._sizes.get(model, WorkerSizes()))
        return queue

    def changed(self, model: ModelName, worker_id: WorkerId) -> None:
        """Record that a worker may have room again, so that the wait groups that wait for it are tried."""
        if (queue := self.queues.get(model)) is not None and queue.groups.blockages:
            queue.groups.changed(worker_id)

    def room_released(self, model: ModelName, worker_id: WorkerId) -> None:
        """Record that a request has released its reservation on a worker, so that queued requests of the model may be placed."""
        self.changed(model, worker_id)
        self.may_move.setdefault(model, False)

    def gone(self, model: ModelName, worker_id: WorkerId) -> None:
        """Record that a worker takes no more requests, so that requests that waited for it are tried again."""
        if (queue := self.queues.get(model)) is not None:
            queue.groups.changed(worker_id, gone=True)

    def session_moved(self, session: SessionKey) -> list[ModelName]:
        """Record that a session's requests may go to another worker. Return the models for which such requests are queued."""
        return [model for model, queue in self.queues.items() if queue.groups.session_moved(session)]

    def all_changed(self, *models: ModelName) -> None:
        """Record that any queued request of these models may be served now, so that all of them are tried again."""
        for model in models:
            if (queue := self.queues.get(model)) is not None:
                queue.groups.all_changed()

    def set_sizes(self, model: ModelName, sizes: WorkerSizes) -> None:
        """Use these worker sizes from now on to decide which requests of a model the same workers can serve."""
        self._sizes[model] = sizes
        if (queue := self.queues.get(model)) is not None:
            queue.set_sizes(sizes, self.waiting)

    def discard(self, request_id: RequestId) -> QueuedRequest | None:
        """Remove a request that was not served, and return it; None if it was not queued."""
        waiting = self.waiting.pop(request_id, None)
        if waiting is not None:
            self.queues[waiting.model].remove(waiting)
        return waiting

    def served(self, request_id: RequestId, model: ModelName, tokens: int, computed: int, now: Nanos) -> None:
        """Record that a prompt of `tokens` tokens was given to a worker, which has to compute `computed` of them.

        If the request was queued, remove it, and charge its tenant with the computed tokens.
        """
        if (queue := self.queues.get(model)) is None:
            return
        queue.departed(tokens, now)
        if (waiting := self.waiting.pop(request_id, None)) is not None:
            queue.charge(waiting.tenant, computed)
            queue.remove(waiting)

    def request_to_drop(self) -> RequestId | None:
        """Return the request to drop when too many requests are queued (rule 4); None if no request may be dropped."""
        tenants = [
            (backlog, model, name) for model, queue in self.queues.items() for backlog, name in queue.by_backlog()
        ]
        for _, model, name in sorted(tenants, reverse=True):
            for request_id in self.queues[model].from_last(name):
                if not self.waiting[request_id].stays:
                    return request_id
        return None

    def seconds_to_wait(self, model: ModelName, tenant: str, now: Nanos, place: int | None = None) -> float | None:
        """Estimate the seconds that a new request would wait at the queue position `place` (None: at the end).

        Return None if the model never had a queued request, or if too little was measured.
        """
        queue = self.queues.get(model)
        return None if queue is None else queue.seconds_to_wait(tenant, now, place)

    def search(self, model: ModelName, most: int | None, has_room: HasRoom) -> QueueSearch:
        """Begin a search for requests that need not wait any longer.

        Args:
            model: A model with queued requests. One of its workers has room or has gone.
            most: The number of tries that may fail; None: any number.
            has_room: A function that returns whether a worker has room.
        """
        return QueueSearch(self.queues[model], most, has_room)

    def models(self) -> list[ModelName]:
        """Return the models with queued requests."""
        return [model for model, queue in self.queues.items() if queue.first is not None]

    def check(self) -> None:
        assert len(self.waiting) == sum(map(len, self.queues.values()))
        for queue in self.queues.values():
            queue.check()
