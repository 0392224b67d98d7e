"""Store planner: decides, beside vLLM's scheduler, which blocks the engine loads from the KV store and saves to it.

This module does not use vLLM.

Rules:

1. To claim blocks means to promise vLLM that they will be loaded. Only whole blocks are claimed, and never the block
   with the prompt's last token, because that token has to be computed to get the next token.
2. A claim is made under a read lease, which the worker side returns once it has read the blocks. If a match is not
   claimed, its lease is returned with the next step. If several ranks read the blocks, the lease is returned after the
   last rank has read them.
3. A claimed block that could not be loaded is computed; the request does not query the store again.
4. Every block that becomes full is offered to the store, and not again while the planner remembers its name. If a
   request hands its blocks off through the store, the decode worker will look for them in the store. Such a request
   therefore offers all its blocks, even if they were offered before, and they are saved before the step ends (urgent).
5. If the store has blocks of a chain in a slower tier, the request waits for their promotion, but no longer than
   computing these blocks would take. Meanwhile the engine goes on with other requests. A request waits for promotions
   only once.
6. If a request has to wait in the engine's queue, the store is called to prefetch its blocks while the current step
   runs. The prefetched blocks are not pinned, because the request may wait long and would keep them from being evicted.
   The scheduler makes only a few such calls in each step.
7. The counts of a request (`PromptBlockCounts`) tell where the blocks of its prompt came from when vLLM first scheduled
   it: from the engine's own cache, from the store (as the worker side confirmed), or from another engine. All other
   blocks were computed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from kvstore import block
from kvstore.block import BlockHash, HashAlgorithm
from kvstore.messages import LeaseId, Match, blocks_by_tier, merge_promoted
from kvstore.recent_map import RecentMap

LEASE_SECONDS = 30.0  # duration of a read lease; vLLM's NIXL connector keeps the blocks of a handoff for the same time
MAX_WAIT_SECONDS = 10.0  # maximum wait of a request for promotions (rule 5), shorter than `LEASE_SECONDS`
LEAST_TOKENS = 64  # a step with fewer tokens does not count for `PrefillSpeed`, because it may only decode
SAMPLES = 16  # number of the latest step durations from which `PrefillSpeed` makes its estimate
UNKNOWN_SECONDS_A_TOKEN = 0.0005  # assumed prefill time of a token before the first measurement
LOOK_AGAIN_SECONDS = 0.002  # pause between two calls that check whether the store's promotions have ended
# If a request waits longer than this for room in the engine, the planner queries the store again. Otherwise the lease
# of its match could end before the blocks are read.
MATCH_FRESH_SECONDS = 10.0
# Maximum number of prefetches for queued requests in one step; each is a call of 0.5 ms, and the step waits for it.
FETCHES_A_STEP = 4
MAX_QUEUED = (
    # Maximum number of queued requests whose blocks may be prefetched. For other requests, the store is queried only
    # when vLLM schedules them.
    1024
)

HANDOFF = "fleet_handoff"
"""Key in a request's transfer parameters; True means that a decode worker will look for the request's blocks in the
store."""

COUNTS = "fleet_kv"
"""Key in a finished request's transfer parameters; its value is the `PromptBlockCounts` of the request, as a list."""


TRACE = "fleet_trace"
"""Key in a request's transfer parameters; its value is the trace context of a traced request for calls to the store, in
hex (`kvstore.tracing.context.call_trace`)."""


class PlannerStore(Protocol):
    """The calls of a store client that the planner needs; they never raise an exception."""

    def match(self, names: Sequence[BlockHash], *, max_wait_seconds: float, tenant: bytes, trace: bytes = b"") -> Match:
        """Return the longest prefix of `names` in the node's memory, leased for `LEASE_SECONDS`.

        If `max_wait_seconds` is above 0, the node also begins to promote the blocks after this prefix from slower tiers
        (`Match.loading`). It records a span of the call in the trace of `trace`.
        """
        ...

    def coming(self, names: Sequence[BlockHash]) -> bool:
        """Return whether the node is promoting blocks of `names` that follow the prefix in the node's memory."""
        ...

    def fetch(self, names: Sequence[BlockHash], *, max_wait_seconds: float, tenant: bytes) -> None:
        """Let the node promote the blocks of `names` that follow the prefix in the node's memory; take no lease."""
        ...


class EngineRequest(Protocol):
    """The attributes of vLLM's `Request` that the planner reads."""

    request_id: str
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    prefill_stats: Any  # vLLM's `PrefillStats`; None once vLLM has sent them


class PromptBlockCounts(Struct, frozen=True, array_like=True):
    """Numbers of a prompt's blocks by the source that they came from (rule 7). All other blocks of the prompt were computed."""

    engine: int = 0
    store: int = 0
    direct: int = 0
    tiers: dict[str, int] = {}  # the blocks of `store`, counted by the node's tier in which they were


