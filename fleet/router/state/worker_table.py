"""Worker table: the workers of one model, with the capacity that live requests reserve on them, kept up to date as requests come and go.

Each request gets a copy of the table. Only for workers that hold a part of its prompt, more values have to be computed.

Rules of reservations. A reservation begins when a request is placed on a worker, not when the worker reports the request.

1. A request reserves, on each worker that works or will work for it: one request, the prompt tokens that the worker has to compute,
   and the blocks that the request holds there.
2. Full blocks of the prompt are reserved by their block keys, and are counted once even if several requests share them. The rest of the
   prompt and the answer are the request's own blocks: `blocks_for(prompt + answer)` minus the full blocks. So every `block_tokens`
   generated tokens add one block.
3. If the request states an expected length of its answer, its own blocks count less for placement as the answer grows, because they will
   soon be free: they are multiplied with the share of the answer that is still to come, and rounded up. They always count as at least one
   block.
4. Prefill tokens are released when the prompt is computed. Everything else is released when the request leaves the worker, for whatever
   reason.
5. When reservations change, their sums are written to the worker's column of the table. The block keys of their prompts are kept in one
   radix tree for the whole table (`fleet.router.kv_index.prefix_index`, rule 6). So a placement need not read each worker's reservations.
6. If there are peer routers, prompts with many tokens to compute are announced to them (`fleet.router.kv_index.peer_prompts`).

Rules of the wait for a first token (`FirstTokenRate`).

7. A worker is full if more requests are reserved on it than it runs at once, or more blocks than it has. Some requests then wait in its
   engine. The setting `oversubscribe` says how many more requests the router sends than the engine can run at once.
8. While a worker is full, the router measures how many first tokens the worker sends per second. A new request waits about as long as the
   worker needs for the first tokens of all earlier requests that have none yet (J. D. C. Little, Operations Research 9, 1961). That wait
   includes the prefill, and on a decode worker the prefill on another worker.
9. On a worker that is not full, no wait is predicted: a request with a place in the batch is answered as fast as it can be.
10. If several routers use a worker, each one counts its own requests and their first tokens. The engine serves the requests of all routers
    in turn. So the requests without a first token, divided by the first tokens per second, are about the same for each router; this ratio
    is the predicted wait.
11. Two kinds of requests are not counted: those of which the router learns only the end, because an external server answers them, and
    external requests (`Arrived.external`).
12. A rate is forgotten `RATE_USED_FOR` after the worker was full for the last time. If it were kept, a slow rate could reject every request
    that would make the worker full, and then nothing would be measured any more.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.core.work import LoadReport, WorkerDescription
from fleet.router.kv_index.assumed_cache import AssumedCache
from fleet.router.kv_index.peer_prompts import (
    MAX_ANNOUNCED_KEYS,
    MIN_ANNOUNCED_TOKENS,
    PeerPrompts,
    PlacedPrompt,
    PromptAnnouncements,
    with_peer_prompts,
)
from fleet.router.kv_index.prefix_index import (
    CacheAccuracy,
    Chain,
    ChainHolder,
    Keys,
    Knowledge,
    PrefixIndex,
    RadixTree,
    StoreNamespace,
    engine_cache_holder,
    store_tier_holder,
)
from fleet.router.messages import ReservationTotals
from fleet.router.native.costs import spread, spread_live
from fleet.router.placement.candidate_table import CandidateTable, PoolTopology, ServingWorkers, max_requests
from fleet.router.policy import (
    ACTIVE_BLOCKS,
    BACKLOG_TOKENS,
    BELOW_BLOCKS,
    BLOCK_TOKENS,
    BOOKED,
    COMING_BLOCKS,
    CONVERSION,
    DECODE_SPEED,
    ENGINE_BLOCKS,
    KV_BLOCKS,
    LIMIT,
    MAX_RUNNING,
    NEW_BLOCKS,
    PREFILL_SPEED,
    QUANTITIES,
    REQUESTS,
    STORE_BLOCKS,
    TOKEN_SECONDS,
    Flags,
    Floats,
    Rows,
    token_seconds,
)
from fleet.router.settings.router import RouterSettings
from fleet.router.state.departure_rate import DepartureRate
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.lora import lora_groups
from fleet.router.state.snapshot import WorkerSnapshot
from kvstore.block import blocks_for
from kvstore.messages import POOL_TIER
from kvstore.protocol.versions import own_protocols

# weight of the newest measurement in the average of the seconds per token; so mostly the last four measurements count
TOKEN_SECONDS_WEIGHT = 0.25
# A prefill with fewer tokens than this is not measured, because its time depends more on the engine's step than on the tokens.
MIN_MEASURED_TOKENS = 64
# Time for which the rate of first tokens is used after the worker was full: three times the memory of `DepartureRate`.
RATE_USED_FOR = 30 * SECOND


class Reservation(Struct, kw_only=True):
    """The reservation of one request on one worker."""

    chain: Chain  # block keys of the prompt's full blocks
    prompt_tokens: int
    prefill_tokens: int  # number of prompt tokens that this worker has to compute; 0 when it has computed them
    own_blocks: int  # number of blocks of the request besides the full blocks of the prompt (rule 2)
    counted_blocks: int  # the part of `own_blocks` that counts for placement (rule 3)
    answer_tokens: int = 0
    expected_tokens: int = 0  # number of answer tokens that the client expects of this worker; 0: unknown
    since: Nanos
    # Sum of `prefill_tokens` on the worker when the reservation began, including those of this request.
    tokens_ahead: int


class WorkerReservations:
    """Keeps all reservations on one worker, and writes their sums to the worker's column of the table."""

    def __init__(self, block_tokens: int, chains: RadixTree, bit: int):
        """Start without reservations.

        Args:
            block_tokens: Number of tokens of a block on this worker.
            chains: The radix tree with the prompts of live requests on all workers of the model.
            bit: The worker's bit in `chains`.
        """
        self._block_tokens = block_tokens
        self._reservations: dict[RequestId, Reservation] = {}
        self._chains = chains
        self._held = ChainHolder(bit)
        self._own_blocks = 0
        self._counted_blocks = 0
        self._token_seconds = 0.0
        self._column: Floats = np.zeros(QUANTITIES)
        self.prefill_tokens = 0

    def __len__(self) -> int:
        """Return the number of requests with a reservation."""
        return len(self._reservations)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._reservations)

    @property
    def blocks(self) -> int:
        """The number of unique blocks that all requests together hold on the worker."""
        return self._held.blocks + self._own_blocks

    @property
    def token_seconds(self) -> float:
        """The measured seconds per prompt token; 0: none was measured yet."""
        return self._token_seconds

    def keep_in(self, column: Floats) -> None:
        """Write the sums of the reservations to this column of the worker table, now and after each change of the reservations."""
        self._column = column
        column[TOKEN_SECONDS] = self._token_seconds
        self._note()

    def reserve(
        self,
        request_id: RequestId,
        keys: Sequence[int],
        prompt_tokens: int,
        prefill_tokens: int,
        now: Nanos,
        *,
        expected_tokens: int = 0,
    ) -> None:
        assert request_id not in self._reservations, request_id
        own = blocks_for(prompt_tokens, self._block_tokens) - len(keys)
        self._reservations[request_id] = Reservation(
            chain=self._chains.add(self._held, keys),
            prompt_tokens=prompt_tokens,
            prefill_tokens=prefill_tokens,
            own_blocks=own,
            counted_blocks=own,
            expected_tokens=expected_tokens,
            since=now,
            tokens_ahead=self.prefill_tokens + prefill_tokens,
        )
        self._own_blocks += own
        self._counted_blocks += own
        self.prefill_tokens += prefill_tokens
        self._note()

    def computed(self, request_id: RequestId, now: Nanos | None) -> None:
        """Release the prefill tokens of a prompt that was computed or fetched, and measure the seconds per prompt token.

        `now` is None if nothing must be measured.
        """
        reservation = self._reservations[request_id]
        if now is not None and reservation.prefill_tokens >= MIN_MEASURED_TOKENS:
            seconds = (now - reservation.since) / SECOND / reservation.tokens_ahead
            known = self._token_seconds
            self._token_seconds = seconds if known == 0 else known + TOKEN_SECONDS_WEIGHT * (seconds - known)
            self._column[TOKEN_SECONDS] = self._token_seconds
        self.prefill_tokens -= reservation.prefill_tokens
        reservation.prefill_tokens = 0
        self._column[BACKLOG_TOKENS] = self.prefill_tokens

    def grown(self, request_id: RequestId, tokens: int) -> None:
        """Count further generated tokens of a request, which may need further blocks (rules 2 and 3)."""
        reservation = self._reservations[request_id]
        reservation.answer_tokens = answer = reservation.answer_tokens + tokens
        own = blocks_for(reservation.prompt_tokens + answer, self._block_tokens) - len(reservation.chain.keys)
        counted = own if reservation.expected_tokens == 0 else _share(own, answer, reservation.expected_tokens)
        if own == reservation.own_blocks and counted == reservation.counted_blocks:
            return
        self._own_blocks += own - reservation.own_blocks
        self._counted_blocks += counted - reservation.counted_blocks
        reservation.own_blocks, reservation.counted_blocks = own, counted
        self._column[ACTIVE_BLOCKS] = self._held.blocks + self._counted_blocks

    def release(self, request_id: RequestId) -> None:
        reservation = self._reservations.pop(request_id)
        self.prefill_tokens -= reservation.prefill_tokens
        self._own_blocks -= reservation.own_blocks
        self._counted_blocks -= reservation.counted_blocks
        self._chains.remove(reservation.chain)
        self._note()

    def close(self) -> None:
        """Remove all reservations from the radix tree, because the worker has left."""
        for reservation in self._reservations.values():
            self._chains.remove(reservation.chain)

    def _note(self) -> None:
        column = self._column
        column[BACKLOG_TOKENS] = self.prefill_tokens
        column[ACTIVE_BLOCKS] = self._held.blocks + self._counted_blocks
        column[REQUESTS] = len(self._reservations)

    def chains(self) -> list[Chain]:
        """Return the chains of all reservations, for `check`."""
        return [reservation.chain for reservation in self._reservations.values()]

    def check(self) -> None:
        """Assert that the sums match the reservations."""
        held: set[int] = set()
        for reservation in self._reservations.values():
            assert reservation.prefill_tokens >= 0, reservation
            assert 0 <= reservation.counted_blocks <= reservation.own_blocks, reservation
            held.update(reservation.chain.keys)
        assert len(held) == self._held.blocks
        assert self._own_blocks == sum(reservation.own_blocks for reservation in self._reservations.values())
        assert self._counted_blocks == sum(reservation.counted_blocks for reservation in self._reservations.values())
        assert self.prefill_tokens == sum(reservation.prefill_tokens for reservation in self._reservations.values())
        kept = self._column[[BACKLOG_TOKENS, ACTIVE_BLOCKS, REQUESTS]].tolist()
        assert kept == [self.prefill_tokens, len(held) + self._counted_blocks, len(self._reservations)], kept


