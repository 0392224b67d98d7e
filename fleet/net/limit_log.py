"""Log messages, at most one of a kind per minute, about the connections of a port: full table, slow clients, TLS failures."""

import logging
from typing import Any

from fleet.net.connection_limits import ConnectionTable
from fleet.net.settings import ConnectionSettings

log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0  # minimum time between two messages of one kind about one port
TLS_HANDSHAKE = b"\x16\x03"  # first bytes of a client that speaks TLS (RFC 8446, 5.1)


class ConnectionLimitLog:
    """Logs displaced and refused connections of one port."""

    def __init__(self, table: ConnectionTable[Any]) -> None:
        self._table = table
        self._displaced = 0  # value of `table.displaced` at the last message
        self._refused = 0  # value of `table.refused` at the last message
        self._next_log_at = float("-inf")

    def log_changes(self, now: float, listen: str) -> None:
        """Log how many connections were displaced or refused since the last message, if there were any."""
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


class ClientLog:
    """Counts and logs errors of the clients of one port: slow reading, TLS to a port without TLS, and failed handshakes."""

    def __init__(self, limits: ConnectionSettings) -> None:
        self.disconnected = 0  # number of clients that were disconnected since the start because they read too slowly
        self.tls_clients = 0  # number of connections since the start that began with TLS on a port without TLS
        self.failed_handshakes = 0  # number of TLS handshakes that failed since the start
        self._limits = limits
        self._slow = _LoggedCount()
        self._tls = _LoggedCount()
        self._failed = _LoggedCount()
        self._cause = ""  # why the handshake of the last client in `failed_handshakes` failed
        self._waiting = 0  # number of bytes that the last client in `disconnected` had not read

    def note_slow(self, client: str, waiting: int) -> None:
        """Count a client that is disconnected because it read too little; it had not read `waiting` bytes."""
        self.disconnected += 1
        self._slow.client, self._waiting = client, waiting

    def note_bytes(self, client: str, data: bytes) -> None:
        """Count a client whose bytes the port could not parse, if they begin a TLS handshake."""
        if data.startswith(TLS_HANDSHAKE):
            self.tls_clients += 1
            self._tls.client = client

    def note_failed_handshake(self, client: str, cause: str) -> None:
        """Count a client whose TLS handshake failed."""
        self.failed_handshakes += 1
        self._failed.client, self._cause = client, cause

    def log_changes(self, now: float, listen: str) -> None:
        """Log how many clients were counted since the last message, and the last of these clients; log nothing if there were none."""
        if clients := self._slow.due(self.disconnected, now):
            log.warning(
                "clients cut off because they read too slowly",
                extra={
                    "listen": listen,
                    "clients": clients,
                    "last_client": self._slow.client,
                    "unread_bytes": self._waiting,
                    "write_timeout_seconds": self._limits.write_timeout_seconds,
                    "min_read_bytes": self._limits.min_read_bytes,
                },
            )
        if clients := self._tls.due(self.tls_clients, now):
            log.warning(
                "clients speak TLS, and this port does not",
                extra={"listen": listen, "clients": clients, "last_client": self._tls.client},
            )
        if clients := self._failed.due(self.failed_handshakes, now):
            log.warning(
                "TLS handshakes of clients failed",
                extra={"listen": listen, "clients": clients, "last_client": self._failed.client, "cause": self._cause},
            )


class _LoggedCount:
    """Remembers how many clients with one problem were logged, and allows a log message once in `LOG_INTERVAL_SECONDS`."""

    def __init__(self) -> None:
        self.client = ""  # address of the client that was counted last
        self._logged = 0  # value of the argument `count` of `due` at the last message
        self._next_log_at = float("-inf")

    def due(self, count: int, now: float) -> int:
        """Return by how much the count has grown since the last message; 0 if no message is due yet."""
        if count == self._logged or now < self._next_log_at:
            return 0
        grown = count - self._logged
        self._logged, self._next_log_at = count, now + LOG_INTERVAL_SECONDS
        return grown
