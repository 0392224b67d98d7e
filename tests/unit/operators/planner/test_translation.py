"""Tests of the planner settings that are made from a ServingPlan and its deployment."""

from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec import structs

from fleet.app.planner import scaling_rule
from fleet.app.rehearsal import rehearsal_of
from fleet.core.roles import Role
from fleet.hardware.gpus import gpus
from fleet.planner.settings import (
    FleetRuleSettings,
    GpuEngineSettings,
    LinearEngineSettings,
    LoadRuleSettings,
    PlannerMode,
)
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.api.serving_plan import ServingPlanSpec
from operators.manifests.names import DesiredDeployment
from operators.planner.settings import KubePlannerSettings
from operators.planner.translation import BLOCK_TOKENS, KV_BLOCKS, PlanNotObeyed, planner_settings
from workers.settings import WorkerSettings

MODEL = {"name": "llama", "uri": "meta-llama/Llama-3.1-70B-Instruct@main"}
PLANNED = {"mode": "Planner", "least": 1, "most": 6}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "perReplica": 4}


def a_role(kind, **fields):
    parallelism = {"tensor": 4}
    return {"name": kind, "type": kind, "scaling": PLANNED, "gpus": H100, "parallelism": parallelism} | fields


def a_deployment(*roles, **spec):
    content = {"model": MODEL, "roles": list(roles or (a_role("prefill"), a_role("decode")))} | spec
    return DesiredDeployment(name="llama", namespace="serving", spec=msgspec.convert(content, DisaggDeploymentSpec))


def translated(deployment=None, **plan):
    spec = msgspec.convert({"deployment": "llama"} | plan, ServingPlanSpec)
    return planner_settings(spec, deployment or a_deployment(), KubePlannerSettings(identity="planner-0"))


def refusal(deployment=None, **plan):
    with pytest.raises(PlanNotObeyed) as refused:
        translated(deployment, **plan)
    return refused.value


def test_gpu_type_and_price_follow_from_the_product():
    settings = translated()

    prefill, decode = settings.pools
    assert (prefill.name, prefill.role, prefill.gpu, prefill.gpus) == ("prefill", Role.PREFILL, "h100", 4)
    assert prefill.dollars_per_hour == gpus()["h100"].price.dollars
    assert (decode.least, decode.most) == (1, 6)
    assert settings.engines["decode"] == GpuEngineSettings(model="meta-llama/Llama-3.1-70B-Instruct", tp=4)
    assert settings.mode is PlannerMode.SHADOW
    assert isinstance(settings.rule, FleetRuleSettings)
    assert rehearsal_of(settings) is not None
    assert scaling_rule(settings).interval == 5_000_000_000


def test_narrower_bounds_and_budgets_count():
    roles = [{"role": "prefill", "least": 2, "most": 4, "centsPerHour": 250}, {"role": "decode", "most": 9}]
    balance = {"gpuBudget": 48, "ratio": {"least": "1:4", "most": "2:1"}}
    settings = translated(
        a_deployment(balance=balance), roles=roles, budget={"gpus": 32, "centsPerHour": 10_000}, mode="Active"
    )

    prefill, decode = settings.pools
    assert (prefill.least, prefill.most, prefill.dollars_per_hour) == (2, 4, 2.5)
    assert (decode.least, decode.most) == (1, 6)
    budget = settings.budget
    assert (budget.gpus, budget.dollars_per_hour, budget.least_ratio, budget.most_ratio) == (32, 100.0, 0.25, 2.0)
    assert translated(a_deployment(balance={"gpuBudget": 24}), budget={"gpus": 32}).budget.gpus == 24
    assert translated().budget.least_ratio is None
    by_load = translated(a_deployment(balance=balance), requestsPerReplica=4).budget
    assert (by_load.gpus, by_load.least_ratio, by_load.most_ratio) == (48, None, None), "the operator keeps the ratio"


