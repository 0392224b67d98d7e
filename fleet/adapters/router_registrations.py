"""What routers say of their workers, for the operator: by `fleet.v1.Cluster` on the control Service of each deployment."""

from collections.abc import Callable

import grpc

from fleet.adapters.grpc_options import CHANNEL_OPTIONS
from fleet.v1 import control_pb2, control_pb2_grpc
from operators.children import CONTROL
from operators.registrations import Registration

CALL_SECONDS = 2.0
SERVING = "serving"


def control_address(namespace: str, service: str) -> str:
    """As pods of any namespace dial it."""
    return f"{service}.{namespace}:{CONTROL}"


class RouterRegistrations:
    """Implements `operators.ports.Routers`."""

    def __init__(self, address: Callable[[str, str], str] = control_address) -> None:
        """`address` says where a Service of a namespace is dialled."""
        self._address = address

    async def workers(self, namespace: str, service: str) -> tuple[Registration, ...] | None:
        async with grpc.aio.insecure_channel(self._address(namespace, service), options=CHANNEL_OPTIONS) as channel:
            stub = control_pb2_grpc.ClusterStub(channel)
            try:
                answer = await stub.Status(control_pb2.StatusRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError:
                return None
        return tuple(
            Registration(pod=worker.worker_id, warm_blocks=worker.cached_blocks)
            for pool in answer.pools
            for worker in pool.workers
            if worker.state == SERVING
        )
