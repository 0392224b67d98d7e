"""Tests of LoRA adapters in a real vLLM engine: each has its own tokens and blocks, and is loaded on demand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.ids import ModelName
from fleet.core.requests import Source
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Progress, Rejected, Start
from fleet.local.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, build_tiny_model
from kvstore.block import adapter_salt, chain
from kvstore.client.store_client import StoreClient
from tests.support.builders import token_bytes
from tests.support.kvstore.builders import a_node, a_store_client
from tests.support.waiting import eventually
from tests.support.workers.engine_driver import EngineDriver, an_attempt, blocks_from, fresh_prompt
from tests.support.workers.vllm_engines import VllmEngines, hosted, tiny_namespace, vllm_worker
from workers.engines.vllm.lora import AdapterFiles, LoadedAdapters, adapters_of, engine_arguments
from workers.settings import VllmSettings, WorkerSettings

BLOCK, RANK = 32, 8
SMALL_CACHE = VllmSettings(kv_cache_gib=0.02, dtype="float32")  # 163 blocks: two long prompts evict the others

with_vllm = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]


def write_adapter(folder: Path, *, seed: int, rank: int = RANK) -> str:
    """Write a LoRA adapter for queries and values of the tiny model, strong enough to change its answers."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
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


def a_worker(model_dir: Path, folder: Path, store: str) -> WorkerSettings:
    adapters = {
        ModelName(name): write_adapter(folder / name, seed=seed) for seed, name in enumerate(("ada", "bob", "eve"))
    }
    worker = vllm_worker(model_dir, store=store, kv_paths=(KvPath.STORE,))
    return structs.replace(worker, adapters=adapters, adapter_slots=2, vllm=SMALL_CACHE)


class LoraEngine(NamedTuple):
    """An engine with adapters, its store, and a client of the store."""

    hosted: VllmEngines
    settings: WorkerSettings
    client: StoreClient

    @property
    def engine(self) -> EngineDriver:
        return self.hosted.engines[0]

    def salt(self, name: str) -> bytes:
        """Return the salt that a router computes."""
        if not name:
            return b""
        (adapter,) = [each for each in self.engine.engine.facts.adapters if each.name == name]
        return adapter_salt(adapter.identity)

    def work(self, name: str, prompt: bytes, max_tokens: int = 12, **fields) -> Start:
        return an_attempt(prompt, max_tokens, adapter=name, salt=self.salt(name), **fields)

    def names(self, name: str, prompt: bytes) -> list[bytes]:
        return chain(prompt, BLOCK, salt=self.salt(name))

    def held(self, name: str, prompt: bytes) -> int:
        """Return how many blocks of a prompt the store has for an adapter."""
        return len(self.client.match(self.names(name, prompt), lease_seconds=0))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraEngine]:
    model_dir = build_tiny_model(tmp_path_factory.mktemp("models"))
    with a_node(capacity_bytes=64 << 20) as node:
        worker = a_worker(model_dir, tmp_path_factory.mktemp("adapters"), node.address)
        with a_store_client(node.address, tiny_namespace(model_dir)) as client, hosted(worker) as engines:
            yield LoraEngine(engines, worker, client)


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
def test_invalid_adapter_is_rejected_by_name(tmp_path, config):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)

    with pytest.raises(ConfigurationRefused, match=r"^adapters"):
        engine_arguments(structs.replace(vllm_worker(tmp_path), adapters={ModelName("a"): str(tmp_path)}))


def test_least_recently_used_adapter_counts_as_dropped():
    used = LoadedAdapters(2)
    for name in "abac":
        used.use(name)

    assert used.names == ("a", "c")


def test_changed_or_removed_files_do_not_match_the_description(tmp_path, caplog):
    adapters = {ModelName(name): write_adapter(tmp_path / name, seed=1) for name in "abc"}
    files = AdapterFiles(structs.replace(vllm_worker(tmp_path), adapters=adapters))
    assert all(files.are_as_described(name) for name in "abc")

    write_adapter(tmp_path / "a", seed=2)
    (tmp_path / "b" / "adapter_model.safetensors").unlink()

    assert [files.are_as_described(name) for name in "abcab"] == [False, False, True, False, False]
    assert [record.adapter for record in caplog.records] == ["a", "b"], "once each"


