"""Silence detector: whether a backend that answers for its health also answers requests.

An engine can hang while its HTTP front goes on to answer `/health`. All that the router sees of that is silence: no byte of an answer.
Silence may also be a long prompt, a long answer that comes in one piece, a queue, or a server that still loads. Rules:

1. How long silence may last follows from what the server has done (`fleet.backends.external.first_byte_history`): from the times until its first bytes,
   and from the same times for each KiB of prompt, so that a long prompt has long. A server with too short a past is judged by its
   siblings', the other servers of its model. Where nobody has answered yet, nothing is concluded.
2. A request that waits twice as long as expected, on a server that gives no byte to anybody, makes the server suspect. So does a
   client that leaves after so long: who ends a request changes nothing. A suspect is asked for a completion of one token (`SendTrial`), on a
   connection of its own, so that no client has to be the one who finds out.
3. A server is out of rotation (`TakeOutOfRotation`) when its silence has lasted `silence_factor` times what was expected, and the trial request
   has had no answer either. Before that some sibling must be sound: it has answered since, or has nothing to do. Where all are slow
   alike, the cause is none of theirs.
4. A server that answers some requests and never others is not silent. Requests that wait for much longer than expected while later
   ones were answered count too, and so do requests to servers that refuse trial requests; answers make up for them. `MOST_SILENT` of
   them are enough.
5. What waits on a server that is out, and of which the client has seen nothing, is given up, which means that it is started elsewhere.
   An answer that has begun is given up after `silence_cut_seconds` without content, since nobody else can go on with it.
6. A server comes back (`ReturnToRotation`) when it answers the trial request, or gives any byte of an answer, and not before a pause that
   doubles as often as it is out again soon. Where trial requests tell nothing it comes back after the pause, and one more silent
   request is enough then.
7. A byte is one of content. Comments in a stream of events, and a first event without content, are passed on, but a front sends them
   while its engine hangs: a request that got nothing else still waits for its first byte.
8. Instants are the router's own time (`fleet.backends.external.running_time`), which stands still while the router does not run.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

from msgspec import Struct

from fleet.backends.external.first_byte_history import FirstByteHistory
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.settings.router import OpenAiWorkerSettings

SUSPECT_FACTOR = 2.0  # over what is expected; a trial request costs little, so it may be sent in vain
ENOUGH = 8  # answers of its own after which a server is judged by these alone
MOST_SILENT = 3.0  # as Envoy ejects a host after a number of failures; an answer in between takes a fifth of them away
KEPT_BY_AN_ANSWER = 0.8
BACK_WITH = 2.0  # silent requests that a server is believed to have had when it comes back
OVERTAKEN = 4  # later requests that were answered first: not chance, nor the order in which a batch is computed
OVERTAKES = 3  # requests that overtook others, after which a server is known to answer some while it computes others

FREE_KIB = 4  # of a prompt; what is above may take longer than the past says, since the past may have been cached
KIB_SECONDS = 0.25  # 1,000 tokens a second, the slowest prefill that is taken for granted

FIRST_PAUSE = 1 * SECOND  # between trial requests, and before a server comes back
LONGEST_ASK_PAUSE = 10 * SECOND
LONGEST_OUT_PAUSE = 30 * SECOND
CALM = 60 * SECOND  # after which pauses begin anew

_UNSEEN = Nanos(-1)


class OutstandingRequest(Struct, frozen=True, kw_only=True):
    """One request on a server, as it stands now."""

    work_id: RequestId
    sent_at: Nanos
    size: int  # bytes of its body
    streams: (
        bool  # it is to be answered by events as they come, so that its first byte does not wait for its last token
    )
    begun: bool  # content of its answer came; comments and events without content are none
    heard: bool  # something of its answer came since the last look
    quiet_for: Nanos  # since when nothing did
    overtaken: int  # requests sent later that were answered meanwhile
    moved: bool  # it was given up elsewhere for its silence
    passed_on: bool = False  # a part of its answer was passed on, so that no other server can give one


class TrialOutcome(Enum):
    """The outcome of a trial request."""

    ANSWERED = auto()
    REFUSED = auto()  # by what is before the engine, which says nothing about the engine
    FAILED = auto()  # or not answered at all


class SendTrial(Struct, frozen=True):
    """Send a trial request; `SilenceDetector.told` takes what comes of it."""


class ForgetTrial(Struct, frozen=True):
    """Forget the trial request: nothing is to be told of it any more."""


class TakeOutOfRotation(Struct, frozen=True):
    """Send it no more requests."""

    why: str


class ReturnToRotation(Struct, frozen=True):
    """It takes requests again."""


class AbandonRequest(Struct, frozen=True):
    """End a request here, which has it started elsewhere if its client has seen nothing."""

    work_id: RequestId
    why: str


SilenceCommand = SendTrial | ForgetTrial | TakeOutOfRotation | ReturnToRotation | AbandonRequest


class _AbandonedRequest(Struct, frozen=True):
    """A request whose client left before a byte came, from a server that was silent all the time."""

    sent_at: Nanos
    waited: Nanos


class SilenceDetector:
    """One server. `note` the servers of a model, then let each `decide`."""

    def __init__(self, settings: OpenAiWorkerSettings) -> None:
        """Nothing is known yet.

        Args:
            settings: The server's.
        """
        self._factor = settings.silence_factor
        self._floor = settings.silence_floor_seconds * SECOND
        self._ceiling = settings.silence_timeout_seconds * SECOND
        self._cut = settings.silence_cut_seconds * SECOND
        self._asks = settings.trial_requests
        self.past = (FirstByteHistory(), FirstByteHistory())  # of answers in one piece, and of streams
        self.answers = 0
        self._heard_at = Nanos(0)
        self._latest_sent = _UNSEEN  # among the requests that were answered, the one sent last
        self._silent = 0.0  # requests, less what answers made up for
        self._overtakes = 0
        self._siblings: Sequence[SilenceDetector] = ()
        self._known: dict[tuple[bool, int], float | None] = {}  # what `_limit` says, until the next look
        self._outstanding: Sequence[OutstandingRequest] = ()
        self._counted: set[RequestId] = set()  # outstanding requests that are in `_silent`
        self._left: _AbandonedRequest | None = None
        self._left_at = Nanos(0)
        self._left_kib = [
            0,
            0,
        ]  # the longest prompts that were left, which it may still be busy with; of whole answers, and of streams
        self._overtook = _UNSEEN
        self._out = False
        self._suspect = False
        self._unresponsive = False  # it has not answered a trial request either
        self._asked_at: Nanos | None = None  # a trial request is under way
        self._ask_from = Nanos(0)
        self._ask_pause = FIRST_PAUSE
        self._mute_until = Nanos(0)  # trial requests tell nothing
        self._back_from = Nanos(0)
        self._out_pause = FIRST_PAUSE
        self._passed = False  # the trial request, while it is out

    @property
    def out(self) -> bool:
        """True if it is out of rotation for its silence."""
        return self._out

    @property
    def settled(self) -> bool:
        """True if it owes nothing and there is nothing to find out, so that `decide` would say nothing."""
        return self.calm and not self._outstanding

    @property
    def calm(self) -> bool:
        """True if nothing is found out about it, so that it need be looked at only for its silence."""
        return not (self._out or self._left is not None or self._asked_at is not None)

    # From requests

    def heard(self, now: Nanos) -> None:
        """Take in that some answer goes on."""
        self._heard_at = max(self._heard_at, now)

    def answered(self, sent_at: Nanos, waited: Nanos, size: int, *, streams: bool) -> None:
        """Take in the first byte of an answer."""
        self.answers += 1
        self.past[streams].add(waited, (size >> 10) + 1)
        self._heard_at = max(self._heard_at, Nanos(sent_at + waited))
        self._latest_sent = max(self._latest_sent, sent_at)
        if self._silent:
            self._silent *= KEPT_BY_AN_ANSWER

    def answered_more(self, sent_at: Nanos, heard_at: Nanos, answers: int) -> None:
        """Take in that more answers have begun, of which only the latest is told."""
        self.answers += answers
        self._heard_at = max(self._heard_at, heard_at)
        self._latest_sent = max(self._latest_sent, sent_at)

    def abandoned(self, request: OutstandingRequest, now: Nanos) -> None:
        """Take in that a client left before a byte of its answer came."""
        waited, kib = Nanos(now - request.sent_at), _kib(request.size)
        self._left_at = now
        self._left_kib[request.streams] = max(self._left_kib[request.streams], kib)
        silent = self._heard_at <= request.sent_at
        if silent and (self._left is None or waited > self._left.waited):
            self._left = _AbandonedRequest(request.sent_at, waited)
        if request.work_id in self._counted:
            return
        limits, limit = self._limits(), self._limit(request)
        if (silent and limits is not None and waited >= limits[0]) or (
            limit is not None and waited >= limit and self._overtaken(request)
        ):
            self._silent += 1

    # Looks

    def note(self, now: Nanos, outstanding: Sequence[OutstandingRequest]) -> None:
        """Take in how its requests stand."""
        self._outstanding = outstanding
        self._known.clear()
        if any(each.begun and each.heard for each in outstanding):
            self._heard_at = max(self._heard_at, now)
        waiting = [each for each in outstanding if not each.begun]
        if self._latest_sent != self._overtook and any(each.sent_at < self._latest_sent for each in waiting):
            self._overtook = self._latest_sent
            self._overtakes += 1
        self._counted.intersection_update(each.work_id for each in waiting)
        if self._left is not None and self._left.sent_at < self._heard_at:
            self._left = None
        if self._left_at < self._heard_at:
            self._left_kib = [0, 0]
        if self._asked_at is not None and self._asked_at < self._heard_at:
            self._unresponsive = False

    def decide(self, now: Nanos, siblings: "Sequence[SilenceDetector]", *, spare: bool) -> list[SilenceCommand]:
        """Say what to do about it.

        Args:
            now: The instant.
            siblings: The other servers of its model that take requests, all of which have noted how they stand.
            spare: Whether enough of them are left for one that fails requests to be taken out.
        """
        self._siblings = siblings
        commands: list[SilenceCommand] = []
        limits = self._limits()
        since = self._silent_since(limits)
        silence = Nanos(0) if since is None else Nanos(now - since)
        self._suspect = limits is not None and silence >= limits[0]
        too_long = limits is not None and silence >= limits[1]
        self._count(now, too_long=too_long)
        if too_long and self._asked_at is not None and limits is not None:
            trial = now - max(self._asked_at, self._heard_at)
            self._unresponsive = self._unresponsive or trial >= limits[0]
        if self._out:
            self._return(now, commands)
        elif self._asked_at is not None:
            if self._heard_at > self._asked_at:
                self._asked_at = None
                commands.append(ForgetTrial())
        elif self._suspect and self._trials_tell(now):
            self._ask(now, commands)
        if not self._out:
            self._judge(now, silence, commands, spare=spare)
        self._give_up(now, commands, too_long=too_long)
        return commands

    def told(self, now: Nanos, waited: Nanos, trial: TrialOutcome) -> None:
        """Take in what came of the trial request.

        Args:
            now: The instant.
            waited: How long that took.
            trial: What came of it.
        """
        self._asked_at = None
        if trial is TrialOutcome.REFUSED:
            self._mute_until = Nanos(now + CALM)
            self._unresponsive = False
        if trial is not TrialOutcome.ANSWERED:
            return
        if not self._unresponsive or self.past[True].count < ENOUGH:  # what a hang took is not how fast it is
            self.past[True].add(waited, 1)
        self._heard_at = max(self._heard_at, now)
        self._unresponsive = False
        self._left = None
        self._passed = self._out

    def reset(self) -> None:
        """Forget how it stands, since it has left; what it has done before still counts."""
        self._out = self._suspect = self._unresponsive = self._passed = False
        self._silent = 0.0
        self._left, self._left_kib = None, [0, 0]
        self._asked_at = None
        self._outstanding = ()

    # Inside

    def _trials_tell(self, now: Nanos) -> bool:
        return self._asks and now >= self._mute_until

    def _ask(self, now: Nanos, commands: list[SilenceCommand]) -> None:
        if now < self._ask_from:
            return
        if now - self._ask_from > CALM:
            self._ask_pause = FIRST_PAUSE
        self._asked_at = now
        self._ask_from = Nanos(now + self._ask_pause)
        self._ask_pause = min(2 * self._ask_pause, LONGEST_ASK_PAUSE)
        commands.append(SendTrial())

    def _judge(self, now: Nanos, silence: Nanos, commands: list[SilenceCommand], *, spare: bool) -> None:
        """Take it out, if there is evidence and somebody else to serve."""
        failing = self._silent >= MOST_SILENT and spare
        if not (self._unresponsive or failing):
            return
        began = Nanos(now - silence)
        if not any(each.sound(began) for each in self._siblings):
            return
        if now - self._back_from > CALM:
            self._out_pause = FIRST_PAUSE
        self._out, self._passed = True, False
        self._back_from = Nanos(now + self._out_pause)
        self._out_pause = min(2 * self._out_pause, LONGEST_OUT_PAUSE)
        self._ask_pause, self._ask_from = FIRST_PAUSE, now  # it was no false alarm
        if self._unresponsive:
            why = f"no byte came for {silence / SECOND:.1f} s, and no answer to a trial request"
        else:
            why = "requests had no byte for much longer than others"
        commands.append(TakeOutOfRotation(why))

    def sound(self, since: Nanos) -> bool:
        """True if it takes requests and has answered since then, or has nothing to answer."""
        if self._out or self._suspect or self._unresponsive:
            return False
        return not self._outstanding or self._heard_at >= since

    def _return(self, now: Nanos, commands: list[SilenceCommand]) -> None:
        """Have it back, or find out whether that is possible (rule 6)."""
        if now < self._back_from:
            return
        answers = self._passed or (self._asked_at is not None and self._heard_at > self._asked_at)
        if answers or not self._trials_tell(now):
            self.reset()
            self._silent = BACK_WITH
            commands += [ForgetTrial(), ReturnToRotation()]
        elif self._asked_at is None:
            self._ask(now, commands)

    def _count(self, now: Nanos, *, too_long: bool) -> None:
        """Count requests that wait for too long, on a server whose silence is too long or which passes them over (rule 4)."""
        for each in self._outstanding:
            if each.begun or each.work_id in self._counted:
                continue
            limit = self._limit(each)
            if limit is None or now - each.sent_at < limit:
                continue
            if too_long or self._stuck(each, now, limit):
                self._counted.add(each.work_id)
                self._silent += 1

    def _overtaken(self, each: OutstandingRequest) -> bool:
        """Say whether later requests were answered. It tells nothing of an answer in one piece, which may be a long one."""
        return each.streams and each.overtaken >= OVERTAKEN

    def _stuck(self, each: OutstandingRequest, now: Nanos, limit: float) -> bool:
        return self._overtaken(each) and now - each.sent_at >= 2 * limit

    def _give_up(self, now: Nanos, commands: list[SilenceCommand], *, too_long: bool) -> None:
        for each in self._outstanding:
            quiet = Nanos(max(0, now - each.sent_at)) if not each.begun else each.quiet_for
            limit = self._limit(each)
            if quiet >= self._ceiling:
                over = True
            elif limit is None:
                over = False
            elif each.begun or each.passed_on:
                over = self._unresponsive and quiet >= max(limit, self._cut)
            elif self._out and self._unresponsive:
                over = quiet >= limit * min(1.0, SUSPECT_FACTOR / self._factor)
            elif self._out and too_long:
                over = quiet >= limit
            elif self._unresponsive:
                over = quiet >= max(limit, self._cut)
            else:
                over = self._stuck(each, now, limit) and not each.moved
            if over:
                commands.append(AbandonRequest(each.work_id, f"it said nothing for {quiet / SECOND:.1f} s"))

    def _silent_since(self, limits: tuple[float, float] | None) -> Nanos | None:
        """Return since when it owes somebody a byte and has given none; None if it owes nothing.

        A client that left counts for one that waits if it had waited for suspiciously long; else it has simply changed its mind.
        """
        sent = [each.sent_at for each in self._outstanding]
        if self._left is not None and limits is not None and self._left.waited >= limits[0]:
            sent.append(self._left.sent_at)
        if self._asked_at is not None:
            sent.append(self._asked_at)
        return Nanos(max(self._heard_at, min(sent))) if sent else None

    def _kinds(self) -> Counter[tuple[bool, int]]:
        """Return what it may be busy with: whether it streams, and KiB, and how many such there are."""
        kinds = Counter([(True, 1) if each.begun else (each.streams, _kib(each.size)) for each in self._outstanding])
        kinds.update([(bool(streams), kib) for streams, kib in enumerate(self._left_kib) if kib])
        if not kinds and self._asked_at is not None:
            kinds[True, 1] = 1
        return kinds

    def _limits(self) -> tuple[float, float] | None:
        """Return after how long its silence is suspicious and too long, in nanoseconds; None if nobody knows.

        A server that computes one prompt after the other may be busy with the longest. One that was seen to answer some while it
        computes others owes a byte to the shortest.
        """
        kinds = self._kinds()
        total = sum(kib * times for (_, kib), times in kinds.items())
        every = [(self._expected(streams, kib, total), kib) for streams, kib in kinds]
        known = [(expected, kib << 10) for expected, kib in every if expected is not None]
        overtakes = self._overtakes >= OVERTAKES
        if not known or (len(known) < len(every) and not overtakes):
            return None
        pick = min if overtakes else max
        return pick(self._suspicious(*each) for each in known), pick(self._too_long(*each) for each in known)

    def _expected(self, streams: bool, kib: int, total: int) -> float | None:
        own = self.past[streams]
        every = [own.expected(kib, total)] if own.count else []
        if own.count < ENOUGH:
            every += [each.past[streams].expected(kib, total) for each in self._siblings if each.past[streams].count]
        return max(every, default=None)

    def _limit(self, each: OutstandingRequest) -> float | None:
        kind = (True, 1) if each.begun else (each.streams, _kib(each.size))
        if kind not in self._known:
            streams, kib = kind
            expected = self._expected(streams, kib, kib)
            self._known[kind] = None if expected is None else self._too_long(expected, kib << 10)
        return self._known[kind]

    def _suspicious(self, expected: float, size: int) -> float:
        return max(self._floor / 2, expected * min(SUSPECT_FACTOR, self._factor)) + _prefill(size)

    def _too_long(self, expected: float, size: int) -> float:
        return min(self._ceiling, max(self._floor, expected * self._factor) + _prefill(size))


def _kib(size: int) -> int:
    """Return started KiB."""
    return (size >> 10) + 1


def _prefill(size: int) -> float:
    """Return what a long prompt may take beyond what the past says, in nanoseconds."""
    return max(0, _kib(size) - FREE_KIB) * KIB_SECONDS * SECOND
