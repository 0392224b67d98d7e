"""Runner of the conformance suite: learns the endpoints of the pool, and runs each case with its time limit."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum

import grpc
from msgspec import Struct

from tests.kube.picker.cases import EMPTY_CASES, READY_CASES, Case
from tests.kube.picker.client import NotApplicable, PickerOptions, PickerUnderTest, Violation

LEARNING = 16
"""Requests by which the suite learns the endpoints of the pool."""


class CaseOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class CaseResult(Struct, frozen=True, kw_only=True):
    """The result of one case."""

    name: str
    claim: str
    outcome: CaseOutcome
    detail: str
    seconds: float


class ConformanceReport(Struct, frozen=True, kw_only=True):
    """The results of all cases for one picker."""

    address: str
    endpoints: tuple[str, ...]
    cases: tuple[CaseResult, ...]
    passed: int
    failed: int
    skipped: int


async def run_suite(
    address: str,
    options: PickerOptions,
    *,
    endpoints: Iterable[str] = (),
    empty: bool = False,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
) -> ConformanceReport:
    """Run all cases against the picker at an address.

    Args:
        address: ``host:port``.
        options: The options for requests.
        endpoints: Endpoints of the pool that are already known.
        empty: True if the pool has no ready endpoint; then only the cases of that state run.
        credentials: The credentials for TLS; None: the connection has no TLS.
        server_name: The name in the picker's certificate; empty: the host of the address.
    """
    arguments = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    channel = (
        grpc.aio.insecure_channel(address, options=arguments)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=arguments)
    )
    async with channel:
        picker = PickerUnderTest(channel, options, endpoints)
        if not empty:
            await _learn(picker)
        results = [await _result(case, picker) for case in (EMPTY_CASES if empty else READY_CASES)]
    return ConformanceReport(
        address=address,
        endpoints=tuple(picker.endpoints),
        cases=tuple(results),
        passed=_count(results, CaseOutcome.PASSED),
        failed=_count(results, CaseOutcome.FAILED),
        skipped=_count(results, CaseOutcome.SKIPPED),
    )


async def _learn(picker: PickerUnderTest) -> None:
    """Add the endpoints that the picker names for requests that run at the same time."""
    exchanges = [picker.exchange() for _ in range(LEARNING)]
    try:
        async with asyncio.timeout(picker.options.seconds):
            for number, exchange in enumerate(exchanges):
                await exchange.head()
                await exchange.pieces(picker.body(f"request {number} learns the endpoints"))
                for each in (await exchange.decision()).endpoints:
                    if each not in picker.endpoints:
                        picker.endpoints.append(each)
    except (TimeoutError, Violation, grpc.aio.AioRpcError):
        pass  # the cases say what is wrong
    finally:
        for exchange in exchanges:
            exchange.cancel()


async def _result(case: Case, picker: PickerUnderTest) -> CaseResult:
    began = time.perf_counter()
    outcome, detail = CaseOutcome.PASSED, ""
    try:
        async with asyncio.timeout(picker.options.seconds):
            await case(picker)
    except* NotApplicable as group:
        outcome, detail = CaseOutcome.SKIPPED, str(group.exceptions[0])
    except* Violation as group:
        outcome, detail = CaseOutcome.FAILED, str(group.exceptions[0])
    except* grpc.aio.AioRpcError as group:
        outcome, detail = CaseOutcome.FAILED, f"the call failed: {_status(group.exceptions)}"
    except* TimeoutError:
        outcome, detail = CaseOutcome.FAILED, f"no decision within {picker.options.seconds:g} s"
    seconds = time.perf_counter() - began
    claim = " ".join((case.__doc__ or "").split())
    return CaseResult(name=case.__name__, claim=claim, outcome=outcome, detail=detail, seconds=round(seconds, 3))


def _status(errors: Sequence[BaseException]) -> str:
    error = errors[0]
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


def _count(results: Sequence[CaseResult], outcome: CaseOutcome) -> int:
    return sum(each.outcome is outcome for each in results)
