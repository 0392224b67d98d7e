"""Tests of the messages about a failed TLS connection."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc
import pytest

from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import diagnose, diagnose_address, explain
from tests.support.certificates import Authority
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def stranger(tmp_path) -> Authority:
    return Authority(tmp_path, "stranger")


@asynccontextmanager
async def a_grpc_server(credentials: Credentials) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = (
        load(credentials).bind(server, f"{HOST}:0")
        if credentials.certificate
        else LoadedCredentials().bind(server, f"{HOST}:0")
    )
    await server.start()
    yield port
    await server.stop(None)


@asynccontextmanager
async def a_stream_server(credentials: Credentials, seen: list[Exception]) -> AsyncIterator[int]:
    """Run a server with Python's TLS that waits for the client, like routers and workers."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(credentials.certificate, credentials.key)
    if credentials.authority:
        context.load_verify_locations(credentials.authority)
        context.verify_mode = ssl.CERT_REQUIRED

    async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.start_tls(context)
            with suppress(OSError):
                await reader.read()
        except OSError as error:
            seen.append(error)
        finally:
            writer.close()

    server = await asyncio.start_server(shake_hands, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextmanager
def a_silent_server() -> Iterator[int]:
    """Run a server that accepts connections and stays silent."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


async def told(port: int, credentials: Credentials, host: str = HOST, **how) -> str:
    return await asyncio.to_thread(diagnose, host, port, credentials, timeout_seconds=SECONDS, **how)


async def test_working_tls_has_no_diagnosis(authority):
    node = Credentials(authority=authority.file, **authority.issue("node"))
    client = Credentials(authority=authority.file, **authority.issue("client"))
    async with a_grpc_server(node) as port:
        assert await told(port, client) == ""
    async with a_grpc_server(Credentials()) as port:
        assert await told(port, Credentials()) == ""


async def test_expired_certificate_is_reported_with_its_date(authority):
    node = Credentials(**authority.issue("node", hours=(-9, -8)))
    async with a_grpc_server(node) as port:
        says = await told(port, Credentials(authority=authority.file))
    assert f"the certificate of {HOST}:{port} expired on " in says
    assert "GMT" in says


async def test_future_certificate_is_reported(authority):
    async with a_grpc_server(Credentials(**authority.issue("node", hours=(8, 9)))) as port:
        assert "is valid from" in await told(port, Credentials(authority=authority.file))


async def test_wrong_authority_is_reported_with_its_file(authority, stranger):
    async with a_grpc_server(Credentials(**stranger.issue("node"))) as port:
        says = await told(port, Credentials(authority=authority.file))
    assert f"not signed by the authority in {authority.file}" in says
    assert "it is signed by commonName=stranger" in says


async def test_certificate_for_another_name_is_reported(authority):
    async with a_grpc_server(Credentials(**authority.issue("node"))) as port:
        says = await told(port, Credentials(authority=authority.file), server_name="kv.example")
    assert "is for 127.0.0.1, not for kv.example" in says


async def test_plain_server_is_reported(authority):
    async with a_grpc_server(Credentials()) as port:
        says = await told(port, Credentials(authority=authority.file), field="store_credentials")
    assert says == f"{HOST}:{port} does not speak TLS, and this client does: store_credentials.authority is set"


async def test_plain_client_of_a_tls_server_is_reported(authority):
    node = Credentials(authority=authority.file, **authority.issue("node"))
    async with a_grpc_server(node) as port:
        assert "speaks TLS, and this client does not: set credentials.authority" in await told(port, Credentials())


async def test_client_without_certificate_is_reported(authority):
    node = Credentials(authority=authority.file, **authority.issue("node"))
    seen: list[Exception] = []
    async with a_grpc_server(node) as one, a_stream_server(node, seen) as other:
        for port in (one, other):
            assert "shows no certificate: set credentials.certificate" in await told(
                port, Credentials(authority=authority.file)
            )
    assert explain(seen[0]) == "the peer shows no certificate, and one is asked for"


async def test_rejected_client_certificate_is_reported_with_its_file(authority, stranger):
    node = Credentials(authority=authority.file, **authority.issue("node"))
    strange = Credentials(authority=authority.file, **stranger.issue("strange"))
    expired = Credentials(authority=authority.file, **authority.issue("old", hours=(-9, -8)))
    seen: list[Exception] = []
    async with a_grpc_server(node) as one, a_stream_server(node, seen) as other:
        for port in (one, other):
            says = await told(port, strange)
            assert f"{strange.certificate} is not signed by the authority in {authority.file}" in says
            assert f"{expired.certificate}: certificate has expired" in await told(port, expired)
    assert "certificate has expired" in explain(seen[1])


async def test_mismatched_files_are_reported(authority):
    one, other = authority.issue("one"), authority.issue("other")
    async with a_grpc_server(Credentials(**one)) as port:
        mixed = Credentials(authority=authority.file, certificate=one["certificate"], key=other["key"])
        assert f"{other['key']} is not the key of {one['certificate']}" in await told(port, mixed)
        assert "holds no certificates" in await told(port, Credentials(authority=one["key"]))


def test_silent_server_is_reported_in_time(authority):
    with a_silent_server() as port:
        says = diagnose(HOST, port, Credentials(authority=authority.file), timeout_seconds=0.05)
    assert "has not answered the handshake in time" in says


def test_missing_listener_has_no_tls_diagnosis(authority):
    with a_silent_server() as port:
        pass
    assert diagnose(HOST, port, Credentials(authority=authority.file)) == ""
    assert diagnose_address("unix:/run/c", Credentials(authority=authority.file)) == ""


async def test_plain_client_is_explained_to_the_server(authority):
    seen: list[Exception] = []
    async with a_stream_server(Credentials(**authority.issue("node")), seen) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\n")
        with suppress(OSError):
            await reader.read()
        writer.close()
    assert [explain(error) for error in seen] == ["the peer does not speak TLS"]
