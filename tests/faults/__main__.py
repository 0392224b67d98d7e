"""Run the fault matrix, print it as a table, and exit with 1 if a cell breaks a promise."""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleet.client import FleetError
from loadtests.environments import SystemUnavailable
from tests.faults.cluster import FaultCluster
from tests.faults.experiment import Experiment
from tests.faults.local_cluster import LocalExperiment
from tests.faults.matrix import Cell, CellPhase, Component, MatrixFault, why_impossible, why_impossible_phase

LOCAL = (Component.SUPERVISOR, Component.PLANNER)

TRIES = 2

Pair = tuple[Component, MatrixFault]


def pairs(only: Sequence[str]) -> list[Pair]:
    """Return the selected pairs of component and fault. `only` has entries such as ``decode`` or ``decode:kill``; empty: all pairs."""
    every = [(component, fault) for component in Component for fault in MatrixFault]
    if not only:
        return every
    return [pair for pair in every if pair[0].value in only or f"{pair[0]}:{pair[1]}" in only]


async def run_matrix(chosen: Sequence[Pair], seed: int = 1) -> list[Cell]:
    """Run the experiments of all possible pairs, print each result on standard error, and return all cells."""
    possible = [pair for pair in chosen if not why_impossible(*pair)]
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        here = [pair for pair in possible if pair[0] not in LOCAL]
        if here:
            redis = any(component is Component.REDIS for component, _ in here)
            async with FaultCluster(Path(folder), seed, redis=redis) as cluster:
                for component, fault in here:
                    cells += _told(await _tried(cluster, component, fault))
        for number, (component, fault) in enumerate(pair for pair in possible if pair[0] in LOCAL):
            own = Path(folder) / f"up-{number}"
            own.mkdir()
            cells += _told(await asyncio.to_thread(LocalExperiment(own, component, fault).run))
    return cells


async def _tried(cluster: FaultCluster, component: Component, fault: MatrixFault) -> list[Cell]:
    """Run an experiment, up to `TRIES` times: on a busy machine it may fail, or a phase may have no request when the fault comes.

    If every try fails, return cells that say so.
    """
    told = ""
    for _ in range(TRIES):
        try:
            cells = await Experiment(cluster, component, fault).run()
        except (TimeoutError, AssertionError, FleetError) as error:
            told = f"the experiment failed: {type(error).__name__}: {error}"
            await cluster.restore()
        else:
            if all(cell.requests for cell in cells):
                return cells
            told = "no request was in this phase"
    return [failed_cell(component, fault, phase, told) for phase in CellPhase]


def failed_cell(component: Component, fault: MatrixFault, phase: CellPhase, told: str) -> Cell:
    return Cell(
        component=component.value,
        fault=fault.value,
        phase=phase.value,
        requests=0,
        lost=0,
        repeated=0,
        wrong=0,
        failed=0,
        leaked=0,
        seconds=0.0,
        served_seconds=0.0,
        broken=[told],
    )


def _told(cells: list[Cell]) -> list[Cell]:
    for cell in cells:
        print(_line(cell), file=sys.stderr, flush=True)
    return cells


def _line(cell: Cell) -> str:
    numbers = (
        cell.requests, cell.lost, cell.repeated, cell.wrong, cell.failed, cell.leaked, cell.seconds, cell.served_seconds
    )  # fmt: skip
    row = f"{cell.component:10} {cell.fault:18} {cell.phase:9}" + "".join(f"{number:>9}" for number in numbers)
    return row + ("  " + "; ".join(cell.broken)[:300] if cell.broken else "")


HEAD = f"{'component':10} {'fault':18} {'phase':9}" + "".join(
    f"{title:>9}" for title in ("requests", "lost", "repeated", "wrong", "failed", "leaked", "seconds", "served")
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the cells there; - for standard output")
    parser.add_argument(
        "--only", action="append", default=[], metavar="COMPONENT[:FAULT]", help="run only these; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    chosen = pairs(arguments.only)
    if not chosen:
        parser.error(f"--only: {', '.join(arguments.only)} selects nothing")
    began = time.monotonic()
    try:
        cells = asyncio.run(run_matrix(chosen, arguments.seed))
    except SystemUnavailable as error:
        print(f"the matrix cannot run: {error}", file=sys.stderr)
        return 1
    impossible = [(*pair, "every", reason) for pair in chosen if (reason := why_impossible(*pair))]
    impossible += [
        (*pair, phase.value, reason)
        for pair in chosen
        for phase in CellPhase
        if not why_impossible(*pair) and (reason := why_impossible_phase(pair[0], phase))
    ]
    broken = [cell for cell in cells if cell.broken]
    result = {
        "cells": cells,
        "impossible": [
            {"component": each, "fault": fault, "phase": phase, "reason": why} for each, fault, phase, why in impossible
        ],
        "broken": len(broken),
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.json == "-":
        print(msgspec.json.encode(result).decode())
    else:
        if arguments.json:
            Path(arguments.json).write_bytes(msgspec.json.encode(result))
        print(HEAD)
        for cell in cells:
            print(_line(cell))
        for component, fault, phase, reason in impossible:
            print(f"{component:10} {fault:18} {phase:9} impossible: {reason}")
        print(f"{len(cells)} cells, {len(impossible)} impossible combinations, {len(broken)} cells broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
