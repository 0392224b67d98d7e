"""Kernel: the event heap of virtual time."""

import pytest

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel, cancel


def order(seed: int) -> list[int]:
    kernel, happened = Kernel(seed), []
    for number in range(20):
        kernel.at(Nanos(5), lambda number=number: happened.append(number))
    kernel.run()
    return happened


def test_time_moves_from_event_to_event():
    kernel, seen = Kernel(1), []
    kernel.at(Nanos(30), lambda: seen.append(kernel.now()))
    kernel.at(Nanos(10), lambda: kernel.after(Nanos(5), lambda: seen.append(kernel.now())))
    assert kernel.run() == 3
    assert seen == [15, 30]


def test_past_event_happens_now():
    kernel, seen = Kernel(1), []
    kernel.at(Nanos(10), lambda: kernel.at(Nanos(3), lambda: seen.append(kernel.now())))
    kernel.run()
    assert seen == [10]


def test_cancelled_event_does_not_happen():
    kernel, seen = Kernel(1), []
    cancel(kernel.at(Nanos(10), lambda: seen.append("no")))
    assert kernel.run() == 0
    assert not seen


def test_run_ends_before_later_events():
    kernel, seen = Kernel(1), []
    kernel.at(Nanos(10), lambda: seen.append(10))
    kernel.at(Nanos(11), lambda: seen.append(11))
    kernel.run(until=Nanos(10))
    assert seen == [10]
    kernel.run()
    assert seen == [10, 11]


def test_skip_moves_time_but_no_event():
    kernel, seen = Kernel(1, begin=-10), []
    kernel.at(Nanos(3), lambda: seen.append(kernel.now()))
    kernel.skip(Nanos(3))
    assert not seen
    with pytest.raises(AssertionError):
        kernel.skip(Nanos(4))
    kernel.run()
    assert seen == [3]


def test_seed_draws_order_within_instant():
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))
