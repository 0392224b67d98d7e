"""Samples of metrics: converts samples of the metrics `fleet_demand_…` to demand reports.

The demand sources for metrics pages and for a Prometheus server use this module.

Rules:

1. The labels in `PROCESS_LABELS` identify the router process to which a sample belongs. Prometheus adds the label
   `instance`; a page with the metrics of several router processes has the label `router`.
2. Each router process has the metric `fleet_demand_uptime_seconds`. If a process has any metric of a model's demand,
   all counters in `REQUIRED` must exist for this model. Otherwise, a missing series would look like missing demand.
3. A report is refused if one of its values is negative or not a finite number, or if it is higher than any router can count.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from fleet.core.clock import Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, WorkerLoad
from fleet.core.duration_counts import EDGES
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.planner.sources.wire import BadDemandReport, duration

UPTIME = "fleet_demand_uptime_seconds"
PROCESS_LABELS = ("instance", "router")
REQUIRED = (
    *("arrivals", "waited", "refused", "abandoned", "invalid", "prompt_tokens", "uncounted_tokens", "prompt_squares"),
    *("cached_tokens", "finished", "answer_tokens", "answer_squares"),
)
COUNTERS = (*REQUIRED, "overflowed", "overflow_dollars")
HISTOGRAMS = ("ttft", "tpot", "queue_wait")
GAUGES = ("queued", "oldest_seconds")
FLOATS = frozenset({"prompt_squares", "answer_squares", "oldest_seconds", "overflow_dollars"})
WORKERS = ("running", "waiting", "kv_blocks_used", "kv_blocks")

MOST_COUNT = 1 << 63  # routers count with 64 bits

_BUCKETS = {str(index): index for index in range(len(EDGES) + 1)}
_FIELDS = (
    {f"fleet_demand_{name}_total": name for name in COUNTERS}
    | {f"fleet_demand_{name}": name for name in GAUGES}
    | {f"fleet_demand_{name}_seconds_total": name for name in HISTOGRAMS}
    | {f"fleet_worker_{name}": name for name in WORKERS}
)

USED = frozenset({UPTIME, *_FIELDS})
"""Names of the metrics that a demand report consists of. All other metrics are ignored."""

ProcessKey = tuple[str, ...]


class MetricSample(NamedTuple):
    """Holds one sample of a metric: its name, its labels and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def process_of(labels: Mapping[str, str]) -> ProcessKey:
    """Return the values of `PROCESS_LABELS`, which identify the router process of a sample."""
    return tuple(labels.get(name, "") for name in PROCESS_LABELS)


def process_name(key: ProcessKey) -> str:
    """Return the name by which messages refer to a router process."""
    return " ".join(each for each in key if each) or "the router"


def demand_reports(samples: Iterable[MetricSample], now: Nanos) -> dict[ProcessKey, DemandReport]:
    """Return the demand report of each router process; processes without the metric `UPTIME` are left out.

    Raises:
        BadDemandReport: A series or a label is missing, a value, bucket or role is impossible, or no process has the metric `UPTIME`.
    """
    processes: dict[ProcessKey, _ProcessSamples] = {}
    for sample in samples:
        key = process_of(sample.labels)
        try:
            processes.setdefault(key, _ProcessSamples()).add(sample)
        except KeyError as error:
            raise BadDemandReport(f"a metric of the demand has no label {error}") from error
    reports = {key: each.report(now) for key, each in processes.items() if each.uptime is not None}
    if not reports:
        raise BadDemandReport(f"there is no {UPTIME}; is it that of a router of this version?")
    return reports


class _ProcessSamples:
    """Collects the samples of one router process, and converts them to its demand report."""

    def __init__(self) -> None:
        self.uptime: float | None = None
        self._router = self._incarnation = ""
        self._models: dict[str, dict[str, Any]] = {}
        self._workers: dict[tuple[str, str, str], dict[str, float]] = {}

    def add(self, sample: MetricSample) -> None:
        name, labels, value = sample
        field = _FIELDS.get(name)
        if field is None and name != UPTIME:
            return
        if not isfinite(value) or value < 0:
            raise BadDemandReport(f"{name}: {value} is not a number of at least 0")
        if value >= MOST_COUNT and field is not None and field not in FLOATS:
            raise BadDemandReport(f"{name}: {value} is more than a router can count")
        if field is None:
            self.uptime, self._router, self._incarnation = value, labels["source"], labels["incarnation"]
        elif field in WORKERS and name.startswith("fleet_worker_"):
            self._workers.setdefault((labels["worker"], labels["model"], labels["role"]), {})[field] = value
        elif field in HISTOGRAMS:
            counts = self._models.setdefault(labels["model"], {}).setdefault(field, [0] * len(_BUCKETS))
            bucket = labels["bucket"]
            if bucket not in _BUCKETS:
                raise BadDemandReport(f"{name}: bucket {bucket[:40]!r} is not known here")
            counts[_BUCKETS[bucket]] = int(value)
        else:
            self._models.setdefault(labels["model"], {})[field] = value if field in FLOATS else int(value)

    def report(self, now: Nanos) -> DemandReport:
        assert self.uptime is not None
        for model, values in self._models.items():
            for name in REQUIRED:
                if name not in values:
                    raise BadDemandReport(f"fleet_demand_{name}_total: is missing for the model {model}")
        return DemandReport(
            router=self._router,
            incarnation=Incarnation(self._incarnation),
            at=now,
            uptime=duration(self.uptime, UPTIME),
            models=tuple(
                msgspec.convert({"model": model, **values}, ModelDemand) for model, values in self._models.items()
            ),
            workers=tuple(_worker(*key, values) for key, values in self._workers.items()),
        )


def _worker(worker: str, model: str, role: str, values: Mapping[str, float]) -> WorkerLoad:
    try:
        known = Role(role)
    except ValueError:
        raise BadDemandReport(f"fleet_worker_running: {role!r} is not a role") from None
    return WorkerLoad(
        worker_id=WorkerId(worker),
        model=ModelName(model),
        role=known,
        running=int(values.get("running", 0)),
        waiting=int(values.get("waiting", 0)),
        kv_used=min(1.0, values.get("kv_blocks_used", 0.0) / max(1.0, values.get("kv_blocks", 1.0))),
    )
