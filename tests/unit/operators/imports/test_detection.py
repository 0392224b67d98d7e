"""Imports of other projects' deployments: the results, and the warnings about what could not be imported."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random

import msgspec
import pytest
import yaml

from fleet.core.errors import ConfigurationRefused
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType
from operators.api.fields import ModelSource
from operators.imports.assembly import Names, document
from operators.imports.detection import imported
from operators.imports.engine_flags import flags_of, settings_of
from operators.imports.pod_templates import variables_of
from operators.imports.secret_names import is_secret
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images
from operators.manifests.shared import shared
from operators.manifests.workloads import revision, workers

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))
SECRET = "do-not-repeat-me"
IMAGES = Images(router="r", worker_cpu="c", worker_cuda="n", worker_rocm="a")
SOMETHING_ELSE = (None, True, -1, 7, 1.5, "", "x", [], ["x"], [7], [{}], {}, {"x": 1}, {"name": [1]}, 10**30)


def documents(name):
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def made_of(name):
    made = imported(documents(name))
    return made, [msgspec.convert(each["spec"], DisaggDeploymentSpec) for each in made.objects]


def noted(made):
    return {note.path for note in made.notes}


def check(made):
    """Assert that the operator can work with an imported deployment."""
    for each in made.objects:
        deployment = DesiredDeployment(
            name=each["metadata"]["name"], namespace="n", spec=msgspec.convert(each["spec"], DisaggDeploymentSpec)
        )
        assert not list(contradictions(deployment.spec))
        of_revision = revision(deployment, IMAGES)
        msgspec.json.encode(shared(deployment, IMAGES))
        for role in deployment.workers:
            msgspec.json.encode(workers(deployment, role, of_revision, IMAGES))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imported_deployment_works_with_the_operator(path):
    check(imported(documents(path.stem)))


def test_prefill_and_decode_pools_become_roles():
    _, (spec,) = made_of("stack-split")

    roles = {role.name: role for role in spec.roles}
    assert [(role.name, role.type, role.replicas, role.gpus.per_replica) for role in spec.roles] == [
        ("qwen-prompts", "prefill", 2, 4),
        ("qwen-answers", "decode", 6, 2),
        ("router", "router", 2, 0),
    ]
    assert [(role.scaling.mode, role.scaling.least, role.scaling.most) for role in spec.roles] == [
        ("External", 2, 6),
        ("Static", 0, 64),
        ("External", 2, 5),
    ]
    assert roles["qwen-prompts"].parallelism.tensor == 4
    assert (spec.model.name, spec.model.token_secret) == ("Qwen/Qwen3-32B", "hub")
    assert (spec.kv_transfer.paths, spec.kv_transfer.store_memory) == (("direct", "store"), "20G")


def test_pod_fields_are_kept_and_flags_become_settings():
    _, (spec,) = made_of("stack-split")

    pod = spec.roles[0].pod_template
    (main,) = pod["spec"]["containers"]
    assert [each["key"] for each in pod["spec"]["tolerations"]] == ["gpu", "team"]
    assert pod["metadata"]["labels"] == {"environment": "staging", "team": "a"}
    assert main["resources"] == {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "96Gi"}}
    assert main["env"] == [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]
    assert main["args"][1::2] == [
        "max_model_len=32768",
        "vllm.dtype=bfloat16",
        "max_running=64",
        "vllm.enforce_eager=true",
        "vllm.extra_args.gpu_memory_utilization=0.85",
        "vllm.extra_args.async_scheduling=false",
    ]


def test_fields_without_equivalent_are_noted_by_path():
    made, _ = made_of("stack-split")

    entry = "servingEngineSpec.modelSpec[0]"
    assert noted(made) == {
        "cacheserverSpec",
        "loraController",
        "routerSpec.autoscaling.targetCPUUtilizationPercentage",
        "routerSpec.extraArgs",
        "routerSpec.ingress",
        "routerSpec.sessionKey",
        f"{entry}.env[1]",
        f"{entry}.hf_token.secretKey",
        f"{entry}.keda.triggers",
        f"{entry}.pvcStorage",
        f"{entry}.repository",
        f"{entry}.vllmConfig.enablePrefixCaching",
        f"{entry}.vllmConfig.extraArgs",
        "servingEngineSpec.modelSpec[1].hf_token",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_secrets_are_repeated_nowhere(path):
    made = imported(documents(path.stem))
    assert SECRET not in msgspec.json.encode([made.objects, made.notes]).decode()


SECRET_ARGUMENTS = [
    ["--hf-token", SECRET],
    [f"--hf_token={SECRET}"],
    ["--hf-token", "$HF_TOKEN"],
    ["--hf-token=$(HF_TOKEN)"],
    ["--some-header", "Bearer ${HF_TOKEN}"],
    ["--ssl-keyfile-password", SECRET],
]

PASSED_ON = ("--hf-token: goes", "--ssl-keyfile-password: goes")


@pytest.mark.parametrize("arguments", SECRET_ARGUMENTS)
def test_secret_flag_is_dropped_from_a_graph(arguments):
    variables = [{"name": "HF_TOKEN", "value": SECRET}]
    for name, service in (("graph-v1alpha1", "VllmDecodeWorker"), ("graph-v1beta1", "decode")):
        *_, graph = documents(name)
        if name == "graph-v1alpha1":
            worker = graph["spec"]["services"][service]
            worker["envs"] = variables
            main = worker["extraPodSpec"]["mainContainer"]
        else:
            main = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
            main["env"] += variables
        main["command"], main["args"] = ["python3", "-m", "dynamo.vllm"], ["--model", "m", *arguments]
        made = imported([graph])
        told = msgspec.json.encode([made.objects, made.notes]).decode()
        assert SECRET not in told
        assert "hf_token=" not in told
        assert any(note.message.startswith("HF_TOKEN: has a secret's name") for note in made.notes)
        assert not any(note.message.startswith(PASSED_ON) for note in made.notes)


@pytest.mark.parametrize("arguments", SECRET_ARGUMENTS)
def test_secret_flag_is_dropped_from_a_stack(arguments):
    (values,) = documents("stack-alike")
    entry = values["servingEngineSpec"]["modelSpec"][3]
    entry["env"] = [{"name": "HF_TOKEN", "value": SECRET}]
    entry["vllmConfig"]["extraArgs"] += arguments
    made = imported([values])
    told = msgspec.json.encode([made.objects, made.notes]).decode()
    assert SECRET not in told
    assert "hf_token=" not in told
    assert not any(note.message.startswith(PASSED_ON) for note in made.notes)


def test_note_says_where_a_dropped_secret_belongs():
    notes = []
    assert settings_of({"hf-token": SECRET, "otlp-password": SECRET, "max-num-seqs": "2"}, "p", notes) == [
        "--set",
        "max_running=2",
    ]
    assert [note.message for note in notes] == [
        "--hf-token: has a secret's name and is left out; name a Secret in model.tokenSecret",
        "--otlp-password: has a secret's name and is left out; let a variable take it from a Secret",
    ]


@pytest.mark.parametrize(("name", "field"), [("graph-v1alpha1", "envs"), ("graph-v1beta1", "env")])
def test_secret_that_all_services_share_is_noted_once(name, field):
    graph = next(each for each in documents(name) if each["kind"] == "DynamoGraphDeployment")
    variables = graph["spec"].setdefault(field, [])
    variables.append({"name": "LOG_API_KEY", "value": SECRET})

    made = imported([graph])

    path = f"spec.{field}[{len(variables) - 1}]"
    assert [note.message[:12] for note in made.notes if note.path == path] == ["LOG_API_KEY:"]


def test_sidecars_keep_everything_but_secrets():
    variables = [{"name": "LOG_API_KEY", "value": SECRET}, {"name": "LEVEL", "value": "info"}]
    beside = {"name": "logs", "image": "i", "env": variables}
    _, older = documents("graph-v1alpha1")
    (newer,) = documents("graph-v1beta1")
    pods = [
        older["spec"]["services"]["VllmDecodeWorker"]["extraPodSpec"],
        newer["spec"]["components"][1]["podTemplate"]["spec"],
    ]
    for graph, pod in zip((older, newer), pods, strict=True):
        pod.setdefault("containers", []).append(beside)
        pod["initContainers"] = [beside]
        made = imported([graph])
        role = made.objects[0]["spec"]["roles"][0]["podTemplate"]["spec"]
        for kept in (role["containers"][-1], role["initContainers"][0]):
            assert kept == {"name": "logs", "image": "i", "env": [{"name": "LEVEL", "value": "info"}]}
        assert SECRET not in msgspec.json.encode(made.notes).decode()
        assert sum(note.message.startswith("LOG_API_KEY: has a secret's name") for note in made.notes) == 2
    assert len(beside["env"]) == 2, "what was read stays as it was"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "hf_x", True),
        ("hf-token", "1", True),
        ("HF_TOKEN", "", False),
        ("AUTH_TOKENS", "a,b", True),
        ("ssl-keyfile-password", "x", True),
        ("s3.secret_access_key", "x", True),
        ("api-key", "x", True),
        ("max-num-batched-tokens", "8192", False),
        ("long-prefill-token-threshold", "2048", False),
        ("return-tokens-as-token-ids", "true", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("tokenizer-mode", "slow", False),
    ],
)
def test_secrets_are_known_by_name_but_not_token_numbers(name, value, secret):
    assert is_secret(name, value) == secret


def test_pod_variables_are_not_taken_for_empty():
    from_secret = {"name": "PLACE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    assert variables_of([{"name": "A", "value": 1}, from_secret, {"name": "B"}]) == {"A": "1", "B": ""}


def test_each_model_becomes_one_deployment():
    made, specs = made_of("stack-alike")

    alike, wide, small = specs
    assert [each["metadata"]["name"] for each in made.objects] == ["llama-8b", "wide", "small"]
    assert [(role.name, role.gpus.vendor) for role in alike.roles] == [
        ("one", "amd.com/gpu"),
        ("one-2", "amd.com/gpu"),
    ]
    assert (alike.kv_transfer.paths, alike.kv_transfer.store_memory) == (("store",), "60G")
    assert (wide.roles[0].nodes_per_replica, wide.roles[0].gpus.per_replica) == (2, 16)
    assert (small.model.name, small.model.uri) == ("little", "tiny/gpt")
    assert noted(made) == {"servingEngineSpec.modelSpec[3].requestGPU"}


@pytest.mark.parametrize(
    ("logic", "policy"), [("roundrobin", "round_robin"), ("session", "sticky"), ("kvaware", "fleet"), ("new", "fleet")]
)
def test_routing_becomes_policy_or_a_note(logic, policy):
    (values,) = documents("stack-alike")
    made = imported([values | {"routerSpec": {"routingLogic": logic}}])
    assert msgspec.convert(made.objects[0]["spec"], DisaggDeploymentSpec).routing.policy == policy
    assert ("routerSpec.routingLogic" in noted(made)) == (logic == "new")


def test_v1alpha1_services_become_roles():
    made, (spec,) = made_of("graph-v1alpha1")

    assert made.objects[0]["metadata"] == {"name": "qwen-split", "namespace": "inference"}
    decode, prefill, router = spec.roles
    assert (decode.name, decode.type, decode.replicas) == ("vllm-decode-worker", "decode", 4)
    assert (decode.nodes_per_replica, decode.gpus.per_replica, decode.parallelism.expert) == (2, 8, 8)
    assert decode.drain.timeout_seconds == 600
    assert (prefill.type, prefill.parallelism.tensor) == ("prefill", 8), "from a shell's line, with its variables"
    assert (spec.model.name, spec.model.uri) == ("qwen", "Qwen/Qwen3-235B")
    assert router.replicas == 2
    assert spec.kv_transfer.paths == ("direct",), "its connector keeps blocks, but not those of several nodes"
    (main,) = decode.pod_template["spec"]["containers"]
    assert main["resources"]["limits"] == {"rdma/ib": "4"}
    assert {"name": "weights", "mountPath": "/model"} in main["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "80Gi"}} in decode.pod_template["spec"][
        "volumes"
    ]
    assert noted(made) == {
        "document 1",
        "document 2: spec",
        "document 2: spec.services.Frontend.extraPodSpec.mainContainer.args",
        "document 2: spec.services.Planner",
        "document 2: spec.pvcs",
    }


def test_rendezvous_flags_of_ranks_are_dropped():
    (graph, *_) = [each for each in documents("graph-v1alpha1") if "services" in each.get("spec", {})]
    worker = graph["spec"]["services"]["VllmDecodeWorker"]["extraPodSpec"]["mainContainer"]
    before = imported(deepcopy([graph]))
    worker["args"] += ["--master-addr=leader", "--master-port", "29501", "--headless", "--data-parallel-size-local=1"]

    assert imported([graph]) == before, "such flags are no settings of a worker, and are neither passed on nor a loss"


def test_graph_connector_becomes_a_store_where_possible():
    *_, graph = documents("graph-v1alpha1")
    services = graph["spec"]["services"]
    decode = services["VllmDecodeWorker"]
    decode |= {"multinode": {"nodeCount": 1}, "resources": {"limits": {"gpu": "4"}}}
    flags = decode["extraPodSpec"]["mainContainer"]["args"]
    flags.remove("--data-parallel-size=2")
    made = imported([graph])
    assert made.objects[0]["spec"]["kvTransfer"]["paths"] == ["direct", "store"]
    assert "spec" not in noted(made)

    flags.append("--data-parallel-size=2")
    assert "kvTransfer" not in imported([graph]).objects[0]["spec"]
    flags.pop()
    (line,) = services["VllmPrefillWorker"]["extraPodSpec"]["mainContainer"]["args"]
    services["VllmPrefillWorker"]["extraPodSpec"]["mainContainer"]["args"] = [line.replace("-tp 8", "-tp 4 -pp 2")]
    made = imported([graph])
    assert "kvTransfer" not in made.objects[0]["spec"]
    assert "spec" in noted(made)


@pytest.mark.parametrize(("stages", "stored"), [(1, True), (2, False)])
def test_stack_offloading_becomes_a_store_where_possible(stages, stored):
    (values,) = documents("stack-alike")
    wide = values["servingEngineSpec"]["modelSpec"][2]
    wide["vllmConfig"]["pipelineParallelSize"] = stages
    wide["lmcacheConfig"] = {"enabled": True, "cpuOffloadingBufferSize": "60"}
    made = imported([values])
    assert ("kvTransfer" in made.objects[1]["spec"]) == stored
    assert ("servingEngineSpec.modelSpec" in noted(made)) != stored


def test_executor_flags_are_dropped():
    notes = []
    assert settings_of({"distributed-executor-backend": "ray"}, "p", notes) == []
    assert not notes


def test_contradictory_document_is_refused():
    roles = (RoleSpec(name="alone", type=RoleType.PREFILL),)
    with pytest.raises(ConfigurationRefused, match=r"it: spec\.roles: prefill and decode need each other"):
        document("it", DisaggDeploymentSpec(model=ModelSource(name="m"), roles=roles))
    alone = DisaggDeploymentSpec(model=ModelSource(name="m"), roles=(RoleSpec(name="alone", type=RoleType.AGGREGATED),))
    with pytest.raises(ConfigurationRefused, match=r"metadata\.name: too long beside the name of a role"):
        document("d" * 50, alone)


def test_v1beta1_components_become_roles_and_picker():
    made, (spec,) = made_of("graph-v1beta1")

    decode, prefill = spec.roles
    assert (decode.type, decode.scaling.mode, prefill.type) == ("decode", "External", "prefill")
    assert spec.routing.inference_pool.create
    names = [each["name"] for each in decode.pod_template["spec"]["containers"]]
    assert names == ["main", "log-shipper"], "the other stack's sidecar is gone"
    assert decode.pod_template["spec"]["containers"][0]["env"][-1]["valueFrom"]
    assert noted(made) == {"spec.components[0].eppConfig", "spec.components[1].minAvailable"}


def test_simulated_engines_stay_simulated():
    _, (spec,) = made_of("graph-simulated")
    assert (spec.engine, spec.model.name, spec.roles[0].type) == ("simulated", "meta/llama-8b", "aggregated")


def test_other_engine_is_noted_and_its_flags_dropped():
    (graph,) = documents("graph-simulated")
    main = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    main["command"] = ["python3", "-m", "dynamo.sglang"]
    main["args"] = ["--model-path", "m", "--tp", "4", "--mem-fraction-static", "0.8"]
    main["resources"] = {"limits": {"nvidia.com/gpu": "4"}}
    made = imported([graph])
    (role,) = msgspec.convert(made.objects[0]["spec"], DisaggDeploymentSpec).roles
    assert (role.parallelism.tensor, role.pod_template) == (4, {})
    assert any("sglang" in note.message for note in made.notes)


def test_unpaired_prefill_and_extra_gpus_are_corrected():
    (graph,) = documents("graph-simulated")
    worker = graph["spec"]["components"][1]
    worker |= {"type": "prefill", "multinode": {"nodeCount": 3}}
    main = worker["podTemplate"]["spec"]["containers"][0]
    main |= {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    main["args"] += ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "many"]
    made = imported([graph])
    (role,) = msgspec.convert(made.objects[0]["spec"], DisaggDeploymentSpec).roles
    assert (role.type, role.gpus.per_replica, role.nodes_per_replica) == ("aggregated", 4, 1)
    assert len(made.notes) == 4


def test_encoders_are_dropped_and_aliased_lists_copied():
    (graph,) = documents("graph-v1beta1")
    prefill, decode = graph["spec"]["components"][2], graph["spec"]["components"][1]
    prefill["sharedMemorySize"] = "1Gi"
    prefill["podTemplate"]["spec"]["volumes"] = decode["podTemplate"]["spec"]["volumes"] = [{"name": "v"}]
    graph["spec"]["components"].append({**decode, "name": "pictures", "type": "encode"})
    made = imported([graph])
    roles = msgspec.convert(made.objects[0]["spec"], DisaggDeploymentSpec).roles
    volumes = [[each["name"] for each in role.pod_template["spec"]["volumes"]] for role in roles]
    assert volumes == [["v", "shm"], ["v", "shm"]]
    assert "spec.components[3]" in noted(made)


def test_plain_worker_beside_prefill_workers_decodes():
    _, graph = documents("graph-v1alpha1")
    decode = graph["spec"]["services"]["VllmDecodeWorker"]
    del decode["subComponentType"]
    decode["extraPodSpec"]["mainContainer"]["args"].remove("--is-decode-worker")
    made = imported([graph])
    assert [role["type"] for role in made.objects[0]["spec"]["roles"]] == ["decode", "prefill", "router"]


def test_kv_role_decides_without_router_labels():
    (values,) = documents("stack-split")
    del values["routerSpec"]["extraArgs"]
    made = imported([values])
    assert [role["type"] for role in made.objects[0]["spec"]["roles"]] == ["prefill", "decode", "router"]
    for entry in values["servingEngineSpec"]["modelSpec"]:
        entry["lmcacheConfig"] = {}
    made = imported([values])
    assert [role["type"] for role in made.objects[0]["spec"]["roles"]] == ["aggregated", "aggregated", "router"]


def test_disabled_engines_stay_disabled():
    (values,) = documents("stack-alike")
    values["servingEngineSpec"]["enableEngine"] = False
    made = imported([values])
    assert all(each["spec"]["suspend"] for each in made.objects)
    assert "servingEngineSpec.enableEngine" in noted(made)


def test_given_name_needs_a_single_deployment():
    assert imported(documents("graph-v1alpha1"), name="it").objects[0]["metadata"]["name"] == "it"
    with pytest.raises(ConfigurationRefused, match="becomes 3 deployments"):
        imported(documents("stack-alike"), name="it")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "is neither"),
        ([7], "document 1: is no object"),
        ([{"kind": "Deployment"}], "is neither"),
        ([{"kind": ["x"]}], "is neither"),
        ([{"servingEngineSpec": 7}], "servingEngineSpec: must be an object, not another number"),
        ([{"servingEngineSpec": {"modelSpec": {}}}], "servingEngineSpec.modelSpec: must be a list, not an object"),
        ([{"servingEngineSpec": {"modelSpec": [{}]}}], "servingEngineSpec.modelSpec[0].modelURL: is missing"),
        (
            [{"servingEngineSpec": {"modelSpec": [{"modelURL": "m", "replicaCount": "two"}]}}],
            "modelSpec[0].replicaCount: must be a whole number from 0 to 10000, not a text",
        ),
        ([{"kind": "DynamoGraphDeployment"}], "apiVersion: must be nvidia.com/v1alpha1 or v1beta1"),
        ([{"kind": "DynamoGraphDeployment", "apiVersion": "nvidia.com/v1beta1"}], "spec: has no worker in it"),
    ],
)
def test_unreadable_field_is_refused_with_its_path(content, said):
    with pytest.raises(ConfigurationRefused) as refused:
        imported(content)
    assert said in str(refused.value)


def leaves(value, path=()) -> Iterator[tuple]:
    """Yield the paths to all values within a value, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*path, name)
        yield from leaves(each, (*path, name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_any_value_of_a_field_is_accepted_or_refused(path):
    whole = documents(path.stem)
    chance = Random(path.stem)
    for where in leaves(whole):
        for value in chance.sample(SOMETHING_ELSE, 2):
            changed = deepcopy(whole)
            *parents, last = where
            inner = changed
            for name in parents:
                inner = inner[name]
            inner[last] = value
            try:
                made = imported(changed)
                check(made)
            except ConfigurationRefused as refused:
                lines = str(refused).splitlines()
            except Exception as bug:
                raise AssertionError(f"{where} = {value!r}") from bug
            else:
                lines = [""]
            assert len(lines) == 1, where


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen3 8B!", "qwen3-8b"),
        ("70b", "b"),
        ("", "model"),
        ("ÄÖ", "model"),
        ("VllmDecodeWorker", "vllm-decode-worker"),
    ],
)
def test_names_get_a_valid_shape(text, name):
    assert Names("model").give(text) == name


