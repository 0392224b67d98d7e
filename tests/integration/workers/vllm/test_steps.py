"""Tests of the steps that a vLLM engine shows to the watchdog, without new tokens and with a stopped process."""

import signal
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from fleet.local.tiny_model import build_tiny_model
from tests.contract.workers.engine_contract import (
    is_working,
    steps_are_shown_while_the_engine_works,
    steps_of,
)
from tests.support.fleet_processes import alive, command_of
from tests.support.waiting import eventually, pace, until, until_still
from tests.support.workers.engine_driver import EngineDriver, an_attempt, fresh_prompt
from tests.support.workers.vllm_engines import VllmEngines, hosted, vllm_worker
from workers.engines.vllm import launch as vllm_launch
from workers.ports import EngineDied

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

CHUNK_TOKENS = 64
STILL_SECONDS = 0.5  # a hundred steps


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngines]:
    """Open an engine of two tensor-parallel ranks that computes long prompts in small chunks."""
    worker = vllm_worker(build_tiny_model(tmp_path_factory.mktemp("models")))
    extra = {"tensor_parallel_size": 2, "max_num_batched_tokens": CHUNK_TOKENS}
    told = msgspec.structs.replace(worker, vllm=msgspec.structs.replace(worker.vllm, extra_args=extra))
    with hosted(told) as ranks:
        yield ranks


def test_vllm_on_two_ranks_shows_its_steps(ranks):
    ranks.run(steps_are_shown_while_the_engine_works(ranks.engines[0]))


async def steps_before_the_first_token(one: EngineDriver, tokens: int) -> int:
    before = steps_of(one)
    start = an_attempt(fresh_prompt(tokens), 2)
    one.submit(start)
    await one.until(lambda: one.tokens[start.request_id])
    return steps_of(one) - before


def test_a_long_prompt_steps_chunk_by_chunk(ranks):
    chunks = 30

    steps = ranks.run(steps_before_the_first_token(ranks.engines[0], chunks * CHUNK_TOKENS))

    assert chunks <= steps <= chunks + 4


async def steps_after_cancelled_prefills(one: EngineDriver, others: int, tokens: int) -> int:
    """Cancel prompts in their first step, and return the steps to the first token of a prompt that follows them."""
    cancelled = [an_attempt(fresh_prompt(tokens), 1) for _ in range(others)]
    before = steps_of(one)
    one.submit(*cancelled)
    await until(lambda: steps_of(one) > before, between_seconds=0.001)
    for each in cancelled:
        one.engine.cancel(each.request_id)
    return await steps_before_the_first_token(one, tokens)


def test_cancelled_prefills_free_their_slot_for_a_follow_up(ranks):
    chunks, others = 30, 4

    steps = ranks.run(steps_after_cancelled_prefills(ranks.engines[0], others, chunks * CHUNK_TOKENS))

    assert chunks <= steps < 2 * chunks, f"{others} prompts of {chunks} steps were before it"


async def steps_when_stopped(one: EngineDriver, rank: psutil.Process) -> tuple[int, int]:
    """Return the steps of a stopped engine with work, when nothing moves and a hundred steps later."""
    start = an_attempt(fresh_prompt(10), 800)
    one.submit(start)
    await one.until(lambda: len(one.tokens[start.request_id]) >= 2)
    rank.send_signal(signal.SIGSTOP)
    await until_still(lambda: steps_of(one), STILL_SECONDS)
    still = steps_of(one)
    await pace(STILL_SECONDS, "a running engine makes a hundred steps in this time")
    assert is_working(one)
    return still, steps_of(one)


def test_stopped_rank_stops_the_steps_and_can_be_killed(ranks):
    family = vllm_launch.family()
    [rank] = [process for process in family if command_of(process)[:1] == ["VLLM::Worker_TP1"]]

    still, later = ranks.run(steps_when_stopped(ranks.engines[0], rank))

    assert still == later

    ranks.engines[0].engine.kill()

    eventually(lambda: not alive(process.pid for process in family))
    error = ranks.ended.exception(60)
    assert isinstance(error, BaseExceptionGroup)
    assert error.subgroup(EngineDied) is not None