class BlockLoad(Struct, frozen=True):
    """An order to load the blocks of `match`, from index `first` on, into the engine's blocks `block_ids`."""

    request_id: str
    match: Match
    first: int
    block_ids: list[int]


class BlockSave(Struct, frozen=True):
    """An order to offer some blocks of the engine, which are consecutive in one chain, to the store."""

    request_id: str
    names: list[BlockHash]
    block_ids: list[int]
    tenant: bytes = b""  # salt of the chain; the blocks count towards the quota of its tenant


class StoreWork(Struct):
    """The orders of one step from the scheduler side of the connector to its worker side."""

    loads: list[BlockLoad]
    urgent: list[BlockSave]  # chains for handoffs, to be saved before the step ends (rule 4)
    deferred: list[BlockSave]  # new full blocks, which the worker side may save after this step
    releases: list[LeaseId]  # leases that have to be returned to the store
    idle: bool  # True if the step computes no tokens
    step: int = 0  # number of the step, by which the ranks know which of their saves belong together


class _Tracked:
    """Remembers one request from its prefetch (rule 6) or its first look-up until its end."""

    def __init__(self, request: EngineRequest, salt: bytes, root: BlockHash):
        self.request = request
        self.salt = salt
        self.root = root
        self.hashes: list[BlockHash] = []
        self.match: Match | None = None  # match whose blocks are not claimed yet (rule 1); None: there is no such match
        self.matched_at = 0.0
        # Until this time the request waits for blocks that are being promoted; None if it does not wait.
        self.waits_until: float | None = None
        self.looked_at = 0.0
        self.has_waited = False
        self.offered = 0  # number of leading blocks that were found in the store or offered to it
        self.local = 0  # number of leading blocks that were found in the engine's own cache at the latest look-up
        self.claimed: list[int] = []  # numbers of the engine's blocks that are being loaded from the store
        self.will_pull = False  # True if NIXL's connector will pull the request's blocks from another engine
        self.pulling: list[int] = []  # numbers of the engine's blocks into which NIXL's connector pulls
        self.may_load = True
        self.promoted: dict[str, int] = {}  # number of blocks that were promoted for the request's matches, by tier
        self.counts = PromptBlockCounts()

    @property
    def trace(self) -> bytes:
        return bytes.fromhex((self.request.kv_transfer_params or {}).get(TRACE, ""))

    @property
    def hands_off(self) -> bool:
        return bool((self.request.kv_transfer_params or {}).get(HANDOFF))


