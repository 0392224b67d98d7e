"""Prediction errors: by how much first tokens came later than expected, and the margin that follows for the next predictions.

A predicted wait is a mean, so about half of all requests wait longer. If the mean alone were compared with the limit `max_queue_seconds`, the
predicted wait in an overloaded router would stay at the limit, and half of the first tokens would come too late. So a margin is added to a
prediction before the comparison: the 98th percentile of the latest errors. The expected time of the request's own prefill is first subtracted
from an error, and delays that the order of prefill queues causes on purpose count little or not at all
(`fleet.router.queueing.admission.QueueAdmission.first_token`). Everything else that the prediction leaves out is a part of the error, and so
of the margin.
"""

from collections import deque
from math import ceil

from fleet.core.clock import SECOND, Nanos

KEPT = 128  # number of latest errors that are kept for each model
ENOUGH = 8  # number of errors that are needed before there is a margin; with fewer, the margin is 0
QUANTILE = 0.98
FORGOTTEN_AFTER = 30 * SECOND
"""When this time has passed since the latest error, all errors are forgotten. After a fault, the margin may be so large that no request may
wait. If errors were never forgotten, no new error would then be measured, and the margin would stay too large.
"""


class PredictionErrors:
    """Keeps the latest errors of the predicted first tokens of one model."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=KEPT)
        self._margin = 0.0
        self._noted_at = Nanos(0)

    def note(self, seconds: float, now: Nanos) -> None:
        """Record that a first token came `seconds` later than expected; negative: earlier."""
        if now - self._noted_at > FORGOTTEN_AFTER:
            self._errors.clear()
        self._noted_at = now
        self._errors.append(seconds)
        ordered = sorted(self._errors)
        self._margin = max(0.0, ordered[ceil(QUANTILE * len(ordered)) - 1]) if len(ordered) >= ENOUGH else 0.0

    def margin(self, now: Nanos) -> float:
        """Return the seconds to add to a predicted wait before it is compared with the limit; 0 if too few errors are known."""
        return 0.0 if now - self._noted_at > FORGOTTEN_AFTER else self._margin
