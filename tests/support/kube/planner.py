"""Planners for tests with simulated nodes: processes of `fleet serve kube-planner`, and a router whose load the test sets."""

import base64
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fleet.net.control.access import ControlAccess
from kvstore.security.authentication import Purpose
from kvstore.security.channels import LoadedCredentials
from operators.controller.control_secrets import derived_secret
from operators.manifests.names import CONTROL
from operators.rbac import OWN_SECRET
from tests.support.fleet_processes import start_service
from tests.support.kube.operator import QUICK, AskedRouters, a_deployment
from tests.support.planner.demand_routers import MODEL, DemandRouter, serve_demand
from tests.support.waiting import until

MASTER = b"0123456789abcdef" * 4
PLANNED = {"mode": "Planner", "most": 8}


def a_loopback_address() -> str:
    """Return a random loopback address. The routers of all tests listen on the same port, so their addresses have to differ."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"


def planned_deployment(*names: str, **spec: Any) -> dict[str, Any]:
    """Return a deployment of the demand router's model with these roles, all planned; without names it has one role, `both`."""
    kinds = {"both": "aggregated"}
    roles = [{"name": name, "type": kinds.get(name, name), "scaling": PLANNED} for name in names or ("both",)]
    return a_deployment(*roles, model={"name": str(MODEL)}, **spec)


def make_secret(asked: AskedRouters) -> None:
    """Create the operator's own secret in the test's namespace before the operator does, so that the test knows it."""
    data = {"secret": base64.b64encode(MASTER).decode()}
    asked.api.post(asked.path("secrets", "", "v1"), {"metadata": {"name": OWN_SECRET}, "data": data}).expect(201)


@contextlib.asynccontextmanager
async def a_demand_router(asked: AskedRouters, nodes: Any, deployment: str = "dd") -> AsyncIterator[DemandRouter]:
    """Serve the demand of a deployment's router pods, to callers that prove the deployment's control secret."""
    secret = derived_secret(MASTER, asked.namespace, deployment)
    access = ControlAccess(LoadedCredentials(secret=secret, purpose=Purpose.ROUTER_CONTROL))
    router, nodes.router_address = DemandRouter(), a_loopback_address()
    router.running = {"both-0": 0}
    async with serve_demand(router, f"{nodes.router_address}:{CONTROL}", access=access):
        yield router


def settings_of(asked: AskedRouters, identity: str, **more: Any) -> dict[str, Any]:
    return {
        "identity": identity,
        "namespaces": [asked.namespace],
        "lease": {"name": "fleet-planner", "namespace": asked.namespace, **QUICK},
        "listen": "127.0.0.1:0",
        "kubeconfig": asked.kubeconfig,
    } | more


@contextlib.contextmanager
def a_planner(asked: AskedRouters, folder: Any, identity: str = "first", **more: Any) -> Iterator[Any]:
    """Run a planner process; yield the process and its endpoints. Its log is in the folder."""
    settings = settings_of(asked, identity, **{"control_listen": f"unix:{folder}/{identity}.sock"} | more)
    with (folder / f"{identity}.log").open("w") as log:
        process, endpoints = start_service(
            "kube-planner", settings, folder / f"{identity}.json", stdout=log, stderr=subprocess.STDOUT
        )
    try:
        assert endpoints, (folder / f"{identity}.log").read_text()
        yield process, endpoints
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


class SeenPlan:
    """Reads and changes one ServingPlan of a test."""

    def __init__(self, asked: AskedRouters, name: str = "plan", deployment: str = "dd", **spec: Any) -> None:
        self._asked, self.name = asked, name
        content = {"deployment": deployment, "intervalSeconds": 1} | spec
        asked.api.post(asked.path("servingplans"), {"metadata": {"name": name}, "spec": content}).expect(201)

    def change(self, **spec: Any) -> None:
        self._asked.api.patch(self._asked.path("servingplans", self.name), "merge", {"spec": spec}).expect(200)

    def whole(self) -> dict[str, Any]:
        found: dict[str, Any] = self._asked.api.get(self._asked.path("servingplans", self.name)).expect(200)
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.whole().get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition; an empty dict if it is missing, or was observed at an earlier generation of the object."""
        whole = self.whole()
        said = whole.get("status", {}).get("conditions", ())
        current = whole["metadata"]["generation"]
        return next((each for each in said if each["type"] == kind and each["observedGeneration"] == current), {})

    async def says(self, kind: str, status: str, reason: str = "") -> dict[str, Any]:
        """Wait until a condition has this status, and this reason unless it is empty; return the condition."""

        def found() -> dict[str, Any] | None:
            there = self.condition(kind)
            return there if there.get("status") == status and reason in ("", there.get("reason")) else None

        try:
            return await until(found, 60.0)
        except Exception as error:
            raise AssertionError(f"{kind} is not {status} {reason}: {self.status()}") from error
