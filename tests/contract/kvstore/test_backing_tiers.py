"""Contract tests of all backing tiers."""

import mmap
import threading

import google_crc32c
import numpy as np
import pytest

from kvstore.clock import Nanos
from kvstore.codecs.plain import PlainCodec
from kvstore.errors import NamespaceUnknown, TierFailed, UndecodableBlock
from kvstore.messages import BlockKey, BlockOutcome, FetchResult
from kvstore.pool.extents import PAGE_BYTES
from tests.contract.kvstore.backing_tiers import CASES, BackingTierCase, plain
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, deadline_in, put_blocks

DIGEST = b"namespace-digest"
OTHER = b"another-digest.."


@pytest.fixture(params=list(CASES))
def case(request, tmp_path):
    with CASES[request.param](tmp_path) as case:
        yield case


@pytest.fixture
def tier(case):
    tier = case.open(plain)
    yield tier
    tier.close()


class Reversed:
    """Codec that reverses the bytes of a block, and rejects bytes that it has not encoded."""

    def __init__(self, codec_id: int = 9):
        self.codec_id = codec_id

    def encode(self, key, block):
        return np.concatenate([np.frombuffer(key.name, np.uint8), block[::-1]])

    def decode(self, key, encoded, into):
        if encoded.nbytes != into.nbytes + 16 or bytes(encoded[:16]) != key.name:
            raise UndecodableBlock("not of this key")
        into[:] = encoded[16:][::-1]


def keys_of(count: int, of: str = "a", digest: bytes = DIGEST) -> list[BlockKey]:
    return [BlockKey(digest, name) for name in a_chain(count, of)]


def put(tier, keys, *, first_seed: int = 0, length: int = BLOCK_BYTES, deadline=None):
    blocks = [a_block(first_seed + index, length) for index in range(len(keys))]
    return put_blocks(tier, keys, blocks, deadline or deadline_in())


def get(tier, keys, *, length: int = BLOCK_BYTES, deadline=None):
    into = [np.zeros(length, np.uint8) for _ in keys]
    return tier.get(keys, into, deadline or deadline_in()), into


def outcomes(answers: list[FetchResult]) -> list[BlockOutcome]:
    return [answer.outcome for answer in answers]


def test_stored_block_is_read_with_its_checksum(tier):
    keys = keys_of(20)
    assert put(tier, keys) == [True] * 20

    answers, into = get(tier, keys)

    for seed, (answer, block) in enumerate(zip(answers, into, strict=True)):
        assert np.array_equal(block, a_block(seed))
        assert answer == FetchResult(BlockOutcome.MOVED, google_crc32c.value(bytes(block)))


@pytest.mark.parametrize("codec", [plain, lambda _: Reversed()], ids=["plain", "encoded"])
def test_block_with_a_wrong_checksum_is_not_stored(case, codec):
    tier = case.open(codec)
    try:
        keys = keys_of(3)
        blocks = [a_block(seed) for seed in range(3)]
        sums = [google_crc32c.value(bytes(block)) for block in blocks]
        blocks[1][7] ^= 1

        assert tier.put(keys, blocks, deadline_in(), sums) == [True, False, True]
        assert tier.status().corrupt == 1
        assert outcomes(get(tier, keys)[0]) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.MOVED]
    finally:
        tier.close()


@pytest.mark.parametrize("length", [1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES - 7])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_blocks_of_any_length_and_alignment_round_trip(tier, length, shift):
    keys = keys_of(3)
    pool = np.frombuffer(mmap.mmap(-1, 40 * PAGE_BYTES), np.uint8)  # page-aligned like a node's pool
    places = [pool[shift + i * 10 * PAGE_BYTES :][:length] for i in range(3)]
    for seed, place in enumerate(places):
        place[:] = a_block(seed, length)
    assert put_blocks(tier, keys, places, deadline_in()) == [True] * 3
    pool[:] = 0xEE

    assert outcomes(tier.get(keys, places, deadline_in())) == [BlockOutcome.MOVED] * 3

    for seed, place in enumerate(places):
        assert np.array_equal(place, a_block(seed, length))
        place[:] = 0xEE
    assert (pool == 0xEE).all(), "bytes outside the destinations were written"


def test_find_counts_the_leading_blocks(tier):
    keys = keys_of(6)
    put(tier, [*keys[:3], *keys[4:]])

    assert tier.find(keys, deadline_in()) == 3
    assert tier.find(keys[:2], deadline_in()) == 2
    assert tier.find(keys[3:], deadline_in()) == 0
    assert tier.find([], deadline_in()) == 0


