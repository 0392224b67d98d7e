"""Tests of the demand source that reads metrics: if a router's page is invalid, cut off or endless, only its demand is missing."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.frontend.metrics.merged import merge_metrics
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.messages import PoolName
from fleet.planner.settings import MetricsDemandSettings
from fleet.planner.sources import metrics
from fleet.planner.sources.metrics import MetricsDemandSource, parse_page
from fleet.planner.sources.samples import REQUIRED
from fleet.planner.sources.wire import BadDemandReport
from tests.support.waiting import until

UPTIME = 'fleet_demand_uptime_seconds{source="r",incarnation="i"} 5.0\n'
COUNTED = [
    f'# TYPE fleet_demand_{name} counter\nfleet_demand_{name}_total{{model="m"}} {3.0 if name == "arrivals" else 0.0}\n'
    for name in REQUIRED
]
TYPE = "# TYPE fleet_demand_arrivals counter\n"
PAGE = UPTIME + "".join(COUNTED)


def answer(body, length=None):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length or len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@asynccontextmanager
async def a_page(*answers):
    """Serve the answers in turn, and then the last one again and again; yield the URL."""
    left = list(answers)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "Bad status line"),
        (answer(PAGE, 10_000), "payload is not completed"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "500"),
        (answer(PAGE.replace("model=", "kind=")), "has no label 'model'"),
    ],
)
async def test_broken_page_is_told_and_read_again(broken, cause):
    clock = SystemClock()
    async with a_page(broken, answer(PAGE)) as url:
        aggregator = DemandAggregator(ModelName("m"), [url], {PoolName("both"): Role.BOTH}, clock.now())
        source = MetricsDemandSource(MetricsDemandSettings(urls=(url,), every_seconds=0.2), aggregator, clock)
        running = asyncio.create_task(source.run())
        try:
            await until(lambda: any(cause in each for each in aggregator.stale(clock.now())), 10.0)
            await until(lambda: not aggregator.stale(clock.now()), 10.0)
        finally:
            running.cancel()
        assert source.window().arrivals == 3


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('fleet_demand_arrivals_total{model="m"} +Inf\n', "fleet_demand_arrivals_total: inf is not a number"),
        ('fleet_demand_arrivals_total{model="m"} NaN\n', "fleet_demand_arrivals_total: nan is not a number"),
        ('fleet_demand_arrivals_total{model="m"} -3.0\n', "fleet_demand_arrivals_total: -3.0 is not a number"),
        ('fleet_demand_arrivals_total{model="m"} 3.0\n', "fleet_demand_waited_total: is missing for the model m"),
        ('fleet_demand_arrivals_total{kind="m"} 1.0\n', "has no label 'model'"),
        ("fleet_demand_arrivals_total{ 1.0\n", "cannot be read"),
        ('fleet_demand_arrivals_total{model="m"} 1e308\n', "fleet_demand_arrivals_total: 1e.308 is more than"),
        (
            'fleet_demand_ttft_seconds_total{model="m",bucket="%s"} 1\n' % ("1" * 5000),
            "fleet_demand_ttft_seconds_total: bucket",
        ),
        (UPTIME.replace("5.0", "1e300"), "fleet_demand_uptime_seconds: 1e.300 is not a number of seconds"),
    ],
)
def test_page_with_an_impossible_metric_is_refused(line, cause):
    with pytest.raises(BadDemandReport, match=cause):
        parse_page(UPTIME + TYPE + line, Nanos(0))


def test_lines_of_other_metrics_are_not_parsed():
    other = 'other{a="' * 2 + "\n# HELP fleet_demand_arrivals\n" + 'fleet_worker_booked_blocks{worker="w"} x\n'

    assert parse_page(other + PAGE + other, Nanos(0)) == parse_page(PAGE, Nanos(0))


async def test_planner_goes_on_while_a_page_is_parsed(monkeypatch):
    clock, begun, go_on = SystemClock(), threading.Event(), threading.Event()

    def parse_slowly(page, now):
        begun.set()
        assert go_on.wait(10)
        return parse_page(page, now)

    monkeypatch.setattr(metrics, "parse_page", parse_slowly)
    async with a_page(answer(PAGE)) as url, asyncio.TaskGroup() as tasks:
        aggregator = DemandAggregator(ModelName("m"), [url], {}, clock.now())
        source = MetricsDemandSource(MetricsDemandSettings(urls=(url,)), aggregator, clock)
        running = tasks.create_task(source.run())
        await until(begun.is_set)
        assert aggregator.stale(clock.now())
        go_on.set()
        await until(lambda: not aggregator.stale(clock.now()))
        running.cancel()


async def test_unexpected_error_makes_only_the_source_stale(monkeypatch, caplog):
    clock, broken = SystemClock(), [RuntimeError("a bug")]

    def parse_or_fail(page, now):
        if broken:
            raise broken.pop()
        return parse_page(page, now)

    monkeypatch.setattr(metrics, "parse_page", parse_or_fail)
    async with a_page(answer(PAGE)) as url, asyncio.TaskGroup() as tasks:
        aggregator = DemandAggregator(ModelName("m"), [url], {}, clock.now())
        settings = MetricsDemandSettings(urls=(url,), every_seconds=0.2)
        running = tasks.create_task(MetricsDemandSource(settings, aggregator, clock).run())
        await until(lambda: not aggregator.stale(clock.now()))
        running.cancel()

    (record,) = caplog.records
    assert (record.source, record.cause, record.exc_info[0]) == (url, "RuntimeError: a bug", RuntimeError)


def test_page_of_several_processes_gives_each_its_report():
    pages = {f"router-{number}": PAGE.replace('"i"', f'"i{number}"').replace("3.0", f"{number}.0") for number in (1, 2)}

    reports = parse_page(merge_metrics({name: f"# HELP x y\n{page}" for name, page in pages.items()}), Nanos(0))

    assert {(each.incarnation, each.models[0].arrivals) for each in reports} == {("i1", 1), ("i2", 2)}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"secret-\xff", "is not ASCII text"),
        (b"secret-1\nsecret-2\n", "is not one line of printable text"),
        (b"\n", "is not one line of printable text"),
        (None, "No such file or directory"),
    ],
)
async def test_unusable_key_file_is_a_problem_of_the_source(tmp_path, caplog, content, cause):
    key_file, clock = tmp_path / "key", SystemClock()
    if content is not None:
        key_file.write_bytes(content)
    async with a_page(answer(PAGE)) as url, asyncio.TaskGroup() as tasks:
        settings = MetricsDemandSettings(urls=(url,), key_file=str(key_file), every_seconds=0.1)
        aggregator = DemandAggregator(ModelName("m"), (url,), {}, clock.now(), Nanos(10**12))
        running = tasks.create_task(MetricsDemandSource(settings, aggregator, clock).run())
        await until(lambda: caplog.records)
        (record,) = caplog.records
        assert record.cause.startswith(f"source.key_file: {key_file}: {cause}")
        assert "secret" not in caplog.text + record.cause.removeprefix(str(tmp_path))

        key_file.write_text("secret\n")
        await until(lambda: not aggregator.stale(Nanos(clock.now() + 1)))
        running.cancel()
