"""Keys of the metrics at the ports of routers, planners and store nodes."""

import asyncio
from contextlib import AsyncExitStack
from hashlib import sha256

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from fleet.app.router import metrics_guards
from fleet.core.clock import Nanos
from fleet.core.hub import HubSettings
from fleet.core.system_clock import SystemClock
from fleet.net.metrics_port import metrics_port
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.settings import MetricsDemandSettings, PrometheusDemandSettings
from fleet.planner.sources.metrics import MetricsDemandSource
from fleet.router.settings.overflow import OverflowSettings
from fleet.router.settings.router import OpenAiWorkerSettings, RouterMetricsAccess, RouterSettings
from fleet.router.tenants import TenantSettings
from kvstore.security.metrics_access import MetricsAccess
from kvstore.tracing.settings import TracingSettings
from tests.support.frontend.frontends import open_frontends
from tests.support.kvstore.builders import a_node
from tests.support.servers.processes import a_free_port
from tests.support.waiting import until

pytestmark = pytest.mark.integration

KEY, TENANT_KEY = "monitoring", "sk-tenant"
DIGEST = sha256(KEY.encode()).hexdigest()
TENANTS = {"acme": TenantSettings(api_key_sha256=(sha256(TENANT_KEY.encode()).hexdigest(),))}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def statuses(address, key):
    """Return the statuses of the metrics without a key, with one of a tenant, and with that of the monitoring."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        answers = [await client.get("/metrics", headers=headers) for headers in ({}, bearer(TENANT_KEY), bearer(key))]
    for answer in answers:
        assert answer.status_code == 200 or answer.headers["www-authenticate"] == "Bearer"
        assert answer.status_code == 200 or "fleet_" not in answer.text
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize(
    ("access", "tenants", "health_listen", "at_http", "at_health"),
    [
        (RouterMetricsAccess(), {}, "0.0.0.0:0", [200, 200, 200], [200, 200, 200]),
        (RouterMetricsAccess(), TENANTS, "127.0.0.1:0", [401, 401, 401], [200, 200, 200]),
        (RouterMetricsAccess(), TENANTS, "0.0.0.0:0", [401, 401, 401], [401, 401, 401]),
        (RouterMetricsAccess(ask=False), TENANTS, "0.0.0.0:0", [200, 200, 200], [200, 200, 200]),
        (RouterMetricsAccess(ask_on_health=False), TENANTS, "0.0.0.0:0", [401, 401, 401], [200, 200, 200]),
        (RouterMetricsAccess(key_sha256=(DIGEST,)), TENANTS, "0.0.0.0:0", [401, 401, 200], [401, 401, 200]),
        (RouterMetricsAccess(key_sha256=(DIGEST,)), {}, "127.0.0.1:0", [401, 401, 200], [200, 200, 200]),
        (
            RouterMetricsAccess(key_sha256=(DIGEST,), ask_on_health=True),
            {},
            "127.0.0.1:0",
            [401, 401, 200],
            [401, 401, 200],
        ),
    ],
)
async def test_router_asks_for_a_key_once_keys_are_configured(
    model_dir, access, tenants, health_listen, at_http, at_health
):
    settings = RouterSettings(metrics_access=access, tenants=tenants, health_listen=health_listen)
    guards = metrics_guards(settings, keyed=bool(tenants))
    async with open_frontends(model_dir, tenants, health_listen=health_listen, metrics_guards=guards) as frontends:
        assert await statuses(frontends.http.address, KEY) == at_http
        assert await statuses(frontends.http.health_address.replace("0.0.0.0", "127.0.0.1"), KEY) == at_health
        async with httpx.AsyncClient(base_url=f"http://{frontends.http.address}") as client:
            assert (await client.get("/health")).status_code == 200


def answered(url, key=""):
    answer = httpx.get(url, headers=bearer(key) if key else {}, timeout=60)
    assert answer.status_code == 200 or answer.headers["www-authenticate"] == "Bearer"
    return answer.status_code


@pytest.mark.parametrize(
    ("access", "host", "expected"),
    [
        (MetricsAccess(), "127.0.0.1", [200, 200]),
        (MetricsAccess(), "0.0.0.0", [401, 401]),
        (MetricsAccess(open=True), "0.0.0.0", [200, 200]),
        (MetricsAccess(key_sha256=(DIGEST,)), "127.0.0.1", [401, 200]),
    ],
)
async def test_store_node_and_planner_are_closed_beyond_loopback(access, host, expected):
    port = a_free_port()
    with a_node(metrics_listen=f"{host}:{port}", metrics_access=access):
        url = f"http://127.0.0.1:{port}/metrics"
        assert [answered(url), answered(url, KEY)] == expected
    async with metrics_port(f"{host}:0", access, CollectorRegistry()) as address:
        url = f"http://{address.replace('0.0.0.0', '127.0.0.1')}/metrics"
        assert [answered(url), answered(url, KEY)] == expected


async def test_event_loop_runs_while_a_metrics_port_closes():
    ran = []
    async with AsyncExitStack() as held:
        await held.enter_async_context(metrics_port("127.0.0.1:0", MetricsAccess(), CollectorRegistry()))
        asyncio.get_running_loop().call_soon(ran.append, "meanwhile")
        await held.aclose()
        assert ran == ["meanwhile"]


@pytest.mark.parametrize(("named", "cause"), [(False, "401"), (True, "there is no fleet_demand_uptime_seconds")])
async def test_planner_sends_the_key_of_pages(model_dir, tmp_path, caplog, named, cause):
    """The frontend counts no demand, which the planner sees once it may read the page."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    guards = metrics_guards(RouterSettings(metrics_access=RouterMetricsAccess(key_sha256=(DIGEST,))), keyed=False)
    clock = SystemClock()
    async with open_frontends(model_dir, metrics_guards=guards) as frontends, asyncio.TaskGroup() as tasks:
        urls = (f"http://{frontends.http.address}/metrics",)
        settings = MetricsDemandSettings(urls=urls, key_file=str(tmp_path / "key") if named else "")
        source = MetricsDemandSource(settings, DemandAggregator("tiny", urls, {}, clock.now(), Nanos(10**12)), clock)
        running = tasks.create_task(source.run())
        await until(lambda: [each for each in caplog.records if each.message == "demand source lost"])
        running.cancel()
    assert cause in next(each.cause for each in caplog.records if each.message == "demand source lost")


