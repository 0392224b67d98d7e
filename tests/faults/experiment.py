"""Experiment: injects one fault into one component while requests are in every phase, and gives one cell for each phase."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fleet.core.roles import KvPath, Placement
from loadtests.router.soak.clients import ReceivedAnswer, SoakClients
from loadtests.router.soak.requests import SoakRequest
from tests.faults.cluster import ROLES, FaultCluster
from tests.faults.injection import inject
from tests.faults.matrix import Cell, CellPhase, Component, MatrixFault
from tests.support.waiting import NotMet, pace, until, until_answered

PHASE_SECONDS = 60.0  # time limit for requests to reach their phases, for a busy machine
END_SECONDS = 90.0  # time limit for all requests to end
PROBE_SECONDS = 15.0  # time limit of one request that shows whether the cluster serves
RECOVERY_SECONDS = 90.0
LEAK_SECONDS = 30.0  # longer than every lease
MORE_FILES = 16
DECODES, TRANSFERS, PREFILLS, IDLE = 4, 2, 2, 2
LONG_ANSWER = 80  # number of tokens, each of which takes 60 ms


@dataclass(eq=False)
class _Ask:
    """One running request, with its phase at the moment of the fault."""

    request: SoakRequest
    clients: SoakClients
    answer: ReceivedAnswer = field(default_factory=ReceivedAnswer)
    phase: CellPhase | None = None
    task: "asyncio.Task[None] | None" = None
    pause_seconds: float = 0.0  # longest time without a token since the fault


class Experiment:
    """All requests of one experiment."""

    def __init__(self, cluster: FaultCluster, component: Component, fault: MatrixFault):
        self._cluster, self._component, self._fault = cluster, component, fault
        self._asked: list[_Ask] = []
        self._files = cluster.files()

    async def run(self) -> list[Cell]:
        """Run the experiment, restore the cluster, and return a cell for each phase."""
        cluster = self._cluster
        decodes = [self._ask(64, LONG_ANSWER, placement=Placement.AGGREGATED) for _ in range(DECODES)]
        await self._until_tokens(decodes, 2)
        on = {each: await self._worker_of(each) for each in decodes}
        victim, drainee = self._victims(list(on.values()))
        cluster.workers[drainee].ask_to_end()
        await self._until_draining(drainee)
        transfers = [
            self._ask(160, 12, placement=Placement.DISAGGREGATED, kv_path=path)
            for path in (KvPath.STORE, KvPath.DIRECT)
        ]
        await self._until_tokens(transfers[:1], 1)
        await self._until_prefill_workers(busy=False)
        prefills = [self._ask(500, 12) for _ in range(PREFILLS)]
        await self._until_prefill_workers(busy=True)
        await pace(0.1, "the prompts reach their workers, and take a second there")
        for each in prefills:
            each.phase = _phase_of(each, CellPhase.PREFILL, most_tokens=0)
        for each in transfers:
            each.phase = _phase_of(each, CellPhase.TRANSFER, most_tokens=1)
        for each in decodes:
            each.phase = _phase_of(each, CellPhase.DRAIN if on[each] == drainee else CellPhase.DECODE)
        began = time.monotonic()
        end = await inject(cluster, self._component, self._fault, self._targets(victim, drainee))
        probing = asyncio.ensure_future(self._recovery(began))
        watching = asyncio.ensure_future(self._watch_pauses())
        await pace(0.2, "the next requests come a little later than the fault")
        for number in range(IDLE):
            self._ask(64 if number else 200, 8, over_http=number > 0).phase = CellPhase.IDLE
        ended = await self._all_ended()
        await watching
        await end()
        await cluster.until_drained(drainee)
        seconds = await probing
        await cluster.restore()
        leaks = await self._leaks()
        for each in self._asked:
            await each.clients.close()
        return [self._cell(phase, seconds, leaks, ended) for phase in CellPhase]

    def _ask(self, tokens: int, answer: int, *, over_http: bool = False, **options: object) -> _Ask:
        number = len(self._asked)
        name = f"{self._component}-{self._fault}-{number}-{time.monotonic_ns()}"
        request = self._cluster.request(tokens, answer, over_http=over_http, request_id=name, **options)
        asked = _Ask(request, self._cluster.clients())
        asked.task = asyncio.ensure_future(asked.clients.ask(request, asked.answer))
        self._asked.append(asked)
        return asked

    async def _until_tokens(self, asked: Sequence[_Ask], tokens: int) -> None:
        """Wait until each of these answers has at least `tokens` tokens."""

        def failure() -> str:
            told = [(len(each.answer.tokens), each.clients.tally.errors, each.clients.tally.broken) for each in asked]
            return f"answers have not {tokens} tokens yet: {told}"

        await until(lambda: all(len(each.answer.tokens) >= tokens for each in asked), PHASE_SECONDS, failure)

    async def _until_prefill_workers(self, *, busy: bool) -> None:
        """Wait until a prefill worker has a request (`busy`), or none has. A prompt whose blocks are being transferred does not count."""

        async def are_there() -> bool:
            return await self._cluster.prefilling() == busy

        await until_answered(are_there, PHASE_SECONDS, lambda: f"the prefill workers are {'not ' if busy else ''}busy")

    async def _until_draining(self, name: str) -> None:
        async def drains() -> bool:
            return name not in await self._cluster.serving()

        await until_answered(drains, PHASE_SECONDS, lambda: f"{name} does not drain")

    async def _worker_of(self, asked: _Ask) -> str:
        (placed,) = await self._cluster.operator.explain(str(asked.request.options["request_id"]))
        return placed.decode

    def _victims(self, on: Sequence[str]) -> tuple[str, str]:
        """Return two decode workers that generate answers; the first one gets the fault, the other one drains."""
        busy = sorted(set(on), key=lambda name: (-on.count(name), name))
        assert len(busy) > 1, f"all answers are generated on {busy}"
        return busy[0], busy[1]

    def _targets(self, victim: str, drainee: str) -> list[str]:
        match self._component:
            case Component.DECODE:
                return [victim, drainee]
            case Component.PREFILL:
                return ["p0"]
            case _:
                return list(ROLES)

    async def _recovery(self, began: float) -> float:
        """Return the seconds from `began` until a new request is answered; `RECOVERY_SECONDS` if none is."""
        while time.monotonic() - began < RECOVERY_SECONDS:
            clients = self._cluster.clients()
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await clients.ask(self._cluster.request(64, 2))
                if clients.tally.completed and not clients.tally.broken:
                    return time.monotonic() - began
            except TimeoutError:
                pass
            finally:
                await clients.close()
            await pace(0.1, "the next probe follows after this time")
        return RECOVERY_SECONDS

    async def _watch_pauses(self) -> None:
        """Note for each answer the longest time without a new token, until all answers have ended."""
        latest: dict[_Ask, tuple[int, float]] = {}
        while not latest or any(each.task is not None and not each.task.done() for each in latest):
            now = time.monotonic()
            for each in self._asked:
                pieces, since = latest.setdefault(each, (each.answer.pieces, now))
                is_over = each.task is None or each.task.done()
                each.pause_seconds = max(
                    each.pause_seconds, 0.0 if is_over and pieces == each.answer.pieces else now - since
                )
                if pieces != each.answer.pieces:
                    latest[each] = (each.answer.pieces, now)
            await pace(0.02, "the resolution of the longest pause")

    async def _all_ended(self) -> bool:
        tasks = [each.task for each in self._asked if each.task is not None]
        _, pending = await asyncio.wait(tasks, timeout=END_SECONDS)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return not pending

    async def _leaks(self) -> list[str]:
        left: list[str] = []

        async def nothing_left() -> bool:
            nonlocal left
            left = [*await self._cluster.held(), *self._more_files()]
            return not left

        with suppress(NotMet):  # the caller reports what is left
            await until_answered(nothing_left, LEAK_SECONDS)
        return left

    def _more_files(self) -> list[str]:
        more = self._cluster.files() - self._files
        return [f"the router has {more} open files more than before"] if more > MORE_FILES else []

    def _cell(self, phase: CellPhase, seconds: float, leaks: list[str], ended: bool) -> Cell:
        asked = [each for each in self._asked if each.phase is phase]
        tallies = [each.clients.tally for each in asked]
        cell = Cell(
            component=self._component.value,
            fault=self._fault.value,
            phase=phase.value,
            requests=len(asked),
            lost=sum(tally.lost for tally in tallies),
            repeated=sum(tally.repeated for tally in tallies),
            wrong=sum(_wrong(each) for each in asked),
            failed=sum(sum(tally.errors.values()) for tally in tallies) + sum(map(self._broke_with_router, asked)),
            leaked=len(leaks),
            seconds=round(max((each.pause_seconds for each in asked), default=0.0), 2),
            served_seconds=round(seconds, 2),
        )
        cell.broken += leaks
        cell.broken += [] if ended else ["an answer did not end"]
        cell.broken += [] if asked else ["no request was in this phase"]
        cell.broken += [
            f"{tokens} tokens {what}" for what in ("lost", "repeated", "wrong") if (tokens := getattr(cell, what))
        ]
        cell.broken += [
            text for each in asked if not self._broke_with_router(each) for text in each.clients.tally.broken
        ]
        if cell.failed and self._component is not Component.ROUTER:
            cell.broken.append(f"{cell.failed} answers ended with an error")
        if seconds >= RECOVERY_SECONDS:
            cell.broken.append("no request was answered any more")
        return cell

    def _broke_with_router(self, asked: _Ask) -> bool:
        """Return whether an HTTP answer ended, with correct tokens, because its router was lost. gRPC answers continue later."""
        if not asked.request.over_http:
            return False
        tally = asked.clients.tally
        exact = not (tally.lost or tally.repeated or _wrong(asked))
        return self._component is Component.ROUTER and bool(tally.broken) and exact


def _phase_of(asked: _Ask, phase: CellPhase, most_tokens: int = LONG_ANSWER) -> CellPhase | None:
    """Return `phase` if the request still runs and has at most `most_tokens` tokens; otherwise None."""
    is_there = asked.task is not None and not asked.task.done() and len(asked.answer.tokens) <= most_tokens
    return phase if is_there else None


def _wrong(asked: _Ask) -> int:
    """Count the received tokens that differ from the expected token at the same position."""
    return sum(got != want for got, want in zip(asked.answer.tokens, asked.request.expected, strict=False))
