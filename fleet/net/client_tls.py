"""TLS of the ports for clients: certificates that are renewed while the ports serve, and handshakes that count as connections.

Rules:

1. When a renewed certificate has been read, all later handshakes use it, and open connections go on. If the files
   cannot be used, this is logged once, and the old certificate stays in use. So a failed renewal does not end the
   service.
2. A connection has a slot in its port's connection table before its handshake begins. Until the handshake has ended, it
   counts as a silent connection, so it is among the first that are closed when the table is full
   (`fleet.net.connection_limits`, rule 2). Clients that never finish a handshake therefore take no slot from others.
3. A handshake must end within `first_byte_timeout_seconds`, like the first byte on a port without TLS.
4. The number of failed handshakes and the cause of the last one are logged, at most once a minute. A client gets the TLS
   alert that fits the cause. An HTTP port gives a client that does not speak TLS a plaintext answer instead.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from functools import partial
from typing import Any

from fleet.core.errors import ConfigurationRefused
from fleet.net.connection_limits import ConnectionSlot, ConnectionTable, client_key
from fleet.net.limit_log import ClientLog
from fleet.net.settings import ClientTlsSettings, ConnectionSettings
from fleet.net.streams.identity import DiagnosedTls, diagnosed
from kvstore.errors import BadCredentials
from kvstore.security.certificates import DAY_SECONDS, CertificateFiles, RenewedContext
from kvstore.security.tls_diagnosis import explain

log = logging.getLogger(__name__)

HTTP_1 = ("http/1.1",)
HTTP_2 = ("h2",)
"""Application protocols (ALPN): `HTTP_1` for HTTP ports, `HTTP_2` for gRPC ports."""

# Maximum number of connections that are accepted in one turn of the event loop, so that other events are not delayed.
ACCEPTED_PER_TURN = 64
OUT_OF_FILES = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})
OUT_OF_FILES_SECONDS = 0.1
FAILURE_ANSWER_SECONDS = 0.5  # time limit for sending the alert or the plaintext answer after a failed handshake
SHUTDOWN_SECONDS = 5.0  # longest wait for the client's closing alert when the server closes a TLS connection


class ServerCertificates:
    """Provides the certificate of the ports for clients, and reads it again when its files change.

    `kvstore.security.certificates` reads the files.
    """

    def __init__(self, settings: ClientTlsSettings, wall_seconds: Callable[[], float]) -> None:
        """Read the files. `wall_seconds` returns the Unix time, by which the log warns of a certificate that ends soon.

        Raises:
            ConfigurationRefused: A file cannot be used; the message names its field.
        """
        try:
            self.files = CertificateFiles(
                certificate=settings.certificate,
                key=settings.key,
                authority=settings.client_authority,
                field="tls",
                authority_field="client_authority",
                warning_seconds=settings.expiry_warning_days * DAY_SECONDS,
                look_seconds=settings.renewal_check_seconds,
                logs=True,
                wall_seconds=wall_seconds,
            )
            self.files.require_usable()
            self._current: dict[tuple[str, ...], RenewedContext] = {
                protocols: RenewedContext(self.files, partial(_listening_context, protocols))
                for protocols in (HTTP_1, HTTP_2)
            }
        except (BadCredentials, OSError) as error:
            raise ConfigurationRefused(str(error)) from error
        self._listening: dict[tuple[str, ...], ssl.SSLContext] = {}

    def context(self, protocols: tuple[str, ...]) -> ssl.SSLContext:
        """Return the TLS context of a listener with these application protocols. It always uses the current certificate."""
        if (known := self._listening.get(protocols)) is not None:
            return known
        context = self._current[protocols].built()

        def use_current(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current[protocols].current

        context.sni_callback = use_current  # called in each handshake, even if the client sends no server name
        self._listening[protocols] = context
        return context


def _listening_context(protocols: Sequence[str]) -> ssl.SSLContext:
    """Return a TLS context for a listener without a certificate; `RenewedContext` adds the current certificate to it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(protocols))
    return diagnosed(context)


class TlsPort:
    """Accepts the connections of one listening socket, and gives each connection its asyncio protocol after the TLS handshake."""

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
        """Create a port, which accepts connections from the next turn of the event loop on.

        Args:
            listening: The listening socket, which `close` closes.
            context: The result of `ServerCertificates.context`.
            make: Creates the protocol of a connection; its `connection_made` takes a slot of the table.
            table: The connection table of the port.
            client_log: Logs failed handshakes.
            limits: The limits of the port.
            now: Clock in seconds, by which the table orders connections.
            plaintext_answer: The answer to a client that does not speak TLS; empty: the client gets a TLS alert.
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
                return  # for other errors, the client has closed the connection before it was accepted
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
                    # This limit is never reached, because the timeout above is shorter.
                    ssl_handshake_timeout=2 * self._handshake_seconds,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
        except OSError as error:
            self._client_log.note_failed_handshake(client, explain((tls and tls.failure) or error))

    def _extend_limit(self, limit: asyncio.Timeout) -> None:
        """Allow `FAILURE_ANSWER_SECONDS` to send the TLS alert or the plaintext answer, unless the handshake has just timed out."""
        if not limit.expired():
            limit.reschedule(self._loop.time() + FAILURE_ANSWER_SECONDS)


class _Handshake:
    """Represents a connection during its handshake. It has a slot in the table, as a silent connection (rule 2)."""

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
        """Release the slot of the handshake in the table."""
        self._table.remove(self.slot)

    def end(self, task: asyncio.Task[None]) -> None:
        """Release the slot after the handshake, and close the socket if the event loop does not."""
        self.leave_table()
        if not self.started:
            self.accepted.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("TLS handshake failed unexpectedly", exc_info=error)


class _Established(asyncio.Protocol):
    """Replaces itself by the protocol that `make` returns as soon as the handshake has succeeded."""

    def __init__(self, handshake: _Handshake, make: Callable[[], asyncio.Protocol]) -> None:
        self._handshake = handshake
        self._make = make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshake.leave_table()
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
