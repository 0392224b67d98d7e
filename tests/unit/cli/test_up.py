import argparse
import json
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec import structs

from fleet.cli.up import KEYS_TENANT, OWN_TENANT, configure, read_topology, with_own_key
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath, Role
from fleet.local.settings import PoolSection, Topology, for_task, with_chat_template
from fleet.router.tenants import TenantSettings
from workers.settings import ModelTask

ACME = TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),), weight=2)


def with_tenants(**tenants: TenantSettings) -> Topology:
    topology = Topology()
    return structs.replace(topology, router=structs.replace(topology.router, tenants=tenants))


def test_own_requests_get_a_key_where_clients_need_one():
    topology, key = with_own_key(with_tenants(acme=ACME))

    assert topology.router.tenants["acme"] == ACME
    assert topology.router.tenants[OWN_TENANT].api_key_sha256 == (sha256(key.encode()).hexdigest(),)
    assert len(key) >= 32
    assert with_own_key(with_tenants(acme=ACME))[1] != key


def test_nothing_changes_where_clients_need_no_key():
    for topology in (Topology(), with_tenants(acme=TenantSettings(weight=2))):
        assert with_own_key(topology) == (topology, "")


def topology_of(*argv: str) -> Topology:
    parser = argparse.ArgumentParser()
    configure(parser)
    return read_topology(parser.parse_args(argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "Qwen/Qwen3-0.6B", "--served-model-name", "qwen", "--max-model-len", "2048"],
        ["--model-path", "Qwen/Qwen3-0.6B", "--served-model-name", "qwen", "--context-length", "2048"],
    ],
)
def test_options_of_vllm_and_sglang_name_the_model(argv):
    cluster = topology_of(*argv).cluster

    assert (cluster.model, cluster.served_name, cluster.max_model_len) == ("Qwen/Qwen3-0.6B", "qwen", 2048)


def test_host_and_port_move_the_ports_for_clients():
    router = topology_of("--host", "0.0.0.0", "--port", "8123", "--kserve-port", "8001").router

    assert (router.http_listen, router.grpc_listen) == ("0.0.0.0:8123", "0.0.0.0:50051")
    assert router.kserve_listen == "0.0.0.0:8001"
    assert topology_of("--host", "::1").router.http_listen == "[::1]:8000"
    assert topology_of("--host", "::1").router.kserve_listen == ""


def test_api_keys_become_digests_of_one_tenant():
    tenants = topology_of("--api-key", "one", "two", "--api-key", "three").router.tenants

    digests = tuple(sha256(key).hexdigest() for key in (b"one", b"two", b"three"))
    assert tenants == {KEYS_TENANT: TenantSettings(api_key_sha256=digests)}


