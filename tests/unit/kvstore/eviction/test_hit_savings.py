"""Hit savings: rules 1 to 4 of `kvstore.eviction.hit_savings`, and their effect on the eviction policy."""

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.hit_savings import LEAST, SAMPLES, HitSavings
from kvstore.eviction.policies import policy
from kvstore.messages import BlockKey
from tests.support.kvstore.builders import BLOCK_BYTES, a_namespace

SMALL, LARGE = a_namespace(model="small"), a_namespace(model="large")
NAMESPACES = {each.digest: each for each in (SMALL, LARGE)}
MEMORY = 2.0**30  # bytes per second


class Below:
    """Fake of the backing tiers, whose reading times the test sets."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, key, size_bytes):
        return self.seconds.get(key)


def a_key(namespace=SMALL, name="a") -> BlockKey:
    return BlockKey(namespace.digest, f"{name:>16}".encode())


def some_savings(**fields) -> tuple[HitSavings, Below]:
    savings, below = HitSavings(memory_bytes_a_second=MEMORY, **fields), Below()
    savings.attach(NAMESPACES.__getitem__, below)
    return savings, below


def test_unreported_namespace_uses_the_configured_speed():
    savings, _ = some_savings(seconds_a_token=0.01)

    assert savings.computing_seconds(SMALL.digest) == pytest.approx(32 * 0.01)


def test_highest_recent_report_counts():
    savings, _ = some_savings()
    savings.report(SMALL.digest, 10, 5.0)  # the whole chain has to be computed
    savings.report(SMALL.digest, 10, 1.0)  # the engine has most of the chain
    assert savings.computing_seconds(SMALL.digest) == 0.5
    assert savings.computing_seconds(LARGE.digest) == 32 * 0.0005

    for _ in range(SAMPLES):
        savings.report(SMALL.digest, 10, 1.0)

    assert savings.computing_seconds(SMALL.digest) == 0.1


def test_empty_reports_are_ignored():
    savings, _ = some_savings(seconds_a_token=0.01)

    savings.report(SMALL.digest, 0, 1.0)
    savings.report(SMALL.digest, 10, 0.0)

    assert savings.computing_seconds(SMALL.digest) == pytest.approx(0.32)


def test_hit_saves_computing_less_reading_from_the_pool():
    savings, _ = some_savings()
    a_byte = 2.0**-20
    savings.report(SMALL.digest, 1, (a_byte + 1 / MEMORY) * BLOCK_BYTES)

    assert savings.saving(a_key(), BLOCK_BYTES) == a_byte


def test_hit_saves_at_most_a_promotion():
    savings, below = some_savings()
    savings.report(SMALL.digest, 1, 2.0**-10 * BLOCK_BYTES)
    below.seconds = {a_key(name="slow"): 2.0**-5 * BLOCK_BYTES, a_key(name="fast"): 2.0**-20 * BLOCK_BYTES}

    assert savings.saving(a_key(name="slow"), BLOCK_BYTES) == 2.0**-10
    assert savings.saving(a_key(name="fast"), BLOCK_BYTES) == 2.0**-20


def test_savings_have_a_lower_bound():
    savings, below = some_savings()
    below.seconds = {a_key(): 0.0}

    assert savings.saving(a_key(), BLOCK_BYTES) == LEAST > 0


def test_savings_are_powers_of_two():
    savings, _ = some_savings()
    found = set()
    for step in range(100):
        savings.report(SMALL.digest, 1, 1 + step / 50)
        found.add(savings.saving(a_key(), BLOCK_BYTES))

    assert len(found) <= 3


@pytest.mark.parametrize("cheap", [SMALL, LARGE])
def test_blocks_of_the_faster_model_are_evicted_first(cheap):
    dear = LARGE if cheap is SMALL else SMALL
    savings, _ = some_savings()
    savings.report(cheap.digest, 1, 0.001)
    savings.report(dear.digest, 1, 1.0)
    hazard = policy("hazard", savings.saving)
    for turn in range(20):
        for offset, namespace in enumerate((SMALL, LARGE)):
            for block in range(4, -1, -1):
                hazard.admit(a_key(namespace, str(block)), BLOCK_BYTES, Nanos((turn * 10 + offset) * SECOND))

    gone = []
    for _ in range(5):
        gone.append(hazard.choose())
        hazard.withdraw(gone[-1])

    assert {key.digest for key in gone} == {cheap.digest}
