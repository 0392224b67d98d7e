"""Fixtures of tests that need a Kubernetes API: that of the server for tests, or of the one in FLEET_TEST_KUBE_API."""

import importlib.util
import os
import uuid

import pytest

from tests.support.kube.clients import Api

NEEDED = ("aiohttp", "cel_expr_python", "kubernetes_validate", "lupa")


def pytest_ignore_collect() -> bool | None:
    """Skip this folder if the packages that `make kube-test` installs are missing."""
    return True if any(importlib.util.find_spec(each) is None for each in NEEDED) else None


@pytest.fixture(scope="session")
def address():
    """Return the address of an API server. For a real server, `kubectl proxy` has an address without credentials."""
    from tests.support.kube.api.running import OTHER_SERVER, an_api_server

    if given := os.environ.get(OTHER_SERVER):
        yield given
        return
    with an_api_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def api(address):
    with Api(address) as api:
        yield api


@pytest.fixture
def namespace(api):
    """Create a namespace that no other test uses."""
    name = f"fleet-test-{uuid.uuid4().hex[:10]}"
    api.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    yield name
    api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def operated():
    """Run an API server with Fleet's kinds, and simulated nodes beside it, for tests of the operator."""
    from tests.support.kube.api.running import an_api_server
    from tests.support.kube.nodes import Nodes
    from tests.support.kube.operator import install

    nodes = Nodes()
    with an_api_server(with_controllers=True, beside=nodes.run) as server, Api(server.url) as client:
        install(server)
        yield server, client, nodes


@pytest.fixture
def nodes(operated):
    """Return the simulated nodes, after a reset of the changes that earlier tests have made."""
    operated[2].reset()
    return operated[2]


@pytest.fixture
def asked(operated, nodes, tmp_path, monkeypatch):
    """Create a namespace for one test; after the test, remove the faults that it has ordered.

    The operator writes statuses faster than in production.
    """
    from operators.status import rate_limiter as pace
    from tests.support.kube.operator import AskedRouters

    for name in ("SHORT", "LONG"):
        monkeypatch.setattr(pace, name, getattr(pace, name) // 10)

    server, client, _ = operated
    name = f"fleet-test-{uuid.uuid4().hex[:10]}"
    client.post("/api/v1/namespaces", {"metadata": {"name": name}}).expect(201)
    yield AskedRouters(server, client, name, tmp_path)
    for number in server.faults():
        server.remove_fault(int(number))
    nodes.reset()
    client.delete(f"/api/v1/namespaces/{name}")
