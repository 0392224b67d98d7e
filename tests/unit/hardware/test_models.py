"""Sizes of well-known models, and configs that are refused."""

from pathlib import Path

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number
from fleet.hardware.model_configs import read_model_config
from fleet.hardware.models import Precision, read_model
from tests.support.sim.model_configs import DEEPSEEK_V3, GPT_OSS, LLAMA_70B, MIXTRAL, a_model


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [(LLAMA_70B, 70.55, 69.5), (MIXTRAL, 46.70, 12.75), (DEEPSEEK_V3, 671.0, 36.6), (GPT_OSS, 116.8, 5.13)],
    ids=["llama", "mixtral", "deepseek", "gpt-oss"],
)
def test_parameters_are_as_published(config, billions, active_billions):
    model = a_model(config)

    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert model.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.002)


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (LLAMA_70B, 2 * 80 * 8 * 128 * 2),
        (MIXTRAL, 2 * 32 * 8 * 128 * 2),
        (DEEPSEEK_V3, 61 * (512 + 64) * 2),
        (GPT_OSS, 2 * 18 * 8 * 64 * 2),
    ],
    ids=["llama", "mixtral", "deepseek: the latent vector and the rotary key", "gpt-oss: its full layers only"],
)
def test_kv_bytes_per_token_agree_with_engines(config, num_bytes):
    assert a_model(config).kv_bytes_per_token == num_bytes


def test_window_layers_cost_same_at_any_length():
    assert a_model(GPT_OSS).kv_bytes_per_sequence == 2 * 18 * 8 * 64 * 2 * 128


def test_weights_are_as_large_as_checkpoints():
    assert a_model(LLAMA_70B).weights_bytes == pytest.approx(141.1e9, rel=0.001)
    assert a_model(DEEPSEEK_V3).weights_bytes == pytest.approx(673e9, rel=0.005)
    assert a_model(GPT_OSS).weights_bytes == pytest.approx(68.7e9, rel=0.01)


def test_quantisation_comes_from_config_unless_given():
    assert a_model(DEEPSEEK_V3).precision == Precision(weights=Number.FP8, experts=Number.FP8)
    assert a_model(GPT_OSS).precision == Precision(weights=Number.BF16, experts=Number.FP4)
    given = Precision(weights=Number.FP4, experts=Number.FP4)
    assert read_model(DEEPSEEK_V3, precision=given).precision == given


def test_text_part_of_multimodal_model_is_read():
    assert read_model({"text_config": LLAMA_70B, "vision_config": {}}).parameters == a_model().parameters


@pytest.mark.parametrize(
    "kind", ["attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"]
)
def test_layer_kinds_that_cache_all_tokens_count_as_full(kind):
    assert a_model(layer_types=[kind] * 80).kv_bytes_per_token == a_model().kv_bytes_per_token


def test_linear_layers_keep_state_instead_of_cache():
    hybrid = a_model(
        layer_types=["linear_attention"] * 60 + ["full_attention"] * 20,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=64,
        linear_value_head_dim=128,
    )

    assert hybrid.kv_bytes_per_token == a_model().kv_bytes_per_token / 4
    assert hybrid.kv_bytes_per_sequence == 60 * 64 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number from 1 on, not 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 on, not 0"),
        ({"num_key_value_heads": 7}, "num_key_value_heads must divide num_attention_heads, 64, and is 7"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 9},
            "num_experts_per_tok must be at most the 8 experts, not 9",
        ),
        ({"num_hidden_layers": 1 << 24}, "num_hidden_layers must be at most 4,096"),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 5},
            "mlp_only_layers must list at most 80 layers",
        ),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0] * 81},
            "mlp_only_layers must list at most 80 layers",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers, 80, kinds of layers"),
        ({"layer_types": ["full_attention", "conv"] * 40}, "layer_types[1] 'conv' is not a known kind of layer"),
        ({"layer_types": [["full_attention"]] * 80}, "layer_types[0] ['full_attention'] is not a known kind of layer"),
        ({"layer_types": ["sliding_attention"] * 80}, "sliding_window is missing"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config.quant_method 'magic' is not known"),
    ],
)
def test_error_names_the_invalid_field(changes, said):
    with pytest.raises(ConfigurationRefused, match=r"^a-model: ") as refused:
        a_model(**changes)

    assert said in str(refused.value)


def test_device_without_an_end_is_no_config():
    with pytest.raises(ConfigurationRefused, match="/dev/zero: has more than 16 MiB"):
        read_model_config(Path("/dev/zero"))
