"""Upstream: one connection to an external backend; it passes each answer on to the client while the answer arrives.

Rules:

1. A connection carries one request at a time. It is used again if the server allows it and the answer ended where its
   HTTP head says. It is not used again after an answer whose chunks were decoded (rule 2).
2. The HTTP parser reads every byte, but only to find the end of the head and of the answer. It also decodes chunks for a
   client that does not understand them (HTTP/1.0). The connection is closed if the parser rejects something, or if bytes
   arrive while no request is open.
3. The head is sent to the client together with the first bytes of the content, in one write. So if the server fails
   after its head and before its content, the client has got nothing yet, and another server can answer. Headers that
   concern only the connection to the server are removed.
4. A status of 500 or more does not count as an answer, except 501, which means that the server lacks the function. An
   answer that is cut off does not count either. An event stream counts as cut off if it lacks the last event of its API
   (such as ``[DONE]``, ``message_stop`` or ``response.completed``), and an earlier stream of the same path had such an event. The
   router decides whether another server may answer instead. Interim heads (``100 Continue``, ``103 Early Hints``) are
   skipped, up to a limit; a switch of protocols (101) is no answer.
5. Tokens are not decoded. The number of events is a good estimate of an answer's length. A tenant is charged for the
   usage that the server reports at the end, if it reports one.
6. A request, and the head of an answer with its first content, go through the write batcher (`write_batcher.py`), which
   may keep them until the end of the event loop's turn. The other effects of an answer (released reservations,
   counters, the connection's next use) come after that. An error or the end of the answer is sent after all waiting
   bytes. Content in later turns is passed on at once, because the router has nothing to decide about it.
7. An answer counts as begun with its first content. Comments between events, and events that only name the role, are
   passed on, but they are not content (`has_content`): a server whose engine hangs may send them too.
"""

import asyncio
import re
import socket
from typing import Protocol, cast

import httptools
from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from fleet.backends.external.http_client import FIRST_FINAL_STATUS, FIRST_SERVER_ERROR
from fleet.backends.external.write_batcher import WriteBatcher
from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.frontend.openai.relay import RelayedRequest
from fleet.net.http.exchange import KEPT_ALIVE, ClientDisconnected

MAX_HEAD_BYTES = 64 << 10  # maximum length of the head of an answer; an answer with a longer head fails
# Maximum number of cached heads of answers (`AnswerHeads`); when the cache is full, it is emptied. A head with the header
# `date` can be reused for only a second.
MAX_KNOWN_HEADS = 256
# A request body up to this size, in bytes, is copied into one buffer with its head, because sending two buffers costs more.
SMALL_BODY_BYTES = 16 << 10
MAX_INTERIM_HEADS = 16  # maximum number of interim heads (status 1xx) before an answer; usually there is at most one
NOT_IMPLEMENTED = 501
UNAVAILABLE = frozenset({502, 503, 504})
EXCERPT_BYTES = 200
UNFINISHED = "the stream ended before its last event"
# Maximum number of answers between two silence checks (0.1 s) whose time to the first byte is measured. So many measurements are
# enough to know a server's speed.
LEARNED_FIRST_BYTES = 16
# The usage of a stream is searched in its last `USAGE_BYTES` bytes. Of an answer in one piece, as many bytes before and after
# the last token count are kept.
USAGE_BYTES = 4096
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*([0-9]{1,12})')
# A number of more than nine digits is not read as a count.
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')
# The end of the names of all token counts. The text of an answer cannot contain it, because a quote is escaped there.
_TOKEN_COUNT = b'_tokens"'
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*([0-9]{1,12})')

