"""Demand watch: the method `WatchDemand` of `fleet.v1.Cluster`, which reports to planners every second.

Rules:

1. A report is made only when its caller can receive it. So a slow caller gets the latest report, and no reports queue up.
2. At most `MOST_WATCHERS` callers watch at a time, because the router computes a report for each of them every second.
   Further callers are refused.
3. Each report contains a sample of the requests that ended since the same caller's last report.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import grpc
from msgspec import structs

from fleet.core.clock import Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import Incarnation, WorkerId
from fleet.frontend.overflow import OverflowOutcome, OverflowReports
from fleet.net.grpc.calls import Context, answer_call, parse_message, send_message, serialize
from fleet.net.grpc.versions import agree_with_caller
from fleet.planner.sources.wire import encode_report
from fleet.router.api import RouterApi
from fleet.v1 import control_pb2 as pb
from kvstore.protocol.range_messages import range_message

REPORT_SECONDS = 1.0
MOST_WATCHERS = 16


class DemandWatch:
    """Serves the method `WatchDemand`: sends reports about the demand of one router process to each caller."""

    def __init__(
        self,
        router: RouterApi,
        router_id: str,
        incarnation: Incarnation,
        speeds: Callable[[], Mapping[WorkerId, float]] = dict,
        every_seconds: float = REPORT_SECONDS,
        overflow: OverflowReports | None = None,
    ) -> None:
        """Create the service.

        Args:
            router: The router.
            router_id: Name of the router.
            incarnation: Id of this run of the router process.
            speeds: Returns the learned speed of each worker, relative to its hardware profile.
            every_seconds: Time between two reports.
            overflow: Reports of the hosted endpoints; None if there are none.
        """
        self._router = router
        self._router_id = router_id
        self._incarnation = incarnation
        self._speeds = speeds
        self._every = every_seconds
        self._overflow = overflow
        self._watchers = 0
        self._began, _, _ = router.demand()

    def methods(self) -> dict[str, Any]:
        stream: Any = grpc.unary_stream_rpc_method_handler  # Any, because grpc's stubs reject coroutines
        return {"WatchDemand": stream(self._watch, response_serializer=serialize)}

    def report(self, after: int) -> tuple[int, DemandReport]:
        """Return the number of the latest request in the router's sample of ended requests, and a report of the present demand.

        The report contains the requests of the sample with a number above `after`. A caller passes 0 first, and then the number
        that the previous call returned.
        """
        now, models, workers = self._router.demand()
        speeds = self._speeds()
        last, recent = self._router.recent_requests(after)
        return last, DemandReport(
            router=self._router_id,
            incarnation=self._incarnation,
            at=now,
            uptime=Nanos(now - self._began),
            models=models if self._overflow is None else _with_overflow(models, self._overflow),
            workers=tuple(structs.replace(each, speed=speeds.get(each.worker_id, 1.0)) for each in workers),
            recent=recent,
        )

    async def _watch(self, content: bytes, context: Context) -> None:
        async def follow() -> Never:
            await agree_with_caller(parse_message(pb.WatchDemandRequest, content), f"router {self._router_id}", context)
            if self._watchers >= MOST_WATCHERS:
                message = f"{MOST_WATCHERS} callers watch the demand already; one of them must end first"
                raise RequestRejected(Reason.QUEUE_FULL, message)
            self._watchers += 1
            try:
                last, is_first = 0, True
                while True:
                    last, report = self.report(last)
                    encoded = encode_report(report)
                    if is_first:  # only the first report states the protocol versions, because they do not change
                        encoded.protocols.CopyFrom(range_message())
                        is_first = False
                    await send_message(context, encoded)
                    await asyncio.sleep(self._every)
            finally:
                self._watchers -= 1

        await answer_call(follow(), context)


def _with_overflow(models: Sequence[ModelDemand], overflow: OverflowReports) -> tuple[ModelDemand, ...]:
    """Return the demand of all models with the number and cost of the requests that hosted endpoints have answered.

    A model that has a hosted endpoint and is not in `models` is added.
    """
    hosted = {each.model: each for each in overflow.status()}
    known = {each.model: each for each in models} | {
        model: ModelDemand(model=model) for model in hosted if all(each.model != model for each in models)
    }
    return tuple(
        structs.replace(
            each,
            overflowed=hosted[model].outcomes[OverflowOutcome.SERVED],
            overflow_dollars=hosted[model].dollars,
        )
        if model in hosted
        else each
        for model, each in known.items()
    )