HOSTED = {"dollars_per_hour": 1, "dollars_per_million_prompt_tokens": 1, "dollars_per_million_answer_tokens": 1}
SENDS_A_KEY = [
    (OpenAiWorkerSettings, {"worker_id": "w", "model": "m", "api_key": "sk"}, "url", "api_key"),
    (OverflowSettings, {**HOSTED, "api_key_file": "/f"}, "url", "api_key_file"),
    (MetricsDemandSettings, {"kind": "metrics", "key_file": "/f"}, "urls", "key_file"),
    (PrometheusDemandSettings, {"kind": "prometheus", "token_file": "/f"}, "url", "token_file"),
    (HubSettings, {"token_file": "/f"}, "endpoint", "token_file"),
    (TracingSettings, {"headers": {"x-key": "sk"}, "protocol": "http"}, "endpoint", "headers"),
]


@pytest.mark.parametrize(("kind", "fields", "place", "key"), SENDS_A_KEY)
def test_settings_refuse_to_send_a_key_in_the_clear(kind, fields, place, key):
    def settings(url, **more):
        return msgspec.convert({**fields, place: [url] if place == "urls" else url, **more}, kind)

    with pytest.raises(msgspec.ValidationError, match=f"{key} would cross the network to example.org in the clear"):
        settings("http://example.org:8000")
    for allowed in ("https://example.org", "http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:8000"):
        settings(allowed)
    settings("http://example.org:8000", insecure=True)
