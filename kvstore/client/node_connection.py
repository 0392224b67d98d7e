"""Connection of a store client to its node, with a circuit breaker and a new handshake after each restart of the node.

The handshake and the choice of the data path are in `kvstore.client.node_session`.

Rules:

1. If the node fails, a call returns None. The failure is counted, and the log says when failures begin. If a call
   raises an exception, the caller has a bug.
2. Each call ends at its deadline. While the node fails, a circuit breaker ends calls at once, so that callers do not
   wait for a dead node again and again.
3. A node that has restarted refuses the ids that its former incarnation has given out. The connection then repeats the
   handshake, opens a data path to the new pool and repeats the call, within the same deadline.
4. If TLS is the reason why a node cannot be reached, the error or a log line says so
   (`kvstore.security.tls_diagnosis`).
5. If shared memory could not be mapped at the handshake, perhaps because too many clients asked for it, later calls
   start a thread that tries again. After each failure there is a pause. Calls use shared memory once it is mapped.
6. A connection may be opened before its node answers. A thread then performs the handshake as soon as the node answers.
   Until then, each call returns None at once. The log says why the node cannot be used yet, and again when the cause
   changes.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import grpc

from kvstore.circuit_breaker import CircuitBreaker
from kvstore.client.node_session import NodeSession, refusal, shake_hands, with_shared_memory
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import IncompatibleVersion, InvalidArgument, LayoutMismatch, NamespaceUnknown, StoreUnreachable
from kvstore.messages import DataPath, StoreClientCounters
from kvstore.namespace import KvNamespace
from kvstore.ports import Transport
from kvstore.protocol import wire
from kvstore.security.channels import load
from kvstore.security.credentials import Credentials
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # each client has its own connection, so no two share a broken one
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),  # maximum pause before the next attempt to connect to a restarted node
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
)

Answer = TypeVar("Answer")

JOIN_SECONDS = 5.0
"""Time limit for one attempt to join a node, that is, to perform the first handshake with it. An attempt waits for a
node that is still starting, and succeeds as soon as the node answers."""

JOIN_PAUSE_SECONDS = 1.0  # pause after a failed attempt to join a node

log = logging.getLogger(__name__)


class CounterAccumulator:
    """Counts the blocks, bytes and failures of one client, for `StoreClientCounters`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(StoreClientCounters.__struct_fields__, 0)

    def add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count

    def read(self) -> StoreClientCounters:
        with self._lock:
            return StoreClientCounters(**self._counts)


