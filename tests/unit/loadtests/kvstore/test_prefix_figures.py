"""Figures of the repeated-prefix benchmark: the length from which loading is faster than computing."""

import pytest

from loadtests.kvstore.prefix_figures import LENGTHS, PrefixLine, PrefixOrigin, break_even, break_evens, table


@pytest.mark.parametrize(
    ("loaded", "tokens"),
    [
        ({32: 20.0, 64: 20.0, 128: 20.0}, 48.0),  # computing takes 10, 30 and 50 ms
        ({32: 5.0, 64: 6.0, 128: 7.0}, 32.0),
        ({32: 99.0, 64: 99.0, 128: 99.0}, None),
        ({32: 5.0, 64: 31.0, 128: 40.0}, 64 + 64 / 11),  # loading is slower at 64, although it is faster at 32
        ({64: 10.0, 128: 20.0}, 64.0),  # the shortest length was declined
        ({32: 10.0, 64: 30.0, 128: 49.0}, 64.0),  # at 64, both take the same time
        ({}, None),
    ],
)
def test_break_even_is_last_crossing(loaded, tokens):
    assert break_even({32: 10.0, 64: 30.0, 128: 50.0}, loaded) == tokens


def a_line(origin: PrefixOrigin, tokens: int, median_ms: float | None) -> PrefixLine:
    spread = None if median_ms is None else (median_ms, median_ms)
    return PrefixLine(
        origin=origin, tokens=tokens, blocks=1, rounds=3, declined=2, median_ms=median_ms, spread_ms=spread
    )


def test_always_declined_length_has_no_figure():
    lines = [
        a_line(
            origin, length, None if origin is PrefixOrigin.REDIS else 10.0 if origin is PrefixOrigin.COMPUTED else 5.0
        )
        for length in LENGTHS
        for origin in PrefixOrigin
    ]

    assert break_evens(lines) == {"engine": 32.0, "cpu": 32.0, "ssd": 32.0, "redis": None}
    assert table(lines).count("declined") == len(LENGTHS)
    assert table(lines).count("5.0 (5.0-5.0) -2") == 3 * len(LENGTHS)
