"""Proposals: from a ServingRequest to a DisaggDeployment that can be applied, or to the reason why there is none."""

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.hardware.gpus import gpus
from fleet.hardware.known_models import known_models
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.api.serving_request import ServingRequestSpec
from operators.controller.serving_request import proposed
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images
from operators.manifests.shared import shared
from operators.manifests.workloads import workers
from operators.proposals import LARGEST, Infeasible, Proposal, propose
from tests.support.sim.model_configs import DEEPSEEK_V3, LLAMA_70B
from workers.settings import WorkerSettings

LLAMA = {"name": "llama", "uri": "meta-llama/Llama-3.3-70B-Instruct", "tokenSecret": "hugging-face"}
FP8 = {"name": "llama", "uri": "nvidia/Llama-3.3-70B-Instruct-FP8"}
IMAGES = Images(router="router:1", worker_cpu="cpu:1", worker_cuda="cuda:1", worker_rocm="rocm:1")


def asked(**changes) -> ServingRequestSpec:
    spec = {
        "model": LLAMA,
        "hardware": {"gpu": "h100", "count": 32},
        "workload": {"promptTokens": 2048, "answerTokens": 256, "requestsPerMinute": 600},
        "objective": {"ttftMs": 1000, "tpotMs": 50},
    }
    return msgspec.convert(spec | changes, ServingRequestSpec)


def work(prompt, answer, rate=0, clients=0, hit=0):
    return {
        "promptTokens": prompt,
        "answerTokens": answer,
        "requestsPerMinute": rate,
        "concurrency": clients,
        "cachedPercent": hit,
    }


def goals(ttft, tpot, percentile=90):
    return {"ttftMs": ttft, "tpotMs": tpot, "percentile": percentile}


def on(gpu, count, **fields):
    return {"gpu": gpu, "count": count} | fields


TABLE = [
    # The fields of the request, and the result: (replicas, GPUs per replica) by role, or the reason of a refusal.
    ({}, {"workers": (3, 4)}),
    ({"workload": work(2048, 256, rate=60)}, {"workers": (1, 4)}),
    ({"workload": work(2048, 256, rate=1200)}, {"workers": (6, 4)}),
    ({"workload": work(2048, 256, rate=600, hit=80)}, {"workers": (2, 4)}),
    ({"workload": work(2048, 256, clients=100)}, {"workers": (2, 4)}),
    ({"workload": work(200, 1000, rate=300)}, {"workers": (2, 4)}),
    ({"objective": goals(1000, 20)}, {"prefill": (2, 8), "decode": (1, 8)}),
    ({"objective": goals(1000, 16)}, {"prefill": (2, 8), "decode": (2, 8)}),
    ({"objective": goals(5000, 200)}, {"workers": (3, 4)}),
    ({"objective": goals(1000, 50, 99)}, {"workers": (3, 4)}),
    ({"model": FP8}, {"workers": (4, 2)}),
    ({"hardware": on("H100", 32)}, {"workers": (3, 4)}),
    ({"hardware": on("h200", 32)}, {"workers": (3, 4)}),
    ({"hardware": on("b200", 32)}, {"workers": (3, 2)}),
    ({"hardware": on("mi300x", 32)}, {"workers": (3, 4)}),
    ({"hardware": on("h100", 11)}, "TooFewGpus"),
    ({"hardware": on("h100", 100_000), "workload": work(2048, 256, rate=5_000_000)}, "TooManyReplicas"),
    ({"hardware": on("h100", 1)}, "ModelDoesNotFit"),
    ({"hardware": on("h100", 32, perNode=1)}, "ModelDoesNotFit"),
    ({"hardware": on("l40s", 32, perNode=2)}, "ModelDoesNotFit"),
    ({"hardware": on("h1000", 32)}, "GpuUnknown"),
    ({"model": {"name": "llama-3.3-70b"}}, "ModelUnknown"),
    ({"model": {"name": "x", "uri": "/models/x", "claim": "weights"}}, "ModelUnknown"),
    ({"modelConfig": {"hidden_size": 8192}}, "ModelUnknown"),
    ({"objective": goals(50, 50)}, "TtftOutOfReach"),
    ({"objective": goals(1000, 5)}, "TpotOutOfReach"),
    ({"workload": work(200_000, 10, rate=1)}, "ContextTooLong"),
    ({"workload": work(2048, 256, clients=100_000)}, "TooFewGpus"),
]


