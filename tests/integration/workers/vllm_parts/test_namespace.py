"""Tests of the namespace of a vLLM engine's blocks, derived from its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.namespace import KvNamespace
from workers.engines.vllm.namespace import namespace_of

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def a_namespace(
    *, cache_dtype: str = "auto", max_model_len: int = 4096, rope: Any = None, ranks: int = 1, latent: bool = False
) -> KvNamespace:
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=max_model_len,
        quantization=None,
        hf_overrides={},
        hf_text_config=SimpleNamespace(rope_parameters=rope),
        get_num_layers=lambda _: 4,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 64,
        use_mla=latent,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=32),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    return namespace_of(config, model="m", revision="r")


def test_namespace_ignores_the_number_of_ranks():
    assert a_namespace(ranks=2) == a_namespace()


def test_namespace_ignores_max_length_unless_rope_uses_it():
    assert a_namespace(max_model_len=8192) == a_namespace() == a_namespace(rope={"rope_type": "default"})
    for rope in (LONGROPE, {"full_attention": LONGROPE}):
        short, long = a_namespace(rope=rope), a_namespace(rope=rope, max_model_len=8192)
        assert short == a_namespace(rope=rope, max_model_len=2048)
        assert short.digest != long.digest
        assert long == a_namespace(rope=rope, max_model_len=16384)


@pytest.mark.parametrize(("cache_dtype", "bytes_a_value"), [("auto", 2), ("float16", 2), ("fp8", 1), ("fp8_e5m2", 1)])
def test_namespace_has_the_block_size_of_the_cache(cache_dtype, bytes_a_value):
    assert a_namespace(cache_dtype=cache_dtype).block_bytes == 4 * 2 * 32 * 128 * bytes_a_value


def test_latent_kv_is_one_vector_per_token():
    latent = a_namespace(latent=True)

    assert (latent.kv_heads, latent.head_dim, latent.block_bytes) == (1, 64, 4 * 32 * 64 * 2)
