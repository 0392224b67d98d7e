"""Store planner: which blocks vLLM's scheduler orders to load from the store, and to save there."""

import pytest
from msgspec import Struct

from kvstore.block import HashAlgorithm, chain
from kvstore.messages import LeaseId, Match, Slot
from tests.support.builders import token_bytes
from workers.engines.vllm.store_planner import (
    FETCHES_A_STEP,
    HANDOFF,
    LOOK_AGAIN_SECONDS,
    MATCH_FRESH_SECONDS,
    MAX_QUEUED,
    TRACE,
    PromptBlockCounts,
    StorePlanner,
)

BLOCK = 4


class Request(Struct):
    """The part of vLLM's request that the planner reads."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict | None = None
    prefill_stats: None = None


def a_request(num_tokens: int, request_id: str = "r", first: int = 1, **fields) -> Request:
    return Request(request_id, list(range(first, first + num_tokens)), num_tokens, **fields)


def names(request: Request, salt: bytes = b"") -> list[bytes]:
    return chain(token_bytes(request.all_token_ids), BLOCK, salt=salt)


class World:
    """A planner, a store whose blocks the test sets, and an engine, whose block i of a request has the number 100 + i."""

    def __init__(self, remember: int = 1000, *, with_store: bool = True, ranks: int = 1):
        self.held: set[bytes] = set()
        self.below: set[bytes] = set()  # in a slower tier; promoted if a request may wait
        self.on_their_way = False
        self.promoted: dict[str, int] = {}  # by tier; reported only once
        self.looks = 0
        self.fetched: list[tuple[list[bytes], float]] = []  # names, longest wait
        self.asked: list[int] = []
        self.traces: list[bytes] = []
        self.max_wait: list[float] = []
        self.seconds = 0.0
        self.planner = StorePlanner(
            block_tokens=BLOCK,
            algorithm=HashAlgorithm.SHA256_128,
            store=self if with_store else None,
            remember=remember,
            now=lambda: self.seconds,
            ranks=ranks,
        )

    def match(self, hashes, *, max_wait_seconds: float, tenant: bytes, trace: bytes = b"") -> Match:
        self.traces.append(trace)
        self.asked.append(len(hashes))
        self.max_wait.append(max_wait_seconds)
        prefix = []
        for name in hashes:
            if name not in self.held:
                break
            prefix.append(name)
        lease = LeaseId(len(self.asked)) if prefix else LeaseId(0)
        slots = tuple(Slot(0, 0, 0) for _ in prefix)
        loading = 0
        if (missing := [name for name in hashes[len(prefix) :] if name in self.below]) and (
            max_wait_seconds or self.on_their_way
        ):
            self.on_their_way, loading = True, len(missing)
        promoted, self.promoted = self.promoted, {}
        return Match(
            incarnation="1", lease_id=lease, names=tuple(prefix), slots=slots, loading=loading, promoted=promoted
        )

    def coming(self, hashes) -> bool:
        self.looks += 1
        return self.on_their_way

    def fetch(self, hashes, *, max_wait_seconds: float, tenant: bytes) -> None:
        self.fetched.append((list(hashes), max_wait_seconds))
        self.on_their_way = any(name in self.below for name in hashes)

    def arrive(self) -> None:
        self.held |= self.below
        self.below, self.on_their_way = set(), False

    def hold(self, request: Request, blocks: int, salt: bytes = b"") -> None:
        self.held |= set(names(request, salt)[:blocks])

    def admit(self, request: Request, local_blocks: int = 0) -> int:
        """Look up a request's blocks in the store and allocate; return the number of tokens to load."""
        claimed = self.planner.look_up(request, local_blocks * BLOCK)
        self.planner.allocated(request, blocks_of(request), claimed)
        return claimed

    def step(self, request: Request, tokens: int):
        work = self.planner.plan({request.request_id: tokens} if tokens else {}, lambda _: blocks_of(request))
        request.num_computed_tokens += tokens
        return work


