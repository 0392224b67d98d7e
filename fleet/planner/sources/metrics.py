"""Metrics demand source: reads the demand from the metrics `fleet_demand_…` on the pages /metrics of routers.

Such a page has the same counters as the gRPC call `WatchDemand` (`fleet.planner.sources.routers`), so both sources give the
same demand windows. But a page contains no sample of requests, and only those values of the workers' load for which there
are metrics.
"""

import asyncio
import io
import re
from functools import partial
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
from fleet.planner.sources.supervision import read_for_ever
from fleet.planner.sources.wire import BadDemandReport

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
                reading = partial(self._read, url)
                tasks.create_task(read_for_ever(url, reading, self._aggregator, self._settings.every_seconds))
        raise AssertionError("the tasks never end")

    async def _read(self, url: str) -> str:
        """Add the reports on a page to the demand. Return why this failed, or an empty string."""
        try:
            page = await _page(url, _key_header(self._settings.key_file))
            now = self._clock.now()
            # in a thread, because parsing takes seconds for the longest pages, and leader election runs in this event loop
            for report in await asyncio.to_thread(parse_page, page, now):
                self._aggregator.hear(url, report, now)
        except TimeoutError:
            return "no answer in time"
        except (aiohttp.ClientError, OSError, BadDemandReport, BadKeyFile) as error:
            return str(error) or type(error).__name__
        return ""


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
