"""Messages between a gateway and an endpoint picker (endpoint picker protocol 1.0): parsing and building, without I/O.

The names of headers and metadata come from https://github.com/kubernetes-sigs/gateway-api-inference-extension
(docs/proposals/004-endpoint-picker-protocol). The header that names the prefill worker comes from llm-d, whose sidecars
read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from google.protobuf.struct_pb2 import Struct as Fields

from fleet.core.errors import RequestRejected
from fleet.net.http.errors import ErrorForm, rejection_headers
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
"""Maximum length of a piece of a body in bytes. Envoy recommends at most 64 KiB, including the message around the
piece."""

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(message: pb.HttpHeaders, wanted: Sequence[str]) -> dict[str, str]:
    """Return the wanted headers that exist, by name; if a header is repeated, its first value is returned."""
    found: dict[str, str] = {}
    for each in message.headers.headers:
        if each.key in wanted and each.key not in found:
            found[each.key] = each.raw_value.decode("latin-1") or each.value
    return found


def subset_of(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """Return the endpoints that the gateway allows, or None if it allows all endpoints.

    If the gateway's value is neither a text nor a list, no endpoint is allowed.
    """
    hint = _field(message, SUBSET_NAMESPACE, SUBSET)
    if hint is None:
        return None
    texts = hint if isinstance(hint, list) else [hint]
    return tuple(
        _endpoint_text(part) for text in texts if isinstance(text, str) for part in text.split(",") if part.strip()
    )


def served_of(message: pb.ProcessingRequest) -> str:
    """Return the endpoint that gave the answer, or an empty string if the gateway does not name it."""
    endpoint = _field(message, NAMESPACE, SERVED)
    return _endpoint_text(endpoint) if isinstance(endpoint, str) else ""


def _endpoint_text(endpoint: str) -> str:
    """Return an endpoint in the form that `picked` writes. A text that is no endpoint only loses the spaces around it."""
    endpoint = endpoint.strip()
    return _cached_endpoint(endpoint) if len(endpoint) <= LONGEST_ENDPOINT else endpoint


@lru_cache(maxsize=KNOWN_ENDPOINTS)
def _cached_endpoint(endpoint: str) -> str:
    try:
        return endpoint_in(endpoint)
    except ValueError:
        return endpoint


def _field(message: pb.ProcessingRequest, namespace: str, name: str) -> object:
    """Return a value of the gateway's metadata: a text, a list of texts, () for other types, None if missing."""
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
    """Build the response that names the endpoints of a request, in a header and in metadata.

    Args:
        endpoints: At least one endpoint, the best first.
        prefill: Endpoint of the prefill worker; empty: no prefill worker takes part.
        content_length: Length of the forwarded body in bytes; None: unknown, or no body.
    """
    destination = ",".join(endpoints)
    headers = {DESTINATION: destination}
    if prefill:
        headers[PREFILL] = prefill
    if content_length is not None:
        headers["content-length"] = f"{content_length}"
    # Without a prefill worker, a client's header of this name is removed, because it would tell a sidecar where to prefill.
    mutation = pb.HeaderMutation(set_headers=_set(headers), remove_headers=() if prefill else (PREFILL,))
    metadata = Fields()
    metadata.update({NAMESPACE: {DESTINATION: destination}})
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata)


def body_pieces(body: bytes, *, ends: bool) -> Iterator[pb.ProcessingResponse]:
    """Yield the responses that forward the body of a request, in pieces of at most `PIECE_BYTES`.

    Args:
        body: The complete body.
        ends: True if no trailers follow the body.
    """
    for at in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body[at : at + PIECE_BYTES]
        last = at + PIECE_BYTES >= len(body)
        yield pb.ProcessingResponse(request_body=_streamed(piece, ends=ends and last))


def request_piece(piece: pb.HttpBody) -> pb.ProcessingResponse:
    """Build the response that forwards one piece of a request's body unchanged."""
    return pb.ProcessingResponse(request_body=_streamed(piece.body, ends=piece.end_of_stream))


def answer_piece(piece: pb.HttpBody, *, streamed: bool) -> pb.ProcessingResponse:
    """Build the response that forwards one piece of an answer's body unchanged.

    Args:
        piece: The piece.
        streamed: True if the gateway sends the client the bytes of this response; False if it keeps the piece and waits
            only for the permission to send it.
    """
    if not streamed:
        return pb.ProcessingResponse(response_body=pb.BodyResponse())
    return pb.ProcessingResponse(response_body=_streamed(piece.body, ends=piece.end_of_stream))


def _streamed(body: bytes, *, ends: bool) -> pb.BodyResponse:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=ends)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed)))


def refusal(refused: RequestRejected, form: ErrorForm) -> pb.ProcessingResponse:
    """Build the response by which the gateway rejects a request. `form` is the error form of the request's API."""
    headers = {"content-type": "application/json", **dict(rejection_headers(refused))}
    answer = pb.ImmediateResponse(
        status=pb.HttpStatus(code=REASON_STATUSES[refused.reason].http),
        headers=pb.HeaderMutation(set_headers=_set(headers)),
        body=form.body(refused),
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
