"""Prometheus demand source: reads the demand of routers from a Prometheus server, by its HTTP API.

Rules:

1. The source queries in rounds, with a pause of `every_seconds` after each round. A round queries the age of the routers'
   samples, and then the samples. It fails if not all answers have arrived within `deadline_seconds`.
2. A router process counts if its last sample is not older than `stale_seconds` by the server's own clock. This check is
   necessary: if Prometheus cannot scrape a target any more, it still returns the last sample for five minutes.
3. If fewer than `routers` processes count, or if a series is missing or has an impossible value, the whole round is
   dropped. When all rounds have been dropped for `stale_seconds`, the planner stops changing replicas, and a condition
   names the server and the cause.
4. Router processes may start and end. The demand that a process has reported before its end still counts.
"""

import asyncio
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Never

import aiohttp
import msgspec
from msgspec import Meta, Struct

from fleet.core.clock import Clock, Nanos
from fleet.core.demand_reports import DemandReport
from fleet.core.errors import ConfigurationRefused
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.settings import PrometheusDemandSettings
from fleet.planner.sources.samples import (
    UPTIME,
    WORKERS,
    MetricSample,
    ProcessKey,
    demand_reports,
    process_name,
    process_of,
)
from fleet.planner.sources.supervision import read_for_ever
from fleet.planner.sources.wire import BadDemandReport

MOST_BYTES = 64 << 20
SERIES = f"fleet_demand_.+|fleet_worker_({'|'.join(WORKERS)})"


class InstantValue(Struct, frozen=True, kw_only=True):
    """Holds one series in an answer of Prometheus: its labels and one value."""

    metric: dict[str, str]
    value: tuple[float, str]
    """Time at which the query was evaluated, in seconds since 1970, and the value."""


class InstantVector(Struct, frozen=True, kw_only=True):
    """Holds the field `data` of an answer of Prometheus: several series with one value each."""

    result_type: str = msgspec.field(name="resultType")
    result: tuple[InstantValue, ...]


class QueryAnswer(Struct, frozen=True, kw_only=True):
    """Holds the answer of Prometheus to ``/api/v1/query``."""

    status: Annotated[str, Meta(min_length=1)]
    data: InstantVector | None = None
    error: str = ""


