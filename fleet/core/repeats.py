"""Repeated causes: which of the same events are worth a line in the log. Pure.

Rules:

1. A cause is worth a line when it is not the latest one of its subject, and again after a minute.
2. A subject whose latest line is a minute old is forgotten, so that memory is bounded by the lines of a minute.
"""

from collections.abc import Hashable

from fleet.core.clock import SECOND, Nanos

REPEAT_AFTER = Nanos(60 * SECOND)


class LogDeduplicator:
    """The latest causes that were logged, by subject."""

    def __init__(self) -> None:
        self._logged: dict[Hashable, tuple[str, Nanos]] = {}

    def is_new(self, subject: Hashable, cause: str, now: Nanos) -> bool:
        """Return whether an event is worth a line now; the caller then writes it."""
        latest = self._logged.get(subject)
        if latest is not None and latest[0] == cause and now - latest[1] < REPEAT_AFTER:
            return False
        self._logged = {each: (said, at) for each, (said, at) in self._logged.items() if now - at < REPEAT_AFTER}
        self._logged[subject] = (cause, now)
        return True

    def forget(self, subject: Hashable) -> None:
        """Have the next event of a subject be news, because its cause is gone."""
        self._logged.pop(subject, None)
