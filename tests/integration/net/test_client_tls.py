"""Tests of TLS on the ports for clients: handshakes, renewal, client certificates, and clients that never finish."""

import asyncio
import logging
import shutil
import socket
import ssl
import time
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import grpc
import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock, unix_seconds
from fleet.net.client_tls import ServerCertificates
from fleet.net.grpc.client_servers import client_server
from fleet.net.http.server import HttpServer, run_server
from fleet.net.settings import ClientTlsSettings, GrpcLibrary, GrpcSettings, HttpSettings
from kvstore.security.certificates import CertificateWatch
from tests.support.certificates import Authority
from tests.support.frontend.counting_service import CountingService
from tests.support.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "authority")


class ServedFiles:
    """The files of a server's certificate, which a test renews in place."""

    def __init__(self, folder: Path, authority: Authority, **more):
        self.certificate, self.key = folder / "served.pem", folder / "served.key"
        self.authority = authority
        self.renew("first")
        self.settings = ClientTlsSettings(
            certificate=str(self.certificate),
            key=str(self.key),
            renewal_check_seconds=0.1,
            **{"expiry_warning_days": 0.0, **more},  # the certificates last an hour
        )

    def renew(self, name, **validity):
        issued = self.authority.issue(name, **validity)
        for made, served in ((issued["certificate"], self.certificate), (issued["key"], self.key)):
            unfinished = served.with_suffix(".new")
            shutil.copy(made, unfinished)
            unfinished.replace(served)


@pytest.fixture
def files(tmp_path, authority):
    return ServedFiles(tmp_path, authority)


def certificates(settings):
    return ServerCertificates(settings, unix_seconds)


async def answer_at_once(exchange):
    exchange.respond(HTTPStatus.OK, b"{}")


@asynccontextmanager
async def https_server(loaded, answer=answer_at_once, **limits):
    server = HttpServer(HttpSettings(**limits), SystemClock(), {"/": {"GET": answer, "POST": answer}})
    async with run_server(server, "127.0.0.1:0", setting="http_listen", certificates=loaded):
        yield server


def client_context(authority, certificate=None):
    context = ssl.create_default_context(cafile=authority.file)
    if certificate is not None:
        context.load_cert_chain(certificate["certificate"], certificate["key"])
    return context


