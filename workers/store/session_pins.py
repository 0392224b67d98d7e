"""Session pins: decides which blocks a store keeps while a session is paused, for example for a tool or a person.

Rules:

1. An attempt with a session has a chain: its prompt and its answer, except the answer's last token, whose KV was not
   computed. When the attempt finishes, its chain is pinned. Even a cancelled attempt counts, because the router cancels
   the attempt when it finds a stop string or a tool call. Prefill attempts, rejected attempts, and attempts that have
   generated no token cause no pin.
2. The duration of a pin is predicted from the session's previous pause. Of all observed pauses that followed a pause
   of similar length, the share `LATEST` was not longer than this duration (`kvstore.eviction.session_pauses`). A pin
   lasts at most `longest`, and exactly `longest` while too few pauses are known.
3. When the session sends another request, its pin ends with the first tokens of the answer. From then on, the engine
   itself has the blocks.
4. The store identifies a session by a digest of its name and the tenant's salt, so that no tenant can end another tenant's
   pins.
5. The pauses of `MAX_SESSIONS` sessions are remembered; the session that was idle longest is forgotten first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import TOKEN_BYTES
from fleet.core.roles import Phase
from fleet.core.work import Progress, Rejected, Start
from kvstore.eviction.session_pauses import LATEST, GapTimes
from workers.ports import PinChain, UnpinChain

MAX_SESSIONS = 16_384


class _SessionAttempt:
    """Records one attempt of a session from its start until the engine reports its end."""

    __slots__ = ("generated", "session", "start")

    def __init__(self, start: Start, session: str):
        self.start = start
        self.session = session
        self.generated: list[int] = []


class _SessionPauses(Struct):
    """Records the observed pauses of one session."""

    # Instant at which the latest pinned attempt ended. None before any was pinned, and from the start of the session's next attempt
    # until an attempt is pinned again.
    ended: Nanos | None = None
    last: Nanos | None = None  # length of the latest pause that has ended; None: there was none


class SessionPinPolicy:
    """Decides which chains to pin and for how long, by the rules of this module. Attempts are named by their engine ids."""

    def __init__(self, longest: Nanos):
        assert longest > 0, longest
        self._longest = longest
        self.works: dict[RequestId, _SessionAttempt] = {}
        self.sessions: OrderedDict[str, _SessionPauses] = OrderedDict()
        self._gaps = GapTimes()

    def began(self, start: Start, now: Nanos) -> None:
        """Record that an attempt was given to the engine. If its session was paused, record how long the pause was."""
        if not start.session or start.phase is Phase.PREFILL:
            return
        session = store_session_name(start.session, start.salt)
        self.works[start.request_id] = _SessionAttempt(start, session)
        pauses = self._pauses(session)
        if pauses.ended is not None:
            gap = Nanos(max(0, now - pauses.ended))
            self._gaps.seen(pauses.last, gap)
            pauses.ended, pauses.last = None, gap

    def stepped(self, outputs: Sequence[Progress | Rejected], now: Nanos) -> Iterator[PinChain | UnpinChain]:
        """Yield the pins that the store has to set or to end after an engine step with these outputs (rules 1 and 3)."""
        if not self.works:
            return
        for output in outputs:
            if (work := self.works.get(output.request_id)) is None:
                continue
            if isinstance(output, Rejected):
                del self.works[output.request_id]
                continue
            if output.token_ids:
                if not work.generated:
                    yield UnpinChain(session=work.session)
                work.generated += output.token_ids
            if output.finish is not None:
                del self.works[output.request_id]
                if work.generated:
                    yield self._hold(work, now)

    def _hold(self, work: _SessionAttempt, now: Nanos) -> PinChain:
        pauses = self._pauses(work.session)
        pauses.ended = now
        known = self._gaps.quantile(pauses.last, LATEST)
        return PinChain(
            session=work.session,
            tokens=work.start.tokens
            + b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in work.generated[:-1]]),
            salt=work.start.salt,
            lasting=self._longest if known is None else min(known[1], self._longest),
        )

    def _pauses(self, session: str) -> _SessionPauses:
        """Return the pauses of a session, and mark the session as just used."""
        pauses = self.sessions.setdefault(session, _SessionPauses())
        self.sessions.move_to_end(session)
        if len(self.sessions) > MAX_SESSIONS:
            self.sessions.popitem(last=False)
        return pauses


def store_session_name(session: str, salt: bytes) -> str:
    """Return the session's name in the store, 32 hexadecimal digits (rule 4)."""
    return hashlib.sha256(salt + b"\0" + session.encode()).hexdigest()[:32]
