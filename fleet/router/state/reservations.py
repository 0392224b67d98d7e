"""What live requests take on one worker, booked when a request is sent there and not when the worker says so.

Rules:

1. A request books, on each worker that works or will work for it: one request, the prompt tokens that it has to
   compute there, and the blocks that it holds there.
2. Full blocks of the prompt are booked by key and counted once, however many requests share them. The rest of the
   prompt and the answer are the request's own: they take `blocks_for(prompt + answer)` minus the full blocks, so the
   load goes up by one block per `block_tokens` tokens generated.
3. Where it is expected how long the answer gets, the request's own blocks count for placement by the share that is still to
   come, rounded up: what is about to be free weighs little. They never count for less than one.
4. Prefill tokens are given back when the prompt is computed; everything is given back at the end, whatever the end.
5. What placement looks at is kept in the worker's column of its pool's table, and who holds a block in one place for the whole
   pool (`fleet.router.kv_index.radix_tree`): both are written here when they change, so that no request has to ask every worker.
6. Where there are other routers, they are told of prompts that take long to compute (`fleet.router.kv_index.peer_prompts`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.router.candidates import ACTIVE_BLOCKS, BACKLOG_TOKENS, QUANTITIES, REQUESTS, TOKEN_SECONDS, Floats
from fleet.router.kv_index.peer_prompts import MIN_ANNOUNCED_TOKENS, PromptAnnouncements
from fleet.router.kv_index.radix_tree import Chain, ChainHolder, RadixTree
from kvstore.block import blocks_for

TOKEN_SECONDS_WEIGHT = 0.25  # of the newest prefill in what a token takes: of the last four, mostly
MIN_MEASURED_TOKENS = 64  # shorter prefills say more about the engine's step than about tokens


class Reservation(Struct, kw_only=True):
    """One request on one worker."""

    chain: Chain  # the prompt's full blocks
    prompt_tokens: int
    prefill_tokens: int  # not computed yet
    own_blocks: int  # besides the full blocks of the prompt
    counted_blocks: int  # of those, for placement
    answer_tokens: int = 0
    expected_tokens: int = 0  # of the answer; 0: not known
    since: Nanos
    tokens_ahead: int  # of prefill there, with its own


class WorkerReservations:
    """All bookings of one worker."""

    def __init__(self, block_tokens: int, chains: RadixTree, bit: int):
        """No bookings yet.

        Args:
            block_tokens: Of the worker.
            chains: What live requests hold, on all workers of the pool.
            bit: This worker's there.
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
        """Requests."""
        return len(self._reservations)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._reservations)

    @property
    def blocks(self) -> int:
        """Unique blocks held."""
        return self._held.blocks + self._own_blocks

    def keep_in(self, column: Floats) -> None:
        """Write what placement looks at there from now on."""
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
        """The prompt is computed (or fetched): its prefill is no backlog any more. Since `now`; None: since some time."""
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
        """The answer got longer by so many tokens."""
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
        """The worker has left: it holds nothing any more."""
        for reservation in self._reservations.values():
            self._chains.remove(reservation.chain)

    def _note(self) -> None:
        column = self._column
        column[BACKLOG_TOKENS] = self.prefill_tokens
        column[ACTIVE_BLOCKS] = self._held.blocks + self._counted_blocks
        column[REQUESTS] = len(self._reservations)

    def chains(self) -> list[Chain]:
        """Those of its requests."""
        return [reservation.chain for reservation in self._reservations.values()]

    def check(self) -> None:
        """Assert that the sums are those of the bookings."""
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
    """Of which other routers are told."""

    def __init__(
        self, block_tokens: int, chains: RadixTree, bit: int, worker_id: WorkerId, prompts: PromptAnnouncements
    ):
        """As `WorkerReservations`, whose worker they are, and what the others are told."""
        super().__init__(block_tokens, chains, bit)
        self._worker_id = worker_id
        self._prompts = prompts
        self._told: dict[RequestId, int] = {}

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
        if (
            prefill_tokens >= MIN_ANNOUNCED_TOKENS
            and keys
            and (number := self._prompts.placed(self._worker_id, keys)) is not None
        ):
            self._told[request_id] = number

    def release(self, request_id: RequestId) -> None:
        super().release(request_id)
        if (number := self._told.pop(request_id, None)) is not None:
            self._prompts.over(number)

    def close(self) -> None:
        super().close()
        for number in self._told.values():
            self._prompts.over(number)


def _share(blocks: int, tokens: int, expected: int) -> int:
    """Of an answer's blocks, what counts when so many of its expected tokens have come (rule 3)."""
    return min(blocks, max(1, -(-blocks * (expected - tokens) // expected)))
