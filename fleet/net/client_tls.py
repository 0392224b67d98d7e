"""TLS of the ports for clients: certificates that are renewed while they serve, and handshakes that count as connections.

Rules:

1. All handshakes after the reading of a renewed certificate use it; open connections go on. If the files cannot be used,
   this is logged once, and the former certificate stays in use. A broken renewal therefore ends no service.
2. A connection has a slot in its port's connection table before its handshake begins. Until the handshake has ended, it
   counts as a silent connection (`fleet.net.connection_limits`), and is closed first when the table is full. Clients that
   never finish a handshake therefore take no slot from others.
3. A handshake must end within `first_byte_timeout_seconds`, like the first byte on a port without TLS.
4. Why handshakes fail is logged, at most once a minute. The client gets the alert that TLS has for the cause.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509

from fleet.core.errors import ConfigurationRefused
from fleet.net.connection_limits import ConnectionSlot, ConnectionTable, client_key
from fleet.net.limit_log import ClientLog
from fleet.net.settings import ClientTlsSettings, ConnectionSettings
from fleet.net.streams.identity import DiagnosedTls, diagnosed
from kvstore.security.tls_diagnosis import explain

log = logging.getLogger(__name__)

HTTP_1 = ("http/1.1",)
HTTP_2 = ("h2",)
"""Application protocols (ALPN) of HTTP and gRPC ports."""

ACCEPTED_PER_TURN = 64  # most connections that are accepted before other events of the event loop are handled
OUT_OF_FILES = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})
OUT_OF_FILES_SECONDS = 0.1
FAILURE_ANSWER_SECONDS = 0.5  # longest time to send the alert or the plaintext answer after a failed handshake
SHUTDOWN_SECONDS = 5.0  # longest time for the client to answer the end of a TLS connection
DAY_SECONDS = 86_400.0


class ServerCertificates:
    """The certificate of the ports for clients, which is read again when its files change (rule 1)."""

    def __init__(self, settings: ClientTlsSettings, unix_seconds: Callable[[], float]) -> None:
        """Read the files. `unix_seconds` is the wall clock, for the end of the certificate.

        Raises:
            ConfigurationRefused: A file cannot be used; the message names its field.
        """
        self._settings = settings
        self._unix_seconds = unix_seconds
        self._version = self._file_versions()
        self._refused_version: object = None  # version of the files that were logged as unusable
        self._warned_at = float("-inf")
        self._pem = self._read()
        self._end = _end_of(settings.certificate, self._pem["certificate"])
        self._current = self._build()
        self._listening: dict[tuple[str, ...], ssl.SSLContext] = {}
        self._note_expiry()

    @property
    def client_authority(self) -> bytes:
        """The certificates that must have signed the clients' certificates; empty if clients need none."""
        return self._pem["client_authority"]

    @property
    def key_and_certificate(self) -> tuple[bytes, bytes]:
        """The private key and the certificate that are in use, in PEM."""
        return self._pem["key"], self._pem["certificate"]

    def context(self, protocols: tuple[str, ...]) -> ssl.SSLContext:
        """Return the context of a listener with these application protocols. It always uses the current certificate."""
        if (known := self._listening.get(protocols)) is not None:
            return known
        context = self._build()[protocols]

        def use_current(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current[protocols]

        context.sni_callback = use_current  # called in each handshake, even if the client sends no server name
        self._listening[protocols] = context
        return context

    def renew(self) -> bool:
        """Read the files if they have changed. Return whether another certificate is in use now."""
        self._note_expiry()
        version = self._file_versions()
        if version in (self._version, self._refused_version):
            return False
        try:
            pem, current = self._read(), self._build()
            end = _end_of(self._settings.certificate, pem["certificate"])
        except ConfigurationRefused as error:
            # The certificate and the key are written one after the other, so perhaps only one of them is new yet.
            self._refused_version = version
            log.warning("renewed certificate cannot be used, the old one stays", extra={"cause": str(error)})
            return False
        self._pem, self._end, self._current, self._version, self._refused_version = pem, end, current, version, None
        self._warned_at = float("-inf")
        log.info(
            "certificate renewed", extra={"certificate": self._settings.certificate, "ends": self._end.isoformat()}
        )
        self._note_expiry()
        return True

    async def watch(self) -> None:
        """Renew the certificate whenever its files change, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.renewal_check_seconds)
            self.renew()

    def _file_versions(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in (self._settings.certificate, self._settings.key, self._settings.client_authority):
            try:
                state = Path(path).stat() if path else None
            except OSError:
                state = None
            found.append(state and (state.st_ino, state.st_size, state.st_mtime_ns))
        return tuple(found)

    def _read(self) -> dict[str, bytes]:
        settings = self._settings
        return {name: _content(name, getattr(settings, name)) for name in ("certificate", "key", "client_authority")}

    def _build(self) -> Mapping[tuple[str, ...], ssl.SSLContext]:
        return {protocols: self._context(protocols) for protocols in (HTTP_1, HTTP_2)}

    def _context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        try:
            # Without `password`, OpenSSL would ask for the passphrase of an encrypted key on the terminal.
            context.load_cert_chain(settings.certificate, settings.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise ConfigurationRefused(
                f"tls.key: {settings.key} is not the private key of {settings.certificate}, or one of them is no PEM file: {error}"
            ) from error
        if settings.client_authority:
            try:
                context.load_verify_locations(settings.client_authority)
            except OSError as error:
                raise ConfigurationRefused(
                    f"tls.client_authority: {settings.client_authority} holds no certificates: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return diagnosed(context)

    def ends_at(self) -> float:
        """Return the end of the certificate in use, in seconds of Unix time."""
        return self._end.timestamp()

    def _note_expiry(self) -> None:
        """Log a warning once a day if the certificate ends soon."""
        now = self._unix_seconds()
        remaining = self.ends_at() - now
        if remaining > self._settings.expiry_warning_days * DAY_SECONDS or now - self._warned_at < DAY_SECONDS:
            return
        self._warned_at = now
        log.warning(
            "certificate has ended" if remaining <= 0 else "certificate ends soon",
            extra={"certificate": self._settings.certificate, "ends": self._end.isoformat()},
        )


def _content(field: str, path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationRefused(f"tls.{field}: {path} cannot be read: {error.strerror}") from error


def _end_of(path: str, certificate: bytes) -> datetime:
    try:
        return x509.load_pem_x509_certificates(certificate)[0].not_valid_after_utc
    except ValueError as error:
        raise ConfigurationRefused(f"tls.certificate: {path} cannot be read as a certificate: {error}") from error


class TlsPort:
    """Accepts the connections of one listening socket, and gives each its protocol after the handshake."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        table: ConnectionTable[Any],
        client_log: ClientLog,
        limits: ConnectionSettings,
        *,
        now: Callable[[], float],
        plaintext_answer: bytes = b"",
    ) -> None:
        """Create a port that does not accept yet.

        Args:
            listening: The listening socket, which `close` closes.
            context: The context of `ServerCertificates`.
            make: Makes the protocol of a connection; its `connection_made` takes a slot of the table.
            table: The connection table of the port.
            client_log: Logs failed handshakes.
            limits: The limits of the port.
            now: Clock in seconds, by which the table orders connections.
            plaintext_answer: The answer to a client that does not speak TLS.
        """
        listening.setblocking(False)
        self._listening = listening
        self._context = context
        self._make = make
        self._table = table
        self._client_log = client_log
        self._handshake_seconds = limits.first_byte_timeout_seconds
        self._now = now
        self._plaintext_answer = plaintext_answer
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accept no more connections, and end running handshakes; established connections go on."""
        if self._listening.fileno() < 0:
            return
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for handshake in list(self._handshakes):
            handshake.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                accepted, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    self._loop.remove_reader(self._listening)
                    self._loop.call_later(OUT_OF_FILES_SECONDS, self._accept_again)
                return  # other errors mean that the client has left before its connection was accepted
            self._begin(accepted, client_key(peer))

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _begin(self, accepted: socket.socket, client: str) -> None:
        accepted.setblocking(False)
        handshake = _Handshake(accepted, self._table)
        admission = self._table.admit(handshake, client, self._now())
        if admission.displaced is not None:
            admission.displaced.displace(silent=admission.displaced_silent)
        if admission.slot is None:
            accepted.close()
            return
        handshake.slot = admission.slot
        handshake.task = self._loop.create_task(self._shake_hands(handshake, client), name="TLS handshake")
        self._handshakes[handshake.task] = None
        handshake.task.add_done_callback(handshake.end)
        handshake.task.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, handshake: "_Handshake", client: str) -> None:
        tls: DiagnosedTls | None = None
        handshake.started = True
        try:
            async with asyncio.timeout(self._handshake_seconds) as limit:
                tls = DiagnosedTls(self._context, self._plaintext_answer, partial(self._extend_limit, limit))
                await self._loop.connect_accepted_socket(
                    lambda: _Established(handshake, self._make),
                    handshake.accepted,
                    ssl=tls,
                    # Never reached, because the timeout above is shorter.
                    ssl_handshake_timeout=2 * self._handshake_seconds,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
        except OSError as error:
            self._client_log.note_failed_handshake(client, explain((tls and tls.failure) or error))

    def _extend_limit(self, limit: asyncio.Timeout) -> None:
        """Allow time to send the TLS alert or the plaintext answer, unless the handshake has just timed out."""
        if not limit.expired():
            limit.reschedule(self._loop.time() + FAILURE_ANSWER_SECONDS)


class _Handshake:
    """A connection whose handshake runs. It has a slot in the table, as a silent connection."""

    def __init__(self, accepted: socket.socket, table: ConnectionTable[Any]) -> None:
        self.accepted = accepted
        self.slot: ConnectionSlot[Any]
        self.task: asyncio.Task[None]
        self.started = False  # True if the event loop closes the socket; False if `end` has to close it
        self._table = table

    def displace(self, *, silent: bool) -> None:  # noqa: ARG002 - the connection is always silent
        """Cancel the handshake and close the connection, because the table needs the slot."""
        self.task.cancel()

    def leave_table(self) -> None:
        """Give up the slot of the handshake."""
        self._table.remove(self.slot)

    def end(self, task: asyncio.Task[None]) -> None:
        """Release what is left after the handshake."""
        self.leave_table()
        if not self.started:
            self.accepted.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("TLS handshake failed unexpectedly", exc_info=error)


class _Established(asyncio.Protocol):
    """Protocol of a connection during its handshake, which is then replaced by the protocol that `make` returns."""

    def __init__(self, handshake: _Handshake, make: Callable[[], asyncio.Protocol]) -> None:
        self._handshake = handshake
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshake.leave_table()
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
