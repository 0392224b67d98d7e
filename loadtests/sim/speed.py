"""Speed of the simulator: simulated requests per second of CPU time.

    python -m loadtests.sim.speed --rounds 5 --json -

Rules:

1. *short* is the workload with which NVIDIA Dynamo's replay (1.6.1) was measured: 20,000 requests within 994 s, on average 2,375
prompt tokens and 225 answer tokens, blocks of 512 tokens, with KV-aware routing. Dynamo's replay reached 11,100 requests per second
with 4 workers, and 3,400 with 64 workers.
2. *conversation* is Mooncake's trace on 16 H100, as in `loadtests/studies/conversation.toml`, with prompts of 12,000 tokens.
3. The time is all CPU time of one process: reading the traffic, the router's decisions, engines, results.
4. Rounds of all cases alternate, and the median counts. The digests of all rounds of a case must be equal, or the run fails.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fleet.sim.results.outcomes import RunOutcome
from fleet.sim.run_plan import run_scenario
from fleet.sim.scenario import Scenario, SimulatedPoolSection, read_scenario
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import RecordedWorkload
from loadtests.host import facts

STUDIES = Path(__file__).parent.parent / "studies"
TP = 4

SHORT = DrawnWorkload(
    requests=20_000,
    rate=20_000 / 994,
    prompt_tokens=2375,
    output_tokens=225,
    prefixes=64,
    prefix_tokens=1024,
)

REFERENCES = {"short-4": 11_100, "short-64": 3_400}
"""Requests per second of Dynamo's replay (rule 1), measured on another machine with two x86 cores. It is unknown how fast that machine
is, compared with this one."""


class SpeedCase(Struct, frozen=True, kw_only=True):
    """One case of the benchmark: a scenario, with its number of workers."""

    name: str
    workers: int
    scenario: Scenario


def cases(requests: int) -> list[SpeedCase]:
    """Return all cases, each with at most `requests` requests; 0: all requests."""
    conversation = read_scenario(STUDIES / "conversation.toml")
    recorded = conversation.workload
    assert isinstance(recorded, RecordedWorkload)
    made = []
    for workers in (4, 64):
        pools = (SimulatedPoolSection(gpu="h100", gpus=workers * TP, tp=TP),)
        workload = structs.replace(SHORT, requests=requests) if requests else SHORT
        scenario = Scenario(model=conversation.model, pools=pools, workload=workload)
        made.append(SpeedCase(name=f"short-{workers}", workers=workers, scenario=scenario))
    cut = structs.replace(conversation, workload=structs.replace(recorded, requests=requests))
    made.append(SpeedCase(name="conversation-4", workers=4, scenario=cut))
    return made


def measure(made: Sequence[SpeedCase], rounds: int) -> list[dict[str, Any]]:
    """Measure all cases in turn.

    Raises:
        RuntimeError: Two rounds of a case had different results.
    """
    outcomes: dict[str, list[RunOutcome]] = {case.name: [] for case in made}
    for number in range(rounds):
        for case in made:
            outcomes[case.name].append(run_scenario(case.scenario, STUDIES).outcome)
            print(f"round {number + 1} of {rounds}: {case.name}", file=sys.stderr)
    return [_row(case, outcomes[case.name]) for case in made]


def _row(case: SpeedCase, outcomes: Sequence[RunOutcome]) -> dict[str, Any]:
    digests = {outcome.digest for outcome in outcomes}
    if len(digests) > 1:
        raise RuntimeError(f"{case.name}: rounds differ: {', '.join(sorted(digests))}")
    speeds = sorted(outcome.requests_per_cpu_second for outcome in outcomes)
    first = outcomes[0]
    median = statistics.median(speeds)
    cpu_seconds = first.requests / median
    return {
        "case": case.name,
        "workers": case.workers,
        "requests": first.requests,
        "rounds": len(outcomes),
        "requests_per_cpu_second": round(median),
        "lowest": round(speeds[0]),
        "highest": round(speeds[-1]),
        "dynamo": REFERENCES.get(case.name),
        "simulated_per_cpu_second": round(first.simulated_seconds / cpu_seconds),
        "hit_rate": first.hit_rate,
        "digest": first.digest,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.sim.speed", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of all cases in turn (default: 5)")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="of a run, at most (default: all)")
    parser.add_argument("--cases", default="", metavar="NAMES", help="all by default")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is the standard output")
    given = parser.parse_args(arguments)
    made = cases(given.requests)
    if given.cases:
        made = [case for case in made if case.name in given.cases.split(",")]
    rows = measure(made, max(1, given.rounds))
    figures = {"machine": facts(Path(), ("msgspec", "numpy")), "cases": rows}
    if given.json:
        text = json.dumps(figures, indent=1)
        if given.json == "-":
            print(text)
        else:
            Path(given.json).write_text(text + "\n", encoding="utf-8")
    if given.json != "-":
        for row in rows:
            spread = f"{row['lowest']:,} to {row['highest']:,}"
            print(f"{row['case']:16} {row['requests_per_cpu_second']:>8,} requests per CPU second ({spread})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