@pytest.mark.parametrize(("changes", "expected"), TABLE)
def test_request_gets_the_expected_sizing(changes, expected):
    got = propose(asked(**changes))

    if isinstance(got, Infeasible):
        assert got.reason == expected
        return
    roles = {role.name: (role.replicas, role.gpus.per_replica) for role in got.spec.roles if role.name != "router"}
    assert roles == expected


FEASIBLE = [changes for changes, expected in TABLE if isinstance(expected, dict)]


@pytest.mark.parametrize("changes", FEASIBLE)
def test_proposal_is_complete_and_consistent(changes):
    request = asked(**changes)
    got = propose(request)
    assert isinstance(got, Proposal)

    written = json.loads(msgspec.json.encode(proposed("llama", got)))
    spec = msgspec.convert(written["spec"], DisaggDeploymentSpec)

    assert spec == got.spec
    assert list(contradictions(spec, "x" * 47)) == []
    assert sum(role.replicas * role.gpus.per_replica for role in spec.roles) <= request.hardware.count
    assert spec.balance.gpu_budget == request.hardware.count
    wish = DesiredDeployment(name="llama", namespace="default", spec=spec)
    assert shared(wish, IMAGES)
    for role in wish.workers:
        [settings, child] = workers(wish, role, "rev", IMAGES)
        container = child["spec"]["template"]["spec"]["containers"][0]
        assert container["args"][0].startswith("--set=max_model_len=")
        assert settings["kind"] == "ConfigMap"


def test_engine_options_match_prediction_and_settings():
    got = propose(asked())
    said = [text.removeprefix("--set=").split("=") for text in main(got)["args"]]

    assert dict(said) == {
        "max_model_len": "131072",
        "max_running": "256",
        "vllm.extra_args.max_num_batched_tokens": "8192",
    }
    assert {"max_model_len", "max_running", "vllm"} <= set(WorkerSettings.__struct_fields__)


def main(got):
    return got.spec.roles[-1].pod_template["spec"]["containers"][0]


def test_longest_request_fits_the_engine():
    """Check the proposed longest request: an engine whose memory cannot hold it refuses to start."""
    got = propose(
        asked(
            model={"name": "q", "uri": "Qwen/Qwen3-32B"},
            hardware=on("h100", 8, perNode=1),
            workload=work(1024, 128, rate=30),
        )
    )
    longest = int(main(got)["args"][0].rpartition("=")[2])
    assert 1152 < longest < 40_960


def test_requests_pod_template_follows_ours():
    given = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "securityContext": {"supplementalGroups": [44]},
            "containers": [
                {"name": "aside", "image": "b"},
                {"name": "main", "args": ["--set=max_running=8"], "env": []},
            ],
        },
    }

    got = propose(asked(podTemplate=given, image="mine:1", topology={"rdma": "rdma/hca"}))

    template = got.spec.roles[-1].pod_template
    assert template["metadata"] == given["metadata"]
    assert template["spec"]["securityContext"] == {"supplementalGroups": [44]}
    aside, container = template["spec"]["containers"]
    assert aside == {"name": "aside", "image": "b"}
    assert container["args"][-1] == "--set=max_running=8"
    assert len(container["args"]) == 4
    assert given["spec"]["containers"][1]["args"] == ["--set=max_running=8"], "what was asked is as it was"
    assert (got.spec.image, got.spec.roles[-1].topology.rdma) == ("mine:1", "rdma/hca")


def test_vendor_and_product_follow_the_hardware():
    got = propose(asked(hardware=on("mi300x", 32, product="AMD_Instinct_MI300X_OAM")))
    taken = got.spec.roles[-1].gpus
    assert (taken.vendor.value, taken.product) == ("amd.com/gpu", "AMD_Instinct_MI300X_OAM")


def test_rollout_uses_spare_gpus_or_one_replica_at_a_time():
    spare, none = propose(asked()), propose(asked(hardware=on("h100", 12)))

    assert [(role.rollout.max_surge, role.rollout.max_unavailable) for role in spare.spec.roles[1:]] == [(1, 0)]
    assert [(role.rollout.max_surge, role.rollout.max_unavailable) for role in none.spec.roles[1:]] == [(0, 1)]


