"""Tests of peers that speak no common version of the protocol: each link refuses them by name, and serves the others on."""

import asyncio
import logging
import random

import grpc
import pytest
from hypothesis import given, settings

from fleet.client import Client, IncompatibleRouter
from fleet.core.system_clock import SystemClock
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.membership.compatibility import IncompatiblePeers
from fleet.membership.ports import RegistrationIncompatible
from fleet.membership.registry import GrpcRegistryClient
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.net.control.address import control_socket
from fleet.peers import routers
from fleet.peers.routers import PeerRouters
from fleet.router.machine import RouterMachine
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from fleet.v1 import control_pb2, control_pb2_grpc, worker_pb2
from fleet.v1 import replica_pb2 as replica
from kvstore.client.node_session import shake_hands
from kvstore.clock import Nanos
from kvstore.errors import IncompatibleVersion
from kvstore.messages import DataPath
from kvstore.net.frames import connect, open_server
from kvstore.protocol.range_messages import range_message
from kvstore.system_clock import MonotonicClock
from kvstore.v1 import blocks_pb2, blocks_pb2_grpc
from tests.integration.peers.test_peer_messages import received_events
from tests.support.kvstore.builders import a_short_folder
from tests.support.router.peer_routers import NoWorkers
from tests.support.router.recording_router import RecordingRouter
from tests.support.versions.mixed_cluster import Clients, MixedCluster
from tests.support.versions.newer_peers import FUTURE, unknown_fields, with_unknown_fields
from tests.support.versions.previous_version import ROOT
from tests.support.waiting import until
from tests.support.workers.worker_processes import StreamEnded, a_silent_stream
from tests.unit.versions.test_newer_peers import NAMESPACE

pytestmark = pytest.mark.integration

NAMED = "speaks protocol 7 to 9 (version 99.0)"
SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster(model_dir):
    with a_short_folder() as folder:
        running = MixedCluster(folder, model_dir)
        try:
            running.start_store(ROOT)
            for name in running.routers:
                running.start_router(ROOT, name)
            running.start_worker(ROOT, "p", "prefill")
            running.start_worker(ROOT, "d", "decode")
            running.wait_for_workers("p", "d")
            yield running
        finally:
            running.close()


@pytest.fixture
def control(cluster):
    with grpc.insecure_channel(control_socket(cluster.routers["a"])) as channel:
        yield channel


def refusal_of(call):
    with pytest.raises(grpc.RpcError) as refused:
        call()
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    return refused.value.details()


def incompatible(cluster, link):
    with Client(cluster.routers["a"]) as client:
        return {each.name: each.cause for each in client.status().incompatible if each.link == link}


def test_registration_of_incompatible_worker_is_refused(cluster, control):
    request = control_pb2.RegisterRequest(worker_id="future", incarnation="1", address="unix:/x", protocols=FUTURE)
    stub = control_pb2_grpc.RegistryStub(control)
    said, *again = (refusal_of(lambda: stub.Register(request, timeout=SECONDS)) for _ in range(5))

    assert again == [said] * 4
    assert cluster.log("a").count("registration refused: no common protocol version") == 1
    assert said.startswith("router a speaks protocol 1 to 2 (version ")
    assert said.endswith(f"and worker future at unix:/x {NAMED}; upgrade router a")
    assert incompatible(cluster, "registry") == {"future": said}
    with Clients(list(cluster.routers.values())) as clients:
        clients.wait_for(3, lambda: clients.answered)


async def test_described_incompatible_worker_is_never_used(cluster):
    """The worker states nothing when it registers, as if it were published in a directory."""

    class FutureWorker:
        def __init__(self, connection):
            self.connection = connection

        def received(self, payload):
            assert worker_pb2.RouterMessage.FromString(payload).hello.protocols.highest == 2
            description = worker_pb2.Description(worker_id="alien", incarnation="1", protocols=FUTURE)
            for name in ("model", "engine"):
                setattr(description, name, "tiny")
            description.role = "both"
            description.block_tokens = description.max_model_len = description.kv_blocks = description.max_running = 16
            self.connection.send(worker_pb2.WorkerMessage(description=description).SerializeToString())

        def resumed(self): ...

        def lost(self, cause): ...

    address = f"unix:{cluster.folder}/alien.sock"
    async with open_server("listen", address, FutureWorker), asyncio.timeout(SECONDS):
        async with grpc.aio.insecure_channel(control_socket(cluster.routers["a"])) as channel:
            registry = control_pb2_grpc.RegistryStub(channel)
            await registry.Register(control_pb2.RegisterRequest(worker_id="alien", incarnation="1", address=address))
        await until(
            lambda: cluster.log("a").count("worker alien speaks protocol 7 to 9 (version 99.0); upgrade router a")
        )
    assert "upgrade router a" in (await asyncio.to_thread(incompatible, cluster, "worker"))["alien"]
    await asyncio.to_thread(cluster.wait_for_workers, "p", "d")


