"""Limits that routers share in a real Redis."""

import pytest

from fleet.adapters.redis_tenants import RedisTenants
from fleet.clock import SECOND, Nanos
from fleet.errors import Refused
from fleet.router.tenants import Tenants, TenantSettings
from tests.servers import a_redis

pytestmark = pytest.mark.integration

START = Nanos(5 * SECOND)
LIMITS = {"acme": TenantSettings(requests_per_minute=10, tokens_per_minute=1000)}


class Stopped:
    """A clock that stands still, so that buckets fill in Redis only."""

    def now(self):
        return START


@pytest.fixture
def redis():
    with a_redis() as server:
        yield server


class Router:
    def __init__(self, url):
        self.tenants = Tenants(LIMITS, START)
        self.shared = RedisTenants(url, self.tenants, Stopped())

    def admits(self, tokens=10):
        try:
            self.tenants.admit("acme", tokens, START)
        except Refused:
            return False
        return True

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.shared._redis.aclose()


async def test_two_routers_together_let_in_what_one_would(redis):
    async with Router(redis.url) as one, Router(redis.url) as other:
        admitted = 0
        for number in range(30):
            admitted += (one, other)[number % 2].admits()
            await one.shared.exchange()
            await other.shared.exchange()
        assert 10 <= admitted <= 11  # Redis's own clock goes on meanwhile


async def test_what_was_taken_while_redis_was_away_is_told_when_it_is_back(tmp_path, redis):
    async with Router(redis.url) as one, Router(redis.url) as other:
        assert all(one.admits(tokens=100) for _ in range(4))
        await one.shared.exchange()
        with redis.client() as client:
            client.config_set("maxmemory", "1")  # it refuses to write from now on
            client.config_set("maxmemory-policy", "noeviction")
            assert all(one.admits(tokens=100) for _ in range(4))
            await one.shared.exchange()
            client.config_set("maxmemory", "0")
        await one.shared.exchange()

        assert other.admits(tokens=1)
        await other.shared.exchange()
        left = other.tenants.admit("acme", 1, START)

    assert left.requests.remaining == 0  # eight, and its own two
    assert 195 <= left.tokens.remaining <= 210


async def test_a_router_goes_on_by_itself_without_redis():
    async with Router("redis://127.0.0.1:1") as alone:
        assert sum(alone.admits() for _ in range(30)) == 10
        await alone.shared.exchange()
        assert not alone.admits()


async def test_a_tenant_that_is_idle_is_forgotten_in_redis_once_its_buckets_are_full(redis):
    async with Router(redis.url) as one:
        one.admits(tokens=500)
        await one.shared.exchange()
        with redis.client() as client:
            assert 29 <= client.ttl("fleet/tenants/acme") <= 32  # half of the tokens, half a minute
