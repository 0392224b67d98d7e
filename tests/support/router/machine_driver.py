"""Driver of a router machine: checks the machine's invariants after every event, and has short methods for common events."""

import random
from collections.abc import Sequence
from typing import TypeVar

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, KvReport
from fleet.core.roles import Role
from fleet.core.work import Handoff, ParsedDelta, Rejected, Start
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    AttemptRejected,
    CancelAttempt,
    Command,
    Complete,
    Dispatch,
    Emit,
    Reject,
    RequestCancelled,
    RouterEvent,
    Undelivered,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.settings.router import RouterSettings
from tests.support.builders import a_joined_worker, some_progress

AnyCommand = TypeVar("AnyCommand", bound=Command)
START = Nanos(1_000_000_000)


class RouterMachineDriver:
    def __init__(self, *workers: tuple[str, Role], seed: int = 0, **settings):
        self.machine = RouterMachine(RouterSettings(**settings), random.Random(seed))
        self.now = START
        for worker_id, role in workers:
            self.join(worker_id, role)

    def send(self, event: RouterEvent) -> list[Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def join(self, worker_id: str, role: Role = Role.DECODE, **fields) -> list[Command]:
        return self.send(a_joined_worker(worker_id, role, **fields))

    def leave(self, worker_id: str) -> list[Command]:
        return self.send(WorkerLeft(worker_id=WorkerId(worker_id)))

    def step(
        self,
        work: Dispatch,
        *tokens: int,
        finish: Finish | None = None,
        kv: KvReport | None = None,
        handoff: Handoff | None = None,
        parsed: ParsedDelta | None = None,
    ) -> list[Command]:
        progress = some_progress(
            *tokens, request_id=work.start.request_id, finish=finish, kv=kv, handoff=handoff, parsed=parsed
        )
        return self.send(WorkerStepped(worker_id=work.worker_id, progress=(progress,)))

    def reject(self, work: Dispatch, reason: Reason, field: str = "") -> list[Command]:
        rejected = Rejected(request_id=work.start.request_id, reason=reason, message="no", field=field)
        return self.send(AttemptRejected(worker_id=work.worker_id, rejected=rejected))

    def fail_to_deliver(self, work: Dispatch) -> list[Command]:
        return self.send(Undelivered(request_id=work.start.request_id, worker_id=work.worker_id))

    def cancel(self, request_id: str = "r1") -> list[Command]:
        return self.send(RequestCancelled(request_id=RequestId(request_id)))

    def booked(self, worker_id: str) -> tuple[int, int, int]:
        """Return the numbers of a worker's reserved requests, distinct reserved blocks and reserved prefill tokens."""
        for pool in self.machine.snapshot().pools:
            for worker in pool.workers:
                if worker.worker_id == worker_id:
                    return worker.booked_requests, worker.booked_blocks, worker.booked_prefill_tokens
        raise AssertionError(worker_id)


def the(kind: type[AnyCommand], commands: Sequence[Command]) -> AnyCommand:
    """Return the command of this kind, after a check that there is exactly one."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def dispatched(commands: Sequence[Command]) -> Start:
    return the(Dispatch, commands).start


__all__ = [
    "START",
    "CancelAttempt",
    "Complete",
    "Dispatch",
    "Emit",
    "Reject",
    "RouterMachineDriver",
    "dispatched",
    "the",
]
