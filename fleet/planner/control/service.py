"""Control port of a planner: serves the gRPC services `fleet.v1.Planner`, health and reflection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Never, Protocol

import grpc
import msgspec
from google.protobuf.message import Message

from fleet.core.errors import Reason, RequestRejected
from fleet.net.control.access import ControlAccess
from fleet.net.control.address import control_folder, private_folder
from fleet.net.grpc.calls import (
    Context,
    answer_call,
    parse_message,
    send_message,
    serialize,
    unary_context_handler,
    unary_handler,
)
from fleet.net.grpc.port import open_port
from fleet.net.grpc.versions import agree_with_caller
from fleet.planner.messages import PlanId
from fleet.planner.records import PlannerStatus, PlanRecord
from fleet.v1 import planner_pb2 as pb
from kvstore.net.addresses import unix_path
from kvstore.net.socket_guard import SocketGuard
from kvstore.protocol.range_messages import range_message

PLANNER = "fleet.v1.Planner"
MOST_WATCHERS = 16
SHOW_SECONDS = 1.0


class ShownPlanner(Protocol):
    """Port to a planner: lists the methods of `fleet.planner.loop.PlannerLoop` that the control port calls."""

    def status(self) -> PlannerStatus: ...

    def explain(self, plan: PlanId) -> PlanRecord | None: ...


class ShownPlanners(Protocol):
    """Port that finds a planner of this process by the name of its deployment."""

    def planner(self, deployment: str) -> ShownPlanner:
        """Return the planner of a deployment. If the name is empty, return the only planner of this process.

        Raises:
            RequestRejected: No planner plans a deployment of this name, or the name is empty and the process does not
                have exactly one planner.
        """
        ...


class OnlyPlanner:
    """Returns the only planner of a process. Implements `ShownPlanners`."""

    def __init__(self, planner: ShownPlanner) -> None:
        self._planner = planner

    def planner(self, deployment: str) -> ShownPlanner:
        if deployment:
            message = "deployment: this planner has one set of pools, which has no name; leave the field empty"
            raise RequestRejected(Reason.REQUEST_NOT_FOUND, message, field="deployment")
        return self._planner


def default_address() -> str:
    """Return the default control address: a Unix socket of this user."""
    return f"unix:{control_folder() / 'planner.sock'}"


class PlannerService:
    """Answers gRPC calls that show, watch and explain the plans of this process."""

    def __init__(self, planners: ShownPlanners) -> None:
        self._planners = planners
        self._watchers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        stream: Any = grpc.unary_stream_rpc_method_handler  # the type stubs do not accept coroutines here
        methods = {
            "ShowPlan": unary_context_handler(self._show),
            "WatchPlan": stream(self._watch, response_serializer=serialize),
            "ExplainPlan": unary_handler(self._explain),
        }
        return grpc.method_handlers_generic_handler(PLANNER, methods)

    async def _show(self, content: bytes, context: Context) -> Message:
        asked = parse_message(pb.ShowPlanRequest, content)
        await agree_with_caller(asked, "this planner", context)
        return self._document(asked.deployment)

    async def _explain(self, content: bytes) -> Message:
        asked = parse_message(pb.ExplainPlanRequest, content)
        plan, planner = asked.plan_id, self._planners.planner(asked.deployment)
        record = await asyncio.to_thread(planner.explain, PlanId(plan))
        if record is None:
            message = f"plan_id: {plan[:100]!r} is no plan of this planner, or its record was dropped for later ones"
            raise RequestRejected(Reason.REQUEST_NOT_FOUND, message, field="plan_id")
        return pb.PlannerDocument(json=msgspec.json.encode(record))

    async def _watch(self, content: bytes, context: Context) -> None:
        async def follow() -> Never:
            asked = parse_message(pb.ShowPlanRequest, content)
            await agree_with_caller(asked, "this planner", context)
            if self._watchers >= MOST_WATCHERS:
                raise RequestRejected(Reason.QUEUE_FULL, f"{MOST_WATCHERS} callers watch this planner already")
            self._watchers += 1
            try:
                while True:
                    await send_message(context, self._document(asked.deployment))
                    await asyncio.sleep(SHOW_SECONDS)
            finally:
                self._watchers -= 1

        await answer_call(follow(), context)

    def _document(self, deployment: str) -> pb.PlannerDocument:
        status = msgspec.json.encode(self._planners.planner(deployment).status())
        return pb.PlannerDocument(json=status, protocols=range_message())


@asynccontextmanager
async def open_planner_port(listen: str, access: ControlAccess, planners: ShownPlanners) -> AsyncIterator[str]:
    """Serve the control port until the context ends; yield the address at which it listens.

    Raises:
        ConfigurationRefused: The address is malformed, in use, or open to other users.
    """
    if not listen:
        private_folder()
        listen = default_address()
    async with AsyncExitStack() as held:
        guard = None if unix_path(listen) else SocketGuard()
        server = access.server(guard)
        server.add_generic_rpc_handlers((PlannerService(planners).handler(),))

        bind = access.binder(held)
        port = open_port(server, listen, (PLANNER,), lambda: True, setting="listen", bind=bind, guard=guard)
        yield await held.enter_async_context(port)
