"""Silence detector: decides whether an external server that passes its health checks still answers requests.

An engine can hang while its HTTP server goes on to answer `/health`. The router then only sees silence: no byte of any answer.
Silence may also be a long prompt, a long answer in one piece, a queue, or a server that still loads. Rules:

1. The allowed silence follows from the server's past (`fleet.backends.external.first_byte_history`): from the times until its first
   bytes, and from the same times for each KiB of prompt, so that a long prompt has more time. A server with too short a past is judged by
   its siblings, the other servers of its model. If nobody has answered yet, nothing is concluded.
2. A request that waits twice the expected time, on a server that sends no byte to anybody, makes the server suspect. A client that
   leaves after so long does the same, because it does not matter who ends a request. Clients that leave earlier count together, by the
   time in which the server owed them a byte. A suspect server is asked for a completion of one token (`SendTrial`), on a connection of
   its own, so that no client has to find out. Until the trial is answered it gets no new requests (`HoldBack`), if a sibling works.
3. A server leaves rotation (`TakeOutOfRotation`) when its silence has lasted `silence_factor` times the expected time, and the trial
   request was not answered either. Some sibling must work: it has answered since, or has nothing to do. If all servers are
   equally slow, none of them is the cause.
4. A server that answers some requests and never others is not silent. Requests that wait much longer than expected while later
   ones were answered count too, and so do requests to servers that refuse trial requests; answers make up for them. `MAX_SILENT_REQUESTS` of
   them are enough.
5. A request that waits on a server out of rotation, and of which the client has seen nothing, is abandoned, so it starts elsewhere.
   A request on a held server is abandoned once when the trial request has waited as long as a first byte may take. An answer in one
   piece only is if the server was seen to answer several requests at a time, because the trial could wait behind it, or has never
   answered, because then nothing says that it works. An answer that has begun is abandoned after `silence_cut_seconds` without content, because no other server can continue it.
6. A server returns (`ReturnToRotation`) when it answers the trial request or sends any byte of an answer, but not before a pause that
   doubles each time it leaves again soon. If trial requests are not possible it returns after the pause, and one more silent
   request is then enough to remove it.
7. Only content counts. Comments in a stream of events, and a first event without content, are passed on, but an HTTP server sends them
   while its engine hangs: a request that got nothing else still waits for its first byte.
8. Instants are running time (`fleet.backends.external.running_time`), which stands still while the router does not run.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

from msgspec import Struct

from fleet.backends.external.first_byte_history import FirstByteHistory
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.settings.router import OpenAiWorkerSettings

SUSPECT_FACTOR = 2.0  # multiple of the expected time; it is low, because a needless trial request costs little
MIN_ANSWERS = 8  # answers after which a server is judged by its own past alone
# silent requests that are enough (rule 4), like the failures before Envoy ejects; each answer removes a fifth of them
MAX_SILENT_REQUESTS = 3.0
KEPT_BY_AN_ANSWER = 0.8
BACK_WITH = 2.0  # silent requests that a returning server starts with
OVERTAKEN = 4  # so many later requests answered first cannot be chance or the order within a batch
OVERTAKES = 3  # after this many overtaken requests, a server is known to answer some requests while it computes others

# KiB of a prompt without extra time; further KiB get extra time, because past prompts may have been cached
FREE_KIB = 4
KIB_SECONDS = 0.25  # time per KiB of prompt (about 250 tokens) for the slowest expected prefill: 1,000 tokens a second

FIRST_PAUSE = 1 * SECOND  # first pause between two trial requests, and first pause before a server returns
MAX_TRIAL_PAUSE = 10 * SECOND
MAX_OUT_PAUSE = 30 * SECOND
CALM = 60 * SECOND  # after this time without silence, the pauses start again at `FIRST_PAUSE`

_UNSEEN = Nanos(-1)


class OutstandingRequest(Struct, frozen=True, kw_only=True):
    """One request on a server, as it is now."""

    work_id: RequestId
    sent_at: Nanos
    size: int  # size of the request body in bytes
    streams: bool  # True if the answer is streamed, so that its first byte does not wait for its last token
    begun: bool  # True if content of the answer has come; comments and events without content do not count
    heard: bool  # True if a part of the answer has come since the last check
    quiet_for: Nanos  # time since the last part of the answer
    overtaken: int  # number of later requests that were answered before this one
    moved: bool  # True if the request was taken from another server because of silence
    passed_on: bool = False  # True if a part of the answer was passed on, so that no other server can answer


class TrialOutcome(Enum):
    """The outcome of a trial request."""

    ANSWERED = auto()
    REFUSED = auto()  # refused before the request reached the engine, so nothing is known about the engine
    FAILED = auto()  # failed, or not answered at all


class SendTrial(Struct, frozen=True):
    """Send a trial request; `SilenceDetector.told` takes its outcome."""


class ForgetTrial(Struct, frozen=True):
    """Forget the trial request; its outcome must not be reported."""


class HoldBack(Struct, frozen=True):
    """Send the server no new requests while its trial request is open. It stays in rotation."""


class EndHold(Struct, frozen=True):
    """Send the server new requests again."""


class TakeOutOfRotation(Struct, frozen=True):
    """Send the server no more requests."""

    why: str


class ReturnToRotation(Struct, frozen=True):
    """Send requests to the server again."""


class AbandonRequest(Struct, frozen=True):
    """End a request on this server; it starts elsewhere if its client has seen nothing."""

    work_id: RequestId
    why: str


SilenceCommand = SendTrial | ForgetTrial | HoldBack | EndHold | TakeOutOfRotation | ReturnToRotation | AbandonRequest


class _AbandonedRequest(Struct, frozen=True):
    """A request that ended before its first byte. Its server had sent nothing to anybody for some time."""

    silent_since: Nanos
    waited: Nanos


class SilenceDetector:
    """The detector for one server. Call `note` for all servers of a model, then `decide` for each."""

    def __init__(self, settings: OpenAiWorkerSettings) -> None:
        self._factor = settings.silence_factor
        self._floor = settings.silence_floor_seconds * SECOND
        self._ceiling = settings.silence_timeout_seconds * SECOND
        self._cut = settings.silence_cut_seconds * SECOND
        self._asks = settings.trial_requests
        # first-byte histories: of answers in one piece, and of streams
        self.past = (FirstByteHistory(), FirstByteHistory())
        self.answers = 0
        self._heard_at = Nanos(0)
        self._latest_sent = _UNSEEN  # instant at which the latest of the answered requests was sent
        self._silent = 0.0  # number of silent requests, reduced by later answers (rule 4)
        self._overtakes = 0
        self._siblings: Sequence[SilenceDetector] = ()
        self._known: dict[tuple[bool, int], float | None] = {}  # results of `_limit` until the next look
        self._outstanding: Sequence[OutstandingRequest] = ()
        self._counted: set[RequestId] = set()  # outstanding requests that are counted in `_silent`
        self._left: _AbandonedRequest | None = None
        self._left_at = Nanos(0)
        self._owed = 0  # since the last byte: nanoseconds in which clients that then left waited for a byte
        self._left_kib = [
            0,
            0,
        ]  # the longest abandoned prompts, which the server may still compute: whole answers, streams
        self._overtook = _UNSEEN
        self._out = False
        self._suspect = False
        self._held = False
        self._unresponsive = False  # True if the trial request was not answered either
        self._asked_at: Nanos | None = None  # instant at which the open trial request was sent; None: none is open
        self._ask_from = Nanos(0)
        self._ask_pause = FIRST_PAUSE
        self._mute_until = Nanos(0)  # until this instant trial requests count as impossible, because one was refused
        self._back_from = Nanos(0)
        self._out_pause = FIRST_PAUSE
        self._passed = False  # True if the trial request was answered while the server was out of rotation

    @property
    def out(self) -> bool:
        """True if the server is out of rotation because of its silence."""
        return self._out

    @property
    def held(self) -> bool:
        """True if the server gets no new requests while its trial request is open."""
        return self._held

    @property
    def settled(self) -> bool:
        """True if the server owes nothing and nothing is open, so that `decide` would return nothing."""
        return self.calm and not self._outstanding

    @property
    def calm(self) -> bool:
        """True if nothing is open about the server except its silence."""
        return not (self._out or self._held or self._left is not None or self._asked_at is not None)

    # Events of requests

    def heard(self, now: Nanos) -> None:
        """Note that some answer goes on."""
        self._heard_at = max(self._heard_at, now)

    def answered(self, sent_at: Nanos, waited: Nanos, size: int, *, streams: bool) -> None:
        """Note the first byte of an answer."""
        self.answers += 1
        self.past[streams].add(waited, (size >> 10) + 1)
        self._heard_at = max(self._heard_at, Nanos(sent_at + waited))
        self._latest_sent = max(self._latest_sent, sent_at)
        if self._silent:
            self._silent *= KEPT_BY_AN_ANSWER

    def answered_more(self, heard_at: Nanos, answers: int) -> None:
        """Note that more answers have begun, whose times are not known, the latest of them before `heard_at`."""
        self.answers += answers
        self._heard_at = max(self._heard_at, heard_at)

    def abandoned(self, request: OutstandingRequest, now: Nanos) -> None:
        """Note that a client left before the first byte of its answer."""
        silent = self._remember(request, now)
        if request.work_id in self._counted:
            return
        waited = now - request.sent_at
        limits, limit = self._limits(), self._limit(request)
        if (limits is not None and silent >= limits[0]) or (
            limit is not None and waited >= limit and self._overtaken(request)
        ):
            self._silent += 1

    def _remember(self, request: OutstandingRequest, now: Nanos) -> Nanos:
        """Remember a request that ended before its first byte; return how long the server had been silent to it."""
        since = max(request.sent_at, self._heard_at)
        silent = Nanos(now - since)
        self._left_kib[request.streams] = max(self._left_kib[request.streams], _kib(request.size))
        if self._left is None:
            self._owed = 0
        self._owed += max(0, now - max(since, self._left_at))
        self._left_at = now
        if self._left is None or silent > self._left.waited:
            self._left = _AbandonedRequest(since, silent)
        return silent

    # Looks

    def note(self, now: Nanos, outstanding: Sequence[OutstandingRequest]) -> None:
        """Note the state of the server's requests."""
        self._outstanding = outstanding
        self._known.clear()
        if any(each.begun and each.heard for each in outstanding):
            self._heard_at = max(self._heard_at, now)
        waiting = [each for each in outstanding if not each.begun]
        if self._latest_sent != self._overtook and any(each.sent_at < self._latest_sent for each in waiting):
            self._overtook = self._latest_sent
            self._overtakes += 1
        self._counted.intersection_update(each.work_id for each in waiting)
        if self._left is not None and self._left.silent_since < self._heard_at:
            self._left = None
        if self._left_at < self._heard_at:
            self._left_kib = [0, 0]
        if self._asked_at is not None and self._asked_at < self._heard_at:
            self._unresponsive = False

    def decide(self, now: Nanos, siblings: "Sequence[SilenceDetector]", *, spare: bool) -> list[SilenceCommand]:
        """Return what to do about the server.

        Args:
            now: The instant.
            siblings: The other servers of its model that take requests; `note` was called for all of them.
            spare: True if enough of them remain so that a server that fails requests may leave rotation.
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
        if not self._out:
            self._hold(now, silence, commands)
        self._give_up(now, commands, limits, too_long=too_long)
        return commands

    def told(self, now: Nanos, waited: Nanos, trial: TrialOutcome) -> None:
        """Note the outcome of the trial request.

        Args:
            now: The instant.
            waited: The time that it took.
            trial: The outcome.
        """
        self._asked_at = None
        if trial is TrialOutcome.REFUSED:
            self._mute_until = Nanos(now + CALM)
            self._unresponsive = False
        if trial is not TrialOutcome.ANSWERED:
            return
        if (
            not self._unresponsive or self.past[True].count < MIN_ANSWERS
        ):  # the duration of a hang does not measure the server's speed
            self.past[True].add(waited, 1)
        self._heard_at = max(self._heard_at, now)
        self._unresponsive = False
        self._left = None
        self._passed = self._out

    def reset(self) -> None:
        """Forget the state of a server that has left; its past still counts."""
        self._out = self._suspect = self._held = self._unresponsive = self._passed = False
        self._silent = 0.0
        self._left, self._left_kib = None, [0, 0]
        self._asked_at = None
        self._outstanding = ()

    # Internal steps

    def _trials_tell(self, now: Nanos) -> bool:
        return self._asks and now >= self._mute_until

    def _ask(self, now: Nanos, commands: list[SilenceCommand]) -> None:
        if now < self._ask_from:
            return
        if now - self._ask_from > CALM:
            self._ask_pause = FIRST_PAUSE
        self._asked_at = now
        self._ask_from = Nanos(now + self._ask_pause)
        self._ask_pause = min(2 * self._ask_pause, MAX_TRIAL_PAUSE)
        commands.append(SendTrial())

    def _judge(self, now: Nanos, silence: Nanos, commands: list[SilenceCommand], *, spare: bool) -> None:
        """Take the server out of rotation if there is evidence and another server can serve."""
        failing = self._silent >= MAX_SILENT_REQUESTS and spare
        if not (self._unresponsive or failing):
            return
        began = Nanos(now - silence)
        if not any(each.works(began) for each in self._siblings):
            return
        if now - self._back_from > CALM:
            self._out_pause = FIRST_PAUSE
        self._out, self._held, self._passed = True, False, False
        self._back_from = Nanos(now + self._out_pause)
        self._out_pause = min(2 * self._out_pause, MAX_OUT_PAUSE)
        # the silence was real, so the pauses start again at the first one
        self._ask_pause, self._ask_from = FIRST_PAUSE, now
        if self._unresponsive:
            why = f"no byte came for {silence / SECOND:.1f} s, and no answer to a trial request"
        else:
            why = "requests got no byte for much longer than other requests"
        commands.append(TakeOutOfRotation(why))

    def _hold(self, now: Nanos, silence: Nanos, commands: list[SilenceCommand]) -> None:
        """Begin or end the hold of a suspect server (rule 2)."""
        tells = self._suspect and self._trials_tell(now)
        if self._held and not (tells and any(each.works(self._heard_at) for each in self._siblings)):
            self._held = False
            commands.append(EndHold())
        elif not self._held and tells and self._asked_at is not None:
            lately = Nanos(now - silence // 2)  # a sibling that stopped at the same time is no better
            if any(each.works(lately) for each in self._siblings):
                self._held = True
                commands.append(HoldBack())

    def works(self, since: Nanos) -> bool:
        """Return whether the server takes requests and has answered since then, or owes nothing."""
        if self._out or self._suspect or self._unresponsive:
            return False
        return not self._outstanding or self._heard_at >= since

    def _return(self, now: Nanos, commands: list[SilenceCommand]) -> None:
        """Return the server to rotation, or find out whether that is possible (rule 6)."""
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
        """Count requests that wait too long, on a server whose silence is too long or which skips them (rule 4)."""
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
        """Return whether later requests were answered first. It says nothing about an answer in one piece, which may be a long one."""
        return each.streams and each.overtaken >= OVERTAKEN

    def _stuck(self, each: OutstandingRequest, now: Nanos, limit: float) -> bool:
        return self._overtaken(each) and now - each.sent_at >= 2 * limit

    def _give_up(
        self, now: Nanos, commands: list[SilenceCommand], limits: tuple[float, float] | None, *, too_long: bool
    ) -> None:
        patience = limits[0] if self._held and limits is not None and self._trial_waits(now, limits[0]) else None
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
            elif patience is not None and quiet >= patience and self._movable(each):
                self._remember(each, now)
                over = True
            elif self._unresponsive:
                over = quiet >= max(limit, self._cut)
            else:
                over = self._stuck(each, now, limit) and not each.moved
            if over:
                commands.append(AbandonRequest(each.work_id, f"the server sent nothing for {quiet / SECOND:.1f} s"))

    def _trial_waits(self, now: Nanos, suspicious: float) -> bool:
        """Return whether the trial request has waited as long as the first byte of any outstanding request may take."""
        if self._asked_at is None:
            return False
        return now - max(self._asked_at, self._heard_at) >= suspicious / SUSPECT_FACTOR

    def _movable(self, each: OutstandingRequest) -> bool:
        return not each.moved and (each.streams or self._overtakes >= OVERTAKES or not self.answers)

    def _silent_since(self, limits: tuple[float, float] | None) -> Nanos | None:
        """Return the instant since which the server owes a byte and has sent none; None if it owes nothing.

        A request whose client has left counts like a waiting one if it has waited suspiciously long. If several clients left one after
        the other, their waits count together. A client that left earlier does not count, because it may just have changed its mind.
        """
        sent = [each.sent_at for each in self._outstanding]
        if self._left is not None and limits is not None:
            if self._left.waited >= limits[0]:
                sent.append(self._left.silent_since)
            elif self._owed >= limits[0]:
                sent.append(Nanos(self._left_at - self._owed))
        if self._asked_at is not None:
            sent.append(self._asked_at)
        return Nanos(max(self._heard_at, min(sent))) if sent else None

    def _kinds(self) -> Counter[tuple[bool, int]]:
        """Return the kinds of requests that the server may be busy with (streamed, KiB) and their numbers."""
        kinds = Counter([(True, 1) if each.begun else (each.streams, _kib(each.size)) for each in self._outstanding])
        kinds.update([(bool(streams), kib) for streams, kib in enumerate(self._left_kib) if kib])
        if not kinds and self._asked_at is not None:
            kinds[True, 1] = 1
        return kinds

    def _limits(self) -> tuple[float, float] | None:
        """Return the nanoseconds after which the silence is suspicious and too long; None if they are unknown.

        A server that computes one prompt after the other may be busy with the longest. A server that was seen to answer some requests while it
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
        if own.count < MIN_ANSWERS:
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
    """Return the number of KiB, rounded up."""
    return (size >> 10) + 1


def _prefill(size: int) -> float:
    """Return the nanoseconds that a long prompt may take beyond what the past says."""
    return max(0, _kib(size) - FREE_KIB) * KIB_SECONDS * SECOND