class StorePlanner:
    """Makes the decisions of the KV connector in the engine's scheduler.

    It is not thread-safe, because the engine's scheduler has one thread.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        algorithm: HashAlgorithm,
        store: PlannerStore | None,
        remember: int,
        now: Callable[[], float],
        ranks: int = 1,
    ):
        """Start with no requests.

        Args:
            block_tokens: Tokens in a block.
            algorithm: Hash algorithm of the chain.
            store: The store; None: there is none.
            remember: The number of offered blocks whose names are remembered (rule 4).
            now: Function that returns monotonic seconds.
            ranks: The number of ranks, each of which reads its shard of every claimed block.
        """
        self._block_tokens = block_tokens
        self._algorithm = algorithm
        self._store = store
        self._speed = PrefillSpeed()
        self._now = now
        self._tracked: dict[str, _Tracked] = {}
        # Requests for which the store has not been queried yet, the oldest first.
        self.queued: dict[str, EngineRequest] = {}
        self._offered: RecentMap[BlockHash, None] = RecentMap(remember)
        self._loads: list[BlockLoad] = []
        self._releases: list[LeaseId] = []
        self._steps = 0
        self._is_shared = ranks > 1
        self._reading: dict[str, LeaseId] = {}  # leases of the blocks that several ranks are still reading, by request

    def arrived(self, request: EngineRequest) -> None:
        """Record that a request is in the engine's queue. vLLM may schedule it in the next step or much later."""
        pulls = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        if self._store is not None and not pulls and len(self.queued) < MAX_QUEUED:
            self.queued[request.request_id] = request

    def look_up(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Return how many tokens the store can provide after the `local_tokens` that the engine has in its own cache.

        Return None if the request has to wait for promotions (rule 5); vLLM then calls again in the next step. vLLM may
        also call again while the request waits for room in the engine.
        """
        self.queued.pop(request.request_id, None)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._track(request)
        tracked.local = local_tokens // self._block_tokens
        if request.num_preemptions == 0:
            tracked.counts = PromptBlockCounts(engine=tracked.local)
        # The flag is read at each look-up. NIXL's connector clears it when it begins to pull, so a request pulls only once.
        tracked.will_pull = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        if tracked.will_pull:
            return 0
        if self._store is None or not tracked.may_load:
            return 0
        num_tokens = len(request.all_token_ids)
        claimable = (num_tokens - 1) // self._block_tokens
        if claimable <= tracked.local and not tracked.hands_off:
            return 0
        match = self._fresh_match(self._store, tracked, num_tokens)
        if match is None:
            return None
        return max(0, min(len(match.slots), claimable) - tracked.local) * self._block_tokens

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], external_tokens: int) -> None:
        """Record that vLLM has allocated blocks of the engine for a request.

        If vLLM uses the match of the request (`external_tokens` is positive), claim the matched blocks (rule 1). Otherwise return the
        lease of the match.
        """
        tracked = self._tracked[request.request_id]
        if tracked.will_pull:
            tracked.will_pull = False
            tracked.pulling = list(block_ids[tracked.local :])
        match, tracked.match = tracked.match, None
        if match is None:
            return
        if external_tokens == 0:
            if match.slots:
                self._releases.append(match.lease_id)
            return
        blocks = external_tokens // self._block_tokens
        tracked.claimed = list(block_ids[tracked.local : tracked.local + blocks])
        self._loads.append(BlockLoad(request.request_id, match, tracked.local, tracked.claimed))
        if self._is_shared:
            self._reading[request.request_id] = match.lease_id

    def plan(self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int]]) -> StoreWork:
        """Return the orders for the next step.

        `scheduled` maps each request of the step to the number of its tokens that the step computes.
        """
        self._steps += 1
        work = StoreWork(
            loads=self._loads,
            urgent=[],
            deferred=[],
            releases=self._releases,
            idle=not any(scheduled.values()),
            step=self._steps,
        )
        self._loads, self._releases = [], []
        if self._store is None:
            return work
        self._speed.planned(sum(scheduled.values()), self._now())
        self._fetch_for_queued(self._store)
        for request_id, num_tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            # The list of tokens may be shorter than this sum: drafts may be rejected, and the tokens that a running step generates
            # are not known yet.
            known = min(request.num_computed_tokens + num_tokens, len(request.all_token_ids))
            full = known // self._block_tokens
            if full > tracked.offered:
                self._offer(tracked, full, block_ids_of(request_id), work)
        return work

    def loaded(self, results: Mapping[str, int]) -> None:
        """Record that all ranks have ended these loads.

        `results` has, for each request, the number of leading blocks that were loaded correctly.
        """
        for request_id, good in results.items():
            if (lease_id := self._reading.pop(request_id, None)) is not None:
                self._releases.append(lease_id)
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue  # the request was cancelled meanwhile
            if tracked.request.num_preemptions == 0:
                tiers = blocks_by_tier(good, len(tracked.claimed), tracked.promoted)
                tracked.counts = PromptBlockCounts(engine=tracked.local, store=good, tiers=tiers)
            if good < len(tracked.claimed):
                tracked.may_load = False
                tracked.offered = min(tracked.offered, tracked.local + good)
            tracked.claimed = []

    def pulled(self, request_ids: AbstractSet[str], invalid_blocks: AbstractSet[int], failed: AbstractSet[str]) -> None:
        """Record that the direct transfers of blocks from another engine have ended for these requests.

        `invalid_blocks` are the numbers of the engine's blocks that were not filled correctly. For the requests in
        `failed`, no block has arrived.
        """
        for request_id in request_ids:
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.pulling:
                continue
            good = next((i for i, b in enumerate(tracked.pulling) if b in invalid_blocks), len(tracked.pulling))
            tracked.counts = PromptBlockCounts(engine=tracked.local, direct=0 if request_id in failed else good)
            tracked.pulling = []

    def counts(self, request_ids: Iterable[str]) -> Iterator[tuple[EngineRequest, PromptBlockCounts]]:
        """Yield those requests of `request_ids` that this planner has seen and that have not ended, each with its counts until now."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                yield tracked.request, tracked.counts

    def finished(self, request: EngineRequest) -> PromptBlockCounts | None:
        """Forget a request and return its counts; return None if its blocks were never looked up or prefetched."""
        self.queued.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.match is not None and tracked.match.slots:
            self._releases.append(tracked.match.lease_id)
        return tracked.counts

    def _track(self, request: EngineRequest) -> _Tracked:
        salt = bytes.fromhex(request.cache_salt) if request.cache_salt else b""
        tracked = _Tracked(request, salt, block.root(salt, self._algorithm))
        self._tracked[request.request_id] = tracked
        return tracked

    def _fresh_match(self, store: PlannerStore, tracked: _Tracked, num_tokens: int) -> Match | None:
        """Return the store's match. Return None while the request waits for promotions (rule 5)."""
        now = self._now()
        num_blocks = num_tokens // self._block_tokens
        if tracked.waits_until is not None:
            if now < tracked.waits_until and self._is_coming(store, tracked, num_blocks, now):
                return None
            tracked.waits_until = None
            tracked.has_waited = True
        elif tracked.match is not None and now - tracked.matched_at < MATCH_FRESH_SECONDS:
            return tracked.match
        computed = num_tokens - tracked.local * self._block_tokens
        max_wait = 0.0 if tracked.has_waited else min(self._speed.seconds(computed), MAX_WAIT_SECONDS)
        names = self._hashes(tracked, num_blocks)[:num_blocks]
        before = tracked.match
        tracked.match = store.match(names, max_wait_seconds=max_wait, tenant=tracked.salt, trace=tracked.trace)
        tracked.promoted = merge_promoted(tracked.promoted, tracked.match.promoted)
        if before is not None and before.slots:
            # The earlier lease is returned only now; it has kept the first blocks in memory during the promotion.
            self._releases.append(before.lease_id)
        tracked.matched_at = tracked.looked_at = now
        tracked.offered = len(tracked.match.slots)
        if max_wait and tracked.match.loading:
            tracked.waits_until = now + max_wait
            return None
        return tracked.match

    def _is_coming(self, store: PlannerStore, tracked: _Tracked, num_blocks: int, now: float) -> bool:
        if now - tracked.looked_at < LOOK_AGAIN_SECONDS:
            return True
        tracked.looked_at = now
        return store.coming(self._hashes(tracked, num_blocks)[:num_blocks])

    def _fetch_for_queued(self, store: PlannerStore) -> None:
        """Let the store prefetch the blocks of queued requests (rule 6), at most `FETCHES_A_STEP` requests per call.

        The blocks of a request are prefetched only once, because `look_up` queries the store again when vLLM schedules
        the request.
        """
        for request_id in list(islice(self.queued, FETCHES_A_STEP)):
            request = self.queued.pop(request_id)
            num_tokens = len(request.all_token_ids)
            if num_blocks := (num_tokens - 1) // self._block_tokens:
                tracked = self._track(request)
                max_wait = min(self._speed.seconds(num_tokens), MAX_WAIT_SECONDS)
                store.fetch(
                    self._hashes(tracked, num_blocks)[:num_blocks], max_wait_seconds=max_wait, tenant=tracked.salt
                )

    def _hashes(self, tracked: _Tracked, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the request's chain, at least the first `num_blocks`.

        The chain grows with the answer.
        """
        if (have := len(tracked.hashes)) < num_blocks:
            ids = tracked.request.all_token_ids[have * self._block_tokens : num_blocks * self._block_tokens]
            parent = tracked.hashes[-1] if have else tracked.root
            tracked.hashes += block.extend(
                parent, np.array(ids, dtype="<u4").tobytes(), self._block_tokens, algorithm=self._algorithm
            )
        return tracked.hashes

    def _offer(self, tracked: _Tracked, full: int, block_ids: Sequence[int], work: StoreWork) -> None:
        request_id, names = tracked.request.request_id, self._hashes(tracked, full)[:full]
        fresh = [index for index in range(tracked.offered, full) if names[index] not in self._offered]
        tracked.offered = full
        if tracked.hands_off:
            # The whole chain is saved. The store writes only the blocks that it lacks, but the save counts as a use of the whole chain.
            work.urgent.append(BlockSave(request_id, names, list(block_ids[:full]), tracked.salt))
        elif fresh:
            first = fresh[0]
            work.deferred.append(BlockSave(request_id, names[first:], list(block_ids[first:full]), tracked.salt))
        for index in fresh:
            self._offered.note(names[index], None)


class PrefillSpeed:
    """Estimates how many seconds a prompt token takes to compute, from the times at which steps are planned.

    If the estimate is wrong, it is rather too high than too low.

    Schedulers may plan a step while the previous one still runs. Therefore the duration of a step is taken as the time
    until the second plan after it, if none of these steps was idle. Of the last `SAMPLES` durations per token, the shortest is
    used, because it contains the least other work.
    """

    def __init__(self) -> None:
        # For each of the last three planned steps: the time of its plan in seconds, and its number of tokens.
        self._plans: deque[tuple[float, int]] = deque(maxlen=3)
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def planned(self, tokens: int, now: float) -> None:
        """Record that a step with the given number of tokens was planned; `now` is in monotonic seconds."""
        self._plans.append((now, tokens))
        if len(self._plans) == 3 and all(tokens for _, tokens in self._plans):
            (began, tokens), _, (ended, _) = self._plans
            if tokens >= LEAST_TOKENS:
                self._samples.append((ended - began) / tokens)

    def seconds(self, tokens: int) -> float:
        """Return the predicted seconds to compute a prompt of this number of tokens."""
        return tokens * min(self._samples, default=UNKNOWN_SECONDS_A_TOKEN)
