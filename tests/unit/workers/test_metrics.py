"""Metrics of a worker process."""

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest

from fleet.core.ids import ModelName
from fleet.core.work import LoadReport, PulledBlocks, WorkerDescription
from tests.support.builders import a_description, a_load
from workers.machine import LifePhase
from workers.metrics import WorkerMetrics


class FakeEngine(Struct):
    report: LoadReport

    def load(self) -> LoadReport:
        return self.report


class FakeWorker(Struct):
    engine: FakeEngine
    description: WorkerDescription
    phase: LifePhase = LifePhase.SERVING
    held: int = 0
    warm_blocks: int = 0
    routers: int = 1


def test_scrape_shows_the_checked_blocks_and_the_phase():
    registry = CollectorRegistry()
    load = a_load(running=2, pulled=PulledBlocks(verified=9, corrupt=1))
    registry.register(WorkerMetrics(FakeWorker(FakeEngine(load), a_description(worker_id="w", model=ModelName("m")))))

    lines = generate_latest(registry).decode().splitlines()

    labels = 'model="m",role="decode",worker="w"'
    assert f"fleet_engine_running_requests{{{labels}}} 2.0" in lines
    for check, count in (("verified", 9.0), ("corrupt", 1.0), ("unverified", 0.0)):
        assert f'fleet_engine_pulled_blocks_total{{check="{check}",{labels}}} {count}' in lines
    assert 'fleet_worker_phase{model="m",phase="serving",role="decode",worker="w"} 1.0' in lines
