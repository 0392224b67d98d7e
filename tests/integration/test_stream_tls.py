"""Streams between hosts: both ends show certificates."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from fleet.adapters.clock import SystemClock
from fleet.adapters.router_streams import serve_routers
from fleet.adapters.stream_tls import of_router, of_worker
from fleet.adapters.worker_streams import WorkerStreams
from fleet.errors import ConfigurationRefused
from fleet.ids import Incarnation, ModelName, WorkerId
from fleet.router.messages import WorkerJoined
from fleet.router.settings import RouterSettings
from kvstore.credentials import Credentials
from tests.certificates import Authority
from tests.stream_peers import Heard
from tests.waiting import until
from workers.engines.simulated import open_engine
from workers.server import WorkerServer
from workers.settings import WorkerSettings

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@asynccontextmanager
async def a_worker(credentials: Credentials):
    told = WorkerSettings(worker_id=WorkerId("w1"), engine="simulated", model=ModelName("tiny"))
    async with open_engine(told) as engine:
        server = WorkerServer(told, engine, SystemClock(), Incarnation("one"))
        async with serve_routers(server, "127.0.0.1:0", of_worker("credentials", credentials)) as address:
            yield address


@asynccontextmanager
async def a_router(address: str, credentials: Credentials):
    heard = Heard()
    settings = RouterSettings(worker_credentials=credentials, max_reconnect_seconds=0.05)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(WorkerStreams(settings, addresses=[address]).run(heard))
        yield heard
        running.cancel()


async def test_both_ends_know_each_other_by_their_certificates(ours):
    worker = Credentials(**ours.issue("worker"), authority=ours.file)
    router = Credentials(**ours.issue("router"), authority=ours.file)

    async with a_worker(worker) as address, a_router(address, router) as heard:
        assert isinstance(await heard.take(), WorkerJoined)


@pytest.mark.parametrize("stranger", ["router without a certificate", "router of others", "worker of others", "no TLS"])
async def test_a_stranger_does_not_get_a_stream(ours, theirs, stranger, caplog):
    worker = Credentials(**ours.issue("worker"), authority=ours.file)
    router = {
        "router without a certificate": Credentials(authority=ours.file),
        "router of others": Credentials(**theirs.issue("router"), authority=ours.file),
        "worker of others": Credentials(**ours.issue("router"), authority=theirs.file),
        "no TLS": Credentials(),
    }[stranger]

    async with a_worker(worker) as address, a_router(address, router) as heard:
        await until(lambda: "worker stream ended" in caplog.messages)

        assert heard._events.empty()


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (of_worker, {"authority": "a.pem"}),
        (of_worker, {"secret_file": "secret"}),
        (of_worker, {"certificate": "/nowhere", "key": "/nowhere"}),
        (of_router, {"certificate": "c.pem", "key": "k.pem"}),
        (of_router, {"authority": "/nowhere"}),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_the_field(read, told):
    with pytest.raises(ConfigurationRefused, match="credentials"):
        read("credentials", Credentials(**told))