_BETWEEN_CHUNKS = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}(?:;[^\r\n]*)?\r\n")
_INTERIM_HEAD = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9]{2}(?=[ \r]).*?\r\n\r\n", re.DOTALL)
_ONE_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"x-fleet-request-id"})
_BOUNDARIES = (b"\n\n\r\n", b"\n\r\n\r\n")  # if the relayed bytes end like this, both an event and a chunk are complete
_PLAIN_BOUNDARIES = (b"\n\n", b"\n\r\n\r\n")
# The text of an answer cannot match this expression, because line breaks and quotes are escaped in it.
_LAST_EVENT = re.compile(
    rb'(?:\A|[\r\n])data:[ \t]*\[DONE\]|"type"\s*:\s*"(?:message_stop|response\.(?:completed|incomplete|failed))"'
)
_USUAL_LAST_EVENT = b"\ndata: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
# usual end of a stream; it is compared first, so that most streams need no search
_USUAL_END = b"data: [DONE]\n\n\r\n" + _LAST_CHUNK
_DATA_LINE = re.compile(rb"^data:[ \t]*([^\r\n]*)", re.MULTILINE)
_COMMENT_LINE = re.compile(rb"^:", re.MULTILINE)


class AnswerHead(Struct, frozen=True):
    """The head of a server's answer: its lines for the client, and the properties of the answer that they state."""

    start: bytes  # status line and headers for the client, without the empty line
    # The same lines without `transfer-encoding`, for clients that do not understand chunked encoding.
    plain_start: bytes
    chunked: bool
    until_close: bool  # True if the answer ends when the server closes the connection
    streams: bool  # True if the answer is an event stream
    reusable: bool  # True if the connection to the server can be used for another request
    named: bool  # True if the server sent the header `x-request-id`
    limits: bool  # True if the server sent rate limit headers


class UnclearEnd(Exception):
    """Error: the head of an answer does not say clearly where the answer ends, so a client could take this answer for two."""


class AnswerHeads:
    """Caches prepared heads of answers by the exact bytes of the server's head."""

    def __init__(self) -> None:
        self._known: dict[bytes, AnswerHead] = {}

    def find(self, content: bytes) -> AnswerHead:
        """Return the result of `read_head` for this head, from the cache if the same bytes came before.

        Raises:
            UnclearEnd: The head does not say clearly where the answer ends.
        """
        if (head := self._known.get(content)) is None:
            if len(self._known) >= MAX_KNOWN_HEADS:
                self._known.clear()
            head = self._known[content] = read_head(content)
        return head


