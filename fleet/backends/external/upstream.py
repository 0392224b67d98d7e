"""One connection to a foreign server: what it answers goes to the client as it comes.

Rules:

1. One request at a time; a connection whose answer ended where HTTP says that it does is used again.
2. The parser sees every byte, and only to say where the head and the answer end. What it rejects, and what nobody asked for,
   ends the connection.
3. The head waits for the first bytes of the content, so that both leave in one write, and so that a server that fails in
   between costs nothing but time. What concerns this connection alone is taken out of it.
4. An answer whose status is 500 or more is none; neither is one that is cut off, which a stream of events is as well that ends without
   the event ``[DONE]``, if its server has ended one with it before. Whether another server may give one instead is
   not decided here. What a server says before its answer (``100 Continue``, ``103 Early Hints``) is passed over, unless it goes on
   and on; another protocol (101) is no answer.
5. Tokens are not looked at. Events are counted, which is near enough to know how long an answer has become; a tenant is charged for
   what the server says at the end, if it says it.
6. A request, and an answer's head with what came with it, leave at the end of the turn, and what an answer brings about here
   (bookings, counters, the connection's next use) comes after that (`fleet.backends.external.write_batcher`). Whatever else is said to a client
   (an error, the end) goes behind what it is still to get. What follows in later turns is passed on at once: there is nothing to
   decide in between.
7. An answer says something from its first content on. Comments between events, and events that only name the role, are passed on, but
   an engine that hangs may send them as well, so they are no sign of life (`has_content`).
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
from fleet.net.http.messages import ClientDisconnected

MAX_HEAD_BYTES = 64 << 10  # of an answer
MAX_KNOWN_HEADS = 256  # of answers; with a date in it, a head is known for a second
SMALL_BODY_BYTES = 16 << 10  # up to here copying is cheaper than a second buffer to send
MAX_INTERIM_HEADS = 16  # before an answer; usual is one
UNAVAILABLE = frozenset({502, 503, 504})
EXCERPT_BYTES = 200
UNFINISHED = "its stream ended before its last event"
USAGE_BYTES = 4096  # at the end of an answer, where usage is
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*([0-9]{1,12})')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')  # of more digits it is no count
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*([0-9]{1,12})')

_BETWEEN_CHUNKS = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}(?:;[^\r\n]*)?\r\n")
_INTERIM_HEAD = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9]{2}(?=[ \r]).*?\r\n\r\n", re.DOTALL)
_ONE_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"x-fleet-request-id"})
_BOUNDARIES = (b"\n\n\r\n", b"\n\r\n\r\n")  # the end of an event at the end of a chunk
_PLAIN_BOUNDARIES = (b"\n\n", b"\n\r\n\r\n")
_DONE = b"[DONE]"  # the last event of a stream
_LAST_CHUNK = b"0\r\n\r\n"
_DATA_LINE = re.compile(rb"^data:[ \t]*([^\r\n]*)", re.MULTILINE)
_COMMENT_LINE = re.compile(rb"^:", re.MULTILINE)


class AnswerHead(Struct, frozen=True):
    """What becomes of the head of an answer."""

    start: bytes  # status line and headers, without the empty line
    plain_start: bytes  # the same for clients that do not understand chunks
    chunked: bool
    until_close: bool  # the answer ends with the connection
    streams: bool  # events
    reusable: bool  # the connection
    named: bool  # the server has a name of its own for the request
    limits: bool  # it tells what is left of limits of its own


class AnswerHeads:
    """Heads that were seen before, by their exact bytes."""

    def __init__(self) -> None:
        self._known: dict[bytes, AnswerHead] = {}

    def find(self, content: bytes) -> AnswerHead:
        if (head := self._known.get(content)) is None:
            if len(self._known) >= MAX_KNOWN_HEADS:
                self._known.clear()
            head = self._known[content] = read_head(content)
        return head


class UpstreamOwner(Protocol):
    """The worker that a connection leads to."""

    heads: AnswerHeads
    write_batcher: WriteBatcher
    first_bytes: list[tuple[Nanos, Nanos, int, bool]]
    """The answers whose first content came since the worker looked: when each was asked for and when that came, how long the request
    is, and whether it is a stream."""

    says_done: bool
    """True if a stream of its has ended with ``[DONE]``."""

    def spoke(self, upstream: "Upstream", relayed: RelayedRequest) -> None:
        """Note the first content of an answer that began without content."""
        ...

    def advanced(self, work_id: RequestId, tokens: int) -> None:
        """So many tokens more were passed on."""
        ...

    def finished(self, upstream: "Upstream", work_id: RequestId, tokens: int, *, reusable: bool) -> None:
        """The answer is complete; `tokens` were passed on since it was told last."""
        ...

    def failed(self, work_id: RequestId, reason: Reason, message: str) -> None:
        """The answer is none, or was cut off; the connection is of no use any more."""
        ...

    def stale(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """The server had closed the connection, which was idle, before it saw the request."""
        ...

    def closed(self, upstream: "Upstream") -> None:
        """The connection was closed while nothing was asked of it."""
        ...


class Upstream(asyncio.Protocol):
    """A connection; a `Flow` while it answers."""

    def __init__(self, owner: UpstreamOwner, report_every: int) -> None:
        """For `create_connection`.

        Args:
            owner: Hears how requests go on.
            report_every: Tokens after which it is told again.
        """
        self._owner = owner
        self._report_every = report_every
        self._due = _ExpectedAnswer()
        self._parser = httptools.HttpResponseParser(self._due)
        self._transport: asyncio.Transport
        self._work_id = RequestId("")
        self._relayed: RelayedRequest | None = None
        self._client: asyncio.Transport | None = None  # once the head was passed on
        self._complete = False  # the answer was, and that is about to be told
        self._head: AnswerHead | None = None
        self._held = b""  # of the head
        self._unsent: list[bytes] = []  # until the turn ends: the request, or of the answer once there is a client
        self._latest = b""  # of the answer, from the latest read on in which an event began; of long ones the end
        self._earlier = b""  # the one before
        self._interim_heads = 0  # before the answer
        self._served = 0  # requests
        self._events = 0  # not told yet
        self._keep_alive = False  # of the client's connection
        self._bodies: list[bytes] | None = None  # unpacked, for a client that does not understand chunks
        self.sent_at = Nanos(0)  # this and the next one are the worker's: when it sent the request, and as which
        self.turn = 0
        self.spoke = False  # content of the answer came (rule 7)
        self.quiet = True  # no content came since the worker looked last
        self._quiet_since: Nanos | None = None  # as it found then; None: it has not looked since the request was sent

    # From the worker

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    @property
    def relayed(self) -> RelayedRequest | None:
        """The request that is under way."""
        return self._relayed

    @property
    def begun(self) -> bool:
        """True if a part of the answer was passed on."""
        return self._client is not None

    def quiet_for(self, now: Nanos) -> Nanos:
        """Since when nothing was heard, as far as one can tell who looks now and then; looking is what this is."""
        if not self.quiet or self._quiet_since is None:
            self.quiet, self._quiet_since = True, now
        return Nanos(now - self._quiet_since)

    def begin(self, work_id: RequestId, relayed: RelayedRequest, opening: bytes) -> None:
        """Send a request; nothing else is under way.

        Args:
            work_id: What it is called when it is told of.
            relayed: The request, and where the answer goes.
            opening: Its head.
        """
        assert self._relayed is None
        self._work_id = work_id
        self._relayed = relayed
        self._served += 1
        self._client = None
        self._complete = False
        self._held = b""
        self._events = 0
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
        """Nobody waits for the rest of the answer any more."""
        self._send_answer()
        self._relayed = None
        self._transport.abort()

    def fail(self, message: str, reason: Reason = Reason.WORKER_LOST) -> None:
        """Give the answer up."""
        assert self._relayed is not None
        self._send_answer()
        self._tell()
        self._relayed = None
        self._transport.abort()
        self._owner.failed(self._work_id, reason, message)

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none of asyncio's classes
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._relayed is None or self._complete or (self._unsent and self._client is None):  # nothing was asked yet
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # It takes one answer and no more, so that of one behind others it is told the beginning anew.
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
        if events := data.count(b"data:"):
            self.quiet = False
            self._events += events
            self._earlier, self._latest = self._latest, data
        else:  # it goes on with what came before
            self._latest = self._latest[-USAGE_BYTES:] + data[-USAGE_BYTES:]
            if self._head is None or not self._head.streams or _COMMENT_LINE.search(data) is None:
                self.quiet = False
        if not self._due.end:
            self._complete = True
            self._owner.write_batcher.afterwards(self._finish)
        elif self._events >= self._report_every:
            self._owner.write_batcher.afterwards(self._tell)

    def connection_lost(self, exc: Exception | None) -> None:
        self._send_answer()
        relayed, self._relayed = self._relayed, None
        del self._parser  # the two hold each other
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
            self._tell()  # the router has to know of an answer that has begun, or it would begin another one
            self._relayed = None
            self._owner.failed(self._work_id, Reason.WORKER_LOST, f"it closed the connection before the end{cause}")

    def usage(self) -> "UpstreamUsage | None":
        """What the end of the answer that has just come says of its prompt; None if it says nothing."""
        return read_usage(self._end())

    def _end(self) -> bytes:
        """Of an answer: where its usage is, if it has one, in however many pieces it came, and in however many chunks."""
        latest = self._latest
        if len(latest) < USAGE_BYTES:
            latest = self._earlier[-USAGE_BYTES:] + latest
        end = latest[-USAGE_BYTES:]
        return _BETWEEN_CHUNKS.sub(b"", end) if self._head is not None and self._head.chunked else end

    @property
    def _ends_with_connection(self) -> bool:
        """Whether an answer has begun whose end is that of the connection."""
        return self._client is not None and self._head is not None and self._head.until_close

    # From whoever passes the answer on

    def flush(self) -> None:
        """Send what waits for the end of the turn."""
        if not (unsent := self._unsent):
            return
        self._unsent = []
        receiver = self._client or self._transport
        if receiver.is_closing():
            return  # whoever it is for hears of that by itself
        if len(unsent) == 1:
            receiver.write(unsent[0])
        else:
            receiver.writelines(unsent)

    def at_event_boundary(self) -> bool:
        head = self._head
        return head is not None and head.streams and head.chunked and self._latest.endswith(_BOUNDARIES)

    def send_last_event(self, event: bytes) -> None:
        head = self._head
        if head is not None and head.streams and head.until_close and self._latest.endswith(_PLAIN_BOUNDARIES):
            self._pass_on(event)
            self.flush()

    # Inside

    def _open(self, data: bytes) -> None:
        """The answer begins."""
        if self._held:
            data = self._held + data
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:  # it was not found
            self._held = data
            if len(data) > MAX_HEAD_BYTES:
                self.fail(f"the head of its answer is larger than {MAX_HEAD_BYTES} bytes")
            return
        status = self._parser.get_status_code()
        if status < FIRST_FINAL_STATUS and self._pass_over(data):
            return
        if status >= FIRST_SERVER_ERROR or status < FIRST_FINAL_STATUS:
            excerpt = data[end : end + EXCERPT_BYTES].decode("latin-1")
            reason = Reason.WORKER_LOST if status in UNAVAILABLE else Reason.INTERNAL
            self.fail(f"it answered with status {status}: {excerpt!r}", reason)
            return
        complete = not self._due.end
        if end == len(data) and not complete:
            self._held = data  # rule 3
            return
        relayed = self._relayed
        assert relayed is not None
        head = self._head = self._owner.heads.find(data[:end])
        self._latest = b""
        if complete and head.streams and self._cut_short(data):
            self.fail(UNFINISHED)
            return
        try:
            self._client = relayed.begin(self._transport, self)
        except ClientDisconnected:
            self._held = data  # until the request hears of it, from its connection
            return
        if complete or not head.streams or has_content(data[end:]):
            self.spoke, self.quiet = True, False
            self._owner.first_bytes.append((self.sent_at, relayed.first_byte_at, len(relayed.body), relayed.streams))
        self._held = b""
        plain = self._bodies is not None
        keep_alive = self._keep_alive = relayed.keeps_alive and not (head.until_close or plain)
        request_id = relayed.request_id.encode()
        self._pass_on(
            b"".join(
                (
                    head.plain_start if plain else head.start,
                    b"x-fleet-request-id: ",
                    request_id,
                    b"" if head.named else b"\r\nx-request-id: " + request_id,
                    b"" if head.limits else relayed.limits,
                    b"\r\n\r\n" if keep_alive else b"\r\nconnection: close\r\n\r\n",
                    data[end:] if self._bodies is None else self._unpacked(self._bodies),
                )
            )
        )
        self._earlier, self._latest = b"", data
        self._events = max(1, data.count(b"data:", end))
        self._complete = complete
        self._owner.write_batcher.afterwards(self._finish if complete else self._tell)

    def _pass_over(self, data: bytes) -> bool:
        """Go on behind the interim heads with which the answer begins; False if it begins with none, or with too many."""
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
        """Say whether an answer that ends with `data` is a stream that breaks off."""
        head, owner = self._head, self._owner
        if head is None or not head.streams:
            return False
        if _DONE in data or _DONE in _BETWEEN_CHUNKS.sub(b"", self._latest[-USAGE_BYTES:] + data):
            owner.says_done = True
            return False
        return owner.says_done

    def _end_early(self, data: bytes) -> None:
        """Pass on what is left of a stream that breaks off, less the end of its last chunk, and give it up."""
        left = data.removesuffix(_LAST_CHUNK)
        if left:
            self._pass_on(left if self._bodies is None else self._unpacked(self._bodies))
        self._events += left.count(b"data:")
        self._latest = left if b"data:" in left else self._latest + left
        self.fail(UNFINISHED)

    def _tell(self) -> None:
        """Of the events since it was told last."""
        relayed = self._relayed
        events, self._events = self._events, 0
        if relayed is None or not events:
            return  # dropped, or told of meanwhile
        relayed.answer_tokens += events
        self._owner.advanced(self._work_id, events)

    def _unpack(self) -> None:
        """Have the parser give the content of the answer."""
        self._bodies = []
        self._parser = httptools.HttpResponseParser(_ExpectedAnswerWithBody(self._due, self._bodies))

    def _unpacked(self, bodies: list[bytes]) -> bytes:
        """What has come, for a client that does not understand chunks."""
        content = b"".join(bodies)
        bodies.clear()
        return content

    def _pass_on(self, data: bytes) -> None:
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self._owner.write_batcher.send(self.flush)

    def _send_answer(self) -> None:
        """Whatever is left of it. A request is not sent any more once its connection is closed."""
        if self._client is not None:
            self.flush()

    def _finish(self) -> None:
        relayed, self._relayed = self._relayed, None
        if relayed is None:
            return  # dropped meanwhile
        usable = self._head is not None and self._head.reusable and self._bodies is None
        reusable = usable and not self._transport.is_closing()
        keep_alive = self._keep_alive  # before the next request may be sent
        if not reusable:
            self._transport.close()
        relayed.answer_tokens += self._events
        if relayed.tenant and (told := _COMPLETION_TOKENS.findall(self._end())):  # who is charged for them
            relayed.answer_tokens = int(told[-1])
        self._owner.finished(self, self._work_id, self._events, reusable=reusable)
        relayed.end(keep_alive=keep_alive)


class _ExpectedAnswer:
    """What the parser must still come upon: the beginning and the end of one answer.

    The parser takes them out itself, without a call of ours; where there is none to take, the server says more than it was
    asked, and the parser fails.
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
    """The same, and the content is wanted as well."""

    def __init__(self, due: _ExpectedAnswer, bodies: list[bytes]) -> None:
        self.on_message_begin = due.on_message_begin
        self.on_message_complete = due.on_message_complete
        self.on_body = bodies.append


