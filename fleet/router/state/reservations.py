"""Reservations: the capacity that live requests hold on workers. A reservation begins when a request is sent, not when the worker reports it.

Rules:

1. A request reserves, on each worker that works or will work for it: one request, the prompt tokens that the worker has to compute,
   and the blocks that the request holds there.
2. Full blocks of the prompt are reserved by key and counted once, however many requests share them. The rest of the prompt and
   the answer are the request's own blocks: `blocks_for(prompt + answer)` minus the full blocks, so one more for every `block_tokens`
   generated tokens.
3. If the length of the answer is expected, the own blocks count for placement by the share of the answer that is still to come,
   rounded up, because blocks that will soon be free matter little. They always count for at least one block.
4. Prefill tokens are released when the prompt is computed; everything is released at the end, whatever the end is.
5. The quantities for placement are written to the worker's column of the worker table, and the holders of blocks to one radix tree
   for the whole table (`fleet.router.kv_index.radix_tree`), when they change. So no request has to ask each worker.
6. If there are peer routers, prompts that take long to compute are announced to them (`fleet.router.kv_index.peer_prompts`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.router.kv_index.peer_prompts import MIN_ANNOUNCED_TOKENS, PromptAnnouncements
from fleet.router.kv_index.radix_tree import Chain, ChainHolder, RadixTree
from fleet.router.policy import ACTIVE_BLOCKS, BACKLOG_TOKENS, QUANTITIES, REQUESTS, TOKEN_SECONDS, Floats
from kvstore.block import blocks_for

TOKEN_SECONDS_WEIGHT = 0.25  # weight of the newest prefill in the seconds per token: mostly the last four count
MIN_MEASURED_TOKENS = 64  # the time of shorter prefills depends on the engine's step more than on their tokens


class Reservation(Struct, kw_only=True):
    """The reservation of one request on one worker."""

    chain: Chain  # the prompt's full blocks
    prompt_tokens: int
    prefill_tokens: int  # prompt tokens that are not computed yet
    own_blocks: int  # besides the full blocks of the prompt
    counted_blocks: int  # own blocks that count for placement
    answer_tokens: int = 0
    expected_tokens: int = 0  # expected length of the answer; 0: unknown
    since: Nanos
    tokens_ahead: int  # prefill tokens on the worker at the beginning, including its own


class WorkerReservations:
    """All reservations on one worker."""

    def __init__(self, block_tokens: int, chains: RadixTree, bit: int):
        """Start without reservations.

        Args:
            block_tokens: Tokens of a block of this worker.
            chains: The prompts of live requests on all workers of the table.
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
        """Return the number of requests."""
        return len(self._reservations)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._reservations)

    @property
    def blocks(self) -> int:
        """The number of unique blocks held."""
        return self._held.blocks + self._own_blocks

    def keep_in(self, column: Floats) -> None:
        """Write the quantities for placement to this column from now on."""
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
        """Release the prefill tokens of a prompt that was computed or fetched; `now` is None if the time is not to be measured."""
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
        """Add generated tokens to a request's answer."""
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
        """Give up all reservations, because the worker has left."""
        for reservation in self._reservations.values():
            self._chains.remove(reservation.chain)

    def _note(self) -> None:
        column = self._column
        column[BACKLOG_TOKENS] = self.prefill_tokens
        column[ACTIVE_BLOCKS] = self._held.blocks + self._counted_blocks
        column[REQUESTS] = len(self._reservations)

    def chains(self) -> list[Chain]:
        """Return the chains of all reservations."""
        return [reservation.chain for reservation in self._reservations.values()]

    def check(self) -> None:
        """Assert that the sums are those of the reservations."""
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
    """Reservations whose long prompts are announced to peer routers."""

    def __init__(
        self, block_tokens: int, chains: RadixTree, bit: int, worker_id: WorkerId, prompts: PromptAnnouncements
    ):
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
    """Return how many of an answer's blocks count for placement after some of its expected tokens (rule 3)."""
    return min(blocks, max(1, -(-blocks * (expected - tokens) // expected)))
