"""GitOps: another server-side-apply manager owns the specification, autoscalers own replicas, tools read the health."""

import pytest
import yaml

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from cel_expr_python import cel
from lupa import lua51  # the version of Argo CD's interpreter

from tests.support.kube.documentation import DEPLOY
from tests.support.kube.operator import an_operator
from tests.support.waiting import until

GITOPS = DEPLOY / "gitops"
GIT, SCALER = "kustomize-controller", "keda-operator"
API = "fleet-serving.io/v1alpha1"


def document(name):
    return yaml.safe_load((GITOPS / name).read_text())


def managers(item, field, *path):
    """Return the managers that own a field of an object."""
    found = set()
    for each in item["metadata"]["managedFields"]:
        node = each["fieldsV1"]
        for part in (*path, field):
            node = node.get(f"f:{part}") if node is not None else None
        if node is not None:
            found.add(each["manager"])
    return found


class Git:
    """Applies manifests without force, as Argo CD and Flux apply those from Git."""

    def __init__(self, asked):
        self._asked = asked

    def apply(self, manifest, **query):
        plural = {"DisaggDeployment": "disaggdeployments", "RoleScaler": "rolescalers"}[manifest["kind"]]
        path = self._asked.path(plural, manifest["metadata"]["name"])
        return self._asked.api.apply(path, manifest, GIT, **query)


def scale(asked, replicas):
    path = asked.path("rolescalers", "llama-decode/scale")
    asked.api.patch(path, "merge", {"spec": {"replicas": replicas}}, fieldManager=SCALER).expect(200)


def scaler(asked):
    return asked.api.get(asked.path("rolescalers", "llama-decode")).expect(200)


async def test_git_never_conflicts_with_operator_or_autoscaler(asked):
    git, manifest = Git(asked), document("deployment.yaml")
    async with an_operator(asked):
        git.apply(manifest).expect(201)
        await until(lambda: asked.ready("llama"))
        for replicas in (5, 3):
            scale(asked, replicas)
            await until(lambda replicas=replicas: asked.replicas()["decode"] == replicas and asked.ready("llama"))
            before = asked.deployment("llama")

            again = git.apply(manifest).expect(200)

            assert again["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"], "nothing has drifted"
            assert scaler(asked)["spec"]["replicas"] == replicas

    deployment = asked.deployment("llama")
    specified = {each["manager"] for each in deployment["metadata"]["managedFields"] if "f:spec" in each["fieldsV1"]}
    assert specified == {GIT}, "the operator writes the status alone"
    assert managers(scaler(asked), "replicas", "spec") == {SCALER}


async def test_dry_run_of_git_shows_no_difference(asked):
    git, manifest = Git(asked), document("deployment.yaml")
    async with an_operator(asked):
        git.apply(manifest).expect(201)
        await until(lambda: asked.ready("llama"))

        planned = git.apply(manifest, dryRun="All").expect(200)

    assert planned["spec"] == asked.deployment("llama")["spec"]


async def test_scaler_in_git_without_replicas_leaves_the_number_alone(asked):
    git = Git(asked)
    async with an_operator(asked):
        git.apply(document("scaler.yaml")).expect(201)
        git.apply(document("deployment.yaml")).expect(201)
        await until(lambda: asked.ready("llama"))
        scale(asked, 4)
        await until(lambda: asked.replicas()["decode"] == 4)

        git.apply(document("scaler.yaml")).expect(200)

        assert scaler(asked)["spec"]["replicas"] == 4
        assert managers(scaler(asked), "replicas", "spec") == {SCALER}
        names = [each["metadata"]["name"] for each in asked.api.get(asked.path("rolescalers")).expect(200)["items"]]
        assert names == ["llama-decode"], "the operator made no second one"


async def test_number_in_git_conflicts_with_the_autoscaler_by_name(asked):
    git = Git(asked)
    async with an_operator(asked):
        git.apply(document("deployment.yaml")).expect(201)
        await until(lambda: asked.ready("llama"))
        scale(asked, 4)
        numbered = document("scaler.yaml")
        numbered["spec"]["replicas"] = 2

        refused = git.apply(numbered).refused(409, "Conflict")

        assert f'conflict with "{SCALER}"' in refused["message"]
        assert ".spec.replicas" in str(refused["details"])
        assert scaler(asked)["spec"]["replicas"] == 4


async def test_replicas_of_a_static_role_belong_to_git(asked):
    git, manifest = Git(asked), document("deployment.yaml")
    async with an_operator(asked):
        git.apply(manifest).expect(201)
        await until(lambda: asked.ready("llama"))
        manifest["spec"]["roles"][1]["replicas"] = 2
        manifest["spec"]["roles"][2]["replicas"] = 7  # of the role that an autoscaler scales
        git.apply(manifest).expect(200)
        await until(lambda: asked.replicas() == {"prefill": 2, "decode": 2} and asked.ready("llama"))


# Health


