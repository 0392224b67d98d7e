"""Tests of the messages of `fleet generate` and of the clients about a port whose TLS does not fit what they were given."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from fleet.cli.main import run
from fleet.client import AsyncClient, Client, ClientTls, Unavailable, tls
from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.credentials import Credentials
from tests.support.certificates import Authority

pytestmark = pytest.mark.integration

ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""Environment variable that names the authorities which gRPC knows."""


@contextmanager
def a_server(credentials: Credentials) -> Iterator[int]:
    """Run a gRPC server without methods, with TLS if the credentials have a certificate, and return its port."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = (load(credentials) if credentials.certificate else LoadedCredentials()).bind(server, "127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None)


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def told(capsys):
    """Return a function that runs `fleet generate` and returns what it says about the address."""

    def call(port: int, *options: str, host: str = "127.0.0.1") -> str:
        assert run(["generate", "hi", "--address", f"{host}:{port}", "--timeout", "20", *options]) == 1
        return capsys.readouterr().err.strip()

    return call


def test_generate_says_that_one_end_does_not_speak_tls(authority, told):
    with a_server(Credentials()) as port:
        for options in (("--tls",), ("--ca", authority.file)):
            assert told(port, *options) == (
                f"fleet: 127.0.0.1:{port} does not speak TLS, and this client does; leave out --tls, --ca and --certificate"
            )
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert told(port) == (
            f"fleet: 127.0.0.1:{port} speaks TLS, and this client does not: set --ca, or --tls if gRPC knows the authority"
        )


@pytest.mark.parametrize("known", [False, True])
def test_generate_says_why_it_refuses_a_certificate(known, authority, tmp_path, monkeypatch, told):
    trusted = ("--tls",) if known else ("--ca", authority.file)
    if known:
        monkeypatch.setenv(ROOTS, authority.file)
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert told(port, *trusted, host="localhost") == (
            f"fleet: the certificate of localhost:{port} is for 127.0.0.1, not for localhost"
        )
    with a_server(Credentials(**authority.issue("old", hours=(-9, -8)))) as port:
        assert told(port, *trusted).startswith(f"fleet: the certificate of 127.0.0.1:{port} expired on ")
    with a_server(Credentials(authority=authority.file, **authority.issue("router"))) as port:
        assert told(port, *trusted).endswith("this client shows no certificate: set --certificate and --key")
    stranger = Authority(tmp_path, "stranger")
    with a_server(Credentials(**stranger.issue("router"))) as port:
        says = told(port, *trusted)
        assert says.startswith(f"fleet: the certificate of 127.0.0.1:{port} is not signed by ")
        assert ("an authority that gRPC knows; --ca names" if known else f"the authority in {authority.file}") in says
        assert says.endswith("(it is signed by commonName=stranger)")


def test_generate_names_an_authority_that_grpc_does_not_know(authority, monkeypatch, told):
    monkeypatch.delenv(ROOTS, raising=False)
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert "is not signed by an authority that gRPC knows; --ca names the file of another one" in told(
            port, "--tls"
        )


@pytest.mark.parametrize("speaks", [False, True])
def test_generate_diagnoses_tls_once(speaks, authority, monkeypatch, told):
    diagnosed = []
    monkeypatch.setattr(tls, "diagnose_address", lambda address, *_, **__: diagnosed.append(address) or "")
    with a_server(Credentials(**authority.issue("router")) if speaks else Credentials()) as port:
        assert told(port, *(() if speaks else ("--tls",))).startswith(f"fleet: 127.0.0.1:{port}: ")
    assert diagnosed == [f"127.0.0.1:{port}"]


async def causes(port: int, tls: ClientTls | None, host: str = "127.0.0.1") -> str:
    """Return what the errors of both clients say, without gRPC's own words; all calls say the same."""
    said = set()
    with Client(f"{host}:{port}", tls=tls) as client:
        for call in (client.models, lambda: client.complete("hi", timeout_seconds=20)):
            with pytest.raises(Unavailable) as failed:
                await asyncio.to_thread(call)
            said.add(failed.value.message)
            assert str(failed.value) == failed.value.message
    async with AsyncClient(f"{host}:{port}", tls=tls) as client:
        for call in (client.models, lambda: client.complete("hi", timeout_seconds=20)):
            with pytest.raises(Unavailable) as failed:
                await call()
            said.add(failed.value.message)
    (cause,) = {each.partition(" (failed to connect")[0].partition(" (Socket closed")[0] for each in said}
    return cause


async def test_clients_say_that_one_end_does_not_speak_tls(authority):
    with a_server(Credentials()) as port:
        assert await causes(port, ClientTls(authority=authority.file)) == (
            f"127.0.0.1:{port} does not speak TLS, and this client does; leave out tls"
        )
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert await causes(port, None) == (
            f"127.0.0.1:{port} speaks TLS, and this client does not: give it tls=ClientTls(authority=FILE)"
        )


async def test_clients_say_why_a_certificate_is_refused(authority, tmp_path):
    trusted = ClientTls(authority=authority.file)
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert await causes(port, trusted, "localhost") == (
            f"the certificate of localhost:{port} is for 127.0.0.1, not for localhost"
        )
    with a_server(Credentials(**authority.issue("old", hours=(-9, -8)))) as port:
        assert (await causes(port, trusted)).startswith(f"the certificate of 127.0.0.1:{port} expired on ")
    with a_server(Credentials(authority=authority.file, **authority.issue("router"))) as port:
        assert (await causes(port, trusted)).endswith(
            "this client shows no certificate: set tls.certificate and tls.key"
        )
    stranger = Authority(tmp_path, "stranger")
    with a_server(Credentials(**stranger.issue("router"))) as port:
        assert await causes(port, trusted) == (
            f"the certificate of 127.0.0.1:{port} is not signed by the authority in {authority.file} (it is signed by commonName=stranger)"
        )


async def test_clients_name_an_authority_that_grpc_does_not_know(authority, monkeypatch):
    monkeypatch.delenv(ROOTS, raising=False)
    with a_server(Credentials(**authority.issue("router"))) as port:
        assert (
            "is not signed by an authority that gRPC knows; tls.authority names the file of another one"
            in await causes(port, ClientTls())
        )
