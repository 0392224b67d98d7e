"""Log deduplication: decides which of several equal events get a line in the log.

Rules:

1. An event is logged if its cause differs from the latest logged cause of its subject, or if the latest line of the
   subject is a minute old.
2. A subject is forgotten a minute after its latest line, so memory is limited by the number of lines per minute.
"""

from collections.abc import Hashable

from fleet.core.clock import SECOND, Nanos

REPEAT_AFTER = Nanos(60 * SECOND)


class LogDeduplicator:
    """Remembers the latest logged cause of each subject."""

    def __init__(self) -> None:
        self.logged: dict[Hashable, tuple[str, Nanos]] = {}

    def is_new(self, subject: Hashable, cause: str, now: Nanos) -> bool:
        """Return True if the caller should log the event now."""
        latest = self.logged.get(subject)
        if latest is not None and latest[0] == cause and now - latest[1] < REPEAT_AFTER:
            return False
        self.logged = {each: (said, at) for each, (said, at) in self.logged.items() if now - at < REPEAT_AFTER}
        self.logged[subject] = (cause, now)
        return True

    def forget(self, subject: Hashable) -> None:
        """Forget a subject whose cause has ended, so that its next event is logged."""
        self.logged.pop(subject, None)
