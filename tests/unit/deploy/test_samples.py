"""Sample deployments: the longest request that a sample allows fits its model and the memory of its GPUs."""

from pathlib import Path

import msgspec
import pytest

from fleet.config import load, parse_changes
from fleet.hardware.gpus import GIB, Number, gpu
from fleet.hardware.known_models import model_by_repository
from fleet.hardware.models import stored_bytes
from fleet.hardware.sharding import ShardingDegrees, shard_model
from fleet.hardware.sizing import ONE_CONTEXT
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleType
from workers.engines.vllm.launch import ENGINE_OVERHEAD_BYTES
from workers.settings import WorkerSettings

FOLDER = Path(__file__).parents[3] / "deploy" / "samples"
SAMPLES = sorted(FOLDER.glob("*.yaml"))
PRODUCTS = {"NVIDIA-H100-80GB-HBM3": "h100", "NVIDIA-B200": "b200", "AMD_Instinct_MI300X_OAM": "mi300x"}


def workers_of(path):
    spec = msgspec.convert(msgspec.yaml.decode(path.read_bytes())["spec"], DisaggDeploymentSpec)
    return spec, [role for role in spec.roles if role.type is not RoleType.ROUTER]


def main_of(role):
    (main,) = [each for each in role.pod_template["spec"]["containers"] if each["name"] == "main"]
    return main


def settings_of(role, tmp_path):
    """Return the settings that a worker of this role reads from its command line in the sample."""
    changes = parse_changes([each.removeprefix("--set=") for each in main_of(role)["args"]])
    file = tmp_path / "worker.json"
    file.write_text('{"worker_id": "w", "model": "m"}')
    return load(file, WorkerSettings, changes)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_workers_of_a_sample_agree_on_the_longest_request(path, tmp_path):
    spec, workers = workers_of(path)
    (context,) = {settings_of(role, tmp_path).max_model_len for role in workers}

    assert all("--set=max_model_len=" in " ".join(main_of(role)["args"]) for role in workers)
    assert 4096 < context <= model_by_repository(spec.model.uri).context


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_weights_and_longest_request_fit_the_gpus_of_a_sample(path, tmp_path):
    spec, workers = workers_of(path)
    model = model_by_repository(spec.model.uri).model
    for role in workers:
        context = settings_of(role, tmp_path).max_model_len
        if not role.gpus.per_replica:
            cache = settings_of(role, tmp_path).vllm.kv_cache_gib * GIB
            weights = stored_bytes(Number.BF16) * (2 * model.embedding_parameters + model.dense_parameters)
            memory = int(main_of(role)["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
            assert context * model.kv_bytes_per_token <= ONE_CONTEXT * cache
            assert cache + 2 * weights + ENGINE_OVERHEAD_BYTES <= memory
            continue
        cut = role.parallelism
        way = ShardingDegrees(tp=cut.tensor, pp=cut.pipeline, dp=cut.data, ep=cut.expert)
        assert way.gpus == role.gpus.per_replica
        placed = shard_model(model, gpu(PRODUCTS[role.gpus.product]), way)
        room = placed.kv_capacity_tokens() / way.dp
        assert context <= ONE_CONTEXT * room, f"{role.name}: there is room for {room:.0f} tokens"
