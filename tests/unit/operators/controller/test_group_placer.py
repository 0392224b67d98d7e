"""Failed topology domains: which ones are remembered, for how long, and how many."""

import pytest

from fleet.core.clock import SECOND, Nanos
from operators.controller.group_placer import FAILED, MOST_FAILED, FailedDomains
from operators.keys import deployment_key

KEY, OTHER = deployment_key("ns", "dd"), deployment_key("ns", "other")


class Time:
    def __init__(self):
        self.at = Nanos(0)

    def now(self):
        return self.at


@pytest.fixture
def world():
    clock = Time()
    return clock, FailedDomains(clock)


def test_failed_domains_are_remembered_by_role_for_a_time(world):
    clock, failed = world
    failed.add(KEY, "decode", "a")
    clock.at = Nanos(SECOND)
    failed.add(KEY, "decode", "b")
    failed.add(KEY, "prefill", "c")

    assert failed.of(KEY) == {"decode": ("a", "b"), "prefill": ("c",)}
    assert failed.of(OTHER) == {}
    clock.at = FAILED
    assert failed.of(KEY) == {"decode": ("b",), "prefill": ("c",)}
    clock.at = Nanos(FAILED + SECOND)
    assert failed.of(KEY) == {}


def test_domain_that_fails_again_is_the_last_to_be_tried(world):
    _, failed = world
    for domain in ("a", "b", "a"):
        failed.add(KEY, "decode", domain)

    assert failed.of(KEY) == {"decode": ("b", "a")}


def test_memory_of_failed_domains_is_bounded(world):
    _, failed = world
    failed.add(KEY, "prefill", "kept")
    for at in range(MOST_FAILED + 2):
        failed.add(KEY, "decode", f"d{at}")

    assert failed.of(KEY)["decode"] == tuple(f"d{at}" for at in range(2, MOST_FAILED + 2))
    assert failed.of(KEY)["prefill"] == ("kept",)
    failed.forget(KEY)
    assert failed.of(KEY) == {}