def test_short_prompts_go_to_prefill_workers_too():
    short = propose(asked(workload=work(800, 256, rate=1200), objective=goals(1000, 16)))
    long = propose(asked(objective=goals(1000, 20)))

    assert {role.name for role in short.spec.roles} == {"router", "prefill", "decode"}
    assert short.spec.routing.disaggregate_above_tokens == 400
    assert long.spec.routing.disaggregate_above_tokens == 512


def test_drain_limit_is_twice_an_answers_duration():
    long = propose(asked(workload=work(2048, 8192, rate=60)))
    assert long.spec.roles[-1].drain.timeout_seconds > 2 * 8192 * 0.01
    assert propose(asked()).spec.roles[-1].drain.timeout_seconds == 300


def test_prediction_stands_beside_goal_with_its_error():
    got = propose(asked(model=FP8))

    figures = {each.goal.value: each for each in got.figures}
    assert set(figures) == {"ttftMs", "tpotMs", "gpus", "requestsPerMinute"}
    assert all(each.met for each in got.figures)
    assert figures["ttftMs"].predicted <= figures["ttftMs"].asked == 1000
    assert (figures["ttftMs"].error_percent, figures["tpotMs"].error_percent) == (10, 4)
    assert figures["requestsPerMinute"].predicted >= 600
    assert got.basis == "35 measurements of this model on these GPUs; errors are medians of such predictions"


def test_goal_within_prediction_error_is_reported():
    assert propose(asked(model=FP8)).reason == "GoalsMet"
    close = propose(asked(hardware=on("mi300x", 32), objective=goals(1000, 40)))
    assert close.reason == "GoalsWithinError"
    assert "try it before you rely on it" in close.message


@pytest.mark.parametrize(
    ("changes", "field", "best", "advice"),
    [
        ({"hardware": on("h100", 11)}, "spec.hardware.count: 12 GPUs", ("gpus", 11, 12), "would do for"),
        (
            {"hardware": on("h100", 1)},
            "spec.hardware: ",
            ("gpusPerNode", 1, 2),
            "other GPUs (b200, b300, gb200, gb300, mi300x)",
        ),
        (
            {"objective": goals(50, 50)},
            "spec.objective.ttftMs: ",
            ("ttftMs", 50, 118),
            "shorter prompts, more of them cached",
        ),
        ({"objective": goals(1000, 5)}, "spec.objective.tpotMs: ", ("tpotMs", 5, 13), "narrower weights (fp8, fp4)"),
        ({"workload": work(200_000, 10, rate=1)}, "spec.workload: ", ("contextTokens", 200_010, 131_072), "shorter"),
    ],
)
def test_infeasible_reply_names_goal_best_value_and_change(changes, field, best, advice):
    got = propose(asked(**changes))

    assert isinstance(got, Infeasible)
    assert got.message.startswith(field)
    assert advice in got.message
    figure = got.figures[0]
    assert (figure.goal.value, figure.asked, figure.predicted) == best
    assert not figure.met


def test_advice_of_infeasible_reply_helps():
    """Follow the advice of a refusal: the GPUs that it names keep the goal, and the number that it names is enough."""
    slow = propose(asked(objective=goals(100, 50)))
    named = slow.message.partition("other GPUs (")[2].partition(")")[0].split(", ")
    assert named
    for gpu in named:
        assert isinstance(propose(asked(objective=goals(100, 50), hardware=on(gpu, 100_000))), Proposal)

    few = propose(asked(hardware=on("h100", 4)))
    assert isinstance(propose(asked(hardware=on("h100", few.figures[0].predicted))), Proposal)
    most = few.figures[1].predicted
    assert isinstance(propose(asked(hardware=on("h100", 4), workload=work(2048, 256, rate=most))), Proposal)


