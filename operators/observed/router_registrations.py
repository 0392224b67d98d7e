"""Router registrations: asks a router for its workers by the gRPC service `fleet.v1.Cluster` on its control port."""

import grpc

from fleet.net.control.access import ControlAccess
from fleet.v1 import control_pb2, control_pb2_grpc
from kvstore.security.authentication import Purpose
from kvstore.security.channels import LoadedCredentials
from operators.observed.registrations import WorkerRegistration

CALL_SECONDS = 2.0
SERVING = "serving"


class RouterRegistrations:
    """Asks routers over gRPC which workers they know. Implements `operators.observed.router_poller.RouterReports`."""

    async def workers(self, address: str, secret: bytes) -> tuple[WorkerRegistration, ...] | None:
        access = ControlAccess(LoadedCredentials(secret=secret, purpose=Purpose.ROUTER_CONTROL))
        async with access.aio_channel(address) as channel:
            stub = control_pb2_grpc.ClusterStub(channel)
            try:
                answer = await stub.Status(control_pb2.StatusRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError:
                return None
        return tuple(
            WorkerRegistration(pod=worker.worker_id, warm_blocks=worker.cached_blocks)
            for pool in answer.pools
            for worker in pool.workers
            if worker.state == SERVING
        )
