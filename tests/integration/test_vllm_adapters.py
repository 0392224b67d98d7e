"""Adapters of a real vLLM engine: each has tokens of its own and blocks of its own, and is loaded when work for it comes."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from fleet.adapters.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, build_tiny_model
from fleet.errors import ConfigurationRefused, Reason
from fleet.ids import ModelName
from fleet.requests import Source
from kvstore.block import chain, salt_of_adapter
from tests.engine_driving import Driven, blocks_from, fresh_prompt, work
from tests.vllm_hosting import Hosted, hosted, vllm_worker
from workers.engines.vllm_adapters import UsedAdapters, adapters_of, engine_arguments
from workers.settings import WorkerSettings

BLOCK, RANK = 32, 8

with_vllm = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # vLLM's
]


def write_adapter(folder: Path, *, seed: int, rank: int = RANK) -> str:
    """A LoRA of the tiny model's queries and values, large enough to change what it says."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    tensors = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = rng.normal(0, 0.2, (rank, HIDDEN)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = rng.normal(0, 0.2, (rows, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    return str(folder)


def a_worker(model_dir: Path, folder: Path) -> WorkerSettings:
    adapters = {
        ModelName(name): write_adapter(folder / name, seed=seed) for seed, name in enumerate(("ada", "bob", "eve"))
    }
    return structs.replace(vllm_worker(model_dir), adapters=adapters, adapter_slots=2)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("adapters")
    with hosted(a_worker(build_tiny_model(tmp_path_factory.mktemp("models")), folder)) as engines:
        yield engines


def salt(engine: Driven, name: str) -> bytes:
    """As a router makes it."""
    (adapter,) = [each for each in engine.engine.facts.adapters if each.name == name]
    return salt_of_adapter(adapter.identity)


def test_the_revision_is_that_of_the_weights(tmp_path):
    one = write_adapter(tmp_path / "one", seed=1)
    settings = structs.replace(vllm_worker(tmp_path), adapters={ModelName("a"): one, ModelName("b"): one})
    same, again = adapters_of(settings)
    other = write_adapter(tmp_path / "other", seed=2)
    (changed,) = adapters_of(structs.replace(settings, adapters={ModelName("a"): other}))

    assert same.revision == again.revision
    assert same.revision != changed.revision


def test_vllm_is_told_the_smallest_rank_that_fits_all(tmp_path):
    folders = {ModelName(f"a{rank}"): write_adapter(tmp_path / f"a{rank}", seed=0, rank=rank) for rank in (4, 12)}
    settings = structs.replace(vllm_worker(tmp_path), adapters=folders, adapter_slots=3)

    assert engine_arguments(settings) == {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    assert engine_arguments(vllm_worker(tmp_path)) == {}


@pytest.mark.parametrize("config", [None, "{", "[]", '{"r": 0}', '{"r": "8"}', '{"r": 1000}'])
def test_what_is_no_adapter_is_refused_by_name(tmp_path, config):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)

    with pytest.raises(ConfigurationRefused, match=r"^adapters"):
        engine_arguments(structs.replace(vllm_worker(tmp_path), adapters={ModelName("a"): str(tmp_path)}))


def test_the_adapter_used_longest_ago_is_taken_for_dropped():
    used = UsedAdapters(2)
    for name in "abac":
        used.use(name)

    assert used.names == ("a", "c")


@pytest.mark.parametrize("mark", [pytest.param(None, marks=with_vllm)], ids=["vllm"])
def test_each_adapter_has_tokens_and_blocks_of_its_own(engines, mark):
    async def all_of_it() -> None:
        (engine,) = engines.engines
        assert [each.name for each in engine.engine.facts.adapters] == ["ada", "bob", "eve"]
        assert engine.engine.facts.adapter_slots == 2
        prompt = fresh_prompt(5 * BLOCK + 3)
        told = {}
        for name in ("", "ada", "bob", "eve", "ada"):
            salted = {"adapter": name, "salt": salt(engine, name)} if name else {}
            first, end = await engine.do(work(prompt, 12, **salted))
            assert blocks_from(end.kv, Source.ENGINE) == (5 if name in told else 0), "no hit but its own"
            assert told.setdefault(name, first) == first
            names = set(chain(prompt, BLOCK, salt=salt(engine, name) if name else b""))
            await engine.until(lambda names=names: names <= engine.cached)

        assert len(set(told.values())) == 4
        assert engine.engine.load().adapters == ("eve", "ada"), "two slots: the one used longest ago was dropped"

        refused = work(prompt, adapter="nobody", salt=b"s" * 32)
        engine.submit(refused)
        assert (await engine.end_of(refused)).reason is Reason.NO_WORKER
        unsalted = work(prompt, adapter="ada")
        engine.submit(unsalted)
        assert (await engine.end_of(unsalted)).field == "salt"

    engines.run(all_of_it())
