"""Limits that several routers keep together, in Redis or Valkey.

Rules:

1. A request never waits for Redis: each router counts for itself and tells the others some times a second what its
   tenants took, and hears what is left. All routers together let in too much by what fits into one such span at most.
2. While Redis does not answer, routers go on counting for themselves; what was taken is told when it answers again.
3. Time is that of Redis: the routers' clocks need not agree.
"""

import asyncio
import logging
from typing import Never, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.clock import Clock
from fleet.router.tenants import MINUTE_SECONDS, Taken, Tenants

log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.1
ANSWER_SECONDS = 1.0
REMEMBERED = 10 * MINUTE_SECONDS  # exchanges for which a tenant that took something is asked about

# A hash a tenant: what is left of each bucket, and when. Buckets fill as in `fleet.router.tenants`. Numbers go out as
# text, since Redis would cut them to integers. The key ends when the buckets are full again, and with it all it says.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local known = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local at = tonumber(known[1]) or now
local left, full = {}, 0
for index, name in ipairs({'requests', 'tokens'}) do
  local limit, taken = tonumber(ARGV[2 * index - 1]), tonumber(ARGV[2 * index])
  local level = tonumber(known[index + 1]) or limit
  level = math.min(limit, level + math.max(0, now - at) * limit / 60) - taken
  if limit > 0 then full = math.max(full, (limit - level) * 60 / limit) else level = 0 end
  left[index] = string.format('%.6f', level)
end
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now), 'requests', left[1], 'tokens', left[2])
redis.call('EXPIRE', KEYS[1], math.ceil(full) + 1)
return left
"""


class _Script(Protocol):
    async def __call__(self, *, keys: list[str], args: list[float]) -> list[bytes]: ...


class RedisTenants:
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
        self._untold: dict[str, Taken] = {}
        self._asked: dict[str, int] = {}  # exchanges in which a tenant is still asked about
        self._answering = True

    async def run(self) -> Never:
        """Exchange until cancelled."""
        try:
            while True:
                await asyncio.sleep(EXCHANGE_SECONDS)
                await self.exchange()
        finally:
            await self._redis.aclose()

    async def exchange(self) -> None:
        """Tell what was taken here, hear what is left of everybody's."""
        for name, taken in self._tenants.taken().items():
            before = self._untold.get(name, Taken(requests=0, tokens=0))
            self._untold[name] = Taken(requests=before.requests + taken.requests, tokens=before.tokens + taken.tokens)
            self._asked[name] = REMEMBERED
        limits = self._tenants.limits()
        for name in list(self._asked):
            requests_limit, tokens_limit = limits[name]
            taken = self._untold.get(name, Taken(requests=0, tokens=0))
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    left = await self._script(
                        keys=[self._prefix + name], args=[requests_limit, taken.requests, tokens_limit, taken.tokens]
                    )
            except (RedisError, OSError, TimeoutError) as error:
                if self._answering:
                    log.warning("limits are not shared while Redis does not answer", extra={"cause": str(error)})
                self._answering = False
                return
            self._untold.pop(name, None)
            self._tenants.settle(name, float(left[0]), float(left[1]), self._clock.now())
            self._asked[name] -= 1
            if not self._asked[name]:
                del self._asked[name]
        if not self._answering:
            log.warning("limits are shared again")
        self._answering = True
