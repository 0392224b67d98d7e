"""Limits that several routers keep together, in Redis or Valkey.

Rules:

1. A request never waits for Redis: each router counts for itself and tells the others some times a second what its
   tenants took, and hears what is left. All routers together let in too much by what fits into one such span at most.
2. While Redis does not answer, routers go on counting for themselves; what was taken and is not yet filled up is told when
   it answers again. A tenant whose key it refuses (another program may have written there) is alone in that.
3. Time is that of Redis: the routers' clocks need not agree.
4. A Redis that knows nothing of a tenant, since it was started again empty say, learns it from the routers: buckets are as
   full as they believe, and for `LEARNING_SECONDS` whoever believes in less is right. A key that ended by itself did so
   with full buckets, which is what routers then believe too.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Never, Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from fleet.core.clock import Clock
from fleet.router.tenants import MINUTE_SECONDS, Tenants, TenantUsageDelta

log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.1
ANSWER_SECONDS = 1.0
REMEMBERED = 10 * MINUTE_SECONDS  # exchanges for which a tenant that took something is asked about

LEARNING_SECONDS = 1.0  # ten exchanges: long enough to hear every router

# A hash a tenant: what is left of each bucket, and when. Buckets fill as in `fleet.router.tenants`. Numbers go out as
# text, since Redis would cut them to integers. The key ends when the buckets are full again, and with it all it says.
# Arguments: seconds to learn in; of each bucket its limit, what was taken, and what this router believes was there before.
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

NOTHING = TenantUsageDelta(requests=0, tokens=0)


class _Script(Protocol):
    async def __call__(self, *, keys: list[str], args: list[float]) -> list[bytes]: ...


class RedisRateLimits:
    """Keeps the limits of one router in step with the others'; `run` it."""

    def __init__(self, url: str, tenants: Tenants, clock: Clock, *, prefix: str = "fleet/tenants/") -> None:
        """Nothing is connected before `run`.

        Args:
            url: ``redis://host:port/db`` or ``unix:///path``.
            tenants: Of this router.
            clock: Of `tenants`.
            prefix: Of the keys in Redis; routers of one cluster have the same.

        Raises:
            ValueError: The URL is none of Redis.
        """
        self._redis: Redis = Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
        self._script: _Script = self._redis.register_script(SCRIPT)
        self._tenants = tenants
        self._clock = clock
        self._prefix = prefix
        self._untold: dict[str, TenantUsageDelta] = {}
        self._asked: dict[str, int] = {}  # exchanges in which a tenant is still asked about
        self._answering = True
        self._refused: frozenset[str] = frozenset()  # tenants, in the last exchange
        self.refused = 0  # times that Redis refused a tenant's key

    async def run(self) -> Never:
        """Exchange until cancelled."""
        try:
            while True:
                await asyncio.sleep(EXCHANGE_SECONDS)
                await self.exchange()
        finally:
            await self._redis.aclose()

    def collect(self) -> Iterator[Metric]:
        """For a `CollectorRegistry`."""
        meaning = "Times that Redis refused to share a tenant's limits"
        yield CounterMetricFamily("fleet_tenant_limits_refused", meaning, self.refused)

    async def exchange(self) -> None:
        """Tell what was taken here, hear what is left of everybody's."""
        for name, taken in self._tenants.taken().items():
            before = self._untold.get(name, NOTHING)
            self._untold[name] = TenantUsageDelta(
                requests=before.requests + taken.requests, tokens=before.tokens + taken.tokens
            )
            self._asked[name] = REMEMBERED
        refused: dict[str, str] = {}
        for name in list(self._asked):
            try:
                left = await self._tell(name)
            except ResponseError as error:  # to this key, or to this script: the connection is sound
                refused[name] = str(error)
            except (RedisError, OSError, TimeoutError) as error:
                if self._answering:
                    log.warning("limits are not shared while Redis does not answer", extra={"cause": str(error)})
                self._answering = False
                return
            else:
                self._settle(name, left)
        self.refused += len(refused)
        if refused.keys() != self._refused:
            self._refused = frozenset(refused)
            first = next(iter(refused), None)
            told = {"tenants": len(refused)} | ({} if first is None else {"first": first, "cause": refused[first]})
            log.warning("limits that Redis refuses to share", extra=told)
        if not self._answering:
            log.warning("limits are shared again")
        self._answering = True

    async def _tell(self, name: str) -> list[bytes]:
        """What is left of a tenant's buckets, after what was taken here."""
        untold = self._untold.get(name, NOTHING)
        arguments = [LEARNING_SECONDS]
        for limit, level, taken in zip(
            self._tenants.limits()[name],
            self._tenants.before(name, self._clock.now()),
            (untold.requests, untold.tokens),
            strict=True,
        ):
            owed = min(taken, max(0.0, limit - level))  # what was taken longer ago has been filled up since
            arguments += [limit, owed, level + owed]
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._script(keys=[self._prefix + name], args=arguments)

    def _settle(self, name: str, left: list[bytes]) -> None:
        self._untold.pop(name, None)
        self._tenants.settle(name, float(left[0]), float(left[1]), self._clock.now())
        self._asked[name] -= 1
        if not self._asked[name]:
            del self._asked[name]
