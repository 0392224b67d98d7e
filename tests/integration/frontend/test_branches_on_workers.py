"""Tests of several answers on a real router and real workers: whatever becomes of them, no reservation and no block is left."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import openai
import pytest
from msgspec import structs

from fleet.core.ids import WorkerId
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import until
from tests.support.workers.http_ports import an_http_port
from tests.support.workers.simulated_clusters import a_router_for, simulated_worker
from tests.support.workers.worker_processes import a_worker_process

pytestmark = pytest.mark.integration

ANSWERS, PROMPT_TOKENS = 4, 300
ASKED = {"model": "tiny", "prompt": [7] * PROMPT_TOKENS, "n": ANSWERS, "max_tokens": 1000}


@asynccontextmanager
async def two_workers(model_dir):
    """Yield a router that tries each request once, a client of its port, and the processes of its two slow workers."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(a_short_folder())
        processes = []
        for name in ("w0", "w1"):
            told = simulated_worker(worker_id=WorkerId(name), model_dir=str(model_dir), max_model_len=2048)
            told = structs.replace(told, simulated=structs.replace(told.simulated, speedup=0.1, kv_blocks=400))
            processes.append(await stack.enter_async_context(a_worker_process(folder, told)))
        router = await stack.enter_async_context(
            a_router_for(*processes, store="", max_attempts=1, policy="round_robin")
        )
        url = await stack.enter_async_context(an_http_port(router, model_dir))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        yield router, await stack.enter_async_context(client), processes


def of_workers(router, field: str) -> list[int]:
    return [getattr(worker, field) for pool in router.status().pools for worker in pool.workers]


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_branch_leaves_no_reservation(model_dir, stream):
    async def ask(client):
        answer = await client.completions.create(**ASKED, stream=stream, extra_body={"ignore_eos": True})
        if stream:
            async for _ in answer:
                pass

    async with two_workers(model_dir) as (router, client, processes):
        asking = asyncio.ensure_future(ask(client))
        await until(lambda: sum(of_workers(router, "running")) == ANSWERS)
        assert min(of_workers(router, "running")) > 0, "both workers have a branch"
        assert sum(of_workers(router, "booked_requests")) == ANSWERS
        assert min(of_workers(router, "kv_blocks_used")) > 0
        processes[0].kill()

        with pytest.raises(openai.APIError, match="worker w0 was lost"):
            await asking

        await until(lambda: not any(of_workers(router, "running")) and not any(of_workers(router, "kv_blocks_used")))
        assert of_workers(router, "booked_requests") == [0], "the lost worker is gone, and the other one has no branch"
        assert not any(of_workers(router, "booked_blocks"))
        assert not any(of_workers(router, "booked_prefill_tokens"))
        status = router.status()
        assert (status.active, status.queued, status.counters.completed) == (0, 0, 0)
