"""Gateway for tests: sends an endpoint picker the `ext_proc` messages that Envoy would send."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc
from google.protobuf.struct_pb2 import Struct as Fields
from msgspec import Struct

from fleet.gateway.ext_proc import DESTINATION, NAMESPACE, PREFILL, SERVED, SERVICE, SUBSET, SUBSET_NAMESPACE
from fleet.v1 import ext_proc_pb2 as pb
from fleet.v1.ext_proc_pb2_grpc import ExternalProcessorStub

FULL_DUPLEX = pb.ProtocolConfiguration(
    request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class PickerAnswer(Struct):
    """Holds the picker's decision about a request: forward it to endpoints, or answer it at once."""

    endpoints: list[str] = []
    prefill: str | None = None
    removed: list[str] = []
    body: bytes = b""
    pieces: int = 0
    whole: bool = False
    status: int = 0
    headers: dict[str, str] = {}

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


class GatewayRequest:
    """Plays the gateway for one request: passes the request and its answer to the picker."""

    def __init__(self, call) -> None:
        self.call = call

    async def say(self, **fields) -> None:
        await self.call.write(pb.ProcessingRequest(**fields))

    async def hears(self) -> pb.ProcessingResponse | None:
        """Return the picker's next message; None if the picker has ended the call."""
        answer = await self.call.read()
        return None if answer is grpc.aio.EOF else answer

    async def head(
        self,
        path: str = COMPLETIONS,
        *,
        subset: object = None,
        whole: bool = False,
        modes: pb.ProtocolConfiguration | None = FULL_DUPLEX,
        **headers: str,
    ) -> None:
        told = {":method": "POST", ":path": path, **{name.replace("_", "-"): value for name, value in headers.items()}}
        metadata = pb.Metadata()
        if subset is not None:
            metadata.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: subset})
        await self.say(
            request_headers=pb.HttpHeaders(headers=a_header_map(told), end_of_stream=whole),
            metadata_context=metadata,
            protocol_config=modes,
        )

    async def body(self, *pieces: bytes, ends: bool = True) -> None:
        for number, piece in enumerate(pieces):
            last = ends and number == len(pieces) - 1
            await self.say(request_body=pb.HttpBody(body=piece, end_of_stream=last))

    async def picked(self) -> PickerAnswer:
        """Collect the picker's decision about the request."""
        picked = PickerAnswer()
        while not picked.whole:
            answer = await self.hears()
            assert answer is not None, "the picker ended the call"
            match answer.WhichOneof("response"):
                case "immediate_response":
                    now = answer.immediate_response
                    picked.status, picked.body, picked.whole = now.status.code, now.body, True
                    picked.headers = headers_set_by(now.headers)
                case "request_headers":
                    mutation = answer.request_headers.response.header_mutation
                    picked.headers = headers_set_by(mutation)
                    picked.removed = list(mutation.remove_headers)
                    picked.endpoints = picked.headers[DESTINATION].split(",")
                    picked.prefill = picked.headers.get(PREFILL)
                    assert answer.dynamic_metadata == fields({NAMESPACE: {DESTINATION: picked.headers[DESTINATION]}})
                    picked.whole = "content-length" not in picked.headers and self.has_no_body
                case "request_body":
                    piece = answer.request_body.response.body_mutation.streamed_response
                    picked.body += piece.body
                    picked.pieces += 1
                    picked.whole = piece.end_of_stream
                case "request_trailers":
                    picked.whole = True
        return picked

    has_no_body = False

    async def ask(self, body: bytes, path: str = COMPLETIONS, **head) -> PickerAnswer:
        """Send the whole request, and return the picker's decision. If the picker ends the call early, send no more."""
        await self.head(path, **head)
        async with asyncio.TaskGroup() as tasks:
            picked = tasks.create_task(self.picked())
            with suppress(grpc.aio.AioRpcError):
                await self.body(body)
        return picked.result()

    async def answer_begins(
        self, content_type: str = "text/event-stream", *, served: str = "", whole: bool = False
    ) -> None:
        metadata = pb.Metadata()
        if served:
            metadata.filter_metadata[NAMESPACE].update({SERVED: served})
        headers = a_header_map({":status": "200", "content-type": content_type})
        await self.say(response_headers=pb.HttpHeaders(headers=headers, end_of_stream=whole), metadata_context=metadata)
        assert (await self.hears()).WhichOneof("response") == "response_headers"

    async def answer_goes_on(self, piece: bytes, *, ends: bool = False) -> bytes:
        """Pass a piece of the answer to the picker, and return the bytes that the client gets for it."""
        await self.say(response_body=pb.HttpBody(body=piece, end_of_stream=ends))
        passed = (await self.hears()).response_body.response.body_mutation.streamed_response
        assert passed.end_of_stream is ends
        return passed.body

    async def over(self) -> None:
        """End the call as the gateway, and check that the picker ends it too."""
        await self.call.done_writing()
        assert await self.hears() is None


class Gateway:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ExternalProcessorStub(channel)
        self.channel = channel

    def request(self) -> GatewayRequest:
        return GatewayRequest(self._stub.Process(timeout=30))

    def raw(self):
        """Open a call whose messages are raw bytes."""
        return self.channel.stream_stream(f"/{SERVICE}/Process")(timeout=30)


@asynccontextmanager
async def a_gateway(address: str) -> AsyncIterator[Gateway]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Gateway(channel)


def a_header_map(headers: dict[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def headers_set_by(mutation: pb.HeaderMutation) -> dict[str, str]:
    overwrite = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert all(each.append_action == overwrite for each in mutation.set_headers)
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def fields(content: dict) -> Fields:
    made = Fields()
    made.update(content)
    return made


def a_completion(prompt: str | Sequence[int] = "once upon a time", *, model: str = "tiny", **others) -> bytes:
    return json.dumps({"model": model, "prompt": prompt, "max_tokens": 8, **others}).encode()
