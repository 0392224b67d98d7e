"""Tests of the start of a vLLM engine and of the settings that it rejects."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.local.tiny_model import MAX_MODEL_LEN, build_tiny_model
from kvstore.security.credentials import Credentials
from tests.support.kvstore.builders import a_node
from tests.support.workers.vllm_engines import tiny_namespace, vllm_worker
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.engine import available, meet_store, open_engine
from workers.engines.vllm.namespace import weights_revision
from workers.settings import VllmSettings, WorkerSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models"))


def a_model_folder(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


async def refusal_of(settings: WorkerSettings) -> str:
    with pytest.raises(ConfigurationRefused) as refused:
        async with open_engine(settings):
            pass
    return str(refused.value)


def test_vllm_is_available_where_these_tests_run():
    assert available() is None


async def test_invalid_model_folder_is_rejected_by_name(tmp_path):
    assert (await refusal_of(vllm_worker(tmp_path / "nowhere"))).endswith("is not a folder")
    assert "has no config.json" in await refusal_of(vllm_worker(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in await refusal_of(vllm_worker(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "names no architecture" in await refusal_of(vllm_worker(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "no *.safetensors weights" in await refusal_of(vllm_worker(tmp_path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_model_len": 9000}, "max_model_len: 9000 exceeds the model's 4096"),
        ({"block_tokens": 48}, "block_tokens: vLLM on CPUs needs a multiple of 32, not 48"),
        ({"vllm": VllmSettings(kv_cache_gib=100_000)}, "vllm.kv_cache_gib: a cache of 100000 GiB"),
        (
            {"store": "unix:/s", "vllm": VllmSettings(kv_cache_gib=0.1, extra_args={"pipeline_parallel_size": 2})},
            "vllm.extra_args.pipeline_parallel_size: must be 1 with a KV store, not 2",
        ),
        (
            {
                "store": "unix:/s",
                "vllm": VllmSettings(
                    kv_cache_gib=0.1, extra_args={"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
                ),
            },
            "vllm.extra_args.distributed_executor_backend: must be mp",
        ),
        ({"vllm": VllmSettings(kv_cache_gib=0.1, extra_args={"no_such": 1})}, "vllm.extra_args: "),
    ],
)
async def test_unsupported_vllm_settings_are_rejected_by_name(tmp_path, fields, said):
    settings = msgspec.structs.replace(vllm_worker(a_model_folder(tmp_path, max_position_embeddings=4096)), **fields)

    assert (await refusal_of(settings)).startswith(said)


async def test_cache_too_small_for_one_request_is_rejected(model_dir):
    settings = msgspec.structs.replace(vllm_worker(model_dir), vllm=VllmSettings(kv_cache_gib=0.01, dtype="float32"))

    assert (await refusal_of(settings)).startswith(
        "vllm.kv_cache_gib: one request of 4096 tokens (max_model_len) takes"
    )


def test_several_ranks_need_the_memory_of_a_node_on_their_host(model_dir):
    one = vllm_worker(model_dir)
    two = msgspec.structs.replace(one, vllm=VllmSettings(extra_args={"tensor_parallel_size": 2}))
    with a_node(shm_socket="") as node:
        one, two = (msgspec.structs.replace(each, store=node.address) for each in (one, two))

        assert meet_store(one, tiny_namespace(model_dir)) == ("store-1", None)
        with pytest.raises(
            ConfigurationRefused, match=r"^store: 2 ranks write a block together.* reach this one by tcp"
        ):
            meet_store(two, tiny_namespace(model_dir))


def test_unreadable_secret_of_the_store_is_named(model_dir):
    credentials = Credentials(secret_file="/nowhere/secret")
    worker = msgspec.structs.replace(vllm_worker(model_dir), store="unix:/nowhere/kv", store_credentials=credentials)

    with pytest.raises(ConfigurationRefused, match=r"^store_credentials\.secret_file: /nowhere/secret cannot be read"):
        meet_store(worker, tiny_namespace(model_dir))


def test_revision_depends_on_weights_not_on_the_folder(model_dir, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_revision(copy) == weights_revision(model_dir)

    with (copy / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x55")

    assert weights_revision(copy) != weights_revision(model_dir)


def test_large_model_is_identified_by_its_headers(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.engines.weights.WHOLE_CONTENT_BYTES", 1000)
    before = weights_revision(model_dir)
    assert before == weights_revision(model_dir)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes().replace(b"layers.0", b"layers.9"))

    assert weights_revision(copy) != before


def test_short_steps_are_the_default_and_vllm_takes_them(model_dir, tmp_path):
    def step_of(*, max_running: int = 16, **extra: object) -> int:
        worker = msgspec.structs.replace(
            vllm_worker(model_dir), max_running=max_running, vllm=VllmSettings(extra_args=extra)
        )
        args = vllm_launch.engine_args(worker, revision="r", scratch=tmp_path)
        return vllm_launch.engine_config(worker, args).scheduler_config.max_num_batched_tokens

    assert step_of() == vllm_launch.STEP_TOKENS
    assert step_of(max_running=600) == 2 * 600
    assert step_of(max_num_batched_tokens=1024) == 1024
    assert step_of(performance_mode="throughput") == 2 * 2048
    assert step_of(enable_chunked_prefill=False) == MAX_MODEL_LEN


def test_model_gets_its_own_process_with_ranks_or_bound_threads(model_dir, tmp_path, monkeypatch):
    def backend(worker: WorkerSettings) -> object:
        return vllm_launch.engine_args(worker, revision="r", scratch=tmp_path).distributed_executor_backend

    one = vllm_worker(model_dir)
    two, other = (
        msgspec.structs.replace(one, vllm=VllmSettings(extra_args={name: value}))
        for name, value in (("tensor_parallel_size", 2), ("distributed_executor_backend", "mp"))
    )
    assert [backend(each) for each in (one, two, other)] == [vllm_launch.IN_PROCESS, None, "mp"]

    monkeypatch.setenv(vllm_launch.THREADS_BIND, "0-1")
    assert backend(one) is None
