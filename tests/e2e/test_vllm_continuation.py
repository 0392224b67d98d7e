"""Test of answers whose vLLM worker is killed in their middle: each kind of sampling goes on exactly on the other worker."""

import asyncio
from contextlib import AsyncExitStack
from importlib.util import find_spec

import psutil
import pytest

from fleet.client import AsyncClient
from fleet.core.requests import JsonSchema
from tests.support.fleet_processes import fleet_up
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300
TOPOLOGY = """
cluster.kv_paths = []

[[pools]]
role = "both"
replicas = 2
vllm.kv_cache_gib = 0.25
vllm.dtype = "float32"
"""
COMMON = {"max_tokens": 120, "temperature": 1.0, "seed": 7, "ignore_eos": True, "timeout_seconds": 300.0}
FEW = (70, 71, 72)
NUMBERS = JsonSchema('{"type": "array", "items": {"type": "integer"}, "minItems": 100}')
ASKED = {
    "seed": COMMON,
    "filters": {**COMMON, "temperature": 0.75, "top_p": 0.875, "top_k": 40},
    "penalties": {**COMMON, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.25},
    "greedy with penalty": {**COMMON, "temperature": 0.0, "frequency_penalty": 0.75},
    "logprobs": {**COMMON, "logprobs": 2},
    "min_tokens": {**COMMON, "ignore_eos": False, "allowed_token_ids": FEW, "stop_token_ids": (71,), "min_tokens": 110},
    "bad words": {**COMMON, "bad_words": ["e", "a", "the"]},
    "form": {**COMMON, "ignore_eos": False, "form": NUMBERS},
}
BEGUN_TOKENS = 20  # of each answer, before the worker is killed
PROMPT = list(range(100, 180))


class Streamed:
    """One answer so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.chosen: list[float] = []
        self.top: list[tuple[int, ...]] = []
        self.finish = ""
        self.workers: list[str] = []

    async def read(self, client: AsyncClient, options: dict) -> None:
        async with client.generate(PROMPT, **options) as stream:
            async for delta in stream:
                self.tokens += delta.token_ids
                self.chosen += [each.chosen for each in delta.logprobs]
                self.top += [each.top_ids for each in delta.logprobs]
        self.finish = stream.result.finish
        self.workers = [phase.worker_id for phase in stream.result.kv]


async def test_killed_vllm_worker_changes_no_token(tmp_path):
    topology = tmp_path / "fleet.toml"
    topology.write_text(TOPOLOGY)
    async with AsyncExitStack() as held:
        up = held.enter_context(
            fleet_up(tmp_path, "--config", str(topology), engine="vllm", ready_seconds=READY_SECONDS)
        )
        client = await held.enter_async_context(AsyncClient(up.grpc))
        expected = {kind: Streamed() for kind in ASKED}
        for kind, each in expected.items():
            await each.read(client, ASKED[kind])
        answers = {kind: Streamed() for kind in ASKED}
        async with asyncio.TaskGroup() as tasks:
            for kind, each in answers.items():
                tasks.create_task(each.read(client, ASKED[kind] | {"pin": "both-0"}))
            await until(lambda: all(len(each.tokens) >= BEGUN_TOKENS for each in answers.values()))

            psutil.Process(up.pid_of("both-0")).kill()

        for kind, each in answers.items():
            assert each.tokens == expected[kind].tokens, kind
            assert each.finish == expected[kind].finish, kind
            assert each.top == expected[kind].top
            assert each.chosen == pytest.approx(expected[kind].chosen, abs=1e-3)
        continued = {kind for kind, each in answers.items() if len(each.workers) > 1}
        assert continued, "no answer was on the killed worker"
