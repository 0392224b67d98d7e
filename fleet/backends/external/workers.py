"""External backends of a router: runs all of them, and combines them with Fleet's own workers behind one port."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Never

from prometheus_client.core import Metric

from fleet.backends.external.backend import RETRY_AFTER_MS, ExternalBackend, Hear
from fleet.backends.external.health import ListedModel
from fleet.backends.external.http_client import BackendUnreachable
from fleet.backends.external.running_time import RunningTime
from fleet.backends.external.write_batcher import WriteBatcher
from fleet.backends.kv_events.health import KvEventAlert
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.work import Start
from fleet.frontend.openai.passage import Passage
from fleet.frontend.openai.relay import RelayedRequest
from fleet.frontend.text.tokenizer_check import TokenizerMatch
from fleet.router.messages import StoreChanged, WorkerEvent, WorkerJoined
from fleet.router.ports import TextCodec, Workers, WorkerUnreachable
from fleet.router.settings.router import OpenAiWorkerSettings
from fleet.router.state.live_requests import request_of
from kvstore.metric_definitions import GaugeDefinition, MetricDefinition

log = logging.getLogger(__name__)

NOBODY = "no external server takes requests now"
# Seconds for which the router reuses the servers' lists of models. So a new LoRA adapter appears up to this much later in
# the router's own list.
LISTED_SECONDS = 5.0
# Seconds between two silence checks. By default, a server becomes suspect after half a second of silence at the earliest.
PROBE_SECONDS = 0.1

SERVERS = GaugeDefinition("fleet_foreign_servers", "External backends by state", ("model", "state"), "backends")
CACHE_KNOWLEDGE = GaugeDefinition(
    "fleet_cache_knowledge", "External backends by how their caches are known", ("model", "by"), "backends"
)
TOKENIZERS = GaugeDefinition(
    "fleet_foreign_tokenizers",
    "External backends by the result of the tokenizer check",
    ("model", "tokenises"),
    "backends",
)
KV_EVENT_ALERTS = GaugeDefinition(
    "fleet_kv_event_alerts",
    "External backends by what is wrong with their KV events",
    ("model", "alert"),
    "backends",
)
KV_EVENT_PASSED_OVER = GaugeDefinition(
    "fleet_kv_event_passed_over", "Skipped blocks of KV events by reason", ("model", "why"), "KV blocks"
)
METRICS: Sequence[MetricDefinition] = (SERVERS, CACHE_KNOWLEDGE, TOKENIZERS, KV_EVENT_ALERTS, KV_EVENT_PASSED_OVER)


class ExternalBackends:
    """Runs the external backends that the router's settings name.

    Implements `fleet.frontend.openai.relay.PendingRequests`.
    """

    def __init__(
        self,
        settings: Sequence[OpenAiWorkerSettings],
        connect_timeout_seconds: float,
        clock: Clock,
        codecs: Mapping[ModelName, TextCodec] | None = None,
    ) -> None:
        """Create the backends; they connect to the servers in `run`.

        Args:
            settings: One entry per server.
            connect_timeout_seconds: Time limit for opening a connection.
            clock: Monotonic clock.
            codecs: The tokenizers that the settings name, by model, for the tokenizer check.
        """
        codecs = codecs or {}
        write_batcher = WriteBatcher()
        self._clock = clock
        self._own_time = RunningTime()
        self._workers = {
            WorkerId(each.worker_id): ExternalBackend(
                each,
                connect_timeout_seconds,
                clock,
                codecs.get(ModelName(each.model)),
                self._can_spare,
                write_batcher,
                self._own_time,
            )
            for each in settings
        }
        self.models = frozenset(ModelName(each.model) for each in settings)
        self._listing = asyncio.Lock()
        self._listed: Mapping[ModelName, ListedModel] = {}
        self._list_again_at = Nanos(0)
        self._pending: dict[RequestId, RelayedRequest] = {}

    def _can_spare(self, worker: ExternalBackend) -> bool:
        """Return True if enough other backends of the same model take requests (rule 2 of `backend.py`)."""
        alike = [each for each in self._workers.values() if each.settings.model == worker.settings.model]
        others = sum(each.taking for each in alike if each is not worker)
        return others > 0 and 2 * others >= len(alike)

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def expect(self, relayed: RelayedRequest) -> None:
        self._pending[relayed.request_id] = relayed

    def forget(self, relayed: RelayedRequest) -> None:
        self._pending.pop(relayed.request_id, None)

    async def model_objects(self) -> Mapping[ModelName, ListedModel]:
        """Return the models that the servers list, by name; the answers are kept for `LISTED_SECONDS`."""
        async with self._listing:  # one caller queries the servers, and the others wait for the result
            now = self._clock.now()
            if now >= self._list_again_at:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(worker.model_objects()) for worker in self._workers.values()]
                self._listed = {
                    ModelName(name): listed
                    # reversed, so that of several objects with one name the object of the first server is kept
                    for each in reversed(asked)
                    for listed in each.result()
                    if isinstance(name := listed.get("id"), str)
                }
                self._list_again_at = Nanos(now + int(LISTED_SECONDS * SECOND))
            return self._listed

    async def carry(self, passage: Passage, model: ModelName | None) -> None:
        """Pass a request on to the server of a model with the fewest passages.

        If several servers have the fewest passages, the one of them with the fewest placed requests is taken. If `model` is
        None, all servers are candidates. If the server cannot be reached, or answers a request without a body with 404, the
        next server is tried.

        Raises:
            RequestRejected: No server can take the request, or the request failed.
            ClientDisconnected: The client has closed its connection.
        """
        takers = [
            worker for worker in self._workers.values() if worker.taking and model in (None, worker.settings.model)
        ]
        takers.sort(key=lambda worker: (worker.passing, worker.running))
        refused = RequestRejected(Reason.NO_WORKER, NOBODY, retry_after_ms=RETRY_AFTER_MS)
        for place, worker in enumerate(takers, 1):
            try:
                if await worker.carry(passage, may_move=passage.is_bodyless and place < len(takers)):
                    return
            except BackendUnreachable as error:
                refused = RequestRejected(Reason.WORKER_LOST, str(error))
        raise refused

    def start(self, worker_id: WorkerId, start: Start) -> None:
        """Send a request, which `expect` has noted before, to a server.

        Raises:
            WorkerUnreachable: The server takes no requests, or `expect` has not noted the request.
        """
        relayed = self._pending.get(request_of(start.request_id))
        if relayed is None:
            raise WorkerUnreachable(worker_id)
        if start.trace is not None:
            relayed.send_trace(start.trace)
        self._workers[worker_id].start(start.request_id, relayed)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._workers[worker_id].cancel(request_id)

    async def run(self, hear: Hear) -> None:
        """Run all backends until cancelled; `hear` gets their events."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(worker.run(hear), name=f"worker {worker.worker_id}")
            tasks.create_task(self._look(), name="silence of servers")

    async def _look(self) -> Never:
        """Let each backend check its server for silence every `PROBE_SECONDS`."""
        # This first tick makes the running time leave out a pause of the process before the first check, too.
        self._own_time.tick(self._clock.now())
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            now = self._own_time.tick(self._clock.now())
            for worker in [worker for worker in self._workers.values() if worker.look(now)]:
                worker.decide(now, self._siblings(worker))

    def _siblings(self, worker: ExternalBackend) -> list[ExternalBackend]:
        """Return the other backends of the same model that take requests."""
        model = worker.settings.model
        return [
            each
            for each in self._workers.values()
            if each is not worker and each.taking and each.settings.model == model
        ]

    def gauges(self) -> Iterator[Metric]:
        """Yield the metrics of external backends, by model."""
        for definition, read in (
            (SERVERS, self.standing),
            (CACHE_KNOWLEDGE, self.knowledge),
            (TOKENIZERS, self.tokenizers),
            (KV_EVENT_ALERTS, self.alerts),
            (KV_EVENT_PASSED_OVER, self.passed_over),
        ):
            yield definition.samples(
                {(model, value): count for model in self.models for value, count in read(model).items()}
            )

    def _of(self, model: ModelName | None) -> list[ExternalBackend]:
        """Return the backends of a model. If `model` is None, return the backends of all models."""
        return [each for each in self._workers.values() if model is None or each.settings.model == model]

    async def asked(self) -> None:
        """Wait until each server has joined or has failed its first health check. The wait has no time limit."""
        for worker in self._workers.values():
            await worker.asked.wait()

    def knowledge(self, model: ModelName | None = None) -> dict[str, float]:
        """Count the joined backends by what the router knows of their caches.

        The keys are `approximate` (assumed cache), `events` (KV events) and `blind` (KV events that cannot be used, because
        of an alert or because the server's tokenizer differs from the router's).
        """
        counts = {"approximate": 0.0, "events": 0.0, "blind": 0.0}
        for worker in self._of(model):
            if worker.joined:
                seen = worker.alert is None and worker.tokenises is not TokenizerMatch.OTHERWISE
                followed = "events" if seen else "blind"
                counts[followed if worker.settings.kv_events else "approximate"] += 1
        return counts

    def standing(self, model: ModelName | None = None) -> dict[str, float]:
        """Count the backends by state: `serving`, `silent` (no new requests because of silence), or `away`.

        A backend is `away` if it has not joined, or gets no new requests for another reason, such as failed requests.
        """
        counts = {"serving": 0.0, "silent": 0.0, "away": 0.0}
        for worker in self._of(model):
            silent = worker.silence.out or worker.silence.held
            counts["serving" if worker.taking else "silent" if silent else "away"] += 1
        return counts

    def tokenizers(self, model: ModelName | None = None) -> dict[str, float]:
        """Count the joined backends by the result of the tokenizer check."""
        counts = {str(tokenises): 0.0 for tokenises in TokenizerMatch}
        for worker in self._of(model):
            counts[worker.tokenises] += worker.joined
        return counts

    def alerts(self, model: ModelName | None = None) -> dict[str, float]:
        """Count the backends by the present alert about their KV events; backends without an alert are left out."""
        counts = {str(alert): 0.0 for alert in KvEventAlert}
        for worker in self._of(model):
            if worker.alert is not None:
                counts[worker.alert] += 1
        return counts

    def passed_over(self, model: ModelName | None = None) -> dict[str, float]:
        """Count the published blocks that the router could not use since it last connected to the events, by reason."""
        counts: Counter[str] = Counter()
        for worker in self._of(model):
            counts.update(worker.passed_over)
        return {str(why): float(blocks) for why, blocks in counts.items()}


