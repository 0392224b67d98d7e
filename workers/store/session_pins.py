"""Which blocks a store is to keep while their sessions wait, for a tool or for a person. Pure.

Rules:

1. Work with a session has a chain: its prompt, and the answer as far as its KV was computed, which is all but the last
   token. When the work ends, however it does, its chain is to be held. An end by a tool call or a stop string is found
   by the router, and looks like a cancellation here. Prefill work, and work that gave no token, holds nothing.
2. A hold lasts as long as `LATEST` of the pauses did that this worker has seen and that followed a pause of similar
   length (`kvstore.eviction.session_pauses`), but no longer than `longest`. While too little is known, that long.
3. When the session goes on, its hold is released with the first tokens. Until then it keeps the blocks in place, and
   from then on the engine has them.
4. The store knows a session by a digest of its name and the tenant's salt: nobody ends another tenant's holds.
5. `MAX_SESSIONS` are remembered, for the lengths of their pauses; the one that was heard of the longest ago goes first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.core.roles import Phase
from fleet.core.work import Progress, Rejected, Start
from kvstore.eviction.session_pauses import LATEST, GapTimes

MAX_SESSIONS = 16_384


class PinChain(Struct, frozen=True, kw_only=True):
    """Keep a chain, as far as the store has it; takes the place of the session's former hold."""

    session: str
    tokens: TokenBytes
    salt: bytes
    lasting: Nanos


class UnpinChain(Struct, frozen=True, kw_only=True):
    """The session has gone on."""

    session: str


class _SessionAttempt:
    """One piece of work that the engine has."""

    __slots__ = ("generated", "session", "start")

    def __init__(self, start: Start, session: str):
        self.start = start
        self.session = session
        self.generated: list[int] = []


class _SessionPauses(Struct):
    """Of one session."""

    ended: Nanos | None = None  # its last work; None while it goes on
    last: Nanos | None = None  # length of the pause before


class SessionPinPolicy:
    """See the module. Work is told by the engine's ids."""

    def __init__(self, longest: Nanos):
        assert longest > 0, longest
        self._longest = longest
        self._works: dict[RequestId, _SessionAttempt] = {}
        self._sessions: OrderedDict[str, _SessionPauses] = OrderedDict()
        self._gaps = GapTimes()

    def began(self, start: Start, now: Nanos) -> None:
        """The engine was given work."""
        if not start.session or start.phase is Phase.PREFILL:
            return
        session = store_session_name(start.session, start.salt)
        self._works[start.request_id] = _SessionAttempt(start, session)
        pauses = self._pauses(session)
        if pauses.ended is not None:
            gap = Nanos(max(0, now - pauses.ended))
            self._gaps.seen(pauses.last, gap)
            pauses.ended, pauses.last = None, gap

    def heard(self, outputs: Sequence[Progress | Rejected], now: Nanos) -> Iterator[PinChain | UnpinChain]:
        """What an engine's step means for the store."""
        if not self._works:
            return
        for output in outputs:
            if (work := self._works.get(output.request_id)) is None:
                continue
            if isinstance(output, Rejected):
                del self._works[output.request_id]
                continue
            if output.token_ids:
                if not work.generated:
                    yield UnpinChain(session=work.session)
                work.generated += output.token_ids
            if output.finish is not None:
                del self._works[output.request_id]
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
        """Of a session that is just heard of."""
        pauses = self._sessions.setdefault(session, _SessionPauses())
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return pauses


def store_session_name(session: str, salt: bytes) -> str:
    """32 hexadecimal digits (rule 4)."""
    return hashlib.sha256(salt + b"\0" + session.encode()).hexdigest()[:32]
