"""Closed loop (a fixed number of clients): the formulas, compared with a simulation of every step."""

import pytest

from fleet.hardware.latency.closed_loop import BenchmarkClient, closed_loop, closed_loop_disaggregated
from fleet.hardware.latency.step_model import step_model, work
from tests.support.sim.model_configs import a_placement
from tests.unit.hardware.latency.test_step_model import USUAL

STEP = step_model(work(a_placement(tp=8)), USUAL)
USUAL_LOOP = {"prompt_tokens": 1024, "answer_tokens": 256, "capacity_tokens": 1e6, "budget_tokens": 8192}


def loop(concurrency, client=BenchmarkClient(), **changes):  # noqa: B008 - frozen
    return closed_loop(STEP, client, concurrency=concurrency, **(USUAL_LOOP | changes))


def test_single_client_waits_only_for_its_own_prefill():
    seen = loop(1)

    own = STEP.seconds(1024, 1024 * 512, 0, 0)
    assert own <= seen.ttft <= own + 2 * STEP.seconds(0, 0, 1, 1152)
    assert seen.tpot == pytest.approx(STEP.seconds(0, 0, 1, 1152), rel=0.02)


def test_prefills_of_others_raise_tpot():
    seen = loop(64)

    decode = STEP.seconds(0, 0, 64, 64 * 1152)
    assert decode < seen.tpot < 2 * decode
    assert loop(64, answer_tokens=32).tpot > seen.tpot


def test_turn_is_at_least_its_work():
    seen = loop(64)

    work_of_a_turn = 64 * (STEP.seconds(1024, 1024 * 512, 63, 63 * 1152) - STEP.seconds(0, 0, 64, 64 * 1152))
    work_of_a_turn += 256 * STEP.seconds(0, 0, 64, 64 * 1152)
    assert seen.ttft + 256 * seen.tpot >= 0.99 * work_of_a_turn


def test_more_clients_wait_longer():
    seen = [loop(concurrency) for concurrency in (1, 4, 16, 64, 256)]

    assert [each.ttft for each in seen] == sorted(each.ttft for each in seen)
    assert [each.tpot for each in seen] == sorted(each.tpot for each in seen)


def test_more_waves_lower_weight_of_first_one():
    assert loop(64, BenchmarkClient(waves=100)).ttft < loop(64, BenchmarkClient(waves=5)).ttft


def test_requests_without_room_wait_for_whole_turns():
    seen = loop(64, capacity_tokens=32 * 1152)

    turn = 256 * loop(32).tpot
    assert seen.ttft > turn
    assert seen.tpot == pytest.approx(loop(32).tpot, rel=0.02)


def test_separate_decoding_is_not_slowed_by_prefills():
    seen = closed_loop_disaggregated(
        STEP, STEP, BenchmarkClient(), concurrency=64, prefill_groups=1, decode_groups=1, transfer=0.01, **USUAL_LOOP
    )

    assert seen.tpot == pytest.approx(STEP.seconds(0, 0, 64, 64 * 1152))
    assert seen.tpot < loop(64).tpot


def test_clients_wait_for_too_few_prefill_engines():
    sides = {"decode_groups": 8, "transfer": 0.01, "concurrency": 512}

    few = closed_loop_disaggregated(STEP, STEP, BenchmarkClient(), prefill_groups=1, **sides, **USUAL_LOOP)
    many = closed_loop_disaggregated(STEP, STEP, BenchmarkClient(), prefill_groups=8, **sides, **USUAL_LOOP)

    assert few.ttft > 5 * many.ttft
    assert few.tpot == many.tpot
