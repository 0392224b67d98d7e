"""Shared rate limits: several routers keep tenant limits together in Redis or Valkey.

Rules:

1. A request never waits for Redis. Each router counts by itself, and several times a second it reports the usage of its
   tenants to Redis and reads what is left of their limits. So all routers together exceed a limit by at most their
   usage between two of these reports.
2. While Redis does not answer, each router counts alone. When Redis answers again, the router reports the part
   of its usage that the buckets have not refilled meanwhile. If Redis refuses the key of one tenant, for example
   because another program has written it, only this tenant is affected.
3. The script uses Redis' clock, so the routers' clocks need not agree.
4. If Redis has no key of a tenant, for example after a restart, it learns the levels of the tenant's buckets from the
   routers. Each router reports how full it believes the buckets to be, and for `LEARNING_SECONDS` the lowest value
   counts. A key expires when its buckets are full again. This loses nothing, because a missing key stands for full
   buckets.

Without Redis, routers that are peers share the limits by themselves (`fleet.router.tenants`, rule 4).
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Never, Protocol

from prometheus_client.core import Metric
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from fleet.core.clock import Clock
from fleet.router.tenants import MINUTE_SECONDS, Tenants, TenantUsageDelta
from kvstore.metric_definitions import CounterDefinition, MetricDefinition

log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.1
ANSWER_SECONDS = 1.0
# number of exchanges in which Redis is still asked about a tenant after the last usage of the tenant
REMEMBERED = 10 * MINUTE_SECONDS

LEARNING_SECONDS = 1.0  # see rule 4; ten exchanges happen in this time, so every router has reported

# The script keeps one hash per tenant: the level of each bucket, and the time of the levels. The script fills buckets as
# `fleet.router.tenants` does. Numbers are returned as text, because Redis would round them to integers.
# Arguments: the learning time in seconds; then for each bucket its limit, the new usage, and the level that the router
# believes the bucket had before this usage.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local known = redis.call('HMGET', KEYS[1], 'at', 'born', 'requests', 'tokens')
local at, born = tonumber(known[1]) or now, tonumber(known[2]) or now
local left, full = {}, 0
for index = 1, 2 do
  local limit, taken, believed = tonumber(ARGV[3 * index - 1]), tonumber(ARGV[3 * index]), tonumber(ARGV[3 * index + 1])
  local level = tonumber(known[index + 2]) or limit
  level = math.min(limit, level + math.max(0, now - at) * limit / 60)
  if now - born <= tonumber(ARGV[1]) then level = math.min(level, believed) end
  level = level - taken
  if limit > 0 then full = math.max(full, (limit - level) * 60 / limit) else level = 0 end
  left[index] = string.format('%.6f', level)
end
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now), 'born', string.format('%.6f', born),
           'requests', left[1], 'tokens', left[2])
redis.call('EXPIRE', KEYS[1], math.ceil(math.max(full, tonumber(ARGV[1]))) + 1)
return left
"""

LIMITS_REFUSED = CounterDefinition(
    "fleet_tenant_limits_refused", "Times that Redis refused to share a tenant's limits", unit="refusals"
)
METRICS: Sequence[MetricDefinition] = (LIMITS_REFUSED,)

NOTHING = TenantUsageDelta(requests=0, tokens=0)


class _Script(Protocol):
    async def __call__(self, *, keys: list[str], args: list[float]) -> list[bytes]: ...


class RedisRateLimits:
    """Shares the tenant limits of one router with the other routers through Redis; `run` exchanges usage and levels."""

    def __init__(self, url: str, tenants: Tenants, clock: Clock, *, prefix: str = "fleet/tenants/") -> None:
        """Create the client; `run` opens the connection.

        Args:
            url: ``redis://host:port/db`` or ``unix:///path``.
            tenants: Tenants of this router.
            clock: The clock by which `tenants` counts.
            prefix: Prefix of the keys in Redis, equal for all routers of a cluster.

        Raises:
            ValueError: The URL is no URL of Redis.
        """
        self.redis: Redis = Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        self._script: _Script = self.redis.register_script(SCRIPT)
        self._tenants = tenants
        self._clock = clock
        self._prefix = prefix
        self._unreported: dict[str, TenantUsageDelta] = {}
        self._asked: dict[str, int] = {}  # for each tenant, the number of further exchanges that ask Redis about it
        self._answering = True
        self._refused: frozenset[str] = frozenset()  # tenants whose keys Redis refused in the last call of `exchange`
        self.refused = 0  # number of times, since the start, that Redis refused the key of a tenant (rule 2)

    async def run(self) -> Never:
        """Exchange usage and levels with Redis every `EXCHANGE_SECONDS`, until cancelled."""
        try:
            while True:
                await asyncio.sleep(EXCHANGE_SECONDS)
                await self.exchange()
        finally:
            await self.redis.aclose()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a `CollectorRegistry`."""
        yield LIMITS_REFUSED.value(self.refused)

    async def exchange(self) -> None:
        """Report the usage of this router's tenants to Redis, and adopt Redis' count of what is left of their limits.

        Usage that Redis does not accept now is kept for the next exchange (rule 2).
        """
        for name, taken in self._tenants.taken().items():
            before = self._unreported.get(name, NOTHING)
            self._unreported[name] = TenantUsageDelta(
                requests=before.requests + taken.requests, tokens=before.tokens + taken.tokens
            )
            self._asked[name] = REMEMBERED
        refused: dict[str, str] = {}
        for name in list(self._asked):
            try:
                left = await self._tell(name)
            except ResponseError as error:  # Redis refused this key or the script, although the connection works
                refused[name] = str(error)
            except (RedisError, OSError, TimeoutError) as error:
                if self._answering:
                    log.warning("redis unreachable, tenant limits are not shared", extra={"cause": str(error)})
                self._answering = False
                return
            else:
                self._settle(name, left)
        self.refused += len(refused)
        if refused.keys() != self._refused:
            self._refused = frozenset(refused)
            first = next(iter(refused), None)
            context = {"tenants": len(refused)} | ({} if first is None else {"first": first, "cause": refused[first]})
            log.warning("redis refuses to share tenant limits", extra=context)
        if not self._answering:
            log.warning("tenant limits are shared again")
        self._answering = True

    async def _tell(self, name: str) -> list[bytes]:
        """Report a tenant's usage, and return what is left of its two buckets: requests and tokens, as text."""
        unreported = self._unreported.get(name, NOTHING)
        arguments = [LEARNING_SECONDS]
        for limit, level, taken in zip(
            self._tenants.limits()[name],
            self._tenants.before(name, self._clock.now()),
            (unreported.requests, unreported.tokens),
            strict=True,
        ):
            owed = min(taken, max(0.0, limit - level))  # report only usage that the bucket has not refilled meanwhile
            arguments += [limit, owed, level + owed]
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._script(keys=[self._prefix + name], args=arguments)

    def _settle(self, name: str, left: list[bytes]) -> None:
        self._unreported.pop(name, None)
        self._tenants.settle(name, float(left[0]), float(left[1]), self._clock.now())
        self._asked[name] -= 1
        if not self._asked[name]:
            del self._asked[name]
