"""Overload in virtual time: goodput if the limit of the predicted wait is the goal for first tokens."""

import pytest

from fleet.core.clock import SECOND
from fleet.sim.results.outcomes import EndedRequest
from tests.support.sim.worlds import a_plan, a_pool, a_run

GOAL_SECONDS = 2.0
RUN_SECONDS, WARM_SECONDS = 100, 30

# Limits of the engines, the random requests, and the most requests a second that two such workers can answer.
CASES = {
    "places": ({}, {"prompt_tokens": 256, "output_tokens": 300}, 24.9),
    "long answers": ({"kv_blocks": 4000}, {"prompt_tokens": 256, "output_tokens": 2500}, 3.4),
    "blocks": ({"kv_blocks": 200}, {"prompt_tokens": 256, "output_tokens": 300}, 16.1),
    "prefill": ({"kv_blocks": 4000}, {"prompt_tokens": 4000, "output_tokens": 60}, 19.1),
}


@pytest.mark.parametrize("case", CASES)
def test_goodput_at_three_times_capacity_stays_near_peak(case):
    limits, drawn, capacity = CASES[case]
    peak, overloaded = (goodput(limits, drawn, factor * capacity) for factor in (1.0, 3.0))
    assert peak > 0.8 * capacity
    assert overloaded >= 0.9 * peak


def goodput(limits, drawn, rate) -> float:
    """Return the answers a second whose first token came within the goal; the first `WARM_SECONDS` do not count."""
    ended: list[EndedRequest] = []
    plan = a_plan(a_pool(workers=2, **limits), max_queue_seconds=GOAL_SECONDS)
    a_run(plan, ended, requests=round(rate * RUN_SECONDS), rate=rate, **drawn)
    good = [
        each
        for each in ended
        if WARM_SECONDS <= each.arrival / SECOND < RUN_SECONDS
        and not each.refused
        and each.ttft_ms <= 1000 * GOAL_SECONDS
    ]
    return len(good) / (RUN_SECONDS - WARM_SECONDS)
