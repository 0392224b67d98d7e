"""Server of the planner: writes a plan, waits for its replicas, and rolls back numbers that are not reached in time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.planner.execution import PlanOutcome, forbidden, rollback, settled
from fleet.planner.messages import Observation, Plan
from fleet.planner.ports import CALL_SECONDS, ConnectorUnreachable, PlanConflict, PlanConnector, PlanRefused

T = TypeVar("T")

LOOK_EVERY = 0.25  # seconds between two observations of the pools, and between two attempts of a call without an answer
# time for which a rollback is tried again if the orchestrator does not answer
ROLL_BACK_WITHIN = Nanos(60 * SECOND)


async def carry_out(
    connector: PlanConnector,
    plan: Plan,
    before: Observation,
    clock: Clock,
    tell: Callable[[Observation], None],
    trouble: Callable[[str], None] = lambda _: None,
) -> tuple[PlanOutcome, Observation]:
    """Write a plan, and wait until it is settled or its deadline has passed.

    If the plan is not settled at its deadline, roll back the replicas that do not serve. If the orchestrator's bounds
    forbid a part of the plan, roll back this part at once.

    Args:
        connector: Connector to the orchestrator.
        plan: The plan.
        before: The observation from which the plan was made.
        clock: Clock for the deadline.
        tell: Called with each observation that differs from the previous one.
        trouble: Called with the reason when the orchestrator does not answer and the call is tried again. A reason that
            stays the same is reported once.

    Returns:
        The outcome and the last observation.

    Raises:
        PlanConflict: Somebody has changed a pool after the observation `before`, so the caller has to plan again.
        PlanRefused: A pool cannot be changed.
        ConnectorUnreachable: The orchestrator did not answer until the deadline, or until a minute after the start of
            the rollback. Numbers that were written stay.
        OrchestratorGone: The orchestrator has ended.
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
    """Roll back the unfinished part of a plan, and return the outcome and the last observation.

    The outcome is ROLLED_BACK if the rollback was written. It is UNSETTLED if there is nothing to roll back, or if the rollback failed:
    another program has changed the number of a pool, or a pool is pinned, missing or refused. A part of it may be written then.
    """
    less = rollback(plan, before, seen)
    if less is None:
        return PlanOutcome.UNSETTLED, seen
    deadline, outcome = clock.now() + ROLL_BACK_WITHIN, PlanOutcome.ROLLED_BACK
    try:
        await _patiently(lambda: connector.apply(less, seen), deadline, clock, trouble)
    except (PlanConflict, PlanRefused):
        outcome = PlanOutcome.UNSETTLED
    return outcome, await _patiently(connector.observe, deadline, clock, trouble)


async def _patiently(
    call: Callable[[], Awaitable[T]], deadline: int, clock: Clock, trouble: Callable[[str], None]
) -> T:
    """Return the result of a call; if the orchestrator does not answer, try the call again until the deadline."""
    reported_cause = ""
    while True:
        try:
            async with asyncio.timeout(2 * CALL_SECONDS):  # for a connector that exceeds its own time limit
                return await call()
        except (ConnectorUnreachable, TimeoutError) as error:
            said = str(error) or f"no answer within {2 * CALL_SECONDS:g} s"
            if clock.now() >= deadline:
                raise ConnectorUnreachable(said) from error
            if said != reported_cause:
                reported_cause = said
                trouble(reported_cause)
        await asyncio.sleep(LOOK_EVERY)
