"""Client of an endpoint picker under test: sends the messages of a gateway, and reads the picker's decisions.

It accepts every form that the protocol allows, also those that Fleet's picker does not use.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct as Fields
from msgspec import Struct

from fleet.v1 import ext_proc_pb2 as pb

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
METADATA = "envoy.lb"
SUBSET_METADATA = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
COMPLETIONS = "/v1/completions"
REPLACING = {pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD, pb.HeaderValueOption.OVERWRITE_IF_EXISTS}

ENDPOINT = re.compile(r"(?P<host>[0-9.]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


EARLY_SECONDS = 0.25  # time in which a picker may refuse a subset before the body is sent


class Violation(Exception):
    """Raised if the picker broke the protocol. The message says how."""


class NotApplicable(Exception):
    """Raised if a case cannot test this picker. The message says why."""


class Decision(Struct):
    """Holds the picker's decision about a request: endpoints, or an immediate answer."""

    endpoints: list[str] = []
    headers: dict[str, str] = {}
    appended: list[str] = []
    """Headers that the picker adds without replacing those of the client."""

    metadata: dict[str, object] = {}
    pieces: list[bytes] = []
    status: int = 0
    """Status of the immediate answer; 0: the request goes on."""

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def destination(self) -> str:
        """Return the header with the endpoints.

        Raises:
            Violation: The request does not go on, or has no such header.
        """
        if self.status:
            raise Violation(f"the request was answered with {self.status}, but an endpoint is ready")
        if DESTINATION not in self.headers:
            raise Violation(f"the header {DESTINATION} is missing")
        return self.headers[DESTINATION]


class PickerOptions(Struct, frozen=True, kw_only=True):
    """Holds the options for requests to the picker."""

    model: str = "tiny"
    api_key: str = ""
    seconds: float = 10.0
    """Time limit of one case."""

    overload: int = 0
    """Number of simultaneous requests of which the picker must reject some; 0: unknown."""


class PickerUnderTest:
    """Represents the picker, and the known endpoints of its pool."""

    def __init__(self, channel: grpc.aio.Channel, options: PickerOptions, endpoints: Iterable[str] = ()) -> None:
        self.channel = channel
        self.options = options
        self.endpoints = list(endpoints)

    def exchange(self) -> "Exchange":
        """Open the call of one HTTP request."""
        call = self.channel.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        return Exchange(call(timeout=self.options.seconds), self.options)

    def body(self, prompt: str = "once upon a time", **fields: object) -> bytes:
        """Return the body of a completion."""
        return json.dumps({"model": self.options.model, "prompt": prompt, "max_tokens": 8} | fields).encode()

    async def ask(self, subset: object = None) -> Decision:
        """Return the decision about one short request, which is then cancelled."""
        exchange = self.exchange()
        await exchange.head(subset=subset)
        deciding = asyncio.create_task(exchange.decision())
        if subset is not None:
            # A picker may refuse a subset before the body. If the call ends during a write, gRPC for Python loses the answer.
            await asyncio.wait({deciding}, timeout=EARLY_SECONDS)
        if not deciding.done():
            await exchange.pieces(self.body())
        decision = await deciding
        exchange.cancel()
        return decision

    def two_endpoints(self) -> tuple[str, str]:
        """Return two endpoints of the pool.

        Raises:
            NotApplicable: Only one is known.
        """
        if len(self.endpoints) < 2:
            raise NotApplicable(f"needs two endpoints; known: {', '.join(self.endpoints) or 'none'}")
        return self.endpoints[0], self.endpoints[1]


