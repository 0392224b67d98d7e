"""Sharding: which models fit on which GPUs, and the error if one does not fit."""

import pytest
from msgspec import structs

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import GIB, gpu
from fleet.hardware.sharding import RESERVE_BYTES, ShardingDegrees, feasible, shard_model
from tests.support.sim.model_configs import DEEPSEEK_V3, LLAMA_70B, MIXTRAL, a_model, a_placement


def test_tensor_parallel_ranks_share_weights_and_kv():
    whole, cut = a_placement(on="h200", tp=2), a_placement(on="h200", tp=8)

    assert cut.weights_bytes == whole.weights_bytes / 4
    assert cut.kv_bytes_per_token == 327_680 / 8


def test_heads_are_copied_if_fewer_than_ranks():
    assert a_placement(tp=16).kv_bytes_per_token == a_placement(tp=8).kv_bytes_per_token


def test_every_rank_holds_latent_vectors():
    assert a_placement(DEEPSEEK_V3, on="h200", tp=8).kv_bytes_per_token == 61 * 576 * 2


def test_kv_gets_memory_left_by_weights():
    placement = a_placement(tp=8)
    room = 79.6 * GIB * 0.9 - placement.weights_bytes - RESERVE_BYTES

    assert placement.kv_capacity_tokens() == int(room // 40_960)
    assert placement.kv_capacity_blocks(16) == int(room // 40_960) // 16


def test_data_parallel_attention_has_room_for_more_sequences():
    """Compare tensor with data parallelism: all ranks of a tensor-parallel group hold the same latent vectors, groups hold different ones."""
    together = a_placement(DEEPSEEK_V3, on="b200", tp=8)
    apart = a_placement(DEEPSEEK_V3, on="b200", tp=1, dp=8, ep=8)

    assert apart.kv_capacity_tokens() > 5 * together.kv_capacity_tokens()


@pytest.mark.parametrize(
    ("config", "on", "cuts", "field", "said"),
    [
        (LLAMA_70B, "h100", {"tp": 1}, "gpu", "does not fit"),
        (DEEPSEEK_V3, "a100", {"tp": 8}, "gpu", "does not fit"),
        (LLAMA_70B, "h100", {"tp": 3}, "parallelism.tp", "3 does not divide the 64 heads"),
        (LLAMA_70B, "h100", {"tp": 64}, "parallelism.tp", "spans more than two nodes"),
        (LLAMA_70B, "h100", {"tp": 1, "pp": 81}, "parallelism.pp", "81 is more than the 80 layers"),
        (LLAMA_70B, "h100", {"tp": 8, "ep": 8}, "parallelism.ep", "the model has no experts"),
        (MIXTRAL, "h100", {"tp": 4, "ep": 2}, "parallelism.ep", "2 is neither 1 nor tp × dp, 4"),
        (MIXTRAL, "h100", {"tp": 4, "dp": 4, "ep": 16}, "parallelism.ep", "16 does not divide the 8 experts"),
    ],
)
def test_impossible_sharding_names_its_field(config, on, cuts, field, said):
    with pytest.raises(ConfigurationRefused) as refused:
        shard_model(a_model(config), gpu(on), ShardingDegrees(**cuts))

    assert str(refused.value).startswith(f"a-model: {field}: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "on", "cuts", "said"),
    [
        (LLAMA_70B, "h100", {"tp": 1}, "it fits with tp=2, or cut like that on b200, b300, gb200, gb300, mi300x"),
        (LLAMA_70B, "l40s", {"tp": 2}, "it fits with tp=4, or cut like that on h100, h200, b200"),
        (DEEPSEEK_V3, "l40s", {"tp": 8}, "it fits with tp=8 pp=4, or cut like that on h200, b200"),
        (DEEPSEEK_V3, "a100", {"tp": 1}, "it fits with tp=8 pp=2"),
    ],
)
def test_error_names_sharding_that_fits(config, on, cuts, said):
    with pytest.raises(ConfigurationRefused) as refused:
        shard_model(a_model(config), gpu(on), ShardingDegrees(**cuts))

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_error_says_if_nothing_fits():
    huge = structs.replace(a_model(), layers=80_000, full_layers=80_000)

    with pytest.raises(ConfigurationRefused, match="no 64 of them would do; take narrower weights"):
        shard_model(huge, gpu("h100"), ShardingDegrees(tp=8))


def test_unknown_gpu_is_refused_with_known_ones():
    with pytest.raises(ConfigurationRefused, match=r"pool\.gpu: 'h1000' is not one of h100, h200"):
        gpu("h1000", "pool.gpu")


def test_feasible_shardings_fit_and_have_fewest_gpus_first():
    found = list(feasible(a_model(), gpu("h100"), 16, room_tokens=30_000))

    sizes = [each.parallelism.gpus for each in found]
    assert sizes == sorted(sizes)
    assert found[0].parallelism == ShardingDegrees(tp=4)
    assert all(each.kv_capacity_tokens() >= 30_000 for each in found)


def test_experts_may_be_spread():
    ways = [each.parallelism for each in feasible(a_model(DEEPSEEK_V3), gpu("h200"), 8)]

    assert ShardingDegrees(tp=1, dp=8, ep=8) in ways
    assert ShardingDegrees(tp=8) in ways
