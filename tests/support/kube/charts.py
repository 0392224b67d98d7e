"""Helm values for testing Fleet's chart, and functions that render the chart with Helm 3 and Helm 4."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tests.support.kube.tools import Command, helm_3, helm_4, tools_folder

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "fleet"
GOLDEN = Path(__file__).parents[2] / "kube" / "chart" / "golden"
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
MONITORS = tuple(f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in ("ServiceMonitor", "PodMonitor"))

Document = dict[str, Any]

VALUES: Mapping[str, Document] = {
    "default": {},
    "bare": {
        "crds": {"install": False},
        "routers": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "monitoring": {"dashboards": {"enabled": False}},
        "user": 0,
    },
    "everything": {
        "nameOverride": "llm",
        "labels": {"team": "inference"},
        "crds": {"keep": False},
        "images": {
            "registry": "registry.example.org/team/",
            "pullSecrets": ["pull"],
            "router": {"tag": "1.2.3"},
            "operator": {"digest": f"sha256:{'0' * 64}"},
        },
        "routers": {
            "processes": 4,
            "kserve": True,
            "modelsClaim": "models",
            "settings": {
                "models": {"llama": "/models/llama"},
                "max_queued": 1_000_000,
                "endpoint_picker": {"fallbacks": 2},
            },
            "secrets": [
                {"setting": "tenant_secret", "name": "fleet", "key": "tenant-secret"},
                {"setting": "tenants", "name": "fleet", "key": "tenants.json"},
            ],
            "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
            "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.org", "tlsSecret": "llm-tls"},
            "autoscaling": {"enabled": True},
            "serviceAccount": {"annotations": {"iam": "reader"}},
            "pods": {
                "labels": {"cost": "shared"},
                "annotations": {"sidecar": "no"},
                "resources": {"requests": {"cpu": "4"}},
                "nodeSelector": {"pool": "cpu"},
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "affinity": {"podAntiAffinity": {}},
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
                ],
                "priorityClassName": "high",
            },
        },
        "operator": {
            "scope": "Cluster",
            "settings": {"at_once": 16, "lease": {"duration_seconds": 30}, "probe": {"insecure": True}},
            "secrets": [{"setting": "probe.keys", "name": "fleet-probes", "key": "keys.json"}],
        },
        "planner": {
            "enabled": True,
            "settings": {"stale_seconds": 10.0, "lease": {"duration_seconds": 30}},
            "controlSecret": "fleet-planner",
        },
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"team": "watch"}}}],
            "egress": {
                "restricted": True,
                "dns": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
                "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
                "extra": {"routers": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 8443}]}]},
            },
        },
        "tls": {"source": "CertManager", "issuer": {"name": "internal", "kind": "ClusterIssuer"}},
        "discovery": {"source": "Etcd"},
        "etcd": {"install": True, "replicas": 3, "storageClass": "fast"},
        "redis": {"install": True},
        "test": {"model": "llama", "apiKey": {"name": "fleet-test", "insecure": True}},
    },
    "brought": {
        "discovery": {"source": "Kubernetes", "cluster": "llama"},
        "tls": {"source": "Secret", "secret": "fleet-tls"},
        "routers": {
            "serviceAccount": {"create": False, "name": "existing"},
            "settings": {
                "tenants_redis": "redis://redis.data:6380/0",
                "openai_workers": [
                    {"worker_id": "gpu-0", "url": "http://10.0.0.11:8000", "model": "llama"},
                    {"worker_id": "hosted", "url": "https://llm.example.org/api", "model": "other"},
                ],
            },
        },
        "networkPolicy": {"egress": {"restricted": True}},
        "operator": {"createRoles": False, "serviceAccount": {"create": False}},
        "planner": {"enabled": True, "replicas": 3},
    },
}


@functools.cache
def _command() -> Command:
    """Return the command Helm 3 with a kubeconfig that does not exist, so that it reaches no cluster."""
    return Command(helm_3(tools_folder()), Path("/nonexistent"), Path("/nonexistent"))


def helm_3_render(values: Document, *options: str, chart: Path = CHART, code: int = 0) -> str:
    text = json.dumps(values)
    arguments = ("template", "fleet", str(chart), "--namespace", "serving", "--values", "-", *options)
    return _command()(*arguments, stdin=text, code=code)


def helm_3_lint(values: Document, *options: str) -> str:
    return _command()("lint", str(CHART), "--strict", "--values", "-", *options, stdin=json.dumps(values))


@functools.cache
def loaded_chart() -> Any:
    return helm_4(tools_folder()).Chart.load(CHART)


def helm_4_render(values: Document) -> str:
    rendered = loaded_chart().render(values, name="fleet", namespace="serving")
    return "\n---\n".join(text for path, text in sorted(rendered.items()) if not path.endswith("NOTES.txt"))


def helm_4_lint(values: Document) -> Document:
    return helm_4(tools_folder()).lint(CHART, values, strict=True)


def documents(text: str) -> list[Document]:
    return [each for each in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if each]


def by_name(found: list[Document]) -> dict[tuple[str, str], Document]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@functools.cache
def _rendered(name: str, *options: str) -> bytes:
    return msgspec.json.encode(documents(helm_3_render(VALUES[name], *options)))


def rendered(name: str, *options: str) -> list[Document]:
    """Render the chart with Helm 3 and the values of this name, and return the documents."""
    return msgspec.json.decode(_rendered(name, *options))


def pods(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield by name the specification of every pod that the documents define, directly or as a controller's template."""
    for each in found:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield name, each["spec"]
        elif "template" in each.get("spec", {}) and "containers" in each["spec"]["template"].get("spec", {}):
            yield name, each["spec"]["template"]["spec"]
