"""Cache accuracy: predicted cached tokens, compared with those that workers report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Phase, Role
from fleet.core.work import KvStored
from fleet.router.kv_index.prefix_index import ENOUGH, WINDOW, CacheAccuracy, CacheComparison, Knowledge, compare
from fleet.router.messages import CacheDriftChanged, CacheReported, KvChanged, WorkerJoined, WorkerLeft
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, MODEL, a_description, a_kv_report, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the
from tests.unit.frontend.metrics.test_router import told

HIT, MISS = CacheComparison(320, 256, 256, 256), CacheComparison(320, 256, 0, 0)


@pytest.mark.parametrize(
    ("told", "compared"),
    [
        ((100, 64, 64, 32), CacheComparison(100, 64, 64, 64)),
        ((100, 96, 32, 32), CacheComparison(100, 96, 32, 32)),
        ((100, 0, 64, 32), CacheComparison(100, 0, 64, 0)),
        ((96, 95, 64, 32), CacheComparison(96, 64, 64, 64)),  # the last token is always computed, with its block
        ((96, 96, 95, 32), CacheComparison(96, 64, 64, 64)),
        ((1, 0, 0, 32), CacheComparison(1, 0, 0, 0)),
        ((0, -1, 0, 32), CacheComparison(0, 0, 0, 0)),  # an unknown prompt, and one token to compute
    ],
)
def test_comparison_uses_whole_blocks_before_last_token(told, compared):
    assert compare(*told) == compared


def test_precision_and_recall_are_computed_from_tokens():
    both = compare(320, 256, 128, 32) + compare(320, 64, 128, 32)

    assert (both.precision, both.recall) == (192 / 320, 192 / 256)
    assert both.hit_rate_error == (320 - 256) / 640
    assert (CacheComparison().precision, CacheComparison().recall, CacheComparison().hit_rate_error) == (1, 1, 0)


def test_drift_and_recovery_are_reported_once():
    accuracy = CacheAccuracy(Knowledge.EXACT)
    for _ in range(WINDOW):
        assert not accuracy.note(HIT)

    changes = [accuracy.note(MISS) for _ in range(WINDOW)]
    assert changes.count(True) == 1
    assert accuracy.drifting
    changes = [accuracy.note(HIT) for _ in range(WINDOW)]

    assert changes.count(True) == 1
    assert not accuracy.drifting


def test_few_misses_are_no_drift():
    accuracy = CacheAccuracy(Knowledge.EXACT)

    assert not any(accuracy.note(MISS) for _ in range(ENOUGH - 1))
    assert accuracy.note(MISS)


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 999)), max_size=200))
def test_recent_sum_equals_the_window(prompts):
    accuracy = CacheAccuracy(Knowledge.EXACT)
    for prompt, predicted, reported in prompts:
        accuracy.note(compare(prompt, predicted, reported, 32))
        accuracy.check()
        assert 0 <= accuracy.recent.agreed <= min(accuracy.recent.predicted, accuracy.recent.reported)


# In the router.


def a_warm_router(blocks: int = 3) -> RouterMachineDriver:
    router = RouterMachineDriver(("d1", Role.DECODE))
    names = tuple(chain(a_prompt(100), BLOCK_TOKENS)[:blocks])
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(names),)))
    return router


def ask(router: RouterMachineDriver, number: int, *, cached_blocks: int) -> list[CacheDriftChanged]:
    work = the(Dispatch, router.send(an_arrival(request_id=f"r{number}", tokens=a_prompt(100))))
    report = a_kv_report(100, cached_blocks=cached_blocks)
    told = router.step(work, 1, kv=report) + router.step(work, 2, kv=report, finish=Finish.STOP)
    return [command for command in told if isinstance(command, CacheDriftChanged)]


def test_worker_report_is_compared_once_per_request():
    router = a_warm_router()

    ask(router, 1, cached_blocks=3)
    ask(router, 2, cached_blocks=1)

    exact = router.machine.snapshot().knowledge[0]
    assert exact.knowledge is Knowledge.EXACT
    assert (exact.workers, exact.prompts, exact.total) == (1, 2, CacheComparison(200, 192, 128, 128))


def test_cache_drift_raises_one_alarm():
    router = a_warm_router()

    alarms = [alarm for number in range(40) for alarm in ask(router, number, cached_blocks=0)]

    (alarm,) = alarms
    assert (alarm.worker_id, alarm.knowledge, alarm.drifting, alarm.precision) == ("d1", Knowledge.EXACT, True, 0.0)
    assert router.machine.snapshot().knowledge[0].drifting == 1


def test_unpredicted_hits_raise_the_alarm():
    router = a_warm_router(blocks=0)

    alarms = [alarm for number in range(40) for alarm in ask(router, number, cached_blocks=3)]

    assert [alarm.recall for alarm in alarms] == [0.0]


def test_only_the_prefill_worker_is_compared():
    router = RouterMachineDriver(("p1", Role.PREFILL), ("d1", Role.DECODE))
    work = the(Dispatch, router.send(an_arrival(tokens=700)))
    assert work.start.phase is Phase.PREFILL

    router.step(work, 1, kv=a_kv_report(700))

    assert router.machine.snapshot().knowledge[0].total == CacheComparison(700, 0, 0, 0)


def test_external_server_is_compared_by_its_own_tokens():
    router = RouterMachineDriver()
    router.send(
        WorkerJoined(
            description=a_description(worker_id="w0", role=Role.BOTH), address="x", knowledge=Knowledge.APPROXIMATE
        )
    )
    names = tuple(chain(a_prompt(320), BLOCK_TOKENS))
    router.send(KvChanged(worker_id=WorkerId("w0"), events=(KvStored(names),)))
    work = the(Dispatch, router.send(an_arrival(tokens=a_prompt(320))))

    router.send(
        CacheReported(worker_id=WorkerId("w0"), request_id=work.start.request_id, prompt_tokens=100, cached_tokens=50)
    )

    (approximate,) = router.machine.snapshot().knowledge
    assert (approximate.knowledge, approximate.workers) == (Knowledge.APPROXIMATE, 1)
    assert approximate.total == CacheComparison(320, 288, 160, 160)
    router.send(
        CacheReported(worker_id=WorkerId("w0"), request_id=RequestId("gone#1"), prompt_tokens=1, cached_tokens=1)
    )


def test_metrics_show_knowledge_and_accuracy():
    router = a_warm_router()
    ask(router, 1, cached_blocks=1)

    lines = told(router)

    of = f'knowledge="exact",model="{MODEL}"'
    assert f"fleet_cache_workers{{{of}}} 1.0" in lines
    assert f"fleet_cache_precision{{{of}}} {1 / 3}" in lines
    assert f"fleet_cache_recall{{{of}}} 1.0" in lines
    assert f"fleet_cache_hit_rate_error{{{of}}} 0.64" in lines
    assert f'fleet_cache_compared_tokens_total{{{of},what="predicted"}} 96.0' in lines
    assert f"fleet_cache_drifting_workers{{{of}}} 0.0" in lines


def test_accuracy_is_told_for_each_model_and_outlives_workers():
    router = a_warm_router()
    ask(router, 1, cached_blocks=1)
    before = router.machine.snapshot().knowledge
    router.send(
        WorkerJoined(
            description=a_description(worker_id="w0", role=Role.BOTH, model="another"),
            address="x",
            knowledge=Knowledge.APPROXIMATE,
        )
    )
    router.send(WorkerLeft(worker_id=WorkerId("d1")))

    another, gone = router.machine.snapshot().knowledge
    assert (another.model, another.knowledge, another.workers, another.prompts) == (
        "another",
        Knowledge.APPROXIMATE,
        1,
        0,
    )
    assert (gone.model, gone.knowledge, gone.workers, gone.prompts) == (MODEL, Knowledge.EXACT, 0, 1)
    assert [gone.total] == [each.total for each in before]