@pytest.mark.parametrize("mark", [pytest.param(None, marks=with_vllm)], ids=["vllm"])
def test_each_adapter_has_tokens_and_blocks_of_its_own(world, mark):
    async def all_of_it() -> None:
        engine = world.engine
        assert [each.name for each in engine.engine.facts.adapters] == ["ada", "bob", "eve"]
        assert engine.engine.facts.adapter_slots == 2
        prompt = fresh_prompt(5 * BLOCK + 3)
        told = {}
        for name in ("", "ada", "bob", "eve", "ada"):
            first, end = await engine.do(world.work(name, prompt))
            assert blocks_from(end.kv, Source.ENGINE) == (5 if name in told else 0), "it hits only its own blocks"
            assert told.setdefault(name, first) == first
            names = set(world.names(name, prompt))
            await engine.until(lambda names=names: names <= engine.cached)

        assert len(set(told.values())) == 4
        assert engine.engine.load().adapters == ("eve", "ada"), "of two slots the least recently used one was freed"

        refused = an_attempt(prompt, adapter="nobody", salt=b"s" * 32)
        engine.submit(refused)
        assert (await engine.end_of(refused)).reason is Reason.NO_WORKER
        unsalted = an_attempt(prompt, adapter="ada")
        engine.submit(unsalted)
        assert (await engine.end_of(unsalted)).field == "salt"

    world.hosted.run(all_of_it())


@pytest.mark.parametrize("mark", [pytest.param(None, marks=with_vllm)], ids=["vllm"])
def test_adapter_blocks_return_only_to_their_adapter(world, mark):
    prompt = fresh_prompt(6 * BLOCK + 3)
    told = {name: world.hosted.run(world.engine.do(world.work(name, prompt)))[0] for name in ("ada", "bob", "")}
    assert len(set(told.values())) == 3
    eventually(lambda: all(world.held(name, prompt) == 6 for name in told), 20)
    for _ in range(3):  # out of the engine's own cache
        world.hosted.run(world.engine.do(an_attempt(fresh_prompt(2050), 1)))

    for name in ("bob", "", "ada"):
        again, end = world.hosted.run(world.engine.do(world.work(name, prompt)))
        assert again == told[name], "KV of another adapter would show"
        assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.COMPUTED)) == (6, 1)
    _, end = world.hosted.run(world.engine.do(world.work("eve", prompt)))
    assert blocks_from(end.kv, Source.COMPUTED) == 7


@pytest.mark.parametrize("mark", [pytest.param(None, marks=with_vllm)], ids=["vllm"])
def test_prefilled_adapter_blocks_are_stored_at_the_handoff(world, mark):
    prompt = fresh_prompt(4 * BLOCK + 3)
    prefill = world.work("ada", prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE)

    first, end = world.hosted.run(world.engine.do(prefill))

    assert world.held("ada", prompt) == 4
    assert world.held("", prompt) == world.held("bob", prompt) == 0
    decode = world.work("ada", prompt + token_bytes(first), 11, phase=Phase.DECODE, handoff=end.handoff)
    rest, _ = world.hosted.run(world.engine.do(decode))
    alone, _ = world.hosted.run(world.engine.do(world.work("ada", prompt)))
    assert first + rest == alone


@pytest.mark.parametrize("mark", [pytest.param(None, marks=with_vllm)], ids=["vllm"])
def test_adapter_with_changed_files_is_rejected_alone(world, mark):
    """Run last, because this test changes an adapter that the tests share."""
    changed = write_adapter(Path(world.settings.adapters[ModelName("eve")]), seed=9)
    refused, served = world.work("eve", fresh_prompt(40)), world.work("bob", fresh_prompt(40))

    async def both() -> tuple[Progress | Rejected, Progress | Rejected]:
        world.engine.submit(refused, served)
        return await world.engine.end_of(refused), await world.engine.end_of(served)

    end, other = world.hosted.run(both())

    assert changed == world.settings.adapters[ModelName("eve")]
    assert isinstance(end, Rejected)
    assert (end.reason, end.field) == (Reason.NO_WORKER, "adapter")
    assert isinstance(other, Progress)
