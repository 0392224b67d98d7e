"""Comparison of routers in one scenario: starts mock workers and all routers, and measures the routers in turn, round by round."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from loadtests.environments import SystemUnavailable
from loadtests.router.figures import BenchmarkRow, MeasuredRound, missing, row
from loadtests.router.load.client import Next, round_of
from loadtests.router.load.prompts import Conversations, NewPrompts, Vocabulary
from loadtests.router.mock_workers import workers
from loadtests.router.scenarios import RouterScenario
from loadtests.router.systems.processes import ask, running_on, started_module
from loadtests.router.systems.targets import DIRECT, BenchmarkSetting, RouterTarget, RunningRouter

WARM_UP = 0  # number of the round that does not count


class Counted(Struct, frozen=True, kw_only=True):
    """Counters of a worker since its last reset, and its CPU time since its start."""

    requests: int
    tokens: int
    blocks: int
    hits: int
    process_cpu_seconds: float


def contest(
    scenario: RouterScenario,
    contestants: Sequence[RouterTarget],
    rounds: int,
    setting: BenchmarkSetting,
    vocabulary: Vocabulary,
    seed: int,
) -> list[BenchmarkRow]:
    """Measure all targets, and return a row for each. If a target cannot take part, or fails, its row has no figures but the reason.

    Args:
        scenario: The requests.
        contestants: The targets; in the first one, the client sends its requests directly to the workers.
        rounds: Rounds that count, after a warm-up round.
        setting: Folders, cores and certificate for the routers; its workers are ignored, because this function starts the workers.
        vocabulary: Words of the prompts.
        seed: Seed of the prompts, the same for all targets.
    """
    absent: dict[str, str] = {}
    figures: dict[str, list[MeasuredRound]] = {target.name: [] for target in contestants}
    with ExitStack() as stack:
        stack.enter_context(running_on(setting.cores.others))
        behaviour = workers.MockWorkerSettings(
            workers=scenario.workers,
            tokens=scenario.answer_tokens,
            gap_seconds=scenario.gap_seconds,
            cache_blocks=scenario.cache_blocks,
            prefill_seconds_a_block=scenario.prefill_seconds_a_block,
        )
        arguments = [msgspec.json.encode(behaviour).decode()]
        _, ready = stack.enter_context(
            started_module(workers.__name__, arguments, setting.folder, setting.cores.others)
        )
        here = msgspec.structs.replace(
            setting,
            workers=tuple(ready["ports"]),
            cache_blocks=scenario.cache_blocks,
            gap_seconds=scenario.gap_seconds,
        )
        running: dict[str, RunningRouter] = {}
        for target in contestants:
            try:
                running[target.name] = stack.enter_context(target.running(here))
            except SystemUnavailable as reason:
                absent[target.name] = str(reason)
        source = _source(scenario, vocabulary, seed)
        for number in range(rounds + 1):
            for name, router in running.items():
                if name in absent:
                    continue
                try:
                    measured = _round(scenario, router, here.workers, source(name, number))
                except SystemUnavailable as reason:
                    absent[name] = str(reason)
                    continue
                if number != WARM_UP:
                    figures[name].append(measured)
            print(f"{scenario.name}: round {number} of {rounds}", file=sys.stderr)
    direct = figures[DIRECT] if scenario.concurrency == 1 else None
    paced = figures[DIRECT] if scenario.gap_seconds else None
    return [
        missing(scenario.name, target.name, absent[target.name], target.version)
        if target.name in absent
        else row(scenario.name, target.name, figures[target.name], direct, target.version, paced=paced)
        for target in contestants
    ]


def _source(scenario: RouterScenario, vocabulary: Vocabulary, seed: int) -> Callable[[str, int], list[Next]]:
    """Return a function that takes a target's name and a round's number, and returns a request source for each connection."""
    if scenario.sharing is None:
        prompts: dict[str, NewPrompts] = {}

        def new_prompts(name: str, number: int) -> list[Next]:  # noqa: ARG001 - prompts continue from round to round
            if name not in prompts:
                prompts[name] = NewPrompts(scenario, vocabulary, seed)
            return _limited([prompts[name].next] * scenario.concurrency, scenario.requests)

        return new_prompts
    conversations = Conversations(scenario.sharing, vocabulary, seed)

    def users(name: str, number: int) -> list[Next]:  # noqa: ARG001 - all targets get the same prompts
        holding = [conversations.of(f"{user} in round {number}") for user in range(scenario.concurrency)]
        return _limited([each.__next__ for each in holding], scenario.requests)

    return users


def _limited(sources: Sequence[Callable[[], bytes]], requests: int) -> list[Next]:
    """Return sources that return None as soon as all of them together have returned `requests` requests."""
    left = iter(range(requests))

    def limited(source: Callable[[], bytes]) -> Next:
        return lambda: source() if next(left, None) is not None else None

    return [limited(source) for source in sources]


class _Meter:
    """Measures the CPU time of the router and the counters of the workers over a round."""

    def __init__(self, router: RunningRouter, workers_ports: Sequence[int]):
        self._server = router.server
        self._ports = workers_ports
        self._counted: list[Counted] = []
        self._cpu_seconds = 0.0
        self.router_cpu_seconds = 0.0
        self.by_worker: list[Counted] = []

    def start(self) -> None:
        for port in self._ports:
            ask(port, "/reset", b"")
        self._counted = self._counters()
        self._cpu_seconds = self._used()

    def stop(self) -> None:
        self.router_cpu_seconds = self._used() - self._cpu_seconds
        self.by_worker = [
            msgspec.structs.replace(after, process_cpu_seconds=after.process_cpu_seconds - before.process_cpu_seconds)
            for before, after in zip(self._counted, self._counters(), strict=True)
        ]

    def _used(self) -> float:
        if self._server is None:
            return 0.0
        if not self._server.alive:
            raise SystemUnavailable(f"{self._server.name} ended: {self._server.last_words()}")
        return self._server.cpu_seconds()

    def _counters(self) -> list[Counted]:
        return [msgspec.json.decode(ask(port, "/counters")[1], type=Counted) for port in self._ports]


def _round(
    scenario: RouterScenario, router: RunningRouter, ports: Sequence[int], following: Sequence[Next]
) -> MeasuredRound:
    meter = _Meter(router, ports)
    window = round_of(
        router.ports,
        following,
        scenario.seconds,
        meter,
        delayed_acknowledgements=scenario.delayed_acknowledgements,
        tls=router.tls,
    )
    server = router.server
    if window.failures:
        print(f"{server.name if server else DIRECT}: {window.failures} failures: {window.complaint}", file=sys.stderr)
    by_worker = [] if router.own_workers else meter.by_worker
    return MeasuredRound(
        requests=window.requests,
        failures=window.failures,
        tokens=window.requests * scenario.answer_tokens,
        seconds=window.seconds,
        router_cpu_seconds=None if server is None else meter.router_cpu_seconds,
        client_cpu_seconds=window.cpu_seconds,
        worker_cpu_seconds=by_worker[0].process_cpu_seconds if by_worker else None,  # all workers are in one process
        ttft_seconds=window.ttft_seconds,
        gap_seconds_p99=window.gap_seconds_p99,
        resident_bytes=None if server is None else server.resident_bytes(),
        served=tuple(each.requests for each in by_worker),
        computed=tuple(each.blocks - each.hits for each in by_worker),
        blocks=sum(each.blocks for each in by_worker),
        hits=sum(each.hits for each in by_worker),
    )


def write(rows: Sequence[BenchmarkRow], path: Path) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(rows), indent=1) + "\n")
