"""Start of a simulated engine, and the effect of its model folder."""

import asyncio

import msgspec
import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import KvPath, Phase
from tests.support.waiting import until_answered
from tests.support.workers.engine_driver import an_attempt, driven_engines, fresh_prompt
from workers.engines.simulated.launch import open_engine
from workers.settings import SimulatedSettings, WorkerSettings


def settings(**fields) -> WorkerSettings:
    simulated = SimulatedSettings(**{"speedup": 50, "kv_blocks": 64, **fields.pop("simulated", {})})
    return WorkerSettings(
        **{
            "worker_id": WorkerId("w1"),
            "engine": "simulated",
            "model": ModelName("tiny"),
            "simulated": simulated,
            **fields,
        }
    )


async def test_an_engine_is_ready_at_once():
    async with open_engine(settings()) as engine:
        assert engine.facts.kv_blocks == 64


async def test_vocabulary_and_eos_come_from_the_model_folder(tmp_path):
    config = {"vocab_size": 600, "eos_token_id": [7, 8], "hidden_size": 256}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    told = settings(model_dir=str(tmp_path), simulated={"eos_probability": 0.2})
    async with open_engine(told) as engine, driven_engines(engine) as (one,):
        prompt = bytes(4)
        tokens, end = await one.do(an_attempt(prompt, sampling=Sampling(temperature=0, max_tokens=500)))

        assert end.finish is Finish.STOP
        assert tokens[-1] in (7, 8)
        assert max(tokens) < 600


async def test_folder_without_config_works_and_broken_config_fails(tmp_path):
    async with open_engine(settings(model_dir=str(tmp_path))):
        pass
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ConfigurationRefused, match="vocab_size"):
        async with open_engine(settings(model_dir=str(tmp_path))):
            pass


async def test_unusable_direct_listen_address_is_refused():
    told = settings(kv_paths=(KvPath.DIRECT,), simulated={"direct_listen": "192.0.2.1:1"})
    with pytest.raises(ConfigurationRefused, match=r"simulated\.direct_listen"):
        async with open_engine(told):
            pass


@pytest.mark.parametrize(
    ("kv_paths", "left"),
    [((KvPath.STORE,), ()), ((KvPath.STORE, KvPath.DIRECT), (KvPath.DIRECT,))],
    ids=["store", "both"],
)
async def test_engine_starts_without_an_unreachable_store(monkeypatch, kv_paths, left):
    monkeypatch.setattr("workers.engines.simulated.store.CONNECT_SECONDS", 0.2)
    told = settings(store="127.0.0.1:1", kv_paths=kv_paths)
    async with open_engine(told) as engine, driven_engines(engine) as (one,):
        assert engine.facts.store_id is None
        assert engine.facts.kv_paths == left
        tokens, _ = await one.do(an_attempt(fresh_prompt(100), 5))
        assert len(tokens) == 5


@pytest.mark.parametrize("path", list(KvPath))
async def test_engine_survives_cancellation_before_the_handoff(monkeypatch, path):
    async with open_engine(settings()) as engine, driven_engines(engine) as (one,):
        prefill = an_attempt(fresh_prompt(100), phase=Phase.PREFILL, kv_path=path)
        perform = engine.batch.perform

        def perform_then_cancel(plan):
            """Cancel the request after its prompt was computed, and before the task of the handoff begins."""
            yield from perform(plan)
            engine.cancel(prefill.request_id)

        monkeypatch.setattr(engine.batch, "perform", perform_then_cancel)
        _, end = await one.do(prefill)
        assert end.finish is Finish.CANCELLED

        tokens, _ = await one.do(an_attempt(fresh_prompt(100), 5))
        assert len(tokens) == 5
        assert engine.lent == 0
        engine.check()


async def test_callers_exception_passes_unchanged():
    with pytest.raises(KeyError, match="mine"):
        async with open_engine(settings()):
            raise KeyError("mine")


@pytest.mark.parametrize(("speedup", "least", "most"), [(1, 0.1, 0.4), (10, 0.01, 0.15)])
async def test_latency_follows_the_model_divided_by_the_speedup(speedup, least, most):
    told = settings(simulated={"speedup": speedup})
    async with open_engine(told) as engine, driven_engines(engine) as (one,):

        async def was_quick() -> bool:
            """Return whether an answer took less than `most`; on a busy machine, it may take longer."""
            began = asyncio.get_running_loop().time()
            await one.do(an_attempt(fresh_prompt(100), 40))  # 12 ms + 39 steps of 2.4 ms
            took = asyncio.get_running_loop().time() - began
            assert took >= least
            return took < most

        await until_answered(was_quick)
