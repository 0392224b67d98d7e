"""gRPC channels that follow renewed certificates: the first call after a renewal opens a new channel.

Running calls go on over the earlier channel. For these calls, the last `KEPT_CHANNELS` earlier channels stay open;
older channels are closed, which ends their calls. Renewals are usually hours or days apart, so almost all calls end
before their channel is closed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import grpc

from kvstore.security.certificates import CertificateFiles, PemContent

KEPT_CHANNELS = 4
CALL_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class _RenewedCall:
    """A gRPC method, like those of stubs; each call uses the newest channel."""

    def __init__(
        self, channel: "_RenewedChannel", kind: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._named = named
        self._known: tuple[Any, Any] = (None, None)  # the channel of the last call, and the channel's method

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._method(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        # Give access to `future` and `with_call`, which methods of synchronous channels have.
        return getattr(self._method, name)

    @property
    def _method(self) -> Any:
        channel = self._channel.current
        known, method = self._known
        if channel is not known:
            method = getattr(channel, self._kind)(*self._arguments, **self._named)
            self._known = channel, method
        return method


class _RenewedChannel:
    """Opens a new gRPC channel after each renewal; the common part of the synchronous and the asyncio channel."""

    def __init__(self, files: CertificateFiles, opened: Callable[[grpc.ChannelCredentials], Any]) -> None:
        self._files = files
        self._opened = opened
        self._earlier: deque[Any] = deque()
        self._generation, pem = files.latest()
        self._channel = opened(_credentials(pem))

    @property
    def current(self) -> Any:
        """The newest channel. The first use after a renewal of the certificates opens a new one."""
        generation, pem = self._files.latest()
        if generation != self._generation:
            self._generation = generation
            self._earlier.append(self._channel)
            self._channel = self._opened(_credentials(pem))
            while len(self._earlier) > KEPT_CHANNELS:
                self._discard(self._earlier.popleft())
        return self._channel

    def _discard(self, channel: Any) -> None:
        """Close an earlier channel, because more than `KEPT_CHANNELS` of them are open."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in CALL_KINDS:
            return lambda *arguments, **named: _RenewedCall(self, name, arguments, named)
        return getattr(self.current, name)


class RenewedChannel(_RenewedChannel):
    """Behaves as a `grpc.Channel`, and follows renewed certificates. Any thread may make calls."""

    def close(self) -> None:
        """Close the newest channel and the earlier ones that are still open, and end their calls."""
        for channel in (*self._earlier, self._channel):
            channel.close()

    def _discard(self, channel: Any) -> None:
        channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RenewedAioChannel(_RenewedChannel):
    """Behaves as a `grpc.aio.Channel`, and follows renewed certificates."""

    def __init__(self, files: CertificateFiles, opened: Callable[[grpc.ChannelCredentials], Any]) -> None:
        super().__init__(files, opened)
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self, grace: float | None = None) -> None:
        """Close the newest channel and the earlier ones that are still open, and end their calls, at once or after `grace` seconds."""
        for channel in (*self._earlier, self._channel):
            await channel.close(grace)
        for task in tuple(self._closing):
            await task

    def _discard(self, channel: Any) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _credentials(pem: PemContent) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.authority or None, pem.key or None, pem.certificate or None)
