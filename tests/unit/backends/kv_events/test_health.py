"""Alerts about an engine whose KV events are missing or unusable."""

import pytest

from fleet.backends.kv_events.health import ADVICE, ENOUGH, EventHealth, KvEventAlert
from fleet.backends.kv_events.stream import EventStreamCounters
from fleet.core.clock import SECOND, Nanos
from tests.unit.backends.kv_events.published import a_batch, of_group, some_books, stored

PATIENCE = Nanos(10 * SECOND)
SOON, LATER = Nanos(1), Nanos(PATIENCE + 1)


class Engine:
    def __init__(self):
        self.books, self.counters = some_books(), EventStreamCounters()
        self.health = EventHealth(self.books, self.counters, PATIENCE)

    def publish(self, *events: object) -> None:
        self.counters.batches += 1
        self.books.take(a_batch(*events))

    def serve(self, prompts: int, now: Nanos = SOON) -> None:
        for _ in range(prompts):
            self.health.filled(now)


def test_serving_engine_without_events_is_silent_after_patience():
    engine = Engine()
    engine.serve(ENOUGH)

    assert engine.health.alert(PATIENCE) is None
    assert engine.health.alert(LATER) is KvEventAlert.SILENT


def test_engine_that_falls_silent_later_raises_and_ends_alert():
    engine = Engine()
    engine.publish(stored([1], None, 0, 32))
    engine.serve(ENOUGH)
    assert engine.health.alert(LATER) is KvEventAlert.SILENT

    engine.publish(stored([2], 1, 32, 64))

    assert engine.health.alert(LATER) is None
    engine.serve(1, LATER)
    assert engine.health.alert(Nanos(LATER + LATER)) is None, "one prompt may have been asked for elsewhere before"


def test_idle_engine_may_publish_nothing():
    assert Engine().health.alert(Nanos(10**18)) is None


def test_other_block_size_raises_alert_with_the_size():
    engine = Engine()

    engine.publish(stored([1, 2], None, 0, 32, block_size=16))

    assert engine.health.alert(SOON) is KvEventAlert.OTHER_BLOCK_SIZE
    assert engine.books.published_block_tokens == 16


@pytest.mark.parametrize("attention", ["sliding_window", "mamba"])
def test_engine_without_full_attention_raises_alert(attention):
    engine = Engine()
    engine.publish(of_group(0, attention, [1], None, 0, 32))
    assert engine.health.alert(SOON) is KvEventAlert.ATTENTION_REFUSED

    engine.publish(of_group(1, "full_attention", [1], None, 0, 32))

    assert engine.health.alert(SOON) is None, "a hybrid model is followed by its full attention"


def test_unreadable_alert_lasts_until_a_block_is_followed():
    engine = Engine()
    engine.counters.unreadable = 1
    assert engine.health.alert(SOON) is KvEventAlert.UNREADABLE

    engine.publish(stored([1], None, 0, 32))

    assert engine.health.alert(SOON) is None


def test_each_alert_has_advice():
    assert set(ADVICE) == set(KvEventAlert)
