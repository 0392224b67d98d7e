"""Tests of streams between hosts: both ends use certificates, a secret or both, and both report why a stream failed."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvloop

from fleet.app.worker import run_worker
from fleet.backends.workers.streams import WorkerStreams
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.system_clock import SystemClock
from fleet.net.streams.authentication import MAX_LOGGED_CAUSES, MAX_UNPROVEN, StreamAuthenticator, dial
from fleet.net.streams.identity import router_identity, worker_identity
from fleet.net.streams.proof import MAGIC, MAX_HANDSHAKE_BYTES, REFUSED, TO_WORKERS, VERIFIED, Prover
from fleet.router.messages import WorkerJoined
from fleet.router.settings.router import RouterSettings
from kvstore.net.frames import HEAD, FrameConnection, connect, open_server
from kvstore.security.credentials import Credentials
from tests.support.backends.stream_workers import EventInbox
from tests.support.certificates import Authority
from tests.support.waiting import until
from workers.connections.router_streams import serve_routers
from workers.engines.simulated.launch import open_engine
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
        async with serve_routers(server, "127.0.0.1:0", worker_identity("credentials", credentials)) as address:
            yield address


@asynccontextmanager
async def a_router(address: str, credentials: Credentials):
    heard = EventInbox()
    settings = RouterSettings(worker_credentials=credentials, max_reconnect_seconds=0.05)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(WorkerStreams(settings, addresses=[address]).run(heard))
        yield heard
        running.cancel()


async def test_both_ends_authenticate_by_certificates(ours):
    worker = Credentials(**ours.issue("worker"), authority=ours.file)
    router = Credentials(**ours.issue("router"), authority=ours.file)

    async with a_worker(worker) as address, a_router(address, router) as heard:
        assert isinstance(await heard.take(), WorkerJoined)


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> str:
    return a_secret(tmp_path_factory.mktemp("secret"), "of this cluster")


@pytest.fixture(scope="module")
def other_secret(tmp_path_factory) -> str:
    return a_secret(tmp_path_factory.mktemp("secret"), "of another one")


def a_secret(folder, content) -> str:
    (folder / "secret").write_text(content.ljust(32, "."))
    return str(folder / "secret")


@pytest.mark.parametrize("over_tls", [False, True])
async def test_both_ends_authenticate_by_a_secret(ours, secret, over_tls):
    worker = Credentials(secret_file=secret, **(ours.issue("worker") if over_tls else {}))
    router = Credentials(secret_file=secret, authority=ours.file if over_tls else "")

    async with a_worker(worker) as address, a_router(address, router) as heard:
        assert isinstance(await heard.take(), WorkerJoined)


# Credentials of the router and of the worker, and the message of each.
REFUSALS = {
    "router without a certificate": (
        {"authority": "ours"},
        {"certificate": "ours", "authority": "ours"},
        "it asks for a certificate: see worker_credentials.certificate",
        "the peer shows no certificate",
    ),
    "router of another authority": (
        {"certificate": "theirs", "authority": "ours"},
        {"certificate": "ours", "authority": "ours"},
        "not signed by its authority: see worker_credentials.certificate",
        "unable to get local issuer certificate: see credentials.authority",
    ),
    "router with an expired certificate": (
        {"certificate": "expired", "authority": "ours"},
        {"certificate": "ours", "authority": "ours"},
        "the certificate shown has expired: see worker_credentials.certificate",
        "certificate has expired: see credentials.authority",
    ),
    "worker of another authority": (
        {"certificate": "ours", "authority": "theirs"},
        {"certificate": "ours", "authority": "ours"},
        "self-signed certificate in certificate chain: see worker_credentials.authority",
        "not signed by its authority: see credentials.certificate",
    ),
    "worker with an expired certificate": (
        {"certificate": "ours", "authority": "ours"},
        {"certificate": "expired", "authority": "ours"},
        "certificate has expired: see worker_credentials.authority",
        "the certificate shown has expired: see credentials.certificate",
    ),
    "plain router": (
        {},
        {"certificate": "ours", "authority": "ours"},
        "this end speaks TLS: set the authority of its certificate in the credentials of your end",
        "the peer does not speak TLS, and this end does: see credentials",
    ),
    "plain worker": (
        {"certificate": "ours", "authority": "ours"},
        {},
        "it may not speak TLS",
        "the peer speaks TLS, and this end does not",
    ),
    "router without the secret": (
        {},
        {"secret_file": "secret"},
        "it proves no secret, and credentials.secret_file is set here",
        "it proves no secret, and credentials.secret_file is set here",
    ),
    "router with another secret": (
        {"secret_file": "other"},
        {"secret_file": "secret"},
        "it has another secret than the one in worker_credentials.secret_file",
        "it proves another secret than the one in credentials.secret_file",
    ),
    "worker without the secret": (
        {"secret_file": "secret"},
        {},
        "it proves no secret, and worker_credentials.secret_file is set here",
        "you want to prove a secret, and this worker has none",
    ),
}


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("case", REFUSALS)
def test_both_ends_log_why_there_is_no_stream(ours, theirs, secret, other_secret, caplog, case, run):
    def credentials(peer, named):
        files = {"secret": secret, "other": other_secret}
        issued = {"ours": ours.issue, "theirs": theirs.issue, "expired": lambda name: ours.issue(name, hours=(-2, -1))}
        made = {}
        if "certificate" in named:
            made |= issued[named["certificate"]](peer)
        if "authority" in named:
            made["authority"] = {"ours": ours, "theirs": theirs}[named["authority"]].file
        if "secret_file" in named:
            made["secret_file"] = files[named["secret_file"]]
        return Credentials(**made)

    async def play():
        router, worker, at_router, at_worker = REFUSALS[case]
        async with (
            a_worker(credentials("worker", worker)) as address,
            a_router(address, credentials("router", router)) as heard,
        ):
            await until(lambda: at_router in logged_causes(caplog, "worker stream ended"), 20)
            await until(lambda: at_worker in logged_causes(caplog, "stream refused"), 20)
            assert heard.is_empty()

    run(play())


def logged_causes(caplog, message):
    return "; ".join(each.cause for each in caplog.records if each.getMessage() == message)


async def test_silent_connections_give_way_to_the_router(secret, caplog):
    """Open more silent connections than may be unproven at a time, again and again."""
    worker, router = Credentials(secret_file=secret), Credentials(secret_file=secret)
    async with a_worker(worker) as address:
        host, port = address.rsplit(":", 1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * MAX_UNPROVEN)]
        async with a_router(address, router) as heard:
            assert isinstance(await heard.take(), WorkerJoined)
        cut = [await asyncio.wait_for(reader.read(), 60) for reader, _ in silent[:MAX_UNPROVEN]]
        for _, writer in silent:
            writer.transport.abort()

    assert cut == [b""] * MAX_UNPROVEN
    assert "it had proven nothing when newer ones came" in logged_causes(caplog, "stream refused")


@pytest.mark.parametrize(("hosts", "lines"), [(1, 1), (MAX_LOGGED_CAUSES + 20, MAX_LOGGED_CAUSES)])
async def test_strangers_cannot_fill_the_log(secret, caplog, hosts, lines):
    """The cause names the length of the frame, which the stranger chooses."""
    async with a_worker(Credentials(secret_file=secret)) as address:
        host, port = address.rsplit(":", 1)
        for number in range(MAX_LOGGED_CAUSES + 20):
            source = (f"127.0.1.{number % hosts + 1}", 0)
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=source)
            writer.write(HEAD.pack(2 * MAX_HANDSHAKE_BYTES + number))
            await asyncio.wait_for(reader.read(), 60)
            writer.close()

    refused = [each for each in caplog.records if each.getMessage() == "stream refused"]
    assert len(refused) == lines


class Echo:
    def __init__(self, connection):
        self._connection = connection

    def received(self, payload):
        self._connection.send(payload)

    def resumed(self): ...

    def lost(self, cause): ...


@asynccontextmanager
async def an_authenticating_listener(secret):
    """Run a listener that accepts peers with the secret and then records their messages."""
    guard = StreamAuthenticator(worker_identity("credentials", Credentials(secret_file=secret)), TO_WORKERS, str.encode)
    async with open_server("listen", "127.0.0.1:0", Echo, guard=guard) as address:
        yield address


async def test_new_connection_does_not_cut_a_finishing_proof(secret):
    """Let the proof and the newcomer arrive in the same turn of the event loop."""
    identity = router_identity("worker_credentials", Credentials(secret_file=secret))
    prover, other = Prover(identity, TO_WORKERS), Prover(identity, TO_WORKERS)
    async with an_authenticating_listener(secret) as address:
        host, port = address.rsplit(":", 1)
        peer = await a_peer(address)
        peer.say(prover.opening)
        proof = prover.received(await peer.hear())
        silent = [await a_peer(address) for _ in range(MAX_UNPROVEN - 1)]
        for each in silent:  # until the listener has accepted it
            each.say(other.opening)
            await each.hear()

        peer.say(proof)
        peer.flush()
        with socket.create_connection((host, int(port))):
            assert (await peer.hear()).startswith(MAGIC + VERIFIED)
            peer.say(b"hello")
            assert await peer.hear() == b"hello"


async def test_silent_connections_of_one_host_end_each_other(secret):
    prover = Prover(router_identity("worker_credentials", Credentials(secret_file=secret)), TO_WORKERS)
    async with an_authenticating_listener(secret) as address:
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        peer = a_peer(address)
        _, peer.connection = await loop.create_connection(
            lambda: FrameConnection(lambda _: peer), host, int(port), local_addr=("127.0.0.2", 0)
        )
        peer.say(prover.opening)
        proof = prover.received(await peer.hear())

        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * MAX_UNPROVEN)]
        assert await asyncio.wait_for(silent[MAX_UNPROVEN][0].read(), 60) == b""

        peer.say(proof)
        assert (await peer.hear()).startswith(MAGIC + VERIFIED)
        for _, writer in silent:
            writer.transport.abort()


async def test_proof_of_one_connection_opens_no_other(secret):
    """Replay a proof: a peer without the secret can only repeat what it has recorded."""
    identity = router_identity("worker_credentials", Credentials(secret_file=secret))
    heard_before = Prover(identity, TO_WORKERS)
    async with a_worker(Credentials(secret_file=secret)) as address:
        first = await a_peer(address)
        first.say(heard_before.opening)
        proof = heard_before.received(await first.hear())
        first.say(proof)
        assert (await first.hear()).startswith(MAGIC + VERIFIED)

        again = await a_peer(address)
        again.say(heard_before.opening)
        await again.hear()
        again.say(proof)

        assert await again.hear() == MAGIC + REFUSED


async def test_listener_without_the_secret_gets_nothing(secret):
    """Let a listener that has recorded a proof send it back."""
    said_there: list[bytes] = []

    class Mirror:
        def __init__(self, connection):
            self._connection = connection

        def received(self, payload):
            said_there.append(payload)
            self._connection.send(payload)

        def resumed(self): ...

        def lost(self, cause): ...

    identity = router_identity("worker_credentials", Credentials(secret_file=secret))
    async with open_server("listen", "127.0.0.1:0", Mirror) as address:
        with pytest.raises(ConnectionError, match="it does not prove the secret"):
            await dial(address, lambda _: pytest.fail("it was let in"), identity, TO_WORKERS)

    assert [len(each) for each in said_there] == [24, 32]


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (worker_identity, {"authority": "a.pem"}),
        (worker_identity, {"secret_file": "/nowhere"}),
        (worker_identity, {"certificate": "/nowhere", "key": "/nowhere"}),
        (router_identity, {"certificate": "c.pem", "key": "k.pem"}),
        (router_identity, {"authority": "/nowhere"}),
    ],
)
def test_invalid_settings_are_rejected_with_the_field(read, told):
    with pytest.raises(ConfigurationRefused, match="credentials"):
        read("credentials", Credentials(**told))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:1", "worker.example:1"])
def test_worker_open_to_other_hosts_is_rejected(listen):
    settings = WorkerSettings(worker_id=WorkerId("w"), engine="simulated", model=ModelName("tiny"), listen=listen)

    with pytest.raises(ConfigurationRefused, match=r"^listen: .* is open to other hosts: set credentials\.secret_file"):
        asyncio.run(run_worker(settings, lambda _: pytest.fail("it serves")))


@pytest.mark.parametrize(
    ("listen", "told", "warned"),
    [
        ("127.0.0.1:0", {}, True),
        ("localhost:0", {}, True),
        ("127.0.0.1:0", {"insecure": True}, False),
        ("unix:/x", {}, False),
        ("0.0.0.0:0", {"insecure": True}, False),
    ],
)
def test_local_worker_needs_no_proof_but_warns_of_other_users(listen, told, warned, caplog):
    worker_identity("credentials", Credentials(**told)).require("listen", listen, on_loopback=False)

    warnings = [each for each in caplog.records if each.message == "port open to all users of this machine"]
    assert len(warnings) == warned
    assert all(each.setting == "listen" and "credentials.secret_file" in each.remedy for each in warnings)


def test_worker_with_a_secret_warns_of_nobody(secret, caplog):
    identity = worker_identity("credentials", Credentials(secret_file=secret))

    identity.require("listen", "127.0.0.1:0", on_loopback=False)

    assert not caplog.text


class a_peer:  # noqa: N801 - awaited like a function
    """A connection driven by hand."""

    def __init__(self, address):
        self._address = address
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()

    def __await__(self):
        return self._open().__await__()

    async def _open(self):
        self.connection = await connect(self._address, lambda _: self)
        return self

    def say(self, payload):
        self.connection.send(payload)

    def flush(self):
        self.connection.flush()

    async def hear(self):
        """Return the next payload, or empty bytes at the end."""
        async with asyncio.timeout(60):
            return await self._heard.get()

    def received(self, payload):
        self._heard.put_nowait(payload)

    def resumed(self): ...

    def lost(self, cause):
        self._heard.put_nowait(b"")
