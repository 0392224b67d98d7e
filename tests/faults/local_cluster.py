"""Experiments with a cluster of `fleet up`: faults of the supervisor and of the planner, through which no request passes.

The expected answers are those of the cluster before the fault. When the supervisor is killed, all its processes have to end, because
without a supervisor they would hold ports and memory for ever. Running answers end with an error, and a new `fleet up` serves.
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fleet.client import AsyncClient, FleetError
from loadtests.router.soak.answers import difference
from tests.faults.matrix import Cell, CellPhase, Component, MatrixFault
from tests.support.fleet_processes import LocalClusterProcess, alive, fleet_up
from tests.support.servers.processes import a_free_port
from tests.support.waiting import NotMet, eventually, pace, until

TOPOLOGY = """
[[pools]]
role = "prefill"
[[pools]]
role = "decode"
replicas = 2
[pools.simulated.latency]
step_base_ms = 40.0
prefill_ms_per_token = 1.0

[planner]
mode = "active"
goals = {ttft_seconds = 10.0, tpot_seconds = 1.0}
[planner.pools.decode]
least = 2
most = 2
[planner.pools.prefill]
least = 1
most = 1
"""
STOPPED_SECONDS = 6.0
END_SECONDS = 60.0
PHASES = (CellPhase.IDLE, CellPhase.PREFILL, CellPhase.DECODE)
REQUESTS = 2
SIZES = {CellPhase.IDLE: (64, 8), CellPhase.PREFILL: (900, 8), CellPhase.DECODE: (64, 60)}


class LocalExperiment:
    """Injects one fault into the supervisor or the planner of a new cluster."""

    def __init__(self, folder: Path, component: Component, fault: MatrixFault):
        self._folder, self._component, self._fault = folder, component, fault
        self._received: dict[tuple[CellPhase, int], list[int]] = {}
        self._expected: dict[tuple[CellPhase, int], list[int]] = {}
        self._failed: set[tuple[CellPhase, int]] = set()
        self._seconds = 0.0

    def run(self) -> list[Cell]:
        """Run the experiment with a new cluster, end the cluster, and return the cells."""
        topology = self._folder / "topology.toml"
        topology.write_text(TOPOLOGY)
        ports = ("--http-port", str(a_free_port()), "--grpc-port", str(a_free_port()))
        with fleet_up(self._folder, "--config", str(topology), ports=ports) as up:
            asyncio.run(self._serve(up))
            if self._component is Component.SUPERVISOR and self._fault is MatrixFault.KILL:
                leaks = [f"process {pid} lives on" for pid in self._orphans]
            else:
                eventually(lambda: up.pid_of("planner"), END_SECONDS)
                leaks = (
                    [] if len(up.pids()) >= len(self._before) else ["the supervisor has fewer processes than before"]
                )
        if self._component is Component.SUPERVISOR and self._fault is MatrixFault.KILL:
            began = time.monotonic()
            (self._folder / "ready.json").unlink()
            with fleet_up(self._folder, "--config", str(topology), ports=ports) as up:
                asyncio.run(self._probe(up))
            self._seconds = time.monotonic() - began
        return [self._cell(phase, leaks) for phase in PHASES]

    async def _serve(self, up: LocalClusterProcess) -> None:
        self._before = up.pids()
        async with AsyncClient(up.grpc) as client:
            for phase in PHASES:
                for number in range(REQUESTS):
                    self._expected[phase, number] = list(
                        (
                            await client.complete(
                                self._prompt(phase, number), max_tokens=SIZES[phase][1], ignore_eos=True
                            )
                        ).token_ids
                    )
            answers = [asyncio.ensure_future(self._ask(client, CellPhase.DECODE, number)) for number in range(REQUESTS)]
            await until(
                lambda: all(len(self._received.get((CellPhase.DECODE, number), ())) > 1 for number in range(REQUESTS)),
                END_SECONDS,
                lambda: "no answer has begun",
            )
            answers += [
                asyncio.ensure_future(self._ask(client, CellPhase.PREFILL, number)) for number in range(REQUESTS)
            ]
            await pace(0.1, "the prompts reach their workers, and take a second there")
            began = time.monotonic()
            pid = up.process.pid if self._component is Component.SUPERVISOR else up.pid_of("planner")
            os.kill(pid, signal.SIGKILL if self._fault is MatrixFault.KILL else signal.SIGSTOP)
            await pace(0.2, "the next requests come a little later than the fault")
            answers += [asyncio.ensure_future(self._ask(client, CellPhase.IDLE, number)) for number in range(REQUESTS)]
            await asyncio.wait_for(asyncio.gather(*answers), END_SECONDS)
            self._seconds = time.monotonic() - began if self._failed else self._idle_seconds
            if self._component is Component.SUPERVISOR:
                await self._end_fault(up, began)

    async def _end_fault(self, up: LocalClusterProcess, began: float) -> None:
        if self._fault is MatrixFault.KILL:
            up.process.wait(END_SECONDS)
            with suppress(NotMet):  # processes that are left are reported as leaks
                await until(lambda: not alive(self._before), END_SECONDS)
            self._orphans = alive(self._before)
            for pid in self._orphans:
                psutil.Process(pid).kill()
            return
        await pace(max(0.0, STOPPED_SECONDS - (time.monotonic() - began)), "the supervisor is stopped for so long")
        os.kill(up.process.pid, signal.SIGCONT)

    def _prompt(self, phase: CellPhase, number: int) -> list[int]:
        tokens = SIZES[phase][0]
        first = 100 + 1000 * PHASES.index(phase) + 300 * number
        return [64 + (first + 7 * index) % 3900 for index in range(tokens)]

    async def _ask(self, client: AsyncClient, phase: CellPhase, number: int) -> None:
        received = self._received[phase, number] = []
        began = time.monotonic()
        stream = client.generate(self._prompt(phase, number), max_tokens=SIZES[phase][1], ignore_eos=True)
        try:
            async with stream:
                async for delta in stream:
                    received.extend(delta.token_ids)
        except FleetError:
            self._failed.add((phase, number))
        if phase is CellPhase.IDLE:
            self._idle_seconds = time.monotonic() - began

    async def _probe(self, up: LocalClusterProcess) -> None:
        async with AsyncClient(up.grpc) as client:
            await client.complete(self._prompt(CellPhase.IDLE, 0), max_tokens=2, ignore_eos=True)

    def _cell(self, phase: CellPhase, leaks: list[str]) -> Cell:
        keys = [(phase, number) for number in range(REQUESTS)]
        found = [difference(self._expected[key], self._received[key], whole=key not in self._failed) for key in keys]
        wrong = sum(
            got != want for key in keys for got, want in zip(self._received[key], self._expected[key], strict=False)
        )
        cell = Cell(
            component=self._component.value,
            fault=self._fault.value,
            phase=phase.value,
            requests=len(keys),
            lost=sum(each.lost for each in found),
            repeated=sum(each.repeated for each in found),
            wrong=wrong,
            failed=sum(key in self._failed for key in keys),
            leaked=len(leaks),
            seconds=round(self._seconds, 2),
            served_seconds=round(self._seconds, 2),
        )
        ends_with_it = self._component is Component.SUPERVISOR and self._fault is MatrixFault.KILL
        cell.broken += leaks
        cell.broken += [
            f"{count} tokens {what}" for what in ("lost", "repeated", "wrong") if (count := getattr(cell, what))
        ]
        if cell.failed and not ends_with_it:
            cell.broken.append(f"{cell.failed} answers ended with an error")
        return cell
