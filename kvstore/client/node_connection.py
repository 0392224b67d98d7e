"""What a client has with its node: the session of the day, whether the node answers, and by which way bytes move.

Rules:

1. What fails because of the node is None here, counted, and logged when it begins. What raises is a bug of the caller.
2. No call takes longer than its deadline, and a breaker keeps callers from paying it again and again.
3. A restarted node refuses the ids of its former incarnation; hands are then shaken again, the new pool is mapped and the
   call repeated, within the same deadline.
4. Where a node cannot be reached, and TLS is the cause, the error or a log line says so (`kvstore.security.tls_diagnosis`).
5. Where shared memory was wanted and could not be had, since too many asked for it perhaps, a thread tries again by and by,
   and what is called from then on goes that way.
6. A link may be opened before its node answers. A thread then shakes hands as soon as the node does; until that, every
   call is None at once and costs its caller nothing. A log line says why it does not answer, once for each cause.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Self, TypeVar

import grpc

from kvstore.circuit_breaker import CircuitBreaker
from kvstore.client.node_session import NodeSession, refusal, shake_hands, with_shared_memory
from kvstore.clock import MILLISECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import InvalidArgument, LayoutMismatch, NamespaceUnknown, StoreUnreachable
from kvstore.messages import DataPath, StoreClientCounters
from kvstore.namespace import KvNamespace
from kvstore.ports import Transport
from kvstore.protocol import wire
from kvstore.security.channels import LoadedCredentials, load
from kvstore.security.credentials import Credentials
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a broken connection of one client is not another's
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),  # a restarted node is found again within this
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
)

Answer = TypeVar("Answer")

JOIN_SECONDS = 5.0
"""One attempt to join a node waits this long for it; a node that starts is heard of at once, since the attempt waits for it."""

JOIN_PAUSE_SECONDS = 1.0  # between two attempts, where one fails at once

log = logging.getLogger(__name__)


class CounterAccumulator:
    """`StoreClientCounters` in the making. Thread-safe."""

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
    """Keeps one client in touch with one node. Thread-safe. Made by `open`, or by `open_early`."""

    def __init__(
        self,
        address: str,
        namespace: KvNamespace,
        channel: grpc.Channel,
        session: NodeSession | None,
        *,
        call_timeout: Nanos,
        prefer: tuple[DataPath, ...],
        access: LoadedCredentials,
        clock: Clock,
    ):
        self.stub = pb_grpc.BlockStoreStub(channel)
        self.counting = CounterAccumulator()
        self.closed = threading.Event()
        self._address = address
        self._namespace = namespace
        self._channel = channel
        self._session = session
        self._outdated = False  # the node said that it is another one by now
        self._call_timeout = call_timeout
        self._prefer = prefer
        self._access = access
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._ended_incarnations: deque[str] = deque(maxlen=16)  # incarnations that are known to be over
        self._handshake = threading.Lock()
        self._memory_breaker = CircuitBreaker()  # of attempts to get at it after all (rule 5)
        self._seeking = threading.Lock()
        self._slower: list[Transport] = []  # ways that were used before it, and may be still

    @classmethod
    def open(
        cls,
        address: str,
        namespace: KvNamespace,
        *,
        deadline: Nanos,
        call_timeout: Nanos,
        prefer: tuple[DataPath, ...],
        credentials: Credentials,
        clock: Clock,
    ) -> Self:
        """Shake hands by the deadline; arguments and errors are those of `kvstore.client.store_client.StoreClient.connect`."""
        access = load(credentials)
        channel = access.channel(address, CHANNEL_OPTIONS)
        try:
            stub = pb_grpc.BlockStoreStub(channel)
            session = shake_hands(stub, address, namespace, prefer, access.data_key, clock, deadline)
        except StoreUnreachable as error:
            channel.close()
            cause = access.diagnose(address)
            raise (StoreUnreachable(f"{error}: {cause}") if cause else error) from error.__cause__
        except BaseException:
            channel.close()
            raise
        return cls(
            address,
            namespace,
            channel,
            session,
            call_timeout=call_timeout,
            prefer=prefer,
            access=access,
            clock=clock,
        )

    @classmethod
    def open_early(
        cls,
        address: str,
        namespace: KvNamespace,
        *,
        call_timeout: Nanos,
        prefer: tuple[DataPath, ...],
        credentials: Credentials,
        clock: Clock,
        failure: str = "",
    ) -> Self:
        """Open a link to a node that does not answer yet (rule 6).

        The arguments are those of `open`. `failure` says why an earlier attempt did not reach the node; it is logged.
        """
        access = load(credentials)
        connection = cls(
            address,
            namespace,
            access.channel(address, CHANNEL_OPTIONS),
            None,
            call_timeout=call_timeout,
            prefer=prefer,
            access=access,
            clock=clock,
        )
        threading.Thread(target=connection._join, args=(failure,), name="kvstore-join", daemon=True).start()
        return connection

    @property
    def session(self) -> NodeSession | None:
        """Return the session with the node that was there last; None while none has answered (rule 6)."""
        return self._session

    @property
    def answers(self) -> bool:
        """Whether the node did when it was last called."""
        return self._breaker.closed

    def call(self, act: Callable[[NodeSession, float], Answer], until: Nanos | None = None) -> Answer | None:
        """The node's answer; None when there is none in time, or the breaker is open.

        Args:
            act: Calls the node of a session, within so many seconds.
            until: When to give up, where that is earlier than by itself.
        """
        started = self._clock.now()
        deadline = earlier(until, Nanos(started + self._call_timeout))
        if self.closed.is_set() or not self._breaker.allows(started):
            return None
        for _ in range(2):  # the second time after shaking hands again (rule 3)
            session = self._current(deadline)
            if session is None:
                return None
            try:
                answer = act(session, seconds(max(deadline - self._clock.now(), MILLISECOND)))
            except grpc.RpcError as error:
                self._judge(error, started)
                if not self._outdated:
                    return None
            else:
                self._breaker.succeeded()
                if session.memory:
                    self._seek_memory(session)
                return answer
        return None

    def session_of(self, incarnation: str) -> NodeSession | None:
        """The session that a match belongs to, which may come from a process that met a restarted node before us."""
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
        """Calls in other threads end with None."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._channel.close()
        with self._handshake:  # a thread that joins or renews stores its session under it
            if self._session is not None:
                self._session.calls.close()
                self._close_transports(self._session)

    def _join(self, reported: str) -> None:
        """Shake hands with a node as soon as it answers; the body of a thread.

        Args:
            reported: The failure of an earlier attempt, or nothing.
        """
        if reported:
            self._log_not_joined(reported)
        while not self.closed.is_set():
            deadline = Nanos(self._clock.now() + nanos(JOIN_SECONDS))
            try:
                session = shake_hands(
                    self.stub,
                    self._address,
                    self._namespace,
                    self._prefer,
                    self._access.data_key,
                    self._clock,
                    deadline,
                )
            except (StoreUnreachable, LayoutMismatch, InvalidArgument) as error:
                failure, cause = self._explained(error)
                if (not reported or cause not in reported) and not self.closed.is_set():
                    reported = failure
                    self._log_not_joined(failure)
                self.closed.wait(JOIN_PAUSE_SECONDS)
            except ValueError:  # the channel was closed meanwhile
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

    def _explained(self, error: Exception) -> tuple[str, str]:
        """Return a failure to join in words, and the part of it that tells causes apart (empty for a node that is just away)."""
        if not isinstance(error, StoreUnreachable) or self.closed.is_set():
            return str(error), str(error)
        cause = self._access.diagnose(self._address)
        return (f"{error}: {cause}" if cause else str(error)), cause

    def _log_not_joined(self, cause: str) -> None:
        log.warning("store node not joined yet", extra={"address": self._address, "cause": cause})

    def _judge(self, error: grpc.RpcError, started: Nanos) -> None:
        """What a failed call says of the node."""
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

    def _failed(self, started: Nanos, reason: str) -> None:
        if self.closed.is_set():
            return
        self.counting.add(failures=1)
        if self._breaker.closed:
            log.warning("store node does not answer", extra={"address": self._address, "reason": reason})
            self._look_at_tls()
        self._breaker.failed(started, self._clock.now())

    def _look_at_tls(self) -> None:
        """Have a thread say whether TLS is why the node does not answer; callers do not wait for that."""
        if not self._access.authority:
            return

        def look() -> None:
            if cause := self._access.diagnose(self._address):
                log.warning("store node cannot be reached over tls", extra={"address": self._address, "cause": cause})

        with contextlib.suppress(RuntimeError):  # no thread to be had now
            threading.Thread(target=look, name="kvstore-tls", daemon=True).start()

    def _current(self, deadline: Nanos) -> NodeSession | None:
        """The session with the node that is there now; None while another thread is shaking hands, or it fails."""
        if not self._outdated:
            return self._session
        if not self._handshake.acquire(blocking=False):
            return None
        try:
            return self._renew(deadline)
        finally:
            self._handshake.release()

    def _renew(self, deadline: Nanos) -> NodeSession | None:
        if not self._outdated:  # another thread has just done it
            return self._session
        started = self._clock.now()
        try:
            session = shake_hands(
                self.stub, self._address, self._namespace, self._prefer, self._access.data_key, self._clock, deadline
            )
        except (StoreUnreachable, LayoutMismatch, InvalidArgument) as error:
            self._failed(started, str(error))
            return None
        former, self._session = self._session, session
        self._outdated = False
        assert former is not None, "only a session that was there is outdated"
        if former.incarnation != session.incarnation:
            self._ended_incarnations.append(former.incarnation)
            log.info("store node has restarted", extra={"store": session.store_id, "incarnation": session.incarnation})
        former.calls.retire()
        self._close_transports(former)
        return session

    def _seek_memory(self, session: NodeSession) -> None:
        now = self._clock.now()
        if not self._memory_breaker.allows(now) or not self._seeking.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._map, args=(session,), name="kvstore-memory", daemon=True).start()
        except RuntimeError:  # no thread to be had now
            self._memory_breaker.failed(now, self._clock.now())
            self._seeking.release()

    def _map(self, session: NodeSession) -> None:
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
            self._seeking.release()

    def _close_transports(self, session: NodeSession) -> None:
        """Those of a session, and those that were used before it had memory."""
        session.transport.close()
        while self._slower:
            self._slower.pop().close()


def earlier(deadline: Nanos | None, other: Nanos) -> Nanos:
    """Of a caller's deadline, if there is one, and ours."""
    return other if deadline is None else min(deadline, other)
