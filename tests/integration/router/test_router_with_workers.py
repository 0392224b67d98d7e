"""Tests of the router machine and its real worker streams, with simulated engines in their own processes.

Every test of a KV path checks the moved blocks and bytes, because equal tokens could be recomputed ones.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec import structs

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.requests import Finish, Sampling, Source
from fleet.core.roles import KvPath, Phase, Placement, Role
from fleet.local.tiny_model import build_tiny_model
from fleet.router.placement.decision import PlacementReason
from fleet.router.state.snapshot import RouterSnapshot, WorkerSnapshot
from tests.contract.workers.engine_contract import CONTINUED
from tests.support.kvstore.builders import a_node, a_short_folder
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.worker_cluster import ANSWER, GREEDY, WorkerCluster, sources, worker_settings
from tests.support.workers.worker_processes import WorkerProcess, a_worker_process

pytestmark = pytest.mark.integration

LONG = 700


@asynccontextmanager
async def a_cluster(*roles: Role, **fields) -> AsyncIterator[tuple[WorkerCluster, list[WorkerProcess]]]:
    with a_node(capacity_bytes=16 << 20) as node, a_short_folder() as folder:
        async with AsyncExitStack() as stack:
            processes = [
                await stack.enter_async_context(
                    a_worker_process(folder, worker_settings(f"{role.value}-{index}", role, node.address, **fields))
                )
                for index, role in enumerate(roles)
            ]
            cluster = WorkerCluster([process.address for process in processes], node.address)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = [
                tasks.create_task(cluster.workers.run(cluster.server.hear)),
                tasks.create_task(cluster.server.run()),
            ]
            await cluster.until(lambda status: sum(len(pool.workers) for pool in status.pools) == len(roles))
            yield cluster, processes
            cluster.machine.check()
            for task in running:
                task.cancel()


@pytest.mark.parametrize(("kv_path", "source"), [(KvPath.STORE, Source.STORE), (KvPath.DIRECT, Source.DIRECT)])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=5, max_tokens=ANSWER, ignore_eos=True)])
async def test_pair_answers_like_one_worker_and_blocks_move(kv_path, source, sampling):
    async with a_cluster(Role.PREFILL, Role.DECODE) as (cluster, _):
        prompt = fresh_prompt(LONG)
        pair, complete = await cluster.ask(prompt, kv_path=kv_path, sampling=sampling)
        alone, whole = await cluster.ask(prompt, placement=Placement.AGGREGATED, salt=b"s" * 32, sampling=sampling)

        assert pair == alone
        assert len(pair) == ANSWER
        assert cluster.why(complete) is PlacementReason.PROMPT_LONG_UNCACHED
        blocks, moved = sources(complete, Phase.DECODE)[source]
        assert blocks >= LONG // 32
        assert moved > 0
        assert sources(whole, Phase.AGGREGATED).keys() == {Source.COMPUTED}
        assert complete.finish is Finish.LENGTH


async def test_known_prompt_is_short_on_every_worker():
    async with a_cluster(Role.PREFILL, Role.DECODE, Role.DECODE) as (cluster, _):
        prompt = fresh_prompt(LONG)
        first, complete = await cluster.ask(prompt)
        assert complete.cached_tokens == 0
        await cluster.until(lambda status: status.stores and status.stores[0].blocks >= LONG // 32)

        again, repeated = await cluster.ask(prompt)

        assert again == first
        assert cluster.why(repeated) is PlacementReason.SHORT_UNCACHED_PROMPT
        assert repeated.cached_tokens >= LONG // 32 * 32


async def test_stream_survives_its_workers_death_with_same_tokens():
    async with a_cluster(Role.BOTH, Role.BOTH, speedup=1) as (cluster, processes):
        prompt = fresh_prompt(100)
        expected, _ = await cluster.ask(prompt)
        arrived = cluster.arrival(prompt)
        victims = {str(process.settings.worker_id): process for process in processes}

        def kill() -> None:
            victims[cluster.server.explain(arrived.request_id).placements[0].decode].kill()

        tokens, complete = await cluster.answer(arrived, after_first=kill)

        assert tokens == expected
        assert {phase.worker_id for phase in complete.kv} == set(victims), (
            "the lost worker reported it with its first tokens"
        )
        assert cluster.server.status().counters.continued == 1
        assert cluster.server.status().counters.workers_lost == 1


@pytest.mark.parametrize(("case", "whole"), [*((case, False) for case in CONTINUED), ("seed", True)])
async def test_answer_with_state_survives_its_workers_death(case, whole, tmp_path):
    told = CONTINUED[case]
    model_dir = str(build_tiny_model(tmp_path))
    async with a_cluster(Role.BOTH, Role.BOTH, speedup=1, model_dir=model_dir) as (cluster, processes):
        prompt = fresh_prompt(100)
        expected, undisturbed = await cluster.ask(prompt, sampling=told)
        arrived = cluster.arrival(prompt, sampling=told, whole=whole)
        victims = {str(process.settings.worker_id): process for process in processes}

        def kill() -> None:
            victims[cluster.server.explain(arrived.request_id).placements[0].decode].kill()

        tokens, complete = await cluster.answer(arrived, after_first=kill)

        assert tokens == expected
        assert complete.finish is undisturbed.finish
        counters = cluster.server.status().counters
        assert (counters.workers_lost, counters.continued) == (1, 1)


async def test_lost_prefill_worker_costs_only_time():
    async with a_cluster(Role.PREFILL, Role.DECODE, speedup=0.2) as (cluster, processes):
        arrived = cluster.arrival(fresh_prompt(2000), sampling=Sampling(temperature=0.0, max_tokens=3, ignore_eos=True))
        async with asyncio.TaskGroup() as tasks:
            exchange = tasks.create_task(cluster.answer(arrived))
            await cluster.until(lambda status: status.counters.disaggregated)
            processes[0].kill()

        tokens, complete = exchange.result()
        assert len(tokens) == 3
        assert [one.phase for one in complete.kv] == [Phase.AGGREGATED]


async def test_cancelling_frees_the_engine():
    async with a_cluster(Role.BOTH, speedup=1) as (cluster, _):
        arrived = cluster.arrival(fresh_prompt(50), sampling=Sampling(max_tokens=3000, ignore_eos=True))
        async with cluster.server.submit(arrived) as events:
            await anext(events)
            await cluster.until(lambda status: status.pools[0].workers[0].running == 1)

        await cluster.until(lambda status: status.pools[0].workers[0].running == 0)
        worker = cluster.server.status().pools[0].workers[0]
        assert (worker.booked_requests, worker.booked_blocks, worker.kv_blocks_used) == (0, 0, 0)


async def test_cancelled_long_prefills_leave_no_backlog():
    """Check that the engine stops computing cancelled prompts, so that the next one finds an idle worker."""
    longest = 2000  # tokens: one step each, and ten such prompts exceed what the worker computes ahead
    async with a_cluster(Role.PREFILL, Role.DECODE, speedup=0.3) as (cluster, _):

        def prefill(status: RouterSnapshot) -> WorkerSnapshot:
            (pool,) = [pool for pool in status.pools if pool.role is Role.PREFILL]
            return pool.workers[0]

        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(cluster.ask(fresh_prompt(longest))) for _ in range(10)]
            await cluster.until(lambda status: prefill(status).running > 1 and status.queued > 1)
            for each in asking:
                each.cancel()
        await cluster.until(lambda status: prefill(status).running == prefill(status).waiting == 0)
        idle = cluster.server.status()
        computed = prefill(idle).cached_blocks
        assert computed <= 5 * (longest // 32), "half of the requested tokens"
        assert (idle.active, idle.queued, idle.counters.cancelled) == (0, 0, 10)
        assert prefill(idle).booked_prefill_tokens == prefill(idle).kv_blocks_used == 0

        _, complete = await cluster.ask(fresh_prompt(LONG))

        await cluster.until(lambda status: prefill(status).cached_blocks >= computed + LONG // 32)
        assert prefill(cluster.server.status()).cached_blocks == computed + LONG // 32, "only the blocks of this prompt"
        assert sources(complete, Phase.PREFILL).keys() == {Source.COMPUTED}


async def test_requests_are_aggregated_while_prefill_is_missing(tmp_path):
    """Restart only the prefill worker, as a new process."""
    async with a_cluster(Role.PREFILL, Role.DECODE) as (cluster, (prefill, _)):
        whys = []
        _, complete = await cluster.ask(fresh_prompt(LONG))
        whys.append(cluster.why(complete))
        prefill.kill()
        await prefill.ended()
        await cluster.until(lambda status: [pool.role for pool in status.pools] == [Role.DECODE])
        for _ in range(2):
            tokens, complete = await cluster.ask(fresh_prompt(LONG))
            assert len(tokens) == ANSWER
            whys.append(cluster.why(complete))

        async with a_worker_process(tmp_path, structs.replace(prefill.settings, listen=prefill.address)):
            await cluster.until(lambda status: {pool.role for pool in status.pools} == {Role.PREFILL, Role.DECODE})
            _, complete = await cluster.ask(fresh_prompt(LONG))
            whys.append(cluster.why(complete))

        alone, pair = PlacementReason.NO_PREFILL_WORKER, PlacementReason.PROMPT_LONG_UNCACHED
        assert whys == [pair, alone, alone, pair]
        assert [phase.phase for phase in complete.kv] == [Phase.PREFILL, Phase.DECODE]
        assert cluster.server.status().counters.refused == {}


async def test_without_workers_requests_are_rejected_and_forgotten():
    async with a_cluster(Role.BOTH) as (cluster, (process,)):
        await cluster.ask(fresh_prompt(50))
        process.kill()
        await cluster.until(lambda status: not status.pools)

        with pytest.raises(RequestRejected) as refusal:
            await cluster.ask(fresh_prompt(50))

        assert refusal.value.reason is Reason.NO_WORKER
        assert cluster.server.models() == ()
        assert cluster.server.status().active == 0


async def test_engine_caches_are_in_the_prefix_index():
    async with a_cluster(Role.BOTH) as (cluster, _):
        await cluster.ask(fresh_prompt(320))

        await cluster.until(lambda status: status.pools[0].workers[0].cached_blocks >= 10)
        assert cluster.server.explain(RequestId("r1")).placements[0].uncached_tokens == 320
