"""Failure log: one log line when operations begin to fail, and one when they work again."""

import logging

from kvstore.errors import reason

log = logging.getLogger(__name__)


class FailureLog:
    """Failures of one kind in one folder. A race between threads can at worst log a line twice."""

    def __init__(self, what: str, folder: str) -> None:
        self._what = what
        self._folder = folder
        self._lasts = False

    def failed(self, error: Exception | str) -> None:
        if not self._lasts:
            self._lasts = True
            cause = error if isinstance(error, str) else reason(error)
            log.warning("SSD tier: %s", self._what, extra={"folder": self._folder, "error": cause})

    def worked(self) -> None:
        if self._lasts:
            self._lasts = False
            log.info("SSD tier: no longer: %s", self._what, extra={"folder": self._folder})