def test_sample_plan_fits_its_sample_deployment():
    samples = Path(__file__).parents[4] / "deploy" / "samples"
    plan = yaml.safe_load((samples / "plans" / "h100-llama-70b.yaml").read_text())["spec"]
    spec = yaml.safe_load((samples / f"h100-{plan['deployment']}.yaml").read_text())["spec"]
    for role in spec["roles"][1:]:
        role["scaling"]["mode"] = "Planner"
    del plan["deployment"]
    settings = translated(a_deployment(*spec.pop("roles"), **spec), **plan)

    assert {pool.name: (pool.gpu, pool.least, pool.most) for pool in settings.pools} == {
        "prefill": ("h100", 1, 4),
        "decode": ("h100", 1, 6),
    }
    assert scaling_rule(settings).interval > 0


def test_goals_come_in_seconds_and_shares():
    goals = translated(objective={"ttftMs": 1500, "tpotMs": 40, "percentile": 95}).goals

    assert (goals.ttft_seconds, goals.tpot_seconds, goals.percentile) == (1.5, 0.04, 0.95)


def test_simulated_engine_follows_the_options_of_its_pods():
    args = ["--set=simulated.latency.step_base_ms=20.0", "--set=simulated.speedup=2", "--set=simulated.kv_blocks=100"]
    args += ["--set=max_running=4", "--set=simulated.direct_listen=$(POD_IP):50062", "--set=worker_id=a=b", "--verbose"]

    def role(*options):
        pods = {"spec": {"containers": [{"name": "other"}, {"name": "main", "args": list(options)}]}}
        return a_role("aggregated", gpus={}, parallelism={}, podTemplate=pods)

    plain = translated(a_deployment(role(), engine="simulated")).engines["aggregated"]
    worker = WorkerSettings(worker_id="w", model="m", model_dir="/m", listen="unix:/w.sock")
    assert plain == LinearEngineSettings()
    assert (plain.latency, plain.speedup) == (worker.simulated.latency, worker.simulated.speedup)
    assert plain.kv_tokens == worker.simulated.kv_blocks * worker.block_tokens == KV_BLOCKS * BLOCK_TOKENS
    assert (plain.max_running, plain.step_tokens) == (worker.max_running, worker.simulated.max_batched_tokens)

    changed = translated(a_deployment(role(*args), engine="simulated")).engines["aggregated"]
    latency = structs.replace(plain.latency, step_base_ms=20.0)
    assert changed == LinearEngineSettings(latency=latency, speedup=2, kv_tokens=3200, max_running=4)
    for wrong in ("simulated.speedup=fast", "simulated.latency.none=1", "max_running=0"):
        refused = refusal(a_deployment(role(f"--set={wrong}"), engine="simulated"))
        assert "an option --set of its podTemplate is not understood" in str(refused)
    for wrong in (["--set=simulated.kv_blocks=a", "--set=block_tokens=b"], ["--set=simulated.kv_blocks=[1]"]):
        refused = refusal(a_deployment(role(*wrong), engine="simulated"))
        assert "an option --set of its podTemplate is not understood" in str(refused)


@pytest.mark.parametrize(
    "pods", [{"spec": 5}, {"spec": {"containers": 5}}, {"spec": {"containers": [{"name": "main", "args": 5}]}}]
)
def test_pod_template_of_another_shape_changes_nothing(pods):
    roles = [a_role("aggregated", gpus={}, parallelism={}, podTemplate=each) for each in ({}, pods)]
    plain, odd = (translated(a_deployment(role, engine="simulated")).engines["aggregated"] for role in roles)

    assert odd == plain


def test_requests_per_replica_need_no_known_model():
    unknown = a_deployment(a_role("aggregated", gpus={"perReplica": 4}), model={"name": "ours"})
    settings = translated(unknown, requestsPerReplica=8, coolDownSeconds=60)

    assert settings.rule == LoadRuleSettings(requests_per_replica=8.0, cool_down_seconds=60.0)
    assert settings.pools[0].replica_gpus == 0, "of an unknown type, nobody counts them"
    assert "gpu of aggregated is needed" in str(refusal(unknown, requestsPerReplica=8, budget={"gpus": 8}))
    assert "spec.requestsPerReplica: must be above 0" in str(refusal(unknown))


