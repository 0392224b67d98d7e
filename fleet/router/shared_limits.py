"""Admission under limits that peer routers share: the peers first hear what was taken here, if that could matter."""

from fleet.core.clock import Clock
from fleet.core.requests import RateLimitStatus
from fleet.router.tenants import SettleWithPeers, Tenants

ROUNDS = 100  # each round admits at least an equal share of what is left


async def admit_with_peers(tenants: Tenants, tenant: str, prompt_tokens: int, clock: Clock) -> RateLimitStatus | None:
    """Admit a request like `Tenants.admit`, but wait for peer routers near a limit.

    Raises:
        RequestRejected: The tenant has used up its limit.
    """
    for _ in range(ROUNDS):
        settle = tenants.settle_with_others
        if settle is None or not tenants.is_unsure(tenant, prompt_tokens, clock.now()):
            break
        if not await settle():
            break  # without its peers' answers each router counts by itself
    return tenants.admit(tenant, prompt_tokens, clock.now())


async def await_settle(settle: SettleWithPeers) -> bool:
    """Await `settle` in a coroutine, for a task."""
    return await settle()