class PrometheusDemandSource:
    """Reads the demand from a Prometheus server. Implements `fleet.planner.sources.ports.DemandSource`."""

    def __init__(self, settings: PrometheusDemandSettings, aggregator: DemandAggregator, clock: Clock) -> None:
        """Prepare the source; queries are sent only by `run`.

        Raises:
            ConfigurationRefused: The token file or the file of certificates cannot be used.
        """
        self._settings = settings
        self._aggregator = aggregator
        self._clock = clock
        self._tls: ssl.SSLContext | bool = True
        if settings.authority:
            try:
                self._tls = ssl.create_default_context(cafile=settings.authority)
            except OSError as error:
                raise ConfigurationRefused(f"source.authority: {settings.authority}: {error}") from error
        self._headers()

    def window(self) -> DemandWindow:
        return self._aggregator.window(self._clock.now())

    def sample(self) -> tuple[RecentRequest, ...]:
        return ()

    async def run(self) -> Never:
        settings = self._settings
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            await read_for_ever(settings.url, partial(self._read, session), self._aggregator, settings.every_seconds)

    async def _read(self, session: aiohttp.ClientSession) -> str:
        """Carry out one round of queries. Return why it failed, or an empty string."""
        try:
            async with asyncio.timeout(self._settings.deadline_seconds):
                await self._round(session)
        except TimeoutError:
            return f"no answer within {self._settings.deadline_seconds:g} s"
        except (aiohttp.ClientError, OSError, BadDemandReport, ConfigurationRefused) as error:
            return str(error) or type(error).__name__
        return ""

    async def _round(self, session: aiohttp.ClientSession) -> None:
        """Query the samples of all router processes once, and add them to the demand.

        Raises:
            BadDemandReport: The server answers with an error, or its answer is too long or cannot be read. Or too few
                processes have recent samples, or a series is missing or has an impossible value.
            aiohttp.ClientError: The server cannot be reached.
            ConfigurationRefused: The token file cannot be read, or does not contain one token.
        """
        ages = _ages(await self._ask(session, f"timestamp({self._selector(UPTIME)})"))
        fresh = {key for key, age in ages.items() if age <= self._settings.stale_seconds}
        if len(fresh) < self._settings.routers:
            raise BadDemandReport(self._too_few(ages, len(fresh)))
        answer = await self._ask(session, self._selector(SERIES))
        now = self._clock.now()
        # in a thread, because an answer may have hundreds of thousands of series, and leader election runs in this event loop
        for report in await asyncio.to_thread(_reports, answer, fresh, now):
            self._aggregator.hear(self._settings.url, report, now)

    def _too_few(self, ages: Mapping[ProcessKey, float], fresh: int) -> str:
        old = [
            f"{process_name(key)} for {age:.0f} s"
            for key, age in sorted(ages.items())
            if age > self._settings.stale_seconds
        ]
        silent = f"; not scraped: {', '.join(old)}" if old else ""
        return (
            f"{UPTIME}: {fresh} router processes have samples, and source.routers says {self._settings.routers}{silent}"
        )

    def _selector(self, names: str) -> str:
        labels = {name: f"={_quoted(value)}" for name, value in self._settings.labels.items()}
        matchers = {"__name__": f"=~{_quoted(names)}"} | labels
        return "{" + ",".join(f"{name}{match}" for name, match in matchers.items()) + "}"

    async def _ask(self, session: aiohttp.ClientSession, query: str) -> tuple[InstantValue, ...]:
        url = f"{self._settings.url.rstrip('/')}/api/v1/query"
        content = bytearray()
        async with session.post(
            url, data={"query": query}, headers=self._headers(), ssl=self._tls, allow_redirects=False
        ) as answer:
            async for part in answer.content.iter_any():
                content += part
                if len(content) > MOST_BYTES:
                    raise BadDemandReport(f"the answer is longer than {MOST_BYTES} bytes")
            status = answer.status
        try:
            decoded = msgspec.json.decode(content, type=QueryAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadDemandReport(f"status {status}, and no answer of the HTTP API of Prometheus: {error}") from error
        if decoded.status != "success" or decoded.data is None:
            raise BadDemandReport(f"status {status}: {decoded.error or 'the query failed'}")
        if decoded.data.result_type != "vector":
            raise BadDemandReport(f"the answer is a {decoded.data.result_type}, not a vector")
        return decoded.data.result

    def _headers(self) -> dict[str, str]:
        if not self._settings.token_file:
            return {}
        try:
            token = Path(self._settings.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationRefused(f"source.token_file: {self._settings.token_file}: {error}") from error
        if not token or not token.isprintable() or " " in token:
            raise ConfigurationRefused(
                f"source.token_file: {self._settings.token_file}: it must hold one token and nothing else"
            )
        return {"authorization": f"Bearer {token}"}


def _reports(answer: tuple[InstantValue, ...], fresh: set[ProcessKey], now: Nanos) -> tuple[DemandReport, ...]:
    """Return the demand reports of those router processes that are in `fresh`; raise BadDemandReport if a value is impossible."""
    samples = [
        MetricSample(each.metric.get("__name__", ""), each.metric, _number(each))
        for each in answer
        if process_of(each.metric) in fresh
    ]
    return tuple(demand_reports(samples, now).values())


def _ages(answer: tuple[InstantValue, ...]) -> dict[ProcessKey, float]:
    """Return the age in seconds of the last sample of each router process, by the clock of the Prometheus server."""
    found: dict[ProcessKey, float] = {}
    for each in answer:
        key, age = process_of(each.metric), each.value[0] - _number(each)
        found[key] = min(age, found.get(key, age))
    return found


def _number(each: InstantValue) -> float:
    try:
        return float(each.value[1])
    except ValueError:
        raise BadDemandReport(
            f"{each.metric.get('__name__', 'a series')}: {each.value[1][:40]!r} is no number"
        ) from None


def _quoted(text: str) -> str:
    """Return a text as a string literal of PromQL.

    The text is encoded as JSON, because PromQL accepts the escapes of JSON.
    """
    return msgspec.json.encode(text).decode()
