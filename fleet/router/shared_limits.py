"""Admission under limits that several routers share: the others hear first what was taken here, where that could matter."""

from fleet.core.clock import Clock
from fleet.core.requests import RateLimitStatus
from fleet.router.tenants import SettleWithPeers, Tenants

ROUNDS = 100  # each admits an equal share of what is left, at least


async def admit_with_peers(tenants: Tenants, tenant: str, prompt_tokens: int, clock: Clock) -> RateLimitStatus | None:
    """Let a request in, as `Tenants.admit` does; waits for other routers only near a limit.

    Raises:
        Refused: The tenant has used up what it may have.
    """
    for _ in range(ROUNDS):
        settle = tenants.settle_with_others
        if settle is None or not tenants.is_unsure(tenant, prompt_tokens, clock.now()):
            break
        if not await settle():
            break  # without the others' answers each router counts for itself
    return tenants.admit(tenant, prompt_tokens, clock.now())


async def await_settle(settle: SettleWithPeers) -> bool:
    """Wait as `settle` does: a coroutine, for a task."""
    return await settle()
