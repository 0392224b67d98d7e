"""Samples of metrics (`fleet_demand_…`) as demand reports, for sources that read pages of metrics or ask a Prometheus server.

Rules:

1. Samples belong to one router process by the labels in `PROCESS_LABELS`: Prometheus adds `instance`, and a page of several processes
   behind one port has `router`.
2. A process reports `fleet_demand_uptime_seconds`. All counters of a model are there or none is: a series that is missing, because it was
   dropped on its way, would look like no demand.
3. A value that is no finite number of at least 0 makes the report unusable.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, WorkerLoad
from fleet.core.duration_counts import EDGES
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.planner.sources.wire import BadDemandReport

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

_FIELDS = (
    {f"fleet_demand_{name}_total": name for name in COUNTERS}
    | {f"fleet_demand_{name}": name for name in GAUGES}
    | {f"fleet_demand_{name}_seconds_total": name for name in HISTOGRAMS}
    | {f"fleet_worker_{name}": name for name in WORKERS}
)

ProcessKey = tuple[str, ...]


class MetricSample(NamedTuple):
    """One sample."""

    name: str
    labels: Mapping[str, str]
    value: float


def process_of(labels: Mapping[str, str]) -> ProcessKey:
    """Return the router process that a sample belongs to."""
    return tuple(labels.get(name, "") for name in PROCESS_LABELS)


def process_name(key: ProcessKey) -> str:
    """Return the name of a process for people."""
    return " ".join(each for each in key if each) or "the router"


def demand_reports(samples: Iterable[MetricSample], now: Nanos) -> dict[ProcessKey, DemandReport]:
    """Return the report of each router process.

    Raises:
        BadDemandReport: A series is missing or impossible, or none is that of a router which counts its demand.
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
    """The samples of one process."""

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
        if field is None:
            self.uptime, self._router, self._incarnation = value, labels["source"], labels["incarnation"]
        elif field in WORKERS and name.startswith("fleet_worker_"):
            self._workers.setdefault((labels["worker"], labels["model"], labels["role"]), {})[field] = value
        elif field in HISTOGRAMS:
            counts = self._models.setdefault(labels["model"], {}).setdefault(field, [0] * (len(EDGES) + 1))
            bucket = labels["bucket"]
            if not bucket.isdecimal() or int(bucket) >= len(counts):
                raise BadDemandReport(f"{name}: bucket {bucket} is not known here")
            counts[int(bucket)] = int(value)
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
            uptime=Nanos(round(SECOND * self.uptime)),
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
