"""Metrics demand source: reads the demand from the metrics `fleet_demand_…` on the pages /metrics of routers.

Such a page has the same counters as the gRPC call `WatchDemand` (`fleet.planner.sources.routers`), so both sources give the
same demand windows. But a page contains no sample of requests, and only those values of the workers' load for which there
are metrics.
"""

import asyncio
import io
import logging
import re
from pathlib import Path
from typing import Never

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from fleet.core.clock import Clock, Nanos
from fleet.core.demand_reports import DemandReport
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.settings import MetricsDemandSettings
from fleet.planner.sources.samples import USED, MetricSample, demand_reports
from fleet.planner.sources.wire import BadDemandReport

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""Time limit in seconds to read a whole page."""

MOST_BYTES = 32 << 20
"""Maximum length of a page. A worker has about 12 series of 150 bytes, so the page of one router process with 1,000 workers has
2 MB, and this limit allows a page of 16 such processes."""

_NAME = re.compile(r"[ \t]*(\w+)")


class BadKeyFile(Exception):
    """The file with the access key cannot be used. The message does not contain the key."""


class MetricsDemandSource:
    """Reads the demand from the metrics pages of routers. Implements `fleet.planner.sources.ports.DemandSource`."""

    def __init__(self, settings: MetricsDemandSettings, aggregator: DemandAggregator, clock: Clock) -> None:
        self._settings = settings
        self._aggregator = aggregator
        self._clock = clock

    def window(self) -> DemandWindow:
        return self._aggregator.window(self._clock.now())

    def sample(self) -> tuple[RecentRequest, ...]:
        return ()

    async def run(self) -> Never:
        async with asyncio.TaskGroup() as tasks:
            for url in self._settings.urls:
                tasks.create_task(self._follow(url))
        raise AssertionError("the tasks never end")

    async def _follow(self, url: str) -> Never:
        logged_cause = ""
        cause: str
        unexpected: Exception | None
        while True:
            try:
                page = await _page(url, _key_header(self._settings.key_file))
                now = self._clock.now()
                # in a thread, because parsing takes seconds for the longest pages, and leader election runs in this event loop
                for report in await asyncio.to_thread(parse_page, page, now):
                    self._aggregator.hear(url, report, now)
                cause, unexpected = "", None
            except (aiohttp.ClientError, OSError, BadDemandReport, BadKeyFile) as error:
                cause, unexpected = str(error) or type(error).__name__, None
                if isinstance(error, TimeoutError):
                    cause = "no answer in time"
            except Exception as error:  # noqa: BLE001 - supervisor: any error makes this page stale, and the planner goes on
                cause, unexpected = f"{type(error).__name__}: {error}", error
            if cause:
                self._aggregator.failed(url, cause)
                if cause != logged_cause:
                    extra = {"source": url, "cause": cause}
                    log.warning("demand source lost", extra=extra, exc_info=unexpected)
            logged_cause = cause
            await asyncio.sleep(self._settings.every_seconds)


def parse_page(page: str, now: Nanos) -> tuple[DemandReport, ...]:
    """Return a demand report for each router process whose metrics are on a page.

    Lines of other metrics are not parsed, because they may be most of a page.

    Raises:
        BadDemandReport: A line is not in the Prometheus text format, has an impossible value, or lacks a part of a router's demand.
    """
    used = "".join(line for line in io.StringIO(page) if _metric_name(line) in USED)
    try:
        samples = [
            MetricSample(each.name, each.labels, each.value)
            for family in text_string_to_metric_families(used)
            for each in family.samples
        ]
    except (ValueError, OverflowError) as error:
        raise BadDemandReport(f"the page cannot be read: {error}") from error
    return tuple(demand_reports(samples, now).values())


def _metric_name(line: str) -> str:
    """Return the name of the metric whose sample is in a line, or an empty string if the line is a comment."""
    return found[1] if (found := _NAME.match(line)) else ""


def _key_header(key_file: str) -> dict[str, str]:
    """Return the HTTP header with the access key that is in a file; empty if no file is named.

    Raises:
        BadKeyFile: The file cannot be read, or does not contain one line of printable ASCII.
    """
    if not key_file:
        return {}
    try:
        key = Path(key_file).read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadKeyFile(f"source.key_file: {key_file}: {error.strerror}") from error
    except ValueError:  # not named as the cause, because the text of the ValueError may contain the key
        raise BadKeyFile(f"source.key_file: {key_file}: is not ASCII text; it must hold the key alone") from None
    if not key or not key.isprintable():
        raise BadKeyFile(f"source.key_file: {key_file}: is not one line of printable text; it must hold the key alone")
    return {"authorization": f"Bearer {key}"}


async def _page(url: str, headers: dict[str, str]) -> str:
    content = bytearray()
    async with (
        asyncio.timeout(CALL_SECONDS),
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.get(url, headers=headers) as answer,
    ):
        async for part in answer.content.iter_any():
            content += part
            if len(content) > MOST_BYTES:
                raise BadDemandReport(f"the page is longer than {MOST_BYTES} bytes")
    return content.decode(errors="replace")
