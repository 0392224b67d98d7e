"""Request window of Preble's rule: the requests of the last minutes, by worker and by prefix.

1. A request counts for its worker as long as the window lasts; beyond `MAX_REQUESTS` the oldest ones go earlier.
2. A prefix is identified by the key of its first block. The first prompt with it that a worker computes is the node that later ones
   share; what each of them adds is a leaf that nobody shares.
3. A worker's nodes are kept in the order of their use: the first ones are the next that it evicts.
4. A worker's prefixes are forgotten with the last of its requests: nobody shared them in the window, so nothing is lost.
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
    """Prompt tokens to compute before first answers, of earlier requests and the own one. They are whole numbers, so sums are exact."""

    __slots__ = ("earlier", "earlier_requests", "later", "later_requests")

    def __init__(self) -> None:
        self.earlier = self.later = 0.0  # sums of each half of the window
        self.earlier_requests = self.later_requests = 0

    def doubled(self) -> bool:
        """Return whether the mean of the later half is at least twice that of the earlier half; False if either half is empty."""
        if not self.earlier_requests or not self.later_requests:
            return False
        return self.later * self.earlier_requests >= 2 * self.earlier * self.later_requests


class CachedPrefix:
    """One prefix on a worker, as long as requests of the window have it."""

    __slots__ = ("is_copy", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.is_copy = False  # a copy that was made on purpose
        self.tokens = WindowTokens()


class WindowRequest(Struct, frozen=True, kw_only=True):
    """One request of the window."""

    at: Nanos
    worker_id: WorkerId
    key: int  # key of the prompt's first block; 0: there is none
    prefill: float  # seconds
    decode: float  # seconds
    waited: float  # tokens
    tokens: WindowTokens  # the sums that include these tokens


class WorkerWindow:
    """The requests of one worker in the window, and what its cache should hold of them."""

    __slots__ = ("decode", "held", "nodes", "prefill", "prefixes", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill = 0.0  # seconds
        self.decode = 0.0  # seconds
        self.prefixes: dict[int, CachedPrefix] = {}  # by key
        self.nodes: dict[int, float] = {}  # tokens by key if others may share the node, by a negative number otherwise
        self.held = 0.0  # tokens of all nodes

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    def uses(self, key: int) -> bool:
        """Return whether the worker has the node with this key, and mark it as used."""
        tokens = self.nodes.pop(key, None)
        if tokens is None:
            return False
        self.nodes[key] = tokens
        return True

    def keep(self, node: int, tokens: float, capacity: float) -> None:
        """Add a computed node and evict the oldest ones that no longer fit."""
        self.held += tokens - self.nodes.pop(node, 0.0)
        self.nodes[node] = tokens
        while self.held > capacity and len(self.nodes) > 1:
            self.held -= self.nodes.pop(next(iter(self.nodes)))


class RequestWindow:
    """All requests of the last seconds, in an earlier and a later half."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._earlier: deque[WindowRequest] = deque()
        self._later: deque[WindowRequest] = deque()
        self.recent: dict[WorkerId, WorkerWindow] = {}
        self.given = 0  # requests since the start

    def prefix(self, worker_id: WorkerId, key: int) -> CachedPrefix | None:
        recent = self.recent.get(worker_id)
        return None if recent is None else recent.prefixes.get(key)

    def note_copy(self, key: int, source: WorkerId, copy: WorkerId) -> None:
        """Reset the source's queue measurement, and mark the copy; the request that makes the copy is noted next."""
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
            now: The instant.
            worker_id: The worker.
            key: The key of its first block; 0: there is none.
            missed: Tokens to compute.
            ahead: Tokens of other requests to compute before.
            prefill: Seconds of prefill on the worker.
            decode: Seconds of decoding on the worker.
            capacity: Tokens that the worker's cache holds.
        """
        recent = self.recent.setdefault(worker_id, WorkerWindow())
        prefix = recent.prefixes.setdefault(key, CachedPrefix()) if key else CachedPrefix()
        waited = ahead + max(1.0, missed)  # the last token is always computed, because it yields the first answer
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
        """Yield the tokens of each node that new tokens would evict, and the share of the worker's requests that had it."""
        recent = self.recent.get(worker_id)
        if recent is None:
            return
        oldest = self.given - len(self._earlier) - len(self._later)  # the number of the last request outside the window
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
        """Forget requests that are older than the window, or too many."""
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
