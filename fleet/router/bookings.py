"""What live requests take on one worker, booked when a request is sent there and not when the worker says so.

Rules:

1. A request books, on each worker that works or will work for it: one request, the prompt tokens that it has to
   compute there, and the blocks that it holds there.
2. Full blocks of the prompt are booked by key and counted once, however many requests share them. The rest of the
   prompt and the answer are the request's own: they take `blocks_for(prompt + answer)` minus the full blocks, so the
   load goes up by one block per `block_tokens` tokens generated.
3. Prefill tokens are given back when the prompt is computed; everything is given back at the end, whatever the end.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from fleet.ids import RequestId
from kvstore.block import blocks_for


class Booking(Struct, kw_only=True):
    """One request on one worker."""

    request_id: RequestId
    keys: Sequence[int]  # of the prompt's full blocks
    prompt_tokens: int
    prefill_tokens: int  # not computed yet
    own_blocks: int  # besides the full blocks of the prompt
    answer_tokens: int = 0


class WorkerBookings:
    """All bookings of one worker."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._bookings: dict[RequestId, Booking] = {}
        self._users: dict[int, int] = {}  # requests that hold a block, by its key
        self._own_blocks = 0
        self.prefill_tokens = 0

    def __len__(self) -> int:
        """Requests."""
        return len(self._bookings)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._bookings)

    @property
    def blocks(self) -> int:
        """Unique blocks held."""
        return len(self._users) + self._own_blocks

    def additional_blocks(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Unique blocks that a prompt would add.

        What is booked is a union of whole prompts, so a bisection finds how much of a prompt is in it.
        """
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._users:
                low = middle + 1
            else:
                high = middle
        return blocks_for(prompt_tokens, self._block_tokens) - low

    def book(self, request_id: RequestId, keys: Sequence[int], prompt_tokens: int, prefill_tokens: int) -> None:
        assert request_id not in self._bookings, request_id
        own = blocks_for(prompt_tokens, self._block_tokens) - len(keys)
        self._bookings[request_id] = Booking(
            request_id=request_id,
            keys=keys,
            prompt_tokens=prompt_tokens,
            prefill_tokens=prefill_tokens,
            own_blocks=own,
        )
        users = self._users
        for key in keys:
            users[key] = users.get(key, 0) + 1
        self._own_blocks += own
        self.prefill_tokens += prefill_tokens

    def computed(self, request_id: RequestId) -> None:
        """The prompt is computed (or fetched): its prefill is no backlog any more."""
        booking = self._bookings[request_id]
        self.prefill_tokens -= booking.prefill_tokens
        booking.prefill_tokens = 0

    def grown(self, request_id: RequestId, tokens: int) -> None:
        """The answer got longer by so many tokens."""
        booking = self._bookings[request_id]
        booking.answer_tokens += tokens
        total = blocks_for(booking.prompt_tokens + booking.answer_tokens, self._block_tokens)
        self._own_blocks += total - len(booking.keys) - booking.own_blocks
        booking.own_blocks = total - len(booking.keys)

    def release(self, request_id: RequestId) -> None:
        booking = self._bookings.pop(request_id)
        self.prefill_tokens -= booking.prefill_tokens
        self._own_blocks -= booking.own_blocks
        users = self._users
        for key in booking.keys:
            if (others := users[key] - 1) == 0:
                del users[key]
            else:
                users[key] = others

    def check(self) -> None:
        """Assert that the sums are those of the bookings."""
        users: dict[int, int] = {}
        for booking in self._bookings.values():
            assert booking.prefill_tokens >= 0, booking
            assert booking.own_blocks >= 0, booking
            for key in booking.keys:
                users[key] = users.get(key, 0) + 1
        assert users == self._users
        assert self._own_blocks == sum(booking.own_blocks for booking in self._bookings.values())
        assert self.prefill_tokens == sum(booking.prefill_tokens for booking in self._bookings.values())
