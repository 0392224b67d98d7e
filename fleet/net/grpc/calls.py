"""Handling of gRPC calls in all services: parse messages, report rejections with details, contain errors and disconnects.

Handlers take requests as bytes, because the library would answer unparsable requests with INTERNAL. A client that sends
invalid UTF-8 or an oversized message therefore gets a typed error, as for every other mistake.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Never, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from fleet.core.errors import Reason, RequestRejected, internal_error
from fleet.net.grpc.errors import encode_status

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 << 20  # maximum size of a request message; the body of an HTTP request has the same default
# Maximum time for which `send_message` waits while the caller does not read; then the call ends. HTTP has the same default. The
# library itself would wait until the call's deadline.
WRITE_SECONDS = 30.0

Context = Any
"""`grpc.aio.ServicerContext`. The type is Any, because the type stubs require message types, and these calls pass bytes."""

Answer = TypeVar("Answer")
AnyMessage = TypeVar("AnyMessage", bound=Message)


class CallerDisconnected(Exception):
    """Raised if no answer can be sent: the caller has left, does not read for too long, or the port closes."""


async def answer_call(call: Awaitable[Answer], context: Context) -> Answer:
    """Return the answer of a call; report a rejection or an error to the caller.

    Raises:
        AbortError: The call failed, and the caller gets the status of the failure.
        CancelledError: No answer can be sent to the caller (`CallerDisconnected`).
    """
    try:
        return await call
    except RequestRejected as refused:
        await abort_call(context, refused)
    except grpc.aio.AbortError:
        raise
    except (CallerDisconnected, grpc.aio.BaseError):  # `BaseError` is raised if the library cannot write to the caller
        # No status is sent: the library will notice that the call has ended, and would log the status as an error.
        raise asyncio.CancelledError from None
    except Exception:  # supervisor: any error in a handler only ends this call, with the status INTERNAL
        log.exception("call failed")
        await abort_call(context, internal_error())


def unary_handler(method: Callable[[bytes], Awaitable[Message]]) -> Any:
    """Return a handler for a method that takes bytes and gives one answer."""
    return unary_context_handler(lambda content, _: method(content))


def unary_context_handler(method: Callable[[bytes, Context], Awaitable[Message]]) -> Any:
    """Return a handler for a method that takes bytes and the call's context, and gives one answer."""

    async def handle(content: bytes, context: Context) -> Message:
        return await answer_call(method(content, context), context)

    handler: Any = grpc.unary_unary_rpc_method_handler  # Any, because the type stubs do not allow coroutines
    return handler(handle, response_serializer=serialize)


def parse_message(kind: type[AnyMessage], content: bytes) -> AnyMessage:
    """Return the message that `content` encodes.

    Raises:
        RequestRejected: The message is too large or malformed.
    """
    if len(content) > MAX_REQUEST_BYTES:
        raise RequestRejected(
            Reason.TOO_LARGE, f"the message has {len(content)} bytes, and {MAX_REQUEST_BYTES} are allowed in one"
        )
    try:
        return kind.FromString(content)
    except DecodeError as error:
        cause = "the message cannot be parsed: it is no such message, or a string in it is not UTF-8"
        raise RequestRejected(Reason.INVALID_ARGUMENT, cause) from error


class MessageWriter:
    """Writes the messages of one streaming call; made by `open_writer`."""

    def __init__(self, context: Context, limit: asyncio.Timeout, seconds: float) -> None:
        self._context = context
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        # Time at which a message began to wait for the caller; None if no message waits.
        self._since: float | None = None
        self._timer = self._loop.call_later(self._seconds, self._look)

    async def send(self, message: Message) -> None:
        """Write one message, and wait while the caller does not read. Do not call this method again before it has returned.

        Raises:
            CallerDisconnected: The caller has left, or the port closes.
        """
        self._since = self._loop.time()
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise CallerDisconnected from error
        finally:
            self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._seconds
        if due <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._look)


@asynccontextmanager
async def open_writer(context: Context, seconds: float) -> AsyncGenerator[MessageWriter]:
    """Yield the writer of one call, for calls that send a message per token.

    The writer needs one timer per call. `send_message` needs one timer per message, which adds a fifth to the time that
    sending the message takes.

    Args:
        context: The call.
        seconds: The time for which one message may wait for its caller.

    Raises:
        CallerDisconnected: The caller did not read for too long.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            writer = MessageWriter(context, limit, seconds)
            try:
                yield writer
            finally:
                writer.close()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CallerDisconnected from error


async def send_message(context: Context, message: Message) -> None:
    """Write one message of a stream, and wait while the caller does not read.

    Raises:
        CallerDisconnected: The caller has left, the port closes, or the caller did not read for too long.
    """
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await context.write(message)
    except (grpc.aio.BaseError, TimeoutError) as error:
        raise CallerDisconnected from error


def serialize(message: Message) -> bytes:
    return message.SerializeToString()


def authorization_of(context: Context) -> str:
    """Return the authorization metadata of a call; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return str(value)
    return ""


def headers_of(context: Context, names: Collection[str]) -> dict[bytes, bytes]:
    """Return the metadata of a call with these names, as HTTP headers; several values of one name are joined by commas."""
    found: dict[bytes, bytes] = {}
    for key, value in context.invocation_metadata() or ():
        if key in names:
            name, content = key.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace")
            found[name] = found[name] + b"," + content if name in found else content
    return found


async def abort_call(context: Context, refused: RequestRejected) -> Never:
    await context.abort_with_status(encode_status(refused))
    raise AssertionError  # never reached, because `abort_with_status` raises
