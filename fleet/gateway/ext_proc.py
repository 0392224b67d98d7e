"""Messages between a gateway and an endpoint picker (endpoint picker protocol 1.0): parsing and building, without I/O.

Names of headers and metadata come from https://github.com/kubernetes-sigs/gateway-api-inference-extension
(docs/proposals/004-endpoint-picker-protocol). The header for the prefill worker is llm-d's, whose sidecars read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from google.protobuf.struct_pb2 import Struct as Fields

from fleet.core.errors import RequestRejected
from fleet.net.http.errors import error_body
from fleet.net.status_codes import REASON_STATUSES
from fleet.router.settings.endpoint_picker import endpoint_in
from fleet.v1 import ext_proc_pb2 as pb

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
PREFILL = "x-prefiller-host-port"

LONGEST_ENDPOINT = 64
KNOWN_ENDPOINTS = 4096

PIECE_BYTES = 62 * 1024
"""Largest piece of a body; Envoy recommends at most 64 KiB including the message around it."""

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(message: pb.HttpHeaders, wanted: Sequence[str]) -> dict[str, str]:
    """Return the wanted headers, with names in lower case; of a repeated header, the first one."""
    found: dict[str, str] = {}
    for each in message.headers.headers:
        if each.key in wanted and each.key not in found:
            found[each.key] = each.raw_value.decode("latin-1") or each.value
    return found


def subset_of(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """Return the endpoints that may be picked; None: any. A hint of another type allows none."""
    hint = _field(message, SUBSET_NAMESPACE, SUBSET)
    if hint is None:
        return None
    texts = hint if isinstance(hint, list) else [hint]
    return tuple(
        _endpoint_text(part) for text in texts if isinstance(text, str) for part in text.split(",") if part.strip()
    )


def served_of(message: pb.ProcessingRequest) -> str:
    """Return the endpoint that gave the answer; empty if the gateway does not name it."""
    told = _field(message, NAMESPACE, SERVED)
    return _endpoint_text(told) if isinstance(told, str) else ""


def _endpoint_text(endpoint: str) -> str:
    """Return an endpoint in the form of `picked`; other texts stay unchanged."""
    endpoint = endpoint.strip()
    return _cached_endpoint(endpoint) if len(endpoint) <= LONGEST_ENDPOINT else endpoint


@lru_cache(maxsize=KNOWN_ENDPOINTS)
def _cached_endpoint(endpoint: str) -> str:
    try:
        return endpoint_in(endpoint)
    except ValueError:
        return endpoint


def _field(message: pb.ProcessingRequest, namespace: str, name: str) -> object:
    """Return a value of the metadata; None if there is none."""
    spaces = message.metadata_context.filter_metadata
    if namespace not in spaces or name not in spaces[namespace].fields:
        return None
    value = spaces[namespace].fields[name]
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value
        case "list_value":
            return [each.string_value for each in value.list_value.values if each.HasField("string_value")]
        case _:
            return ()


def picked(endpoints: Sequence[str], prefill: str, content_length: int | None) -> pb.ProcessingResponse:
    """Name the endpoints of a request, in a header and in metadata.

    Args:
        endpoints: At least one, the best first.
        prefill: Endpoint of the prefill worker; empty: none.
        content_length: Length of the forwarded body; None: unknown, or no body.
    """
    destination = ",".join(endpoints)
    told = {DESTINATION: destination}
    if prefill:
        told[PREFILL] = prefill
    if content_length is not None:
        told["content-length"] = f"{content_length}"
    # A sidecar must never see this header from a client.
    mutation = pb.HeaderMutation(set_headers=_set(told), remove_headers=() if prefill else (PREFILL,))
    metadata = Fields()
    metadata.update({NAMESPACE: {DESTINATION: destination}})
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata)


def body_pieces(body: bytes, *, ends: bool) -> Iterator[pb.ProcessingResponse]:
    """Yield the forwarded body of a request.

    Args:
        body: The complete body.
        ends: True if no trailers follow.
    """
    for at in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body[at : at + PIECE_BYTES]
        last = at + PIECE_BYTES >= len(body)
        yield pb.ProcessingResponse(request_body=_streamed(piece, ends=ends and last))


def request_piece(piece: pb.HttpBody) -> pb.ProcessingResponse:
    """Forward a piece of a request's body unchanged."""
    return pb.ProcessingResponse(request_body=_streamed(piece.body, ends=piece.end_of_stream))


def answer_piece(piece: pb.HttpBody, *, streamed: bool) -> pb.ProcessingResponse:
    """Forward a piece of an answer's body unchanged.

    Args:
        piece: The piece.
        streamed: True if the gateway passes on the returned bytes; else it passes on its own once it is allowed to.
    """
    if not streamed:
        return pb.ProcessingResponse(response_body=pb.BodyResponse())
    return pb.ProcessingResponse(response_body=_streamed(piece.body, ends=piece.end_of_stream))


def _streamed(body: bytes, *, ends: bool) -> pb.BodyResponse:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=ends)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def refusal(refused: RequestRejected) -> pb.ProcessingResponse:
    """Build the answer to a rejected request, in the form of the OpenAI API."""
    told = {"content-type": "application/json"}
    if refused.retry_after_ms:
        told["retry-after"] = f"{-(-refused.retry_after_ms // 1000)}"
    answer = pb.ImmediateResponse(
        status=pb.HttpStatus(code=REASON_STATUSES[refused.reason].http),
        headers=pb.HeaderMutation(set_headers=_set(told)),
        body=error_body(refused),
        details=f"fleet_{refused.reason}",
    )
    return pb.ProcessingResponse(immediate_response=answer)


def _set(headers: Mapping[str, str]) -> list[pb.HeaderValueOption]:
    return [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1")), append_action=_OVERWRITE
        )
        for name, value in headers.items()
    ]
