"""The startup, liveness and readiness probes of a kubelet."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.kube.kubelet.network import Network

Object = dict[str, Any]
Execute = Callable[[list[str]], Awaitable[int]]


async def succeeds(probe: Object, address: str, ports: Mapping[str, int], network: Network, execute: Execute) -> bool:
    """Return whether one probe succeeds within its timeout."""
    try:
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            match probe:
                case {"httpGet": asked}:
                    return await _http(asked, address, ports, network)
                case {"tcpSocket": asked}:
                    _, writer = await network.dial(address, port_of(asked["port"], ports))
                    writer.transport.abort()
                    return True
                case {"grpc": asked}:
                    return await _grpc(asked, address, network)
                case {"exec": asked}:
                    return await execute(asked["command"]) == 0
                case _:
                    return True
    except (OSError, TimeoutError, grpc.aio.AioRpcError):
        return False


def port_of(port: int | str, ports: Mapping[str, int]) -> int:
    return port if isinstance(port, int) else ports[port]


async def _http(asked: Object, address: str, ports: Mapping[str, int], network: Network) -> bool:
    reader, writer = await network.dial(address, port_of(asked["port"], ports))
    try:
        path = asked.get("path", "/")
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()
        return len(status) > 1 and 200 <= int(status[1]) < 400
    finally:
        writer.transport.abort()


async def _grpc(asked: Object, address: str, network: Network) -> bool:
    proxy, near = await network.lead((address, asked["port"]))
    try:
        async with grpc.aio.insecure_channel(near) as channel:
            question = health_pb2.HealthCheckRequest(service=asked.get("service") or "")
            answer = await health_pb2_grpc.HealthStub(channel).Check(question)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await proxy.close()