def test_holds_answers_for_each_block_independently(tier):
    keys = keys_of(6)
    put(tier, [*keys[:2], *keys[3:]])
    assert tier.holds(keys, deadline_in()) == [True, True, False, True, True, True]

    tier.discard(keys[3:4])

    assert tier.holds(keys[::-1], deadline_in()) == [True, True, False, False, True, True]
    assert tier.holds([], deadline_in()) == []
    assert tier.holds(keys_of(2, digest=OTHER), deadline_in()) == [False, False]


def test_block_that_was_never_stored_is_a_miss(tier):
    keys = keys_of(3)
    put(tier, keys[:1])

    answers, _ = get(tier, keys)

    assert outcomes(answers) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE]
    assert tier.status().misses == 2


def test_the_same_name_in_two_namespaces_is_two_blocks(tier):
    ours, theirs = keys_of(1), keys_of(1, digest=OTHER)
    put(tier, ours, first_seed=1)
    assert outcomes(get(tier, theirs)[0]) == [BlockOutcome.GONE]

    put(tier, theirs, first_seed=2)

    assert np.array_equal(get(tier, ours)[1][0], a_block(1))
    assert np.array_equal(get(tier, theirs)[1][0], a_block(2))


def test_present_block_is_not_written_again(tier):
    keys = keys_of(4)
    put(tier, keys[:2])
    written = tier.status().bytes_written

    assert put(tier, keys[:2]) == [True, True]
    assert tier.status().bytes_written == written
    assert put(tier, keys) == [True] * 4


def test_duplicate_name_in_one_call_is_one_block(tier):
    (key,) = keys_of(1)

    assert put_blocks(tier, [key, key], [a_block(1), a_block(1)], deadline_in()) == [True, True]

    answers, into = get(tier, [key, key])
    assert outcomes(answers) == [BlockOutcome.MOVED] * 2
    assert np.array_equal(into[0], a_block(1))
    assert np.array_equal(into[1], a_block(1))
    assert tier.status().bytes_written <= 2 * BLOCK_BYTES


def test_a_discarded_block_is_gone_and_can_be_put_again(tier):
    keys = keys_of(3)
    put(tier, keys)

    tier.discard([keys[1], *keys_of(1, "unknown")])

    assert tier.find(keys, deadline_in()) == 1
    assert outcomes(get(tier, keys)[0]) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.MOVED]
    assert put(tier, keys) == [True] * 3
    answers, into = get(tier, keys)
    assert outcomes(answers) == [BlockOutcome.MOVED] * 3
    assert np.array_equal(into[1], a_block(1))


def test_eviction_of_a_block_is_reported_once(tier):
    keys = keys_of(2)
    put(tier, keys)
    tier.gone()

    tier.discard(keys[:1])

    assert set(tier.gone()) <= {keys[0]}
    assert tier.gone() == []


def test_held_lists_only_stored_blocks(tier):
    keys = keys_of(3)
    put(tier, keys)

    assert set(tier.held()) <= set(keys)
    if tier.finds_in_memory:
        assert set(tier.held()) == set(keys)


def test_a_damaged_block_is_never_returned(case: BackingTierCase):
    if case.damage is None:
        pytest.skip("this case has no way to damage a block")
    tier = case.open(plain)
    keys = keys_of(3)
    put(tier, keys)
    case.damage(tier, keys[1])

    answers, _ = get(tier, keys)

    assert outcomes(answers)[1] in (BlockOutcome.CORRUPT, BlockOutcome.GONE)
    assert [outcomes(answers)[0], outcomes(answers)[2]] == [BlockOutcome.MOVED] * 2
    assert tier.status().corrupt == 1
    assert put(tier, keys) == [True] * 3, "the bad block can be replaced"
    assert outcomes(get(tier, keys)[0]) == [BlockOutcome.MOVED] * 3
    tier.close()


def test_a_buffer_of_another_length_gets_nothing(tier):
    keys = keys_of(1)
    put(tier, keys)

    for length in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
        answers, _ = get(tier, keys, length=length)
        assert outcomes(answers)[0] is not BlockOutcome.MOVED


def test_nothing_moves_after_the_deadline(tier):
    keys = keys_of(3)
    past = Nanos(deadline_in(0) - 1)

    assert put(tier, keys, deadline=past) == [False] * 3
    assert outcomes(get(tier, keys)[0]) == [BlockOutcome.GONE] * 3
    put(tier, keys)
    assert outcomes(get(tier, keys, deadline=past)[0]) == [BlockOutcome.GONE] * 3
    assert tier.status().failures >= 1