class CombinedBackends:
    """Sends attempts to Fleet's own workers or to external backends, by the worker's id.

    Implements `fleet.router.ports.Workers`.
    """

    def __init__(self, own: Workers, external: ExternalBackends) -> None:
        self._own = own
        self._external = external

    def only_acceptable(self, hear: Hear) -> Hear:
        """Return a function that passes events of Fleet's own workers to `hear`, if the workers are acceptable.

        A worker with the name or the model of an external backend is not acceptable.
        """

        def hear_acceptable(event: WorkerEvent) -> None:
            if self._acceptable(event):
                hear(event)

        return hear_acceptable

    def start(self, worker_id: WorkerId, start: Start) -> None:
        (self._external if worker_id in self._external else self._own).start(worker_id, start)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        (self._external if worker_id in self._external else self._own).cancel(worker_id, request_id)

    def _acceptable(self, event: WorkerEvent) -> bool:
        match event:
            case WorkerJoined(description=description):
                taken = description.worker_id in self._external or description.model in self._external.models
                if taken:
                    log.error(
                        "worker ignored, its name or model belongs to one of openai_workers",
                        extra={"worker": description.worker_id, "model": description.model},
                    )
                return not taken
            case StoreChanged():
                return True
            case _:
                return event.worker_id not in self._external
