"""Tests of the observed load: mean lengths of requests, from demand windows."""

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.planner.demand import DemandWindow
from fleet.sim.planning.rules.observed_load import ObservedLoad


def test_abandoned_requests_do_not_change_the_mean_prompt():
    load = ObservedLoad()

    load.add(
        DemandWindow(
            began=Nanos(0),
            ended=Nanos(SECOND),
            arrivals=6,
            abandoned=4,
            prompt_tokens=600,
            cached_tokens=300,
            finished=6,
            answer_tokens=60,
        )
    )

    assert load.shape.prompt_tokens == 100
    assert load.shape.cached_share == pytest.approx(0.5)
