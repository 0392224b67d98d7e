"""Tests of the Prometheus demand source against a real Prometheus server, and against servers that are none."""

import asyncio
from contextlib import asynccontextmanager, closing, suppress

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import ModelDemand
from fleet.core.duration_counts import EDGES, bucket_of
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.messages import PoolName
from fleet.planner.settings import PrometheusDemandSettings
from fleet.planner.sources.prometheus import PrometheusDemandSource
from tests.support.planner.demand_routers import MODEL
from tests.support.servers.processes import a_free_port
from tests.support.servers.prometheus import RouterPage, a_prometheus_server
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TTFT = tuple(4 if bucket == bucket_of(0.2) else 0 for bucket in range(len(EDGES) + 1))


class Source:
    """A source and the sum of its windows."""

    def __init__(self, **fields):
        settings = PrometheusDemandSettings(**{"every_seconds": 0.2, "stale_seconds": 3.0, **fields})
        self.clock = SystemClock()
        stale_after = Nanos(round(settings.stale_seconds * SECOND))
        pools = {PoolName("decode"): Role.DECODE}
        self.aggregator = DemandAggregator(MODEL, [settings.url], pools, self.clock.now(), stale_after)
        self.source = PrometheusDemandSource(settings, self.aggregator, self.clock)
        self.arrivals = 0
        self.ttft = 0
        self.running = {}

    @asynccontextmanager
    async def asking(self):
        task = asyncio.get_running_loop().create_task(self.source.run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def heard(self):
        window = self.source.window()
        self.arrivals += window.arrivals
        self.ttft += sum(window.ttft)
        self.running = {each.worker: each.running for each in window.workers}
        return window

    @property
    def stale(self):
        return self.aggregator.stale(self.clock.now())


async def test_demand_of_several_routers_is_summed():
    with (
        closing(RouterPage("a")) as one,
        closing(RouterPage("b")) as two,
        a_prometheus_server((one.target, two.target)) as server,
    ):
        async with Source(url=server.url, routers=2, labels={"job": "routers"}).asking() as source:
            await until(lambda: not source.stale)
            source.heard()
            for page, arrivals in ((one, 7), (two, 4)):
                # A page shows the counts before the running requests, so a scrape that has these counts has these requests.
                page.router.running = {f"decode-{arrivals}": arrivals}
                page.router.counted = ModelDemand(model=MODEL, arrivals=arrivals, prompt_tokens=10, ttft=TTFT)

            def complete():
                source.heard()
                return source.arrivals >= 11

            await until(complete)
            assert source.arrivals == 11
            assert source.ttft == 8
            assert source.running == {"decode-7": 7, "decode-4": 4}
            await until(lambda: not source.stale)


async def test_router_that_is_not_scraped_is_named_until_it_is_back():
    one, two = RouterPage("a"), RouterPage("b", a_free_port())
    with closing(one), a_prometheus_server((one.target, two.target)) as server:
        async with Source(url=server.url, routers=2).asking() as source:
            await until(lambda: not source.stale)
            two.close()
            named = "1 router processes have samples, and source.routers says 2"
            # Another cause may be told before: on a busy machine, the server may not scrape the other page in time either.
            (told,) = await until(
                lambda: [each for each in source.stale if named in each], otherwise=lambda: source.stale
            )
            assert told.startswith(server.url)
            assert source.heard().stale
            with closing(RouterPage("b", two.port)):
                await until(lambda: not source.stale)


async def test_restarted_router_counts_from_zero():
    page = RouterPage("a")
    page.router.counted = ModelDemand(model=MODEL, arrivals=500)
    with closing(page), a_prometheus_server((page.target,)) as server:
        async with Source(url=server.url).asking() as source:
            await until(lambda: not source.stale)
            source.heard()
            before = source.arrivals
            page.restart("b")
            page.router.counted = ModelDemand(model=MODEL, arrivals=3)

            def complete():
                source.heard()
                return source.arrivals >= before + 3

            await until(complete)
    assert source.arrivals == before + 3


async def test_killed_server_is_named_and_asked_again():
    with closing(RouterPage("a")) as page, a_prometheus_server((page.target,)) as server:
        async with Source(url=server.url).asking() as source:
            await until(lambda: not source.stale)
            server.kill()
            (told,) = await until(lambda: source.stale)
            assert told.startswith(server.url)
            assert "has not reported for" in told
            server.start()
            await until(lambda: not source.stale)


async def test_series_that_is_dropped_on_its_way_is_named():
    drop = {"source_labels": ["__name__"], "regex": "fleet_demand_prompt_tokens_total", "action": "drop"}
    with closing(RouterPage("a")) as page, a_prometheus_server((page.target,), (drop,)) as server:
        page.router.counted = ModelDemand(model=MODEL, arrivals=7, prompt_tokens=100)
        async with Source(url=server.url).asking() as source:
            await until(lambda: any("fleet_demand_prompt_tokens_total: is missing" in each for each in source.stale))
            assert source.heard().arrivals == 0


@pytest.mark.parametrize("job", ["others", '"} or {job="routers'])
async def test_labels_choose_the_routers(job):
    with closing(RouterPage("a")) as page, a_prometheus_server((page.target,)) as server:
        async with Source(url=server.url, labels={"job": "routers"}).asking() as source:
            await until(lambda: not source.stale)  # the server has scraped the page
        async with Source(url=server.url, labels={"job": job}).asking() as source:
            await until(lambda: any("0 router processes have samples" in each for each in source.stale))


def answer(body, status=200):
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def vector(value, name="fleet_demand_uptime_seconds", **labels):
    metric = {"__name__": name, **labels}
    series = f'{{"metric":{metric},"value":[1000,"{value}"]}}'.replace("'", '"')
    return answer(f'{{"status":"success","data":{{"resultType":"vector","result":[{series}]}}}}')


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "Bad status line"),
        ([answer("<html>no</html>")], "no answer of the HTTP API"),
        ([answer('{"status":"error","error":"bad_data: parse error"}', 400)], "status 400: bad_data: parse error"),
        ([answer(f'{{"status":"error","error":"{"x" * 1_000_000}"}}', 400)], "xx… (1000012 characters)"),
        ([answer('{"status":"success","data":{"resultType":"matrix","result":[]}}')], "is a matrix, not a vector"),
        ([vector("many")], "'many' is no number"),
        ([vector("100")], "not scraped: the router for 900 s"),
        ([vector("999"), vector("NaN", source="r", incarnation="i")], "fleet_demand_uptime_seconds: nan"),
        ([vector("999"), vector("-1", source="r", incarnation="i")], "fleet_demand_uptime_seconds: -1.0"),
        ([vector("999"), vector("5", source="r")], "has no label 'incarnation'"),
        ([answer("[" * 100_000)], "no answer of the HTTP API"),
        ([vector("999"), vector("1e300", source="r", incarnation="i")], "fleet_demand_uptime_seconds: 1e+300 is not"),
        (
            [vector("999"), vector("1", "fleet_demand_ttft_seconds_total", model="m", bucket="1" * 5000)],
            "fleet_demand_ttft_seconds_total: bucket",
        ),
        ([None], "no answer within 0.5 s"),
    ],
)
async def test_server_that_answers_something_else_is_told(answers, cause):
    left, over = list(answers), asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        now = left.pop(0) if len(left) > 1 else left[0]
        if now is None:
            await over.wait()
        writer.write(now or b"")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        deadline = 0.5 if answers == [None] else 60.0  # only a silent server makes the test wait for it
        async with Source(url=url, deadline_seconds=deadline, every_seconds=30, stale_seconds=60).asking() as source:
            (told,) = await until(lambda: [each for each in source.stale if "(" in each])
            assert cause in told
            assert source.heard().stale
        over.set()
        server.close()
        await server.wait_closed()


def test_unusable_files_are_refused_by_field(tmp_path):
    for field in ("token_file", "authority"):
        with pytest.raises(ConfigurationRefused, match=f"source.{field}: {tmp_path}/none"):
            Source(url="https://prometheus:9090", **{field: f"{tmp_path}/none"})
    (tmp_path / "two").write_text("one\ntwo\n")
    with pytest.raises(ConfigurationRefused, match=r"source\.token_file: .* one token"):
        Source(url="https://prometheus:9090", token_file=f"{tmp_path}/two")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": "prometheus:9090"}, "url: 'prometheus:9090'"),
        ({"url": "http://p", "stale_seconds": 0.1}, "stale_seconds: 0.1"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        structs.replace(PrometheusDemandSettings(url="http://p"), **fields)