class Health:
    """Evaluates the health of objects as Argo CD and Flux do, by the expressions in deploy/gitops."""

    def __init__(self):
        self._lua = document("argocd/health.yaml")["data"]
        variables = dict.fromkeys(("metadata", "spec", "status"), cel.Type.DYN)
        self._environment = cel.NewEnv(variables=variables)
        self._expressions = {
            each["kind"]: each for each in document("flux/kustomization.yaml")["spec"]["healthCheckExprs"]
        }

    def argo(self, item):
        """Return the health status as in Argo CD, whose interpreter is Lua 5.1 with the basic functions."""
        script = self._lua[f"resource.customizations.health.fleet-serving.io_{item['kind']}"]
        runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)
        check = runtime.eval(f"function(obj)\n{script}\nend")
        answer = check(runtime.table_from(item, recursive=True))
        assert isinstance(answer["message"], str)
        return answer["status"]

    def flux(self, item):
        told = self._expressions[item["kind"]]
        known = {name: item.get(name) for name in ("metadata", "spec", "status") if name in item}
        for verdict in ("failed", "current"):
            if verdict in told:
                outcome = self._environment.compile(told[verdict]).eval(data=known)
                if outcome.type() != cel.Type.ERROR and outcome.value() is True:
                    return verdict
        return "in progress"

    def of(self, item):
        return self.argo(item), self.flux(item)


@pytest.fixture
def health():
    return Health()


async def test_tools_read_the_health_of_a_deployment(asked, nodes, health):
    def said():
        return health.of(asked.deployment("llama"))

    git, manifest = Git(asked), document("deployment.yaml")
    git.apply(manifest).expect(201)
    assert said() == ("Progressing", "in progress"), "there is no status yet"
    async with an_operator(asked):
        await until(lambda: asked.ready("llama"))
        assert said() == ("Healthy", "current")

        nodes.working = False
        manifest["spec"]["image"] = "worker:next"
        git.apply(manifest).expect(200)
        assert said() == ("Progressing", "in progress"), "also before the operator has seen the change"
        await until(lambda: asked.condition("Ready", "llama")["reason"] == "RollingOut")
        assert said() == ("Progressing", "in progress")

        nodes.working, nodes.broken_images = True, frozenset({"worker:next"})
        await until(lambda: asked.condition("Degraded", "llama")["status"] == "True", 60)
        assert said() == ("Degraded", "failed")
        nodes.broken_images = frozenset()

        manifest["spec"]["suspend"] = True
        git.apply(manifest).expect(200)
        await until(
            lambda: asked.status("llama")["observedGeneration"] == asked.deployment("llama")["metadata"]["generation"]
        )
        assert health.argo(asked.deployment("llama")) == "Suspended"


async def test_tools_read_the_health_of_the_other_kinds(asked, health):
    def item(plural, name):
        found = asked.api.get(asked.path(plural, name)).expect(200)
        return found if "conditions" in found.get("status", {}) else None

    async with an_operator(asked):
        Git(asked).apply(document("deployment.yaml")).expect(201)
        target = {"deployment": "llama", "role": "absent"}
        for plural, name, spec in (
            ("rolescalers", "stray", {"target": target}),
            ("servingplans", "lost", {"deployment": "absent"}),
            ("servingplans", "plan", {"deployment": "llama"}),
            ("servingrequests", "fits", a_request(32)),
            ("servingrequests", "tight", a_request(1)),
        ):
            asked.api.post(asked.path(plural), {"metadata": {"name": name}, "spec": spec}).expect(201)
        await until(lambda: asked.ready("llama"))
        verdicts = {
            (plural, name): health.of(await until(lambda plural=plural, name=name: item(plural, name)))
            for plural, name in (
                ("rolescalers", "llama-decode"),
                ("rolescalers", "stray"),
                ("servingplans", "lost"),
                ("servingplans", "plan"),
                ("servingrequests", "fits"),
                ("servingrequests", "tight"),
            )
        }

    assert verdicts == {
        ("rolescalers", "llama-decode"): ("Healthy", "current"),
        ("rolescalers", "stray"): ("Degraded", "failed"),
        ("servingplans", "lost"): ("Degraded", "in progress"),
        ("servingplans", "plan"): ("Healthy", "current"),
        ("servingrequests", "fits"): ("Healthy", "current"),
        ("servingrequests", "tight"): ("Degraded", "failed"),
    }


def a_request(gpus):
    return {
        "model": {"name": "llama", "uri": "nvidia/Llama-3.3-70B-Instruct-FP8"},
        "hardware": {"gpu": "h100", "count": gpus, "perNode": min(gpus, 8)},
        "workload": {"promptTokens": 2048, "answerTokens": 256, "requestsPerMinute": 600},
    }


def test_argo_ignores_only_what_autoscalers_own():
    spec = document("argocd/application.yaml")["spec"]

    assert {"ServerSideApply=true", "RespectIgnoreDifferences=true"} <= set(spec["syncPolicy"]["syncOptions"])
    assert spec["ignoreDifferences"] == [
        {"group": API.partition("/")[0], "kind": "RoleScaler", "jsonPointers": ["/spec/replicas"]}
    ]