class UpstreamOwner(Protocol):
    """Port to the backend that owns a connection; it is informed about the connection's requests."""

    heads: AnswerHeads
    write_batcher: WriteBatcher
    first_bytes: list[tuple[Nanos, Nanos, int, bool]]
    """Measurements of the first content of answers since the last silence check, at most `LEARNED_FIRST_BYTES`.

    Each has four values: the instant of the request (in running time), the instant of the content (by the clock), the
    size of the request in bytes, and True if the client wants a stream.
    """

    more_first_bytes: int
    """Number of further answers that have begun since the last check and are not in `first_bytes`."""

    says_done: set[str]
    """Paths at which the server has ended a stream with `_LAST_EVENT`.

    Later streams without it count as cut off (rule 4).
    """

    def spoke(self, upstream: "Upstream", relayed: RelayedRequest) -> None:
        """Note that the first content of an answer has come after its head was already passed on."""
        ...

    def advanced(self, work_id: RequestId, tokens: int) -> None:
        """Record that `tokens` more tokens, estimated by the number of events (rule 5), were passed on to the client."""
        ...

    def finished(self, upstream: "Upstream", work_id: RequestId, tokens: int, *, reusable: bool) -> None:
        """Record that the answer is complete; `tokens` more tokens were passed on since the last report.

        `reusable` is true if another request can be sent over the connection.
        """
        ...

    def failed(self, work_id: RequestId, reason: Reason, message: str) -> None:
        """Record that the server sent no answer or only a part of one. The connection is closed."""
        ...

    def stale(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """Send the request again over a new connection.

        Its connection had carried requests before, and was closed before any byte of the answer. So the server has probably closed it
        while it was idle.
        """
        ...

    def closed(self, upstream: "Upstream") -> None:
        """Record that a connection was closed on which no request was running."""
        ...


class Upstream(asyncio.Protocol):
    """Sends requests over one connection to a server, and passes each answer on to the client.

    Implements `fleet.frontend.openai.relay.AnswerStream` while an answer arrives.
    """

    def __init__(self, owner: UpstreamOwner, report_every: int) -> None:
        """Create the protocol object for `create_connection`.

        Args:
            owner: Gets the reports about requests.
            report_every: Number of tokens between two reports of progress.
        """
        self._owner = owner
        self._report_every = report_every
        self._due = _ExpectedAnswer()
        self._parser = httptools.HttpResponseParser(self._due)
        self.transport: asyncio.Transport
        self._work_id = RequestId("")
        self._relayed: RelayedRequest | None = None
        self._path = ""  # path of the running or the last request
        # The connection to the client; None until the answer's head was passed on to it.
        self._client: asyncio.Transport | None = None
        self._complete = False  # True if the answer is complete, but not reported to `owner` yet
        self._head: AnswerHead | None = None
        self._held = b""  # bytes that wait for the rest of the head, or for the first content (rule 3)
        # Bytes that wait for the end of the event loop's turn: bytes of the request, or of the answer once `_client` is set.
        self._unsent: list[bytes] = []
        # Of a stream, the bytes since the start of the latest read in which an event began; of an answer in one piece, all
        # bytes. If there are many, only the last ones.
        self.latest = b""
        self.earlier = b""  # of a stream, the bytes before `latest`, from the previous read in which an event began
        self._counted = b""  # for an answer in one piece: the bytes around the last token count so far
        self._interim_heads = 0  # number of interim heads before the present answer
        self._served = 0  # number of requests that were sent over this connection, with the running one
        self._events = 0  # number of events that were not reported to `owner` yet
        self._keep_alive = False  # True if the connection to the client stays open after the answer
        # Decoded parts of the answer for a client without chunked encoding; None for other clients.
        self._bodies: list[bytes] | None = None
        # The backend sets both: the instant at which the request was sent, and the number that its answer would have if
        # the server answered all requests in the order in which they were sent.
        self.sent_at = Nanos(0)
        self.turn = 0
        self.spoke = False  # True if content of the answer has come (rule 7)
        self.quiet = True  # True if no content has come since the last silence check
        self._quiet_since: Nanos | None = None  # time of the check since which no content has come; None: no check yet

    # Methods that the backend calls

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    @property
    def relayed(self) -> RelayedRequest | None:
        """The request that runs on this connection; None if the connection is idle."""
        return self._relayed

    @property
    def begun(self) -> bool:
        """True if a part of the answer was passed on to the client."""
        return self._client is not None

    def quiet_for(self, now: Nanos) -> Nanos:
        """Return the time since the first check after the latest content, or after the request if no content has come.

        Each call of this method is a check.
        """
        if not self.quiet or self._quiet_since is None:
            self.quiet, self._quiet_since = True, now
        return Nanos(now - self._quiet_since)

    def begin(self, work_id: RequestId, relayed: RelayedRequest, opening: bytes) -> None:
        """Send a request. The connection must be idle.

        Args:
            work_id: Id of the attempt, for reports.
            relayed: The request, which also receives its answer.
            opening: The head of the request.
        """
        assert self._relayed is None
        self._work_id = work_id
        self._relayed = relayed
        self._path = relayed.path
        self._served += 1
        self._client = None
        self._complete = False
        self._held = b""
        self._events = 0
        self._counted = b""
        self._interim_heads = 0
        self.spoke = False
        self.quiet = True
        self._quiet_since = None
        self._due.expect()
        if not relayed.chunks:
            self._unpack()
        body = relayed.body
        self._unsent = [opening + body] if len(body) <= SMALL_BODY_BYTES else [opening, body]
        self._owner.write_batcher.send(self.flush)

    def drop(self) -> None:
        """Close the connection without a report to `owner`. If an answer is arriving, nobody waits for the rest of it."""
        self._send_answer()
        self._relayed = None
        self.transport.abort()

    def fail(self, message: str, reason: Reason = Reason.WORKER_LOST) -> None:
        """End the request without a complete answer: close the connection and report the failure."""
        assert self._relayed is not None
        self._send_answer()
        self._tell()
        self._relayed = None
        self.transport.abort()
        self._owner.failed(self._work_id, reason, message)

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports do not subclass asyncio's
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        # bytes arrived while no request is open, so the connection is closed (rule 2)
        if self._relayed is None or self._complete or (self._unsent and self._client is None):
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # The parser takes only one answer; an answer behind interim heads gets a new parser.
            if self._client is not None or not self._pass_over(self._held + data):
                self.fail(f"its answer is no HTTP answer: {error}")
            return
        client = self._client
        if client is None:
            self._open(data)
            return
        if not self._due.end and self._head is not None and self._head.streams and self._cut_short(data):
            self._end_early(data)
            return
        if self._bodies is None and not self._unsent:
            client.write(data)
        else:
            self._pass_on(data if self._bodies is None else self._unpacked(self._bodies))
        if not self.spoke and (not self._due.end or has_content(data)):
            assert self._relayed is not None
            self.spoke = True
            self._owner.spoke(self, self._relayed)
        events = data.count(b"data:")
        self._events += events
        if self._head is not None and not self._head.streams:
            self.quiet = False
            end = self.latest[-USAGE_BYTES:]
            self._keep_count(end + data, 0 if len(end) < USAGE_BYTES else USAGE_BYTES // 2)
            self.latest = end + data[-USAGE_BYTES:]
        elif events:
            self.quiet = False
            self.earlier, self.latest = self.latest, data
        else:  # this read continues the event that an earlier read began
            self.latest = self.latest[-USAGE_BYTES:] + data[-USAGE_BYTES:]
            if _COMMENT_LINE.search(data) is None:
                self.quiet = False
        if not self._due.end:
            self._complete = True
            self._owner.write_batcher.afterwards(self._finish)
        elif self._events >= self._report_every:
            self._owner.write_batcher.afterwards(self._tell)

    def connection_lost(self, exc: Exception | None) -> None:
        self._send_answer()
        relayed, self._relayed = self._relayed, None
        # Delete the parser, because it refers back to this object, and only a garbage collection could free such a cycle.
        del self._parser
        if relayed is None:
            self._owner.closed(self)
        elif self._complete or (self._ends_with_connection and exc is None and not self._cut_short(b"")):
            self._relayed = relayed
            self._finish()
        elif self._served > 1 and self._due.begin and not self._interim_heads:
            self._owner.stale(self._work_id, relayed)
        else:
            cause = "" if exc is None else f": {exc}"
            self._relayed = relayed
            self._tell()  # the router must know that an answer has begun, or it would start another one
            self._relayed = None
            self._owner.failed(self._work_id, Reason.WORKER_LOST, f"it closed the connection before the end{cause}")

    def usage(self) -> "UpstreamUsage | None":
        """Return the usage at the end of the answer that has just come; None if there is none."""
        return read_usage(self._end())

    def _keep_count(self, content: bytes, begin: int) -> None:
        """Remember the bytes around the last token count in `content`, for an answer that is not streamed.

        The end of such an answer is not enough to find its usage, because long fields such as `prompt_token_ids` may follow it.

        Args:
            content: The bytes just read, preceded by the last bytes of earlier reads.
            begin: Where to begin the search. Counts before this index were found in earlier reads, with enough bytes around
                them.
        """
        if (found := content.rfind(_TOKEN_COUNT, begin)) >= 0:
            self._counted = content[max(0, found - USAGE_BYTES) : found + USAGE_BYTES]

    def _end(self) -> bytes:
        """Return the bytes in which the usage is searched, joined over the borders of reads and chunks."""
        latest = self.latest
        if len(latest) < USAGE_BYTES:
            latest = self.earlier[-USAGE_BYTES:] + latest
        end = self._counted + latest[-USAGE_BYTES:]
        return _BETWEEN_CHUNKS.sub(b"", end) if self._head is not None and self._head.chunked else end

    @property
    def _ends_with_connection(self) -> bool:
        """True if an answer has begun that is complete when the server closes the connection."""
        return self._client is not None and self._head is not None and self._head.until_close

    # Methods that the relay calls

    def flush(self) -> None:
        """Send the bytes that wait for the end of the event loop's turn."""
        if not (unsent := self._unsent):
            return
        self._unsent = []
        receiver = self._client or self.transport
        if receiver.is_closing():
            return  # the closed connection reports its end itself
        if len(unsent) == 1:
            receiver.write(unsent[0])
        else:
            receiver.writelines(unsent)

    def at_event_boundary(self) -> bool:
        head = self._head
        return head is not None and head.streams and head.chunked and self.latest.endswith(_BOUNDARIES)

    def send_last_event(self, event: bytes) -> None:
        head = self._head
        if head is not None and head.streams and head.until_close and self.latest.endswith(_PLAIN_BOUNDARIES):
            self._pass_on(event)
            self.flush()

    # Internals

    def _open(self, data: bytes) -> None:
        """Pass on the beginning of an answer once its head and some content have come; fail if it is no answer (rule 4)."""
        if self._held:
            data = self._held + data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:  # the end of the head was not found
            self._held = data
            if len(data) > MAX_HEAD_BYTES:
                self.fail(f"the head of its answer is larger than {MAX_HEAD_BYTES} bytes")
            return
        status = self._parser.get_status_code()
        if status < FIRST_FINAL_STATUS and self._pass_over(data):
            return
        if (status >= FIRST_SERVER_ERROR and status != NOT_IMPLEMENTED) or status < FIRST_FINAL_STATUS:
            excerpt = data[end : end + EXCERPT_BYTES].decode("latin-1")
            reason = Reason.WORKER_LOST if status in UNAVAILABLE else Reason.INTERNAL
            self.fail(f"it answered with status {status}: {excerpt!r}", reason)
            return
        complete = not self._due.end
        if end == len(data) and not complete:
            self._held = data  # keep the head until content comes (rule 3)
            return
        relayed = self._relayed
        assert relayed is not None
        owner, content = self._owner, data[end:]
        try:
            head = self._head = owner.heads.find(data[:end])
        except UnclearEnd as error:
            self.fail(str(error))
            return
        self.latest = b""
        if (
            complete
            and head.streams
            and not (content.endswith(_USUAL_END) and self._path in owner.says_done)
            and self._cut_short(content)
        ):
            self.fail(UNFINISHED)
            return
        try:
            self._client = relayed.begin(self.transport, self)
        except ClientDisconnected:
            self._held = data  # keep the bytes; the client's connection reports its end soon, which cancels the request
            return
        if complete or not head.streams or has_content(content):
            self.spoke, self.quiet = True, False
            if len(first_bytes := owner.first_bytes) < LEARNED_FIRST_BYTES:
                first_bytes.append((self.sent_at, relayed.first_byte_at, len(relayed.body), relayed.streams))
            else:
                owner.more_first_bytes += 1
        self._held = b""
        plain = self._bodies is not None
        keep_alive = self._keep_alive = relayed.keeps_alive and not (head.until_close or (plain and head.chunked))
        request_id = relayed.request_id.encode()
        self._pass_on(
            b"".join(
                (
                    head.plain_start if plain else head.start,
                    b"x-fleet-request-id: ",
                    request_id,
                    b"" if head.named else b"\r\nx-request-id: " + request_id,
                    b"" if head.limits else relayed.limits,
                    b"\r\n" + connection_line(keep_alive=keep_alive, chunks=not plain) + b"\r\n",
                    content if self._bodies is None else self._unpacked(self._bodies),
                )
            )
        )
        self.earlier, self.latest = b"", content
        if not head.streams and len(content) >= USAGE_BYTES:  # `latest` keeps all of shorter content
            self._keep_count(content, 0)
        self._events = max(1, content.count(b"data:"))
        self._complete = complete
        owner.write_batcher.afterwards(self._finish if complete else self._tell)

    def _pass_over(self, data: bytes) -> bool:
        """Skip interim heads (status 1xx) before the answer, and parse what follows them.

        Return False and skip nothing if `data` does not begin with a complete interim head, or if more than
        `MAX_INTERIM_HEADS` have come.
        """
        begin = 0
        while (interim := _INTERIM_HEAD.match(data, begin)) is not None:
            begin = interim.end()
            self._interim_heads += 1
        if not begin or self._interim_heads > MAX_INTERIM_HEADS:
            return False
        self._held = b""
        self._due = _ExpectedAnswer()
        self._due.expect()
        if self._bodies is None:
            self._parser = httptools.HttpResponseParser(self._due)
        else:
            self._unpack()
        if begin < len(data):
            self.data_received(data[begin:])
        return True

    def _cut_short(self, data: bytes) -> bool:
        """Return True if an event stream that ends with `data` lacks the last event that earlier streams of its path had (rule 4).

        If this stream has a last event, remember that the streams of its path end with one.
        """
        head, says_done = self._head, self._owner.says_done
        if head is None or not head.streams:
            return False
        if (
            _USUAL_LAST_EVENT in data  # a hundred times as fast as the pattern
            or _LAST_EVENT.search(_BETWEEN_CHUNKS.sub(b"", self.latest[-USAGE_BYTES:] + data))
        ):
            says_done.add(self._path)
            return False
        return self._path in says_done

    def _end_early(self, data: bytes) -> None:
        """Pass on the last bytes of a stream that was cut off, without the end of the answer, and report the failure."""
        left = data.removesuffix(_LAST_CHUNK)
        if left:
            self._pass_on(left if self._bodies is None else self._unpacked(self._bodies))
        self._events += left.count(b"data:")
        self.latest = left if b"data:" in left else self.latest + left
        self.fail(UNFINISHED)

    def _tell(self) -> None:
        """Report to `owner` how many events have come since the last report."""
        relayed = self._relayed
        events, self._events = self._events, 0
        if relayed is None or not events:
            return  # the answer was dropped or reported meanwhile
        relayed.answer_tokens += events
        self._owner.advanced(self._work_id, events)

    def _unpack(self) -> None:
        """Use a parser that decodes the chunks of the answer into `_bodies`."""
        self._bodies = []
        self._parser = httptools.HttpResponseParser(_ExpectedAnswerWithBody(self._due, self._bodies))

    def _unpacked(self, bodies: list[bytes]) -> bytes:
        """Return the content that was decoded since the last call, for a client without chunked encoding."""
        content = b"".join(bodies)
        bodies.clear()
        return content

    def _pass_on(self, data: bytes) -> None:
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self._owner.write_batcher.send(self.flush)

    def _send_answer(self) -> None:
        """Send the waiting bytes of the answer.

        Waiting bytes of a request are not sent, because its connection is closed.
        """
        if self._client is not None:
            self.flush()

    def _finish(self) -> None:
        relayed, self._relayed = self._relayed, None
        if relayed is None:
            return  # the answer was dropped meanwhile
        usable = self._head is not None and self._head.reusable and self._bodies is None
        reusable = usable and not self.transport.is_closing()
        # Read the attribute now, because the calls below may begin the next request, which changes the attribute.
        keep_alive = self._keep_alive
        if not reusable:
            self.transport.close()
        relayed.answer_tokens += self._events
        # the tenant is charged for the tokens that the server reports
        if relayed.tenant and (reported_tokens := _COMPLETION_TOKENS.findall(self._end())):
            relayed.answer_tokens = int(reported_tokens[-1])
        self._owner.finished(self, self._work_id, self._events, reusable=reusable)
        relayed.end(keep_alive=keep_alive)


class _ExpectedAnswer:
    """Gives the parser two callbacks, for the beginning and for the end of an answer; each works once per `expect`.

    The callbacks are the `pop` of two lists, so the parser calls no Python function. If a list is empty, the server has
    sent an answer without a request, and the parser fails.
    """

    def __init__(self) -> None:
        self.begin: list[None] = []
        self.end: list[None] = []
        self.on_message_begin = self.begin.pop
        self.on_message_complete = self.end.pop

    def expect(self) -> None:
        self.begin.append(None)
        self.end.append(None)


class _ExpectedAnswerWithBody:
    """Gives the parser the callbacks of `_ExpectedAnswer`, and one that collects the decoded content in `bodies`."""

    def __init__(self, due: _ExpectedAnswer, bodies: list[bytes]) -> None:
        self.on_message_begin = due.on_message_begin
        self.on_message_complete = due.on_message_complete
        self.on_body = bodies.append


class UpstreamUsage(Struct, frozen=True):
    """The numbers of prompt tokens and of cached tokens that a server reports for one request."""

    prompt_tokens: int
    cached_tokens: int | None  # None: the server reported no count; some servers leave out a count of 0


class _EventChoice(Struct):
    """The fields that may hold content of the answer, in one choice of a stream's event."""

    delta: dict[str, object] | None = None
    text: str | None = None
    finish_reason: object = None


class _Event(Struct):
    """The fields that may hold content of the answer, in one event of a stream."""

    choices: list[_EventChoice] | None = None
    type: str = ""


_EVENTS = Decoder(_Event)
# A server sends these events before its engine has answered.
_EMPTY_TYPES = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})