def test_bytes_are_stored_as_the_codec_encodes_them(case: BackingTierCase):
    tier = case.open(lambda digest: Reversed())
    keys = keys_of(5)
    put(tier, keys)

    answers, into = get(tier, keys)

    assert outcomes(answers) == [BlockOutcome.MOVED] * 5
    for seed, block in enumerate(into):
        assert np.array_equal(block, a_block(seed))
    tier.close()


def test_block_of_another_codec_is_a_miss_and_replaceable(case: BackingTierCase):
    codec = PlainCodec()
    tier = case.open(lambda digest: codec)
    keys = keys_of(2)
    put(tier, keys)
    codec = Reversed()

    assert outcomes(get(tier, keys)[0]) == [BlockOutcome.GONE] * 2
    assert put(tier, keys) == [True] * 2
    answers, into = get(tier, keys)
    assert outcomes(answers) == [BlockOutcome.MOVED] * 2
    assert np.array_equal(into[1], a_block(1))
    tier.close()


def test_bytes_rejected_by_the_codec_are_corrupt(case: BackingTierCase):
    class Picky(Reversed):
        def decode(self, key, encoded, into):
            raise UndecodableBlock("sealed with another key")

    codec = Reversed()
    tier = case.open(lambda digest: codec)
    put(tier, keys_of(1))
    codec = Picky()

    assert outcomes(get(tier, keys_of(1))[0]) == [BlockOutcome.CORRUPT]
    assert tier.status().corrupt == 1
    tier.close()


def test_unopened_namespace_is_a_miss(case: BackingTierCase):
    def codecs(digest):
        if digest == OTHER:
            raise NamespaceUnknown(digest)
        return PlainCodec()

    tier = case.open(codecs)
    ours, theirs = keys_of(1), keys_of(1, digest=OTHER)

    assert put(tier, [*ours, *theirs]) == [True, False]
    assert tier.find(theirs, deadline_in()) == 0
    assert tier.holds([*theirs, *ours], deadline_in()) == [False, True]
    assert outcomes(get(tier, [*theirs, *ours])[0]) == [BlockOutcome.GONE, BlockOutcome.MOVED]
    tier.close()


def test_counters_tell_what_happened(tier):
    keys = keys_of(4)
    put(tier, keys[:3])
    get(tier, keys)

    status = tier.status()

    assert (status.hits, status.misses) == (3, 1)
    assert status.bytes_written >= 3 * BLOCK_BYTES
    assert status.bytes_read >= 3 * BLOCK_BYTES
    assert (status.corrupt, status.failures, status.refused) == (0, 0, 0)


def test_concurrent_threads_get_their_own_blocks(tier):
    wrong = []

    def work(thread: int) -> None:
        mine, shared = keys_of(12, f"t{thread}"), keys_of(12, "shared")
        for first in range(0, 12, 3):
            put_blocks(
                tier, mine[first : first + 3], [a_block(100 * thread + first + i) for i in range(3)], deadline_in()
            )
            put_blocks(tier, shared[first : first + 3], [a_block(first + i) for i in range(3)], deadline_in())
            for keys, base in ((mine, 100 * thread), (shared, 0)):
                answers, into = get(tier, keys)
                wrong.extend(
                    (keys[i], thread)
                    for i, answer in enumerate(answers)
                    if answer.outcome is BlockOutcome.MOVED and not np.array_equal(into[i], a_block(base + i))
                )
        answers, _ = get(tier, mine)
        wrong.extend(answer for answer in answers if answer.outcome is not BlockOutcome.MOVED)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_closed_tier_raises_and_can_be_closed_twice(case: BackingTierCase):
    tier = case.open(plain)
    put(tier, keys_of(1))
    tier.close()
    tier.close()

    with pytest.raises(TierFailed):
        get(tier, keys_of(1))
    with pytest.raises(TierFailed):
        put(tier, keys_of(1))
    with pytest.raises(TierFailed):
        tier.holds(keys_of(1), deadline_in())
    tier.discard(keys_of(1))


def test_held_blocks_outlive_the_tier(case: BackingTierCase):
    tier = case.open(plain)
    keys = keys_of(10)
    put(tier, keys)
    tier.discard(keys[4:5])
    tier.close()

    again = case.open(plain)

    answers, into = get(again, keys)
    assert outcomes(answers) == [BlockOutcome.MOVED] * 4 + [answers[4].outcome] + [BlockOutcome.MOVED] * 5
    assert answers[4].outcome is not BlockOutcome.MOVED, "a bad block must not return"
    assert np.array_equal(into[9], a_block(9))
    again.close()


def test_tier_reports_its_kind(case: BackingTierCase):
    tier = case.open(plain)

    assert tier.name == tier.status().name == case.name
    tier.close()
