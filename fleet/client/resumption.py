"""Resumption: decides how a client continues an answer whose stream has broken.

Rules:

1. A stream breaks if its router stops, cannot be reached any more, or hangs (it does not answer pings of the
   connection). All other errors end the answer. After a break, the client also tries again if a router rejects the
   request because the router's queue is full, or because the router knows no worker.
2. If the client has a resume token, it sends the next router three things: the request, the resume token, and all
   tokens of the answer that it has. The router then generates the rest. Without a resume token, the client sends the
   request again unchanged if no part of the answer has arrived. If a part has arrived, the stream ends with an error,
   because the caller would get this part twice. A router gives no resume tokens if its clients have API keys, but it
   has neither `prompt_secret` nor `tenant_secret`.
3. The client tries the routers in turn. In the first round it pauses only if a router has asked for a pause. It gives up
   `resume_seconds` after the break, or at the deadline of the answer. When any message arrives, the stream is no longer broken.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from fleet.client.errors import DeadlineExceeded, FleetError, Unavailable
from fleet.client.results import StreamedAnswer
from fleet.client.tls import ClientTls, tls_cause
from fleet.core.clock import SECOND, Clock
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.system_clock import SystemClock
from fleet.v1 import inference_pb2 as pb
from fleet.wire.inference import encode_resume

RESUME_SECONDS = 30.0
"""The default of `resume_seconds` if a client has several routers. It takes up to 8 s to notice a hung router, and the
next router may be busy for a while."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0

RESUMABLE_OPTIONS = (("grpc.min_reconnect_backoff_ms", 5_000),)
"""Options of gRPC channels by which a connection is closed after 5 s, instead of 20 s, if the router accepts it and
then sends nothing."""

Router = TypeVar("Router")


class RouterRing(Generic[Router]):
    """Chooses the router of a cluster to which requests go: `current`, until it fails, and then the next one."""

    def __init__(self, routers: Sequence[Router], addresses: Sequence[str], tls: ClientTls | None = None) -> None:
        """Begin with the first router. `addresses` are those of the routers; `tls` names the TLS files for all connections."""
        self._addresses = addresses
        self._tls = tls
        self._routers = tuple(routers)
        self._position = 0

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def current(self) -> Router:
        return self._routers[self._position]

    def tls_cause(self, router: Router) -> str:
        """Return the result of `fleet.client.tls.tls_cause` for the address of a router."""
        return tls_cause(self._addresses[self._routers.index(router)], self._tls)

    def leave(self, router: Router) -> None:
        """Change to the next router, because `router` has failed. If another stream has already changed, do nothing."""
        if router is self.current:
            self._position = (self._position + 1) % len(self._routers)


class Resumption:
    """Decides when and how the request of one answer is sent again after its stream broke."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        routers: int,
        resume_seconds: float,
        timeout_seconds: float | None,
        clock: Clock = SystemClock(),  # noqa: B008 - the default has no state
    ) -> None:
        """Mark the request as resumable if its answer can be continued, and start the time limit. Nothing is sent yet.

        Args:
            request: The message of the request, as it is sent the first time.
            routers: The number of routers that the client knows.
            resume_seconds: For this many seconds after a break the request is sent again; 0 means never.
            timeout_seconds: Time limit for the whole answer, from now on, or None for no limit.
            clock: Clock by which both limits are measured.
        """
        # A vector comes in one message, so a broken stream has no part of it that could be kept.
        request.resumable = resume_seconds > 0 and not request.HasField("pooling")
        self._request = request
        self._routers = routers
        self._resume_seconds = resume_seconds
        self._clock = clock
        self._deadline = None if timeout_seconds is None else self._now() + timeout_seconds
        # True from a failure until the next message of the stream, at which the caller calls `arrived`.
        self.is_broken = False
        self._broke_at = 0.0
        self._tries = 0

    def arrived(self) -> None:
        """Record that a message has arrived, so that the stream is not broken any more."""
        self.is_broken = False

    def pause(self, error: FleetError) -> float:
        """Return the seconds to wait after `error` before the request is sent again.

        Raises:
            FleetError: The request is not sent again. The exception is `error`, or a `DeadlineExceeded` if the time limit
                of the answer ends before the wait.
        """
        now = self._now()
        if not self._resume_seconds or not _may_try_again(error, is_broken=self.is_broken):
            raise error
        if not self.is_broken:
            self.is_broken, self._broke_at, self._tries = True, now, 0
        self._tries += 1
        pause = 0.0
        if (rounds := (self._tries - 1) // self._routers) or (
            isinstance(error, Unavailable) and error.retry_after_seconds
        ):
            pause = min(FIRST_PAUSE_SECONDS * 2 ** min(rounds, 10), LONGEST_PAUSE_SECONDS)
        if self._deadline is not None and now + pause >= self._deadline:
            raise DeadlineExceeded("the answer was not complete in time, and its router was lost") from error
        if now + pause > self._broke_at + self._resume_seconds:
            raise error
        return pause

    def _now(self) -> float:
        return self._clock.now() / SECOND

    def request(self, answer: StreamedAnswer) -> tuple[pb.GenerateRequest, float | None]:
        """Return the message to send now, and the timeout of the call in seconds (None for no limit).

        Raises:
            Unavailable: A part of the answer has arrived, but no resume token.
        """
        request = self._request
        if (resume := answer.resume()) is None:
            if answer.has_begun:
                raise Unavailable(
                    "the stream broke, and no router can go on with its answer: its router gave no resume token; set"
                    " prompt_secret or tenant_secret on the routers"
                )
        else:
            request = pb.GenerateRequest()
            request.CopyFrom(self._request)
            request.resume.CopyFrom(encode_resume(resume))
        return request, None if self._deadline is None else max(0.001, self._deadline - self._now())


def addresses_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a client's routers as a tuple.

    Raises:
        ConfigurationRefused: There is no address.
    """
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise ConfigurationRefused("address: at least one router is needed")
    return addresses


def resume_limit(resume_seconds: float | None, routers: int) -> float:
    """Return the seconds for which a client tries to continue a broken stream; if `resume_seconds` is None, return the default.

    Raises:
        ConfigurationRefused: The value is negative or NaN.
    """
    if resume_seconds is None:
        return RESUME_SECONDS if routers > 1 else 0.0
    if not resume_seconds >= 0:
        raise ConfigurationRefused(f"resume_seconds: {resume_seconds} is not a number of seconds, 0 or more")
    return resume_seconds


def _may_try_again(error: FleetError, *, is_broken: bool) -> bool:
    if not isinstance(error, Unavailable):
        return False
    if error.reason in (None, Reason.DRAINING):
        return True
    return is_broken and error.reason in (Reason.QUEUE_FULL, Reason.NO_WORKER)
