"""Request window of Preble's policy: the requests of the last minutes, by worker and by prefix.

1. A request counts for its worker until it is older than the window. If there are more than `MAX_REQUESTS`, the oldest ones are forgotten
   earlier.
2. A prefix is identified by the key of its first block. The first prompt with this prefix that a worker computes becomes a node, which
   later prompts with the prefix share. The uncached tokens of each later prompt become a node of their own, which no other prompt shares.
3. The nodes of a worker are kept in the order of their last use. The worker is assumed to evict the least recently used node first.
4. A prefix on a worker is forgotten when its last request leaves the window.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId

MAX_REQUESTS = 100_000  # maximum number of requests in the window; each takes about 400 bytes
MAX_EVICTED = 64  # maximum number of nodes that one estimate of evictions looks at


class WindowTokens:
    """Sums for the requests with one prefix on one worker: the prompt tokens that had to be computed before their first tokens.

    Each half of the window has a sum of its own.
    """

    __slots__ = ("earlier", "earlier_requests", "later", "later_requests")

    def __init__(self) -> None:
        # for each half of the window: the sum of the prompt tokens that its requests had to compute
        self.earlier = self.later = 0.0
        self.earlier_requests = self.later_requests = 0

    def doubled(self) -> bool:
        """Return whether the mean of the later half is at least twice that of the earlier half; False if either half is empty."""
        if not self.earlier_requests or not self.later_requests:
            return False
        return self.later * self.earlier_requests >= 2 * self.earlier * self.later_requests


class CachedPrefix:
    """A prefix that one worker holds. It exists as long as requests of the window have it."""

    __slots__ = ("is_copy", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.is_copy = False  # True if the worker got the prefix as a copy (rule 2 of `preble`)
        self.tokens = WindowTokens()


class WindowRequest(Struct, frozen=True, kw_only=True):
    """One request in the window, with what it adds to the sums of its worker and prefix."""

    at: Nanos
    worker_id: WorkerId
    key: int  # block key of the prompt's first block; 0: there is none
    prefill: float  # estimated seconds of prefill on the worker
    decode: float  # estimated seconds of decoding on the worker
    waited: float  # prompt tokens that the worker had to compute before the first token of this request
    tokens: WindowTokens  # the object whose sums include `waited`


class WorkerWindow:
    """Sums up the requests of one worker in the window, and keeps what its cache should hold of their prompts."""

    __slots__ = ("decode", "held", "nodes", "prefill", "prefixes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill = 0.0  # estimated seconds of prefill of all requests of the worker in the window
        self.decode = 0.0  # estimated seconds of decoding of all these requests
        self.prefixes: dict[int, CachedPrefix] = {}  # the prefixes by the key of their first block
        # Number of tokens of each node, by the key of its first block. A node that no other prompt can share has a negative key.
        self.nodes: dict[int, float] = {}
        self.held = 0.0  # number of tokens of all `nodes` together

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    def uses(self, key: int) -> bool:
        """Mark the node with this key as used. Return False if the worker does not have the node."""
        tokens = self.nodes.pop(key, None)
        if tokens is None:
            return False
        self.nodes[key] = tokens
        return True

    def keep(self, node: int, tokens: float, capacity: float) -> None:
        """Add a computed node, or give it a new size, and evict the least recently used nodes that no longer fit into `capacity` tokens."""
        self.held += tokens - self.nodes.pop(node, 0.0)
        self.nodes[node] = tokens
        while self.held > capacity and len(self.nodes) > 1:
            self.held -= self.nodes.pop(next(iter(self.nodes)))


class RequestWindow:
    """Keeps the requests of the window for all workers, in an earlier and a later half."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._earlier: deque[WindowRequest] = deque()
        self._later: deque[WindowRequest] = deque()
        self.recent: dict[WorkerId, WorkerWindow] = {}
        self.given = 0  # number of requests that all workers got since the start

    def prefix(self, worker_id: WorkerId, key: int) -> CachedPrefix | None:
        recent = self.recent.get(worker_id)
        return None if recent is None else recent.prefixes.get(key)

    def note_copy(self, key: int, source: WorkerId, copy: WorkerId) -> None:
        """Record that a prefix, which the worker `source` holds, gets a copy at the worker `copy` (rule 2 of `preble`).

        The measurement of the prefix at `source` starts again.
        """
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
        """Add a request to the window, and the tokens that it computes to the worker's cache.

        Args:
            now: The present instant.
            worker_id: The worker that gets the request.
            key: The block key of the prompt's first block; 0: there is none.
            missed: Prompt tokens of the request that the worker has to compute.
            ahead: Prompt tokens of other requests that the worker computes before this request.
            prefill: Seconds of prefill on the worker.
            decode: Seconds of decoding on the worker.
            capacity: Tokens that the worker's cache holds.
        """
        recent = self.recent.setdefault(worker_id, WorkerWindow())
        prefix = recent.prefixes.setdefault(key, CachedPrefix()) if key else CachedPrefix()
        waited = ahead + max(1.0, missed)  # engines always compute the last prompt token
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
        """Yield, for each node that new tokens would evict, its tokens and the share of the worker's requests that use it."""
        recent = self.recent.get(worker_id)
        if recent is None:
            return
        # Number of the newest request that is outside the window.
        oldest = self.given - len(self._earlier) - len(self._later)
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
        """Forget requests that are older than the window, and the oldest ones if there are too many."""
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
