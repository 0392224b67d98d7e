"""Router API: what the frontends, the gateway and the peers use of `fleet.router.server.RouterServer`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import ModelCard
from fleet.router.kv_index.peer_prompts import PromptAnnouncements
from fleet.router.messages import Arrived, PeerEvent, ReservationTotals, WorkerEvent
from fleet.router.placement.decision import Decision
from fleet.router.server import RequestListener, RequestStream
from fleet.router.sessions import SessionTable
from fleet.router.settings.router import Thresholds
from fleet.router.state.snapshot import Explanation, RemotePrefillSnapshot, RouterSnapshot


class RouterApi(Protocol):
    """The router as its callers see it; `RouterServer` documents the methods."""

    on_change: Callable[[], None] | None

    @property
    def sessions(self) -> SessionTable: ...

    @property
    def prompts(self) -> PromptAnnouncements: ...

    def submit(self, arrived: Arrived) -> AbstractAsyncContextManager[RequestStream]: ...

    def open(self, arrived: Arrived, stream: RequestListener) -> None: ...

    def close(self, request_id: RequestId, stream: RequestListener) -> None: ...

    def hear(self, event: WorkerEvent | PeerEvent) -> None: ...

    def models(self) -> tuple[ModelCard, ...]: ...

    def status(self) -> RouterSnapshot: ...

    def booked(self) -> Mapping[WorkerId, ReservationTotals]: ...

    def decision(self, request_id: RequestId) -> Decision | None: ...

    def explain(self, request_id: RequestId) -> Explanation | None: ...

    def address(self, worker_id: WorkerId) -> str: ...

    def addresses(self) -> Mapping[WorkerId, str]: ...

    def places(self, model: ModelName) -> int: ...

    def thresholds(self) -> Thresholds: ...

    def tune(self, thresholds: Thresholds) -> None: ...

    def remote_prefill(self) -> RemotePrefillSnapshot: ...
