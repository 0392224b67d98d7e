"""Tests of tenant limits that routers share in a real Redis."""

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import RequestRejected
from fleet.peers.redis_tenants import RedisRateLimits
from fleet.router.tenants import Tenants, TenantSettings
from tests.support.servers.processes import a_redis_server

pytestmark = pytest.mark.integration

START = Nanos(5 * SECOND)
LIMITS = {name: TenantSettings(requests_per_minute=10, tokens_per_minute=1000) for name in ("acme", "other")}


class StoppedClock:
    """A stopped clock, so that buckets fill only in Redis."""

    def __init__(self):
        self.seconds = 0

    def now(self):
        return Nanos(START + self.seconds * SECOND)


@pytest.fixture
def redis():
    with a_redis_server() as server:
        yield server


class LimitedRouter:
    def __init__(self, url):
        self.clock = StoppedClock()
        self.tenants = Tenants(LIMITS, START)
        self.shared = RedisRateLimits(url, self.tenants, self.clock)

    def admits(self, tokens=10, tenant="acme"):
        try:
            self.tenants.admit(tenant, tokens, self.clock.now())
        except RequestRejected:
            return False
        return True

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.shared.redis.aclose()


async def test_two_routers_together_admit_what_one_would(redis):
    async with LimitedRouter(redis.url) as one, LimitedRouter(redis.url) as other:
        admitted = 0
        for number in range(30):
            admitted += (one, other)[number % 2].admits()
            await one.shared.exchange()
            await other.shared.exchange()
        assert 10 <= admitted <= 11  # Redis's own clock goes on


async def test_usage_while_redis_was_away_is_reported_later(tmp_path, redis):
    async with LimitedRouter(redis.url) as one, LimitedRouter(redis.url) as other:
        assert all(one.admits(tokens=100) for _ in range(4))
        await one.shared.exchange()
        with redis.client() as client:
            client.config_set("maxmemory", "1")  # Redis rejects writes from now on
            client.config_set("maxmemory-policy", "noeviction")
            assert all(one.admits(tokens=100) for _ in range(4))
            await one.shared.exchange()
            client.config_set("maxmemory", "0")
        await one.shared.exchange()

        assert other.admits(tokens=1)
        await other.shared.exchange()
        left = other.tenants.admit("acme", 1, START)

    assert left.requests.remaining == 0  # eight, and two of its own
    assert 195 <= left.tokens.remaining <= 210


async def test_router_without_redis_limits_locally():
    async with LimitedRouter("redis://127.0.0.1:1") as alone:
        assert sum(alone.admits() for _ in range(30)) == 10
        await alone.shared.exchange()
        assert not alone.admits()


async def test_idle_tenant_expires_in_redis_when_its_buckets_are_full(redis):
    async with LimitedRouter(redis.url) as one:
        one.admits(tokens=500)
        await one.shared.exchange()
        with redis.client() as client:
            assert 29 <= client.ttl("fleet/tenants/acme") <= 32  # half of the tokens, half a minute


async def test_restarted_redis_learns_the_balances_from_routers(redis):
    async with LimitedRouter(redis.url) as one, LimitedRouter(redis.url) as other, LimitedRouter(redis.url) as ignorant:
        assert all(router.admits() for router in (one, other, one, other, one, other))
        for router in (one, other, one):
            await router.shared.exchange()
        redis.kill()
        redis.start()
        for router in (ignorant, one, other):
            await router.shared.exchange()  # it finds its connection broken, or has nothing to send

        ignorant.admits()
        for router in (ignorant, one, other) * 3:
            await router.shared.exchange()

        assert [sum(router.admits() for _ in range(30)) for router in (one, other, ignorant)] == [3, 3, 3]


async def test_tenant_with_a_broken_key_is_limited_locally(redis, caplog):
    async with LimitedRouter(redis.url) as one, LimitedRouter(redis.url) as other:
        with redis.client() as client:
            client.set("fleet/tenants/acme", "somebody else's")
        for _ in range(4):
            assert one.admits()
            assert one.admits(tenant="other")
            await one.shared.exchange()
        assert other.admits(tenant="other")
        await other.shared.exchange()

        assert sum(other.admits(tenant="other") for _ in range(30)) == 5
        assert sum(one.admits() for _ in range(30)) == 6
        assert one.shared.refused == 4
        (said,) = [record for record in caplog.records if record.name == "fleet.peers.redis_tenants"]
        assert (said.tenants, said.first) == (1, "acme")
        assert "WRONGTYPE" in said.cause

        with redis.client() as client:
            client.delete("fleet/tenants/acme")
        await one.shared.exchange()
        assert other.admits()
        await other.shared.exchange()
        assert sum(other.admits() for _ in range(30)) == 0


async def test_tenant_does_not_pay_twice_after_a_long_outage(redis):
    async with LimitedRouter(redis.url) as one:
        redis.kill()
        for _ in range(10):
            assert sum(one.admits() for _ in range(30)) == 10
            await one.shared.exchange()
            one.clock.seconds += 60
        one.clock.seconds -= 48  # a fifth of the last minute has passed
        redis.start()
        for _ in range(3):
            await one.shared.exchange()

        assert sum(one.admits() for _ in range(30)) == 2
