"""Tests of a router's report to the operator: the serving workers and the worth of their caches."""

import pytest
from msgspec import structs

from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import Role
from fleet.frontend.control.port import open_control_port
from fleet.net.control.access import load_control_access
from fleet.router.state.snapshot import PoolSnapshot, WorkerSnapshot
from kvstore.security.credentials import Credentials
from operators.observed.registrations import WorkerRegistration
from operators.observed.router_registrations import RouterRegistrations
from tests.support.frontend.frontends import open_frontends

pytestmark = pytest.mark.integration

SECRET = b"the secret of a deployment"


def a_worker(worker_id, state="serving", cached_blocks=0):
    counts = dict.fromkeys(WorkerSnapshot.__struct_fields__[4:], 0)
    fields = counts | {
        "state": state,
        "engine": "simulated",
        "address": "",
        "product": "",
        "cached_blocks": cached_blocks,
    }
    return WorkerSnapshot(worker_id=WorkerId(worker_id), **fields)


async def test_serving_workers_are_registered_and_draining_are_not(model_dir, monkeypatch):
    async with open_frontends(model_dir) as frontends:
        workers = (a_worker("a", cached_blocks=7), a_worker("b", state="draining"))
        pool = PoolSnapshot(model=ModelName("m"), role=Role.BOTH, workers=workers)
        status = structs.replace(frontends.router.status(), pools=(pool,))
        monkeypatch.setattr(frontends.router, "status", lambda: status)
        assert await RouterRegistrations().workers(frontends.control, b"") == (
            WorkerRegistration(pod="a", warm_blocks=7),
        )


async def test_silent_router_reports_nothing():
    assert await RouterRegistrations().workers("127.0.0.1:9", b"a secret of a deployment") is None


async def test_router_with_a_secret_gets_the_deployments_secret(model_dir, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    access = load_control_access("test", Credentials(secret_file=str(tmp_path / "secret")))
    async with (
        open_frontends(model_dir) as frontends,
        open_control_port("127.0.0.1:0", access, frontends.router, lambda: True, grpc_address="") as address,
    ):
        assert await RouterRegistrations().workers(address, SECRET) == ()
        assert await RouterRegistrations().workers(address, b"that of another deployment") is None
        assert await RouterRegistrations().workers(address, b"") is None
