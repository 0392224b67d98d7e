"""Metrics demand source: reads the demand from the pages /metrics of routers (`fleet_demand_…`), in the Prometheus text format.

The counters are those of `WatchDemand`, so both sources give the same windows. There is no sample of requests and no load of workers
that another process cannot see on the page.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Never

import aiohttp
import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, WorkerLoad
from fleet.core.duration_counts import EDGES
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.settings import MetricsDemandSettings
from fleet.planner.sources.wire import BadDemandReport

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""Limit for a whole page, however slowly it comes."""

MOST_BYTES = 64 << 20
COUNTERS = (
    *("arrivals", "waited", "refused", "abandoned", "invalid", "prompt_tokens", "uncounted_tokens", "prompt_squares"),
    *("cached_tokens", "finished", "answer_tokens", "answer_squares", "overflowed", "overflow_dollars"),
)
HISTOGRAMS = ("ttft", "tpot", "queue_wait")
GAUGES = ("queued", "oldest_seconds")
FLOATS = frozenset({"prompt_squares", "answer_squares", "oldest_seconds", "overflow_dollars"})


class MetricsDemandSource:
    """Implements `fleet.planner.sources.ports.DemandSource`."""

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
        told = ""
        while True:
            try:
                report = parse_page(await _page(url), self._clock.now())
                self._aggregator.hear(url, report, self._clock.now())
                told = ""
            except (aiohttp.ClientError, OSError, BadDemandReport) as error:
                cause = "no answer in time" if isinstance(error, TimeoutError) else str(error)
                self._aggregator.failed(url, cause)
                if cause != told:
                    told = cause
                    log.warning("demand source lost", extra={"source": url, "cause": cause})
            await asyncio.sleep(self._settings.every_seconds)


def parse_page(page: str, now: Nanos) -> DemandReport:
    """Return the demand on a page of metrics.

    Raises:
        BadDemandReport: The page is not that of a router that counts its demand, or not in the Prometheus text format.
    """
    try:
        return _report(page, now)
    except KeyError as error:
        raise BadDemandReport(f"a metric of the demand has no label {error}") from error
    except (ValueError, OverflowError) as error:
        raise BadDemandReport(f"the page cannot be read: {error}") from error


def _report(page: str, now: Nanos) -> DemandReport:
    families = {family.name: family for family in text_string_to_metric_families(page)}
    if (uptime := families.get("fleet_demand_uptime_seconds")) is None or not uptime.samples:
        raise BadDemandReport("the page has no fleet_demand_uptime_seconds; is it that of a router of this version?")
    labels = uptime.samples[0].labels
    models: dict[str, dict[str, Any]] = {}
    for name in (*COUNTERS, *GAUGES):
        for sample in _samples(families, f"fleet_demand_{name}"):
            value = sample.value if name in FLOATS else int(sample.value)
            models.setdefault(sample.labels["model"], {})[name] = value
    for name in HISTOGRAMS:
        for sample in _samples(families, f"fleet_demand_{name}_seconds"):
            counts = models.setdefault(sample.labels["model"], {}).setdefault(name, [0] * (len(EDGES) + 1))
            bucket = int(sample.labels["bucket"])
            if not 0 <= bucket < len(counts):
                raise BadDemandReport(f"fleet_demand_{name}_seconds: bucket {bucket} is not known here")
            counts[bucket] = int(sample.value)
    return DemandReport(
        router=labels["source"],
        incarnation=Incarnation(labels["incarnation"]),
        at=now,
        uptime=Nanos(round(SECOND * uptime.samples[0].value)),
        models=tuple(msgspec.convert({"model": model, **values}, ModelDemand) for model, values in models.items()),
        workers=_workers(families),
    )


def _workers(families: dict[str, Metric]) -> tuple[WorkerLoad, ...]:
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for name in ("running", "waiting", "kv_blocks_used", "kv_blocks"):
        for sample in _samples(families, f"fleet_worker_{name}"):
            key = (sample.labels["worker"], sample.labels["model"], sample.labels["role"])
            found.setdefault(key, {})[name] = sample.value
    return tuple(
        WorkerLoad(
            worker_id=WorkerId(worker),
            model=ModelName(model),
            role=Role(role),
            running=int(values.get("running", 0)),
            waiting=int(values.get("waiting", 0)),
            kv_used=min(1.0, values.get("kv_blocks_used", 0.0) / max(1.0, values.get("kv_blocks", 1.0))),
        )
        for (worker, model, role), values in found.items()
    )


def _samples(families: dict[str, Metric], name: str) -> Iterable[Any]:
    family = families.get(name)
    return () if family is None else (each for each in family.samples if not each.name.endswith("_created"))


async def _page(url: str) -> str:
    content = bytearray()
    async with (
        asyncio.timeout(CALL_SECONDS),
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.get(url) as answer,
    ):
        async for part in answer.content.iter_any():
            content += part
            if len(content) > MOST_BYTES:
                raise BadDemandReport(f"the page is longer than {MOST_BYTES} bytes")
    return content.decode(errors="replace")
