"""Interleaved comparison: how figures are measured and compared."""

import pytest

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.comparison import BenchmarkLine, LineDirection, measure, table


def a_line(**fields) -> BenchmarkLine:
    return BenchmarkLine(
        **{"name": "work", "unit": "GB/s", "better": LineDirection.MORE, "fleet": lambda: 1.0, **fields}
    )


def in_turn(*figures: float):
    """Return a contestant that gives these figures in turn; the first one is for the warm-up."""
    left = iter(figures)
    return lambda: next(left)


def test_contestants_take_turns_in_every_round():
    turns = []

    def contestant(name):
        return lambda: turns.append(name) or 1.0

    measure(a_line(limit=contestant("l"), fleet=contestant("f"), peers={"p": contestant("p")}), rounds=3)

    assert turns == ["l", "f", "p"] * 4


def test_figures_are_medians_without_warm_up():
    result = measure(a_line(limit=in_turn(99, 10, 12, 11), fleet=in_turn(99, 5, 7, 5.5)), rounds=3)

    assert (result.limit, result.fleet, result.rounds) == (11, 5.5, 3)
    assert result.ratio_to_limit == 0.5
    assert result.spread == {"limit": (10, 12), "fleet": (5, 7)}


def test_ratio_is_below_one_if_fleet_is_slower():
    result = measure(a_line(better=LineDirection.LESS, limit=lambda: 2.0, fleet=lambda: 8.0), rounds=3)

    assert result.ratio_to_limit == 0.25


def test_unavailable_contestant_is_null_with_reason():
    def absent():
        raise SystemUnavailable("not installed; do this")

    result = measure(a_line(peers={"p": absent, "q": lambda: 2.0}), rounds=3)

    assert result.peers == {"p": None, "q": 2.0}
    assert result.absent == {"p": "not installed; do this"}
    assert "p: not installed; do this" in table([result])


def test_contestant_that_fails_later_has_no_figure():
    figures = iter([1.0, 1.0])

    def dying():
        try:
            return next(figures)
        except StopIteration:
            raise SystemUnavailable("it ended") from None

    result = measure(a_line(peers={"p": dying}), rounds=3)

    assert result.peers == {"p": None}
    assert "p" not in result.spread


def test_bug_of_benchmark_is_raised():
    with pytest.raises(ZeroDivisionError):
        measure(a_line(fleet=lambda: 1 / 0), rounds=3)