def has_content(content: bytes) -> bool:
    """Return True if a piece of a stream contains anything besides comments and events without content."""
    lines = _DATA_LINE.findall(content)
    if not lines:
        return b"data:" in content or _COMMENT_LINE.search(content) is None
    return not all(_is_empty(line) for line in lines)


def _is_empty(line: bytes) -> bool:
    if not line:
        return True
    try:
        event = _EVENTS.decode(line)
    except DecodeError:  # ``[DONE]``, an error, or a part of an event
        return False
    choices = event.choices
    if choices is None:
        return event.type in _EMPTY_TYPES
    return not any(
        each.finish_reason or each.text or any(said for name, said in (each.delta or {}).items() if name != "role")
        for each in choices
    )


def read_usage(content: bytes) -> UpstreamUsage | None:
    """Return the last usage in a piece of an answer; None if it has none.

    The text of the answer cannot be mistaken for a usage, because quotes are escaped within JSON strings.
    """
    if b"_tokens" not in content:  # most pieces have no usage, and this test is faster than the pattern
        return None
    prompt = _PROMPT_TOKENS.findall(content)
    if not prompt:
        return None
    cached = _CACHED_TOKENS.findall(content)
    return UpstreamUsage(int(prompt[-1]), int(cached[-1]) if cached else None)


