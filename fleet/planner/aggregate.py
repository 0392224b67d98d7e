"""Aggregation of demand: sums the demand reports of all routers of a model into demand windows, without I/O.

Rules:

1. `fleet.planner.sources` reads the reports. The counters in a report belong to one incarnation of a router process. If an
   incarnation began within the window, or at most `stale_after` before it, all counts of the incarnation belong to the
   window. If an older incarnation reports for the first time, only counts after this report belong to the window: it is
   unknown when the earlier requests arrived.
2. A source is stale until its first report, and again when it has been silent for longer than `stale_after`. The counts
   of such a silent time are dropped, because they would look like a burst in the next window. The window in which the
   source reports again still names the source as stale.
3. Abandoned and invalid requests are subtracted from the arrivals. Such a request may have arrived in an earlier
   window. So if more such requests are reported than have arrived in this window, the excess is subtracted from later
   windows. The arrivals of a window are never below zero, and their sum over all windows is exact.
4. Several sources may report the same router process. Only the latest report counts, and each request is counted once.
5. A router serves the model if it reports a worker of the model, or a request for the model that waits, runs or was
   answered. If routers report, and none of them serves the model, the window says which models they serve (`DemandWindow.unserved`):
   the counts of zero may then be those of a model whose name is wrong.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, WorkerLoad
from fleet.core.duration_counts import Counts, added
from fleet.core.ids import Incarnation, ModelName, WorkerId, longest_prefix
from fleet.core.roles import Role
from fleet.planner.demand import DemandWindow, RecentRequest, WorkerDemand
from fleet.planner.messages import PoolName, shortened, worker_prefix

STALE_AFTER = Nanos(5 * SECOND)  # default of `stale_after`: five reports, because routers report once a second
SAMPLED = 512
"""Maximum number of requests in the sample that rehearsals use. A new request replaces the oldest one."""

_COUNTERS = (
    *("arrivals", "refused", "abandoned", "invalid", "prompt_tokens", "uncounted_tokens"),
    *(
        "cached_tokens",
        "finished",
        "answer_tokens",
        "prompt_squares",
        "answer_squares",
        "overflowed",
        "overflow_dollars",
    ),
)
_HISTOGRAMS = ("ttft", "tpot", "queue_wait")


class _Process(Struct):
    """Holds the latest report of one router incarnation, and the counters that earlier windows have covered."""

    source: str
    reported_at: Nanos
    base: ModelDemand  # values of the counters at the beginning of the present window (rules 1 and 2)
    latest: ModelDemand
    workers: tuple[WorkerLoad, ...]
    other_models: frozenset[ModelName]
    """Names of the other models that this router serves."""

    @property
    def serves(self) -> bool:
        """True if this router serves the model of the planner (rule 5)."""
        return bool(self.workers) or _has_requests(self.latest)


class DemandAggregator:
    """Sums the demand reports that several sources bring for one model, and returns demand windows."""

    def __init__(
        self,
        model: ModelName,
        sources: Collection[str],
        pools: Mapping[PoolName, Role],
        now: Nanos,
        stale_after: Nanos = STALE_AFTER,
        *,
        workers_prefix: str = "",
    ) -> None:
        """Begin the first window.

        Args:
            model: The model whose demand is counted.
            sources: Names of the sources that must report.
            pools: Names and roles of the planned pools; the names of workers contain the name of their pool.
            now: The instant at which the first window begins.
            stale_after: Time without a report after which a source is stale.
            workers_prefix: The text in the names of workers that precedes the name of the pool.
        """
        self._workers_prefix = workers_prefix
        self._model = model
        self._pools = pools
        self._stale_after = stale_after
        self._began = now
        self._report_times: dict[str, Nanos | None] = dict.fromkeys(sources)
        self._troubles: dict[str, str] = {}
        self._gaps: dict[str, str] = {}
        self._processes: dict[Incarnation, _Process] = {}
        self._owed_requests = 0
        self._owed_tokens = 0
        self._sample: deque[RecentRequest] = deque(maxlen=SAMPLED)

    def hear(self, source: str, report: DemandReport, now: Nanos) -> None:
        """Add a report to the window, unless another source has already brought a later report of the same process.

        Args:
            source: The source that sent the report.
            report: The report.
            now: The present instant.
        """
        before = self._report_times.get(source)
        self._report_times[source] = now
        self._troubles.pop(source, None)
        late = before is not None and now - before > self._stale_after
        if late and before is not None:
            self._gaps[source] = f"{source}: sent nothing for {(now - before) / SECOND:.0f} s"
        demand = next((each for each in report.models if each.model == self._model), ModelDemand(model=self._model))
        known = self._processes.get(report.incarnation)
        if known is None:
            fresh = now - report.uptime >= self._began - self._stale_after
            base = ModelDemand(model=self._model) if fresh else demand
        elif _went_back(known.latest, demand):
            if known.source != source:
                return  # another source has already brought a later report of this process
            base = demand
            self._gaps[source] = f"{source}: the counters of {report.router} went back"
        else:
            silent = known.source == source and now - known.reported_at > self._stale_after
            base = demand if silent else known.base
        workers = tuple(each for each in report.workers if each.model == self._model)
        others = {each.model for each in report.workers} | {each.model for each in report.models if _has_requests(each)}
        self._processes[report.incarnation] = _Process(
            source, now, base, demand, workers, frozenset(others - {self._model})
        )
        self._sample.extend(
            RecentRequest(
                arrived=each.arrived,
                prompt_tokens=each.prompt_tokens,
                answer_tokens=each.answer_tokens,
                block_tokens=each.block_tokens,
                block_keys=each.block_keys,
            )
            for each in report.recent
            if each.model == self._model
        )

    def expect(self, source: str) -> None:
        """Add a source that must report from now on. Do nothing if the source is known already."""
        self._report_times.setdefault(source, None)

    def forget(self, source: str) -> None:
        """Remove a source that has ended. Its last report still counts in the present window."""
        self._report_times.pop(source, None)
        self._troubles.pop(source, None)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the names of the sources that must report."""
        return tuple(self._report_times)

    def failed(self, source: str, why: str) -> None:
        """Record why a source does not report at present; the texts of `stale` contain this reason, which is shortened."""
        self._troubles[source] = shortened(why)

    def sample(self) -> tuple[RecentRequest, ...]:
        """Return the last `SAMPLED` requests of the reports' samples, in the order of their arrival."""
        return tuple(sorted(self._sample, key=lambda each: each.arrived))

    def stale(self, now: Nanos) -> tuple[str, ...]:
        """Return a text for each source without a recent report.

        The text states for how long the source has been silent, or that it has never reported, and the reason if known.
        """
        found = []
        for source, reported_at in self._report_times.items():
            why = self._troubles.get(source, "")
            why = f" ({why})" if why else ""
            if reported_at is None:
                found.append(f"{source}: has not reported yet{why}")
            elif now - reported_at > self._stale_after:
                found.append(f"{source}: has not reported for {(now - reported_at) / SECOND:.0f} s{why}")
        return tuple(found)

    def window(self, now: Nanos) -> DemandWindow:
        """Return the demand since the end of the last window, and begin the next window."""
        sums: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
        histograms: dict[str, Counts] = dict.fromkeys(_HISTOGRAMS, ())
        queued, oldest, workers = 0, 0.0, dict[WorkerId, WorkerLoad]()
        present = list[_Process]()
        for incarnation, process in sorted(self._processes.items(), key=lambda item: item[1].reported_at):
            for name in _COUNTERS:
                sums[name] += getattr(process.latest, name) - getattr(process.base, name)
            for name in _HISTOGRAMS:
                histograms[name] = added(
                    histograms[name], _minus(getattr(process.latest, name), getattr(process.base, name))
                )
            process.base = process.latest
            if self._replaced(process):
                del self._processes[incarnation]
                continue
            if now - process.reported_at > self._stale_after:
                continue
            present.append(process)
            queued += process.latest.queued
            oldest = max(oldest, process.latest.oldest_seconds)
            workers |= {each.worker_id: each for each in process.workers}
        arrivals, self._owed_requests = subtract_owed(
            sums["arrivals"], sums["abandoned"] + sums["invalid"] + self._owed_requests
        )
        tokens, self._owed_tokens = subtract_owed(sums["prompt_tokens"], sums["uncounted_tokens"] + self._owed_tokens)
        window = DemandWindow(
            began=self._began,
            ended=now,
            arrivals=arrivals,
            refused=sums["refused"],
            abandoned=sums["abandoned"],
            prompt_tokens=tokens,
            prompt_squares=sums["prompt_squares"] * tokens / max(1, sums["prompt_tokens"]),
            answer_squares=sums["answer_squares"],
            cached_tokens=sums["cached_tokens"],
            finished=sums["finished"],
            answer_tokens=sums["answer_tokens"],
            ttft=histograms["ttft"],
            tpot=histograms["tpot"],
            queue_wait=histograms["queue_wait"],
            queued=queued,
            oldest_seconds=oldest,
            overflowed=sums["overflowed"],
            overflow_dollars=sums["overflow_dollars"],
            workers=tuple(self._worker(workers[each]) for each in sorted(workers)),
            stale=(*self.stale(now), *self._gaps.values()),
            unserved=self._unserved(present),
        )
        self._began, self._gaps = now, {}
        return window

    def _replaced(self, process: _Process) -> bool:
        """Return whether a process counts as ended: its source was removed, or has reported another process later."""
        last_report_time = self._report_times.get(process.source)
        return last_report_time is None or last_report_time > process.reported_at

    def _unserved(self, present: Collection[_Process]) -> str:
        """Return the text of `DemandWindow.unserved` for the router processes that report at present."""
        if not present or any(each.serves for each in present):
            return ""
        others = sorted(frozenset[ModelName]().union(*(each.other_models for each in present)))
        known = f"they serve {', '.join(others)}" if others else "they have no workers"
        return f"no router serves {self._model}; {known}"

    def _worker(self, load: WorkerLoad) -> WorkerDemand:
        return WorkerDemand(
            worker=load.worker_id,
            pool=self.pool_of(load.worker_id, load.role),
            running=load.running,
            waiting=load.waiting,
            kv_used=load.kv_used,
            speed=load.speed,
            start_seconds=load.start_seconds,
        )

    def pool_of(self, worker_id: WorkerId, role: Role) -> PoolName:
        """Return the name of a worker's pool; usually the name of the worker contains it.

        If the name contains no pool, return the only pool of the worker's role, or else a pool with the name of the
        role.
        """
        alike = [name for name, its in self._pools.items() if its is role]
        prefixes = {f"{self._workers_prefix}{worker_prefix(name)}-": name for name in alike}
        found = longest_prefix(worker_id, prefixes)
        if found is not None:
            return prefixes[found]
        return alike[0] if len(alike) == 1 else PoolName(str(role))


def subtract_owed(counted: int, owed: int) -> tuple[int, int]:
    """Return `counted` less `owed`, but at least 0, and the part of `owed` that is left for later windows."""
    return max(0, counted - owed), max(0, owed - counted)


def _has_requests(demand: ModelDemand) -> bool:
    """Return whether a request for the model waits, runs, or was answered, according to the counters of a router."""
    return demand.queued > 0 or demand.arrivals > demand.refused + demand.invalid + demand.abandoned


def _went_back(before: ModelDemand, after: ModelDemand) -> bool:
    """Return whether a counter has fallen between two reports, or a histogram has fewer buckets."""
    return any(getattr(after, name) < getattr(before, name) for name in _COUNTERS) or any(
        len(getattr(after, name)) < len(getattr(before, name)) for name in _HISTOGRAMS
    )


def _minus(after: Counts, before: Counts) -> Counts:
    if not before:
        return after
    return tuple(max(0, a - b) for a, b in zip(after, before, strict=True))
