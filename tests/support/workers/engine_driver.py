"""Drivers for engines: submit attempts, collect the outputs, and check the contract of the engine port."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import msgspec

from fleet.core.ids import RequestId
from fleet.core.requests import KvReport, Sampling, Source, TokenBytes
from fleet.core.roles import KvPath, Phase
from fleet.core.work import (
    NOTHING_PULLED,
    Handoff,
    KvCleared,
    KvRemoved,
    KvStored,
    LoadReport,
    Progress,
    Rejected,
    Start,
)
from tests.support.builders import token_bytes
from tests.support.waiting import until
from workers.ports import Engine

SECONDS = 60  # time limit of every wait for an engine
IDLE = LoadReport(running=0, waiting=0, kv_blocks_used=0)

_numbers = count()


def fresh_prompt(num_tokens: int) -> TokenBytes:
    """Return a new random prompt, which no engine has cached. Tests share engines, because engines start slowly."""
    chance = random.Random(next(_numbers))
    return token_bytes(chance.randrange(300, 4000) for _ in range(num_tokens))


def greedy(max_tokens: int, **fields) -> Sampling:
    return Sampling(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def an_attempt(tokens: TokenBytes, max_tokens: int = 8, *, phase: Phase = Phase.AGGREGATED, **fields) -> Start:
    """Build an attempt with an id of its own."""
    return Start(
        **{
            "request_id": RequestId(f"work-{next(_numbers)}"),
            "phase": phase,
            "tokens": tokens,
            "sampling": greedy(max_tokens),
            **fields,
        }
    )


class EngineDriver:
    """Submits attempts to an engine, and collects its outputs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[RequestId, tuple[int, ...]] = {}
        self.ends: dict[RequestId, Progress | Rejected] = {}
        self.logprobs: dict[RequestId, list] = {}
        self.progress: dict[RequestId, list[Progress]] = {}
        self.told: dict[RequestId, list[KvReport]] = {}
        self.cached: set[bytes] = set()
        self.steps = 0
        self._submitted: set[RequestId] = set()
        self._news = asyncio.Condition()

    def submit(self, *starts: Start) -> None:
        for start in starts:
            self._submitted.add(start.request_id)
            self.tokens[start.request_id] = ()
            self.logprobs[start.request_id] = []
            self.progress[start.request_id] = []
            self.told[start.request_id] = []
            self.engine.submit(start)

    async def end_of(self, start: Start) -> Progress | Rejected:
        await self.until(lambda: start.request_id in self.ends)
        return self.ends[start.request_id]

    async def do(self, start: Start) -> tuple[tuple[int, ...], Progress]:
        """Submit an attempt and wait for its end; return all tokens and the last progress."""
        self.submit(start)
        end = await self.end_of(start)
        assert isinstance(end, Progress), end
        return self.tokens[start.request_id], end

    async def until(self, condition) -> None:
        """Wait for a condition that only outputs or cache events can change."""
        async with asyncio.timeout(SECONDS), self._news:
            await self._news.wait_for(condition)

    async def idle(self) -> None:
        """Wait until no request runs and no block is in use. Handoff leases must have been returned: they end only after 30 s."""
        await until(lambda: msgspec.structs.replace(self.engine.load(), pulled=NOTHING_PULLED) == IDLE)

    async def read_outputs(self) -> None:
        async for outputs in self.engine.outputs():
            self.steps += 1
            named = [output.request_id for output in outputs]
            assert len(named) == len(set(named)), "a step has at most one progress per request"
            for output in outputs:
                self._hear(output)
            async with self._news:
                self._news.notify_all()

    async def read_cache(self) -> None:
        async for events in self.engine.kv_events():
            for event in events:
                match event:
                    case KvStored(hashes=hashes):
                        self.cached |= set(hashes)
                    case KvRemoved(hashes=hashes):
                        self.cached -= set(hashes)
                    case KvCleared():
                        self.cached.clear()
            async with self._news:
                self._news.notify_all()

    def _hear(self, output: Progress | Rejected) -> None:
        assert output.request_id in self._submitted, output
        assert output.request_id not in self.ends, f"{output.request_id} ended before this: {output}"
        if isinstance(output, Rejected):
            self.ends[output.request_id] = output
            return
        self.progress[output.request_id].append(output)
        self.tokens[output.request_id] += output.token_ids
        self.logprobs[output.request_id] += output.logprobs
        if output.kv is not None:
            self.told[output.request_id].append(output.kv)
        if output.finish is not None:
            self.ends[output.request_id] = output


@asynccontextmanager
async def driven_engines(*engines: Engine) -> AsyncIterator[list[EngineDriver]]:
    """Collect the output of these engines while the context is open."""
    drivers = [EngineDriver(engine) for engine in engines]
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        readers = [tasks.create_task(read()) for one in drivers for read in (one.read_outputs, one.read_cache)]
        stack.callback(lambda: [reader.cancel() for reader in readers])
        yield drivers


async def run_disaggregated(
    prefill: EngineDriver,
    decode: EngineDriver,
    tokens: TokenBytes,
    max_tokens: int,
    path: KvPath,
    *,
    between=lambda handoff: handoff,
    pass_first_token: bool = True,
    **fields,
) -> tuple[tuple[int, ...], Progress, Progress]:
    """Prefill on one engine and decode on the other, as a router does; return all tokens and the last progress of each engine.

    Args:
        between: Function that changes the handoff between the two engines.
        pass_first_token: True: the decode engine begins after the token that the prefill engine sampled.
    """
    first, prefilled = await prefill.do(an_attempt(tokens, max_tokens, phase=Phase.PREFILL, kv_path=path, **fields))
    assert prefilled.handoff is not None, prefilled
    handoff: Handoff = between(prefilled.handoff)
    if pass_first_token:
        tokens, max_tokens = tokens + token_bytes(first), max_tokens - 1
    rest, decoded = await decode.do(an_attempt(tokens, max_tokens, phase=Phase.DECODE, handoff=handoff, **fields))
    return (first + rest if pass_first_token else rest), prefilled, decoded


def reported_early_and_late(told: list[KvReport], early: KvReport, late: KvReport) -> bool:
    """Return whether the engine reported `early` with its first tokens and then `late`; `late` alone if all tokens came at once."""
    return told in ([early, late], [late])


def without_tiers(report: KvReport | None) -> KvReport:
    """Return the report that an engine sends with its first tokens, before it knows the store tiers of its blocks."""
    assert report is not None
    origins = [msgspec.structs.replace(origin, tier="") for origin in report.origins]
    return msgspec.structs.replace(report, origins=tuple(dict.fromkeys(origins)))


def blocks_from(report: KvReport | None, source: Source) -> int:
    assert report is not None
    return sum(origin.blocks for origin in report.origins if origin.source is source)


def bytes_from(report: KvReport | None, source: Source) -> int:
    assert report is not None
    return sum(origin.bytes for origin in report.origins if origin.source is source)
