"""Decision log: writes each decision of a router's machine as a line of text, in the same form in production and in the simulator.

Rules:

1. A line consists of an instant in nanoseconds, a verb, and details. These are all verbs (R is a request, W a worker, P the prefill worker
   of a pair, and PATH a KV path):

       place R on W [with P by PATH]: WHY, compute N of M tokens, W=COST/HITS …[, prefill P=COST/HITS …]
       book W: N requests, B blocks, T prefill tokens       (and `book W: nothing` if all was released)
       send ATTEMPT to W: PHASE, N tokens, at most M[, handed over by PATH][, of which K from P by PATH]
       cancel ATTEMPT on W
       start over R                     (the answer begins again; tokens that the client has got are void)
       complete R: FINISH, N cached
       refuse R: REASON
       drift W: yes | no                (cache drift of W has begun, or has ended)

2. A `place` line states a decision with its data: N of the M prompt tokens have to be computed. The line lists the candidates in
   the order in which they joined. COST is the cost of a candidate, and HITS is the number of leading blocks of the prompt
   that it need not compute. The `send` line of the chosen worker follows. A `send` line without a `place` line is the
   decode part of a handoff. Its worker was chosen when the request was placed. If this worker has gone or drains at the
   handoff, another one is chosen then. In a `send` line, N counts prompt tokens, and M is the maximum number of tokens to
   generate. K of the N tokens come from worker P.
3. A `book` line states the sums of the reservations on one worker after an event. There is one line for each worker whose
   sums have changed.
4. Costs are printed with nine significant digits, because sums of floats may differ in the last bits between two machines.
"""

from collections.abc import Sequence
from typing import assert_never

from fleet.core.clock import Nanos
from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES
from fleet.core.roles import Phase
from fleet.core.work import Start
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    CacheDriftChanged,
    CancelAttempt,
    Command,
    Complete,
    Dispatch,
    Emit,
    Reject,
    RequestCancelled,
    ReservationTotals,
    RouterEvent,
    StartedOver,
)
from fleet.router.placement.decision import CostTerms, Decision
from fleet.router.policy import Rows
from fleet.router.state.live_requests import request_of


class DecisionLog:
    """Writes the decisions of one router machine as lines. It is called as a `fleet.router.observer.Observer`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        # the router machine whose decisions and reservations are logged; nothing is logged while this is None
        self.machine: RouterMachine | None = None
        self._booked: dict[WorkerId, ReservationTotals] = {}
        # for each request, the last decision that was logged, until the request is completed, refused or cancelled
        self.placed: dict[str, Decision] = {}

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        if self.machine is None or commands is None:
            return
        for command in commands:
            self._command(now, command, self.machine)
        if isinstance(event, RequestCancelled):
            self.placed.pop(event.request_id, None)
        self._bookings(now, self.machine)

    def _command(self, now: Nanos, command: Command, machine: RouterMachine) -> None:
        match command:
            case Dispatch():
                request_id = request_of(command.start.request_id)
                decision = machine.decision(request_id)
                if decision is not None and self.placed.get(request_id) is not decision:
                    self.placed[request_id] = decision
                    self.lines.append(f"{now} place {request_id} {_placed(decision)}")
                self.lines.append(
                    f"{now} send {command.start.request_id} to {command.worker_id}: {_sent(command.start)}"
                )
            case CancelAttempt():
                self.lines.append(f"{now} cancel {command.request_id} on {command.worker_id}")
            case StartedOver():
                self.lines.append(f"{now} start over {command.request_id}")
            case Complete():
                self.placed.pop(command.request_id, None)
                self.lines.append(
                    f"{now} complete {command.request_id}: {command.finish}, {command.cached_tokens} cached"
                )
            case Reject():
                self.placed.pop(command.request_id, None)
                self.lines.append(f"{now} refuse {command.request_id}: {command.reason}")
            case CacheDriftChanged():
                self.lines.append(f"{now} drift {command.worker_id}: {'yes' if command.drifting else 'no'}")
            case Emit():
                pass  # these commands only pass the output of a worker on to the client, so there is no decision to log
            case _:
                assert_never(command)

    def _bookings(self, now: Nanos, machine: RouterMachine) -> None:
        booked = machine.booked()
        for worker_id in sorted(booked.keys() | self._booked.keys()):
            there = booked.get(worker_id)
            if there == self._booked.get(worker_id):
                continue
            what = "nothing"
            if there is not None:
                what = f"{there.requests} requests, {there.blocks} blocks, {there.prefill_tokens} prefill tokens"
            self.lines.append(f"{now} book {worker_id}: {what}")
        self._booked = booked


def _placed(decision: Decision) -> str:
    placed = decision.explained()
    where = f"on {placed.decode}"
    if placed.prefill is not None:
        where += f" with {placed.prefill} by {placed.kv_path}"
    line = f"{where}: {placed.why}, compute {placed.prefill_tokens} of {decision.request.prompt_tokens} tokens"
    line += f", {_candidates(placed.candidates, decision, decision.rows)}"
    if decision.prefill_rows is not None:
        line += f", prefill {_candidates(placed.prefill_candidates, decision, decision.prefill_rows)}"
    return line


def _candidates(terms: Sequence[CostTerms], decision: Decision, rows: Rows) -> str:
    hits = decision.candidate_table.candidates(rows).held_blocks().tolist()
    return " ".join(f"{each.worker_id}={each.cost:.9g}/{blocks:.0f}" for each, blocks in zip(terms, hits, strict=True))


def _sent(start: Start) -> str:
    line = f"{start.phase}, {len(start.tokens) // TOKEN_BYTES} tokens, at most {start.sampling.max_tokens}"
    if start.phase is Phase.PREFILL:
        line += f", handed over by {start.kv_path}"
    if start.handoff is not None:
        handoff = start.handoff
        line += f", of which {handoff.num_tokens} from {handoff.prefill_worker} by {handoff.kv_path}"
    return line
