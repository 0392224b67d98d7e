"""Study of policies on recorded traffic: attainment by load, and the load up to which each policy answers 90 % of the requests in time.

Conversation is the second half of Mooncake's trace on 16 aggregated workers; split is the same traffic on 10 prefill and 6 decode
workers; agentic is 192 sessions, for which no policy was tuned, on 8 workers. At a load of 1, the workers could just serve all requests
if every prefix were cached everywhere and there were no imbalance. The policies of Fleet, Dynamo and Mooncake are tuned with the same
number of trials on other requests; all other policies have their defaults.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from msgspec import Struct, structs

from loadtests.studies.contestants import PEERS, POLICIES, PREFILL_QUEUE_SETTINGS, Contestant, published, tuned
from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.runs import Effort, StudyCase, StudyRun, WorkloadPart, planned_of, read, run_all

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
EDGE = (0.62, 0.64, 0.66, 0.68, 0.7, 0.72)
WANTED = 0.9
OURS = "fleet"

Held = dict[str, tuple[float, float]]
"""Lowest and highest value that each finding may have, by the name of the finding."""


class StudyTraffic(Struct, frozen=True, kw_only=True):
    """The requests of one case of the study; they were not used for tuning."""

    name: str
    scenario: str
    tuned_as: str
    """Name of the workload in `tuned.toml` whose parameters are used."""

    changes: dict[str, Any] = {}
    part: WorkloadPart
    requests: int = 0
    loads: tuple[float, ...] = LOADS
    edge: tuple[float, ...] = (0.6, 0.7, 0.8)
    """Loads for all contestants except Fleet and its `PEERS`, around the load at which the better policies begin to be late."""


TRAFFIC = (
    StudyTraffic(
        name="conversation", scenario="policies-conversation", tuned_as="conversation", part=WorkloadPart.SECOND
    ),
    StudyTraffic(
        name="split",
        scenario="policies-split",
        tuned_as="split",
        part=WorkloadPart.SECOND,
        loads=(0.55, 0.6, 0.65, 0.7, 0.8),
        edge=(0.65, 0.7),
    ),
    StudyTraffic(
        name="agentic",
        scenario="policies-agentic",
        tuned_as="agentic",
        part=WorkloadPart.ALL,
        requests=2500,
        loads=(0.1, 0.2, 0.3),
        edge=(0.2,),
    ),
)
WIDE = StudyTraffic(
    name="wide", scenario="policies-wide", tuned_as="conversation", part=WorkloadPart.SECOND, loads=(0.7,)
)


class AttainmentCurve(Struct, frozen=True, kw_only=True):
    """The runs of one contestant at all loads; its figures are means over the seeds."""

    contestant: Contestant
    loads: tuple[float, ...]
    runs: tuple[tuple[StudyRun, ...], ...]  # for each load, the runs with all seeds

    def mean(self, place: int, field: str) -> float:
        return fmean(float(getattr(ran.outcome, field)) for ran in self.runs[place])

    @property
    def attained(self) -> list[float]:
        return [self.mean(place, "attainment") for place in range(len(self.loads))]

    def capacity(self, wanted: float = WANTED) -> float:
        """Return the load at which the attainment falls to `wanted`, interpolated between two loads; the highest load if it never does.

        For the interpolation, the attainment at a load of 0 is 1.
        """
        earlier, before = 0.0, 1.0
        for load, attained in zip(self.loads, self.attained, strict=True):
            if attained < wanted:
                return earlier + (load - earlier) * (before - wanted) / (before - attained)
            earlier, before = load, attained
        return self.loads[-1]

    def first_miss(self, wanted: float = WANTED) -> int | None:
        """Return the index of the lowest load whose attainment is below `wanted`; None if there is none."""
        return next((place for place, attained in enumerate(self.attained) if attained < wanted), None)


def contest(traffic: StudyTraffic, contestants: Sequence[Contestant], effort: Effort) -> list[AttainmentCurve]:
    """Run all contestants at all loads with the same requests and seeds."""
    cases = [
        StudyCase(
            scenario=traffic.scenario,
            changes={**traffic.changes, **contestant.changes()},
            part=traffic.part,
            requests=effort.requests or traffic.requests,
            load=load,
            seed=seed,
        )
        for contestant in contestants
        for load in traffic.loads
        for seed in effort.seeds
    ]
    ran = iter(run_all(cases, effort))
    return [
        AttainmentCurve(
            contestant=contestant,
            loads=traffic.loads,
            runs=tuple(tuple(next(ran) for _ in effort.seeds) for _ in traffic.loads),
        )
        for contestant in contestants
    ]


def contestants_of(traffic: StudyTraffic) -> list[Contestant]:
    planned = planned_of(read(traffic.scenario, traffic.changes))
    return [tuned(policy, traffic.tuned_as, planned) for policy in POLICIES]


def in_our_order(traffic: StudyTraffic) -> list[Contestant]:
    """Return contestants that show what the prefill queue and the tuning contribute.

    They are `PEERS` with Fleet's prefill queue, Fleet's policy without this queue, and Fleet's policy with its defaults.
    """
    planned = planned_of(read(traffic.scenario, traffic.changes))
    ours = tuned(OURS, traffic.tuned_as, planned)
    order = {name: value for name, value in ours.settings.items() if name in PREFILL_QUEUE_SETTINGS}
    without = Contestant(
        name="fleet, no prefill queue",
        policy=OURS,
        parameters=ours.parameters,
        settings={**ours.settings, "prefill_window_tokens": 0, "prefill_size_seconds": 0.0},
    )
    plain = published(OURS, planned)
    untuned = Contestant(name="fleet, defaults", policy=OURS, parameters=plain.parameters, settings=plain.settings)
    return [
        without,
        untuned,
        *(
            Contestant(
                name=f"{peer}, our prefill queue",
                policy=peer,
                parameters=each.parameters,
                settings={**each.settings, **order},
            )
            for peer in PEERS
            for each in [tuned(peer, traffic.tuned_as, planned)]
        ),
    ]


def attainments(traffic: StudyTraffic, curves: Sequence[AttainmentCurve]) -> StudyTable:
    rows: list[tuple[Cell, ...]] = [("bound", *(ran.bound for (ran, *_) in curves[0].runs), "")]
    rows.extend((each.contestant.name, *each.attained, each.capacity()) for each in curves)
    return StudyTable(
        title=f"{traffic.name}: share in time, by load",
        columns=("policy", *(f"{load:g}" for load in traffic.loads), "90 % at"),
        rows=rows,
    )


def details(traffic: StudyTraffic, curves: Sequence[AttainmentCurve], place: int) -> StudyTable:
    load = traffic.loads[place]
    rows = []
    for each in curves:
        first = [ran.outcome.ttft_ms for ran in each.runs[place]]
        rows.append(
            (
                each.contestant.name,
                each.mean(place, "goodput_rps"),
                each.mean(place, "attainment"),
                each.mean(place, "hit_rate"),
                each.mean(place, "imbalance"),
                fmean(ttft["p50"] for ttft in first) / 1000,
                fmean(ttft["p90"] for ttft in first) / 1000,
                fmean(ran.outcome.tpot_ms["p90"] for ran in each.runs[place]),
            )
        )
    return StudyTable(
        title=f"{traffic.name} at a load of {load:g}",
        columns=("policy", "goodput", "in time", "hits", "imbalance", "TTFT p50 s", "TTFT p90 s", "TPOT p90 ms"),
        rows=rows,
    )


def compared(traffic: StudyTraffic, curves: Sequence[AttainmentCurve], held: Held) -> tuple[list[StudyFinding], int]:
    """Compare Fleet's policy with `PEERS`; return the findings and the index of the load at which goodput is compared.

    It is the first load at which the better of `PEERS` has an attainment below `WANTED`; the last load if there is none.
    """
    by_name = {each.contestant.name: each for each in curves}
    ours = by_name[OURS]
    peers = [by_name[name] for name in PEERS]
    better = max(peers, key=lambda each: each.capacity())
    place = better.first_miss()
    place = len(traffic.loads) - 1 if place is None else place
    best_there = max(each.mean(place, "attainment") for each in peers)
    goodput = ours.mean(place, "attainment") / best_there
    carried = ours.capacity() / better.capacity()
    bound = ours.mean(place, "attainment") / ours.runs[place][0].bound
    load = traffic.loads[place]

    def finding(name: str, claim: str, figure: float, target: str, *, met: bool) -> StudyFinding:
        low, high = held.get(name, (float("-inf"), float("inf")))
        return StudyFinding(claim=f"{traffic.name}: {claim}", figure=figure, low=low, high=high, target=target, met=met)

    return [
        finding(
            "goodput",
            f"goodput beside the better of {' and '.join(PEERS)} at a load of {load:g}, where that first misses 90 %",
            goodput,
            "1.3",
            met=goodput >= 1.3,
        ),
        finding("carried", "load carried at 90 %, beside the same", carried, "1.3", met=carried >= 1.3),
        finding("bound", f"in time at a load of {load:g}, of what could be", bound, "0.85", met=bound >= 0.85),
    ], place


HELD: dict[str, Held] = {
    "conversation": {"goodput": (1.12, 1.31), "carried": (1.05, 1.25), "bound": (0.88, 1.0)},
    "split": {"goodput": (1.3, 2.2), "carried": (1.08, 1.3), "bound": (0.9, 1.0)},
    "agentic": {"goodput": (1.0, 1.3), "bound": (0.8, 1.0)},
    "edge": {"goodput": (1.04, 1.15), "carried": (1.02, 1.15), "bound": (0.88, 1.0)},
}
"""Ranges of the findings when the study was written, by traffic; docs/studies.md has the tables."""


def study(effort: Effort) -> StudyReport:
    tables: list[StudyTable] = []
    findings: list[StudyFinding] = []
    for traffic in TRAFFIC:
        everybody = contestants_of(traffic)
        curves = contest(traffic, [each for each in everybody if each.name in (OURS, *PEERS)], effort)
        found, place = compared(traffic, curves, HELD[traffic.name])
        near = structs.replace(traffic, loads=traffic.edge)
        others = [each for each in everybody if each.name not in (OURS, *PEERS)]
        beside = contest(near, [*others, *in_our_order(traffic)], effort)
        tables += [attainments(traffic, curves), details(traffic, curves, place), attainments(near, beside)]
        findings += found
    return StudyReport(study="policies", tables=tuple(tables), findings=tuple(findings))


def edge(effort: Effort) -> StudyReport:
    """Repeat the case conversation with loads close to each other, around the load at which the better policies begin to be late."""
    traffic = structs.replace(TRAFFIC[0], name="edge", loads=EDGE)
    curves = contest(traffic, [each for each in contestants_of(traffic) if each.name in (OURS, *PEERS)], effort)
    found, _ = compared(traffic, curves, HELD[traffic.name])
    return StudyReport(study="edge", tables=(attainments(traffic, curves),), findings=tuple(found))


WIDE_IMBALANCE = (1.0, 1.3)


def wide(effort: Effort) -> StudyReport:
    """Measure the imbalance of sixty-four workers with several policies, and return the report of the study `wide`."""
    names = (OURS, "dynamo", "mooncake", "llm_d", "smg", "aibrix")
    curves = contest(WIDE, [each for each in contestants_of(WIDE) if each.policy in names], effort)
    ours = next(each for each in curves if each.contestant.name == OURS).mean(0, "imbalance")
    low, high = WIDE_IMBALANCE
    return StudyReport(
        study="wide",
        tables=(details(WIDE, curves, 0),),
        findings=(
            StudyFinding(
                claim="the busiest of 64 workers over their mean, by time spent in steps",
                figure=ours,
                low=low,
                high=high,
                target="1.3",
                met=ours <= 1.3,
            ),
        ),
    )
