"""What clients of a benchmark see, against what happens when every step is played through."""

import pytest

from fleet.hardware.latency.closed_loop import BenchmarkClient, closed_loop, closed_loop_disaggregated
from fleet.hardware.latency.step_model import step_model, work
from tests.support.sim.model_configs import a_placement
from tests.unit.hardware.latency.test_step_model import USUAL

STEP = step_model(work(a_placement(tp=8)), USUAL)
USUAL_LOOP = {"prompt_tokens": 1024, "answer_tokens": 256, "capacity_tokens": 1e6, "budget_tokens": 8192}


def loop(concurrency, client=BenchmarkClient(), **changes):  # noqa: B008 - frozen
    return closed_loop(STEP, client, concurrency=concurrency, **(USUAL_LOOP | changes))


def test_one_client_alone_waits_for_its_own_prefill_only():
    seen = loop(1)

    own = STEP.seconds(1024, 1024 * 512, 0, 0)
    assert own <= seen.ttft <= own + 2 * STEP.seconds(0, 0, 1, 1152)
    assert seen.tpot == pytest.approx(STEP.seconds(0, 0, 1, 1152), rel=0.02)


def test_prefills_of_others_slow_every_token_down():
    seen = loop(64)

    decode = STEP.seconds(0, 0, 64, 64 * 1152)
    assert decode < seen.tpot < 2 * decode
    assert loop(64, answer_tokens=32).tpot > seen.tpot


def test_a_turn_of_all_clients_is_no_shorter_than_the_work_in_it():
    seen = loop(64)

    work_of_a_turn = 64 * (STEP.seconds(1024, 1024 * 512, 63, 63 * 1152) - STEP.seconds(0, 0, 64, 64 * 1152))
    work_of_a_turn += 256 * STEP.seconds(0, 0, 64, 64 * 1152)
    assert seen.ttft + 256 * seen.tpot >= 0.99 * work_of_a_turn


def test_more_clients_wait_longer():
    seen = [loop(concurrency) for concurrency in (1, 4, 16, 64, 256)]

    assert [each.ttft for each in seen] == sorted(each.ttft for each in seen)
    assert [each.tpot for each in seen] == sorted(each.tpot for each in seen)


def test_more_waves_hide_the_first_one():
    assert loop(64, BenchmarkClient(waves=100)).ttft < loop(64, BenchmarkClient(waves=5)).ttft


def test_who_finds_no_room_waits_for_whole_turns():
    seen = loop(64, capacity_tokens=32 * 1152)

    turn = 256 * loop(32).tpot
    assert seen.ttft > turn
    assert seen.tpot == pytest.approx(loop(32).tpot, rel=0.02)


def test_decoding_apart_is_not_disturbed_by_prefills():
    seen = closed_loop_disaggregated(
        STEP, STEP, BenchmarkClient(), concurrency=64, prefill_groups=1, decode_groups=1, transfer=0.01, **USUAL_LOOP
    )

    assert seen.tpot == pytest.approx(STEP.seconds(0, 0, 64, 64 * 1152))
    assert seen.tpot < loop(64).tpot


def test_a_prefill_side_that_is_too_small_is_where_clients_wait():
    sides = {"decode_groups": 8, "transfer": 0.01, "concurrency": 512}

    few = closed_loop_disaggregated(STEP, STEP, BenchmarkClient(), prefill_groups=1, **sides, **USUAL_LOOP)
    many = closed_loop_disaggregated(STEP, STEP, BenchmarkClient(), prefill_groups=8, **sides, **USUAL_LOOP)

    assert few.ttft > 5 * many.ttft
    assert few.tpot == many.tpot