@pytest.mark.parametrize(
    ("deployment", "plan", "reason", "words"),
    [
        (a_deployment(suspend=True), {}, "Suspended", "the deployment is suspended"),
        (
            a_deployment(a_role("aggregated", scaling={"mode": "External"})),
            {},
            "NoPlannedRoles",
            "scaling.mode Planner",
        ),
        (None, {"roles": [{"role": "decoder"}]}, "SpecificationRefused", "spec.roles[0].role: is no role of workers"),
        (None, {"roles": [{"role": "decode", "gpu": "h1000"}]}, "SpecificationRefused", "spec.roles: gpu of decode"),
        (None, {"roles": [{"role": "decode", "least": 7}]}, "SpecificationRefused", "decode needs at least 7 replicas"),
        (None, {"budget": {"gpus": 7}}, "SpecificationRefused", "spec.budget.gpus: 7 is below what the floors"),
        (
            a_deployment(balance={"ratio": {"least": "8:1"}}),
            {},
            "SpecificationRefused",
            "balance.ratio of the deployment: no numbers of replicas within the bounds of the roles keep it: prefill has 1 to 6",
        ),
        (
            a_deployment(a_role("aggregated", gpus={"perReplica": 4, "product": "Unheard-Of"})),
            {},
            "SpecificationRefused",
            "spec.roles: gpu of aggregated is needed",
        ),
    ],
)
def test_plan_that_cannot_be_obeyed_names_the_field(deployment, plan, reason, words):
    refused = refusal(deployment, **plan)

    assert refused.reason == reason
    assert words in str(refused)


def test_roles_of_other_modes_keep_their_own_bounds():
    fixed = a_role("decode", scaling={"mode": "Static"}, replicas=70)
    prefill, decode = translated(a_deployment(a_role("prefill"), fixed), requestsPerReplica=1).pools

    assert (prefill.least, decode.least, decode.most) == (1, 0, 70)


def test_plan_can_ask_for_the_least_energy():
    settings = translated(minimise="Energy", roles=[{"role": "decode", "watts": 420}])

    assert isinstance(settings.rule, FleetRuleSettings)
    assert settings.rule.settings.minimise == "energy"
    prefill, decode = settings.pools
    assert decode.replica_watts == 4 * 420
    assert prefill.replica_watts > 4 * gpus()["h100"].idle_watts
    assert scaling_rule(settings).interval > 0


def test_energy_of_an_unknown_gpu_is_refused_by_role():
    unknown = a_role("decode", gpus={"product": "Accelerator-9", "perReplica": 4})
    simulated = a_deployment(a_role("prefill"), unknown, engine="simulated")

    refused = str(refusal(simulated, minimise="Energy"))
    assert "spec.roles: watts of decode is needed" in refused
    assert refused.endswith("set watts or gpu of the role")


def test_energy_of_a_role_without_gpus_needs_its_watts():
    bare = a_deployment(a_role("prefill"), a_role("decode", gpus={}), engine="simulated")

    refused = str(refusal(bare, minimise="Energy", roles=[{"role": "decode", "gpu": "h100"}]))
    assert refused == "spec.roles: watts of decode is needed for minimise: Energy, because the role has no GPUs"
    assert translated(bare, minimise="Energy", roles=[{"role": "decode", "watts": 420}]).pools[1].replica_watts == 420


def test_price_and_power_count_for_each_gpu_of_unknown_type():
    unknown = a_role("decode", gpus={"product": "Accelerator-9", "perReplica": 4})
    simulated = a_deployment(a_role("prefill"), unknown, engine="simulated")
    roles = [{"role": "decode", "watts": 420, "centsPerHour": 150}]

    decode = translated(simulated, minimise="Energy", roles=roles).pools[1]
    assert decode.replica_watts == 4 * 420
    assert decode.replica_dollars == pytest.approx(4 * 1.5)
    assert decode.replica_gpus == 0
