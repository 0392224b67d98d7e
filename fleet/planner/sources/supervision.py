"""Supervision of demand sources: repeats reading a source for ever, and reports each failure of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Never

from fleet.planner.aggregate import DemandAggregator

log = logging.getLogger(__name__)


async def read_for_ever(
    name: str, read: Callable[[], Awaitable[str]], aggregator: DemandAggregator, pause_seconds: float
) -> Never:
    """Call `read` again and again, with a pause after each call, until cancelled.

    `read` adds reports of the demand source `name` to the aggregator, and returns why the source failed, or an empty string. Any
    error that it raises counts as a failure, too. The aggregator hears of each failure, and it is logged if its cause is
    not that of the call before.
    """
    logged_cause = ""
    cause: str
    unexpected: Exception | None
    while True:
        try:
            cause, unexpected = await read(), None
        except Exception as error:  # noqa: BLE001 - supervisor: any error makes this source stale, and the planner goes on
            cause, unexpected = f"{type(error).__name__}: {error}", error
        if cause:
            aggregator.failed(name, cause)
            if cause != logged_cause:
                extra = {"source": name, "cause": cause}
                log.warning("demand source lost", extra=extra, exc_info=unexpected)
        logged_cause = cause
        await asyncio.sleep(pause_seconds)
