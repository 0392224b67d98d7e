"""When a fence closes because of damaged answers, and for how long."""

from kvstore.clock import SECOND, Nanos
from kvstore.tiers.fence import DAMAGE, FIRST_PAUSE, LIMIT, LONGEST_PAUSE, Fence

START = Nanos(1000 * SECOND)
FEW = LIMIT // DAMAGE


def at(seconds: float) -> Nanos:
    return Nanos(START + round(seconds * SECOND))


def test_four_damaged_blocks_in_a_row_close_the_fence():
    fence = Fence()
    assert [fence.record(sound=0, damaged=1, now=START) for _ in range(FEW)] == [False] * (FEW - 1) + [True]
    assert fence.is_closed


def test_rare_damage_never_closes_the_fence():
    fence = Fence()
    for _ in range(1000):
        assert not fence.record(sound=DAMAGE, damaged=1, now=START)


def test_fence_opens_after_a_pause_and_closes_on_new_damage():
    fence = Fence()
    fence.record(sound=0, damaged=FEW, now=START)
    assert not fence.reopen(Nanos(START + FIRST_PAUSE - 1))
    assert fence.is_closed

    assert fence.reopen(Nanos(START + FIRST_PAUSE))

    assert not fence.is_closed
    assert fence.record(sound=0, damaged=1, now=at(1))
    assert not fence.reopen(at(2.9)), "the pause has doubled"
    assert fence.reopen(at(3))


def test_pause_grows_to_a_limit_and_resets_after_sound_blocks():
    fence, now = Fence(), START
    for _ in range(20):
        fence.record(sound=0, damaged=FEW, now=now)
        now = Nanos(now + LONGEST_PAUSE)
        assert fence.reopen(now)
    fence.record(sound=LIMIT, damaged=0, now=now)

    fence.record(sound=0, damaged=FEW, now=now)

    assert fence.reopen(Nanos(now + FIRST_PAUSE))


def test_damage_on_a_closed_fence_does_not_prolong_the_pause():
    fence = Fence()
    fence.record(sound=0, damaged=FEW, now=START)
    assert not fence.record(sound=0, damaged=FEW, now=at(0.5))
    assert fence.reopen(at(1))
