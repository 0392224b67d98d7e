"""Router demand source: watches the demand that routers report on their control ports.

Rules:

1. Each connection counts as one demand source, and has its own gRPC channel. If a connection fails, the failure is
   reported, and the connection is opened again after a pause.
2. If several router processes listen at one address, each of them needs its own connection. If two connections reach
   the same process, one of them is opened again to reach another process: the program that listens at the address
   (`fleet.local.control_relay`) passes each new connection to the next router process.
"""

import asyncio
from functools import partial
from typing import Any, Never

import grpc

from fleet.core.clock import Clock
from fleet.core.ids import Incarnation
from fleet.net.control.access import ControlAccess
from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.settings import RouterDemandSettings
from fleet.planner.sources.supervision import read_for_ever
from fleet.planner.sources.wire import BadDemandReport, decode_report
from fleet.v1 import control_pb2 as pb
from fleet.v1 import control_pb2_grpc
from kvstore.protocol.range_messages import agree_with_server, range_message
from kvstore.protocol.versions import NoCommonProtocol

AGAIN_SECONDS = 1.0


def source_names(settings: RouterDemandSettings) -> list[str]:
    """Return the names of the demand sources, one for each connection to a router.

    A name is the router's address, followed by `#` and a number if `connections` is greater than 1.
    """
    if settings.connections == 1:
        return list(settings.addresses)
    return [f"{address}#{number}" for address in settings.addresses for number in range(settings.connections)]


class RouterDemandSource:
    """Reads the demand from the control ports of routers. Implements `fleet.planner.sources.ports.DemandSource`."""

    def __init__(
        self, settings: RouterDemandSettings, access: ControlAccess, aggregator: DemandAggregator, clock: Clock
    ) -> None:
        self._settings = settings
        self._access = access
        self._aggregator = aggregator
        self._clock = clock
        self._reached: dict[str, Incarnation] = {}

    def window(self) -> DemandWindow:
        return self._aggregator.window(self._clock.now())

    def sample(self) -> tuple[RecentRequest, ...]:
        return self._aggregator.sample()

    async def run(self) -> Never:
        async with asyncio.TaskGroup() as tasks:
            for name in source_names(self._settings):
                tasks.create_task(self.follow(name, name.partition("#")[0]))
        raise AssertionError("the tasks never end")

    async def follow(self, name: str, address: str) -> Never:
        """Add the reports of one connection to the demand until cancelled; open the connection again if it fails."""
        await read_for_ever(name, partial(self._watch, name, address), self._aggregator, AGAIN_SECONDS)

    async def _watch(self, name: str, address: str) -> str:
        """Add the reports of one connection to the demand until the connection fails; return why it failed."""
        try:
            async with self._access.aio_channel(address, separate=True) as channel:
                reports = control_pb2_grpc.ClusterStub(channel).WatchDemand(
                    pb.WatchDemandRequest(protocols=range_message())
                )
                first = True
                while True:
                    async with asyncio.timeout(self._settings.stale_seconds):
                        message: Any = await reports.read()
                    if message is grpc.aio.EOF:
                        return "the router ended the watch"
                    if first:
                        agree_with_server(message, f"router {message.router_id[:100]} at {address}")
                        first = False
                    report = decode_report(message, self._clock.now())
                    if report.incarnation in (reached for each, reached in self._reached.items() if each != name):
                        return "another connection has reached the same process"
                    self._reached[name] = report.incarnation
                    self._aggregator.hear(name, report, self._clock.now())
        except grpc.aio.AioRpcError as error:
            cause = await asyncio.to_thread(self._access.diagnose, address, "source.credentials")
            return cause or f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"no report for {self._settings.stale_seconds:g} s"
        except (BadDemandReport, NoCommonProtocol) as error:
            return str(error)
        finally:
            self._reached.pop(name, None)