def test_api_keys_leave_tenants_of_the_file_alone(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[router.tenants.acme]\nweight = 2\n")
    assert set(topology_of("--config", str(file), "--api-key", "k").router.tenants) == {"acme", KEYS_TENANT}

    file.write_text(f"[router.tenants.{KEYS_TENANT}]\nweight = 2\n")
    with pytest.raises(ConfigurationRefused, match="--api-key: the topology has a tenant"):
        topology_of("--config", str(file), "--api-key", "k")
    with pytest.raises(ConfigurationRefused, match="--api-key: a key is empty"):
        topology_of("--api-key", "")
    with pytest.raises(ConfigurationRefused, match="printable ASCII"):
        topology_of("--api-key", "é")


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--tp-size", "--tp", "-tp"])
def test_tensor_parallel_size_reaches_every_pool(option):
    for pool in topology_of(option, "2").pools:
        assert pool.vllm.extra_args == {"tensor_parallel_size": 2}
    for pool in topology_of(option, "2", "--engine", "simulated").pools:
        assert pool.simulated.tensor_parallel == 2


def test_ranks_that_the_simulated_engine_lacks_are_refused():
    with pytest.raises(ConfigurationRefused, match="--tensor-parallel-size: 3: the simulated engine has 1, 2, 4 ranks"):
        topology_of("--tp", "3", "--engine", "simulated")


@pytest.mark.parametrize("argv", [["--host", ""], ["--host", "a/b"], ["--max-model-len", "0"], ["--tp", "many"]])
def test_misspelt_values_of_options_are_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        topology_of(*argv)
    assert argv[0] in capsys.readouterr().err


def test_chat_template_replaces_that_of_the_model(tmp_path):
    model, runtime = tmp_path / "model", tmp_path / "run"
    for folder in (model, runtime):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("old")
    (tmp_path / "new.jinja").write_text("new")

    folder = with_chat_template(model, "new.jinja", tmp_path, runtime)

    assert {each.name: each.read_text() for each in folder.iterdir()} == {
        "config.json": "{}",
        "chat_template.jinja": "new",
    }
    assert (model / "chat_template.jinja").read_text() == "old"
    assert with_chat_template(model, "", tmp_path, runtime) == model
    with pytest.raises(ConfigurationRefused, match=r"cluster.chat_template: .*none.jinja: No such file"):
        with_chat_template(model, "none.jinja", tmp_path, runtime)


def test_chat_template_option_is_relative_to_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert topology_of("--chat-template", "a.jinja").cluster.chat_template == str(Path(tmp_path / "a.jinja"))


def test_sections_of_the_file_stay_as_they_are(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[cluster]\nengine = "simulated"\n[tracing]\nendpoint = "http://c:4317"\n[hub]\ncache = "/models"\n'
    )
    topology = topology_of("--config", str(file), "--http-port", "8123")

    assert topology.tracing.endpoint == "http://c:4317"
    assert topology.hub.cache == "/models"
    assert topology.cluster.engine == "simulated"


def a_model_folder(folder: Path, architecture: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def test_task_of_vectors_has_one_pool_without_kv_paths(tmp_path):
    given = topology_of("--task", "embed", "--decode", "3", "--engine", "simulated")

    topology = for_task(given, tmp_path)

    assert [(pool.role, pool.replicas) for pool in topology.pools] == [(Role.BOTH, 3)]
    assert topology.cluster.kv_paths == ()


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", ModelTask.EMBED),
        ("LlamaForCausalLM", ModelTask.AUTO),
        ("BertForSequenceClassification", ModelTask.CLASSIFY),
        ("Qwen3ForRewardModel", ModelTask.EMBED),
    ],
)
def test_architecture_tells_the_task_of_a_cluster(architecture, task, tmp_path):
    topology = for_task(Topology(), a_model_folder(tmp_path, architecture))

    assert topology.cluster.task is task
    assert (topology.cluster.kv_paths == (KvPath.STORE,)) == (task is ModelTask.AUTO)


def test_sentence_transformers_folder_embeds(tmp_path):
    (tmp_path / "modules.json").write_text("[]")

    assert for_task(Topology(), a_model_folder(tmp_path, "Qwen3ForCausalLM")).cluster.task is ModelTask.EMBED


def test_prefill_pool_is_refused_for_vectors(tmp_path):
    pools = (PoolSection(role=Role.PREFILL), PoolSection(role=Role.BOTH))
    topology = structs.replace(topology_of("--task", "embed"), pools=pools)

    with pytest.raises(ConfigurationRefused, match="pools: a model with the task embed"):
        for_task(topology, tmp_path)


def test_engine_options_go_to_the_engines_of_all_pools():
    argv = ("--dtype", "float32", "--gpu-memory-utilization", "0.8", "--max-num-seqs", "4")
    pools = topology_of(*argv, "--vllm-arg", "quantization=fp8", "--vllm-arg", "seed=3", "--tp", "2").pools

    assert [pool.role for pool in pools] == [Role.PREFILL, Role.DECODE]
    for pool in pools:
        assert (pool.vllm.dtype, pool.max_running) == ("float32", 4)
        assert pool.vllm.extra_args == {
            "gpu_memory_utilization": 0.8,
            "quantization": "fp8",
            "seed": 3,
            "tensor_parallel_size": 2,
        }


@pytest.mark.parametrize("argument", ["seed", "=3", "a.b=1"])
def test_malformed_engine_argument_is_refused(argument):
    with pytest.raises(ConfigurationRefused, match="--vllm-arg"):
        topology_of("--vllm-arg", argument)
