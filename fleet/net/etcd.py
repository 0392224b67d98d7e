"""Connections to etcd for discovery and plan connectors.

The protobuf messages come from the package aetcd. Its client is not used because it does not support TLS and its calls
may wait forever.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import grpc

from fleet.core.errors import ConfigurationRefused
from fleet.net.grpc.options import PING_TIMEOUT
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import diagnose_address

T = TypeVar("T")

CALL_SECONDS = 2.0
DIAGNOSIS_SECONDS = 0.5  # time limit for each step of a TLS diagnosis, which is made once per outage of an endpoint
OPTIONS = (
    # etcd closes a connection if its client pings more often than every 5 s, or while no call runs on the connection.
    ("grpc.keepalive_time_ms", 10_000),
    *PING_TIMEOUT,
    # Each channel has its own connections, so that gRPC's backoff after a broken connection does not delay the next try.
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdChannels:
    """Calls etcd over one channel: to the endpoint that answered last, or after a failure to the next endpoint."""

    def __init__(self, endpoints: Sequence[str], credentials: Credentials, section: str) -> None:
        """Create the object without connecting. Without an authority, TLS is not used.

        Error messages name the settings section `section`.

        Raises:
            ConfigurationRefused: A file of `credentials` cannot be read.
        """
        self._endpoints = endpoints
        self._tls = _tls(credentials, section)
        self._credentials = credentials
        self._field = f"{section}.credentials"
        # Result of the TLS diagnosis of each endpoint that could not be reached and has not answered since; empty: TLS was not the reason.
        self._causes: dict[str, str] = {}
        self._turn = count(1)
        self._channel: grpc.aio.Channel | None = None
        self._at = self._endpoints[0]

    @property
    def current(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self._tls is None:
                self._channel = grpc.aio.insecure_channel(self._at, options=OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self._at, self._tls, options=OPTIONS)
        return self._channel

    async def call(self, ask: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        """Make a call to the present endpoint and return its answer.

        Raises:
            AioRpcError: The call failed; the details name a TLS cause if there is one. The next call goes to the next
                endpoint.
        """
        try:
            answer = await ask(self.current)
        except grpc.aio.AioRpcError as error:
            await self.close()
            at, self._at = self._at, self._endpoints[next(self._turn) % len(self._endpoints)]
            raise await self._explained(error, at) from error
        self._causes.pop(self._at, None)
        return answer

    async def _explained(self, error: grpc.aio.AioRpcError, at: str) -> grpc.aio.AioRpcError:
        """Return the error, completed by the TLS failure of the endpoint if there is one.

        The cause is looked for once per outage of the endpoint.
        """
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return error
        if at not in self._causes:
            look = partial(
                diagnose_address, at, self._credentials, field=self._field, timeout_seconds=DIAGNOSIS_SECONDS
            )
            self._causes[at] = await asyncio.to_thread(look)
        if not (cause := self._causes[at]):
            return error
        return grpc.aio.AioRpcError(
            error.code(), error.initial_metadata(), error.trailing_metadata(), f"{error.details()}; {cause}"
        )

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _tls(credentials: Credentials, section: str) -> grpc.ChannelCredentials | None:
    if not credentials.authority:
        return None
    given = []
    for name in ("authority", "key", "certificate"):
        path = getattr(credentials, name)
        try:
            given.append(Path(path).read_bytes() if path else None)
        except OSError as error:
            raise ConfigurationRefused(f"{section}.credentials.{name}: {path}: {error.strerror}") from error
    return grpc.ssl_channel_credentials(*given)


def etcd_error_text(error: grpc.aio.AioRpcError) -> str:
    """Return the text of an error of a call to etcd, for a log or a status."""
    return f"etcd: {error.code().name}: {error.details()}"
