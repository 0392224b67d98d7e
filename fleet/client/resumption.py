"""Resumption: how a client continues an answer whose stream has broken.

Rules:

1. A stream breaks if its router stops, cannot be reached any more, or hangs (it does not answer the connection's pings).
   Other errors end the answer. Until a router has accepted the request again, a router that is full or knows no worker is
   tried again too.
2. With a resume token, the client sends the request, the token and all tokens that it has to the next router, which
   generates the tokens after them. Without a resume token, the request is sent again unchanged if no part of the answer
   has arrived. Otherwise the stream ends with an error, because parts of the answer would come twice. A router gives no
   resume tokens if its clients have API keys and it has no secret.
3. The routers are tried in turn, the first round without a pause. The tries end a set time after the break, or with the
   deadline of the answer. Any message that arrives ends the break.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from fleet.client.errors import DeadlineExceeded, FleetError, Unavailable
from fleet.client.results import StreamedAnswer
from fleet.core.clock import SECOND, Clock
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.system_clock import SystemClock
from fleet.v1 import inference_pb2 as pb
from fleet.wire.inference import encode_resume

RESUME_SECONDS = 30.0
"""Time for tries if a client has several routers: a hung router is noticed within 8 s, and the next one may be busy."""

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0

RESUMABLE_OPTIONS = (("grpc.min_reconnect_backoff_ms", 5_000),)
"""Channel options: a router that accepts a connection and then says nothing is given up after 5 s instead of 20."""

Router = TypeVar("Router")


class RouterRing(Generic[Router]):
    """The routers of one cluster in the caller's order. `current` gets the next request, until it fails."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = tuple(routers)
        self._position = 0

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def current(self) -> Router:
        return self._routers[self._position]

    def leave(self, router: Router) -> None:
        """Make the next router current after a failure, unless another stream has already done this."""
        if router is self.current:
            self._position = (self._position + 1) % len(self._routers)


class Resumption:
    """Decides when and how the request of one answer is sent again."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        routers: int,
        resume_seconds: float,
        timeout_seconds: float | None,
        clock: Clock = SystemClock(),  # noqa: B008 - the default has no state
    ) -> None:
        """Prepare the tries; nothing is sent.

        Args:
            request: The first message of the request.
            routers: The number of routers.
            resume_seconds: Time after a break in which the request is sent again; 0: it is not sent again.
            timeout_seconds: Limit for the whole answer, from now on; None: no limit.
            clock: Clock by which both limits are measured.
        """
        request.resumable = resume_seconds > 0
        self._request = request
        self._routers = routers
        self._resume_seconds = resume_seconds
        self._clock = clock
        self._deadline = None if timeout_seconds is None else self._now() + timeout_seconds
        # True if no message has arrived since the last failure; the next one is passed to `arrived`.
        self.is_broken = False
        self._broke_at = 0.0
        self._tries = 0

    def arrived(self) -> None:
        """End the break, because a message has arrived."""
        self.is_broken = False

    def pause(self, error: FleetError) -> float:
        """Return the seconds to wait before the next try after `error`.

        Raises:
            FleetError: No further try is made. The error is `error`, or says that the deadline has passed.
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
        """Return the message of the next try and its timeout in seconds.

        Raises:
            Unavailable: A part of the answer has arrived, but no resume token.
        """
        request = self._request
        if (resume := answer.resume()) is None:
            if answer.has_begun:
                raise Unavailable(
                    "the stream broke, and no router can go on with its answer: its router gave no resume token; set"
                    " prompt_secret on the routers"
                )
        else:
            request = pb.GenerateRequest()
            request.CopyFrom(self._request)
            request.resume.CopyFrom(encode_resume(resume))
        return request, None if self._deadline is None else max(0.001, self._deadline - self._now())


def addresses_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a client's routers.

    Raises:
        ConfigurationRefused: There is no address.
    """
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise ConfigurationRefused("address: at least one router is needed")
    return addresses


def resume_limit(resume_seconds: float | None, routers: int) -> float:
    """Return the seconds for tries; None stands for the default, which is 0 with a single router.

    Raises:
        ConfigurationRefused: The value is negative or not a number.
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