def test_model_config_describes_an_unknown_repository():
    own = {"model": {"name": "mine", "uri": "me/mine"}, "modelConfig": LLAMA_70B | {"max_position_embeddings": 131072}}
    mine, known = propose(asked(**own)), propose(asked())

    assert mine.figures == known.figures
    assert mine.spec.model.uri == "me/mine"

    fields = propose(asked(modelConfig=DEEPSEEK_V3 | {"kv_lora_rank": "many"}))
    assert fields.message == "spec.modelConfig: kv_lora_rank must be a whole number from 1 on, not 'many'"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": "s3cret"}, "spec: must be an object"),
        ({"spec": {"containers": {"name": "main"}}}, "spec.containers: must be a list"),
        ({"spec": {"containers": ["main"]}}, "spec.containers[0]: must be an object"),
        ({"spec": {"containers": [{"name": "main", "args": "s3cret"}]}}, "spec.containers[0].args: must be a list"),
    ],
)
def test_malformed_pod_template_is_refused(template, field):
    refused = propose(asked(podTemplate=template))

    assert isinstance(refused, Infeasible)
    assert (refused.reason, refused.message) == ("SpecificationRefused", f"spec.podTemplate.{field}")


def test_user_text_appears_in_no_message():
    secret = "s3cret"
    model = {"name": secret, "uri": secret, "claim": secret, "tokenSecret": secret}
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": secret}]}]}}
    for changes in ({"model": model}, {"hardware": on(secret, 8)}, {"podTemplate": template}):
        got = propose(asked(**changes))
        assert secret not in got.message + got.basis + got.reason


@given(
    model=st.sampled_from(
        [each for entry in known_models().values() for listed in entry.repositories.values() for each in listed]
    ),
    gpu=st.sampled_from(list(gpus())),
    count=st.integers(1, 100_000),
    per_node=st.integers(1, 72),
    prompt=st.integers(1, 10_000_000) | st.integers(1, 5000),
    length=st.integers(1, 1_000_000) | st.integers(1, 2000),
    hit=st.integers(0, 99),
    rate=st.integers(1, 100_000_000) | st.integers(1, 1000),
    clients=st.integers(0, 1_000_000) | st.just(0),
    ttft=st.integers(1, 600_000),
    tpot=st.integers(1, 600_000),
    percentile=st.integers(50, 99),
)
@example(  # A batch of 13 requests takes longer for a token than a batch of 132.
    model="deepseek-ai/DeepSeek-V3",
    gpu="gb200",
    count=8,
    per_node=8,
    prompt=18,
    length=1,
    hit=0,
    rate=1,
    clients=13,
    ttft=92,
    tpot=58,
    percentile=50,
)
@settings(max_examples=40, deadline=None)
def test_any_valid_request_gets_a_consistent_reply(
    model, gpu, count, per_node, prompt, length, hit, rate, clients, ttft, tpot, percentile
):
    request = asked(
        model={"name": "m", "uri": model},
        hardware=on(gpu, count, perNode=per_node),
        workload=work(prompt, length, rate=0 if clients else rate, clients=clients, hit=hit),
        objective=goals(ttft, tpot, percentile),
    )

    got = propose(request)

    assert got.message
    if isinstance(got, Proposal):
        # The schema refuses roles with more replicas than this.
        if all(role.replicas <= 10_000 for role in got.spec.roles):
            msgspec.convert(proposed("x", got)["spec"], DisaggDeploymentSpec)
        assert list(contradictions(got.spec, "x")) == []
        assert all(each.met for each in got.figures)


def filled(size, *, fields=1):
    """Return a pod template whose JSON has `size` bytes; annotations fill it up."""
    annotations = {f"k{at}": "" for at in range(fields)}
    template = {"metadata": {"annotations": annotations}}
    annotations["k0"] = "a" * (size - len(msgspec.json.encode(template)))
    assert len(msgspec.json.encode(template)) == size
    return template


@pytest.mark.parametrize("field", ["podTemplate", "modelConfig"])
def test_too_long_field_is_refused_with_its_size(field):
    found = propose(asked(**{field: filled(LARGEST + 1)}))

    assert isinstance(found, Infeasible)
    assert found.reason == "SpecificationRefused"
    assert (
        found.message
        == f"spec.{field}: takes 131,073 bytes as JSON, and may take 131,072; mount what is long from a ConfigMap"
    )
    assert not isinstance(propose(asked(podTemplate=filled(LARGEST))), Infeasible)
