"""ServingPlans and planner processes, with the operator, simulated nodes, and a router whose load the test sets."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess

import httpx
import pytest

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from msgspec import structs

from operators.chart.metric_catalogue import CLUSTER_PLANNER
from operators.rbac import LEASE_NAME, PLANNER_ACCESS
from tests.support.certificates import Authority
from tests.support.fleet_processes import run_fleet, start_service
from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import QUICK, AskedRouters, a_deployment, an_operator, install
from tests.support.kube.planner import (
    SeenPlan,
    a_demand_router,
    a_planner,
    make_secret,
    planned_deployment,
)
from tests.support.metric_pages import differences
from tests.support.waiting import pace, until

LOAD = {"mode": "Active", "requestsPerReplica": 4, "coolDownSeconds": 1}
OTHER_PLAN = "the ServingPlan a is for the same deployment and its name sorts first, so only it can be obeyed"


@pytest.fixture
async def a_cluster(asked, nodes):
    """Run an operator and a router whose load the test sets; yield the router."""
    make_secret(asked)
    async with a_demand_router(asked, nodes) as router, an_operator(asked, plans_obeyed=True):
        yield router


async def test_load_sizes_a_pool_and_the_status_shows_it(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    with a_planner(asked, tmp_path):
        await plan.says("Settled", "True", "Settled")
        assert plan.condition("NoDemandSignal")["status"] == "False"

        a_cluster.running = {"both-0": 11}
        await until(lambda: asked.replicas() == {"both": 3})
        await until(lambda: plan.status()["plans"] and plan.status()["plans"][0]["state"] == "settled")
        await plan.says("Settled", "True", "Settled")
        status = plan.status()
        assert status["planner"] == "first"
        assert [(each["role"], each["replicas"]) for each in status["recommendations"]] == [("both", 3)]
        assert (status["plans"][0]["changes"], status["plans"][0]["state"]) == ("both 1 to 3", "settled")

        a_cluster.running = {"both-0": 0}
        await until(lambda: asked.replicas() == {"both": 1})


async def test_silent_router_is_named_and_sizes_stay(asked, a_cluster, nodes, tmp_path):
    nodes.router_address = ""
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    with a_planner(asked, tmp_path, stale_seconds=1.0):
        router = await until(lambda: next((name for name in asked.children("pods", "v1") if "router" in name), None))
        await until(lambda: router in plan.condition("NoDemandSignal").get("message", ""))
        assert plan.condition("BudgetExhausted")["status"] == "Unknown", "nothing is decided"
    assert asked.replicas() == {"both": 1}


async def test_unproven_secret_is_no_demand_signal(asked, nodes, tmp_path):
    async with a_demand_router(asked, nodes, deployment="other"), an_operator(asked, plans_obeyed=True):
        asked.apply(planned_deployment()).expect(201)
        plan = SeenPlan(asked, **LOAD)
        with a_planner(asked, tmp_path, stale_seconds=1.0):
            await until(lambda: "UNAUTHENTICATED" in plan.condition("NoDemandSignal").get("message", ""))


async def test_scaled_pool_is_pinned_until_it_is_released(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    with a_planner(asked, tmp_path):
        await plan.says("Settled", "True")
        path = asked.path("rolescalers", "dd-both/scale")
        asked.api.patch(path, "merge", {"spec": {"replicas": 2}}, fieldManager="kubectl").expect(200)
        pinned = await plan.says("Pinned", "True", "Pinned")
        assert pinned["message"].startswith("both: kubectl has set it to 2; fleet scale --release both --deployment ")
        a_cluster.running = {"both-0": 20}
        await until(lambda: plan.status()["conditions"] and asked.replicas() == {"both": 2})

        place = ["--deployment", f"{asked.namespace}/dd", "--kubeconfig", asked.kubeconfig]
        assert run_fleet("scale", "--release", "both", *place).returncode == 0
        await plan.says("Pinned", "False", "Clear")
        await until(lambda: asked.replicas() == {"both": 5})


async def test_shadow_and_off_change_nothing(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD | {"mode": "Shadow"})
    a_cluster.running = {"both-0": 11}
    with a_planner(asked, tmp_path):
        shadow = await plan.says("Settled", "False", "Shadow")
        assert shadow["message"].endswith("both 1 to 3")
        assert plan.status()["recommendations"][0]["replicas"] == 3
        plan.change(mode="Off")
        await plan.says("Settled", "False", "Off")
        assert asked.replicas() == {"both": 1}
        plan.change(mode="Active")
        await until(lambda: asked.replicas() == {"both": 3})


async def test_goal_out_of_reach_names_goal_and_best(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, mode="Active", objective={"ttftMs": 1, "tpotMs": 600})
    a_cluster.counted = structs.replace(a_cluster.counted, arrivals=100, prompt_tokens=100_000, prompt_squares=1e8)
    with a_planner(asked, tmp_path):
        condition = await plan.says("GoalOutOfReach", "True")
    assert condition["message"].startswith("goals.ttft_seconds: 0.001 s for 90% is out of reach; the best is 0.")


async def test_budget_limits_a_pool_and_is_reported(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment(balance={"gpuBudget": 8})).expect(201)
    plan = SeenPlan(asked, **LOAD, budget={"centsPerHour": 250}, roles=[{"role": "both", "centsPerHour": 100}])
    a_cluster.running = {"both-0": 20}
    with a_planner(asked, tmp_path):
        condition = await plan.says("BudgetExhausted", "True")
        await until(lambda: asked.replicas() == {"both": 2})
    assert condition["message"] == "both needs 5 replicas, and budget.dollars_per_hour leaves 2"


async def test_impossible_plan_reports_the_cause(asked, tmp_path):
    make_secret(asked)
    async with an_operator(asked, plans_obeyed=True):
        plan = SeenPlan(asked)
        with a_planner(asked, tmp_path):
            await plan.says("TargetFound", "False", "NoTarget")
            asked.apply(a_deployment({"name": "both", "type": "aggregated"})).expect(201)
            await plan.says("Settled", "False", "NoPlannedRoles")
            asked.apply(planned_deployment()).expect(200)
            await plan.says("TargetFound", "True", "Found")
            for wrong, message in (
                ([{"role": "none"}], "spec.roles[0].role: is no role of workers; there are both"),
                (
                    [{"role": "both", "least": 9}],
                    "spec.roles: both needs at least 9 replicas, and its bounds allow for 8",
                ),
            ):
                plan.change(roles=wrong)
                said = await plan.says("Settled", "False", "SpecificationRefused")
                assert said["message"] == message
            plan.change(roles=[{"role": "both", "least": 3, "centsPerHour": 100}], budget={"centsPerHour": 200})
            said = await plan.says("Settled", "False", "SpecificationRefused")
            assert said["message"].startswith("spec.budget.dollars_per_hour: 2.0 is below what the floors")
            asked.apply(planned_deployment(suspend=True)).expect(200)
            plan.change(budget={"centsPerHour": 0})
            await plan.says("Settled", "False", "Suspended")


async def test_first_plan_by_name_is_obeyed_for_a_deployment(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    first, second = SeenPlan(asked, "a", **LOAD), SeenPlan(asked, "b", **LOAD)
    with a_planner(asked, tmp_path):
        await first.says("Settled", "True")
        said = await second.says("Settled", "False", "OtherPlanObeyed")
        assert said["message"] == OTHER_PLAN
        asked.api.delete(asked.path("servingplans", "a")).expect(200)
        await second.says("Settled", "True")


async def test_refused_first_plan_is_not_said_to_be_obeyed(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    first, second = SeenPlan(asked, "a", **LOAD, roles=[{"role": "none"}]), SeenPlan(asked, "b", **LOAD)
    with a_planner(asked, tmp_path):
        await first.says("Settled", "False", "SpecificationRefused")
        said = await second.says("Settled", "False", "OtherPlanObeyed")
        assert said["message"] == OTHER_PLAN


async def test_missing_control_secret_is_reported_until_it_is_there(asked, nodes, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    with a_planner(asked, tmp_path):
        await plan.says("Settled", "False", "ControlSecretUnusable")
        make_secret(asked)
        async with a_demand_router(asked, nodes), an_operator(asked, plans_obeyed=True):
            await plan.says("Settled", "True")


async def test_one_process_plans_several_deployments(asked, a_cluster, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    other = planned_deployment("prefill", "decode")
    other["metadata"]["name"] = "two"
    asked.apply(other).expect(201)
    plans = SeenPlan(asked, **LOAD), SeenPlan(asked, "two", deployment="two", **LOAD)
    with a_planner(asked, tmp_path) as (_, endpoints):
        await plans[0].says("Settled", "True")
        await plans[1].says("NoDemandSignal", "True")  # its routers demand another secret
        place = ["--planner", endpoints["control"]]

        shown = run_fleet("plan", "--json", "--deployment", f"{asked.namespace}/two", *place)
        assert {each["name"] for each in json.loads(shown.stdout)["pools"]} == {"prefill", "decode"}
        nameless = run_fleet("plan", *place)
        assert nameless.returncode == 1
        assert f"name one; planned deployments: {asked.namespace}/dd, {asked.namespace}/two" in nameless.stderr
        unknown = run_fleet("plan", "--deployment", "nowhere/none", *place)
        assert "'nowhere/none' is not planned" in unknown.stderr


async def test_next_leader_continues_a_killed_leaders_plan(asked, a_cluster, nodes, tmp_path):
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    with a_planner(asked, tmp_path, "first") as (first, _):
        await plan.says("Settled", "True")
        with a_planner(asked, tmp_path, "second"):
            nodes.working = False  # the plan stays under way
            a_cluster.running = {"both-0": 11}
            await plan.says("Settled", "False", "PlanUnderWay")
            made = plan.status()["plans"][0]["id"]
            first.send_signal(signal.SIGKILL)
            first.wait(60)
            await until(lambda: plan.status()["planner"] == "second")
            await plan.says("Settled", "False", "PlanUnderWay")
            assert plan.status()["plans"][0]["id"] == made, "it made no plan of its own"
            nodes.working = True
            await plan.says("Settled", "True")
            assert (plan.status()["plans"][0]["id"], plan.status()["plans"][0]["state"]) == (made, "settled")
            assert asked.replicas() == {"both": 3}
            [scaler] = [
                each["spec"]["replicas"] for each in asked.children("rolescalers", "fleet-serving.io/v1alpha1").values()
            ]
            assert scaler == 3


async def test_operator_resets_conditions_of_a_removed_planner(asked, nodes, tmp_path):
    make_secret(asked)
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD)
    async with a_demand_router(asked, nodes):
        async with an_operator(asked, plans_obeyed=True):
            with a_planner(asked, tmp_path):
                await plan.says("Settled", "True")
        async with an_operator(asked):
            await plan.says("Settled", "False", "NoPlanner")
            await plan.says("Pinned", "Unknown", "NoPlanner")
            status = plan.status()
            assert (status["planner"], status["recommendations"]) == ("none", [])
            writes = len(status_writes(asked))
            plan.change(mode="Shadow")
            await plan.says("Settled", "False", "NoPlanner")
            assert len(status_writes(asked)) == writes + 1
        async with an_operator(asked, identity="next", plans_obeyed=True):
            with a_planner(asked, tmp_path):
                await plan.says("Settled", "True")
                await plan.says("Pinned", "False", "Clear")


def status_writes(asked):
    return [
        each for each in asked.server.requests() if (each["resource"], each["verb"]) == ("servingplans/status", "patch")
    ]


async def test_killed_leaders_leave_pools_within_their_bounds(asked, a_cluster, tmp_path):
    """The load changes all the time, and the leader is killed at random moments.

    FLEET_PLANNER_KILLS sets another number of kills.
    """
    seed, kills = int(os.environ.get("FLEET_TEST_SEED", "7")), int(os.environ.get("FLEET_PLANNER_KILLS", "3"))
    print(f"seed {seed}, {kills} kills")
    draw, written = random.Random(seed), set()
    asked.apply(planned_deployment()).expect(201)
    plan = SeenPlan(asked, **LOAD, roles=[{"role": "both", "least": 1, "most": 4}])
    lease = {"namespace": asked.namespace, "duration_seconds": 4, "renew_within_seconds": 3, "retry_seconds": 0.1}

    async def change():
        while True:
            a_cluster.running = {"both-0": draw.choice([0, 6, 11, 40])}
            await pace(draw.uniform(0.5, 2.5), "a load lasts for a drawn time")

    async def look():
        while True:
            scalers = asked.children("rolescalers", "fleet-serving.io/v1alpha1").values()
            written.update(each["spec"]["replicas"] for each in scalers)
            await pace(0.05, "the period of the looks")

    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(each) for each in (change(), look())]
        with contextlib.ExitStack() as held:
            running = {}
            for number in range(2):
                running[f"p{number}"] = held.enter_context(a_planner(asked, tmp_path, f"p{number}", lease=lease))[0]
            for number in range(2, 2 + kills):
                leader = await until(lambda: (name := plan.status().get("planner")) in running and name)
                await pace(draw.uniform(0.0, 2.0), "a drawn moment of a plan")
                running[leader].kill()
                running.pop(leader).wait(60)
                running[f"p{number}"] = held.enter_context(a_planner(asked, tmp_path, f"p{number}", lease=lease))[0]
            others[0].cancel()
            a_cluster.running = {"both-0": 11}
            await until(lambda: plan.status().get("planner") in running)
            await until(lambda: asked.replicas() == {"both": 3})
            await plan.says("Settled", "True")
        others[1].cancel()
    assert written <= {1, 2, 3, 4}
    assert len(written) > 1, "the load changed nothing, so nothing was tried"


async def test_control_port_over_tcp_demands_its_secret(asked, tmp_path):
    make_secret(asked)
    asked.apply(planned_deployment()).expect(201)
    SeenPlan(asked, **LOAD)
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name}: the secret of a planner's control port\n")
    port = {"control_listen": "127.0.0.1:0", "control_credentials": {"secret_file": f"{tmp_path}/right"}}
    with a_planner(asked, tmp_path, **port) as (_, endpoints):

        def shown(secret):
            place = ["--planner", endpoints["control"], "--planner-secret-file", f"{tmp_path}/{secret}"]
            return run_fleet("plan", "--json", *place)

        assert (
            json.loads((await until(lambda: (done := shown("right")).returncode == 0 and done)).stdout)["model"]
            == "tiny"
        )
        refused = shown("wrong")
        assert (refused.returncode, refused.stdout) == (1, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kubeconfig": "/nowhere"}, "kubeconfig: /nowhere: No such file"),
        ({"control_listen": "127.0.0.1:0"}, "control_listen: whoever reaches 127.0.0.1:0 could read the plans"),
        ({"lease": {"retry_seconds": 20}}, "lease: retry_seconds: must be shorter than renew_within_seconds"),
        ({"stale_seconds": 0}, "stale_seconds"),
    ],
)
def test_impossible_planner_settings_are_refused(tmp_path, changes, words):
    settings = {"identity": "a", "lease": {"namespace": "default"}, "kubeconfig": "/nowhere", "listen": "127.0.0.1:0"}
    process, _ = start_service(
        "kube-planner", settings | changes, tmp_path / "settings.json", stderr=subprocess.PIPE, text=True
    )
    _, log = process.communicate(timeout=60)

    assert process.returncode == 3, log
    assert words in log
    assert log.count("\n") == 1


ACCOUNT = "system:serviceaccount:default:fleet-planner"
WANTED = 'fleet_planner_wanted_replicas{deployment="dd",deployment_namespace="default",model="tiny",pool="both"} 2.0'


def grant(api):
    """Create a Role with exactly the rules that `operators.rbac` lists for the planner."""
    rules = [
        {"apiGroups": [each.group], "resources": [each.resource], "verbs": list(each.verbs)}
        | ({"resourceNames": [name.replace(LEASE_NAME, "fleet-planner") for name in each.names]} if each.names else {})
        for each in PLANNER_ACCESS
    ]
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    subject = {"kind": "ServiceAccount", "name": "fleet-planner", "namespace": "default"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "planner"}
    api.post(f"{rbac}/roles", {"metadata": {"name": "planner"}, "rules": rules}).expect(201)
    binding = {"metadata": {"name": "planner"}, "roleRef": reference, "subjects": [subject]}
    api.post(f"{rbac}/rolebindings", binding).expect(201)


async def test_planner_process_uses_exactly_the_listed_rights(tmp_path):
    nodes = Nodes()
    authority = Authority(tmp_path, "authority")
    labels = {"its": "own"}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "planner", "image": "operator:1"}]}}
    own = {
        "metadata": {"name": "fleet-planner", "labels": labels},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pods},
    }
    with (
        an_api_server(with_controllers=True, beside=nodes.run, authority=authority) as server,
        Api(server.url, authority=authority.file) as api,
    ):
        install(server)
        grant(api)
        (tmp_path / "admin").mkdir()
        asked = AskedRouters(server, api, "default", tmp_path / "admin")
        make_secret(asked)
        api.post(asked.path("deployments", "", "apps/v1"), own).expect(201)
        limited = AskedRouters(server, api, "default", tmp_path / "admin")
        limited.kubeconfig = str(server.kubeconfig(tmp_path, token=ACCOUNT))
        lease = {"name": "fleet-planner", "namespace": "default", "owner": "fleet-planner", **QUICK}
        async with a_demand_router(asked, nodes) as router, an_operator(asked, plans_obeyed=True):
            asked.apply(planned_deployment()).expect(201)
            plan = SeenPlan(asked, **LOAD)
            proof = {**authority.issue("planner"), "authority": authority.file}
            with a_planner(limited, tmp_path, lease=lease, control_credentials=proof) as (process, endpoints):
                await plan.says("Settled", "True")
                router.running = {"both-0": 7}
                await until(lambda: asked.replicas() == {"both": 2})
                url = f"http://{endpoints['http']}"
                await until(lambda: WANTED in httpx.get(f"{url}/metrics", trust_env=False).text)
                found = {path: httpx.get(f"{url}/{path}", trust_env=False) for path in ("healthz", "readyz", "metrics")}
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            held = api.get(asked.path("leases", "fleet-planner", "coordination.k8s.io/v1")).expect(200)
        requests = [each for each in server.requests() if each["user"] == ACCOUNT]
    assert [each.status_code for each in found.values()] == [200, 200, 200]
    assert "fleet_planner_process_leads 1.0" in found["metrics"].text
    assert differences(found["metrics"].text, CLUSTER_PLANNER) == []
    assert 'fleet_tls_certificate_end_timestamp_seconds{setting="control_credentials"}' in found["metrics"].text
    assert held["spec"]["holderIdentity"] == "", "the Lease was given back"
    assert [each for each in requests if each["code"] == 403] == []
    used = {(each["group"], each["resource"], each["verb"]) for each in requests}
    granted = {(each.group, each.resource, verb) for each in PLANNER_ACCESS for verb in each.verbs}
    assert used == granted
