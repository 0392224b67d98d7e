"""Authentication of frame streams over TCP: a handshake with TLS and proof of the secret, before a receiver sees the connection.

The peers agree on a protocol version afterwards (`kvstore.protocol.versions`).

Rules:

1. A listener has at most `MAX_UNPROVEN` unauthenticated connections at a time, each for at most `PROVE_SECONDS`. If
   another one arrives, the host with the most unauthenticated connections loses its oldest one
   (`kvstore.net.unproven_connections`). A connection no longer counts after it is authenticated.
2. Only the handshake is read from unauthenticated connections, and its payloads have at most `MAX_HANDSHAKE_BYTES`.
3. After the handshake the receiver gets the connection directly, so a proof costs nothing per message.
4. A refused caller is logged, once a minute for each host and cause, and at most `MAX_LOGGED_CAUSES` of these pairs are
   logged in a minute. Causes that differ only in numbers, which the caller may choose, count as one. The caller is also
   sent the cause: as part of the handshake, or if it takes part in none, as a `RejectionPayload`.
"""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fleet.net.streams.identity import DiagnosedTls, StreamIdentity, tls_failure_cause
from fleet.net.streams.proof import MAX_HANDSHAKE_BYTES, ProofFailed, ProofVerifier, Prover
from kvstore.net.addresses import unix_path
from kvstore.net.frames import FRAME_BYTES, HEAD, SEND_BYTES, Accept, FrameConnection, FrameReceiver, connect
from kvstore.net.unix_sockets import OUT_OF_FILES
from kvstore.net.unproven_connections import UnprovenConnections

log = logging.getLogger(__name__)

MAX_UNPROVEN = 32
PROVE_SECONDS = 5.0
# Time limit for the TLS handshake of a caller. It is shorter than the caller's own deadline, so that the caller learns the cause.
DIAL_TLS_SECONDS = 3.0
OUT_OF_FILES_SECONDS = 0.1
LOG_INTERVAL_SECONDS = 60.0  # minimum time between two warnings about one host and cause
MAX_LOGGED_CAUSES = 64  # maximum number of pairs of host and cause that are logged in `LOG_INTERVAL_SECONDS`
_NUMBER = re.compile("[0-9]+")

NEEDS_TLS = "this end speaks TLS: set the authority of its certificate in the credentials of your end"

RejectionPayload = Callable[[str], bytes]
"""A function that returns the payload with the cause of a refusal, for a caller that takes part in no handshake."""


