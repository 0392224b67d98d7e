"""Custom metrics API for tests, and an autoscaler that queries it.

The API answers by the rules of prometheus-adapter and a real Prometheus. The autoscaler decides as the documentation of
HorizontalPodAutoscalers says (https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/).
"""

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from tests.support.kube.clients import Api

Document = dict[str, Any]
TOLERANCE = 0.1
PATH = re.compile(r"/apis/custom\.metrics\.k8s\.io/v1beta1/namespaces/(?P<namespace>[^/]+)/pods/\*/(?P<metric>[^/]+)")


class UnknownMetric(Exception):
    """Raised if no rule names the metric, or if Prometheus has no series of the metric."""


class AdapterRules:
    """Evaluates the rules of prometheus-adapter on a Prometheus server."""

    def __init__(self, rules: list[Document], prometheus: str) -> None:
        self._rules = {each["name"]["as"]: each for each in rules}
        self._prometheus = prometheus

    def of_pods(self, metric: str, namespace: str, pods: list[str]) -> dict[str, float]:
        """Return the value of the metric by pod, without pods that have none.

        Raises:
            UnknownMetric: The adapter would not offer the metric.
        """
        rule = self._rules.get(metric)
        if rule is None or not self._asked("series", {"match[]": rule["seriesQuery"]}):
            raise UnknownMetric(metric)
        labels = {resource["resource"]: label for label, resource in rule["resources"]["overrides"].items()}
        matchers = f'{labels["namespace"]}="{namespace}",{labels["pod"]}=~"{"|".join(pods)}"'
        series = re.split(r"[{]", rule["seriesQuery"])[0]
        query = rule["metricsQuery"]
        for name, text in (("Series", series), ("LabelMatchers", matchers), ("GroupBy", labels["pod"])):
            query = query.replace(f"<<.{name}>>", text)
        found = self._asked("query", {"query": query})["result"]
        return {each["metric"][labels["pod"]]: float(each["value"][1]) for each in found}

    def value(self, query: str) -> float:
        """Return the only value that a Prometheus query gives; KEDA scales by such a value."""
        [found] = self._asked("query", {"query": query})["result"]
        return float(found["value"][1])

    def _asked(self, what: str, parameters: Document) -> Any:
        answer = httpx.get(f"{self._prometheus}/api/v1/{what}", params=parameters, trust_env=False)
        return answer.raise_for_status().json()["data"]


@contextmanager
def a_custom_metrics_api(rules: AdapterRules, api: Api) -> Iterator[str]:
    """Serve `custom.metrics.k8s.io/v1beta1` for pods on a port of its own; yield its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            found = PATH.fullmatch(asked.path)
            [selector] = parse_qs(asked.query).get("labelSelector", [""])
            code, answer = 404, {"kind": "Status", "reason": "NotFound"}
            if found is not None:
                namespace, metric = found["namespace"], found["metric"]
                pods = api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector).expect(200)["items"]
                try:
                    values = rules.of_pods(metric, namespace, [each["metadata"]["name"] for each in pods])
                    code, answer = 200, {"kind": "MetricValueList", "items": [*map(_item, *_columns(values))]}
                except UnknownMetric:
                    pass
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing about requests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _columns(values: dict[str, float]) -> tuple[list[str], list[float]]:
    return list(values), list(values.values())


def _item(pod: str, value: float) -> Document:
    """Return the metric value of one pod as the API writes it; the value is a quantity in thousandths."""
    return {"describedObject": {"kind": "Pod", "name": pod}, "value": f"{round(value * 1000)}m"}


class Autoscaler:
    """Scales by HorizontalPodAutoscalers with one metric of pods; it has no stabilisation window."""

    def __init__(self, api: Api, metrics: str) -> None:
        self._api = api
        self._metrics = metrics

    def step(self, hpa: Document) -> int:
        """Scale the target of an HPA once, and return the number of replicas."""
        namespace, spec = hpa["metadata"]["namespace"], hpa["spec"]
        target, [metric] = spec["scaleTargetRef"], spec["metrics"]
        path = f"/apis/{target['apiVersion']}/namespaces/{namespace}/{target['kind'].lower()}s/{target['name']}/scale"
        scale = self._api.get(path).expect(200)
        now, selector = scale["spec"]["replicas"], scale["status"]["selector"]
        wanted = self._wanted(namespace, metric["pods"], selector, now)
        wanted = min(max(wanted, spec["minReplicas"]), spec["maxReplicas"])
        if wanted != now:
            change = {"spec": {"replicas": wanted}}
            self._api.patch(path, "merge", change, fieldManager="kube-controller-manager").expect(200)
        return wanted

    def _wanted(self, namespace: str, metric: Document, selector: str, now: int) -> int:
        root = f"{self._metrics}/apis/custom.metrics.k8s.io/v1beta1/namespaces/{namespace}/pods/*"
        answer = httpx.get(f"{root}/{metric['metric']['name']}", params={"labelSelector": selector}, trust_env=False)
        answer.raise_for_status()
        values = [int(each["value"].removesuffix("m")) / 1000 for each in answer.json()["items"]]
        goal = float(metric["target"]["averageValue"])
        if not values:
            return now
        pods = self._api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector).expect(200)["items"]
        ratio = sum(values) / len(values) / goal
        # A pod without a value counts as idle if the other pods are above the goal, and otherwise as exactly at the goal.
        missing = len(pods) - len(values)
        filled = values + [0.0 if ratio > 1 else goal] * missing
        ratio = sum(filled) / len(filled) / goal
        return now if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * len(filled))
