"""The scores that decide which segment is evicted first."""

import math

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.tiers.ssd.segments.eviction import SCORES, SegmentUse, least_recent, oldest, reuse
from kvstore.tiers.ssd.settings import SegmentEviction

NOW = Nanos(10_000 * SECOND)


def a_use(*, idle: float = 100, hits: int = 0, blocks: int = 1000, live_share: float = 1.0, sequence: int = 1):
    used_at = Nanos(NOW - round(idle * SECOND))
    return SegmentUse(sequence=sequence, blocks=blocks, live_share=live_share, hits=hits, used_at=used_at)


@pytest.mark.parametrize(
    ("evicted", "kept"),
    [
        (a_use(idle=200), a_use(idle=100)),
        (a_use(idle=100), a_use(idle=150, hits=1000)),
        (a_use(idle=3600, hits=10_000), a_use(idle=300)),
        (a_use(idle=100, live_share=0.3), a_use(idle=200)),
        (a_use(idle=0, blocks=0), a_use(idle=9000)),
        (a_use(idle=10, hits=500), a_use(idle=0)),
    ],
    ids=["unused for longer", "read less often", "busy long ago", "mostly dead", "without a block", "not the newest"],
)
def test_reuse_weighs_hits_against_idle_time(evicted, kept):
    assert reuse(evicted, NOW) < reuse(kept, NOW)


def test_reuse_has_no_time_constant():
    fast = [a_use(idle=2), a_use(idle=3, hits=1000), a_use(idle=5, hits=5000)]
    slow = [a_use(idle=2e3), a_use(idle=3e3, hits=1000), a_use(idle=5e3, hits=5000)]

    assert [reuse(s, NOW) / reuse(f, NOW) for f, s in zip(fast, slow, strict=True)] == pytest.approx([1000] * 3)


def test_least_recent_and_oldest_follow_their_order():
    assert least_recent(a_use(idle=20, hits=99), NOW) < least_recent(a_use(idle=10), NOW)
    assert oldest(a_use(sequence=1, hits=99, idle=0), NOW) < oldest(a_use(sequence=2), NOW)


def test_each_eviction_setting_has_a_score():
    assert set(SCORES) == set(SegmentEviction)
    assert all(not math.isnan(score(a_use(), NOW)) for score in SCORES.values())
