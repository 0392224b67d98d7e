"""Contract tests of the simulated engine."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec import structs

from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import state_fields
from fleet.core.roles import KvPath, Role
from fleet.local.tiny_model import build_tiny_model
from tests.contract.workers.engine_contract import (
    ALONE,
    CONTINUED,
    PAIRED,
    answer_continues_exactly,
    answer_whose_form_is_complete_gets_no_more_tokens,
)
from tests.support.kvstore.builders import a_node
from tests.support.workers.engine_driver import EngineDriver, driven_engines
from workers.engines.simulated.launch import open_engine
from workers.settings import SimulatedSettings, WorkerSettings


def simulated(role: Role = Role.BOTH, store: str = "", kv_paths: tuple[KvPath, ...] = ()) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId("worker"),
        role=role,
        engine="simulated",
        model=ModelName("tiny"),
        store=store,
        kv_paths=kv_paths,
        max_running=4,
        simulated=SimulatedSettings(speedup=20, kv_blocks=256),
    )


@pytest.mark.parametrize("promise", ALONE, ids=lambda promise: promise.__name__)
async def test_simulated_engine_keeps_the_contract(promise):
    async with open_engine(simulated()) as engine, driven_engines(engine) as (one,):
        await promise(one)
        engine.check()


@pytest.mark.parametrize("case", CONTINUED)
async def test_simulated_engine_continues_exactly(case, tmp_path):
    settings = structs.replace(simulated(), model_dir=str(build_tiny_model(tmp_path)))
    async with (
        open_engine(settings) as begins,
        open_engine(settings) as continues,
        driven_engines(begins, continues) as engines,
    ):
        assert continues.facts.keeps_forms
        assert set(state_fields(CONTINUED[case])) <= set(continues.facts.continued_fields)
        await answer_continues_exactly(*engines, CONTINUED[case])


async def test_answer_whose_form_is_complete_gets_no_more_tokens(tmp_path):
    settings = structs.replace(simulated(), model_dir=str(build_tiny_model(tmp_path)))
    async with (
        open_engine(settings) as begins,
        open_engine(settings) as continues,
        driven_engines(begins, continues) as engines,
    ):
        await answer_whose_form_is_complete_gets_no_more_tokens(*engines)


@pytest.fixture(scope="module")
def store():
    with a_node() as node:
        yield node.address


@asynccontextmanager
async def a_pair(path: KvPath, store: str) -> AsyncIterator[tuple[EngineDriver, EngineDriver]]:
    address = store if path is KvPath.STORE else ""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(open_engine(simulated(role, address, (path,))))
            for role in (Role.PREFILL, Role.DECODE)
        ]
        prefill, decode = await stack.enter_async_context(driven_engines(*engines))
        yield prefill, decode
        for engine in engines:
            engine.check()


@pytest.mark.integration
@pytest.mark.parametrize("path", KvPath)
@pytest.mark.parametrize("promise", PAIRED, ids=lambda promise: promise.__name__)
async def test_pair_of_simulated_engines_keeps_the_contract(promise, path, store):
    async with a_pair(path, store) as (prefill, decode):
        await promise(prefill, decode, path)