def connection_line(*, keep_alive: bool, chunks: bool) -> bytes:
    """Return the header line that tells a client whether its connection stays open; empty if this follows from the HTTP version.

    `chunks` is false for a client of HTTP/1.0.
    """
    if not keep_alive:
        return b"connection: close\r\n"
    return b"" if chunks else b"%s: %s\r\n" % tuple(part.encode() for part in KEPT_ALIVE)


def read_head(content: bytes) -> AnswerHead:
    """Prepare the head of an answer for clients.

    `content` must be a complete head that ends with the empty line. Of its lines, only the transfer coding is checked.

    Raises:
        UnclearEnd: There is another transfer coding beside `chunked`, or `chunked` is named twice.
    """
    status_line, *lines = content[:-4].split(b"\r\n")
    version, _, status = status_line.partition(b" ")
    keep_alive = version == b"HTTP/1.1"
    kept, plain = [b"HTTP/1.1 " + status], [b"HTTP/1.1 " + status]
    chunked = coded = sized = streams = named = limits = False
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"connection":
            keep_alive = b"close" not in value.lower() and (keep_alive or b"keep-alive" in value.lower())
        if name in _ONE_CONNECTION:
            continue
        kept.append(line)
        if name == b"transfer-encoding":
            coding = value.strip(b" ").lower()
            # The parser does not take a value with a tab for chunked, so it would not find the end.
            if chunked or (coding != b"chunked" and b"chunked" in coding):
                raise UnclearEnd("its answer has another transfer coding beside chunked")
            chunked, coded = coding == b"chunked", True
            continue
        plain.append(line)
        sized = sized or name == b"content-length"
        named = named or name == b"x-request-id"
        limits = limits or name.startswith(b"x-ratelimit-")
        streams = streams or (name == b"content-type" and b"event-stream" in value.lower())
    empty = status[:3] in (b"204", b"304")
    until_close = not (chunked or empty or (sized and not coded))
    return AnswerHead(
        start=b"\r\n".join((*kept, b"")),
        plain_start=b"\r\n".join((*plain, b"")),
        chunked=chunked,
        until_close=until_close,
        streams=streams,
        reusable=keep_alive and not until_close,
        named=named,
        limits=limits,
    )
