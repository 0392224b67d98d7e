"""Tests of access to a node over a network: which clients and nodes accept each other."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from kvstore.buffers import crc32c, pieces
from kvstore.clock import Nanos
from kvstore.errors import BadCredentials, NamespaceUnknown, StoreNotStarted, StoreUnreachable
from kvstore.messages import BlockOutcome, Claim, Slot
from kvstore.net.addresses import is_local
from kvstore.security.authentication import NONCE_BYTES, PROOF_BYTES, SKEW_SECONDS, AuthenticationKey, Purpose
from kvstore.security.call_proofs import PROOF_KEY
from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.credentials import Credentials
from kvstore.system_clock import MonotonicClock, unix_seconds
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports.tcp import TcpTransport
from kvstore.transports.tcp_frames import CHALLENGE, MAGIC, OPENING, VERDICT, DataPlaneOperation, DataPlaneStatus
from kvstore.transports.tcp_server import DataPlaneServer
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.certificates import Authority
from tests.support.kvstore.builders import BLOCK_BYTES, MachineDriver, a_block, a_chain, a_short_folder, deadline_in

pytestmark = pytest.mark.integration

CLOCK = MonotonicClock()
SECRET = b"the secret of this deployment"
OTHER = b"the secret of another deployment"


def key(secret: bytes) -> AuthenticationKey | None:
    return AuthenticationKey(secret, Purpose.DATA) if secret else None


# Data plane


@asynccontextmanager
async def a_data_plane(secret: bytes) -> AsyncIterator[tuple[DataPlaneServer, str, bytes, Slot]]:
    """Yield the data plane, its address, a namespace, and the slot of a block."""
    store = MachineDriver()
    tier = SharedMemoryTier(8 * BLOCK_BYTES)
    reservation = store.reserve(a_chain(1))
    for command in store.machine.commands():
        assert isinstance(command, Claim)
        tier.claim(command.address)
    (reserved,) = reservation.reserved
    slot = reserved.slot
    tier.view(store.machine.writable(store.digest, slot))[:] = a_block(1)
    checksum = crc32c(pieces(a_block(1)))
    store.machine.publish(reservation.reservation_id, {0: checksum}, owner="w", now=Nanos(0))
    plane = DataPlaneServer(store.machine, tier, CLOCK, key(secret))
    address = await plane.listen("127.0.0.1", 0)
    yield plane, address, store.digest, Slot(slot.offset, slot.generation, checksum)
    plane.close()


def fetch(address: str, digest: bytes, slot: Slot, secret: bytes) -> list[BlockOutcome]:
    transport = TcpTransport(address, digest, BLOCK_BYTES, CLOCK, deadline_in(), key(secret))
    into = np.zeros(BLOCK_BYTES, np.uint8)
    try:
        return transport.get([slot], [into], deadline_in())
    finally:
        transport.close()


async def test_client_with_the_secret_reads_blocks():
    async with a_data_plane(SECRET) as (_, address, digest, slot):
        assert await asyncio.to_thread(fetch, address, digest, slot, SECRET) == [BlockOutcome.MOVED]


@pytest.mark.parametrize(
    ("nodes", "clients", "says"),
    [
        (SECRET, OTHER, "has another secret"),
        (SECRET, b"", "asks for a proof"),
        (b"", SECRET, "has no secret"),
    ],
)
async def test_end_without_the_secret_is_rejected(nodes, clients, says):
    async with a_data_plane(nodes) as (plane, address, digest, slot):
        with pytest.raises(StoreUnreachable, match=says):
            await asyncio.to_thread(fetch, address, digest, slot, clients)
        assert plane.refused == (clients == OTHER)


async def test_unknown_client_learns_no_open_namespaces():
    async with a_data_plane(SECRET) as (_, address, _, slot):
        with pytest.raises(NamespaceUnknown):
            await asyncio.to_thread(fetch, address, b"?" * 16, slot, SECRET)
        with pytest.raises(StoreUnreachable, match="another secret"):
            await asyncio.to_thread(fetch, address, b"?" * 16, slot, OTHER)


async def test_captured_proof_opens_no_other_connection():
    async with a_data_plane(SECRET) as (_, address, digest, slot):
        heard = await asyncio.to_thread(capture_request, address, digest, slot)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        opening, proof = heard[: OPENING.size], heard[OPENING.size : OPENING.size + PROOF_BYTES]

        writer.write(opening)
        await reader.readexactly(CHALLENGE.size)
        writer.write(proof)

        assert VERDICT.unpack(await reader.readexactly(VERDICT.size))[1] == DataPlaneStatus.REFUSED
        assert await reader.read() == b""
        writer.close()


async def test_requests_instead_of_a_proof_are_not_served():
    async with a_data_plane(SECRET) as (plane, address, digest, _):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(OPENING.pack(MAGIC, DataPlaneOperation.OPEN, digest, bytes(NONCE_BYTES)) + bytes(200))

        answer = await reader.read(CHALLENGE.size + VERDICT.size)
        while len(answer) < CHALLENGE.size + VERDICT.size:
            answer += await reader.read(1000)

        assert VERDICT.unpack(answer[CHALLENGE.size :])[1] == DataPlaneStatus.REFUSED
        assert plane.refused == 1
        writer.close()


def test_node_without_the_secret_gets_no_request():
    after: list[bytes] = []

    def pretend() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(OPENING.size, socket.MSG_WAITALL)
            connection.sendall(CHALLENGE.pack(MAGIC, DataPlaneStatus.AUTHENTICATE, bytes(NONCE_BYTES)))
            proof = connection.recv(PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(VERDICT.pack(MAGIC, DataPlaneStatus.DONE, proof))  # the client's own proof, handed back
            after.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(StoreUnreachable, match="is not the node"):
            fetch(f"127.0.0.1:{server.getsockname()[1]}", b"d" * 16, Slot(0, 1), SECRET)
        thread.join()
    assert after == [b""]


# Control plane


class EchoStore(pb_grpc.BlockStoreServicer):
    """Store that answers every call."""

    async def Stats(self, request, context):  # noqa: N802 - named by the protocol
        return pb.StatsResponse(store_id="asked")

    async def Watch(self, request, context):  # noqa: N802 - named by the protocol
        await context.send_initial_metadata(())
        yield pb.BlockChanges(sequence=1)


@asynccontextmanager
async def a_control_plane(access: LoadedCredentials, *more: str) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=access.interceptors())
    pb_grpc.add_BlockStoreServicer_to_server(EchoStore(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection(("kvstore.v1.BlockStore",), server)
    port = access.bind(server, "127.0.0.1:0")
    for address in more:
        access.bind(server, address)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def ask(address: str, access: LoadedCredentials, now=unix_seconds, metadata=()) -> str:
    with access.channel(address, (), now) as channel:
        response = pb_grpc.BlockStoreStub(channel).Stats(pb.StatsRequest(), timeout=60, metadata=metadata)
        return response.store_id


async def first_message(stream):
    return await anext(aiter(stream))


async def rejection(address: str, access: LoadedCredentials, **how) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask, address, access, **how)
    return caught.value


async def test_client_with_the_secret_may_call_sync_or_async():
    access = LoadedCredentials(secret=SECRET)
    async with a_control_plane(access) as address:
        assert await asyncio.to_thread(ask, address, access) == "asked"
        async with access.aio_channel(address, ()) as channel:
            stub = pb_grpc.BlockStoreStub(channel)
            assert (await stub.Stats(pb.StatsRequest(), timeout=60)).store_id == "asked"
            assert [each.sequence async for each in stub.Watch(pb.WatchRequest(), timeout=60)] == [1]


@pytest.mark.parametrize(
    ("access", "says"),
    [(LoadedCredentials(secret=OTHER), "is not of this port's secret"), (LoadedCredentials(), "asks for a proof")],
)
async def test_client_without_the_secret_is_rejected_in_every_call(access, says):
    async with a_control_plane(LoadedCredentials(secret=SECRET)) as address:
        error = await rejection(address, access)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert says in error.details()
        async with access.aio_channel(address, ()) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=says):
                await first_message(pb_grpc.BlockStoreStub(channel).Watch(pb.WatchRequest(), timeout=60))
            listing = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await first_message(
                    reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(listing, timeout=60)
                )


@pytest.mark.parametrize("text", ["garbage", "1.2.3", "-1.00.00"])
async def test_a_malformed_proof_is_no_proof(text):
    async with a_control_plane(LoadedCredentials(secret=SECRET)) as address:
        error = await rejection(address, LoadedCredentials(), metadata=((PROOF_KEY, text),))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_old_proof_is_rejected_with_a_hint_on_clocks():
    async with a_control_plane(LoadedCredentials(secret=SECRET)) as address:
        error = await rejection(
            address, LoadedCredentials(secret=SECRET), now=lambda: unix_seconds() - SKEW_SECONDS - 10
        )
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "set the clocks" in error.details()


async def test_unproven_answer_is_not_believed():
    async with a_control_plane(LoadedCredentials()) as address:
        error = await rejection(address, LoadedCredentials(secret=SECRET))
        assert "not proven" in error.details()
        async with LoadedCredentials(secret=SECRET).aio_channel(address, ()) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="not proven"):
                await pb_grpc.BlockStoreStub(channel).Stats(pb.StatsRequest(), timeout=60)


async def test_health_and_unix_sockets_need_no_proof():
    with a_short_folder() as folder:
        async with a_control_plane(LoadedCredentials(secret=SECRET), f"unix:{folder}/c") as address:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert await asyncio.to_thread(ask, f"unix:{folder}/c", LoadedCredentials()) == "asked"


async def test_certificates_of_the_same_authority_are_enough(tmp_path):
    authority = Authority(tmp_path, "authority")
    node = load(Credentials(authority=authority.file, **authority.issue("node")))
    client = load(Credentials(authority=authority.file, **authority.issue("client")))
    async with a_control_plane(node) as address:
        assert await asyncio.to_thread(ask, address, client) == "asked"
        async with client.aio_channel(address, ()) as channel:
            stub = pb_grpc.BlockStoreStub(channel)
            assert (await stub.Stats(pb.StatsRequest(), timeout=60)).store_id == "asked"


async def test_missing_or_foreign_certificate_is_rejected(tmp_path):
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    node = load(Credentials(authority=authority.file, **authority.issue("node")))
    false_node = load(Credentials(authority=authority.file, **stranger.issue("false-node")))
    client = load(Credentials(authority=authority.file, **authority.issue("client")))
    async with a_control_plane(node) as address:
        for access in (
            LoadedCredentials(),  # no TLS
            load(Credentials(authority=authority.file)),  # no certificate
            load(Credentials(authority=authority.file, **stranger.issue("other"))),
            load(Credentials(authority=stranger.file, **authority.issue("trusts-another"))),
        ):
            assert (await rejection(address, access)).code() is grpc.StatusCode.UNAVAILABLE
    async with a_control_plane(false_node) as address:
        assert (await rejection(address, client)).code() is grpc.StatusCode.UNAVAILABLE


async def test_node_with_only_a_certificate_still_asks_for_the_secret(tmp_path):
    authority = Authority(tmp_path, "authority")
    (tmp_path / "secret").write_bytes(SECRET)
    node = load(Credentials(secret_file=str(tmp_path / "secret"), **authority.issue("node")))
    async with a_control_plane(node) as address:
        client = load(Credentials(secret_file=str(tmp_path / "secret"), authority=authority.file))
        assert await asyncio.to_thread(ask, address, client) == "asked"
        error = await rejection(address, load(Credentials(authority=authority.file)))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


# Settings of a node


@pytest.mark.parametrize(
    ("listen", "data_listen", "field"),
    [
        (("0.0.0.0:7000",), "", "listen[0]"),
        (("unix:/run/c", "[::]:7000"), "", "listen[1]"),
        (("10.0.0.1:7000",), "", "listen[0]"),
        (("node-7:7000",), "", "listen[0]"),
        (("unix:/run/c",), "0.0.0.0:7001", "data_listen"),
    ],
)
def test_public_address_needs_credentials(listen, data_listen, field):
    with pytest.raises(StoreNotStarted) as caught:
        LoadedCredentials().require(listen, data_listen)
    assert str(caught.value).startswith(f"{field}: ")
    assert "secret_file" in str(caught.value)

    LoadedCredentials(secret=SECRET).require(listen, data_listen)
    LoadedCredentials(insecure=True).require(listen, data_listen)


def test_certificates_do_not_protect_the_data_plane(tmp_path):
    authority = Authority(tmp_path, "authority")
    certified = load(Credentials(authority=authority.file, **authority.issue("node")))

    certified.require(("0.0.0.0:7000",), "127.0.0.1:7001")
    with pytest.raises(StoreNotStarted, match="data_listen"):
        certified.require(("0.0.0.0:7000",), "0.0.0.0:7001")
    with pytest.raises(StoreNotStarted, match=r"listen\[0\]"):
        load(Credentials(**authority.issue("alone"))).require(("0.0.0.0:7000",), "")


@pytest.mark.parametrize("address", ["unix:/run/c", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1"])
def test_addresses_of_this_machine_need_no_credentials(address):
    assert is_local(address)
    LoadedCredentials().require((address,), "")


@pytest.mark.parametrize("content", [b"", b"short\n", b" " * 40])
def test_guessable_secret_is_rejected(tmp_path, content):
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(BadCredentials, match=r"credentials\.secret_file: .* bytes"):
        load(Credentials(secret_file=str(tmp_path / "secret")))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(BadCredentials, match=r"credentials\.authority: .*nowhere cannot be read"):
        load(Credentials(authority=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"credentials\.key"):
        Credentials(certificate="c")


def capture_request(address: str, digest: bytes, slot: Slot) -> bytes:
    """Return the bytes that a client with the secret sends to read a block."""
    heard = bytearray()
    host, _, port = address.rpartition(":")

    def relay() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection((host, int(port)), 5) as node:
            for length, source, sink in (
                (OPENING.size, client, node),
                (CHALLENGE.size, node, client),
                (PROOF_BYTES, client, node),
                (VERDICT.size, node, client),
            ):
                data = source.recv(length, socket.MSG_WAITALL)
                sink.sendall(data)
                if source is client:
                    heard.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        fetch(f"127.0.0.1:{listener.getsockname()[1]}", digest, slot, SECRET)
        thread.join()
    return bytes(heard)
