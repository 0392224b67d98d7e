"""Port to the peer routers for the frontends and the selection service; `fleet.peers.routers` implements it."""

from collections.abc import Mapping
from typing import Protocol

from fleet.core.ids import RequestId
from fleet.router.settings.router import Thresholds
from fleet.v1 import control_pb2, selection_pb2


class PeerRoutersApi(Protocol):
    """Port to the peer routers, with the methods that the frontends and the selection service need."""

    async def explained(self, request_id: RequestId) -> control_pb2.ExplainResponse | None: ...

    def tuned(self, thresholds: Thresholds) -> None: ...

    async def metrics(self) -> Mapping[str, str]:
        """Return the metrics page of each router process that listens on the same port and answers in time, by router id."""
        ...

    async def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None: ...

    async def released(self, release: selection_pb2.ReleaseRequest) -> None: ...
