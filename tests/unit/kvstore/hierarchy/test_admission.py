"""Tier admission: which blocks are written to a tier that wears out, such as an SSD."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.admission import APART, DAY, BlockSightings, ReuseAdmission, WriteBudget

MIB = 1 << 20
LATER = Nanos(60 * SECOND)


def budget(bytes_per_day=DAY // SECOND * 1000, burst=10_000, **state):
    return WriteBudget(bytes_per_day, burst, now=Nanos(0), **state)  # 1,000 bytes per second


def test_blocks_seen_once_are_not_written():
    admission = ReuseAdmission()

    assert not any(admission.admits(key, MIB, Nanos(key * SECOND)) for key in range(10_000))


def test_block_is_written_at_its_second_sighting():
    admission = ReuseAdmission()

    assert not admission.admits("block", MIB, Nanos(0))
    assert admission.admits("block", MIB, LATER)


def test_uses_of_one_request_count_as_one_sighting():
    admission = ReuseAdmission()

    admission.admits("block", MIB, Nanos(0))
    assert not admission.admits("block", MIB, Nanos(APART - 1))
    assert admission.admits("block", MIB, APART)


def test_sightings_are_forgotten_and_their_number_is_bounded():
    sightings = BlockSightings(remembered=100)
    sightings.again("early", Nanos(0))
    for key in range(1000):
        sightings.again(key, Nanos(0))
        assert len(sightings) <= 100

    assert not sightings.again("early", LATER)
    assert sightings.again(999, LATER)


def test_a_block_in_steady_use_is_never_forgotten():
    sightings = BlockSightings(remembered=100)
    for key in range(1000):
        sightings.again(key, Nanos(key * SECOND))
        seen = sightings.again("steady", Nanos(key * SECOND))
        assert seen or key * SECOND < APART


def test_block_with_predicted_reuse_is_written_at_once():
    admission = ReuseAdmission(predict={"likely": 0.9, "unlikely": 0.1}.__getitem__)

    assert admission.admits("likely", MIB, Nanos(0))
    assert not admission.admits("unlikely", MIB, Nanos(0))


def test_block_over_budget_is_counted_and_not_written():
    admission = ReuseAdmission(predict=lambda _: 1.0, budget=budget())

    written = sum(admission.admits(key, 4000, Nanos(0)) for key in range(5))

    assert written == 2
    assert admission.over_budget == 3


def test_a_budget_fills_evenly_up_to_its_burst():
    spent = budget()
    assert spent.take(10_000, Nanos(0))
    assert not spent.take(1, Nanos(0))

    assert spent.level_bytes(Nanos(3 * SECOND // 2)) == 1500
    assert spent.level_bytes(Nanos(3600 * SECOND)) == 10_000


def test_a_budget_survives_a_restart_as_a_number():
    before = budget()
    before.take(9_300, Nanos(0))

    after = budget(level_bytes=before.level_bytes(Nanos(0)))

    assert not after.take(701, Nanos(0))
    assert after.take(700, Nanos(0))


def test_clock_that_jumps_back_refills_nothing():
    spent = budget()
    spent.take(10_000, Nanos(100 * SECOND))

    assert spent.level_bytes(Nanos(50 * SECOND)) == 0
    assert spent.level_bytes(Nanos(51 * SECOND)) == 1000


@given(writes=st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 20_000)), max_size=60))
def test_writes_never_exceed_burst_plus_refill(writes):
    spent, now, written = budget(), 0, 0
    for pause, size in writes:
        now += pause
        if spent.take(size, Nanos(now)):
            written += size
        assert written <= 10_000 + now * 1000 // SECOND
