"""Rate-limited log messages about the limits of a port."""

import logging
from typing import Any

from fleet.net.connection_table import ConnectionTable
from fleet.net.settings import ConnectionSettings

log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0  # between two messages about one port


class ConnectionLimitLog:
    """Logs displaced and refused connections of one port."""

    def __init__(self, table: ConnectionTable[Any]) -> None:
        self._table = table
        self._displaced = 0  # count at the last message
        self._refused = 0  # count at the last message
        self._next_log_at = float("-inf")

    def log_changes(self, now: float, listen: str) -> None:
        """Log how many connections gave way or were refused since the last message, if any."""
        table = self._table
        displaced, refused = table.displaced - self._displaced, table.refused - self._refused
        if not (displaced or refused) or now < self._next_log_at:
            return
        self._displaced, self._refused = table.displaced, table.refused
        self._next_log_at = now + LOG_INTERVAL_SECONDS
        log.warning(
            "connection limit reached",
            extra={"listen": listen, "connections": len(table), "displaced": displaced, "refused": refused},
        )


class SlowClientLog:
    """Counts and logs clients that were disconnected because they read too slowly."""

    def __init__(self, limits: ConnectionSettings) -> None:
        self.disconnected = 0  # clients disconnected since the start
        self._limits = limits
        self._logged = 0  # count at the last message
        self._next_log_at = float("-inf")
        self._client = ""  # the client that was disconnected last
        self._waiting = 0  # bytes that this client had not read

    def note(self, client: str, waiting: int) -> None:
        """Note that a client is disconnected because it read too little."""
        self.disconnected += 1
        self._client, self._waiting = client, waiting

    def log_changes(self, now: float, listen: str) -> None:
        """Log how many clients were disconnected since the last message, if any, and the last of them."""
        if self.disconnected == self._logged or now < self._next_log_at:
            return
        log.warning(
            "clients cut off because they read too slowly",
            extra={
                "listen": listen,
                "clients": self.disconnected - self._logged,
                "last_client": self._client,
                "unread_bytes": self._waiting,
                "write_timeout_seconds": self._limits.write_timeout_seconds,
                "min_read_bytes": self._limits.min_read_bytes,
            },
        )
        self._logged, self._next_log_at = self.disconnected, now + LOG_INTERVAL_SECONDS
