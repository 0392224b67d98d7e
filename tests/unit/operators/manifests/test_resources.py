"""Resources of pods: requests follow from engine, model and store, and a podTemplate overrides them."""

from pathlib import Path

import msgspec
import pytest

from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.manifests import resources
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images, pod_template
from workers.engines.vllm import launch
from workers.settings import VllmSettings

SAMPLES = Path(__file__).parents[4] / "deploy" / "samples"
IMAGES = Images(router="router", worker_cpu="cpu", worker_cuda="cuda", worker_rocm="rocm")
GPUS = {"gpus": {"perReplica": 8}, "parallelism": {"tensor": 8}}


def main_of(role, **spec):
    content = {"model": {"name": "m"}, "roles": [{"name": "all", "type": "aggregated"} | role]} | spec
    deployment = DesiredDeployment(name="dd", namespace="ns", spec=msgspec.convert(content, DisaggDeploymentSpec))
    [main] = pod_template(deployment, deployment.workers[0], IMAGES, "rev")["spec"]["containers"]
    return main


def requests(role, **spec):
    return main_of(role, **spec)["resources"]["requests"]


def with_main(**fields):
    return {"podTemplate": {"spec": {"containers": [{"name": "main", **fields}]}}}


@pytest.mark.parametrize(
    ("role", "spec", "cpu", "memory"),
    [
        ({}, {"engine": "simulated"}, "250m", "512Mi"),
        ({}, {"engine": "simulated", "kvTransfer": {"paths": ["store"], "storeMemory": "64Gi"}}, "250m", "66048Mi"),
        (GPUS, {}, "10", "65536Mi"),
        (GPUS, {"kvTransfer": {"paths": ["store"], "storeMemory": "64Gi"}}, "10", "131072Mi"),
        (GPUS | {"nodesPerReplica": 2}, {}, "6", "32768Mi"),
        ({}, {"model": {"name": "chat", "uri": "/models/plain"}}, "2", "3072Mi"),
        (with_main(args=["--set=vllm.kv_cache_gib=4"]), {"model": {"name": "chat"}}, "2", "6144Mi"),
        (with_main(args=["--set", "vllm.kv_cache_gib=4"]), {"model": {"name": "chat"}}, "2", "6144Mi"),
        ({}, {"model": {"name": "chat", "uri": "somebody/unheard-of-2B"}}, "2", "10702Mi"),
    ],
)
def test_requests_follow_engine_model_and_store(role, spec, cpu, memory):
    assert requests(role, **spec) == {"cpu": cpu, "memory": memory}


def test_known_model_is_weighed_by_its_config():
    known = requests({}, model={"name": "a", "uri": "meta-llama/Llama-3.1-8B-Instruct"})["memory"]

    # Twice the size of 8.03 billion parameters in bf16, and 3 GiB.
    assert 32_000 < int(known.removesuffix("Mi")) < 34_000


def test_defaults_are_those_of_the_worker():
    assert VllmSettings().kv_cache_gib == resources.KV_CACHE_GIB
    assert launch.ENGINE_OVERHEAD_BYTES == resources.CPU_ENGINE_BYTES


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"requests": {"memory": "1Gi"}}, {"requests": {"cpu": "250m", "memory": "1Gi"}}),
        ({"limits": {"memory": "256Mi"}}, {"requests": {"cpu": "250m"}, "limits": {"memory": "256Mi"}}),
        (
            {"limits": {"memory": "2Gi", "cpu": "1"}, "requests": {"memory": "2Gi"}},
            {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi", "cpu": "1"}},
        ),
    ],
    ids=("request", "limit-alone", "both"),
)
def test_pod_template_overrides_requests(theirs, expected):
    assert main_of(with_main(resources=theirs), engine="simulated")["resources"] == expected


@pytest.mark.parametrize("faulty", [{"resources": "all"}, {"resources": {"limits": "all"}}, {"resources": []}])
def test_faulty_resources_go_to_the_server_as_they_are(faulty):
    main = main_of(with_main(**faulty), engine="simulated")

    assert main["resources"] == faulty["resources"] or main["resources"]["limits"] == "all"


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_pod_of_a_sample_is_best_effort(path):
    content = msgspec.yaml.decode(path.read_bytes())
    spec = msgspec.convert(content["spec"], DisaggDeploymentSpec)
    deployment = DesiredDeployment(name="dd", namespace="ns", spec=spec)
    for role in (*deployment.workers, deployment.router):
        [main] = pod_template(deployment, role, IMAGES, "rev")["spec"]["containers"]
        assert main["resources"]["requests"].keys() >= {"cpu", "memory"} or "memory" in main["resources"]["limits"]


def test_liveness_asks_for_the_watchdog_and_spares_loading():
    """Check the probes: they ask the service `liveness`, which fails after the watchdog has found a hang, and loading may take a day."""
    main = main_of(GPUS)

    live = {"grpc": {"port": 50061, "service": "liveness"}}
    assert main["livenessProbe"].items() >= live.items()
    assert main["startupProbe"].items() >= live.items()
    assert main["startupProbe"]["periodSeconds"] * main["startupProbe"]["failureThreshold"] >= 86_400
    assert "livenessProbe" not in main_of(with_main(command=["vllm", "serve"]))
