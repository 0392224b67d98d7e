"""Launch of vLLM: which configurations are refused before vLLM starts, and how its ports and step sizes are chosen."""

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from workers.engines.vllm import launch as vllm_launch
from workers.settings import ModelTask, VllmSettings, WorkerSettings


def a_config(*, heads: int = 8, ranks: int = 1, speculative: Any = None, **fields: Any) -> Any:
    """Return those parts of vLLM's configuration that the checks read, for an ordinary model unless `fields` change it."""
    model = {"use_mla": False, "is_hybrid": False, "has_inner_state": False, "is_attention_free": False}
    model |= {"is_encoder_decoder": False, "get_total_num_kv_heads": lambda: heads}
    cache = {"sliding_window": None, "cache_dtype": "auto"}
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | {name: fields[name] for name in fields if name in model})),
        cache_config=SimpleNamespace(**(cache | {name: fields[name] for name in fields if name in cache})),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        speculative_config=speculative,
    )


@pytest.mark.parametrize("fields", [{}, {"ranks": 8}, {"ranks": 16}, {"heads": 1, "ranks": 4}, {"cache_dtype": "fp8"}])
def test_an_ordinary_model_may_use_the_store(fields):
    vllm_launch.check_model(a_config(**fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_mla": True}, "store: this model keeps latent KV"),
        ({"is_hybrid": True}, "store: this model keeps state besides KV"),
        ({"has_inner_state": True}, "store: this model keeps state besides KV"),
        ({"is_encoder_decoder": True}, "store: KV of an encoder"),
        ({"sliding_window": 4096}, "store: every layer of this model sees the last 4096 tokens only"),
        ({"cache_dtype": "int8_per_token_head"}, "vllm.extra_args.kv_cache_dtype: int8_per_token_head"),
        ({"speculative": SimpleNamespace(uses_draft_kv_cache=lambda: True)}, "store: the KV of a draft model"),
        ({"ranks": 3}, "vllm.extra_args.tensor_parallel_size: 8 heads cannot be shared out among 3 ranks"),
    ],
)
def test_model_that_the_store_cannot_hold_is_refused(fields, said):
    with pytest.raises(ConfigurationRefused, match=f"^{said}"):
        vllm_launch.check_model(a_config(**fields))


@pytest.mark.parametrize("size", [0, -1, "two", None])
def test_invalid_number_of_ranks_is_refused_by_name(size):
    settings = WorkerSettings(
        worker_id=WorkerId("w"),
        role=Role.BOTH,
        model=ModelName("m"),
        vllm=VllmSettings(extra_args={"tensor_parallel_size": size}),
    )

    with pytest.raises(ConfigurationRefused, match=r"^vllm.extra_args.tensor_parallel_size: must be at least 1"):
        vllm_launch.ranks_of(settings)
    assert vllm_launch.ranks_of(msgspec.structs.replace(settings, vllm=VllmSettings())) == 1


def a_step(*, tokens: int = 2048, answers: int = 16, chunked: bool = True, **fields: Any) -> Any:
    """Return those parts of vLLM's configuration that determine the tokens of a step, for a text model unless `fields` change it."""
    model = {"is_multimodal_model": False, "is_encoder_decoder": False, "is_hybrid": False, "has_inner_state": False}
    scheduler = {"max_num_batched_tokens": tokens, "max_num_seqs": answers, "enable_chunked_prefill": chunked}
    speculative = fields.pop("speculative", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | fields)),
        scheduler_config=SimpleNamespace(**scheduler),
        speculative_config=speculative,
    )


def steps_of(config: Any, *, task: ModelTask = ModelTask.GENERATE, **extra: Any) -> int | None:
    settings = msgspec.structs.replace(a_direct_worker(**extra), task=task, kv_paths=())
    return vllm_launch.step_tokens(settings, config)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_launch, "built_for_cpu", lambda: True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("answers", "tokens"), [(1, 256), (16, 256), (128, 256), (129, 258), (500, 1000)])
def test_cpu_engine_has_short_steps_with_room_for_prompts(answers, tokens):
    assert steps_of(a_step(answers=answers)) == tokens


def test_accelerator_keeps_the_steps_of_vllm(monkeypatch):
    monkeypatch.setattr(vllm_launch, "built_for_cpu", lambda: False)

    assert steps_of(a_step()) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("extra", [{"max_num_batched_tokens": 2048}, {"performance_mode": "throughput"}])
def test_steps_that_the_user_chose_are_kept(extra):
    assert steps_of(a_step(), **extra) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tokens", [100, 256])
def test_steps_of_a_cpu_engine_are_never_lengthened(tokens):
    assert steps_of(a_step(tokens=tokens)) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "fields",
    [
        {"chunked": False},
        {"speculative": SimpleNamespace()},
        {"is_multimodal_model": True},
        {"is_encoder_decoder": True},
        {"is_hybrid": True},
        {"has_inner_state": True},
    ],
)
def test_model_that_may_need_long_steps_keeps_them(fields):
    assert steps_of(a_step(**fields)) is None


@pytest.mark.usefixtures("on_cpu")
def test_engines_whose_steps_were_not_measured_keep_them():
    assert steps_of(a_step(), task=ModelTask.EMBED) is None
    assert steps_of(a_step(), tensor_parallel_size=2) is None
    assert steps_of(a_step(), data_parallel_size=2) is None


def a_direct_worker(**vllm: Any) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId("w"),
        role=Role.BOTH,
        model=ModelName("m"),
        kv_paths=(KvPath.DIRECT,),
        vllm=VllmSettings(extra_args=vllm),
    )


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_vllm_can_bind_the_ports_reserved_for_it(family, host, monkeypatch):
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        pytest.skip(f"this host has no {host}")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")  # so that pytest restores it later
    with vllm_launch.side_channels(a_direct_worker(data_parallel_size=3)):
        first = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        for port in range(first, first + 3):
            with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port))
        for port in range(first, first + 3):
            # Bind a socket as vLLM's side channel does.
            with zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
                channel.setsockopt(zmq.IPV6, family is socket.AF_INET6)
                channel.bind(f"tcp://[{host}]:{port}" if family is socket.AF_INET6 else f"tcp://{host}:{port}")


@pytest.mark.parametrize(("chosen", "verifies"), [("on", True), ("off", False), ("auto", vllm_launch.built_for_cpu())])
def test_direct_checksums_follow_the_setting(chosen, verifies):
    settings = msgspec.structs.replace(a_direct_worker(), vllm=VllmSettings(direct_checksums=chosen))

    assert vllm_launch.verifies_pulls(settings) is verifies


def test_workers_that_start_together_get_different_ports(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1")
    with contextlib.ExitStack() as started:
        ports: list[int] = []
        for _ in range(50):
            started.enter_context(vllm_launch.side_channels(a_direct_worker(data_parallel_size=2)))
            first = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            ports += [first, first + 1]

        assert len(set(ports)) == 100
