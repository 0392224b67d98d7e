"""Helm 3 and Helm 4 on the API server: install, upgrade, rollback and uninstall of a small chart with a custom kind."""

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.kube.tools import Command, helm_3, helm_4, tools_folder
from tests.support.kube.widgets import API, DEFINITION
from tests.support.waiting import eventually

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .Release.Name }}
  labels: {app: {{ .Release.Name }}}
spec:
  replicas: {{ .Values.replicas }}
  selector: {matchLabels: {app: {{ .Release.Name }}}}
  template:
    metadata: {labels: {app: {{ .Release.Name }}}}
    spec:
      containers:
        - name: main
          image: example.invalid/web:1
          ports: [{containerPort: 80}]
{{- if .Values.service }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ .Release.Name }}
spec:
  selector: {app: {{ .Release.Name }}}
  ports: [{port: 80}]
{{- end }}
"""
WIDGET = """
apiVersion: behaviours.fleet.dev/v1
kind: Widget
metadata:
  name: {{ .Release.Name }}
spec:
  model: tiny
  replicas: {{ .Values.replicas }}
"""


@pytest.fixture
def chart(tmp_path) -> Path:
    folder = tmp_path / "toy"
    (folder / "templates").mkdir(parents=True)
    (folder / "crds").mkdir()
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: toy, version: 1.0.0}\n")
    (folder / "values.yaml").write_text("replicas: 1\nservice: true\n")
    (folder / "templates" / "deployment.yaml").write_text(DEPLOYMENT)
    (folder / "templates" / "widget.yaml").write_text(WIDGET)
    (folder / "crds" / "widgets.yaml").write_bytes(msgspec.json.encode(DEFINITION))
    return folder


@pytest.fixture
def kubeconfig(address, namespace, tmp_path) -> Path:
    from tests.support.kube.api.running import RunningApiServer

    return RunningApiServer(address).kubeconfig(tmp_path, namespace=namespace)


class CommandLine:
    """Runs Helm 3 as a command, as users do."""

    def __init__(self, kubeconfig: Path, home: Path):
        self._helm = Command(helm_3(tools_folder()), kubeconfig, home)

    def install(self, chart: Path, **values: object) -> None:
        self._helm("install", "toy", str(chart), *self._set(values))

    def upgrade(self, chart: Path, **values: object) -> None:
        self._helm("upgrade", "toy", str(chart), *self._set(values))

    def rollback(self, revision: int) -> None:
        self._helm("rollback", "toy", str(revision))

    def uninstall(self) -> None:
        self._helm("uninstall", "toy")

    def revisions(self) -> list[int]:
        return [each["revision"] for each in json.loads(self._helm("history", "toy", "-o", "json"))]

    @staticmethod
    def _set(values: dict[str, object]) -> list[str]:
        return ["--set", ",".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in values.items())]


class Library:
    """Calls Helm 4 as a library; it uses server-side apply."""

    def __init__(self, kubeconfig: Path, namespace: str):
        self._config = helm_4(tools_folder()).Config(kubeconfig_path=kubeconfig, namespace=namespace)

    def install(self, chart: Path, **values: object) -> None:
        self._config.install(chart, "toy", values)

    def upgrade(self, chart: Path, **values: object) -> None:
        self._config.upgrade(chart, "toy", values)

    def rollback(self, revision: int) -> None:
        self._config.rollback("toy", version=revision)

    def uninstall(self) -> None:
        self._config.uninstall("toy")

    def revisions(self) -> list[int]:
        return [each["revision"] for each in self._config.history("toy")]


@pytest.fixture(params=["Helm 3", "Helm 4"])
def helm(request, kubeconfig, namespace, tmp_path):
    return CommandLine(kubeconfig, tmp_path) if request.param == "Helm 3" else Library(kubeconfig, namespace)


def test_a_release_from_install_to_uninstall(helm, chart, api, namespace):
    def replicas() -> tuple[int, int]:
        deployment = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/toy").expect(200)
        widget = api.get(f"/apis/{API}/namespaces/{namespace}/widgets/toy").expect(200)
        return deployment["spec"]["replicas"], widget["spec"]["replicas"]

    def service() -> int:
        return api.get(f"/api/v1/namespaces/{namespace}/services/toy").code

    helm.install(chart, replicas=2)
    assert (replicas(), service()) == ((2, 2), 200)

    helm.upgrade(chart, replicas=3, service=False)
    assert (replicas(), service()) == ((3, 3), 404)

    helm.rollback(1)
    assert (replicas(), service()) == ((2, 2), 200)
    assert helm.revisions() == [1, 2, 3]

    helm.uninstall()
    for path in (
        "apis/apps/v1/namespaces/{}/deployments",
        "api/v1/namespaces/{}/services",
        "api/v1/namespaces/{}/secrets",
    ):
        eventually(lambda path=path: api.get("/" + path.format(namespace)).expect(200)["items"] == [])
    eventually(lambda: api.get(f"/apis/{API}/namespaces/{namespace}/widgets").expect(200)["items"] == [])


def test_refused_object_fails_the_install_with_its_reason(helm, chart, api):
    with pytest.raises(Exception, match="more than 10 replicas need mode External"):
        helm.install(chart, replicas=11)
