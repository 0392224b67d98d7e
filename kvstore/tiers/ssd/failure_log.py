"""One line in the log when something begins to fail, one when it works again, and none in between."""

import logging

from kvstore.errors import reason

log = logging.getLogger(__name__)


class FailureLog:
    """Of one kind, in one place. Thread-safe as far as it has to be: two lines instead of one are no harm."""

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
