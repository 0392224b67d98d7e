"""Metrics demand source: reads the demand from the metrics `fleet_demand_…` on the pages /metrics of routers.

Such a page has the same counters as the gRPC call `WatchDemand` (`fleet.planner.sources.routers`), so both sources give the
same demand windows. But a page contains no sample of requests, and only those values of the workers' load for which there
are metrics.
"""

import asyncio
import logging
from pathlib import Path
from typing import Never

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from fleet.core.clock import Clock, Nanos
from fleet.core.demand_reports import DemandReport
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.settings import MetricsDemandSettings
from fleet.planner.sources.samples import MetricSample, demand_reports
from fleet.planner.sources.wire import BadDemandReport

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""Time limit in seconds to read a whole page."""

MOST_BYTES = 64 << 20


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
        while True:
            try:
                page = await _page(url, _key_header(self._settings.key_file))
                now = self._clock.now()
                for report in parse_page(page, now):
                    self._aggregator.hear(url, report, now)
                logged_cause = ""
            except (aiohttp.ClientError, OSError, BadDemandReport, BadKeyFile) as error:
                cause = "no answer in time" if isinstance(error, TimeoutError) else str(error)
                self._aggregator.failed(url, cause)
                if cause != logged_cause:
                    logged_cause = cause
                    log.warning("demand source lost", extra={"source": url, "cause": cause})
            await asyncio.sleep(self._settings.every_seconds)


def parse_page(page: str, now: Nanos) -> tuple[DemandReport, ...]:
    """Return a demand report for each router process whose metrics are on a page.

    Raises:
        BadDemandReport: The page is not in the Prometheus text format, has an impossible value, or lacks a part of a router's demand.
    """
    try:
        samples = [
            MetricSample(each.name, each.labels, each.value)
            for family in text_string_to_metric_families(page)
            for each in family.samples
        ]
    except (ValueError, OverflowError) as error:
        raise BadDemandReport(f"the page cannot be read: {error}") from error
    return tuple(demand_reports(samples, now).values())


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
