"""What Preble's rule remembers: the requests of the last minutes, by worker and by prefix.

1. A request counts with the worker that it was sent to, for as long as the window; of more than `MAX_REQUESTS` the oldest go sooner.
2. A prefix is known by the key of its first block. The first prompt with one that a worker computes is the node that later ones share;
   what each of those adds is a leaf of its own, which nobody shares.
3. A worker's nodes stand in the order in which they were used: the first ones are what it evicts next.
4. What a worker had is forgotten with the last of its requests: nobody shared it in the window, so nothing is lost with it.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId

MAX_REQUESTS = 100_000  # about 400 bytes each
MAX_EVICTED = 64  # nodes, in one estimate


class WindowTokens:
    """Of prompts that had to be computed before first answers: those ahead, and the own ones. Whole numbers, so that sums are exact."""

    __slots__ = ("earlier", "earlier_requests", "later", "later_requests")

    def __init__(self) -> None:
        self.earlier = self.later = 0.0  # in each half of the window
        self.earlier_requests = self.later_requests = 0

    def doubled(self) -> bool:
        """Whether the mean of the later half is twice that of the earlier one or more; not if either had no request."""
        if not self.earlier_requests or not self.later_requests:
            return False
        return self.later * self.earlier_requests >= 2 * self.earlier * self.later_requests


class CachedPrefix:
    """One of a worker's prefixes, as long as requests of the window have it."""

    __slots__ = ("is_copy", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.is_copy = False  # made on purpose
        self.tokens = WindowTokens()


class WindowRequest(Struct, frozen=True, kw_only=True):
    """One request of the window."""

    at: Nanos
    worker_id: WorkerId
    key: int  # of the prompt's first block; 0: it has none
    prefill: float  # seconds
    decode: float  # seconds
    waited: float  # tokens
    tokens: WindowTokens  # that these are counted in


class WorkerWindow:
    """What one worker got in the window, and what of it should be in its cache."""

    __slots__ = ("decode", "held", "nodes", "prefill", "prefixes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill = 0.0  # seconds
        self.decode = 0.0  # seconds
        self.prefixes: dict[int, CachedPrefix] = {}  # by key
        self.nodes: dict[int, float] = {}  # tokens: by key where others may share them, below 0 where nobody does
        self.held = 0.0  # tokens of all nodes

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    def uses(self, key: int) -> bool:
        """Whether the beginning of that key is there; then it has been used just now."""
        tokens = self.nodes.pop(key, None)
        if tokens is None:
            return False
        self.nodes[key] = tokens
        return True

    def keep(self, node: int, tokens: float, capacity: float) -> None:
        """Note what is computed now; what there is no room for goes."""
        self.held += tokens - self.nodes.pop(node, 0.0)
        self.nodes[node] = tokens
        while self.held > capacity and len(self.nodes) > 1:
            self.held -= self.nodes.pop(next(iter(self.nodes)))


class RequestWindow:
    """All requests of so many seconds, an earlier and a later half of them."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._earlier: deque[WindowRequest] = deque()
        self._later: deque[WindowRequest] = deque()
        self.recent: dict[WorkerId, WorkerWindow] = {}
        self.given = 0  # requests since start

    def prefix(self, worker_id: WorkerId, key: int) -> CachedPrefix | None:
        recent = self.recent.get(worker_id)
        return None if recent is None else recent.prefixes.get(key)

    def note_copy(self, key: int, source: WorkerId, copy: WorkerId) -> None:
        """The source's queue is looked at afresh from now on; the request that makes the copy is noted next."""
        self.recent[source].prefixes[key].tokens = WindowTokens()
        self.recent.setdefault(copy, WorkerWindow()).prefixes.setdefault(key, CachedPrefix()).is_copy = True

    def note(
        self,
        now: Nanos,
        worker_id: WorkerId,
        key: int,
        *,
        missed: float,
        ahead: float,
        prefill: float,
        decode: float,
        capacity: float,
    ) -> None:
        """Count a request.

        Args:
            now: When.
            worker_id: Where it goes.
            key: Of its first block; 0: it has none.
            missed: Tokens that are to be computed.
            ahead: Tokens of others that are to be computed before.
            prefill: Seconds of the worker.
            decode: Seconds of the worker.
            capacity: Tokens that the worker's cache holds.
        """
        recent = self.recent.setdefault(worker_id, WorkerWindow())
        prefix = recent.prefixes.setdefault(key, CachedPrefix()) if key else CachedPrefix()
        waited = ahead + max(1.0, missed)  # the last token is computed anyway: it yields the first answer
        tokens = prefix.tokens
        given = WindowRequest(
            at=now, worker_id=worker_id, key=key, prefill=prefill, decode=decode, waited=waited, tokens=tokens
        )
        self._later.append(given)
        self.given += 1
        recent.requests += 1
        recent.prefill += prefill
        recent.decode += decode
        prefix.requests += 1
        tokens.later += waited
        tokens.later_requests += 1
        node = key if key and not recent.uses(key) else -self.given
        if missed > 0:
            recent.keep(node, missed, capacity)

    def evicted(self, worker_id: WorkerId, tokens: float, capacity: float) -> Iterator[tuple[float, float]]:
        """What goes when so many tokens are added: tokens of each node, and the share of the worker's requests that had it."""
        recent = self.recent.get(worker_id)
        if recent is None:
            return
        oldest = self.given - len(self._earlier) - len(self._later)  # the last request that counts no more
        short = recent.held + tokens - capacity
        for node, held in islice(recent.nodes.items(), MAX_EVICTED):
            if short <= 0:
                return
            if node > 0:
                prefix = recent.prefixes.get(node)
                sharing = 0 if prefix is None else prefix.requests
            else:
                sharing = int(-node > oldest)
            yield held, sharing / recent.requests
            short -= held

    def fade(self, now: Nanos) -> None:
        """Forget what is older than the window, or too much."""
        half = now - self._seconds / 2 * SECOND
        oldest = now - self._seconds * SECOND
        while self._later and self._later[0].at < half:
            self._age()
        while self._earlier and self._earlier[0].at < oldest:
            self._forget()
        while len(self._earlier) + len(self._later) > MAX_REQUESTS:
            if not self._earlier:
                self._age()
            self._forget()

    def _age(self) -> None:
        given = self._later.popleft()
        self._earlier.append(given)
        given.tokens.later -= given.waited
        given.tokens.later_requests -= 1
        given.tokens.earlier += given.waited
        given.tokens.earlier_requests += 1

    def _forget(self) -> None:
        given = self._earlier.popleft()
        given.tokens.earlier -= given.waited
        given.tokens.earlier_requests -= 1
        recent = self.recent[given.worker_id]
        recent.requests -= 1
        recent.prefill -= given.prefill
        recent.decode -= given.decode
        if given.key:
            prefix = recent.prefixes[given.key]
            prefix.requests -= 1
            if not prefix.requests:
                del recent.prefixes[given.key]
        if not recent.requests:
            del self.recent[given.worker_id]
