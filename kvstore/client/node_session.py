"""Node session: performs a client's handshake with a node, and holds its result: the node's limits and data path."""

from collections.abc import Callable, Sequence
from typing import cast

import grpc
from msgspec import Struct
from msgspec.structs import replace

from kvstore.clock import MILLISECOND, Clock, Nanos, seconds
from kvstore.errors import IncompatibleVersion, InvalidArgument, LayoutMismatch, NamespaceUnknown, StoreUnreachable
from kvstore.messages import DataPath
from kvstore.namespace import KvNamespace
from kvstore.net.host import host_id
from kvstore.ports import Transport
from kvstore.protocol import wire
from kvstore.protocol.calls import NodeCalls
from kvstore.protocol.range_messages import range_message
from kvstore.security.authentication import AuthenticationKey
from kvstore.transports.nixl import NixlTransport
from kvstore.transports.shared_memory import SharedMemoryTransport
from kvstore.transports.tcp import TcpTransport
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc

WILDCARDS = ("0.0.0.0", "[::]", "::")  # noqa: S104 - compared with a node's answer, never bound


class NodeSession(Struct, frozen=True, kw_only=True):
    """Result of a handshake with one incarnation of a node.

    `calls` makes the frequent calls, and `transport` is the open data path of the kind `path`. `max_lease`,
    `max_reservation` and `max_hold` limit the duration of leases, write reservations and session pins.
    """

    store_id: str
    protocol: int  # version of the protocol that client and node use (`kvstore.protocol.versions`)
    incarnation: str
    max_lease: Nanos
    max_reservation: Nanos
    max_hold: Nanos
    path: DataPath
    calls: NodeCalls
    transport: Transport
    # Socket of the memory handout if shared memory is preferred but could not be mapped yet; otherwise empty.
    memory: str = ""


def shake_hands(
    stub: pb_grpc.BlockStoreStub,
    address: str,
    namespace: KvNamespace,
    prefer: Sequence[DataPath],
    data_key: AuthenticationKey | None,
    clock: Clock,
    deadline: Nanos,
) -> NodeSession:
    """Agree with the node on the protocol and the namespace, and open the first data path of `prefer` that works.

    Raises:
        StoreUnreachable: The node does not answer by the deadline, no data path works, or the node refuses the client,
            for example because the secret is wrong or too many namespaces are open. If client and node speak no common
            version of the protocol, the error is the subclass IncompatibleVersion.
        LayoutMismatch: The node has a namespace of the same model that differs, for example in its layout or data type, or client and node
            have different format versions. The error names the field that differs.
        InvalidArgument: The namespace is invalid for the node; the error names the field.
    """
    request = pb.HelloRequest(
        namespace=wire.namespace_message(namespace), digest=namespace.digest, protocols=range_message()
    )

    def say_hello(deadline: Nanos) -> pb.HelloResponse:
        timeout_seconds = max(seconds(deadline - clock.now()), 0.001)
        try:
            return stub.Hello(request, timeout=timeout_seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            raise refusal(address, error) from error

    hello = say_hello(deadline)
    protocol = wire.agree_with_node(address, hello)
    here = hello.host_id == host_id()
    failures: dict[DataPath, str] = {}
    for path in prefer:
        try:
            transport = _open(path, hello, say_hello, address, namespace, data_key, clock, deadline)
        except (StoreUnreachable, NamespaceUnknown) as error:
            failures[path] = f"{path}: {error}"
            continue
        return NodeSession(
            store_id=hello.store_id,
            protocol=protocol,
            incarnation=hello.incarnation,
            max_lease=Nanos(hello.max_lease_ms * MILLISECOND),
            max_reservation=Nanos(hello.max_reservation_ms * MILLISECOND),
            max_hold=Nanos(hello.max_hold_ms * MILLISECOND),
            path=path,
            calls=NodeCalls(stub, hello.shm_socket if here else "", clock),
            transport=transport,
            memory=hello.shm_socket if here and DataPath.SHM in failures else "",
        )
    raise StoreUnreachable(f"{address} answers, but no bytes can be moved: {'; '.join(failures.values())}")


def with_shared_memory(session: NodeSession, namespace: KvNamespace, clock: Clock, deadline: Nanos) -> NodeSession:
    """Return a copy of the session that uses shared memory as its data path.

    Raise StoreUnreachable if the memory still cannot be mapped, and NamespaceUnknown if the namespace is not open at
    the node any more, for example because the node has restarted.
    """
    transport = SharedMemoryTransport(session.memory, namespace.digest, namespace.block_bytes, clock, deadline)
    return replace(session, path=DataPath.SHM, transport=transport, memory="")


def refusal(address: str, error: grpc.RpcError) -> Exception:
    """Return the error of `kvstore.errors` for this RPC error of a handshake (the call `Hello`).

    `NodeConnection` also calls this function for the errors of other calls if their status is INVALID_ARGUMENT.
    """
    details = error.details() or ""
    metadata = cast("Sequence[tuple[str, str]]", error.trailing_metadata() or ())
    field = next((value for key, value in metadata if key == wire.FIELD_KEY), "")
    match error.code():
        case grpc.StatusCode.FAILED_PRECONDITION:
            return LayoutMismatch(field, details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(field, details.removeprefix(f"{field}: "))
        case grpc.StatusCode.OUT_OF_RANGE:
            return IncompatibleVersion(details)
        case code:
            return StoreUnreachable(f"{address}: {code.name}: {details}")


def _open(
    path: DataPath,
    hello: pb.HelloResponse,
    say_hello: Callable[[Nanos], pb.HelloResponse],
    address: str,
    namespace: KvNamespace,
    data_key: AuthenticationKey | None,
    clock: Clock,
    deadline: Nanos,
) -> Transport:
    match path:
        case DataPath.SHM:
            if not hello.shm_socket or hello.host_id != host_id():
                raise StoreUnreachable("not on the same host, or not offered")
            return SharedMemoryTransport(hello.shm_socket, namespace.digest, namespace.block_bytes, clock, deadline)
        case DataPath.NIXL:
            offer = wire.parse_nixl(hello)
            if offer is None:
                raise StoreUnreachable("not offered")
            return NixlTransport(
                offer, namespace.block_bytes, clock, deadline, lambda until: wire.parse_nixl(say_hello(until))
            )
        case DataPath.TCP:
            if not hello.tcp_address:
                raise StoreUnreachable("not offered")
            data_address = reachable(hello.tcp_address, address)
            return TcpTransport(data_address, namespace.digest, namespace.block_bytes, clock, deadline, data_key)


def reachable(data_address: str, control_address: str) -> str:
    """Return the address at which this client reaches the node's TCP data server.

    A node that listens on all its addresses reports a wildcard as its host. The host of the control address is then
    used instead, or 127.0.0.1 if that is a Unix socket.
    """
    host, _, port = data_address.rpartition(":")
    if host not in WILDCARDS:
        return data_address
    control_host = "127.0.0.1" if control_address.startswith("unix:") else control_address.rpartition(":")[0]
    return f"{control_host}:{port}"
