"""Rehearsal of a plan in the simulator: more replicas serve better, the sampled requests matter, and failures are reported."""

import asyncio
import errno
import sys

import pytest
import uvloop
from msgspec import structs

from fleet.app.rehearsal import RehearsalTask, RehearsedPool, SimulatedRehearsal, rehearsed
from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.hardware.latency.linear import EngineLatency
from fleet.planner.decisions import PlanGoals, PlannedPool
from fleet.planner.demand import RecentRequest
from fleet.planner.messages import PoolName
from fleet.planner.ports import RehearsalSkipped
from fleet.planner.sizing.capacity import linear_engine

BOTH = PoolName("both")
GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.05)
LATENCY = EngineLatency(step_base_ms=20.0, step_ms_per_sequence=1.0, prefill_base_ms=10.0, prefill_ms_per_token=0.5)


def a_pool(role=Role.BOTH, name=BOTH, **fields):
    engine = linear_engine(LATENCY, role, capacity_tokens=100_000, most_running=8, budget_tokens=2048)
    return RehearsedPool(pool=PlannedPool(name=name, role=role, **fields), engine=engine)


def a_sample(count=100, shared=0, block_tokens=32):
    return tuple(
        RecentRequest(
            arrived=Nanos(number * SECOND // 10),
            prompt_tokens=320,
            answer_tokens=40,
            block_tokens=block_tokens,
            block_keys=tuple(key if key < shared else 1000 * number + key for key in range(320 // block_tokens)),
        )
        for number in range(count)
    )


def a_task(present, planned, *, rate=10.0, sample=None, pools=None, limit=10.0):
    pools = pools or (a_pool(gpu="h100", gpus=2, dollars_per_hour=3.0),)
    return RehearsalTask(
        pools=pools,
        goals=GOALS,
        max_queue_seconds=limit,
        sample=sample or a_sample(),
        rate=rate,
        present=present,
        planned=planned,
    )


def test_more_replicas_keep_the_goals_and_cost_more():
    found = rehearsed(a_task({BOTH: 1}, {BOTH: 5}))

    assert found.present.attainment < 0.5
    assert found.planned.attainment > 0.95
    assert found.present.ttft_seconds > found.planned.ttft_seconds
    assert (found.planned.gpu_hours, found.planned.dollars) == (10.0, 30.0)
    assert found.requests == 600


def test_overloaded_pools_refuse_what_would_wait_too_long():
    short, long = (rehearsed(a_task({BOTH: 1}, {BOTH: 5}, limit=limit)).present for limit in (2.0, 1e6))

    assert 0.0 < short.refused < 1.0
    assert short.ttft_seconds < 5.0
    assert long.refused == 0.0
    assert long.ttft_seconds > 10.0


def test_same_replicas_give_the_same_prediction():
    found = rehearsed(a_task({BOTH: 3}, {BOTH: 3}))

    assert found.present == found.planned


def test_higher_rate_takes_more_replicas():
    slow, fast = (rehearsed(a_task({BOTH: 2}, {BOTH: 2}, rate=rate)).planned for rate in (2.0, 20.0))

    assert slow.attainment > fast.attainment


def test_shared_prefixes_are_cached_in_the_rehearsal():
    apart, alike = (
        rehearsed(a_task({BOTH: 2}, {BOTH: 2}, sample=a_sample(shared=shared))).planned for shared in (0, 9)
    )

    assert alike.ttft_seconds < apart.ttft_seconds


@pytest.mark.parametrize(("block_tokens", "shared"), [(16, 10), (64, 3)])
def test_other_block_sizes_share_the_same_tokens(block_tokens, shared):
    """Compare samples whose prompts have equally many common tokens, in blocks of another length."""
    usual = a_sample(shared=shared * block_tokens // 32)
    other = a_sample(shared=shared, block_tokens=block_tokens)

    expected, found = (rehearsed(a_task({BOTH: 2}, {BOTH: 2}, sample=sample)).planned for sample in (usual, other))

    assert found == expected


def test_disaggregated_pools_are_rehearsed():
    prefill, decode = PoolName("prefill"), PoolName("decode")
    pools = (a_pool(Role.PREFILL, prefill), a_pool(Role.DECODE, decode))

    found = rehearsed(a_task({prefill: 1, decode: 1}, {prefill: 3, decode: 3}, pools=pools))

    assert found.present.attainment < found.planned.attainment


def test_no_replica_serves_nobody():
    assert rehearsed(a_task({BOTH: 0}, {BOTH: 2})).present.attainment == 0.0


@pytest.mark.parametrize(
    ("count", "rate", "why"), [(5, 1.0, "5 recent requests are known"), (50, 0.0, "no requests arrive")]
)
async def test_too_little_is_known_for_a_rehearsal(count, rate, why):
    with pytest.raises(RehearsalSkipped, match=why):
        await SimulatedRehearsal((a_pool(),), GOALS).rehearse(a_sample(count), rate, {BOTH: 1}, {BOTH: 2})


async def test_process_gives_the_same_result():
    here = rehearsed(a_task({BOTH: 1}, {BOTH: 5}))

    there = await SimulatedRehearsal((a_pool(gpu="h100", gpus=2, dollars_per_hour=3.0),), GOALS).rehearse(
        a_sample(), 10.0, {BOTH: 1}, {BOTH: 5}
    )

    assert (there.present, there.planned) == (here.present, here.planned)


async def test_rehearsal_that_takes_too_long_is_killed():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await SimulatedRehearsal((a_pool(),), GOALS).rehearse(a_sample(), 10.0, {BOTH: 1}, {BOTH: 5})


async def test_failed_simulator_says_why():
    broken = a_pool(name=PoolName(""))

    with pytest.raises(RehearsalSkipped, match="the simulator failed"):
        await SimulatedRehearsal((broken, broken), GOALS).rehearse(
            a_sample(), 10.0, {PoolName(""): -1}, {PoolName(""): -1}
        )


async def test_rehearsal_that_needs_too_much_memory_is_skipped():
    endless = tuple(structs.replace(each, prompt_tokens=1 << 34) for each in a_sample())

    with pytest.raises(RehearsalSkipped, match="the simulator failed: it needs more than 2048 MiB of memory"):
        await SimulatedRehearsal((a_pool(),), GOALS).rehearse(endless, 10.0, {BOTH: 1}, {BOTH: 2})


def test_simulator_that_dies_at_once_skips_the_rehearsal(monkeypatch):
    start = asyncio.create_subprocess_exec

    async def start_and_end(*_, **pipes):
        process = await start(sys.executable, "-c", "import os; os.kill(os.getpid(), 11)", **pipes)
        await process.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_end)

    with pytest.raises(RehearsalSkipped, match="the simulator ended before it read its task: status -11"):
        uvloop.run(SimulatedRehearsal((a_pool(),), GOALS).rehearse(a_sample(), 10.0, {BOTH: 1}, {BOTH: 2}))


async def test_machine_without_processes_skips_the_rehearsal(monkeypatch):
    async def full(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)

    with pytest.raises(RehearsalSkipped, match="no process is left"):
        await SimulatedRehearsal((a_pool(),), GOALS).rehearse(a_sample(), 10.0, {BOTH: 1}, {BOTH: 2})
