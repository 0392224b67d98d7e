"""Prompts that have their worker, and are kept back until it is about to compute them.

Rules:

1. An engine computes prompts in the order in which it gets them, and a long one holds up all that come after it. So a worker
   gets prompts only as far ahead as keeps it busy: while it has fewer than `window_tokens` to compute. The others wait in the
   worker's lane, where they can still be overtaken.
2. What waits in a lane is booked on its worker like what is there; only the dispatch is to come. So placement sees the same
   loads with lanes and without.
3. In a lane the lowest rank goes first (`fleet.router.waiting.rank`): priorities, and short prompts before long ones, as far as
   settings say. A rank is an instant, so nobody is overtaken for ever.
4. Tokens count until the prompt is computed, or its work ends for whatever reason. A prompt longer than the window goes when
   nothing is before it.
"""

from msgspec import Struct

from fleet.ids import RequestId, WorkerId
from fleet.router.ranked import Ranked


class _Prompt(Struct, kw_only=True):
    worker_id: WorkerId
    tokens: int  # to compute
    rank: int
    seq: int
    sent: bool = False


class _Lane:
    """One worker's."""

    __slots__ = ("held", "tokens")

    def __init__(self) -> None:
        self.held = Ranked()
        self.tokens = 0  # sent, and not computed


class Lanes:
    """Those of all workers of a router; a worker on which nothing waits or computes has none."""

    def __init__(self, window_tokens: int) -> None:
        """No prompts yet.

        Args:
            window_tokens: How far ahead a worker gets prompts; 0: everything goes at once.
        """
        self._window = window_tokens
        self._lanes: dict[WorkerId, _Lane] = {}
        self._prompts: dict[RequestId, _Prompt] = {}
        self._opened: dict[WorkerId, None] = {}  # may have room since something left
        self._waiting = 0

    def __len__(self) -> int:
        """Prompts that wait."""
        return self._waiting

    def enter(self, request_id: RequestId, worker_id: WorkerId, tokens: int, *, rank: int, seq: int) -> bool:
        """A request was placed on a worker, which has to compute so many tokens of it.

        Returns:
            Whether it goes there at once; if not, `next` will name it.
        """
        if not self._window:
            return True
        assert request_id not in self._prompts, request_id
        lane = self._lanes.get(worker_id)
        if lane is None:
            lane = self._lanes[worker_id] = _Lane()
        goes = lane.tokens < self._window and not len(lane.held)
        self._prompts[request_id] = _Prompt(worker_id=worker_id, tokens=tokens, rank=rank, seq=seq, sent=goes)
        if goes:
            lane.tokens += tokens
        else:
            lane.held.add(rank, seq, request_id)
            self._waiting += 1
        return goes

    def leave(self, request_id: RequestId) -> None:
        """Its prompt is computed, or will not be there; nothing happens if it is in no lane."""
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return
        lane = self._lanes[prompt.worker_id]
        if prompt.sent:
            lane.tokens -= prompt.tokens
            self._opened[prompt.worker_id] = None
        else:
            lane.held.discard(prompt.rank, prompt.seq, request_id)
            self._waiting -= 1
        if not lane.tokens and not len(lane.held):
            del self._lanes[prompt.worker_id]
            self._opened.pop(prompt.worker_id, None)

    def holds(self, request_id: RequestId) -> bool:
        """Whether it waits in a lane."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and not prompt.sent

    @property
    def opened(self) -> bool:
        """Whether `next` may name somebody."""
        return bool(self._opened)

    def next(self) -> RequestId | None:
        """One that goes now, counted as gone; None when all lanes are as full as they may be, or empty."""
        while self._opened:
            worker_id = next(iter(self._opened))
            lane = self._lanes[worker_id]
            first = lane.held.first
            if first is None or lane.tokens >= self._window:
                del self._opened[worker_id]
                continue
            prompt = self._prompts[first]
            lane.held.discard(prompt.rank, prompt.seq, first)
            lane.tokens += prompt.tokens
            prompt.sent = True
            self._waiting -= 1
            return first
        return None

    def check(self) -> None:
        """Assert that sums are those of the prompts, and that nobody waits without a cause."""
        assert not self._opened
        assert self._waiting == sum(not prompt.sent for prompt in self._prompts.values())
        sent = dict.fromkeys(self._lanes, 0)
        for prompt in self._prompts.values():
            sent[prompt.worker_id] += prompt.tokens * prompt.sent
        for worker_id, lane in self._lanes.items():
            assert lane.tokens == sent[worker_id], worker_id
            assert not len(lane.held) or lane.tokens >= self._window, worker_id
            assert all(self.holds(request_id) for request_id in lane.held.ids())