class Exchange:
    """Sends one HTTP request and its answer to the picker, as a gateway does."""

    def __init__(
        self, call: "grpc.aio.StreamStreamCall[pb.ProcessingRequest, pb.ProcessingResponse]", options: PickerOptions
    ) -> None:
        self._call = call
        self._options = options
        self._trailers = False
        self._bodiless = False

    async def say(self, **fields: object) -> None:
        """Send a message. If the picker no longer takes messages, it is lost, and the next read raises the cause."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(pb.ProcessingRequest(**fields))

    async def head(
        self,
        path: str = COMPLETIONS,
        *,
        method: str = "POST",
        subset: object = None,
        ends: bool = False,
        **headers: str,
    ) -> None:
        """Send the headers of the request; `subset`: the value of the subset hint."""
        told = {":method": method, ":path": path, ":authority": "picker.test", "content-type": "application/json"}
        if self._options.api_key:
            told["authorization"] = f"Bearer {self._options.api_key}"
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        metadata = pb.Metadata()
        if subset is not None:
            metadata.filter_metadata[SUBSET_METADATA].update({SUBSET: subset})
        self._bodiless = ends
        modes = pb.ProtocolConfiguration(
            request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
        )
        await self.say(
            request_headers=pb.HttpHeaders(headers=header_map(told), end_of_stream=ends),
            metadata_context=metadata,
            protocol_config=modes,
        )

    async def pieces(self, *pieces: bytes, ends: bool = True) -> None:
        """Send the body of the request in these pieces."""
        for number, piece in enumerate(pieces, 1):
            await self.say(request_body=pb.HttpBody(body=piece, end_of_stream=ends and number == len(pieces)))

    async def trailers(self) -> None:
        """End the request by trailers."""
        self._trailers = True
        await self.say(request_trailers=pb.HttpTrailers(trailers=header_map({"x-checksum": "1"})))

    async def decision(self) -> Decision:
        """Return the decision about the request, with the body that the picker passes on.

        Raises:
            Violation: The picker ended the call, or sent a message that is not allowed at this point.
        """
        decision, headed, whole = Decision(), False, self._bodiless
        while not (headed and whole):
            response = await self._read()
            match kind := response.WhichOneof("response"):
                case "immediate_response":
                    decision.status = response.immediate_response.status.code
                    _take_headers(decision, response.immediate_response.headers)
                    return decision
                case "request_headers" if not headed:
                    headed = True
                    _take_headers(decision, response.request_headers.response.header_mutation)
                    decision.metadata = _plain(response.dynamic_metadata)
                    decision.endpoints = [
                        each.strip() for each in decision.headers.get(DESTINATION, "").split(",") if each.strip()
                    ]
                case "request_body" if headed and not whole:
                    mutation = response.request_body.response.body_mutation
                    if mutation.WhichOneof("mutation") != "streamed_response":
                        raise Violation("a piece of a body FULL_DUPLEX_STREAMED did not come back as streamed_response")
                    decision.pieces.append(mutation.streamed_response.body)
                    whole = mutation.streamed_response.end_of_stream
                case "request_trailers" if headed and self._trailers:
                    whole = True
                case _:
                    raise Violation(f"{kind or 'an empty message'} came in the wrong place")
        return decision

    async def answer_head(self, *, served: str = "", ends: bool = False) -> None:
        """Send the headers of the answer, and expect the picker to let them pass."""
        metadata = pb.Metadata()
        if served:
            metadata.filter_metadata[METADATA].update({SERVED: served})
        headers = header_map({":status": "200", "content-type": "text/event-stream"})
        await self.say(response_headers=pb.HttpHeaders(headers=headers, end_of_stream=ends), metadata_context=metadata)
        await self._expect("response_headers")

    async def answer_pieces(self, *pieces: bytes, ends: bool = True) -> bytes:
        """Send the body of the answer in pieces, and return the body that the client gets."""
        passed = b""
        for number, piece in enumerate(pieces, 1):
            last = ends and number == len(pieces)
            await self.say(response_body=pb.HttpBody(body=piece, end_of_stream=last))
            response = await self._expect("response_body")
            passed += response.response_body.response.body_mutation.streamed_response.body
        return passed

    async def answer_trailers(self) -> None:
        """End the answer by trailers, and expect the picker to let them pass."""
        await self.say(response_trailers=pb.HttpTrailers(trailers=header_map({"x-checksum": "1"})))
        await self._expect("response_trailers")

    async def over(self) -> None:
        """End the call, and expect the picker to end it without an error."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass
        if (code := await self._call.code()) is not grpc.StatusCode.OK:
            raise Violation(f"the call ended with {code.name}: {await self._call.details()}")

    def cancel(self) -> None:
        """Cancel the call, as a gateway does when its client disconnects."""
        self._call.cancel()

    async def _expect(self, kind: str) -> pb.ProcessingResponse:
        response = await self._read()
        if (came := response.WhichOneof("response")) != kind:
            raise Violation(f"{came or 'an empty message'} came where {kind} was expected")
        return response

    async def _read(self) -> pb.ProcessingResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise Violation(f"the call failed with {error.code().name}: {error.details()}") from None
        if response is grpc.aio.EOF:
            raise Violation(f"the picker ended the call with {(await self._call.code()).name} before its decision")
        return response


def header_map(headers: dict[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def _take_headers(decision: Decision, mutation: pb.HeaderMutation) -> None:
    for option in mutation.set_headers:
        name = option.header.key.lower()
        if name in decision.headers:
            raise Violation(f"the header {name} is set twice")
        decision.headers[name] = option.header.raw_value.decode() or option.header.value
        if option.append_action not in REPLACING:
            decision.appended.append(name)


def _plain(fields: Fields) -> dict[str, object]:
    return dict(MessageToDict(fields))


def checked_endpoints(endpoints: Sequence[str]) -> None:
    """Check the form of endpoints.

    Raises:
        Violation: There is no endpoint, two are equal, or one is not ``ip:port`` (an IPv6 address needs brackets).
    """
    if not endpoints:
        raise Violation(f"{DESTINATION} names no endpoint")
    for each in endpoints:
        match = ENDPOINT.fullmatch(each)
        try:
            if match is None or not 0 < int(match["port"]) < 65536:
                raise ValueError
            ip_address(match["host"].strip("[]"))
        except ValueError:
            raise Violation(f"{each!r} is not ip:port") from None
    if len(set(endpoints)) < len(endpoints):
        raise Violation(f"an endpoint is named twice: {', '.join(endpoints)}")
