"""Metrics of a router."""

from prometheus_client import CollectorRegistry, generate_latest

from fleet.core.ids import WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Role
from fleet.core.work import PulledBlocks
from fleet.frontend.metrics.router import COUNTERS, WORKER_GAUGES, RouterMetrics
from fleet.router.messages import LoadReported
from fleet.router.state.snapshot import RouterCounters, WorkerSnapshot
from tests.support.builders import a_load, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the


def told(router):
    registry = CollectorRegistry()
    registry.register(RouterMetrics(router.machine.snapshot))
    return generate_latest(registry).decode().splitlines()


def test_scrape_shows_present_reservations_and_placements():
    router = RouterMachineDriver(("d1", Role.DECODE), oversubscribe=0.01)
    first = the(Dispatch, router.send(an_arrival(tokens=100)))
    router.send(an_arrival(request_id="waits"))

    lines = told(router)

    assert 'fleet_active_requests{model="tiny"} 2.0' in lines
    assert 'fleet_queued_requests{model="tiny"} 1.0' in lines
    labels = 'model="tiny",role="decode",worker="d1"'
    assert f"fleet_worker_booked_requests{{{labels}}} 1.0" in lines
    assert f"fleet_worker_booked_prefill_tokens{{{labels}}} 100.0" in lines
    assert 'fleet_placements_total{model="tiny",why="short_uncached_prompt"} 1.0' in lines
    router.step(first, 1, finish=Finish.STOP)
    assert 'fleet_queued_requests{model="tiny"} 0.0' in told(router)


def test_pulled_blocks_are_counted_by_the_result_of_their_check():
    router = RouterMachineDriver(("d1", Role.DECODE))
    pulled = PulledBlocks(verified=60, corrupt=1, unverified=3)
    router.send(LoadReported(worker_id=WorkerId("d1"), load=a_load(pulled=pulled)))

    lines = told(router)

    for check, count in (("verified", 60.0), ("corrupt", 1.0), ("unverified", 3.0)):
        labels = f'check="{check}",model="tiny",role="decode",worker="d1"'
        assert f"fleet_worker_pulled_blocks_total{{{labels}}} {count}" in lines


def test_rejections_are_counted_by_reason_and_cause():
    router = RouterMachineDriver()
    router.send(an_arrival())
    lines = told(router)
    assert 'fleet_refused_requests_total{model="tiny",reason="no_worker"} 1.0' in lines
    assert 'fleet_impossible_requests_total{cause="no_worker",model="tiny"} 1.0' in lines


def test_every_metric_has_a_field_in_the_snapshot():
    assert COUNTERS.keys() <= set(RouterCounters.__struct_fields__)
    assert WORKER_GAUGES.keys() <= set(WorkerSnapshot.__struct_fields__)


def test_directory_metric_exists_only_with_a_directory():
    router, said = RouterMachineDriver(), []
    for answer in (True, False, None):
        registry = CollectorRegistry()
        registry.register(RouterMetrics(router.machine.snapshot, directory=lambda found=answer: found))
        lines = generate_latest(registry).decode().splitlines()
        said.append([line for line in lines if line.startswith("fleet_directory_reachable")])

    assert said == [["fleet_directory_reachable 1.0"], ["fleet_directory_reachable 0.0"], []]


def test_task_metric_exists_only_with_a_counter():
    router, registry = RouterMachineDriver(), CollectorRegistry()
    registry.register(RouterMetrics(router.machine.snapshot, tasks=lambda: 4))

    assert "fleet_tasks 4.0" in generate_latest(registry).decode().splitlines()
    assert not any(line.startswith("fleet_tasks") for line in told(router))
