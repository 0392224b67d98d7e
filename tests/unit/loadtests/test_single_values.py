"""Load tests with a single round or a single value: they still give figures."""

from loadtests.first_token import quartiles
from loadtests.kvstore.embedded import spread


def test_quartiles_of_one_round_are_its_value():
    measured = {"idle": [5.04], "cancelled": [1.0, 2.0, 3.0]}

    assert quartiles(measured) == {"idle": [5.0, 5.0, 5.0], "cancelled": [1.0, 2.0, 3.0]}


def test_percentiles_of_one_call_are_its_value():
    assert spread("late", [0.25]) == {"late p50": 250.0, "late p99": 250.0, "late max": 250.0}