async def get(server, context, request=b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"):
    """Return the status line of an answer, and the name in the certificate of the server."""
    port = int(server.address.rpartition(":")[2])
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        peer = writer.get_extra_info("peercert") if context is not None else None
        writer.write(request)
        line = await reader.readline()
        rest = await reader.read()
        writer.close()
    name = dict(pair for part in peer["subject"] for pair in part)["commonName"] if peer else ""
    return line, rest, name


async def test_https_port_answers_and_names_its_protocol(authority, files):
    async with https_server(certificates(files.settings)) as server:
        context = client_context(authority)
        context.set_alpn_protocols(["h2", "http/1.1"])
        port = int(server.address.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        tls = writer.get_extra_info("ssl_object")
        writer.close()
        line, _, name = await get(server, client_context(authority))

    assert (tls.selected_alpn_protocol(), tls.version()) == ("http/1.1", "TLSv1.3")
    assert (line, name) == (b"HTTP/1.1 200 OK\r\n", "first")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_versions_before_tls_1_2_are_refused(authority, files):
    async with https_server(certificates(files.settings)) as server:
        context = client_context(authority)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            await get(server, context)


async def test_renewed_certificate_is_served_without_a_failed_request(authority, files):
    seen = []
    async with https_server(certificates(files.settings)) as server:
        context = client_context(authority)

        async def ask():
            line, _, name = await get(server, context)
            assert line == b"HTTP/1.1 200 OK\r\n"
            seen.append(name)
            return name

        assert await ask() == "first"
        for name in ("second", "third"):
            files.renew(name)
            async with asyncio.timeout(60):
                while await ask() != name:
                    pass

    assert seen == sorted(seen, key=["first", "second", "third"].index), "no older certificate comes back"


async def test_open_connection_outlives_a_renewal(authority, files):
    async with https_server(certificates(files.settings)) as server:
        port = int(server.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(authority))
        files.renew("second")
        while (await get(server, client_context(authority)))[2] != "second":
            pass
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(60):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_client_that_leaves_before_its_answer_is_not_logged(authority, files, caplog, method):
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def answer(exchange):
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with asyncio.timeout(60), https_server(certificates(files.settings), answer) as server:
        port = int(server.address.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(authority))
        writer.write(f"{method} / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n".encode())
        await arrived.wait()
        writer.close()
        await ended.wait()

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_broken_renewal_leaves_the_old_certificate_in_use(authority, files, caplog):
    caplog.set_level(logging.WARNING)
    loaded = certificates(files.settings)
    watch = CertificateWatch([loaded.files])
    async with https_server(loaded) as server:
        files.key.write_text("no key\n")
        await until(lambda: watch.look() or "renewed certificate cannot be used" in caplog.text)
        line, _, name = await get(server, client_context(authority))
        assert (line, name) == (b"HTTP/1.1 200 OK\r\n", "first")
        files.certificate.unlink()
        assert (await get(server, client_context(authority)))[2] == "first"
        files.renew("second")
        async with asyncio.timeout(60):
            while (await get(server, client_context(authority)))[2] != "second":
                pass


async def test_certificate_without_a_readable_end_is_not_taken(authority, files, caplog):
    caplog.set_level(logging.WARNING)
    loaded = certificates(files.settings)
    watch = CertificateWatch([loaded.files])
    async with https_server(loaded) as server:
        # OpenSSL takes this form, and other libraries do not.
        trusted = files.certificate.read_text().replace(" CERTIFICATE-", " TRUSTED CERTIFICATE-")
        files.certificate.write_text(trusted)
        await until(lambda: watch.look() or "renewed certificate cannot be used" in caplog.text)
        assert "tls.certificate" in next(each.cause for each in caplog.records if hasattr(each, "cause"))
        files.renew("second")
        async with asyncio.timeout(60):
            while (await get(server, client_context(authority)))[2] != "second":
                pass


async def test_client_that_leaves_during_an_answer_logs_no_warning(authority, files, caplog):
    caplog.set_level(logging.WARNING)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(exchange):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = HttpServer(HttpSettings(), SystemClock(), {"/": {"POST": hang}})
    loaded = certificates(files.settings)
    async with asyncio.timeout(60), run_server(server, "127.0.0.1:0", setting="http_listen", certificates=loaded):
        port = int(server.address.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(authority))
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        await begun.wait()
        writer.close()
        await cancelled.wait()
        await until(lambda: not server.connections)

    assert [each.message for each in caplog.records] == []


async def test_client_without_its_certificate_is_refused_and_logged(tmp_path, authority, caplog):
    files = ServedFiles(tmp_path, authority, client_authority=authority.file)
    async with https_server(certificates(files.settings)) as server:
        strangers = Authority(tmp_path, "strangers")
        for shown in (None, strangers.issue("stranger")):
            line = b""
            with suppress(ssl.SSLError, ConnectionError):  # with TLS 1.3 a client learns of it at its first read
                line, _, _ = await get(server, client_context(authority, shown))
            assert line == b""
        line, _, _ = await get(server, client_context(authority, authority.issue("client")))

        assert line == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: "TLS handshakes of clients failed" in caplog.text)
        record = next(each for each in caplog.records if each.message == "TLS handshakes of clients failed")
        assert "certificate" in record.cause


async def test_plain_request_is_told_to_use_https(files):
    async with https_server(certificates(files.settings)) as server:
        line, rest, _ = await get(server, None)

    assert line == b"HTTP/1.1 400 Bad Request\r\n"
    assert b"this port speaks TLS: use https" in rest


async def test_handshakes_that_never_end_give_way(authority, files):
    async with https_server(certificates(files.settings), max_connections=8, address_share=1) as server:
        port = int(server.address.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(24)]
        await until(lambda: len(server.table) == 8)

        for _ in range(4):
            line, _, _ = await get(server, client_context(authority))
            assert line == b"HTTP/1.1 200 OK\r\n"

        for each in silent:
            each.close()
        await until(lambda: not len(server.table))
        server.table.check()


async def test_handshake_ends_at_the_first_byte_timeout(files, caplog):
    async with https_server(certificates(files.settings), first_byte_timeout_seconds=0.2) as server:
        port = int(server.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not len(server.table))
        await until(lambda: "TLS handshakes of clients failed" in caplog.text)


@pytest.mark.parametrize("library", list(GrpcLibrary))
async def test_grpc_client_follows_a_renewal(tmp_path, authority, library):
    files = ServedFiles(tmp_path, authority, client_authority=authority.file)
    shown = authority.issue("client")
    loaded = certificates(files.settings)
    limits = GrpcSettings(library=library)
    server = client_server(limits, max_held_bytes=1 << 20, certificates=loaded)
    service = CountingService()
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call(root, certificate):
        pem = [Path(root.file).read_bytes()]
        if certificate is not None:
            pem += [Path(certificate["key"]).read_bytes(), Path(certificate["certificate"]).read_bytes()]
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*pem), options=options
        ) as channel:
            return await channel.unary_unary("/x.Y/One")(b"a", timeout=60)

    try:
        await call(authority, shown)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(authority, None)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

        files.renew("second")
        await until(lambda: loaded.files.pem.certificate == files.certificate.read_bytes())
        await call(authority, shown)
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"certificate": "/none.pem"}, "tls.certificate: /none.pem cannot be read: No such file or directory"),
        ({"key": "{certificate}"}, "is not the private key of"),
        ({"client_authority": "{key}"}, "tls.client_authority: .* holds no certificates"),
    ],
)
def test_unusable_file_is_named(files, change, message):
    fields = {"certificate": str(files.certificate), "key": str(files.key)}
    changed = {name: text.format(**fields) for name, text in change.items()}
    with pytest.raises(ConfigurationRefused, match=message):
        certificates(ClientTlsSettings(**{**fields, **changed}))


@pytest.mark.parametrize(
    ("hours", "said"), [((-1, 1), "certificate ends soon"), ((-2, -1), "certificate has ended"), ((-1, 24 * 60), "")]
)
def test_certificate_that_ends_soon_is_logged_once_a_day(tmp_path, authority, hours, said, caplog):
    now = SystemWallClock()
    files = ServedFiles(tmp_path, authority, expiry_warning_days=14.0)
    files.renew("served", hours=hours)
    loaded = ServerCertificates(files.settings, now)
    loaded.files.look()
    now.seconds += 3600
    loaded.files.look()
    messages = [record.message for record in caplog.records]
    now.seconds += 24 * 3600
    loaded.files.look()

    assert messages == ([said] if said else [])
    assert len(caplog.records) == 2 * len(messages)


class SystemWallClock:
    """The wall clock, which the test moves forward."""

    def __init__(self):
        self.seconds = time.time()

    def __call__(self):
        return self.seconds
