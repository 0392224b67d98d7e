"""Carries out one plan: writes it, looks how it is going, and takes back what may not be, or has not come by its deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.planner.execution import PlanOutcome, forbidden, rollback, settled
from fleet.planner.messages import Observation, Plan
from fleet.planner.ports import ConnectorUnreachable, PlanConflict, PlanConnector, PlanRefused

T = TypeVar("T")

LOOK_EVERY = 0.25  # seconds
TAKE_BACK_WITHIN = Nanos(60 * SECOND)  # where nobody answers just then


async def carry_out(
    connector: PlanConnector,
    plan: Plan,
    before: Observation,
    clock: Clock,
    tell: Callable[[Observation], None],
    trouble: Callable[[str], None] = lambda _: None,
) -> tuple[PlanOutcome, Observation]:
    """Write a plan and wait until it is settled, or its deadline has passed. Nobody waits for the rest of one of which a part is forbidden.

    Args:
        connector: To whoever obeys it.
        plan: What is wanted.
        before: What it was made by.
        clock: Time.
        tell: Is told what there is, whenever that has changed.
        trouble: Is told why nobody answers, where that is tried again.

    Returns:
        How it went, and what was seen last.

    Raises:
        Stale: Somebody has changed a pool since; plan again.
        Refused: A pool cannot be changed.
        Unreachable: Nobody answered, up to the deadline, or then for a minute. What is written stays.
        Gone: Whoever was to obey has ended.
    """
    deadline = clock.now() + plan.within
    await _patiently(lambda: connector.apply(plan, before), deadline, clock, trouble)
    last = before
    while True:
        seen = await _patiently(connector.observe, deadline, clock, trouble)
        if seen != last:
            tell(seen)
            last = seen
        if settled(plan, seen):
            return PlanOutcome.SETTLED, seen
        if clock.now() >= deadline:
            return await _give_up(connector, plan, before, seen, clock, trouble)
        if (part := forbidden(plan, seen)) is not None:
            return await _give_up(connector, part, before, seen, clock, trouble)
        await asyncio.sleep(LOOK_EVERY)


async def _give_up(
    connector: PlanConnector,
    plan: Plan,
    before: Observation,
    seen: Observation,
    clock: Clock,
    trouble: Callable[[str], None],
) -> tuple[PlanOutcome, Observation]:
    """Take back what has not come. Whoever writes at the same moment decides."""
    less = rollback(plan, before, seen)
    if less is None:
        return PlanOutcome.UNSETTLED, seen
    deadline, outcome = clock.now() + TAKE_BACK_WITHIN, PlanOutcome.ROLLED_BACK
    try:
        await _patiently(lambda: connector.apply(less, seen), deadline, clock, trouble)
    except (PlanConflict, PlanRefused):
        outcome = PlanOutcome.UNSETTLED
    return outcome, await _patiently(connector.observe, deadline, clock, trouble)


async def _patiently(
    call: Callable[[], Awaitable[T]], deadline: int, clock: Clock, trouble: Callable[[str], None]
) -> T:
    """What a call gives, tried again until the deadline while nobody answers."""
    told = ""
    while True:
        try:
            return await call()
        except ConnectorUnreachable as error:
            if clock.now() >= deadline:
                raise
            if str(error) != told:
                told = str(error)
                trouble(told)
        await asyncio.sleep(LOOK_EVERY)