class UpstreamUsage(Struct, frozen=True):
    """Of a prompt, in the server's own tokens."""

    prompt_tokens: int
    cached_tokens: int | None  # None: it does not say, which with some servers is to say none


class _Choice(Struct):
    """The part of a choice that may hold content."""

    delta: dict[str, object] | None = None
    text: str | None = None
    finish_reason: object = None


class _Event(Struct):
    """The part of an event that may hold content."""

    choices: list[_Choice]


_EVENTS = Decoder(_Event)


def has_content(content: bytes) -> bool:
    """Say whether a piece of a stream has content. Whatever is neither a comment nor an empty event is taken for content."""
    lines = _DATA_LINE.findall(content)
    if not lines:
        return b"data:" in content or _COMMENT_LINE.search(content) is None
    return not all(_is_empty(line) for line in lines)


def _is_empty(line: bytes) -> bool:
    if not line:
        return True
    try:
        choices = _EVENTS.decode(line).choices
    except DecodeError:  # ``[DONE]``, an error, a part of an event, or what another API says
        return False
    return not any(
        each.finish_reason or each.text or any(said for name, said in (each.delta or {}).items() if name != "role")
        for each in choices
    )


def read_usage(content: bytes) -> UpstreamUsage | None:
    """The latest usage in a piece of an answer. Inside a string of JSON there can be none: its quotes are escaped."""
    prompt = _PROMPT_TOKENS.findall(content)
    if not prompt:
        return None
    cached = _CACHED_TOKENS.findall(content)
    return UpstreamUsage(int(prompt[-1]), int(cached[-1]) if cached else None)


def read_head(content: bytes) -> AnswerHead:
    """What to pass on of a head that the parser has accepted, up to and with the empty line."""
    status_line, *lines = content[:-4].split(b"\r\n")
    version, _, status = status_line.partition(b" ")
    keep_alive = version == b"HTTP/1.1"
    kept, plain = [b"HTTP/1.1 " + status], [b"HTTP/1.1 " + status]
    chunked = sized = streams = named = limits = False
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"connection":
            keep_alive = b"close" not in value.lower() and (keep_alive or b"keep-alive" in value.lower())
        if name in _ONE_CONNECTION:
            continue
        kept.append(line)
        if name == b"transfer-encoding":
            chunked = b"chunked" in value.lower()
            continue
        plain.append(line)
        sized = sized or name == b"content-length"
        named = named or name == b"x-request-id"
        limits = limits or name.startswith(b"x-ratelimit-")
        streams = streams or (name == b"content-type" and b"event-stream" in value.lower())
    empty = status[:3] in (b"204", b"304")
    until_close = not (chunked or sized or empty)
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
