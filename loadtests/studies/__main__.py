"""Run a study: print its tables and check its findings.

Exit status: 0 all findings hold, 1 a finding does not hold, 2 misused, 3 a scenario cannot be run.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from fleet.core.errors import ConfigurationRefused
from loadtests.studies import distserve, lengths, mixes, policies, ratio, splitwise, tuning
from loadtests.studies.findings import StudyReport
from loadtests.studies.planners import comparison as compare_planners
from loadtests.studies.planners import tuning as tune_planners
from loadtests.studies.runs import Effort

FAILED, MISUSED, REFUSED = 1, 2, 3

STUDIES: dict[str, tuple[str, Callable[[Effort], StudyReport]]] = {
    "splitwise": ("six designs of equal power beside Splitwise's own simulator", splitwise.study),
    "distserve": ("DistServe's self-check: 1.56 requests a second and GPU", distserve.study),
    "lengths": ("one worker or two for a request, by length of prompt and answer", lengths.study),
    "policies": ("policies on recorded traffic, by load", policies.study),
    "edge": ("the same on recorded chat, at loads closer to each other", policies.edge),
    "wide": ("how even 64 workers are", policies.wide),
    "ratio": ("prefill workers to decode workers", ratio.study),
    "mixes": ("H100, B200, MI300X and mixes of them, by cost", mixes.study),
    "planner": (
        "rules that size pools: goals kept and GPU-hours, by start-up and delay of metrics",
        compare_planners.study,
    ),
    "planner-tuning": (
        "parameters for the study of planners, on other seeds and other parts of the traces",
        tune_planners.study,
    ),
    "tuning": ("parameters for the contest of policies, on the first half of the requests", tuning.study),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.studies", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", nargs="?", choices=STUDIES, metavar="NAME", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--json", metavar="FILE", help="write tables and findings there; - for standard output")
    parser.add_argument("--seeds", default="1", metavar="A:B", help="each with the seeds A to B (default: 1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at a time (default: 1)")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="of a run, at most; findings may then fail"
    )
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(f"{name:10} {about}" for name, (about, _) in STUDIES.items()))
        return 0
    if arguments.name is None:
        parser.print_usage(sys.stderr)
        return MISUSED
    first, _, last = arguments.seeds.partition(":")
    try:
        effort = Effort(
            seeds=tuple(range(int(first), int(last or first) + 1)),
            processes=arguments.processes,
            requests=arguments.requests,
        )
    except ValueError:
        print(f"--seeds: {arguments.seeds!r} is not A:B", file=sys.stderr)
        return MISUSED
    began = time.process_time()
    try:
        report = STUDIES[arguments.name][1](effort)
    except ConfigurationRefused as error:
        print(f"loadtests.studies: {error}", file=sys.stderr)
        return REFUSED
    if effort.processes == 1:  # otherwise, other processes have done the work
        report = structs.replace(report, cpu_seconds=round(time.process_time() - began, 1))
    _write(report, arguments.json)
    return 0 if report.holds else FAILED


def _write(report: StudyReport, file: str | None) -> None:
    content = msgspec.json.encode(report).decode() + "\n"
    if file == "-":
        print(end=content)
        return
    print("\n".join(report.lines()))
    if file is not None:
        Path(file).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
