"""Calls of a gRPC client that knows the API from the server's reflection alone, as grpcurl does.

Usage: python grpc_reflection_calls.py ADDRESS MODEL MODEL_FOLDER SCRATCH, in the environment of grpcio-reflection.
"""

import sys
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from reporting import report_calls

SERVICE = "fleet.v1.Inference"
SECONDS = 60.0


def main(address: str, model: str) -> None:
    with grpc.insecure_channel(address) as channel:
        report_calls(calls(channel, model))


def calls(channel: Any, model: str) -> dict[str, Callable[[], object]]:
    database = ProtoReflectionDescriptorDatabase(channel)

    def method(name: str) -> Any:
        return DescriptorPool(database).FindServiceByName(SERVICE).methods_by_name[name]

    def invoke(name: str, fields: dict[str, Any], *, streams: bool) -> Any:
        found = method(name)
        open_call = channel.unary_stream if streams else channel.unary_unary
        request = GetMessageClass(found.input_type)
        call = open_call(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        return call(request(**fields), timeout=SECONDS)

    def lists_through_v1() -> bool:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,  # v1alpha's message, which has the same encoding as v1's
        )
        (answer,) = call(iter([ServerReflectionRequest(list_services="*")]), timeout=SECONDS)
        return SERVICE in [each.name for each in answer.list_services_response.service]

    def generates() -> bool:
        fields = {"model": model, "text": "Once upon a time", "sampling": {"max_tokens": 4, "ignore_eos": True}}
        *_, last = invoke("Generate", fields, streams=True)
        return bool(last.HasField("finished"))

    return {
        "list (v1alpha)": lambda: SERVICE in database.get_services(),
        "list (v1)": lists_through_v1,
        "describe": lambda: (
            "max_tokens" in method("Generate").input_type.fields_by_name["sampling"].message_type.fields_by_name
        ),
        "ListModels": lambda: model in str(invoke("ListModels", {}, streams=False)),
        "Generate": generates,
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])
