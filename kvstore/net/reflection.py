"""gRPC server reflection v1, made from the messages of v1alpha under another package name.

The library `grpcio-reflection` serves only v1alpha, but newer clients ask for v1 first. The protocol is described at
https://github.com/grpc/grpc/blob/master/doc/server-reflection.md.
"""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA: str = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


def add_descriptor() -> None:
    """Add the descriptors of v1 to the default descriptor pool, where clients can request them."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        old, new = reflection_pb2.DESCRIPTOR.package, V1.rpartition(".")[0]
        described = descriptor_pb2.FileDescriptorProto()
        described.ParseFromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        described.name, described.package = "grpc/reflection/v1/reflection.proto", new
        for message in described.message_type:
            for field in filter(lambda each: each.type_name, message.field):
                field.type_name = field.type_name.replace(f".{old}.", f".{new}.")
        for service in described.service:
            for method in service.method:
                method.input_type = method.input_type.replace(f".{old}.", f".{new}.")
                method.output_type = method.output_type.replace(f".{old}.", f".{new}.")
        pool.Add(described)


def v1_handler(names: Sequence[str]) -> grpc.GenericRpcHandler:
    """Return the handler of v1 for a server of `grpc.aio`; `names` are the full names of its services."""
    add_descriptor()
    answers = reflection.aio.ReflectionServicer(names)
    method = grpc.stream_stream_rpc_method_handler(
        answers.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method})
