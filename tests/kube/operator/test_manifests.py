"""Manifests of the samples' child objects: Kubernetes' schemas, the API server for tests and kubectl accept them."""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest

SAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "samples").glob("*.yaml"))
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]


def rendered(path):
    command = [sys.executable, "-m", "fleet.cli.main", "kube", "render", "-f", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [msgspec.yaml.decode(part) for part in text.split("---\n") if part.strip()]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_objects_are_known_to_every_version(path):
    found = [each for each in rendered(path) if each["kind"] != "LeaderWorkerSet"]  # kinds that are not Kubernetes' own

    for version in VERSIONS:
        for each in found:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_objects_are_accepted_by_the_api_server(api, namespace, path):
    paths = {
        "ConfigMap": "/api/v1/namespaces/{}/configmaps",
        "Service": "/api/v1/namespaces/{}/services",
        "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
        "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
        "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    }
    for each in rendered(path):
        if each["kind"] != "LeaderWorkerSet":
            each["metadata"]["namespace"] = namespace
            api.post(paths[each["kind"]].format(namespace), each, fieldValidation="Strict").expect(201)