def test_names_are_given_once():
    names = Names("model")
    given = [names.give("a" * 40) for _ in range(12)]
    assert len(set(given)) == 12
    assert all(len(name) <= 30 for name in given)


@pytest.mark.parametrize(
    ("command", "args", "named"),
    [
        (["vllm", "serve"], ["m", "--a", "1", "--b"], {"a": "1", "b": "true"}),
        (["python3", "-m", "x"], ["--a_b=1", "--c", "-1", "--c"], {"m": "x", "a-b": "1", "c": "true"}),
        (["sh", "-c"], ["exec python3 -m x --a '{\"b\": 1}' | tee y"], {"m": "x", "a": '{"b": 1}'}),
        (["sh", "-c"], ["python3 --a 'unended"], {"a": "'unended"}),
        ([], ["--a", "$X", "--b", "${X}", "--c", "$(X)", "--d", "$Y"], {"a": "1", "b": "1", "c": "1", "d": "$Y"}),
        ([], ["--"], {}),
    ],
)
def test_command_lines_are_parsed_like_their_programs_do(command, args, named):
    assert flags_of(command, args, {"X": "1"}).named == named


def test_flags_with_objects_are_noted_and_dropped():
    notes = []
    assert settings_of({"a": '{"b": 1}', "c-d": "1"}, "p", notes) == ["--set", "vllm.extra_args.c_d=1"]
    assert [note.path for note in notes] == ["p"]