class AnnouncedReservations(WorkerReservations):
    """Keeps reservations like `WorkerReservations`, and announces to the peer routers the prompts with many tokens to compute (rule 6).

    A prompt is announced if `prefill_tokens >= MIN_ANNOUNCED_TOKENS`. Each reservation that begins or ends, and each computed prompt,
    counts as a change, and changes are soon sent. A growing answer is no such change (`fleet.peers.routers`, rule 3).
    """

    def __init__(
        self, block_tokens: int, chains: RadixTree, bit: int, worker_id: WorkerId, prompts: PromptAnnouncements
    ):
        super().__init__(block_tokens, chains, bit)
        self._worker_id = worker_id
        self._prompts = prompts
        self._announced_numbers: dict[RequestId, int] = {}

    def reserve(
        self,
        request_id: RequestId,
        keys: Sequence[int],
        prompt_tokens: int,
        prefill_tokens: int,
        now: Nanos,
        *,
        expected_tokens: int = 0,
    ) -> None:
        super().reserve(request_id, keys, prompt_tokens, prefill_tokens, now, expected_tokens=expected_tokens)
        self._prompts.changes += 1
        if (
            prefill_tokens >= MIN_ANNOUNCED_TOKENS
            and keys
            and (number := self._prompts.placed(self._worker_id, keys)) is not None
        ):
            self._announced_numbers[request_id] = number

    def computed(self, request_id: RequestId, now: Nanos | None) -> None:
        super().computed(request_id, now)
        self._prompts.changes += 1

    def release(self, request_id: RequestId) -> None:
        super().release(request_id)
        self._prompts.changes += 1
        if (number := self._announced_numbers.pop(request_id, None)) is not None:
            self._prompts.over(number)

    def close(self) -> None:
        super().close()
        self._prompts.changes += 1
        for number in self._announced_numbers.values():
            self._prompts.over(number)


