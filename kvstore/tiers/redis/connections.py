"""Redis connections: a pool of open connections, which are replaced after the server was down.

The client library opens a connection (address, TLS, credentials, database). All traffic after that goes through
`kvstore.tiers.redis.resp`.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import StoreNotStarted, TierFailed, reason
from kvstore.tiers.redis.resp import RedisErrorReply, RedisPipeline
from kvstore.tiers.redis.settings import RedisSettings

Answer = TypeVar("Answer")


class RedisConnections:
    """Pool of connections to one server. Thread-safe."""

    def __init__(self, settings: RedisSettings, connect: Callable[[Nanos], RedisPipeline], clock: Clock):
        """Begin without connections; `connect` opens one by a deadline, or raises `TierFailed`."""
        self._settings = settings
        self._connect = connect
        self._clock = clock
        self._turns = threading.BoundedSemaphore(settings.connections)
        self._lock = threading.Lock()
        self._idle: list[RedisPipeline] = []
        self._closed = False

    def turn(self, act: Callable[[RedisPipeline], Answer], deadline: Nanos) -> Answer:
        """Return the result of `act`, which sends requests and reads replies on a connection that no other thread uses.

        Raises:
            TierFailed: No connection was available, or `act` failed or did not end by the deadline.
        """
        left = seconds(deadline - self._clock.now())
        if not self._turns.acquire(timeout=max(left, 0)):
            raise TierFailed(f"{self._settings.place}: all {self._settings.connections} connections are busy")
        try:
            return self._use_connection(act, deadline)
        finally:
            self._turns.release()

    @contextmanager
    def fresh(self, deadline: Nanos) -> Iterator[RedisPipeline]:
        """Yield a new connection, which is closed afterwards; raise the same errors as `turn`."""
        if self._closed:
            raise TierFailed(f"{self._settings.place}: the tier is closed")
        pipe = self._connect(deadline)
        try:
            pipe.begin(deadline)
            yield pipe
        except (OSError, ValueError, RedisErrorReply) as error:
            raise TierFailed(f"{self._settings.place}: {reason(error)}") from error
        finally:
            pipe.close()

    def _use_connection(self, act: Callable[[RedisPipeline], Answer], deadline: Nanos) -> Answer:
        if (kept := self._take_idle()) is not None:
            try:
                return self._run_turn(kept, act, deadline)
            except TierFailed:
                if kept.answered or self._clock.now() >= deadline:
                    # The call is repeated on a new connection only if no reply has arrived, for example because the
                    # server has restarted, and if time is left.
                    raise
        return self._run_turn(self._connect(deadline), act, deadline)

    def _take_idle(self) -> RedisPipeline | None:
        """Take a usable idle connection; return None if there is none. Close unusable connections."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                pipe = self._idle.pop()
            if pipe.is_quiet():
                return pipe
            pipe.close()

    def _run_turn(self, pipe: RedisPipeline, act: Callable[[RedisPipeline], Answer], deadline: Nanos) -> Answer:
        in_step = False
        try:
            pipe.begin(deadline)
            answer = act(pipe)
            in_step = True
        except (OSError, ValueError, RedisErrorReply) as error:
            raise TierFailed(f"{self._settings.place}: {reason(error)}") from error
        finally:
            with self._lock:
                keep = in_step and not self._closed
                if keep:
                    self._idle.append(pipe)
            if not keep:  # replies that were not read would be taken for the replies to later requests
                pipe.close()
        return answer

    def close(self) -> None:
        """Close idle connections now. Connections in use are closed after their current call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for pipe in idle:
            pipe.close()


class RedisConnector:
    """Opens connections to a Redis server with the client library `redis`."""

    def __init__(self, settings: RedisSettings, clock: Clock):
        import redis  # noqa: PLC0415 - the library is optional; only a node with this tier needs it

        self._redis = redis
        self._settings = settings
        self._clock = clock
        try:
            self._connection(1.0)
        # The error may be shown, because it names the option and does not contain the URL with its password.
        except (redis.RedisError, TypeError, ValueError) as error:
            raise StoreNotStarted(f"url: it has an invalid option: {error}") from error

    def __call__(self, deadline: Nanos) -> RedisPipeline:
        """Return an authenticated connection.

        Raises:
            TierFailed: The connection could not be opened by the deadline.
        """
        left = seconds(deadline - self._clock.now())
        timeout_seconds = max(min(left, self._settings.connect_seconds), 0.001)
        try:
            connection = self._connection(timeout_seconds)
            with _cut_after(timeout_seconds, connection):
                connection.connect()
        except (self._redis.RedisError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            # The library raises TypeError, LookupError and RecursionError on invalid replies.
            raise TierFailed(f"{self._settings.place}: {type(error).__name__}: {error}") from error
        return RedisPipeline(connection._sock, connection.disconnect, self._clock)  # noqa: SLF001 - no public accessor

    def _connection(self, timeout_seconds: float) -> Any:
        """Make a connection object that is not connected yet."""
        options: dict[str, Any] = {"protocol": 2, "retry": None, "socket_timeout": timeout_seconds}
        if self._settings.password_file:
            options["password"] = Path(self._settings.password_file).read_text().strip()
        return self._redis.ConnectionPool.from_url(self._settings.url, **options).make_connection()


@contextmanager
def _cut_after(within_seconds: float, connection: Any) -> Iterator[None]:
    """Shut the connection down if the context lasts longer than the given time.

    This is needed because the client library limits only the wait for each piece of a reply.
    """

    def cut() -> None:
        if (opened := connection._sock) is not None:  # noqa: SLF001 - no public accessor
            with suppress(OSError):  # raised if the socket is closed already
                opened.shutdown(socket.SHUT_RDWR)

    end = threading.Timer(within_seconds, cut)
    end.start()
    try:
        yield
    finally:
        end.cancel()