def blocks_of(request: Request) -> list[int]:
    return [100 + index for index in range(len(request.all_token_ids) // BLOCK + 1)]


@pytest.mark.parametrize(("tokens", "claimed"), [(8, 4), (9, 8), (11, 8), (12, 8), (4, 0), (3, 0)])
def test_whole_blocks_are_claimed_and_never_the_last_token(tokens, claimed):
    world = World()
    request = a_request(tokens)
    world.hold(request, 3)

    assert world.planner.look_up(request, 0) == claimed


def test_blocks_in_the_engines_cache_are_not_claimed():
    world = World()
    request = a_request(20)
    world.hold(request, 4)

    assert world.admit(request, local_blocks=1) == 3 * BLOCK

    (load,) = world.step(request, 0).loads
    assert (load.first, load.block_ids) == (1, [101, 102, 103])


@pytest.mark.parametrize("params", [None, {}, {HANDOFF: True}, {TRACE: "0a" * 24, HANDOFF: True}])
def test_store_is_asked_in_the_trace_of_the_request(params):
    world = World()
    world.planner.look_up(a_request(9, kv_transfer_params=params), 0)

    assert world.traces == [b"\x0a" * 24 if params and TRACE in params else b""]


def test_match_uses_the_salt():
    world = World()
    request = a_request(9, cache_salt="ab" * 32)
    world.hold(request, 2)
    assert world.planner.look_up(request, 0) == 0

    salted = a_request(9, "other", cache_salt="ab" * 32)
    world.hold(salted, 2, salt=b"\xab" * 32)
    assert world.planner.look_up(salted, 0) == 8


def test_request_that_waits_for_room_matches_rarely():
    world = World()
    request = a_request(9)
    world.hold(request, 2)
    world.planner.look_up(request, 0)
    world.planner.look_up(request, 0)
    assert len(world.asked) == 1

    world.seconds += MATCH_FRESH_SECONDS
    world.planner.look_up(request, 0)

    assert len(world.asked) == 2
    assert world.step(request, 0).releases == [1], "the older lease is given back"


def test_unused_claim_is_returned():
    world = World()
    refused, cancelled = a_request(9, "refused"), a_request(9, "cancelled")
    world.hold(refused, 2)
    world.planner.look_up(refused, 0)
    world.planner.allocated(refused, blocks_of(refused), 0)
    world.planner.look_up(cancelled, 0)
    world.planner.finished(cancelled)

    assert world.step(refused, 0).releases == [1, 2]


def test_full_block_is_offered_once():
    world = World()
    request = a_request(10)
    world.admit(request)

    (save,) = world.step(request, 10).deferred
    assert (save.names, save.block_ids) == (names(request)[:2], [100, 101])
    for _ in range(2):  # the answer grows; its first token fills no block
        request.all_token_ids.append(7)
        assert world.step(request, 1).deferred == ([] if request.num_computed_tokens < 12 else [save_of(request, 2)])


def save_of(request: Request, index: int):
    from workers.engines.vllm.store_planner import BlockSave

    return BlockSave(request.request_id, [names(request)[index]], [100 + index])


def test_chunks_of_a_prompt_are_offered_as_they_become_full():
    world = World()
    request = a_request(14)
    world.admit(request)

    assert [save.block_ids for save in world.step(request, 7).deferred] == [[100]]
    assert [save.block_ids for save in world.step(request, 7).deferred] == [[101, 102]]


def test_unknown_tokens_fill_no_block():
    world = World()
    request = a_request(7)
    world.admit(request)
    world.step(request, 7)

    assert world.step(request, 1).deferred == [], "the eighth token was computed, but is not in the list"
    request.all_token_ids.append(3)
    assert [save.block_ids for save in world.step(request, 1).deferred] == [[101]]


def test_block_in_the_store_is_not_offered():
    world = World()
    request = a_request(14)
    world.hold(request, 2)
    assert world.admit(request) == 8
    request.num_computed_tokens = 8
    world.planner.loaded({"r": 2})

    assert [save.block_ids for save in world.step(request, 6).deferred] == [[102]]


def test_recently_offered_block_is_not_offered_again():
    world = World()
    first, second = a_request(10, "first"), a_request(10, "second")
    world.admit(first)
    world.step(first, 10)
    world.admit(second, local_blocks=2)
    second.num_computed_tokens = 8

    assert world.step(second, 2).deferred == []


def test_offered_blocks_are_remembered_within_bounds():
    world = World(remember=1)
    first, second = a_request(10, "first"), a_request(10, "second")
    world.admit(first)
    world.step(first, 10)
    world.admit(second)

    assert [save.block_ids for save in world.step(second, 10).deferred] == [[100, 101]]


def test_handoff_offers_its_whole_chain_urgently():
    world = World()
    first = a_request(12, "first")
    world.admit(first)
    world.step(first, 12)
    handing = a_request(12, "handing", kv_transfer_params={HANDOFF: True})
    world.admit(handing, local_blocks=2)
    handing.num_computed_tokens = 8

    work = world.step(handing, 4)

    assert [save.block_ids for save in work.urgent] == [[100, 101, 102]]
    assert work.deferred == []


def test_handoff_offers_nothing_if_the_store_has_all():
    world = World()
    handing = a_request(12, kv_transfer_params={HANDOFF: True})
    world.hold(handing, 3)
    world.admit(handing, local_blocks=2)
    handing.num_computed_tokens = 8

    assert world.step(handing, 4).urgent == []


def test_failed_load_is_computed_and_offered_not_matched_again():
    world = World()
    request = a_request(17)
    world.hold(request, 4)
    world.admit(request)
    world.planner.loaded({"r": 1})
    assert world.planner.look_up(request, 4) == 0
    request.num_computed_tokens = 4

    work = world.step(request, 13)

    assert [save.block_ids for save in work.deferred] == [[101, 102, 103]]
    assert len(world.asked) == 1
    assert world.planner.finished(request) == PromptBlockCounts(engine=1)


def test_counts_show_where_blocks_came_from():
    world = World()
    request = a_request(21)
    world.hold(request, 4)
    world.admit(request, local_blocks=1)
    world.planner.loaded({"r": 3})

    assert world.planner.finished(request) == PromptBlockCounts(engine=1, store=3, tiers={"cpu": 3})
    assert world.planner.finished(request) is None


@pytest.mark.parametrize(
    ("good", "tiers"), [(3, {"cpu": 1, "ssd": 2}), (2, {"cpu": 1, "ssd": 1}), (1, {"cpu": 1}), (0, {})]
)
def test_counts_show_the_stores_tiers(good, tiers):
    """Match four blocks: the engine has the first one, and the last two were promoted from the SSD tier."""
    world = World()
    request = a_request(21)
    world.hold(request, 4)
    world.promoted = {"ssd": 2}
    world.admit(request, local_blocks=1)
    world.planner.loaded({"r": good})

    assert world.planner.finished(request) == PromptBlockCounts(engine=1, store=good, tiers=tiers)


def test_a_preempted_request_reports_its_first_admission():
    world = World()
    request = a_request(9)
    world.hold(request, 2)
    world.admit(request)
    world.planner.loaded({"r": 2})
    request.num_preemptions = 1
    world.admit(request, local_blocks=2)

    assert world.planner.finished(request) == PromptBlockCounts(store=2, tiers={"cpu": 2})


def test_directly_pulled_blocks_count_and_are_not_matched():
    world = World()
    params = {"do_remote_prefill": True}
    request = a_request(10, kv_transfer_params=params)
    world.hold(request, 2)
    assert world.planner.look_up(request, 4) == 0
    params["do_remote_prefill"] = False  # vLLM's connector does this when it takes the request
    world.planner.allocated(request, blocks_of(request), 0)
    world.planner.allocated(request, blocks_of(request), 0)  # vLLM calls it again when the blocks have arrived

    world.planner.pulled({"r"}, set(), set())

    assert world.asked == []
    assert world.planner.finished(request) == PromptBlockCounts(engine=1, direct=2)


@pytest.mark.parametrize(("invalid", "failed", "direct"), [({101}, set(), 1), (set(), {"r"}, 0)])
def test_failed_direct_pull_does_not_count(invalid, failed, direct):
    world = World()
    request = a_request(10, kv_transfer_params={"do_remote_prefill": True})
    world.admit(request)

    world.planner.pulled({"r"}, invalid, failed)

    assert world.planner.finished(request) == PromptBlockCounts(direct=direct)


def test_without_a_store_only_engine_blocks_count():
    world = World(with_store=False)
    request = a_request(10)

    assert world.admit(request, local_blocks=1) == 0
    assert world.step(request, 6).deferred == []
    assert world.planner.finished(request) == PromptBlockCounts(engine=1)


def test_request_waits_once_for_promotion():
    world = World()
    request = a_request(20)
    world.hold(request, 1)
    world.below |= set(names(request)[1:4])

    assert world.planner.look_up(request, 0) is None
    world.seconds += 0.001
    assert world.planner.look_up(request, 0) is None
    assert world.looks == 0, "it looks only now and then"
    world.seconds += LOOK_AGAIN_SECONDS
    assert world.planner.look_up(request, 0) is None
    world.arrive()
    world.seconds += LOOK_AGAIN_SECONDS
    assert world.planner.look_up(request, 0) == 4 * BLOCK
    assert (world.looks, world.max_wait[0] > 0, world.max_wait[1]) == (2, True, 0)
    assert world.step(request, 0).releases == [LeaseId(1)], "the lease on the beginning, once there is another"


def test_wait_for_promotion_is_limited_by_compute_time():
    world = World()
    for seconds in (0.0, 1.0, 1.1):  # 100 tokens in a second
        world.seconds = seconds
        world.planner.plan({"other": 100 if seconds == 0 else 1}, lambda _: [])
    request = a_request(21)
    world.below |= set(names(request)[:4])

    assert world.planner.look_up(request, BLOCK) is None
    assert world.max_wait == [pytest.approx(17 * 1.1 / 100)]
    world.seconds += world.max_wait[0]
    assert world.planner.look_up(request, BLOCK) == 0
    world.seconds += MATCH_FRESH_SECONDS
    assert world.planner.look_up(request, BLOCK) == 0
    assert world.max_wait[1:] == [0, 0], "it has waited once"


def test_request_that_ends_while_waiting_leaves_no_lease():
    world = World()
    request = a_request(20)
    world.hold(request, 1)
    world.below |= set(names(request)[1:4])
    world.planner.look_up(request, 0)

    world.planner.finished(request)

    assert world.planner.plan({}, lambda _: []).releases == [LeaseId(1)]


def test_queued_request_is_prefetched():
    world = World()
    running, queued = a_request(40, "running", first=1000), a_request(20, "queued")
    world.below |= set(names(queued)[:4])
    world.planner.arrived(running)
    world.planner.arrived(queued)
    world.admit(running)

    work = world.step(running, 40)  # leaves no room for the other request

    ((asked, max_wait),) = world.fetched
    assert (asked, max_wait > 0, work.releases) == (names(queued)[:4], True, [])
    world.arrive()
    assert world.planner.look_up(queued, 0) == 4 * BLOCK, "all is there when its turn comes"
    world.step(running, 1)
    assert len(world.fetched) == 1, "once a request"


def test_queue_time_does_not_shorten_the_wait_for_promotion():
    world = World()
    running, queued = a_request(40, "running", first=1000), a_request(20, "queued")
    world.below |= set(names(queued)[:4])
    world.planner.arrived(queued)
    world.admit(running)
    world.step(running, 40)

    world.seconds += 60
    assert world.planner.look_up(queued, 0) is None, "they are still on their way"
    assert world.max_wait[-1] > 0


def test_request_scheduled_at_once_is_matched_once():
    world = World()
    request = a_request(20)
    world.planner.arrived(request)
    world.admit(request)
    world.step(request, 20)

    assert (world.fetched, len(world.asked)) == ([], 1)


@pytest.mark.parametrize("fields", [{"num_tokens": 4}, {"kv_transfer_params": {"do_remote_prefill": True}}])
def test_prefetch_skips_requests_that_would_not_load(fields):
    world = World()
    world.planner.arrived(a_request(**{"num_tokens": 20, **fields}))

    world.planner.plan({"other": 40}, lambda _: [])

    assert world.fetched == []


def test_prefetch_is_limited_in_each_step():
    world = World()
    requests = [a_request(20, f"{number}", first=100 * number) for number in range(MAX_QUEUED + 1)]
    for request in requests:
        world.planner.arrived(request)
    world.planner.finished(requests[0])

    world.planner.plan({"other": 40}, lambda _: [])

    assert [asked for asked, _ in world.fetched] == [names(each)[:4] for each in requests[1 : FETCHES_A_STEP + 1]]
    assert len(world.planner.queued) == MAX_QUEUED - 1 - FETCHES_A_STEP
    assert world.planner.finished(requests[1]) == PromptBlockCounts(), "forgotten like any other"


def test_claim_of_several_ranks_is_returned_by_the_last():
    world = World(ranks=2)
    request = a_request(20)
    world.hold(request, 4)
    world.admit(request)
    (load,) = world.step(request, 0).loads
    assert world.step(request, 0).releases == []

    world.planner.loaded({"r": 4})

    assert world.step(request, 0).releases == [load.match.lease_id]
    assert world.step(request, 0).releases == []


def test_cancelled_claim_of_several_ranks_is_returned():
    world = World(ranks=2)
    request, other = a_request(20), a_request(9, "other", first=100)
    world.hold(request, 4)
    world.admit(request)
    (load,) = world.step(request, 0).loads

    world.planner.finished(request)
    assert world.step(other, 0).releases == [], "it is being read"
    world.planner.loaded({"r": 4})

    assert world.step(other, 0).releases == [load.match.lease_id]


def test_claim_of_one_rank_is_returned_by_the_rank():
    world = World()
    request = a_request(20)
    world.hold(request, 4)
    world.admit(request)
    world.step(request, 0)

    world.planner.loaded({"r": 4})

    assert world.step(request, 0).releases == []


def test_steps_are_numbered_for_all_ranks():
    world = World()
    request = a_request(20)

    assert [world.step(request, 4).step for _ in range(3)] == [1, 2, 3]
