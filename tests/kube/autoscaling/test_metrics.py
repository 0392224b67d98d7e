"""Autoscalers by metrics: the rules and objects in deploy/autoscaling, on a real Prometheus and a custom metrics API."""

from contextlib import closing

import pytest
import yaml

pytest.importorskip("kubernetes.aio", reason="the extra `kubernetes` is not installed")

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from operators.chart.metric_catalogue import ROUTER, by_name
from tests.support.kube.documentation import DEPLOY
from tests.support.kube.metrics_api import AdapterRules, Autoscaler, UnknownMetric, a_custom_metrics_api
from tests.support.kube.operator import an_operator
from tests.support.servers.prometheus import a_prometheus_server
from tests.support.waiting import until

AUTOSCALING = DEPLOY / "autoscaling"
MODEL = "llama-3.3-70b"
RUNNING, TOKENS = "fleet_worker_running", "fleet_worker_booked_prefill_tokens"
RULES = yaml.safe_load((AUTOSCALING / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
HPAS = {each["metadata"]["name"]: each for each in yaml.safe_load_all((AUTOSCALING / "hpa.yaml").read_text())}
KEDA = yaml.safe_load((AUTOSCALING / "keda.yaml").read_text())
SAMPLE = yaml.safe_load((DEPLOY / "samples" / "h100-llama-70b.yaml").read_text())


class RouterMetrics:
    """Serves the metrics page of one router; the test sets the metrics of its workers."""

    def __init__(self):
        registry, known = CollectorRegistry(), by_name(ROUTER)
        self._gauges = {
            name: Gauge(name, known[name].meaning, sorted(known[name].labels), registry=registry)
            for name in (RUNNING, TOKENS)
        }
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)

    @property
    def target(self):
        return f"127.0.0.1:{self._server.server_port}"

    def report(self, metric, role, values):
        """Report the metric of these workers only."""
        self._gauges[metric].clear()
        self.report_too(metric, role, values)

    def report_too(self, metric, role, values):
        """Report the metric of these workers too."""
        for worker, value in values.items():
            self._gauges[metric].labels(worker=worker, role=role, model=MODEL).set(value)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def namespaced(namespace):
    """Return the scrape setting that adds a pod's namespace to its samples, as a PodMonitor does."""
    return [{"target_label": "namespace", "replacement": namespace}]


@pytest.fixture
def routers():
    with closing(RouterMetrics()) as one, closing(RouterMetrics()) as two:
        yield one, two


@pytest.fixture
def scraped(routers, asked):
    """Run a Prometheus server that scrapes both routers; yield the rules of the adapter on it."""
    with a_prometheus_server([each.target for each in routers], namespaced(asked.namespace)) as server:
        yield AdapterRules(RULES, server.url)


def workers_of(asked, role):
    return [name for name in asked.workers() if f"-{role}-" in name]


@pytest.mark.parametrize(
    ("role", "metric", "each", "busy", "idle"),
    [("decode", RUNNING, (40, 40), 6, 1), ("prefill", TOKENS, (20_000, 12_768), 4, 1)],
)
async def test_hpa_scales_a_role_by_the_metric_of_its_workers(asked, scraped, routers, role, metric, each, busy, idle):
    """Both routers report 40 running requests for each worker, and each router reports some of its waiting tokens."""
    name = f"llama-70b-{role}"
    hpa = asked.api.post(asked.path("horizontalpodautoscalers", "", "autoscaling/v2"), HPAS[name]).expect(201)
    with a_custom_metrics_api(scraped, asked.api) as url:
        autoscaler = Autoscaler(asked.api, url)

        async def settles_at(values, replicas):
            """Report the values of all workers until the autoscaler and the operator change nothing more."""

            def step():
                for router, value in zip(routers, values, strict=True):
                    router.report(metric, role, dict.fromkeys(workers_of(asked, role), value))
                at = autoscaler.step(hpa)
                return at == replicas == asked.replicas()[role] == len(workers_of(asked, role)) and asked.ready(
                    "llama-70b"
                )

            await until(step, 120)

        async with an_operator(asked):
            asked.apply(SAMPLE).expect(201)
            await until(lambda: asked.ready("llama-70b"))
            await until(lambda: scraped_once(scraped, asked, routers, metric, role))
            await settles_at(each, busy)
            await settles_at((0, 0), idle)


def scraped_once(rules, asked, routers, metric, role):
    """Return whether Prometheus knows the metric."""
    for router in routers:
        router.report(metric, role, dict.fromkeys(workers_of(asked, role), 1))
    [name] = [each["name"]["as"] for each in RULES if each["seriesQuery"].startswith(metric)]
    try:
        return rules.of_pods(name, asked.namespace, workers_of(asked, role))
    except UnknownMetric:
        return {}


async def test_rules_count_each_worker_once_and_each_routers_tokens(asked, scraped, routers):
    for router, tokens in zip(routers, (3000, 500), strict=True):
        router.report(RUNNING, "decode", {"d-0": 7, "d-1": 9})
        router.report(TOKENS, "prefill", {"p-0": tokens})

    def found(metric, pods, namespace=asked.namespace):
        try:
            return scraped.of_pods(metric, namespace, pods)
        except UnknownMetric:
            return {}

    await until(lambda: found("fleet_worker_running", ["d-0", "d-1"]) == {"d-0": 7, "d-1": 9})
    await until(lambda: found("fleet_prompt_tokens_waiting", ["p-0"]) == {"p-0": 3500})
    assert found("fleet_worker_running", ["d-1"]) == {"d-1": 9}, "only of the pods that are asked for"
    assert found("fleet_worker_running", ["d-0"], "another") == {}, "only of the namespace"
    with pytest.raises(UnknownMetric):
        scraped.of_pods("absent", asked.namespace, ["d-0"])


async def test_query_of_keda_is_the_sum_of_the_workers(asked, scraped, routers):
    [trigger] = KEDA["spec"]["triggers"]
    query = trigger["metadata"]["query"].replace('namespace="serving"', f'namespace="{asked.namespace}"')
    for router in routers:
        router.report(RUNNING, "decode", {"d-0": 40, "d-1": 20})
    routers[0].report_too(RUNNING, "prefill", {"p-0": 99})

    def value():
        try:
            return scraped.value(query)
        except ValueError:
            return None

    await until(lambda: value() == 60)


async def test_autoscalers_name_roles_that_can_be_scaled(asked):
    async with an_operator(asked):
        asked.apply(SAMPLE).expect(201)
        await until(lambda: asked.ready("llama-70b"))
        for scaler in (*HPAS.values(), KEDA):
            target = scaler["spec"]["scaleTargetRef"]
            scale = asked.api.get(asked.path("rolescalers", f"{target['name']}/scale")).expect(200)
            assert (target["apiVersion"], target["kind"]) == ("fleet-serving.io/v1alpha1", "RoleScaler")
            assert scale["status"]["selector"]
    roles = {f"llama-70b-{each['name']}": each for each in SAMPLE["spec"]["roles"]}
    for name, hpa in HPAS.items():
        assert hpa["spec"]["maxReplicas"] <= roles[name]["scaling"]["most"], "the operator would allow no more"
        assert hpa["spec"]["minReplicas"] >= roles[name]["scaling"]["least"]
    assert KEDA["spec"]["maxReplicaCount"] <= roles[KEDA["metadata"]["name"]]["scaling"]["most"]
