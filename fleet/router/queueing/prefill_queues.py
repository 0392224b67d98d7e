"""Prompts that have their worker, and are kept back until it is about to compute them.

Rules:

1. An engine computes prompts in the order in which it gets them, and a long one holds up all that come after it. So a worker
   gets prompts only as far ahead as keeps it busy: while it has fewer than `window_tokens` to compute. The others wait in the
   worker's lane, where they can still be overtaken.
2. What waits in a lane is booked on its worker like what is there; only the dispatch is to come. So placement sees the same
   loads with lanes and without.
3. In a lane the lowest rank goes first (`fleet.router.queueing.admission_queue.rank`): priorities, and short prompts before long ones, as far as
   settings say. A rank is an instant, so nobody is overtaken for ever.
4. Tokens count until the prompt is computed, or its work ends for whatever reason. A prompt longer than the window goes when
   nothing is before it.
"""

from msgspec import Struct

from fleet.core.ids import RequestId, WorkerId
from fleet.router.queueing.ordered_requests import OrderedRequests


class _QueuedPrompt(Struct):
    worker_id: WorkerId
    tokens: int  # to compute
    rank: int = 0  # this and the next two of those who have waited
    seq: int = 0
    priority: int = 0
    sent: bool = True


class PrefillQueues:
    """Those of all workers of a router. Nothing is kept of a worker on which nothing waits or computes."""

    def __init__(self, window_tokens: int) -> None:
        """No prompts yet.

        Args:
            window_tokens: How far ahead a worker gets prompts; 0: everything goes at once.
        """
        self._window = window_tokens
        self._tokens: dict[WorkerId, int] = {}  # sent, and not computed
        self._held: dict[WorkerId, OrderedRequests] = {}  # of those for whom somebody waits
        self._prompts: dict[RequestId, _QueuedPrompt] = {}
        self._opened: dict[WorkerId, None] = {}  # may have room since something left
        self._waiting = 0

    def __len__(self) -> int:
        """Prompts that wait."""
        return self._waiting

    def enter(self, request_id: RequestId, worker_id: WorkerId, tokens: int) -> bool:
        """A request was placed on a worker, which has to compute so many tokens of it.

        Returns:
            Whether it goes there at once; if not, it has to `wait`.
        """
        if not self._window:
            return True
        assert request_id not in self._prompts, request_id
        if self.full(worker_id):
            return False
        self._tokens[worker_id] = self._tokens.get(worker_id, 0) + tokens
        self._prompts[request_id] = _QueuedPrompt(worker_id, tokens)
        return True

    def wait(
        self, request_id: RequestId, worker_id: WorkerId, tokens: int, *, rank: int, seq: int, priority: int = 0
    ) -> None:
        """It waits in the worker's lane; `next` will name it."""
        self._prompts[request_id] = _QueuedPrompt(worker_id, tokens, rank, seq, priority, sent=False)
        if (held := self._held.get(worker_id)) is None:
            held = self._held[worker_id] = OrderedRequests()
        held.add(rank, seq, request_id)
        self._waiting += 1

    def leave(self, request_id: RequestId) -> int:
        """Its prompt is computed, or will not be there; nothing happens if it is in no lane.

        Returns:
            The tokens that its worker was sent to compute; 0 if it was sent none.
        """
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return 0
        worker_id = prompt.worker_id
        if not prompt.sent:
            self._no_longer(prompt, request_id)
            return 0
        if left := self._tokens.get(worker_id, 0) - prompt.tokens:
            self._tokens[worker_id] = left
        else:
            self._tokens.pop(worker_id, None)
        if worker_id in self._held:
            self._opened[worker_id] = None
        return prompt.tokens

    def full(self, worker_id: WorkerId) -> bool:
        """Return whether a prompt for a worker has to wait in its lane."""
        if not self._window:
            return False
        return worker_id in self._held or self._tokens.get(worker_id, 0) >= self._window

    def sent_tokens(self, worker_id: WorkerId) -> int:
        """Return what a worker has been sent and has not computed."""
        return self._tokens.get(worker_id, 0)

    def held_tokens(self, worker_id: WorkerId, priority: int) -> int:
        """Return what waits in a worker's lane with at least this priority.

        Short prompts go before long ones, and so does each that still comes. Whoever counted only what goes before him now would
        expect too little if he is long, and if he is short he would make those wait that were told that their wait is short.
        """
        held = self._held.get(worker_id, ())
        prompts = [self._prompts[request_id] for request_id in held]
        return sum(prompt.tokens for prompt in prompts if prompt.priority >= priority)

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
            held = self._held.get(worker_id)
            tokens = self._tokens.get(worker_id, 0)
            if held is None or tokens >= self._window:
                del self._opened[worker_id]
                continue
            first = held.first
            assert first is not None
            prompt = self._prompts[first]
            self._no_longer(prompt, first)
            self._tokens[worker_id] = tokens + prompt.tokens
            prompt.sent = True
            return first
        return None

    def _no_longer(self, prompt: _QueuedPrompt, request_id: RequestId) -> None:
        """It does not wait any more."""
        held = self._held[prompt.worker_id]
        held.discard(prompt.rank, prompt.seq, request_id)
        if not len(held):
            del self._held[prompt.worker_id]
        self._waiting -= 1

    def check(self) -> None:
        """Assert that sums are those of the prompts, and that nobody waits without a cause."""
        assert not self._opened
        assert self._waiting == sum(not prompt.sent for prompt in self._prompts.values())
        sent: dict[WorkerId, int] = {}
        for prompt in self._prompts.values():
            if prompt.sent:
                sent[prompt.worker_id] = sent.get(prompt.worker_id, 0) + prompt.tokens
        assert {**dict.fromkeys(self._tokens, 0), **sent} == {**dict.fromkeys(sent, 0), **self._tokens}
        for worker_id, held in self._held.items():
            assert len(held), worker_id
            assert self._tokens.get(worker_id, 0) >= self._window, worker_id
            assert all(self.holds(request_id) for request_id in held.ids())