class NodeConnection:
    """Connects one client to one node and makes the client's calls, by the rules of this module. Thread-safe."""

    def __init__(
        self,
        address: str,
        namespace: KvNamespace,
        *,
        call_timeout: Nanos,
        prefer: tuple[DataPath, ...],
        credentials: Credentials,
        credentials_field: str,
        clock: Clock,
    ):
        """Prepare the channel. The caller then has to call `open` or `open_early`.

        Raise BadCredentials if a file of the credentials cannot be used.
        """
        self._access = load(credentials, field=credentials_field)
        self._channel = self._access.channel(address, CHANNEL_OPTIONS)
        self.stub = pb_grpc.BlockStoreStub(self._channel)
        self.counting = CounterAccumulator()
        self.closed = threading.Event()
        self._address = address
        self._namespace = namespace
        self._session: NodeSession | None = None
        # True if the node seems to have restarted, so that the session belongs to a former incarnation of the node.
        self._outdated = False
        self._call_timeout = call_timeout
        self._prefer = prefer
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._ended_incarnations: deque[str] = deque(maxlen=16)
        self._handshake = threading.Lock()
        self._memory_breaker = CircuitBreaker()  # decides when to try again to map shared memory (rule 5)
        self.seeking = threading.Lock()
        # Data paths of the session from before shared memory was mapped. They stay open until the session ends, because
        # calls in other threads may still use them.
        self._slower: list[Transport] = []

    def open(self, deadline: Nanos) -> None:
        """Perform the handshake before the deadline.

        If the handshake fails, close the channel and raise the error of `shake_hands`.
        """
        try:
            self._session = self._shake_hands(deadline)
        except StoreUnreachable as error:
            self._channel.close()
            cause = self._access.diagnose(self._address)
            raise (StoreUnreachable(f"{error}: {cause}") if cause else error) from error.__cause__
        except BaseException:
            self._channel.close()
            raise

    def open_early(self, failure: str = "") -> None:
        """Start a thread that performs the handshake when the node answers (rule 6).

        `failure` is the message of an earlier attempt, for the log; empty if there was none.
        """
        threading.Thread(target=self._join, args=(failure,), name="kvstore-join", daemon=True).start()

    @property
    def session(self) -> NodeSession | None:
        """Result of the last successful handshake; None if no handshake has succeeded yet (rule 6)."""
        return self._session

    @property
    def answers(self) -> bool:
        """False after a call or a repeated handshake has failed, and until one succeeds. A refusal by the node changes nothing. True at the start."""
        return self._breaker.closed

    def call(self, act: Callable[[NodeSession, float], Answer], until: Nanos | None = None) -> Answer | None:
        """Call the node by `act(session, seconds left)`; return None if the call fails or cannot be made.

        The call ends at `until` or when the connection's call timeout is over, whichever is earlier. It returns None at
        once if the circuit breaker does not allow it, before the first handshake has succeeded, and after `close`. Raise
        InvalidArgument if the node finds the request invalid.
        """
        started = self._clock.now()
        deadline = earlier(until, Nanos(started + self._call_timeout))
        if self.closed.is_set() or not self._breaker.allows(started):
            return None
        for _ in range(2):  # if the session is outdated, a second attempt follows after a new handshake (rule 3)
            session = self._current(deadline)
            if session is None:
                return None
            try:
                answer = act(session, seconds(max(deadline - self._clock.now(), MILLISECOND)))
            except grpc.RpcError as error:
                self._judge(error, started)
                if not self._outdated:
                    return None
            except ValueError as error:
                self._raise_unless_closed(error)
                return None
            else:
                self._breaker.succeeded()
                if session.memory:
                    self._retry_shared_memory(session)
                return answer
        return None

    def session_of(self, incarnation: str) -> NodeSession | None:
        """Return the session with `incarnation`: the incarnation of the node from which the caller's match or write grant comes.

        Return None if this incarnation has ended, if the node cannot be reached or has not been joined yet, or if
        another thread is performing a handshake now.

        The match or grant may come from another process that has noticed a restart of the node earlier than this
        process. A new handshake then shows whether the node has this incarnation.
        """
        session = self._session
        if session is None or session.incarnation == incarnation:
            return session
        now = self._clock.now()
        if self.closed.is_set() or incarnation in self._ended_incarnations or not self._breaker.allows(now):
            return None
        self._outdated = True
        renewed = self._current(Nanos(now + self._call_timeout))
        if renewed is None:
            return None
        self._breaker.succeeded()
        if renewed.incarnation != incarnation:
            self._ended_incarnations.append(incarnation)
            return None
        return renewed

    def close(self) -> None:
        """Close the connection. Calls that are running in other threads then return None."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._channel.close()
        with self._handshake:  # other threads store a session only under this lock, so no new session can follow
            if self._session is not None:
                self._session.calls.close()
                self._close_transports(self._session)

    def _join(self, reported: str) -> None:
        """Perform the handshake as soon as the node answers; end when the connection is closed. Runs in its own thread.

        `reported` is the message of an earlier failure, which is logged first; empty if there was none.
        """
        if reported:
            self._log_not_joined(reported)
        while not self.closed.is_set():
            try:
                session = self._shake_hands(Nanos(self._clock.now() + nanos(JOIN_SECONDS)))
            except (StoreUnreachable, LayoutMismatch, InvalidArgument) as error:
                failure, cause = self._explain(error)
                if (not reported or cause not in reported) and not self.closed.is_set():
                    reported = failure
                    self._log_not_joined(failure)
                self.closed.wait(JOIN_PAUSE_SECONDS)
            except ValueError:  # gRPC raises this for a call on a closed channel
                return
            else:
                with self._handshake:
                    if self.closed.is_set():
                        session.calls.close()
                        self._close_transports(session)
                        return
                    self._session = session
                log.info("store node joined", extra={"address": self._address, "store": session.store_id})
                return

    def _shake_hands(self, deadline: Nanos) -> NodeSession:
        return shake_hands(
            self.stub, self._address, self._namespace, self._prefer, self._access.data_key, self._clock, deadline
        )

    def _explain(self, error: Exception) -> tuple[str, str]:
        """Return the message of a failed join, and the part of the message that names the cause.

        The part is empty if nothing is known except that the node does not answer.
        """
        if not isinstance(error, StoreUnreachable) or isinstance(error, IncompatibleVersion) or self.closed.is_set():
            return str(error), str(error)
        cause = self._access.diagnose(self._address)
        return (f"{error}: {cause}" if cause else str(error)), cause

    def _log_not_joined(self, cause: str) -> None:
        log.warning("store node not joined yet", extra={"address": self._address, "cause": cause})

    def _judge(self, error: grpc.RpcError, started: Nanos) -> None:
        """Handle a failed call by its gRPC status.

        FAILED_PRECONDITION marks the session as outdated (rule 3), and INVALID_ARGUMENT raises InvalidArgument. Any
        other status counts as a failure, which the circuit breaker also counts unless the status is RESOURCE_EXHAUSTED.
        """
        match error.code():
            case grpc.StatusCode.FAILED_PRECONDITION:
                self._outdated = True
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise refusal(self._address, error) from error
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.counting.add(failures=1)
                log.warning("store node refuses", extra={"address": self._address, "details": error.details()})
            case code:
                self._failed(started, f"{code.name}: {error.details()}")

    def _raise_unless_closed(self, error: ValueError) -> None:
        """Raise the error of a call again, unless the connection is closed: a call on a closed channel raises ValueError."""
        if self.closed.is_set():
            return
        raise error

    def _failed(self, started: Nanos, reason: str) -> None:
        if self.closed.is_set():
            return
        self.counting.add(failures=1)
        if self._breaker.closed:
            log.warning("store node does not answer", extra={"address": self._address, "reason": reason})
            self._diagnose_tls()
        self._breaker.failed(started, self._clock.now())

    def _diagnose_tls(self) -> None:
        """Find out in a new thread whether TLS is the cause of a failed call, and log it if so. Do not wait for the thread."""
        if not self._access.has_authority:
            return

        def look() -> None:
            if cause := self._access.diagnose(self._address):
                log.warning("store node cannot be reached over tls", extra={"address": self._address, "cause": cause})

        with contextlib.suppress(RuntimeError):  # RuntimeError: the process cannot start another thread now
            threading.Thread(target=look, name="kvstore-tls", daemon=True).start()

    def _current(self, deadline: Nanos) -> NodeSession | None:
        """Return the session. If it is outdated, perform a new handshake first.

        Return None if another thread is already performing that handshake, if the handshake fails, or if the node has
        not been joined yet.
        """
        if not self._outdated:
            return self._session
        if not self._handshake.acquire(blocking=False):
            return None
        try:
            return self._renew(deadline)
        finally:
            self._handshake.release()

    def _renew(self, deadline: Nanos) -> NodeSession | None:
        if not self._outdated:  # another thread has just renewed the session
            return self._session
        started = self._clock.now()
        try:
            session = self._shake_hands(deadline)
        except (StoreUnreachable, LayoutMismatch, InvalidArgument) as error:
            self._failed(started, str(error))
            return None
        except ValueError as error:
            self._raise_unless_closed(error)
            return None
        former, self._session = self._session, session
        self._outdated = False
        assert former is not None, "only an existing session can be outdated"
        if former.incarnation != session.incarnation:
            self._ended_incarnations.append(former.incarnation)
            log.info("store node has restarted", extra={"store": session.store_id, "incarnation": session.incarnation})
        former.calls.retire()
        self._close_transports(former)
        return session

    def _retry_shared_memory(self, session: NodeSession) -> None:
        now = self._clock.now()
        if not self._memory_breaker.allows(now) or not self.seeking.acquire(blocking=False):
            return
        try:
            threading.Thread(
                target=self._map_shared_memory, args=(session,), name="kvstore-memory", daemon=True
            ).start()
        except RuntimeError:  # the process cannot start another thread now
            self._memory_breaker.failed(now, self._clock.now())
            self.seeking.release()

    def _map_shared_memory(self, session: NodeSession) -> None:
        started = self._clock.now()
        try:
            better = with_shared_memory(session, self._namespace, self._clock, Nanos(started + self._call_timeout))
        except (StoreUnreachable, NamespaceUnknown):
            self._memory_breaker.failed(started, self._clock.now())
            return
        else:
            with self._handshake:
                if self._session is session and not self.closed.is_set():
                    self._session = better
                    self._slower.append(session.transport)
            self._memory_breaker.succeeded()
        finally:
            self.seeking.release()

    def _close_transports(self, session: NodeSession) -> None:
        """Close the session's data path, and the data paths that were used before shared memory was mapped."""
        session.transport.close()
        while self._slower:
            self._slower.pop().close()


def earlier(deadline: Nanos | None, other: Nanos) -> Nanos:
    """Return the caller's deadline or `other`, whichever is earlier; `other` if the caller has no deadline (None)."""
    return other if deadline is None else min(deadline, other)
