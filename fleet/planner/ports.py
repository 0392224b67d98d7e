"""What carrying out plans needs of the world: a way to whoever starts and ends replicas."""

from typing import Protocol

from fleet.planner.messages import Observation, Plan, PoolName

CALL_SECONDS = 10.0


class PlanConnector(Protocol):
    """A way to the pools, on behalf of one writer (`fleet.planner.messages.PlanWriter`). Each call ends within `CALL_SECONDS`."""

    async def observe(self) -> Observation:
        """The pools as they are.

        Raises:
            Unreachable: Nothing is known; look again later. What was known before may still be so.
            Gone: Whoever obeyed plans there has ended without a word.
        """
        ...

    async def apply(self, plan: Plan, seen: Observation) -> None:
        """Write a plan that was made by what was seen. Nobody waits for its replicas.

        Pools are looked at before any is written. What is written is written shrinking pools first, so that a plan of which
        a part is done wants no more than what was before and what will be. Once more with the same plan does what is left.

        Raises:
            Stale: Somebody has written since: observe again. Nothing or, where that happened meanwhile, a part is written.
            Refused: A pool is not there, or pinned, or may not be written; nothing, or a part, is written.
            Unreachable: Perhaps some of it is written.
            Gone: Whoever obeyed plans there has ended without a word.
        """
        ...


class ConnectorError(Exception):
    """A plan was not, or not surely, written; or nothing could be seen. The message says how, in one line."""


class ConnectorUnreachable(ConnectorError):
    """To be tried again later."""


class OrchestratorGone(ConnectorError):
    """Nobody obeys plans there any more; what is still said there is old."""


class PlanConflict(ConnectorError):
    """What was seen is not so any more: look, and plan again."""

    def __init__(self, pool: PoolName) -> None:
        super().__init__(f"{pool}: somebody else has changed it meanwhile; look again")
        self.pool = pool


class PlanRefused(ConnectorError):
    """It will not be done as long as nobody changes something."""

    def __init__(self, pool: PoolName, cause: str) -> None:
        super().__init__(f"{pool}: {cause}")
        self.pool = pool
