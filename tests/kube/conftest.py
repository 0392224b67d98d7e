"""Fixtures of the tests that need a Kubernetes API: ours, or the one whose address is in FLEET_TEST_KUBE_API."""

import importlib.util
import os
import uuid

import pytest

from tests.kube.clients import Api

NEEDED = ("aiohttp", "cel_expr_python", "kubernetes_validate")


def pytest_ignore_collect() -> bool | None:
    """`make kube-test` installs what these tests need; without it there is nothing to collect here."""
    return True if any(importlib.util.find_spec(each) is None for each in NEEDED) else None


@pytest.fixture(scope="session")
def address():
    """Where an API server is. A real one: `kubectl proxy` gives an address that needs no credentials."""
    if given := os.environ.get("FLEET_TEST_KUBE_API"):
        yield given
        return
    from tests.kube.running import an_api_server

    with an_api_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def api(address):
    with Api(address) as api:
        yield api


@pytest.fixture
def namespace(api):
    """A namespace of the test's own."""
    name = f"fleet-test-{uuid.uuid4().hex[:10]}"
    api.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    yield name
    api.delete(f"/api/v1/namespaces/{name}")
