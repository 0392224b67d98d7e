"""Latency predictions for simulated workers: corrected predictions are close, and drift raises an alarm."""

from functools import partial
from random import Random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.core.work import Progress
from fleet.hardware.latency.step_model import pairs
from fleet.router.latency_predictions import LatencyPredictions, PredictionKind, WorkerProfile
from fleet.router.messages import Undelivered, WorkerLeft, WorkerStepped
from fleet.router.observer import ObservedMachine
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.faults import WorkerLost, WorkerSlow
from fleet.sim.kernel import Kernel
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.builders import a_joined_worker, a_prompt, an_arrival
from tests.support.router.machine_driver import START, Dispatch, the
from tests.support.sim.worlds import BLOCK, LinearStepTimes, a_plan, a_pool, a_world

WITHIN = 0.2


class HalfAsFast:
    """Step times of a profile that promises half the true times."""

    def seconds(self, prefill_tokens, prefill_pairs, decodes, decode_context):
        return LinearStepTimes().seconds(prefill_tokens, prefill_pairs, decodes, decode_context) / 2


def watched(plan, steps, count=400, rate=15.0, seed=4):
    """Run requests with prompts of 100 to 1,500 tokens, and return their predictions."""
    kernel, luck = Kernel(plan.seed), Random(seed)
    expectations = LatencyPredictions(lambda _: WorkerProfile(steps=steps, step_tokens=512))
    world, ended = a_world(kernel, plan, expectations)
    expectations.machine = world.machine
    for fault in plan.faults:
        world.fail(fault)
    instant = 0.0
    for _ in range(count):
        instant += luck.expovariate(rate)
        prompt = luck.randrange(100, 1500)
        chain = tuple(luck.randrange(1 << 60) for _ in range(prompt // BLOCK))
        at = Nanos(round(instant * SECOND))
        kernel.at(at, partial(world.send, TraceRequest(at, prompt, chain, luck.randrange(20, 200))))
    kernel.run()
    assert len(ended) == count
    return expectations


def of_kind(expectations, kind):
    return [each for each in expectations.expected() if each.kind is kind]


@pytest.mark.parametrize("kind", PredictionKind)
def test_corrected_predictions_are_within_a_fifth(kind):
    of_both = of_kind(watched(a_plan(), HalfAsFast()), kind)
    assert [each.worker_id for each in of_both] == ["both-0", "both-1"]
    for each in of_both:
        assert each.predictions > 50
        assert each.error < WITHIN / 2
        assert each.profile_error > 2 * WITHIN
        assert each.close > 0.85
        assert each.profile_close == 0.0
        assert not each.alarms


def test_exact_profile_predicts_well_from_the_start():
    expectations = watched(a_plan(), LinearStepTimes())
    assert len(expectations.expected()) == 2 * len(PredictionKind)
    for each in expectations.expected():
        assert each.profile_error < 0.1, each
        assert each.error < 0.1, each
        assert each.factor == pytest.approx(1.0, abs=0.1)
    assert not expectations.alarms


def test_only_slowed_worker_raises_alarm():
    slow = WorkerSlow(at=Nanos(15 * SECOND), worker=WorkerId("both-1"), factor=2.5, lasting=Nanos(3600 * SECOND))
    expectations = watched(a_plan(faults=(slow,)), HalfAsFast(), count=600)
    assert {alarm.worker_id for alarm in expectations.alarms} == {"both-1"}
    assert {alarm.kind for alarm in expectations.alarms} == set(PredictionKind)
    first = {kind: min(alarm.at for alarm in expectations.alarms if alarm.kind is kind) for kind in PredictionKind}
    assert 15 * SECOND < first[PredictionKind.TTFT] < 20 * SECOND
    assert 15 * SECOND < first[PredictionKind.ITL] < 30 * SECOND


def test_prefill_and_decode_are_judged_separately():
    plan = a_plan(a_pool(Role.PREFILL, 1), a_pool(Role.DECODE, 1), remote_prefill_min_tokens=0)
    kinds = {(each.worker_id, each.kind): each for each in watched(plan, HalfAsFast()).expected()}
    assert kinds["prefill-0", PredictionKind.TTFT].error < WITHIN / 2
    assert kinds["decode-0", PredictionKind.ITL].error < WITHIN / 2
    assert ("prefill-0", PredictionKind.ITL) not in kinds


def test_new_incarnation_is_learned_from_the_start():
    lost = WorkerLost(at=Nanos(15 * SECOND), worker=WorkerId("both-1"), down=Nanos(SECOND))
    expectations = watched(a_plan(faults=(lost,)), HalfAsFast())
    first, second = of_kind(expectations, PredictionKind.TTFT)
    assert first.worker_id == "both-0"
    assert second.predictions < 0.7 * first.predictions
    assert not expectations.alarms


def test_queued_prompts_share_predicted_steps():
    """Send ten prompts of 130 tokens at once, with 128 tokens per step: they take eleven steps together, not two each."""
    kernel = Kernel(1)
    expectations = LatencyPredictions(lambda _: WorkerProfile(steps=LinearStepTimes(), step_tokens=128))
    world, _ = a_world(kernel, a_plan(a_pool(workers=1, step_tokens=128), prefill_window_tokens=0), expectations)
    expectations.machine = world.machine
    for number in range(10):
        chain = tuple(1000 * number + index for index in range(8))
        kernel.at(Nanos(5), partial(world.send, TraceRequest(Nanos(5), 130, chain, 2)))
    kernel.run()
    (first_tokens,) = of_kind(expectations, PredictionKind.TTFT)
    assert first_tokens.predictions == 10
    assert first_tokens.profile_error < 0.1
    assert first_tokens.error < 0.1


def test_prompts_behind_full_batch_raise_no_alarm():
    expectations = watched(a_plan(), HalfAsFast(), rate=40.0)
    assert sum(each.predictions for each in of_kind(expectations, PredictionKind.TTFT)) < 100
    assert not expectations.alarms


def test_undelivered_prompt_delays_no_prediction():
    expectations = LatencyPredictions(lambda _: WorkerProfile(steps=LinearStepTimes(), step_tokens=512))
    machine = expectations.machine = ObservedMachine(RouterSettings(), Random(0), None, observer=expectations)
    machine.handle(a_joined_worker("w1"), START)
    lost = the(Dispatch, machine.handle(an_arrival(request_id="lost", tokens=a_prompt(1000)), START))

    machine.handle(Undelivered(request_id=lost.start.request_id, worker_id=lost.worker_id), START)
    sent = the(Dispatch, machine.handle(an_arrival(request_id="next", tokens=a_prompt(100, first=5000)), START))

    alone = LinearStepTimes().seconds(100, pairs(100, 0), 0, 0)
    progress = (Progress(request_id=sent.start.request_id, token_ids=(1,)),)
    expectations(Nanos(START + round(alone * SECOND)), WorkerStepped(worker_id=sent.worker_id, progress=progress), [])
    assert [(each.predictions, each.error) for each in expectations.expected()] == [(1, 0.0)]


def test_departed_worker_keeps_only_its_results():
    expectations = watched(a_plan(), HalfAsFast(), count=100)
    before = expectations.expected()

    expectations(Nanos(3600 * SECOND), WorkerLeft(worker_id=WorkerId("both-0")), [])

    assert expectations.expected() == before[2:]
    assert expectations.expected(departed=True) == before[2:] + before[:2]


def test_worker_without_profile_has_no_predictions():
    expectations = LatencyPredictions(lambda _: None)
    kernel = Kernel(1)
    world, _ = a_world(kernel, a_plan(), expectations)
    expectations.machine = world.machine
    kernel.at(Nanos(5), partial(world.send, TraceRequest(Nanos(5), 100, tuple(range(6)), 5)))
    kernel.run()
    assert expectations.expected() == []


def test_clock_jump_teaches_and_breaks_nothing():
    expectations = LatencyPredictions(lambda _: WorkerProfile(steps=LinearStepTimes(), step_tokens=512))
    machine = expectations.machine = ObservedMachine(RouterSettings(), Random(0), None, observer=expectations)
    machine.handle(a_joined_worker("w1"), START)
    sent = the(Dispatch, machine.handle(an_arrival(tokens=a_prompt(1000)), START))

    for weeks in (3, 6):
        progress = (Progress(request_id=sent.start.request_id, token_ids=(0,)),)
        expectations(
            Nanos(START + weeks * 7 * 86_400 * SECOND), WorkerStepped(worker_id=sent.worker_id, progress=progress), []
        )

    assert {each.factor for each in expectations.expected()} == {1.0}
    assert not expectations.alarms
