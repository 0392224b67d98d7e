"""Log deduplication: which of several log messages about the same subject are logged."""

from fleet.core.clock import SECOND, Nanos
from fleet.core.repeats import REPEAT_AFTER, LogDeduplicator


def test_cause_is_logged_when_it_changes_and_after_a_minute():
    repeats = LogDeduplicator()
    events = [("a", 0), ("a", 1), ("b", 2), ("b", 61), ("b", 62), ("a", 63)]

    news = [repeats.is_new("w0", cause, Nanos(at * SECOND)) for cause, at in events]

    assert news == [True, False, True, False, True, True]


def test_a_cause_that_was_gone_is_news_again():
    repeats = LogDeduplicator()
    assert repeats.is_new("w0", "a", Nanos(0))

    repeats.forget("w0")

    assert repeats.is_new("w0", "a", Nanos(1))


def test_subjects_without_events_are_forgotten():
    repeats = LogDeduplicator()
    for number in range(1000):
        repeats.is_new(number, "a", Nanos(number * REPEAT_AFTER))

    assert len(repeats.logged) == 1
