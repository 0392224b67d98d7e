"""Silence detector: decides whether an external server that passes its health checks still answers requests.

An engine can hang while its HTTP server still answers `/health`. The router then only notices silence: no byte of any
answer arrives. Silence may also have other causes: a long prompt, a long answer in one piece, a queue, or a server that
still loads. Rules:

1. The allowed silence follows from the times of the server's earlier answers (`first_byte_history.py`). Two values are
   measured: the time until the first byte, and this time divided by the size of the request in KiB. So a long prompt
   gets more time. A server with few answers is also judged by the times of its siblings, the other servers of its
   model. If none of them has answered yet, no server is judged.
2. A server becomes suspect if a request has waited twice the expected time while the server sent no byte to any client.
   The same holds if the client has cancelled the request after that time. Shorter waits of cancelled requests are added
   up, and their sum counts like one wait. The router sends a suspect server a trial request (`SendTrial`) for one token,
   so that no client's request is needed as a test. If a sibling works, the suspect server gets no new requests
   (`HoldBack`) until it answers the trial request.
3. A server leaves rotation (`TakeOutOfRotation`) when its silence has lasted `silence_factor` times the expected time, and the trial
   request was not answered either. A sibling must work: it has answered a request since the silence began, or has no
   requests. If all servers are equally slow, none of them is removed.
4. A server may answer some requests and never answer others. Such a server is not silent, so single requests are
   counted too. A request is counted if it waits much longer than expected while later requests were answered, or if it
   waits on a silent server. Each answer lowers the count. A server with a count of `MAX_SILENT_REQUESTS` leaves
   rotation if a sibling works and enough siblings remain.
5. The detector abandons requests in the following cases. An abandoned request starts on another server, unless its
   client has already got a part of the answer.
   - If the server is out of rotation, a request is abandoned when it waits for too long.
   - If the server is held back, a waiting request is abandoned when the trial request has waited as long as a first byte
     may take, but at most once. An answer in one piece is abandoned only if the server was seen to compute several
     requests at a time, or has never answered. Otherwise the trial request could wait behind this answer.
   - If the server has not answered its trial request either, a request is abandoned after `silence_cut_seconds` without
     content. This is also done with an answer that has begun, although no other server can continue it.
   - In any state, a stream that later requests have overtaken is abandoned when it has waited twice as long as allowed,
     but at most once.
   - In any state, a request is abandoned after `silence_timeout_seconds` without content.
6. A server returns (`ReturnToRotation`) when it answers the trial request or sends any byte of an answer, but only
   after a pause. The pause doubles, up to `MAX_OUT_PAUSE`, each time the server leaves rotation again within `CALM`. If
   trial requests are not possible, the server returns after the pause, and one more silent request then removes it again.
7. Only content counts as a byte of an answer. An HTTP server may send comments or a first event without content while
   its engine hangs. They are passed on, but the request still waits for its first byte.
8. Instants are running time (`running_time.py`), which stands still while the router does not run.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

from msgspec import Struct

from fleet.backends.external.first_byte_history import FirstByteHistory
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.settings.router import OpenAiWorkerSettings

# A server is suspect after silence of this multiple of the expected time to the first byte (rule 2). The number is low,
# because a needless trial request costs little.
SUSPECT_FACTOR = 2.0
MIN_ANSWERS = 8  # after this many answers, a server is judged by its own times alone (rule 1)
# A server with this count of silent requests leaves rotation (rule 4). Each answer multiplies the count by
# `KEPT_BY_AN_ANSWER`.
MAX_SILENT_REQUESTS = 3.0
KEPT_BY_AN_ANSWER = 0.8
BACK_WITH = 2.0  # a server that returns to rotation starts with this count of silent requests (rule 6)
# A waiting request is overtaken if this many later requests were answered first. Fewer may be chance, or due to the
# order within a batch.
OVERTAKEN = 4
# After a later request was answered first this many times, a server is known to compute several requests at a time.
OVERTAKES = 3

# If a prompt has more KiB than this, each further KiB adds `KIB_SECONDS` to the allowed silence. Earlier prompts may have
# been fast only because they were cached, so their times alone would allow too little.
FREE_KIB = 4
# Seconds for a KiB of prompt (about 250 tokens) at the slowest expected prefill: 1,000 tokens a second.
KIB_SECONDS = 0.25

FIRST_PAUSE = 1 * SECOND  # first pause between two trial requests, and first pause before a server returns
MAX_TRIAL_PAUSE = 10 * SECOND
MAX_OUT_PAUSE = 30 * SECOND
# If this time has passed since the last pause ended, the next pause is `FIRST_PAUSE` again. After a refused trial
# request, no other one is sent for this time.
CALM = 60 * SECOND

_UNSEEN = Nanos(-1)


class OutstandingRequest(Struct, frozen=True, kw_only=True):
    """The present state of one running request on a server, as the silence detector needs it."""

    work_id: RequestId
    sent_at: Nanos
    size: int  # size of the request body in bytes
    streams: bool  # True if the answer is streamed, so its first byte comes before the answer is complete
    begun: bool  # True if content of the answer has come; comments and events without content do not count
    progressed: bool  # True if content of the answer has come since the last check
    quiet_for: Nanos  # nanoseconds since the first check after the latest content of the answer
    overtaken: int  # number of later requests that were answered before this one
    moved: bool  # True if the request was abandoned on another server before, because that server was silent
    passed_on: bool = False  # True if a part of the answer was passed on, so that no other server can answer


class TrialOutcome(Enum):
    """The outcome of a trial request."""

    ANSWERED = auto()
    REFUSED = auto()  # refused before the request reached the engine, so nothing is known about the engine
    FAILED = auto()  # failed, or not answered at all


class SendTrial(Struct, frozen=True):
    """Command: send the server a trial request, and report its outcome to `SilenceDetector.trial_ended`."""


class ForgetTrial(Struct, frozen=True):
    """Command: cancel the open trial request, and do not report its outcome."""


class HoldBack(Struct, frozen=True):
    """Command: send the server no new requests for now, because its trial request is open (rule 2)."""


class EndHold(Struct, frozen=True):
    """Command: send the server new requests again, after the command `HoldBack`."""


class TakeOutOfRotation(Struct, frozen=True):
    """Command: send the server no more requests until the command `ReturnToRotation` (rule 3)."""

    why: str


class ReturnToRotation(Struct, frozen=True):
    """Command: send the server requests again, after the command `TakeOutOfRotation`."""


class AbandonRequest(Struct, frozen=True):
    """Command: end a request on this server. It starts on another server if its client has got no part of the answer."""

    work_id: RequestId
    why: str


SilenceCommand = SendTrial | ForgetTrial | HoldBack | EndHold | TakeOutOfRotation | ReturnToRotation | AbandonRequest


class _AbandonedRequest(Struct, frozen=True):
    """Records a request that ended before its first byte, and how long its server had sent nothing to any client."""

    silent_since: Nanos
    waited: Nanos


class SilenceDetector:
    """Decides whether one server is silent, and which commands the backend has to perform for it.

    At each check, the caller calls `note` for the servers of a model, and then `decide` for those that are not `settled`.
    It may leave out checks of a server that is `calm`.
    """

    def __init__(self, settings: OpenAiWorkerSettings) -> None:
        self._factor = settings.silence_factor
        self._floor = settings.silence_floor_seconds * SECOND
        self._ceiling = settings.silence_timeout_seconds * SECOND
        self._cut = settings.silence_cut_seconds * SECOND
        self._asks = settings.trial_requests
        # two first-byte histories: one of answers in one piece, and one of streams
        self.past = (FirstByteHistory(), FirstByteHistory())
        self.answers = 0
        self._latest_byte_at = Nanos(0)
        self._latest_sent = _UNSEEN  # instant at which the latest one of the answered requests was sent
        self._silent = 0.0  # count of silent requests; each answer lowers it (rule 4)
        self._overtakes = 0
        self._siblings: Sequence[SilenceDetector] = ()
        # Results of `_limit` since the last call of `note`, by kind of request (`_kinds`). None: the limit is not known.
        self._known: dict[tuple[bool, int], float | None] = {}
        self._outstanding: Sequence[OutstandingRequest] = ()
        self._counted: set[RequestId] = set()  # outstanding requests that are counted in `_silent`
        self._left: _AbandonedRequest | None = None
        self._left_at = Nanos(0)
        # Nanoseconds that cancelled requests waited since the server's last byte; time in which several waited counts once.
        self._owed = 0
        # KiB of the longest cancelled prompt that the server may still compute. The first number is for requests for an
        # answer in one piece, the second number for requests for a stream.
        self._left_kib = [0, 0]
        self._overtook = _UNSEEN
        self._out = False
        self._suspect = False
        self._held = False
        self._unresponsive = False  # True if the server is silent and has not answered its trial request
        # Instant at which the open trial request was sent; None: no trial request is open.
        self._asked_at: Nanos | None = None
        self._ask_from = Nanos(0)
        self._ask_pause = FIRST_PAUSE
        self._mute_until = Nanos(0)  # no trial requests before this instant, because the server has refused one
        self._back_from = Nanos(0)
        self._out_pause = FIRST_PAUSE
        self._passed = False  # True if the trial request was answered while the server was out of rotation

    @property
    def out(self) -> bool:
        """True if the server is out of rotation because of its silence."""
        return self._out

    @property
    def held(self) -> bool:
        """True if the server gets no new requests now, because its trial request is open (`HoldBack`)."""
        return self._held

    @property
    def settled(self) -> bool:
        """True if the server has no requests and `calm` is true, so that `decide` need not be called."""
        return self.calm and not self._outstanding

    @property
    def calm(self) -> bool:
        """True if the server is in rotation and not held back, no trial request is open, and no cancelled request counts."""
        return not (self._out or self._held or self._left is not None or self._asked_at is not None)

    # Events of requests

    def progressed(self, now: Nanos) -> None:
        """Note that the server has sent more content of an answer."""
        self._latest_byte_at = max(self._latest_byte_at, now)

    def answered(self, sent_at: Nanos, waited: Nanos, size: int, *, streams: bool) -> None:
        """Note the first byte of an answer. It came `waited` nanoseconds after its request of `size` bytes was sent."""
        self.answers += 1
        self.past[streams].add(waited, (size >> 10) + 1)
        self._latest_byte_at = max(self._latest_byte_at, Nanos(sent_at + waited))
        self._latest_sent = max(self._latest_sent, sent_at)
        if self._silent:
            self._silent *= KEPT_BY_AN_ANSWER

    def answered_more(self, now: Nanos, answers: int) -> None:
        """Note that `answers` more answers have begun, whose times were not measured.

        The last one began before `now`.
        """
        self.answers += answers
        self._latest_byte_at = max(self._latest_byte_at, now)

    def abandoned(self, request: OutstandingRequest, now: Nanos) -> None:
        """Note that a client cancelled a request before the first byte of its answer. Count the request if it waited too long (rule 4)."""
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
        """Remember a request that ended before its first byte.

        Return the time for which the server has sent nothing to any client since this request was sent.
        """
        since = max(request.sent_at, self._latest_byte_at)
        silent = Nanos(now - since)
        self._left_kib[request.streams] = max(self._left_kib[request.streams], _kib(request.size))
        if self._left is None:
            self._owed = 0
        self._owed += max(0, now - max(since, self._left_at))
        self._left_at = now
        if self._left is None or silent > self._left.waited:
            self._left = _AbandonedRequest(since, silent)
        return silent

    # Regular checks

    def note(self, now: Nanos, outstanding: Sequence[OutstandingRequest]) -> None:
        """Note the present state of all running requests on the server."""
        self._outstanding = outstanding
        self._known.clear()
        if any(each.begun and each.progressed for each in outstanding):
            self._latest_byte_at = max(self._latest_byte_at, now)
        waiting = [each for each in outstanding if not each.begun]
        if self._latest_sent != self._overtook and any(each.sent_at < self._latest_sent for each in waiting):
            self._overtook = self._latest_sent
            self._overtakes += 1
        self._counted.intersection_update(each.work_id for each in waiting)
        if self._left is not None and self._left.silent_since < self._latest_byte_at:
            self._left = None
        if self._left_at < self._latest_byte_at:
            self._left_kib = [0, 0]
        if self._asked_at is not None and self._asked_at < self._latest_byte_at:
            self._unresponsive = False

    def decide(self, now: Nanos, siblings: "Sequence[SilenceDetector]", *, spare: bool) -> list[SilenceCommand]:
        """Return the commands for the server, in the order in which they are to be performed.

        Args:
            now: The current running time.
            siblings: The other servers of the same model that take requests; they were checked before (`note`).
            spare: True if enough other servers of the model remain when this server leaves rotation.
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
            trial = now - max(self._asked_at, self._latest_byte_at)
            self._unresponsive = self._unresponsive or trial >= limits[0]
        if self._out:
            self._return(now, commands)
        elif self._asked_at is not None:
            if self._latest_byte_at > self._asked_at:
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

    def trial_ended(self, now: Nanos, waited: Nanos, trial: TrialOutcome) -> None:
        """Note the outcome of the server's trial request.

        Args:
            now: The current running time.
            waited: Nanoseconds from the trial request to its outcome.
            trial: The outcome.
        """
        self._asked_at = None
        if trial is TrialOutcome.REFUSED:
            self._mute_until = Nanos(now + CALM)
            self._unresponsive = False
        if trial is not TrialOutcome.ANSWERED:
            return
        # After a hang, the waiting time does not measure the server's speed. So it is added only while few times are known.
        if not self._unresponsive or self.past[True].count < MIN_ANSWERS:
            self.past[True].add(waited, 1)
        self._latest_byte_at = max(self._latest_byte_at, now)
        self._unresponsive = False
        self._left = None
        self._passed = self._out

    def reset(self) -> None:
        """Forget the present state, because the server has left or returns to rotation. Histories and pauses are kept."""
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
        """Take the server out of rotation if rule 3 or 4 demands it and another server of its model works (`works`)."""
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
        # the silence was real, so the pauses between trial requests start again at the shortest one
        self._ask_pause, self._ask_from = FIRST_PAUSE, now
        if self._unresponsive:
            why = f"no byte came for {silence / SECOND:.1f} s, and no answer to a trial request"
        else:
            why = "requests got no byte for much longer than other requests"
        commands.append(TakeOutOfRotation(why))

    def _hold(self, now: Nanos, silence: Nanos, commands: list[SilenceCommand]) -> None:
        """Stop or resume sending new requests to a suspect server (rule 2)."""
        tells = self._suspect and self._trials_tell(now)
        if self._held and not (tells and any(each.works(self._latest_byte_at) for each in self._siblings)):
            self._held = False
            commands.append(EndHold())
        elif not self._held and tells and self._asked_at is not None:
            # Another server of the model counts as working only if it has sent something lately, because it may have fallen
            # silent at the same time as this server.
            lately = Nanos(now - silence // 2)
            if any(each.works(lately) for each in self._siblings):
                self._held = True
                commands.append(HoldBack())

    def works(self, since: Nanos) -> bool:
        """Return True if this server is in rotation and not suspect, and has sent a byte since `since` or has no requests."""
        if self._out or self._suspect or self._unresponsive:
            return False
        return not self._outstanding or self._latest_byte_at >= since

    def _return(self, now: Nanos, commands: list[SilenceCommand]) -> None:
        """Return the server to rotation, or send a trial request to find out whether it may return (rule 6)."""
        if now < self._back_from:
            return
        answers = self._passed or (self._asked_at is not None and self._latest_byte_at > self._asked_at)
        if answers or not self._trials_tell(now):
            self.reset()
            self._silent = BACK_WITH
            commands += [ForgetTrial(), ReturnToRotation()]
        elif self._asked_at is None:
            self._ask(now, commands)

    def _count(self, now: Nanos, *, too_long: bool) -> None:
        """Count each request that has waited too long, if the server is silent for too long or answered later requests (rule 4)."""
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
        """Return True if the client of a request wants a stream, and `OVERTAKEN` later requests were answered first.

        Return False for an answer in one piece, because it may come later only because it is long.
        """
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
        """Return True if an open trial request has waited as long as a first byte is expected to take (rule 5)."""
        if self._asked_at is None:
            return False
        return now - max(self._asked_at, self._latest_byte_at) >= suspicious / SUSPECT_FACTOR

    def _movable(self, each: OutstandingRequest) -> bool:
        return not each.moved and (each.streams or self._overtakes >= OVERTAKES or not self.answers)

    def _silent_since(self, limits: tuple[float, float] | None) -> Nanos | None:
        """Return the instant since which the server has sent nothing although it had something to answer.

        Return None if it has nothing to answer. A cancelled request counts like a waiting one if it had waited long enough
        to make the server suspect. The waits of several cancelled requests are added up. A shorter wait alone does not
        count, because the client may just have changed its mind.
        """
        sent = [each.sent_at for each in self._outstanding]
        if self._left is not None and limits is not None:
            if self._left.waited >= limits[0]:
                sent.append(self._left.silent_since)
            elif self._owed >= limits[0]:
                sent.append(Nanos(self._left_at - self._owed))
        if self._asked_at is not None:
            sent.append(self._asked_at)
        return Nanos(max(self._latest_byte_at, min(sent))) if sent else None

    def _kinds(self) -> Counter[tuple[bool, int]]:
        """Return the number of requests that the server may be busy with, by kind.

        A kind is a pair: True if the answer is a stream, and the size of the request in KiB.
        """
        kinds = Counter([(True, 1) if each.begun else (each.streams, _kib(each.size)) for each in self._outstanding])
        kinds.update([(bool(streams), kib) for streams, kib in enumerate(self._left_kib) if kib])
        if not kinds and self._asked_at is not None:
            kinds[True, 1] = 1
        return kinds

    def _limits(self) -> tuple[float, float] | None:
        """Return two times in nanoseconds, after which silence is suspicious and after which it is too long; None if unknown.

        A server that computes one prompt after the other may be busy with the longest prompt. So the limits for that
        prompt are returned. A server that was seen to compute several requests at a time should answer the shortest
        prompt first. So the limits for the shortest prompt are returned.
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
    """Return the number of complete KiB in `size` bytes, plus one, so that it is never zero."""
    return (size >> 10) + 1


def _prefill(size: int) -> float:
    """Return the extra nanoseconds that are allowed for the prefill of a long prompt of `size` bytes (`FREE_KIB`)."""
    return max(0, _kib(size) - FREE_KIB) * KIB_SECONDS * SECOND