class StreamAuthenticator:
    """Runs the listener's side of all handshakes of one port. Implements `kvstore.net.frames.ConnectionGuard`."""

    def __init__(
        self, identity: StreamIdentity, kind: bytes, refusal: RejectionPayload, *, limit: int = FRAME_BYTES
    ) -> None:
        """Create the authenticator.

        Args:
            identity: The identity of this listener; it must require a handshake (`is_open` is False).
            kind: The kind of the streams, such as `fleet.net.streams.proof.TO_WORKERS`.
            refusal: Function that makes the payload for callers that do not take part in a handshake.
            limit: Maximum length of a payload in bytes after the handshake.
        """
        self._identity = identity
        self._kind = kind
        self._refusal = refusal
        self._limit = limit
        self._unproven: UnprovenConnections[_UnprovenCaller] = UnprovenConnections(MAX_UNPROVEN)
        # The handshakes that have not ended. A connection stays here for one iteration of the event loop after its proof.
        self._handshakes: dict[_UnprovenCaller, asyncio.Task[None]] = {}
        self._logged_at: dict[
            tuple[str, str], float
        ] = {}  # time of the last log message, by host and by cause (with the numbers left out)

    @asynccontextmanager
    async def guarding(
        self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept
    ) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        take = partial(self._accept_connection, listener, made, accept)
        loop.add_reader(listener, take)
        try:
            yield
        finally:
            loop.remove_reader(listener)
            listener.close()
            tasks = list(self._handshakes.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _accept_connection(
        self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, address = listener.accept()
        except OSError as error:  # usually raised because the caller has disconnected meanwhile
            if error.errno in OUT_OF_FILES:
                loop.remove_reader(listener)
                loop.call_later(OUT_OF_FILES_SECONDS, self._resume_accepting, listener, made, accept)
            return
        accepted.setblocking(False)
        host = str(address[0])
        caller = _UnprovenCaller(self._identity, self._kind, self._refusal, accept, self._limit, self._unproven.discard)
        if (gone := self._unproven.add(caller, host)) is not None:
            self._handshakes[gone].cancel("it had proven nothing when newer ones came")
        task = loop.create_task(self._run_handshake(caller, accepted, host, made), name="stream handshake")
        self._handshakes[caller] = task
        task.add_done_callback(partial(self._done, caller, accepted))

    def _resume_accepting(
        self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept
    ) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, partial(self._accept_connection, listener, made, accept))

    def _done(self, caller: "_UnprovenCaller", accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.discard(caller)
        del self._handshakes[caller]
        if not caller.started:
            accepted.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream handshake failed", exc_info=error)

    async def _run_handshake(
        self, caller: "_UnprovenCaller", accepted: socket.socket, host: str, made: Callable[[Accept], FrameConnection]
    ) -> None:
        """Run the handshake of one connection."""
        identity, tls = self._identity, None
        if identity.tls is not None:
            refusal = self._refusal(NEEDS_TLS)
            tls = DiagnosedTls(identity.tls, HEAD.pack(len(refusal)) + refusal)
        caller.started = True
        try:
            async with asyncio.timeout(PROVE_SECONDS):
                await asyncio.get_running_loop().connect_accepted_socket(
                    partial(made, caller.made),
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else PROVE_SECONDS,
                )
                await caller.proven.wait()
        except OSError as error:
            failure = tls.failure if tls is not None and tls.failure is not None else error
            if isinstance(failure, TimeoutError):
                failure = TimeoutError(f"it has not proven who it is within {PROVE_SECONDS:g} s")
            self._refuse(caller, host, tls_failure_cause(failure, identity.field))
        except asyncio.CancelledError as cancelled:
            self._refuse(caller, host, str(cancelled) or "this end stops listening")
            raise
        else:
            if caller.cause:
                self._refuse(caller, host, caller.cause)

    def _refuse(self, caller: "_UnprovenCaller", host: str, cause: str) -> None:
        if caller.is_admitted:  # the receiver has the connection already, so the handshake must not close it
            return
        caller.end(cause)
        now = asyncio.get_running_loop().time()
        kind = (host, _NUMBER.sub("#", cause))
        if now - self._logged_at.get(kind, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return
        if len(self._logged_at) >= MAX_LOGGED_CAUSES:
            self._logged_at = {key: at for key, at in self._logged_at.items() if now - at < LOG_INTERVAL_SECONDS}
            if len(self._logged_at) >= MAX_LOGGED_CAUSES:
                return
        self._logged_at[kind] = now
        log.warning("stream refused", extra={"peer": host, "kind": self._kind.decode(), "cause": cause})


class _UnprovenCaller:
    """Receives the frames of an accepted connection until the caller has proven its identity or is refused."""

    def __init__(
        self,
        identity: StreamIdentity,
        kind: bytes,
        refusal: RejectionPayload,
        accept: Accept,
        limit: int,
        on_proven: "Callable[[_UnprovenCaller], None]",
    ) -> None:
        """Create the receiver of a connection.

        `on_proven` is called after the proof. The other arguments are those of `StreamAuthenticator`; `accept` returns the
        receiver that takes the connection over after the proof.
        """
        self.started = False  # True if the event loop closes the socket; False if `StreamAuthenticator` has to close it
        self.proven = asyncio.Event()  # set after the proof or after a refusal
        self.cause = ""  # why the caller was refused; empty if it was not refused
        self._verifier = ProofVerifier(identity, kind) if identity.key is not None else None
        self._refusal = refusal
        self._accept = accept
        self._limit = limit
        self._on_proven = on_proven
        self._connection: FrameConnection | None = None

    @property
    def is_admitted(self) -> bool:
        return self.proven.is_set() and not self.cause

    def made(self, connection: FrameConnection) -> FrameReceiver:
        self._connection = connection
        if self._verifier is None:  # no secret is required, because the caller's certificate was its proof
            self.proven.set()
            self._on_proven(self)
            return self._accept(connection)
        connection.allow(MAX_HANDSHAKE_BYTES)
        return self

    def received(self, payload: bytes) -> None:
        assert self._connection is not None
        assert self._verifier is not None
        if self.proven.is_set():
            raise ConnectionError("it sent data before the handshake ended")
        try:
            self._connection.send(self._verifier.received(payload))
        except ProofFailed as error:
            self._connection.send(error.answer or self._refusal(str(error)))
            self._connection.close(error)
            self.cause = str(error)
            self.proven.set()
        if self._verifier.proven:
            self.proven.set()
            self._on_proven(self)
            self._connection.hand_over(self._accept(self._connection), self._limit)

    def resumed(self) -> None:
        """Do nothing, because no writer waits during a handshake."""

    def lost(self, cause: Exception | None) -> None:
        if not self.proven.is_set():
            self.cause = "it has left before it proved who it is" if cause is None else str(cause)
            self.proven.set()

    def end(self, cause: str) -> None:
        """Close the connection if it is open and has not been refused already."""
        if self._connection is not None and not self.cause:
            self.cause = cause
            self._connection.abort(ConnectionError(cause))


async def dial(
    address: str,
    accept: Accept,
    identity: StreamIdentity,
    kind: bytes,
    *,
    limit: int = FRAME_BYTES,
    send_limit: int = SEND_BYTES,
) -> FrameConnection:
    """Open a connection on which both peers have proven their identity. This function has no time limit of its own.

    There is no handshake on a Unix socket, or if the identity is open (`StreamIdentity.is_open`).

    Args:
        address: ``unix:/path`` or ``host:port``.
        accept: Called once with the connection after the handshake, when data may be sent on it.
        identity: The identity of this caller.
        kind: The kind of the stream.
        limit: Maximum length of a payload that may be received, as in `kvstore.net.frames.connect`.
        send_limit: Maximum number of unsent bytes, as in `kvstore.net.frames.connect`.

    Raises:
        OSError: The address cannot be reached, or one of the peers has not proven its identity; the message says which
            peer, and why.
        ValueError: The address is malformed.
    """
    if unix_path(address) or identity.is_open:
        return await connect(address, accept, limit=limit, send_limit=send_limit)
    tls = None if identity.tls is None else DiagnosedTls(identity.tls)
    listener = _UnprovenListener(identity, kind, accept, limit)
    try:
        connection = await connect(
            address, listener.made, limit=limit, send_limit=send_limit, tls=tls, handshake_seconds=DIAL_TLS_SECONDS
        )
        try:
            await listener.proven.wait()
        except asyncio.CancelledError:
            connection.abort()
            raise
    except OSError as error:
        failure = tls.failure if tls is not None and tls.failure is not None else error
        if tls is not None and tls.failure is None and isinstance(error, ConnectionResetError | ConnectionAbortedError):
            raise ConnectionError(
                f"it ended the TLS handshake, or did not answer it: it may not speak TLS ({error})"
            ) from error
        raise ConnectionError(tls_failure_cause(failure, identity.field)) from error
    if listener.cause is not None:
        raise ConnectionError(tls_failure_cause(listener.cause, identity.field)) from listener.cause
    return connection


class _UnprovenListener:
    """Receives the frames of a connection whose listener has not proven its identity yet."""

    def __init__(self, identity: StreamIdentity, kind: bytes, accept: Accept, limit: int) -> None:
        self.proven = asyncio.Event()  # set after the proof or after a refusal
        self.cause: Exception | None = None  # why the listener was refused; None if it was not refused
        self._prover = Prover(identity, kind) if identity.key is not None else None
        self._accept = accept
        self._limit = limit
        self._connection: FrameConnection | None = None

    def made(self, connection: FrameConnection) -> FrameReceiver:
        self._connection = connection
        if self._prover is None:
            self.proven.set()
            return self._accept(connection)
        connection.allow(MAX_HANDSHAKE_BYTES)
        connection.send(self._prover.opening)
        return self

    def received(self, payload: bytes) -> None:
        assert self._connection is not None
        assert self._prover is not None
        try:
            answer = self._prover.received(payload)
        except ProofFailed as error:
            self._refuse(error)
            self._connection.abort(error)
            return
        if answer:
            self._connection.send(answer)
        if self._prover.proven:
            self.proven.set()
            self._connection.hand_over(self._accept(self._connection), self._limit)

    def resumed(self) -> None:
        """Do nothing, because no writer waits during a handshake."""

    def lost(self, cause: Exception | None) -> None:
        self._refuse(cause or ConnectionError("it ended the connection before it proved who it is"))

    def _refuse(self, cause: Exception) -> None:
        if not self.proven.is_set():
            self.cause = cause
            self.proven.set()
