"""A session of a worker with a real vLLM engine keeps its blocks in the store when its request has ended."""

import asyncio

import pytest

from fleet.adapters.tiny_model import build_tiny_model
from fleet.requests import Sampling
from fleet.roles import KvPath
from fleet.router.messages import Complete
from kvstore.client import StoreClient
from tests import worker_processes
from tests.builders import an_arrival
from tests.engine_driving import fresh_prompt
from tests.kv_builders import a_node
from tests.simulated_clusters import a_router
from tests.vllm_hosting import START_SECONDS, tiny_namespace, vllm_worker

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(400)]

PROMPT_TOKENS, ANSWER = 165, 40
CHAIN_BLOCKS = (PROMPT_TOKENS + ANSWER - 1) // 32


async def test_a_session_of_vllm_holds_its_prompt_and_its_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_processes, "SECONDS", START_SECONDS)
    model_dir = build_tiny_model(tmp_path)
    namespace = tiny_namespace(model_dir)
    with (
        a_node(capacity_bytes=64 << 20) as node,
        StoreClient.connect(node.address, namespace) as client,
    ):
        async with a_router(
            vllm_worker(model_dir, store=node.address, kv_paths=(KvPath.STORE,)), store=node.address
        ) as router:
            greedy = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
            arrived = an_arrival(request_id="r1", tokens=fresh_prompt(PROMPT_TOKENS), sampling=greedy, session="agent")
            async with asyncio.timeout(60), router.submit(arrived) as events:
                async for event in events:
                    if isinstance(event, Complete):
                        break

            async with asyncio.timeout(20):
                while client.stats().held_bytes != CHAIN_BLOCKS * namespace.block_bytes:
                    await asyncio.sleep(0.02)
