"""Gateway call: handles one HTTP request of a gateway and its answer (rules 1 to 5 and 7 to 9 of `endpoint_picker.py`)."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import unquote

from msgspec import Struct, structs

from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.core.roles import Placement
from fleet.frontend.openai.bodies import OPENAI_FIELD_NAMES
from fleet.frontend.openai.relay import ERROR_FORMS
from fleet.frontend.openai.relayed_paths import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from fleet.frontend.openai.requests import authorization_of
from fleet.gateway.endpoints import PickerEndpoints
from fleet.gateway.ext_proc import (
    answer_piece,
    body_pieces,
    headers_of,
    picked,
    refusal,
    request_piece,
    served_of,
    subset_of,
)
from fleet.gateway.prompts import TRANSLATED_APIS, PromptReaderApi
from fleet.gateway.selected_requests import SelectedRequest
from fleet.gateway.selection import MAX_REPORTED, SelectionService
from fleet.net.grpc.calls import Context, parse_message, send_message
from fleet.net.http.errors import OPENAI_ERRORS, ErrorForm
from fleet.net.status_codes import rename_field
from fleet.router.messages import Arrived
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.v1 import ext_proc_pb2 as pb

PLACED = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
"""Paths whose requests are placed by their prompts. Requests for other paths go to the endpoint with the fewest requests."""


class PickerContext(Struct, kw_only=True):
    """Settings, services and counters that all calls of an endpoint picker share."""

    settings: EndpointPickerSettings

    endpoints: PickerEndpoints
    selection: SelectionService

    prompts: PromptReaderApi
    held_bytes: int = 0
    """Number of bytes of request bodies that all calls together keep in memory."""


class PickerStage(Enum):
    """Stage of one HTTP request. The messages of the gateway move the request from stage to stage."""

    NEW = auto()
    BODY = auto()  # the body of the request arrives in pieces
    SENT = auto()  # the gateway knows the endpoint and has the complete request; the head of the answer comes next
    ANSWER = auto()  # the body of the answer arrives in pieces, unless the gateway's `response_body_mode` is NONE
    OVER = auto()


TAKEN: Mapping[PickerStage, frozenset[str]] = {
    PickerStage.NEW: frozenset({"request_headers"}),
    # `response_headers` is allowed, because the gateway may answer the client itself before the request is complete.
    PickerStage.BODY: frozenset({"request_body", "request_trailers", "response_headers"}),
    PickerStage.SENT: frozenset({"response_headers"}),
    PickerStage.ANSWER: frozenset({"response_body", "response_trailers"}),
    PickerStage.OVER: frozenset(),
}
"""Kinds of gateway messages that are allowed at each stage; any other kind breaks the protocol."""

PickerAnswers = list[pb.ProcessingResponse]


class PickerCall:
    """Handles one HTTP request of a gateway: picks its endpoint, and counts the tokens of its answer."""

    def __init__(self, picker_context: PickerContext) -> None:
        self._picker_context = picker_context
        self._stage = PickerStage.NEW
        self._due = asyncio.get_running_loop().time() + picker_context.settings.body_seconds
        self._refused = False
        self._own = False  # True if the request goes unchanged to the router's own endpoint
        # True if the gateway sends the client the bytes of the answer that the picker returns; False if the gateway sends its own copy of
        # these bytes, and only waits for the picker's permission.
        self._streamed = True
        self._tells_answer = True
        self._path = ""
        self._authorization = ""
        self._subset: tuple[str, ...] | None = None
        self._body = bytearray()
        self._endpoint = ""  # endpoint of the decode worker that placement chose; empty: placement has chosen no worker
        self._arrived: Arrived | None = None
        self._booking: SelectedRequest | None = None
        self._counter: AnswerCounter | None = None

    @property
    def _errors(self) -> ErrorForm:
        """The form of error answers in the API of the request's path; OpenAI's form for other paths and before the path is known."""
        return ERROR_FORMS.get(self._path, OPENAI_ERRORS)

    async def run(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Handle the messages of the gateway until the gateway ends the call or the request is rejected.

        Raises:
            RequestRejected: The gateway has broken the protocol (INVALID_ARGUMENT), or a message of it is too large (TOO_LARGE).
        """
        coming = aiter(messages)
        while not self._refused:
            try:
                content = await self._next(coming)
            except TimeoutError:
                await send_message(context, refusal(self._late(), self._errors))
                return
            if content is None:
                return
            message = parse_message(pb.ProcessingRequest, content)
            if message.observability_mode:
                continue  # in this mode the gateway only reports messages and ignores responses
            for response in await self._handle(message):
                await send_message(context, response)

    def end(self) -> None:
        """Drop the request's body, release its reservation, and charge its tenant for the answer tokens that were counted.

        A second call does nothing.
        """
        self._let_go()
        if self._booking is not None:
            self._picker_context.selection.end(self._booking)
            self._booking = None
        if self._counter is not None and self._counter.tokens and self._arrived is not None:
            self._picker_context.prompts.answered(self._arrived.tenant, self._counter.tokens)
            self._counter = None

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message, or None if the gateway has ended the call.

        Raises:
            TimeoutError: The request was not complete within `body_seconds`.
        """
        async with asyncio.timeout_at(self._due if self._stage in (PickerStage.NEW, PickerStage.BODY) else None):
            return await anext(messages, None)

    def _late(self) -> RequestRejected:
        """Return the rejection of a request whose body was not complete within `body_seconds`.

        The rejection tells the client to retry, although its reason is DEADLINE_PASSED: the picker has set this limit, not the client.
        """
        settings = self._picker_context.settings
        return RequestRejected(
            Reason.DEADLINE_PASSED,
            f"the request was not complete within {settings.body_seconds:g} s; send it faster",
            retry_after_ms=settings.retry_after_ms,
        )

    async def _handle(self, message: pb.ProcessingRequest) -> PickerAnswers:
        kind = message.WhichOneof("request") or "nothing"
        if kind not in TAKEN[self._stage]:
            taken = " or ".join(sorted(TAKEN[self._stage])) or "the end of the call"
            raise invalid("request", f"{kind} came where {taken} was expected")
        try:
            match kind:
                case "request_headers":
                    return self._begin(message)
                case "request_body":
                    return await self._took(message.request_body)
                case "request_trailers":
                    last = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
                    return [*await self._whole(ends=False), last]
                case "response_headers":
                    return self._answer_begins(message)
                case "response_body":
                    return self._answer_goes_on(message.response_body)
                case _:
                    self._stage = PickerStage.OVER
                    self.end()
                    return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        except RequestRejected as refused:
            self._refused = True
            self._let_go()
            return [refusal(refused, self._errors)]

    # Handling of messages about the request:

    def _begin(self, message: pb.ProcessingRequest) -> PickerAnswers:
        headers = headers_of(message.request_headers, (":path", "authorization", "x-api-key"))
        self._path = _api_path(headers.get(":path", ""))
        self._authorization = authorization_of(
            {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        )
        self._subset = subset_of(message)
        self._stage = PickerStage.BODY
        whole = message.request_headers.end_of_stream
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            if not whole and modes.request_body_mode != pb.FULL_DUPLEX_STREAMED:
                raise RequestRejected(Reason.INTERNAL, "the gateway must send request bodies FULL_DUPLEX_STREAMED")
            self._streamed = modes.response_body_mode == pb.FULL_DUPLEX_STREAMED
            self._tells_answer = modes.response_body_mode != pb.NONE
        self._picker_context.endpoints.check()
        if self._picker_context.settings.router_endpoint:
            self._own = True
            self._stage = PickerStage.SENT if whole else PickerStage.BODY
            return [picked([self._picker_context.endpoints.own(self._subset)], "", None)]
        if whole:
            self._stage = PickerStage.SENT
            return [picked([self._picker_context.endpoints.idlest(self._subset)], "", None)]
        self._picker_context.prompts.check_key(self._authorization)
        return []

    async def _took(self, piece: pb.HttpBody) -> PickerAnswers:
        """Handle one piece of the request's body, and return the responses to the gateway.

        Unless the request goes to the router's own endpoint, the piece is kept until the body is complete.
        """
        if self._own:
            self._stage = PickerStage.SENT if piece.end_of_stream else PickerStage.BODY
            return [request_piece(piece)]
        picker_context = self._picker_context
        if len(self._body) + len(piece.body) > picker_context.settings.max_body_bytes:
            raise RequestRejected(
                Reason.TOO_LARGE,
                f"the body has more than the {picker_context.settings.max_body_bytes} bytes that are taken",
            )
        if picker_context.held_bytes + len(piece.body) > picker_context.settings.max_held_bytes:
            raise RequestRejected(
                Reason.QUEUE_FULL,
                "too many long requests come at once",
                retry_after_ms=picker_context.settings.retry_after_ms,
            )
        picker_context.held_bytes += len(piece.body)
        self._body += piece.body
        return await self._whole(ends=True) if piece.end_of_stream else []

    async def _whole(self, *, ends: bool) -> PickerAnswers:
        """Pick the endpoints of the request, whose body is complete. Return the responses with the endpoints and the body.

        Return no response if the request goes to the router's own endpoint, because its body was already forwarded in pieces.

        Args:
            ends: True if no trailers follow the body.

        Raises:
            RequestRejected: The request is invalid, its client may not send it, or no worker can serve it in time.
        """
        if self._own:
            self._stage = PickerStage.SENT
            return []
        body = bytes(self._body)
        if self._path in PLACED:
            endpoints, prefill = await self._place(body)
        else:
            endpoints, prefill = [self._picker_context.endpoints.idlest(self._subset)], ""
        self._let_go()
        self._stage = PickerStage.SENT
        return [picked(endpoints, prefill, len(body) if ends else None), *body_pieces(body, ends=ends)]

    async def _place(self, body: bytes) -> tuple[list[str], str]:
        """Place the request. Return its endpoints, the best first, and the endpoint of its prefill worker; empty: it has none."""
        picker_context, settings = self._picker_context, self._picker_context.settings
        arrived = await picker_context.prompts.arrival(self._path, body, self._authorization)
        endpoints = picker_context.endpoints.within(self._subset)
        self._arrived = arrived = structs.replace(arrived, among=picker_context.endpoints.allowed(endpoints))
        try:
            self._booking, decision = await picker_context.selection.book(
                arrived, lease_seconds=settings.lease_seconds, wait_seconds=settings.wait_seconds
            )
        except TimeoutError:
            raise RequestRejected(
                Reason.QUEUE_FULL,
                f"all workers have been busy for {settings.wait_seconds:g} s; retry later",
                retry_after_ms=settings.retry_after_ms,
            ) from None
        except RequestRejected as refused:
            named = rename_field(refused, {**OPENAI_FIELD_NAMES, "sampling.form": "response_format"})
            api = TRANSLATED_APIS.get(self._path)
            raise (named if api is None else rename_field(named, api.names)) from refused
        self._counter = AnswerCounter()
        chosen = [decision.decode, *([] if decision.prefill is None else [decision.prefill])]
        # The chosen worker may have joined while the request waited, so look the endpoints up again.
        if not all(each in endpoints for each in chosen):
            endpoints = picker_context.endpoints.within(self._subset)
            if not all(each in endpoints for each in chosen):
                raise picker_context.endpoints.nobody(self._subset)
        self._endpoint = endpoints[decision.decode]
        if decision.prefill is not None:
            # No other endpoints are returned as fallbacks: their workers may be unable to use the blocks of this
            # prefill worker.
            return [self._endpoint], endpoints[decision.prefill]
        others = decision.next_best(settings.fallbacks) if settings.fallbacks else ()
        return [self._endpoint, *(endpoints[each] for each in others if each in endpoints)], ""

    def _let_go(self) -> None:
        """Drop the request's body, and subtract its size from `PickerContext.held_bytes`."""
        self._picker_context.held_bytes -= len(self._body)
        self._body = bytearray()

    # Handling of messages about the answer:

    def _answer_begins(self, message: pb.ProcessingRequest) -> PickerAnswers:
        self._let_go()
        served = served_of(message)
        if self._booking is not None and served and served != self._endpoint:
            self._move(served)
        if message.response_headers.end_of_stream:
            self._stage = PickerStage.OVER
            self.end()
        else:
            self._stage = PickerStage.ANSWER
            if self._counter is not None:
                headers = headers_of(message.response_headers, ("content-type",))
                self._counter.events = headers.get("content-type", "").startswith("text/event-stream")
            if not self._tells_answer:
                self._report(prefilled=True)
        return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]

    def _answer_goes_on(self, piece: pb.HttpBody) -> PickerAnswers:
        response = answer_piece(piece, streamed=self._streamed)
        if self._counter is not None:
            self._report(prefilled=bool(piece.body), tokens=self._counter.count(piece.body))
        if piece.end_of_stream:
            self._stage = PickerStage.OVER
            self.end()
        return [response]

    def _report(self, *, prefilled: bool, tokens: int = 0) -> None:
        if self._booking is not None:
            # The number of tokens is limited, because an answer that is not streamed may state any number in its usage.
            answer_tokens = min(tokens, MAX_REPORTED)
            if not self._picker_context.selection.report(
                self._booking, prefilled=prefilled, answer_tokens=answer_tokens
            ):
                self._booking = None

    def _move(self, served: str) -> None:
        """Move the reservation to the endpoint that gives the answer (rule 4 of `endpoint_picker.py`).

        If no reservation is possible there, only end the present one.
        """
        picker_context = self._picker_context
        assert self._arrived is not None
        assert self._booking is not None
        picker_context.selection.end(self._booking)
        self._booking = None
        try:
            (there,) = picker_context.endpoints.within([served])
        except (RequestRejected, ValueError):
            # No worker of this router has this endpoint, or several workers share it.
            return
        self._arrived = structs.replace(
            self._arrived,
            request_id=RequestId(f"pick-{secrets.token_hex(8)}"),
            pin=there,
            among=None,
            labels=(),
            placement=Placement.AGGREGATED,
        )
        with suppress(RequestRejected):
            self._booking = picker_context.selection.book_now(
                self._arrived, lease_seconds=picker_context.settings.lease_seconds
            )


