"""Tests of the error of a predicted latency: it is a share of the longer time, and always a number from 0 to 1."""

from math import inf

import pytest

from fleet.planner.sizing.prediction_error import prediction_error


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [
        (2.0, 1.0, 0.5),
        (1.0, 2.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, 1.0, 1.0),
        (inf, 1.0, 1.0),
        (1.0, inf, 1.0),
        (inf, inf, 1.0),
    ],
)
def test_error_is_a_share_of_the_longer_time(predicted, measured, error):
    assert prediction_error(predicted, measured) == error
