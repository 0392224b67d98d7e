"""Open loop: formulas compared with known figures and a simulated queue, and properties that always hold."""

import random
from math import inf

import pytest

from fleet.hardware.latency.closed_loop import BenchmarkClient, closed_loop
from fleet.hardware.latency.open_loop import (
    BatchOccupancy,
    EngineReplica,
    RequestShape,
    aggregated_rate,
    aggregated_tpot,
    aggregated_ttft,
    decode_rate,
    decode_tpot,
    highest_concurrency,
    highest_prefill_rate,
    prefill_ttft,
)
from fleet.hardware.latency.step_model import step_model, work
from tests.support.sim.model_configs import a_placement
from tests.unit.hardware.latency.test_step_model import USUAL

STEP = step_model(work(a_placement(tp=8)), USUAL)
REQUEST = RequestShape(prompt_tokens=2048, answer_tokens=256)
AT_A_RATE = BatchOccupancy(percentile=0.9, waiting_clients=False)
WAITING = BatchOccupancy(percentile=0.9, waiting_clients=True)


def an_engine(**fields):
    usual = {
        "step": STEP,
        "client": BenchmarkClient(),
        "capacity_tokens": 1e6,
        "most_running": 256,
        "budget_tokens": 8192,
    }
    return EngineReplica(**(usual | fields))


def decode(running):
    return STEP.seconds(0, 0, running, running * (2048 + 128))


def prompt():
    return STEP.seconds(2048, 2048 * 1024, 0, 0)


def test_single_request_does_not_wait():
    engine = an_engine(client=BenchmarkClient(front=0.01, front_token=1e-6))

    assert aggregated_ttft(engine, REQUEST, AT_A_RATE, 0.0) == pytest.approx(prompt() + 0.01 + 2048e-6)
    assert aggregated_tpot(engine, REQUEST, AT_A_RATE, 0.0) == pytest.approx(decode(1))
    assert prefill_ttft(engine, REQUEST, AT_A_RATE, 0.0) == pytest.approx(prompt() + 0.01 + 2048e-6)


@pytest.mark.parametrize("running", [1, 4, 16, 64])
def test_waiting_clients_agree_with_closed_loop(running):
    """Compare with `closed_loop`, whose formula was fitted to measurements."""
    seen = closed_loop(
        STEP,
        BenchmarkClient(waves=1e9),
        concurrency=running,
        prompt_tokens=2048,
        answer_tokens=256,
        capacity_tokens=1e6,
        budget_tokens=8192,
    )

    assert aggregated_tpot(an_engine(), REQUEST, WAITING, running) == pytest.approx(seen.tpot, rel=0.03)


def test_cached_prompt_is_read_but_not_computed():
    warm = RequestShape(prompt_tokens=2048, answer_tokens=256, cached_tokens=1024)
    half = STEP.seconds(1024, 1024 * (1024 + 512), 0, 0)

    assert prefill_ttft(an_engine(), warm, AT_A_RATE, 0.0) == pytest.approx(half)
    assert aggregated_tpot(an_engine(), warm, AT_A_RATE, 0.0) == pytest.approx(decode(1))


def test_kv_transfer_raises_decode_tpot():
    engine = an_engine()

    assert decode_tpot(engine, REQUEST, AT_A_RATE, 0.0, 0.256) == pytest.approx(decode(1) + 0.001)
    assert decode_rate(engine, REQUEST, 8) == pytest.approx(8 / (256 * decode(8)))


def test_concurrency_is_limited_by_kv_and_batch():
    assert highest_concurrency(an_engine(), REQUEST) == 256
    assert highest_concurrency(an_engine(capacity_tokens=23040), REQUEST) == 10


@pytest.mark.parametrize("used", [0.3, 0.6, 0.8])
def test_prompt_wait_agrees_with_simulated_queue(used):
    """Simulate a queue of prompts that each fill a step: nine of ten wait at most the predicted time, which is at most twice too long."""
    request = RequestShape(prompt_tokens=8192, answer_tokens=1)
    engine = an_engine()
    rate = used * highest_prefill_rate(engine, request)
    service = STEP.seconds(8192, 8192 * 4096, 0, 0)
    chance, now, free, waits = random.Random(5), 0.0, 0.0, []
    for _ in range(20_000):
        now += chance.expovariate(rate)
        waits.append(max(0.0, free - now))
        free = max(free, now) + service
    seen = sorted(waits)[int(0.9 * len(waits))]

    said = prefill_ttft(engine, request, AT_A_RATE, rate) - service

    assert seen <= 1.1 * said
    assert said <= 2 * seen


def test_prompts_pile_up_beyond_highest_rate():
    engine = an_engine()
    assert prefill_ttft(engine, REQUEST, AT_A_RATE, 1.001 * highest_prefill_rate(engine, REQUEST)) == inf


def test_waiting_clients_bound_the_wait_at_any_rate():
    engine, request = an_engine(), RequestShape(prompt_tokens=8192, answer_tokens=1)
    rate = aggregated_rate(engine, request, 64)
    assert rate > highest_prefill_rate(engine, request)
    assert aggregated_ttft(engine, request, AT_A_RATE, 64) == inf

    seen = aggregated_ttft(engine, request, WAITING, 64)

    assert seen <= 65 * (engine.step.seconds(8192, 8192 * 4096, 64, 64 * request.context))


@pytest.mark.parametrize("occupancy", [AT_A_RATE, WAITING])
def test_more_load_never_lowers_latency(occupancy):
    engine = an_engine()
    loads = [1 + 0.25 * step for step in range(400)]
    for seen in (
        [aggregated_rate(engine, REQUEST, load) for load in loads],
        [aggregated_tpot(engine, REQUEST, occupancy, load) for load in loads],
        [aggregated_ttft(engine, REQUEST, occupancy, load) for load in loads],
        [decode_rate(engine, REQUEST, load) for load in loads],
        [decode_tpot(engine, REQUEST, occupancy, load, 0.0) for load in loads],
    ):
        assert seen == sorted(seen)
