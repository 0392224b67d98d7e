"""Decision log: what it keeps about requests."""

import random

import pytest

from fleet.core.requests import Finish
from fleet.core.roles import Role
from fleet.router.messages import RequestCancelled, WorkerStepped
from fleet.router.observer import ObservedMachine
from fleet.router.settings.router import RouterSettings
from fleet.sim.decision_log import DecisionLog
from tests.support.builders import a_joined_worker, an_arrival, some_progress
from tests.support.router.machine_driver import START, Dispatch, the


@pytest.mark.parametrize("cancelled", [False, True], ids=["completed", "cancelled"])
def test_ended_request_is_forgotten(cancelled):
    log = DecisionLog()
    machine = log.machine = ObservedMachine(RouterSettings(), random.Random(0), observer=log)
    machine.handle(a_joined_worker("w1", Role.BOTH), START)
    work = the(Dispatch, machine.handle(an_arrival(request_id="r1"), START))
    assert log.placed.keys() == {"r1"}

    progress = some_progress(1, request_id=work.start.request_id, finish=Finish.LENGTH)
    stepped = WorkerStepped(worker_id=work.worker_id, progress=(progress,))
    machine.handle(RequestCancelled(request_id=an_arrival().request_id) if cancelled else stepped, START)

    assert not log.placed
