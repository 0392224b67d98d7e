"""Passages to an external backend: requests that are passed on byte by byte while they arrive, and their answers.

Rules:

1. Each passage has a connection of its own, which is closed at the end of the passage. The body and the answer flow at
   the same time. If one side does not read, the router stops reading from the other side, so memory is bounded.
2. The client gets the answer of the server, whatever its status (except in rule 3). Only headers that concern the
   connection to the server are removed. If the header ``location`` names the server itself, the server's address is cut
   out of it.
3. If a server answers a request without a body with 404, the request goes to the next server if there is one, because
   stored objects (responses, files, batches) exist on one server only.
4. A passage ends when the server and the client have both sent nothing for the server's `silence_timeout_seconds`. If
   a client sends too slowly, or does not read, the time limits of its own connection to the router end the passage.
"""

import asyncio
import re

import httptools

from fleet.backends.external.http_client import FIRST_FINAL_STATUS, ServerAddress, connection_failure_cause
from fleet.backends.external.upstream import (
    MAX_HEAD_BYTES,
    MAX_INTERIM_HEADS,
    AnswerHead,
    UnclearEnd,
    connection_line,
    read_head,
)
from fleet.core.errors import RequestRejected
from fleet.frontend.openai.passage import Passage
from fleet.net.http.exchange import ClientDisconnected

READ_BYTES = 64 << 10
NOT_FOUND = 404
SWITCHING = 101
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?=[ \r])")


class ServerLost(Exception):
    """Error: the server sent no answer, or only a part of one. The message states the reason."""