def _api_path(path: str) -> str:
    """Return the path in `PLACED` with which a request's path ends. If there is none, return the request's path without its query.

    Percent escapes in the path are decoded first, because servers decode them, too.
    """
    path = unquote(path.partition("?")[0])
    return next((each for each in PLACED if path.endswith(each)), path)


# The number of last bytes that are kept of an answer that is not streamed, to find a usage that is cut between two pieces.
TAIL_BYTES = 512

_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')
_EVENT = b"data: {"


class AnswerCounter:
    """Counts the tokens of an answer: one for each event of a stream. For other answers, it reads the number in their usage."""

    def __init__(self) -> None:
        self.events = False
        self.tokens = 0
        self._tail = b""

    def count(self, piece: bytes) -> int:
        """Return the number of tokens that this piece of the answer adds."""
        text = self._tail + piece
        if self.events:
            new = text.count(_EVENT)
            # Keep the last bytes, because they may be the beginning of the next `_EVENT`. They are shorter than a whole `_EVENT`, so
            # no event is counted twice.
            self._tail = text[-(len(_EVENT) - 1) :]
        else:
            said = _COMPLETION_TOKENS.findall(text)
            new = max(0, int(said[-1]) - self.tokens) if said else 0
            self._tail = text[-TAIL_BYTES:]
        self.tokens += new
        return new
