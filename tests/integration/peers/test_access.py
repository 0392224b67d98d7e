"""Tests of access to `replicas_listen`: real router processes, unknown peers, and the logs of both ends."""

import asyncio
import re
import signal
import stat
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fleet.client import Client
from fleet.core.errors import ConfigurationRefused
from fleet.peers.routers import PeerRouters
from fleet.router.settings.router import RouterSettings
from fleet.v1 import control_pb2
from fleet.v1 import replica_pb2 as pb
from kvstore.net.frames import connect
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority
from tests.support.fleet_processes import start_service
from tests.support.kvstore.builders import a_short_folder
from tests.support.router.recording_router import RecordingRouter
from tests.support.servers.processes import a_free_port
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.integration

FORGED = (
    pb.ReplicaMessage(hello=pb.ReplicaHello(router_id="stranger")),
    pb.ReplicaMessage(
        tuned=pb.ReplicaTuned(thresholds=control_pb2.Thresholds(oversubscribe=1, max_queued=0, max_queue_seconds=1, priority_seconds=1), at_unix_ms=1 << 50)
    ),
    pb.ReplicaMessage(registered=control_pb2.RegisterRequest(worker_id="w9", incarnation="x", address="127.0.0.1:9")),
    pb.ReplicaMessage(question=pb.ReplicaQuestion(number=7, metrics=pb.MetricsRequest())),
)  # fmt: skip


class RouterWithState(RecordingRouter):
    """With the state that a router sends to its peers."""

    def registrations(self):
        return ()


class UnknownPeer:
    def __init__(self):
        self.heard = []
        self.over = asyncio.Event()

    def received(self, payload):
        self.heard.append(pb.ReplicaAnswer.FromString(payload))

    def resumed(self): ...

    def lost(self, cause):
        self.over.set()


@pytest.fixture(scope="module")
def routers(tmp_path_factory, model_dir):
    """Run two routers with one secret that are peers over TCP; yield clients of both, their peer ports and their logs."""
    folder = tmp_path_factory.mktemp("replicas")
    secret = folder / "secret"
    secret.write_text("a secret of this cluster alone")
    ports = [f"127.0.0.1:{a_free_port()}" for _ in range(2)]
    processes, clients, logs = [], [], []
    with a_short_folder() as sockets:
        try:
            for number, own in enumerate(ports):
                settings = {
                    "router_id": f"r{number}",
                    "http_listen": "127.0.0.1:0",
                    "grpc_listen": "127.0.0.1:0",
                    "control_listen": f"unix:{sockets}/{number}",
                    "models": {"tiny": str(model_dir)},
                    "replicas_listen": own,
                    "replicas": [each for each in ports if each != own],
                    "replicas_credentials": {"secret_file": str(secret)},
                }
                log = folder / f"{number}.log"
                with log.open("w") as output:
                    process, endpoints = start_service(
                        "router", settings, folder / f"{number}.json", stdout=output, stderr=output
                    )
                assert endpoints, log.read_text()
                processes.append(process)
                clients.append(Client(endpoints["grpc"], control=endpoints["control"]))
                logs.append(log)
            yield clients, ports, logs
        finally:
            for client in clients:
                client.close()
            for process in processes:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def test_routers_with_one_secret_connect(routers):
    (one, other), _, _ = routers

    def tuned():
        one.tune(oversubscribe=3.0)
        return other.tune()["oversubscribe"] == 3.0

    eventually(tuned)


async def test_unknown_peer_can_neither_forge_nor_read(routers):
    (client, _), (address, _), (log, _) = routers
    before = client.tune()
    stranger = UnknownPeer()

    connection = await connect(address, lambda _: stranger)
    for message in FORGED:
        connection.send(message.SerializeToString())
    async with asyncio.timeout(60):
        await stranger.over.wait()

    assert not any(answer.metrics for answer in stranger.heard)
    (answer,) = stranger.heard
    assert answer.refused.startswith("it proves no secret, and replicas_credentials.secret_file is set here")
    assert client.tune() == before
    assert not client.status().pools
    assert "w9" not in log.read_text()
    await until(lambda: "stream refused" in log.read_text())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
def test_open_replica_port_is_rejected_at_start(tmp_path, listen):
    log = tmp_path / "log"
    settings = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "replicas_listen": listen}
    with log.open("w") as output:
        process, endpoints = start_service("router", settings, tmp_path / "r.json", stdout=output, stderr=output)

    assert not endpoints
    assert process.wait(60) == 3
    assert re.search(r"replicas_listen: .* is open to .*: set replicas_credentials\.secret_file", log.read_text())


@pytest.mark.parametrize("told", [{"replicas": ("10.0.0.1:7",)}, {"replicas_listen": "localhost:7"}])
def test_unprotected_address_of_a_router_is_named(told):
    router = RecordingRouter()
    with pytest.raises(ConfigurationRefused, match=r"^replicas(\[0\]|_listen): .* is open to"):
        PeerRouters(RouterSettings(**told), router, router, router, lambda: "")