class ServerPassage:
    """Carries one request to one server, and the answer back to the client."""

    def __init__(self, passage: Passage, address: ServerAddress, opening: bytes, silence_seconds: float) -> None:
        """Create the passage. `opening` contains the first lines of the head that the server gets."""
        self._passage = passage
        self._address = address
        self._opening = opening
        self._silence_seconds = silence_seconds
        self._limit = asyncio.timeout(None)
        self._switched = asyncio.Event()
        self._begun = False
        self._complete = False
        # decoded parts of the answer, for clients that do not understand chunked encoding
        self._content: list[bytes] = []

    async def run(self, connect_seconds: float, *, may_move: bool) -> bool:
        """Pass the request on to the server, and the answer to the client.

        Args:
            connect_seconds: Time limit for opening the connection.
            may_move: True if another server may answer when this one answers 404.

        Returns:
            True if the request is over; False if the caller has to pass it to another server.

        Raises:
            OSError: The server cannot be reached, or does not accept the connection in time; nothing was sent.
            ServerLost: The server sent no answer, or only a part of one.
            RequestRejected: The client's body does not arrive.
            ClientDisconnected: The client has closed its connection.
        """
        address = self._address
        async with asyncio.timeout(connect_seconds):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=address.tls, limit=READ_BYTES
            )
        answered = True
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._send(writer))
                answered = await self._receive(reader, may_move=may_move)
                sending.cancel()
        except* (ServerLost, RequestRejected, ClientDisconnected) as failures:
            failure = failures.exceptions[0]
        finally:
            writer.transport.abort()
        if failure is not None:
            raise failure
        return answered

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        passage = self._passage
        try:
            writer.write(self._opening + passage.header_lines() + b"\r\n")
            if passage.switches:
                await self._switched.wait()
            raw = passage.sized or passage.switches
            async for piece in passage.body():
                writer.write(piece if raw else b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                self._restart_limit()
            if not raw:
                writer.write(b"0\r\n\r\n")
            elif passage.switches and writer.can_write_eof():
                writer.write_eof()
            await writer.drain()
        except ConnectionError:
            pass  # ignored: the server may have answered before it read the whole request; `_receive` finds the answer

    async def _receive(self, reader: asyncio.StreamReader, *, may_move: bool) -> bool:
        try:
            async with self._limit:
                self._limit.reschedule(self._silent_at())
                status, content, rest = await self._final_head(reader)
                if status == NOT_FOUND and may_move:
                    return False
                if status == SWITCHING:
                    await self._switch(reader, content, rest)
                else:
                    await self._answer(reader, content, rest)
        except TimeoutError as error:
            raise ServerLost(f"nothing was sent for {self._silence_seconds:g} s") from error
        except UnclearEnd as error:
            raise ServerLost(str(error)) from error
        except httptools.HttpParserError as error:
            raise ServerLost(f"its answer is no HTTP answer: {error}") from error
        except OSError as error:
            raise ServerLost(connection_failure_cause(error)) from error
        return True

    async def _final_head(self, reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
        """Return the status of the answer, its head, and the bytes after the head. Skip interim heads (status 1xx).

        Raises:
            ServerLost: The connection was closed, the answer is no HTTP answer, or the head or the number of interim heads is too large.
        """
        held = b""
        for _ in range(MAX_INTERIM_HEADS):
            while (end := held.find(b"\r\n\r\n") + 4) < 4:  # the end of the head was not found
                if len(held) > MAX_HEAD_BYTES:
                    raise ServerLost(f"the head of its answer is larger than {MAX_HEAD_BYTES} bytes")
                if not (data := await reader.read(READ_BYTES)):
                    raise ServerLost("it closed the connection before its answer")
                held += data
            found = _STATUS.match(held)
            if found is None:
                raise ServerLost("its answer is no HTTP answer")
            status = int(found[1])
            content, held = held[:end], held[end:]
            if status >= FIRST_FINAL_STATUS or status == SWITCHING:
                return status, content, held
            self._restart_limit()
        raise ServerLost(f"it sent more than {MAX_INTERIM_HEADS} interim heads")

    async def _answer(self, reader: asyncio.StreamReader, content: bytes, rest: bytes) -> None:
        exchange = self._passage.exchange
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(content + rest)
        if self._passage.method == "HEAD":
            self._complete, rest = True, b""
        head = read_head(self._with_own_location(content))
        plain = head.chunked and not exchange.request.head.chunked_answer
        keep_alive = exchange.keeps_alive and not (plain or head.until_close)
        tail = connection_line(keep_alive=keep_alive, chunks=exchange.request.head.chunked_answer) + b"\r\n"
        await self._pass_on(self._head(head, head.plain_start if plain else head.start) + tail)
        data = rest
        while True:
            if content := self._decoded() if plain else data:
                await self._pass_on(content)
            if self._complete:
                break
            if not (data := await reader.read(READ_BYTES)):
                if head.until_close:
                    break
                raise ServerLost("it closed the connection before the end of its answer")
            parser.feed_data(data)
        exchange.passed_on(keep_alive=keep_alive)

    async def _switch(self, reader: asyncio.StreamReader, content: bytes, rest: bytes) -> None:
        """Pass on the bytes of a WebSocket until one side ends it.

        Raises:
            ServerLost: The client did not ask for another protocol.
        """
        if not self._passage.switches:
            raise ServerLost("it switches to another protocol")
        head = read_head(content)
        await self._pass_on(self._head(head, head.start) + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + rest)
        self._switched.set()
        while data := await reader.read(READ_BYTES):
            await self._pass_on(data)
        self._passage.exchange.passed_on(keep_alive=False)

    def _head(self, head: AnswerHead, start: bytes) -> bytes:
        """Return the head of the answer for the client: `start` and Fleet's header lines.

        The caller adds the header ``connection`` and the empty line.
        """
        passage = self._passage
        lines = [("x-fleet-request-id", str(passage.request_id))]
        lines += [] if head.named else [("x-request-id", str(passage.request_id))]
        lines += () if head.limits else passage.limits
        return start + b"".join(f"{name}: {value}\r\n".encode() for name, value in lines)

    def _with_own_location(self, content: bytes) -> bytes:
        own = re.escape(self._address.netloc) + re.escape(self._address.prefix)
        return re.sub(rb"\r\n(location:[ \t]*)https?://" + own + rb"(?=/)", rb"\r\n\1", content, flags=re.IGNORECASE)

    async def _pass_on(self, content: bytes) -> None:
        """Send bytes to the client, and wait until few enough bytes are unread. This wait does not count as silence of the server."""
        exchange = self._passage.exchange
        exchange.pass_on(content)
        self._limit.reschedule(None)
        await exchange.drained()
        self._limit.reschedule(self._silent_at())

    def _restart_limit(self) -> None:
        """Restart the silence limit, because client or server has sent something. Do nothing if the limit is stopped or over."""
        if self._limit.when() is not None and not self._limit.expired():
            self._limit.reschedule(self._silent_at())

    def _silent_at(self) -> float:
        return asyncio.get_running_loop().time() + self._silence_seconds

    def _decoded(self) -> bytes:
        content = b"".join(self._content)
        self._content.clear()
        return content

    # Callbacks of the HTTP parser

    def on_message_begin(self) -> None:
        if self._begun:  # the client would take the second answer for that to its next request
            raise ValueError("the server sent two answers to one request")
        self._begun = True

    def on_body(self, content: bytes) -> None:
        if not self._passage.exchange.request.head.chunked_answer:
            self._content.append(content)

    def on_message_complete(self) -> None:
        self._complete = True
