"""Combined backends: Fleet's own workers and the external backends behind one port."""

import logging

from fleet.backends.external.backend import Hear
from fleet.backends.external.workers import ExternalBackends
from fleet.core.ids import RequestId, WorkerId
from fleet.core.work import Start
from fleet.frontend.text.tokenizer_check import TokenizerCheck
from fleet.router.messages import StoreChanged, WorkerEvent, WorkerJoined
from fleet.router.ports import Workers

log = logging.getLogger(__name__)


class CombinedBackends:
    """Fleet's own workers and the external backends together. Implements `fleet.router.ports.Workers`."""

    def __init__(self, own: Workers, external: ExternalBackends, tokenizer_check: TokenizerCheck | None = None) -> None:
        self._own = own
        self._external = external
        self._tokenizer_check = tokenizer_check

    def only_acceptable(self, hear: Hear) -> Hear:
        """Return `hear` without events of own workers that use the name or the model of an external backend."""

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
                return not taken and (self._tokenizer_check is None or self._tokenizer_check.accepts(description))
            case StoreChanged():
                return True
            case _:
                return event.worker_id not in self._external
