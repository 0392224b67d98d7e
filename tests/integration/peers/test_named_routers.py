"""Tests of peer routers behind one name: routers find each other, come and go, and never dial themselves."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.local.router_processes import plan_routers
from fleet.peers import named_routers
from fleet.peers.routers import PeerRouters
from fleet.router.settings.router import RouterSettings
from kvstore.security.credentials import Credentials
from tests.integration.peers.test_access import RouterWithState
from tests.support.router.recording_router import RecordingRouter
from tests.support.servers.processes import a_free_port
from tests.support.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _resolved_often(monkeypatch):
    monkeypatch.setattr(named_routers, "RESOLVE_SECONDS", 0.02)


class Name:
    """A name that the test gives addresses."""

    def __init__(self, port):
        self.port = port
        self.hosts = []
        self.failing = False
        self.resolved = 0

    async def look_up(self, host, port):
        assert (host, port) == ("routers.test", self.port)
        self.resolved += 1
        if self.failing:
            raise OSError("no name server answers")
        return [f"{each}:{port}" for each in self.hosts]


@asynccontextmanager
async def a_named_router(name, host, folder):
    settings = RouterSettings(
        router_id=host,
        replicas_listen=f"{host}:{name.port}",
        replicas_name=f"routers.test:{name.port}",
        replicas_credentials=Credentials(secret_file=str(folder / "secret")),
    )
    router = RouterWithState()
    peers = PeerRouters(settings, router, router, router, lambda: "", look_up=name.look_up)
    running = asyncio.create_task(peers.run())
    try:
        yield peers
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def name(tmp_path):
    (tmp_path / "secret").write_text("of this cluster alone")
    return Name(a_free_port())


def linked(peers):
    return {address.rpartition(":")[0] for address in peers.links}


async def test_routers_behind_a_name_find_each_other(name, tmp_path):
    hosts = name.hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    async with (
        asyncio.timeout(60),
        a_named_router(name, hosts[0], tmp_path) as a,
        a_named_router(name, hosts[1], tmp_path) as b,
        a_named_router(name, hosts[2], tmp_path) as c,
    ):
        await until(lambda: linked(a) == set(hosts[1:]))
        await until(lambda: linked(b) == {hosts[0], hosts[2]})
        await until(lambda: linked(c) == set(hosts[:2]))


async def test_router_that_comes_later_is_reached(name, tmp_path):
    name.hosts = ["127.0.0.1"]
    async with asyncio.timeout(60), a_named_router(name, "127.0.0.1", tmp_path) as early:
        async with a_named_router(name, "127.0.0.2", tmp_path) as late:
            name.hosts = ["127.0.0.1", "127.0.0.2"]
            await until(lambda: linked(early) == {"127.0.0.2"} and linked(late) == {"127.0.0.1"})
        await until(lambda: linked(early) == set())


async def test_lost_name_keeps_connections(name, tmp_path, caplog):
    name.hosts = ["127.0.0.1", "127.0.0.2"]
    async with (
        asyncio.timeout(60),
        a_named_router(name, "127.0.0.1", tmp_path) as a,
        a_named_router(name, "127.0.0.2", tmp_path) as b,
    ):
        await until(lambda: linked(a) and linked(b))
        link = a.links[f"127.0.0.2:{name.port}"]
        name.failing = True
        await until(lambda: caplog.messages.count("name of peer routers not resolved") >= 2)
        failed = name.resolved
        await until(lambda: name.resolved >= failed + 6)
        name.failing, name.hosts = False, []  # the pods are being ended, and still finish requests
        seen, resolved = len(caplog.messages), name.resolved
        await until(lambda: name.resolved >= resolved + 6)

        assert a.links[f"127.0.0.2:{name.port}"] is link
        assert caplog.messages[seen:] == []
        assert caplog.messages.count("name of peer routers not resolved") == 2, "once for each router"


async def test_vanished_router_is_not_dialled_any_more(name, tmp_path, caplog):
    name.hosts = ["127.0.0.1", "127.0.0.2"]
    async with asyncio.timeout(60), a_named_router(name, "127.0.0.1", tmp_path):
        await until(lambda: "peer router unreachable" in caplog.messages)
        name.hosts = ["127.0.0.1"]
        await until(lambda: not [each for each in asyncio.all_tasks() if each.get_name().startswith("replica ")])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replicas_name": "routers"}, "replicas_name: 'routers' is neither"),
        (
            {"replicas_listen": "0.0.0.0:7000"},
            "replicas_listen: 0.0.0.0:7000 does not tell this router from the others",
        ),
        ({"replicas_listen": "router-a:7000"}, "replicas_listen: .*replicas_name needs ip:port of this router"),
        ({"replicas_listen": "unix:/tmp/peers"}, "replicas_listen: unix:/tmp/peers cannot be reached"),
    ],
)
def test_address_that_does_not_name_the_router_is_refused(fields, said):
    told = {"replicas_listen": "10.0.0.1:7000", "replicas_name": "routers:7000"} | fields
    settings = RouterSettings(replicas_credentials=Credentials(insecure=True), **told)
    router = RecordingRouter()
    with pytest.raises(ConfigurationRefused, match=said):
        PeerRouters(settings, router, router, router, lambda: "")


def test_unprotected_name_is_refused():
    settings = RouterSettings(replicas_listen="10.0.0.1:7000", replicas_name="routers:7000")
    router = RecordingRouter()
    with pytest.raises(ConfigurationRefused, match="is open to other hosts"):
        PeerRouters(settings, router, router, router, lambda: "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas_listen": "127.0.0.1:7000"}, r"replicas_listen: 127\.0\.0\.1:7000"),
        ({"replicas": ("10.0.0.6:7000", "10.0.0.7:7000")}, r"replicas: 10\.0\.0\.6:7000, 10\.0\.0\.7:7000"),
        ({"replicas_name": "routers:7000"}, "replicas_name: routers:7000"),
    ],
    ids=["address", "peers", "name"],
)
def test_processes_of_one_command_refuse_outside_peers(tmp_path, settings, said):
    with pytest.raises(ConfigurationRefused, match=f"{said}: the processes of one command"):
        plan_routers(RouterSettings(**settings), 2, tmp_path)
