"""Fleet's own workers together with external backends: Fleet's workers cannot take the names and models of external backends."""

from fleet.backends.external.workers import CombinedBackends, ExternalBackends
from fleet.core.ids import WorkerId
from fleet.core.system_clock import SystemClock
from fleet.router.messages import LoadReported, StoreChanged, WorkerDraining, WorkerEvent, WorkerJoined, WorkerLeft
from fleet.router.settings.router import OpenAiWorkerSettings
from tests.support.builders import a_description, a_load
from tests.support.router.fake_workers import FakeWorkers

EXTERNAL = OpenAiWorkerSettings(worker_id="w0", url="http://127.0.0.1:1", model="mock")


def heard(*events: WorkerEvent) -> list[WorkerEvent]:
    workers = CombinedBackends(FakeWorkers(), ExternalBackends((EXTERNAL,), 1.0, SystemClock()))  # type: ignore[arg-type]
    heard: list[WorkerEvent] = []
    hear = workers.only_acceptable(heard.append)
    for event in events:
        hear(event)
    return heard


def test_events_of_own_workers_are_heard():
    joined = WorkerJoined(description=a_description(worker_id="w1"), address="x")
    events = (joined, LoadReported(worker_id=WorkerId("w1"), load=a_load()), WorkerLeft(worker_id=WorkerId("w1")))
    stored = StoreChanged(store_id="s", fingerprint="f")  # type: ignore[arg-type]

    assert heard(*events, stored) == [*events, stored]


def test_worker_with_name_of_external_backend_is_not_heard(caplog):
    joined = WorkerJoined(description=a_description(worker_id="w0"), address="x")

    assert heard(joined, WorkerDraining(worker_id=WorkerId("w0")), WorkerLeft(worker_id=WorkerId("w0"))) == []
    assert "openai_workers" in caplog.text


def test_worker_with_model_of_external_backend_does_not_join():
    assert heard(WorkerJoined(description=a_description(worker_id="w1", model="mock"), address="x")) == []