async def test_worker_refuses_incompatible_router_and_serves_on(cluster):
    async with a_silent_stream(f"unix:{cluster.folder}/d.sock") as stream:
        stream.write(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="future", protocols=FUTURE)))
        with pytest.raises(StreamEnded) as ended:
            await stream.until(lambda message: None)
    assert ended.value.reason.startswith("worker d speaks protocol 1 to 2")
    assert ended.value.reason.endswith(f"and router future {NAMED}; upgrade worker d")
    await asyncio.to_thread(cluster.wait_for_workers, "p", "d")


def test_control_port_refuses_incompatible_callers(cluster, control):
    stub = control_pb2_grpc.ClusterStub(control)
    assert f"the caller {NAMED}; upgrade this router" in refusal_of(
        lambda: stub.Status(control_pb2.StatusRequest(protocols=FUTURE), timeout=SECONDS)
    )
    watch = control_pb2.WatchDemandRequest(protocols=FUTURE)
    assert f"the caller {NAMED}; upgrade router a" in refusal_of(
        lambda: next(iter(stub.WatchDemand(watch, timeout=SECONDS)))
    )
    reports = stub.WatchDemand(control_pb2.WatchDemandRequest(), timeout=SECONDS)
    assert [next(reports).HasField("protocols") for _ in range(2)] == [True, False]
    reports.cancel()


def test_store_node_refuses_incompatible_clients(cluster):
    with grpc.insecure_channel(cluster.store) as channel:
        stub = blocks_pb2_grpc.BlockStoreStub(channel)
        assert "store node store speaks protocol 1 to 2" in refusal_of(
            lambda: stub.Hello(blocks_pb2.HelloRequest(protocols=FUTURE), timeout=SECONDS)
        )
        assert f"the client {NAMED}; upgrade store node store" in refusal_of(
            lambda: next(iter(stub.Watch(blocks_pb2.WatchRequest(protocols=FUTURE), timeout=SECONDS)))
        )


# ruff: noqa: N802 - gRPC names the methods of these servers
class FutureNode(blocks_pb2_grpc.BlockStoreServicer):
    """A store node that speaks only later versions."""

    async def Hello(self, request, context):
        assert request.protocols.highest == 2
        return blocks_pb2.HelloResponse(store_id="s", protocols=FUTURE)


class FutureRegistry(control_pb2_grpc.RegistryServicer, control_pb2_grpc.ClusterServicer):
    """A router that speaks only later versions."""

    async def Register(self, request, context):
        assert request.protocols.highest == 2
        return control_pb2.RegisterResponse(lease_ms=1000, protocols=FUTURE)

    async def Status(self, request, context):
        return control_pb2.StatusResponse(protocols=FUTURE)


async def test_clients_refuse_incompatible_servers_by_name():
    with a_short_folder() as folder:
        address, server = f"unix:{folder}/s", grpc.aio.server()
        blocks_pb2_grpc.add_BlockStoreServicer_to_server(FutureNode(), server)
        control_pb2_grpc.add_RegistryServicer_to_server(FutureRegistry(), server)
        control_pb2_grpc.add_ClusterServicer_to_server(FutureRegistry(), server)
        server.add_insecure_port(address)
        await server.start()

        def hello():
            clock = MonotonicClock()
            with grpc.insecure_channel(address) as channel:
                stub = blocks_pb2_grpc.BlockStoreStub(channel)
                deadline = Nanos(clock.now() + int(SECONDS * 1e9))
                shake_hands(stub, address, NAMESPACE, (DataPath.TCP,), None, clock, deadline)

        def status():
            with Client("127.0.0.1:1", control=address) as client:
                client.status()

        try:
            with pytest.raises(
                IncompatibleVersion, match=r"store node unix:.* speaks protocol 7 to 9 .*; upgrade this client"
            ):
                await asyncio.to_thread(hello)
            with pytest.raises(IncompatibleRouter, match=r"the router speaks protocol 7 to 9 .*; upgrade this process"):
                await asyncio.to_thread(status)
            async with GrpcRegistryClient(address) as registry:
                with pytest.raises(RegistrationIncompatible, match=r"speaks protocol 7 to 9 .*; upgrade worker w"):
                    await registry.register("w", "1", "unix:/x")
        finally:
            await server.stop(0)


class DiallingRouter:
    """A peer router's end of a connection, which says hello."""

    def __init__(self, protocols):
        self.answers = []
        self.over = asyncio.Event()
        self.hello = replica.ReplicaMessage(hello=replica.ReplicaHello(router_id="other", protocols=protocols))

    def accept(self, connection):
        self.connection = connection
        return self

    def received(self, payload):
        self.answers.append(replica.ReplicaAnswer.FromString(payload))

    def resumed(self): ...

    def lost(self, cause):
        self.over.set()