def _share(blocks: int, tokens: int, expected: int) -> int:
    """Return how many of a request's own blocks count for placement, when `tokens` of its `expected` tokens were generated (rule 3)."""
    return min(blocks, max(1, -(-blocks * (expected - tokens) // expected)))


class FirstTokenRate:
    """Measures a worker's first tokens per second while it is full, and counts its requests without a first token (rules 7 to 12)."""

    def __init__(self, description: WorkerDescription) -> None:
        self._max_running = description.max_running
        self._kv_blocks = description.kv_blocks
        self._rate = DepartureRate()
        self._full = False
        self._full_until = Nanos(0)  # instant at which the worker stopped being full for the last time
        self._unanswered: dict[RequestId, None] = {}

    def reserved(self, request_id: RequestId, requests: int, blocks: int, now: Nanos) -> None:
        """Record that a request was reserved on the worker.

        Args:
            request_id: The request.
            requests: The number of requests on the worker, of all routers, with this one.
            blocks: The number of blocks that this router's requests hold.
            now: The present instant.
        """
        self._unanswered[request_id] = None
        if not self._full and self.full_with(requests, blocks):
            if self._is_old(now):
                self._rate = DepartureRate()
            self._full = True
            self._rate.busy(now)

    def answered(self, request_id: RequestId, now: Nanos) -> None:
        """Record the first token of a request. Do nothing if the request is not counted."""
        if request_id in self._unanswered:
            del self._unanswered[request_id]
            if self._full:
                self._rate.departed(1, now)
                self._note_rest(now, still_full=True)

    def released(self, request_id: RequestId, requests: int, blocks: int, now: Nanos) -> None:
        """Record that a request has left the worker, and how many requests and blocks are left there."""
        self._unanswered.pop(request_id, None)
        if self._full:
            self._note_rest(now, still_full=self.full_with(requests, blocks))

    def _note_rest(self, now: Nanos, *, still_full: bool) -> None:
        if not still_full or not self._unanswered:
            self._full, self._full_until = False, now
            self._rate.idle()

    def full_with(self, requests: int, blocks: int) -> bool:
        """Return whether the worker is full when it has this many requests and blocks (rule 7)."""
        return requests > self._max_running or blocks > self._kv_blocks > 0

    @property
    def unanswered(self) -> int:
        """The number of counted requests (rule 11) on the worker that have no first token yet."""
        return len(self._unanswered)

    def per_second(self, now: Nanos) -> float | None:
        """Return the first tokens per second that the worker sends while it is full; None if too little was measured lately."""
        return None if self._is_old(now) else self._rate.per_second(now)

    def _is_old(self, now: Nanos) -> bool:
        """Return whether the measured rate is not used any more (rule 12)."""
        return not self._full and now - self._full_until > RATE_USED_FOR


class RegisteredWorker:
    """One incarnation of a worker, with its reservations and its assumed cache."""

    def __init__(
        self,
        description: WorkerDescription,
        address: str,
        pool: "WorkerTable",
        request_limit: int,
        knowledge: Knowledge = Knowledge.EXACT,
        assumed_for: Nanos | None = None,
    ):
        self.description = description
        self.accuracy = CacheAccuracy(knowledge)
        self.address = address
        self.request_limit = request_limit
        self.draining = False  # only `WorkerTable` changes this value
        self.load = LoadReport(running=0, waiting=0, kv_blocks_used=0)
        self.bit = pool.take_bit()
        self.reservations = self._reservations(pool, assumed_for)
        self.first_tokens = FirstTokenRate(description)
        self.elsewhere = 0  # number of requests that peer routers have reserved here; only `WorkerTable` changes it
        self.assumed = AssumedCache(pool.assumed, self.bit, description.kv_blocks)
        self.peer_prompts = PeerPrompts(pool.peer_prompts, self.bit)
        self._assumed_for = assumed_for
        self._prompts = pool.prompts
        self.adapters_reserved: dict[str, int] = {}  # number of reserved requests by the name of their LoRA adapter

    def reserve_adapter(self, name: str) -> None:
        self.adapters_reserved[name] = self.adapters_reserved.get(name, 0) + 1

    def release_adapter(self, name: str) -> None:
        self.adapters_reserved[name] -= 1
        if not self.adapters_reserved[name]:
            del self.adapters_reserved[name]

    @property
    def requests(self) -> int:
        """The number of requests that this router and its peers have reserved on this worker."""
        return len(self.reservations) + self.elsewhere

    def seconds_to_first_token(self, new_blocks: int, now: Nanos) -> float | None:
        """Estimate how many seconds a new request would wait on this worker for its first token.

        Args:
            new_blocks: Number of blocks of the new request's prompt that no request holds on this worker yet.
            now: The present instant.

        Returns:
            None if the worker would not be full with the new request, or if too little was measured (`FirstTokenRate`).
        """
        if not self.first_tokens.full_with(self.requests + 1, self.reservations.blocks + new_blocks):
            return None
        rate = self.first_tokens.per_second(now)
        return (self.first_tokens.unanswered + 1) / rate if rate else None

    @property
    def decodes(self) -> bool:
        return self.description.role is not Role.PREFILL

    def assume(self, live: LiveRequest, now: Nanos) -> None:
        """Record that the prompt of a request will be cached on this worker, and announce it to peer routers, if there are any.

        Do nothing if the worker reports its cache.
        """
        if self._assumed_for is not None:
            keys = live.keys(self.description.block_tokens)
            self.assumed.sent(keys, Nanos(now + self._assumed_for))
            if self._prompts is not None and keys:
                self._prompts.sent(self.description.worker_id, keys)

    def assume_peer_prompt(self, keys: Keys, sent_at: Nanos, now: Nanos) -> None:
        """Assume that this worker caches a prompt that a peer router has sent to it.

        Do nothing if the worker reports its cache, or if the prompt was sent too long ago.
        """
        if self._assumed_for is None:
            return
        until = Nanos(sent_at + self._assumed_for)
        if sent_at == now:
            self.assumed.sent(keys, until)
        elif until > now:
            self.assumed.add_earlier(keys, until)

    def assumed_prompts(self, now: Nanos, most: int) -> list[PlacedPrompt]:
        """Return the latest prompts, at most `most`, that this worker is assumed to have cached. The latest one is first."""
        if self._assumed_for is None:
            return []
        return [
            PlacedPrompt(
                worker_id=self.description.worker_id,
                keys=tuple(chain.keys[:MAX_ANNOUNCED_KEYS]),
                age_ms=max(0, now + self._assumed_for - chain.until) // MILLISECOND,
            )
            for chain in self.assumed.latest(most)
            if chain.until > now
        ]

    def _reservations(self, pool: "WorkerTable", assumed_for: Nanos | None) -> WorkerReservations:
        size = self.description.block_tokens
        # Prompts of a worker that does not report its cache are not announced here, because `assume` announces them.
        if pool.prompts is None or assumed_for is not None:
            return WorkerReservations(size, pool.chains, self.bit)
        return AnnouncedReservations(size, pool.chains, self.bit, self.description.worker_id, pool.prompts)

    def snapshot(self, cached_blocks: int, booked_elsewhere: int) -> WorkerSnapshot:
        protocols = self.description.protocols
        return WorkerSnapshot(
            worker_id=self.description.worker_id,
            state="draining" if self.draining else "serving",
            engine=self.description.engine,
            address=self.address,
            running=self.load.running,
            waiting=self.load.waiting,
            kv_blocks_used=self.load.kv_blocks_used,
            kv_blocks=self.description.kv_blocks,
            cached_blocks=cached_blocks,
            booked_requests=len(self.reservations),
            booked_elsewhere=booked_elsewhere,
            booked_blocks=self.reservations.blocks,
            booked_prefill_tokens=self.reservations.prefill_tokens,
            protocol=0 if protocols is None else min(protocols.highest, own_protocols().highest),
            product="" if protocols is None else protocols.product,
            pulled=self.load.pulled,
        )


class BlockSizeGroup(Struct, frozen=True, kw_only=True):
    """The workers with one block size. Block keys depend on the block size, so a prompt's keys are looked up once for each group."""

    block_tokens: int
    rows: Rows | None  # rows of these workers in the table; None: all rows
    # For each bit position in the prefix index, the row of the worker; -1: the bit belongs to another holder.
    engines: Rows
    live: Rows  # for each bit position in the radix trees of the table, the row of the worker; -1: the bit is free or of another group


class WorkerTable:
    """Keeps the workers of one model, in the order in which they joined."""

    def __init__(self, settings: RouterSettings, index: PrefixIndex, prompts: PromptAnnouncements | None = None):
        """Start without workers.

        Args:
            settings: The router's settings.
            index: The router's prefix index.
            prompts: Collects the prompts to announce to peer routers; None: there are no peers.
        """
        self._settings = settings
        self._index = index
        self.prompts = prompts
        self.workers: dict[WorkerId, RegisteredWorker] = {}
        self.chains = RadixTree()  # prompts of live requests
        self.assumed = RadixTree()  # prompts that workers are assumed to have cached
        # Marks of the prompts that peer routers have announced and that are not finished.
        self.peer_prompts = RadixTree()
        self._bits = 0  # mask of the bits that are taken; a worker has the same bit in all three radix trees
        # The reservations of each peer router, by worker.
        self._peer_reservations: Sequence[Mapping[WorkerId, ReservationTotals]] = ()
        self._arrange()

    def take_bit(self) -> int:
        """Reserve a bit for a worker that joins; it stands for the worker in the masks of the radix trees."""
        bit = ~self._bits & (self._bits + 1)
        self._bits |= bit
        return bit

    def join(self, worker: RegisteredWorker) -> None:
        self.workers[worker.description.worker_id] = worker
        self._arrange()

    def leave(self, worker_id: WorkerId) -> None:
        worker = self.workers.pop(worker_id)
        worker.reservations.close()
        worker.assumed.clear()
        worker.peer_prompts.clear()
        self._bits &= ~worker.bit
        self._arrange()

    def set_peer_reservations(self, booked: Sequence[Mapping[WorkerId, ReservationTotals]]) -> None:
        """Replace the reservations of all peer routers by `booked`, which has a mapping for each peer."""
        self._peer_reservations = booked
        self._peer_sums = self._sum_peer_reservations()

    def booked_elsewhere(self, worker_id: WorkerId) -> int:
        """Return how many requests all peer routers together have reserved on a worker."""
        return sum(peer[worker_id].requests for peer in self._peer_reservations if worker_id in peer)

    def has_room_on(self, worker_id: WorkerId) -> bool:
        """Return whether a worker has fewer requests, of all routers together, than its limit."""
        worker, elsewhere = self.workers[worker_id], self._peer_sums
        there = 0 if elsewhere is None else elsewhere[REQUESTS, self.topology.rows[worker_id]]
        return bool(len(worker.reservations) + there < worker.request_limit)

    def has_room(self) -> bool:
        """Return True if an answering worker has fewer requests than its limit, or if no answering worker is left that could get room."""
        elsewhere = self._peer_sums
        usable = False
        for row, worker in enumerate(self.workers.values()):
            if worker.draining or not worker.decodes:
                continue
            usable = True
            requests = len(worker.reservations) + (0 if elsewhere is None else elsewhere[REQUESTS, row])
            if requests < worker.request_limit:
                return True
        return not usable

    def tune(self, settings: RouterSettings) -> None:
        """Apply changed settings to the limit of requests of each worker and to the topology."""
        self._settings = settings
        for worker in self.workers.values():
            worker.request_limit = max_requests(worker.description, settings)
        self._arrange()

    def describe(self) -> None:
        """Rebuild the table, because the description of a worker has changed."""
        self._arrange()

    def drain(self, worker_id: WorkerId) -> None:
        self.workers[worker_id].draining = True
        self._serving = self._now_serving()

    def resume(self, worker_id: WorkerId) -> None:
        self.workers[worker_id].draining = False
        self._serving = self._now_serving()

    def _now_serving(self) -> ServingWorkers:
        draining = np.array([worker.draining for worker in self.workers.values()], dtype=np.bool_)
        return ServingWorkers.of(self.topology, draining)

    def _arrange(self) -> None:
        """Rebuild the table after a worker has joined or left, or its description or the settings have changed."""
        workers = list(self.workers.values())
        descriptions = [worker.description for worker in workers]
        self.topology = PoolTopology(descriptions, self._settings)
        self._serving = self._now_serving()
        columns: Floats = np.zeros((QUANTITIES, len(workers)))
        for row, worker in enumerate(workers):
            each = worker.description
            columns[LIMIT, row] = worker.request_limit
            columns[MAX_RUNNING, row] = each.max_running
            columns[KV_BLOCKS, row] = each.kv_blocks
            columns[BLOCK_TOKENS, row] = each.block_tokens
            columns[PREFILL_SPEED, row] = each.prefill_speed
            columns[DECODE_SPEED, row] = each.decode_speed
            worker.reservations.keep_in(columns[:, row])
        self.columns = columns
        self._peer_sums = self._sum_peer_reservations()
        rows_of: dict[int, list[int]] = {}
        for row, each in enumerate(descriptions):
            rows_of.setdefault(each.block_tokens, []).append(row)
        self._sizes = [self._size(block_tokens, rows) for block_tokens, rows in rows_of.items()]
        # For each store namespace and block size, the rows of the workers that load blocks of this size from this namespace.
        self._stores: list[tuple[StoreNamespace, int, Rows]] = []
        self._converts: Floats = np.array(
            [float(each.kv is not None and not each.kv.is_at_rest) for each in descriptions], dtype=np.float64
        )
        loading: dict[tuple[StoreNamespace, int], list[int]] = {}
        for row, each in enumerate(descriptions):
            if each.store_id is not None and KvPath.STORE in each.kv_paths:
                name = StoreNamespace(each.store_id, each.fingerprint)
                loading.setdefault((name, each.block_tokens), []).append(row)
        for (name, size), rows in loading.items():
            self._stores.append((name, size, np.array(rows, dtype=np.intp)))

    def _sum_peer_reservations(self) -> Floats | None:
        for worker_id, worker in self.workers.items():
            worker.elsewhere = self.booked_elsewhere(worker_id)
        if not any(self._peer_reservations):
            return None
        elsewhere: Floats = np.zeros((BOOKED, len(self.workers)))
        for row, worker_id in enumerate(self.workers):
            for peer in self._peer_reservations:
                if (booked := peer.get(worker_id)) is not None:
                    elsewhere[BACKLOG_TOKENS, row] += booked.prefill_tokens
                    elsewhere[ACTIVE_BLOCKS, row] += booked.blocks
                    elsewhere[REQUESTS, row] += booked.requests
        return elsewhere

    def candidate_table(self, live: LiveRequest, tiers: Mapping[StoreNamespace, Sequence[str]]) -> CandidateTable:
        """Return the candidate table for a request.

        Args:
            live: The request.
            tiers: For each store namespace, the tiers that hold blocks.
        """
        columns = self.columns.copy()
        if self._peer_sums is not None:
            columns[:BOOKED] += self._peer_sums
        warm = False
        prompt_tokens = live.prompt_tokens
        for size in self._sizes:
            keys = live.keys(size.block_tokens)
            new = blocks_for(prompt_tokens, size.block_tokens)
            if size.rows is None:
                columns[NEW_BLOCKS] = new
            else:
                columns[NEW_BLOCKS, size.rows] = new
            if not keys:
                continue
            booked = self.chains.runs(keys)
            if self.prompts is not None and self.peer_prompts.has_first_block(keys[0]):
                booked = with_peer_prompts(booked, self.peer_prompts, keys)
            held = self._index.runs(keys)
            assumed = self.assumed.runs(keys)
            if not booked and not held and not assumed:
                continue
            warm = True
            if held:
                spread(held, size.engines, columns[ENGINE_BLOCKS])
            if assumed:
                spread(assumed, size.live, columns[ENGINE_BLOCKS])
            if booked:
                spread_live(booked, size.live, columns)
            if self._stores and tiers:
                self._note_stores(columns, held, size.block_tokens, tiers)
        failed: Flags | None = None
        if live.failed_on:
            failed = np.array(
                [(each.worker_id, each.incarnation) in live.failed_on for each in self.topology.descriptions], np.bool_
            )
        adapter = live.arrived.adapter
        if adapter is None:
            return CandidateTable(self.topology, columns, self._serving, failed, warm)
        found = lora_groups(adapter, self.topology, self.workers.values(), columns)
        return CandidateTable(self.topology, columns, self._serving, failed, warm=warm, lora_groups=found)

    def _note_stores(
        self, columns: Floats, held: list[tuple[int, int]], size: int, tiers: Mapping[StoreNamespace, Sequence[str]]
    ) -> None:
        for name, block_tokens, rows in self._stores:
            if block_tokens != size:
                continue
            memory = below = 0
            for tier in tiers.get(name, ()):
                bit = self._index.bit(store_tier_holder(*name, tier))
                depth = next((depth for depth, mask in held if mask & bit), 0)
                memory, below = (depth, below) if tier == POOL_TIER else (memory, max(below, depth))
            if not memory and not below:
                continue
            there = columns[ENGINE_BLOCKS, rows] + columns[COMING_BLOCKS, rows]
            loaded = np.maximum(0.0, memory - there)
            fetched = np.maximum(0.0, below - np.maximum(there, memory))
            columns[STORE_BLOCKS, rows] = loaded
            columns[BELOW_BLOCKS, rows] = fetched
            columns[CONVERSION, rows] = self._settings.conversion_cost * self._converts[rows] * (loaded + fetched)

    def _size(self, block_tokens: int, rows: list[int]) -> "BlockSizeGroup":
        workers = list(self.workers.values())
        engines = {self._index.bit(engine_cache_holder(workers[row].description.worker_id)): row for row in rows}
        return BlockSizeGroup(
            block_tokens=block_tokens,
            rows=None if len(rows) == len(workers) else np.array(rows, dtype=np.intp),
            engines=_row_at(engines),
            live=_row_at({workers[row].bit: row for row in rows}),
        )

    def seconds_to_first_token(self, now: Nanos) -> float:
        """Estimate how many seconds a request will wait in the engine of a full worker, after it has left the admission queue.

        All answering workers count together, because it is not known yet which one will have room. Return 0 if nothing was measured.
        """
        unanswered, rate = 0, 0.0
        for worker in self.workers.values():
            if worker.decodes and not worker.draining and (one := worker.first_tokens.per_second(now)):
                unanswered += worker.first_tokens.unanswered
                rate += one
        return unanswered / rate if rate else 0.0

    def paces(self) -> Iterator[tuple[WorkerId, int, float]]:
        """Yield, for each answering worker, its id, its number of requests of all routers, and its seconds per prompt token.

        The seconds are those of `prompt_paces`.
        """
        columns = self.columns
        for row, worker_id in enumerate(self.topology.worker_ids):
            if self.topology.decodes[row]:
                elsewhere = 0.0 if self._peer_sums is None else self._peer_sums[REQUESTS, row]
                yield worker_id, int(columns[REQUESTS, row] + elsewhere), token_seconds(columns, row)

    def prompt_paces(self) -> Iterator[tuple[WorkerId, float]]:
        """Yield each worker's id and seconds per prompt token; if not measured, the mean of the workers of its model; 0: unknown."""
        for row, worker_id in enumerate(self.topology.worker_ids):
            yield worker_id, token_seconds(self.columns, row)

    def check(self) -> None:
        """Assert that the radix trees hold exactly the chains of the workers."""
        self.chains.check([chain for worker in self.workers.values() for chain in worker.reservations.chains()])
        self.assumed.check([chain for worker in self.workers.values() for chain in worker.assumed.chains()])
        self.peer_prompts.check([chain for worker in self.workers.values() for chain in worker.peer_prompts.chains()])
        assert all(worker.bit & self._bits for worker in self.workers.values())
        assert len({worker.bit for worker in self.workers.values()}) == len(self.workers)


def _row_at(rows: Mapping[int, int]) -> Rows:
    """Return the rows, which are given by the bit of the worker, as an array by bit position; -1 where there is no row."""
    found: Rows = np.full(max(rows).bit_length(), -1, dtype=np.intp)
    for bit, row in rows.items():
        found[bit.bit_length() - 1] = row
    return found