@asynccontextmanager
async def a_router(number, listen, others, credentials):
    router = RouterWithState()
    settings = RouterSettings(
        router_id=f"r{number}", replicas_listen=listen, replicas=others, replicas_credentials=credentials
    )
    running = asyncio.create_task(PeerRouters(settings, router, router, router, lambda: "").run())
    try:
        yield router
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


# Credentials of the listener and of the caller, and the message of each.
REFUSALS = {
    "caller without the secret": (
        {"secret_file": "one"},
        {"insecure": True},
        "it proves no secret, and replicas_credentials.secret_file is set here",
        "it proves no secret, and replicas_credentials.secret_file is set here",
    ),
    "caller with another secret": (
        {"secret_file": "one"},
        {"secret_file": "two"},
        "it proves another secret than the one in replicas_credentials.secret_file",
        "it has another secret than the one in replicas_credentials.secret_file",
    ),
    "listener without the secret": (
        {"insecure": True},
        {"secret_file": "one"},
        "it wants to prove a secret: set replicas_credentials.secret_file",
        "it proves no secret, and replicas_credentials.secret_file is set here",
    ),
    "caller of another authority": (
        {"authority": "ours", "certificate": "ours"},
        {"authority": "ours", "certificate": "theirs"},
        "unable to get local issuer certificate: see replicas_credentials.authority",
        "not signed by its authority: see replicas_credentials.certificate",
    ),
    "plain caller": (
        {"authority": "ours", "certificate": "ours"},
        {"insecure": True},
        "the peer does not speak TLS, and this end does",
        "this end speaks TLS: set the authority",
    ),
    "plain listener": (
        {"insecure": True},
        {"authority": "ours", "certificate": "ours"},
        "the peer speaks TLS, and this end does not",
        "it may not speak TLS",
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    authorities = {name: Authority(tmp_path_factory.mktemp(name), name) for name in ("ours", "theirs")}

    def credentials(told):
        made = {"insecure": told.get("insecure", False)}
        if "secret_file" in told:
            file = folder / told["secret_file"]
            file.write_text(told["secret_file"] * 16)
            made["secret_file"] = str(file)
        if "authority" in told:
            made |= authorities[told["certificate"]].issue("router") | {
                "authority": authorities[told["authority"]].file
            }
        return Credentials(**made)

    return credentials


@pytest.mark.parametrize("case", REFUSALS)
async def test_both_routers_log_why_they_do_not_connect(files, caplog, case):
    listener, caller, at_listener, at_caller = REFUSALS[case]
    address = f"127.0.0.1:{a_free_port()}"
    async with a_router(0, address, (), files(listener)) as router, a_caller(address, files(caller)):
        await until(lambda: at_listener in logged_causes(caplog, "stream refused", "peer router rejected"))
        await until(lambda: at_caller in logged_causes(caplog, "peer router unreachable", "peer router lost"))

        assert "PeerReserved" not in router.events


@pytest.mark.parametrize("told", [{"secret_file": "one"}, {"authority": "ours", "certificate": "ours"}])
async def test_routers_connect_by_secret_or_certificates(files, told):
    address = f"127.0.0.1:{a_free_port()}"
    async with a_router(0, address, (), files(told)) as router, a_caller(address, files(told)):
        await until(lambda: "PeerReserved" in router.events)


async def test_peer_with_the_id_of_this_router_is_in_the_log(caplog):
    address = f"127.0.0.1:{a_free_port()}"
    trusted = Credentials(insecure=True)
    with a_short_folder() as folder:
        async with a_router(0, address, (), trusted), a_router(0, f"unix:{folder}/r", (address,), trusted):
            await until(
                lambda: "set another router_id" in logged_causes(caplog, "peer router has the id of this router")
            )


async def test_peer_with_an_id_of_its_own_causes_no_error(caplog):
    address = f"127.0.0.1:{a_free_port()}"
    trusted = Credentials(insecure=True)
    async with a_router(0, address, (), trusted) as router, a_caller(address, trusted):
        await until(lambda: "PeerReserved" in router.events)
    assert not logged_causes(caplog, "peer router has the id of this router")


@asynccontextmanager
async def a_caller(address, credentials):
    with a_short_folder() as folder:
        async with a_router(1, f"unix:{folder}/r", (address,), credentials) as router:
            yield router


async def test_unix_socket_of_a_router_is_private():
    with a_short_folder() as folder:
        path = Path(folder) / "r"
        async with a_router(0, f"unix:{path}", (), Credentials()):
            await until(path.exists)
            await until(lambda: stat.S_IMODE(path.stat().st_mode) == 0o600)


def logged_causes(caplog, *messages):
    return "; ".join(each.cause for each in caplog.records if each.getMessage() in messages)
