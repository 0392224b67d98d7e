"""Replay protection: remembers which proven calls were accepted, so that none is accepted twice.

Rules:

1. A caller numbers its calls. For each caller, two facts are kept: the highest number that has come, and which of the
   last `WINDOW` numbers up to this one have come. Lower numbers are refused, because it is not known whether they have
   come.
2. A caller is forgotten only when each proof that was accepted from it is too old to be accepted again.
3. At most `CALLERS` callers are remembered. When that many are known, the calls of another caller are refused, because
   forgetting a caller would allow replays of its calls. Only callers with the secret are remembered, so callers
   without it cannot fill the memory.
4. The memory begins empty when a port opens. A call whose proof is older than the port is therefore refused, because an
   earlier process may have accepted it.
"""

from kvstore.security.authentication import SKEW_SECONDS

WINDOW = 1024
"""Range of call numbers that are remembered for each caller. A call is refused if its number is below the highest
number of its caller by this many or more."""

CALLERS = 1 << 16
"""Maximum number of remembered callers: the channels that called within the last ten minutes. It is enough for 110
new channels per second, and takes 20 MB of memory."""

SWEEP_SECONDS = 1  # minimum time between two searches for callers that can be forgotten

_SEEN = (1 << WINDOW) - 1


class _CallerWindow:
    """Records which call numbers have come from one caller."""

    __slots__ = ("expires", "highest", "seen")

    def __init__(self, number: int, expires: int):
        self.highest = number
        self.seen = 1  # bit n is set if the call with the number `highest - n` has come
        self.expires = expires  # seconds since 1970 after which none of the caller's accepted proofs is valid any more


class CallReplays:
    """Records the accepted calls of all callers."""

    def __init__(self, opened: int, callers: int = CALLERS):
        """Remember no call yet.

        Args:
            opened: The time at which the port opens, in seconds since 1970 by the clock that `refusal` gets.
            callers: Maximum number of remembered callers.
        """
        self._opened = opened
        self._limit = callers
        self._callers: dict[bytes, _CallerWindow] = {}
        self._swept_at = 0

    def __len__(self) -> int:
        return len(self._callers)

    def refusal(self, name: bytes, number: int, unix_seconds: int, now: int) -> str:
        """Record a call whose proof is valid. Return why the call is refused; an empty string means that it is accepted."""
        # After the node's clock was set back, new calls must not count as made before the port opened.
        self._opened = min(self._opened, now)
        if unix_seconds < self._opened:
            # The text is always the same, so that the caller's log can leave out repetitions.
            return (
                "this call was made before this port opened, by the caller's clock: set the clocks, or call again later"
            )
        expires = unix_seconds + SKEW_SECONDS
        caller = self._callers.get(name)
        if caller is None:
            self._sweep(now)
            if len(self._callers) >= self._limit:
                return f"this port remembers the calls of {self._limit} callers, and can take no more: call again in {SKEW_SECONDS} s"
            self._callers[name] = _CallerWindow(number, expires)
            return ""
        ahead = number - caller.highest
        if ahead > 0:
            caller.seen = (caller.seen << ahead | 1) & _SEEN if ahead < WINDOW else 1
            caller.highest = number
        elif -ahead >= WINDOW:
            return f"more than {WINDOW} later calls of the same caller have overtaken this one: call again"
        elif caller.seen >> -ahead & 1:
            return "this call was served already: a proof is accepted once"
        else:
            caller.seen |= 1 << -ahead
        caller.expires = max(caller.expires, expires)
        return ""

    def _sweep(self, now: int) -> None:
        """Forget callers whose accepted proofs are all too old to be accepted again."""
        if len(self._callers) < self._limit // 2 and now < self._swept_at + SKEW_SECONDS:
            return
        if self._swept_at <= now < self._swept_at + SWEEP_SECONDS:
            return
        self._swept_at = now
        self._callers = {name: caller for name, caller in self._callers.items() if caller.expires >= now}
