"""Log of a port whose connection limit is reached: operators have to know it, and not as often as it happens."""

import logging
from typing import Any

from fleet.adapters.connection_table import ConnectionTable

log = logging.getLogger(__name__)

TOLD_SECONDS = 60.0  # between two messages about one port


class LimitLog:
    def __init__(self, table: ConnectionTable[Any]) -> None:
        self._table = table
        self._displaced = 0  # when it was last logged
        self._refused = 0  # likewise
        self._tell_at = float("-inf")

    def tell(self, now: float, listen: str) -> None:
        """Log how many connections gave way or were refused since the last time, if any were.

        Args:
            now: In seconds, by a clock that never goes back.
            listen: The port, as a person knows it.
        """
        table = self._table
        displaced, refused = table.displaced - self._displaced, table.refused - self._refused
        if not (displaced or refused) or now < self._tell_at:
            return
        self._displaced, self._refused = table.displaced, table.refused
        self._tell_at = now + TOLD_SECONDS
        log.warning(
            "connection limit reached",
            extra={"listen": listen, "connections": len(table), "displaced": displaced, "refused": refused},
        )