@pytest.mark.parametrize("protocols", [FUTURE, range_message(), None], ids=["future", "this", "previous"])
async def test_peer_router_is_answered_by_its_protocol(tmp_path, protocols):
    router, address = RecordingRouter(), f"unix:{tmp_path}/r.sock"
    refused = IncompatiblePeers(SystemClock())
    told = RouterSettings(router_id="r", replicas_listen=address)
    peers = PeerRouters(told, router, router, router, lambda: "", incompatible=refused)
    dialling = DiallingRouter(protocols)
    bookings = replica.ReplicaMessage(bookings=replica.ReplicaBookings())
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peers.run())
        await until((tmp_path / "r.sock").exists)
        connection = await connect(address, dialling.accept)
        for message in (dialling.hello, bookings):
            connection.send(message.SerializeToString())
        await until(lambda: dialling.over.is_set() or "PeerReserved" in router.events)
        running.cancel()

    assert ("PeerReserved" in router.events) == (protocols is not FUTURE)
    if protocols is None:  # version 1 expects no answer
        assert not dialling.answers
        return
    (answer,) = dialling.answers
    assert (answer.number, answer.router_id, answer.protocols) == (0, "r", range_message())
    assert [each.cause for each in refused.present()] == ([answer.refused] if answer.refused else [])
    assert answer.refused.endswith(f"router other {NAMED}; upgrade router r" if protocols is FUTURE else "")


@pytest.mark.parametrize("previous", [False, True])
async def test_dialling_router_ends_the_link_to_an_incompatible_one(tmp_path, caplog, monkeypatch, previous):
    """A router of version 1 gives no answer to hello, and gets everything."""
    monkeypatch.setattr(routers, "DIAL_SECONDS", 0.2)
    caplog.set_level(logging.INFO)
    heard = []

    class AnsweringRouter:
        def __init__(self, connection):
            self.connection = connection

        def received(self, payload):
            heard.append(replica.ReplicaMessage.FromString(payload).WhichOneof("message"))
            if heard[-1] == "hello" and not previous:
                answer = replica.ReplicaAnswer(router_id="future", protocols=FUTURE)
                self.connection.send(answer.SerializeToString())

        def resumed(self): ...

        def lost(self, cause): ...

    clock, address = SystemClock(), f"unix:{tmp_path}/r.sock"
    refused = IncompatiblePeers(clock)
    told = RouterSettings(router_id="r", replicas_listen=f"unix:{tmp_path}/own.sock", replicas=(address,))
    router = RouterServer(RouterMachine(told, random.Random(1)), SelectionAwareWorkers(NoWorkers()), clock)
    peers = PeerRouters(
        told, router, RegistryServer(MembershipSettings(), clock), None, lambda: "", incompatible=refused
    )
    async with asyncio.timeout(SECONDS), open_server("listen", address, AnsweringRouter), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peers.run())
        if previous:
            await until(lambda: heard.count("bookings") > 2)
            assert (list(peers.links), heard.count("hello"), refused.present()) == ([address], 1, ())
        else:
            await until(lambda: refused.present() and not peers.links)
            (peer,) = refused.present()
            assert peer.cause.startswith("router r speaks protocol 1 to 2")
            assert peer.cause.endswith(f"router future {NAMED}; upgrade router r")
            await until(lambda: heard.count("hello") > 2)
        running.cancel()
    if not previous:
        messages = [each.message for each in caplog.records if each.message.startswith("peer router")]
        assert messages == ["peer router reached", "peer router refused: no common protocol version"]


async def test_peer_that_both_routers_refuse_counts_once(tmp_path, caplog):
    class AnsweringRouter:
        def __init__(self, connection):
            self.connection = connection

        def received(self, _):
            answer = replica.ReplicaAnswer(router_id="other", protocols=FUTURE)
            self.connection.send(answer.SerializeToString())

        def resumed(self): ...

        def lost(self, cause): ...

    router, own, address = RecordingRouter(), f"unix:{tmp_path}/own.sock", f"unix:{tmp_path}/r.sock"
    refused, dialling = IncompatiblePeers(SystemClock()), DiallingRouter(FUTURE)
    told = RouterSettings(router_id="r", replicas_listen=own, replicas=(address,))
    server = RouterServer(RouterMachine(told, random.Random(1)), SelectionAwareWorkers(NoWorkers()), SystemClock())
    peers = PeerRouters(
        told, server, RegistryServer(MembershipSettings(), SystemClock()), router, lambda: "", incompatible=refused
    )
    async with asyncio.timeout(SECONDS), open_server("listen", address, AnsweringRouter), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(peers.run())
        await until(lambda: refused.present() and not peers.links)
        connection = await connect(own, dialling.accept)
        connection.send(dialling.hello.SerializeToString())
        await dialling.over.wait()
        running.cancel()

    assert [each.name for each in refused.present()] == ["other"]
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == ["peer router refused: no common protocol version"]


@settings(max_examples=10)
@given(unknown_fields)
def test_router_skips_unknown_fields_and_messages_of_a_peer(fields):
    unknown = replica.ReplicaMessage.FromString(fields)
    bindings = [replica.SessionBinding(session="s", worker_id="w", stamp=1)]
    known = replica.ReplicaMessage(sessions=replica.ReplicaSessions(bindings=bindings))
    with a_short_folder() as folder:
        assert "PeerReserved" in received_events(folder, unknown, with_unknown_fields(known, fields))
