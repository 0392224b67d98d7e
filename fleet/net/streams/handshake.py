"""Beginning of streams of frames over TCP: TLS and the proof of the secret, before the receivers hear of a connection.

Rules:

1. A listener takes at most `MAX_UNPROVEN` connections at a time that have not proven who they are, each for `PROVE_SECONDS` at most. When
   one more comes, the oldest of the host that has most of them is ended (`kvstore.net.unproven_connections`). A connection counts no more from the
   moment at which it has proven who it is.
2. Nothing but the handshake is read from them, and a payload of theirs has at most `MAX_HANDSHAKE_BYTES`.
3. Once it is proven, a connection is its receiver's alone: a proof costs nothing per message.
4. Who is refused is named in the log, once for each host and cause a minute, and is told why if it can understand that.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fleet.net.streams.identity import DiagnosedTls, StreamIdentity, tls_failure_cause
from fleet.net.streams.proof import MAX_HANDSHAKE_BYTES, ProofFailed, ProofVerifier, Prover
from kvstore.net.addresses import unix_path
from kvstore.net.frames import FRAME_BYTES, SEND_BYTES, Accept, FrameConnection, FrameReceiver, connect
from kvstore.net.unix_sockets import OUT_OF_FILES
from kvstore.net.unproven_connections import UnprovenConnections

log = logging.getLogger(__name__)

MAX_UNPROVEN = 32
PROVE_SECONDS = 5.0
DIAL_TLS_SECONDS = 3.0  # less than callers wait for all of it, so that they learn why
OUT_OF_FILES_SECONDS = 0.1
LOG_INTERVAL_SECONDS = 60.0  # between two warnings of one host and cause
MAX_LOGGED_CAUSES = 64  # hosts and causes

NEEDS_TLS = "this end speaks TLS: set the authority of its certificate in the credentials of your end"

RejectionPayload = Callable[[str], bytes]
"""Says to a caller that knows no handshake, in the words of the stream, why it is refused."""


class StreamAuthenticator:
    """Implements `kvstore.net.frames.ConnectionGuard`: the listener's end."""

    def __init__(
        self, identity: StreamIdentity, kind: bytes, refusal: RejectionPayload, *, limit: int = FRAME_BYTES
    ) -> None:
        """Let nobody in yet.

        Args:
            identity: Of this end; not open.
            kind: Of the streams.
            refusal: Makes the payload for callers that do not take part in a handshake.
            limit: Bytes of the longest payload once a caller has proven who it is.
        """
        self._identity = identity
        self._kind = kind
        self._refusal = refusal
        self._limit = limit
        self._unproven: UnprovenConnections[_UnprovenCaller] = UnprovenConnections(MAX_UNPROVEN)
        self._letting_in: dict[_UnprovenCaller, asyncio.Task[None]] = {}  # for a turn after the proof too
        self._told: dict[tuple[str, str], float] = {}  # when a refusal was logged, by host and cause

    @asynccontextmanager
    async def guarding(
        self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept
    ) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        take = partial(self._take, listener, made, accept)
        loop.add_reader(listener, take)
        try:
            yield
        finally:
            loop.remove_reader(listener)
            listener.close()
            tasks = list(self._letting_in.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _take(self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, address = listener.accept()
        except OSError as error:  # mostly a caller that has left meanwhile
            if error.errno in OUT_OF_FILES:
                loop.remove_reader(listener)
                loop.call_later(OUT_OF_FILES_SECONDS, self._take_again, listener, made, accept)
            return
        accepted.setblocking(False)
        host = str(address[0])
        caller = _UnprovenCaller(self._identity, self._kind, self._refusal, accept, self._limit, self._unproven.discard)
        if (gone := self._unproven.add(caller, host)) is not None:
            self._letting_in[gone].cancel("it had proven nothing when newer ones came")
        task = loop.create_task(self._let_in(caller, accepted, host, made), name="stream that is to be proven")
        self._letting_in[caller] = task
        task.add_done_callback(partial(self._done, caller, accepted))

    def _take_again(self, listener: socket.socket, made: Callable[[Accept], FrameConnection], accept: Accept) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, partial(self._take, listener, made, accept))

    def _done(self, caller: "_UnprovenCaller", accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.discard(caller)
        del self._letting_in[caller]
        if not caller.began:
            accepted.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream was not let in", exc_info=error)

    async def _let_in(
        self, caller: "_UnprovenCaller", accepted: socket.socket, host: str, made: Callable[[Accept], FrameConnection]
    ) -> None:
        """Have one connection prove itself; ends with that, whatever comes of it."""
        identity, tls = self._identity, None
        if identity.tls is not None:
            tls = DiagnosedTls(identity.tls, self._refusal(NEEDS_TLS))
        caller.began = True
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
        if caller.is_let_in:  # the connection is its receiver's, although the task has not seen that yet
            return
        caller.end(cause)
        now = asyncio.get_running_loop().time()
        if now - self._told.get((host, cause), -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return
        if len(self._told) >= MAX_LOGGED_CAUSES:
            self._told.clear()
        self._told[host, cause] = now
        log.warning("stream refused", extra={"peer": host, "kind": self._kind.decode(), "cause": cause})


class _UnprovenCaller:
    """Receiver of a connection that has not proven who it is."""

    def __init__(
        self,
        identity: StreamIdentity,
        kind: bytes,
        refusal: RejectionPayload,
        accept: Accept,
        limit: int,
        let_in: "Callable[[_UnprovenCaller], None]",
    ) -> None:
        """Wait for the connection.

        Args:
            identity: As of `StreamAuthenticator`, like `kind`, `refusal` and `limit`.
            kind: See there.
            refusal: See there.
            accept: Gives the receiver that the connection is handed over to.
            limit: See there.
            let_in: Called at the moment at which it has proven who it is.
        """
        self.began = False  # and so its socket is the event loop's
        self.proven = asyncio.Event()  # or refused
        self.cause = ""  # it is refused
        self._verifier = ProofVerifier(identity, kind) if identity.key is not None else None
        self._refusal = refusal
        self._accept = accept
        self._limit = limit
        self._let_in = let_in
        self._connection: FrameConnection | None = None

    @property
    def is_let_in(self) -> bool:
        return self.proven.is_set() and not self.cause

    def made(self, connection: FrameConnection) -> FrameReceiver:
        self._connection = connection
        if self._verifier is None:  # certificates have proven it
            self.proven.set()
            self._let_in(self)
            return self._accept(connection)
        connection.allow(MAX_HANDSHAKE_BYTES)
        return self

    def received(self, payload: bytes) -> None:
        assert self._connection is not None
        assert self._verifier is not None
        if self.proven.is_set():
            raise ConnectionError("it has said more before it was let in")
        try:
            self._connection.send(self._verifier.received(payload))
        except ProofFailed as error:
            self._connection.send(error.answer or self._refusal(str(error)))
            self._connection.close(error)
            self.cause = str(error)
            self.proven.set()
        if self._verifier.proven:
            self.proven.set()
            self._let_in(self)
            self._connection.hand_over(self._accept(self._connection), self._limit)

    def resumed(self) -> None:
        """Nothing waits for it."""

    def lost(self, cause: Exception | None) -> None:
        if not self.proven.is_set():
            self.cause = "it has left before it proved who it is" if cause is None else str(cause)
            self.proven.set()

    def end(self, cause: str) -> None:
        """Cut it, if it is there and was not told why already."""
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
    """Open a connection on which both ends have proven who they are. Put a deadline around it.

    Args:
        address: ``unix:/path``, where no proof is needed, or ``host:port``.
        accept: Called once with the connection, when both ends have proven who they are; it may speak from then on.
        identity: Of this end.
        kind: Of the stream.
        limit: As of `kvstore.net.frames.connect`.
        send_limit: As of `kvstore.net.frames.connect`.

    Raises:
        OSError: Nobody listens there, or one of the two ends has not proven who it is; the message says which and why.
        ValueError: The address is none.
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
    """Receiver of a connection whose far end has not proven who it is."""

    def __init__(self, identity: StreamIdentity, kind: bytes, accept: Accept, limit: int) -> None:
        self.proven = asyncio.Event()  # or refused
        self.cause: Exception | None = None  # it is refused
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
            self._refused(error)
            self._connection.abort(error)
            return
        if answer:
            self._connection.send(answer)
        if self._prover.proven:
            self.proven.set()
            self._connection.hand_over(self._accept(self._connection), self._limit)

    def resumed(self) -> None:
        """Nothing waits for it."""

    def lost(self, cause: Exception | None) -> None:
        self._refused(cause or ConnectionError("it ended the connection before it proved who it is"))

    def _refused(self, cause: Exception) -> None:
        if not self.proven.is_set():
            self.cause = cause
            self.proven.set()
