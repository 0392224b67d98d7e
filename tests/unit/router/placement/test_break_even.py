"""Prefill break-even: how the router learns from how many uncached tokens on a prefill worker is the better choice."""

import random

import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Phase, Role
from fleet.router.placement.break_even import MAX_TOKENS, MIN_SAMPLES, MIN_TOKENS, PrefillBreakEven
from fleet.router.placement.decision import PlacementReason
from tests.support.builders import a_handoff, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, dispatched, the


def learned(milliseconds: float, samples: int = MIN_SAMPLES) -> PrefillBreakEven:
    break_even = PrefillBreakEven()
    for _ in range(samples):
        break_even.handed_over(Nanos(int(milliseconds * MILLISECOND)))
    return break_even


@pytest.mark.parametrize(
    ("milliseconds", "token_seconds", "requests", "tokens"),
    [
        (40, 1e-4, 1, 400),
        (40, 1e-4, 0, 400),
        (40, 1e-4, 4, 100),
        (40, 1e-4, 40, MIN_TOKENS),
        (400, 1e-5, 1, MAX_TOKENS),
        (40, 0.0, 4, 512),
    ],
)
def test_break_even_equates_delay_and_handoff(milliseconds, token_seconds, requests, tokens):
    assert learned(milliseconds).min_tokens(token_seconds, requests, 512) == tokens


@pytest.mark.parametrize(("constant", "tokens"), [(8192, MIN_TOKENS), (16, 16)])
def test_prompts_are_handed_over_until_enough_is_measured(constant, tokens):
    assert learned(40, MIN_SAMPLES - 1).min_tokens(1e-4, 1, constant) == tokens


@pytest.mark.parametrize("begin", [1, 10_000])
def test_estimate_converges_within_a_tenth(begin):
    """Give a first sample that is wrong by orders of magnitude, and then samples that differ by up to a quarter from 40 ms."""
    rng = random.Random(1)
    break_even = learned(begin, samples=1)
    for _ in range(100):
        break_even.handed_over(Nanos(int(rng.uniform(30, 50) * MILLISECOND)))

    assert break_even.min_tokens(1e-4, 1, 512) == pytest.approx(400, rel=0.1)


def test_router_learns_and_reports_the_break_even():
    """Measure 200 ms for a handoff and 1 ms for a prompt token: without delayed requests, the break-even is at 200 tokens."""
    router = RouterMachineDriver(("p1", Role.PREFILL), ("d1", Role.DECODE), learn_remote_prefill=True)
    sampling = Sampling(temperature=0.0, max_tokens=2)
    for number in range(MIN_SAMPLES):
        request_id = f"r{number}"
        tokens = a_prompt(1000, first=100_000 * (number + 1))
        prefill = the(Dispatch, router.send(an_arrival(request_id=request_id, tokens=tokens, sampling=sampling)))
        assert prefill.start.phase is Phase.PREFILL
        router.now = Nanos(router.now + SECOND)
        handed = router.step(prefill, 1, finish=Finish.LENGTH, handoff=a_handoff(num_tokens=1000))
        router.now = Nanos(router.now + 200 * MILLISECOND)
        router.step(the(Dispatch, handed), 2, finish=Finish.LENGTH)

    short = dispatched(router.send(an_arrival(request_id="short", tokens=a_prompt(190, first=1), sampling=sampling)))
    router.cancel("short")
    longer = dispatched(router.send(an_arrival(request_id="longer", tokens=a_prompt(210, first=7), sampling=sampling)))

    assert (short.phase, longer.phase) == (Phase.AGGREGATED, Phase.PREFILL)
    (placed,) = router.machine.explain(RequestId("longer")).placements
    assert (placed.why, placed.min_tokens) == (PlacementReason.PROMPT_LONG_UNCACHED, 200)


@pytest.mark.parametrize(("external", "phase"), [(False, Phase.PREFILL), (True, Phase.AGGREGATED)])
def test_external_request_is_not_handed_over_to_measure(external, phase):
    router = RouterMachineDriver(("p1", Role.PREFILL), ("d1", Role.DECODE), learn_remote_prefill=True)

    work = the(Dispatch, router.send(an_arrival(tokens=a_prompt(200), external=external)))

    assert work.start.phase is phase


@pytest.mark.parametrize("learning", [False, True])
def test_break_even_is_reported_even_if_unused(learning):
    """Run eight requests on the decode worker: the break-even, an eighth of 200 tokens, is below the lower bound."""
    router = RouterMachineDriver(("p1", Role.PREFILL), ("d1", Role.DECODE), learn_remote_prefill=learning)
    nothing = router.machine.remote_prefill()
    assert (nothing.learned, nothing.handoffs, nothing.workers[0].min_tokens) == (learning, 0, None)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    for number in range(MIN_SAMPLES):
        tokens = a_prompt(1000, first=100_000 * (number + 1))
        prefill = the(Dispatch, router.send(an_arrival(request_id=f"r{number}", tokens=tokens, sampling=sampling)))
        router.now = Nanos(router.now + SECOND)
        handed = router.step(prefill, 1, finish=Finish.LENGTH, handoff=a_handoff(num_tokens=1000))
        router.now = Nanos(router.now + 200 * MILLISECOND)
        router.step(the(Dispatch, handed), 2)

    report = router.machine.remote_prefill()
    (worker,) = report.workers
    assert report.handoffs == MIN_SAMPLES
    assert report.handoff_seconds == pytest.approx(0.2)
    assert (worker.worker_id, worker.requests, worker.min_tokens) == ("d1", MIN_SAMPLES, MIN_TOKENS)
    assert worker.token_seconds == pytest.approx(0.001)
    for number in range(MIN_SAMPLES - 1):
        router.cancel(f"r{number}")
    assert router.machine.remote_prefill().workers[0].min_tokens == 200
