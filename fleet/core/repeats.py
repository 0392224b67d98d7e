"""Log deduplication: decides whether an event is written to the log, so that repeated events do not fill the log.

Rules:

1. Each event has a subject (such as a worker) and a cause. The event is logged if nothing was logged about its subject in
   the last minute, or if its cause differs from the last logged cause of the same subject.
2. Whenever an event is logged, all subjects whose last log line is at least a minute old are forgotten. So the memory
   is limited by the number of log lines per minute.
"""

from collections.abc import Hashable

from fleet.core.clock import SECOND, Nanos

REPEAT_AFTER = Nanos(60 * SECOND)


class LogDeduplicator:
    """Decides whether an event is logged: it remembers the last logged cause of each subject."""

    def __init__(self) -> None:
        self.logged: dict[Hashable, tuple[str, Nanos]] = {}

    def is_new(self, subject: Hashable, cause: str, now: Nanos) -> bool:
        """Return True if the caller has to log this event now; the event then counts as logged."""
        latest = self.logged.get(subject)
        if latest is not None and latest[0] == cause and now - latest[1] < REPEAT_AFTER:
            return False
        self.logged = {each: (said, at) for each, (said, at) in self.logged.items() if now - at < REPEAT_AFTER}
        self.logged[subject] = (cause, now)
        return True

    def forget(self, subject: Hashable) -> None:
        """Forget a subject whose problem has ended, so that a new problem of the subject is logged immediately."""
        self.logged.pop(subject, None)
