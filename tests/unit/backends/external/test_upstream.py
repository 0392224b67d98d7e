"""Upstream connection: which parts of an answer it passes on and reports, and when."""

import pytest

from fleet.backends.external.upstream import (
    MAX_INTERIM_HEADS,
    USAGE_BYTES,
    AnswerHeads,
    UnclearEnd,
    Upstream,
    UpstreamUsage,
    has_content,
    read_head,
)
from fleet.backends.external.write_batcher import MAX_BATCHED_MESSAGES, WriteBatcher
from fleet.core.ids import RequestId
from tests.support.waiting import turns

WORK = RequestId("r#1")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: a\n\n\r\n"
LAST = b"0\r\n\r\n"
REQUEST = b"POST / HTTP/1.1\r\n\r\n"


class Transport:
    def __init__(self):
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

    def writelines(self, pieces):
        self.written += b"".join(pieces)

    def get_extra_info(self, _name):
        return None

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True

    def close(self):
        self.closed = True


class Relayed:
    request_id = RequestId("r")
    keeps_alive = chunks = True
    path = "/v1/completions"
    body = b"{}"
    limits = b""
    tenant = ""
    first_byte_at = 0
    streams = True

    def __init__(self):
        self.client = Transport()
        self.answer_tokens = 0
        self.ended = 0

    def begin(self, _source, _flow):
        return self.client

    def end(self, *, keep_alive):
        self.ended += 1


class Owner:
    def __init__(self):
        self.heads = AnswerHeads()
        self.write_batcher = WriteBatcher()
        self.told = []
        self.says_done = set()
        self.first_bytes = []
        self.more_first_bytes = 0

    def spoke(self, upstream, relayed):
        self.told.append(("spoke",))

    def advanced(self, work_id, tokens):
        self.told.append(("advanced", tokens))

    def finished(self, upstream, work_id, tokens, *, reusable):
        self.told.append(("finished", tokens, "reusable" if reusable else "of no use"))

    def failed(self, work_id, reason, message):
        self.told.append(("failed", message))

    def stale(self, work_id, relayed):
        self.told.append(("stale",))

    def closed(self, upstream):
        self.told.append(("closed",))


async def make_busy(owner):
    """Send several messages in a turn of the event loop, so that messages of the next turn wait for its end."""
    for _ in range(2):
        owner.write_batcher.send(lambda: None)
    await turns()


@pytest.fixture
async def owner():
    owner = Owner()
    await make_busy(owner)
    return owner


@pytest.fixture
async def asked(owner):
    """Return a connection and its request, which was sent in an earlier turn of the event loop."""
    upstream = Upstream(owner, report_every=2)
    upstream.connection_made(Transport())
    relayed = Relayed()
    upstream.begin(WORK, relayed, REQUEST)
    await turns()
    assert upstream.transport.written == REQUEST + relayed.body
    await make_busy(owner)
    return upstream, relayed


async def test_answers_of_a_turn_are_sent_before_any_report(owner, asked):
    upstream, relayed = asked
    other, another = Upstream(owner, report_every=2), Relayed()
    other.connection_made(Transport())
    other.begin(WORK, another, REQUEST)
    await make_busy(owner)
    written_when_told = []
    relayed.end = lambda **_: written_when_told.append(another.client.written)

    upstream.data_received(HEAD + EVENT + LAST)
    other.data_received(HEAD + EVENT + LAST)

    assert owner.told == []
    await turns()
    assert owner.told == [("finished", 1, "reusable")] * 2
    assert relayed.client.written.endswith(EVENT + LAST)
    assert written_when_told == [relayed.client.written]
    assert another.ended == another.answer_tokens == relayed.answer_tokens == 1


async def test_every_client_has_its_answer_however_many_come_in_a_turn(owner):
    asked = [(Upstream(owner, report_every=2), Relayed()) for _ in range(3 * MAX_BATCHED_MESSAGES)]
    for upstream, relayed in asked:
        upstream.connection_made(Transport())
        upstream.begin(WORK, relayed, REQUEST)
    await turns()

    for upstream, _ in asked:
        upstream.data_received(HEAD + EVENT)
    for upstream, _ in asked:
        upstream.data_received(LAST)
    await turns()

    assert all(upstream.transport.written == REQUEST + relayed.body for upstream, relayed in asked)
    assert all(relayed.client.written.endswith(EVENT + LAST) for _, relayed in asked)


async def test_bytes_before_a_request_are_no_answer(owner):
    upstream, relayed = Upstream(owner, report_every=2), Relayed()
    upstream.connection_made(Transport())
    upstream.begin(WORK, relayed, REQUEST)
    await turns()
    upstream.data_received(HEAD + EVENT + LAST)
    await turns()
    owner.told.clear()
    again = Relayed()
    await make_busy(owner)

    upstream.begin(WORK, again, REQUEST)
    upstream.data_received(HEAD + EVENT + LAST)
    await turns()
    upstream.connection_lost(None)

    assert again.client.written == b""
    assert upstream.transport.written == REQUEST + relayed.body  # the second request was not sent
    assert owner.told == [("stale",)]  # the owner then sends it over another connection


@pytest.mark.parametrize("end", ["drop", "fail", "flush", "lost"])
async def test_pending_bytes_reach_the_client_before_an_error(owner, asked, end):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT)
    upstream.data_received(EVENT)

    match end:
        case "drop":
            upstream.drop()
        case "fail":
            upstream.fail("it said nothing for 1 s")
        case "flush":
            upstream.flush()
        case "lost":
            upstream.connection_lost(None)

    assert relayed.client.written.endswith(EVENT + EVENT)
    written = relayed.client.written
    await turns()
    assert relayed.client.written == written  # the bytes were written only once


async def test_a_request_that_is_dropped_in_its_turn_is_not_sent(owner):
    upstream = Upstream(owner, report_every=2)
    upstream.connection_made(Transport())
    upstream.begin(WORK, Relayed(), REQUEST)

    upstream.drop()
    await turns()

    assert upstream.transport.written == b""


async def test_tokens_of_a_turn_are_reported_once(owner, asked):
    upstream, relayed = asked

    upstream.data_received(HEAD + EVENT)
    for _ in range(4):
        upstream.data_received(EVENT)
    upstream.data_received(EVENT + LAST)
    await turns()

    assert sum(tokens for _, tokens, *_ in owner.told) == relayed.answer_tokens == 6
    assert owner.told[-1][0] == "finished"


async def test_dropped_answer_is_not_reported(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream.drop()
    await turns()

    assert owner.told == []
    assert not relayed.ended


async def test_close_right_after_the_answer_is_no_failure(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream.transport.closed = True
    upstream.connection_lost(None)
    await turns()

    assert owner.told == [("finished", 1, "of no use")]
    assert relayed.ended == 1


async def test_bytes_after_the_answer_close_only_the_connection(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    await turns()

    assert relayed.client.written.endswith(EVENT + LAST)
    assert owner.told == [("finished", 1, "of no use")]


async def test_usage_is_read_wherever_the_answer_is_split(owner):
    """Split the answer in two at every position of the usage, as the network may do."""
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":21,"prompt_tokens_details":{"cached_tokens":3}}}'
    body = b'{"choices":[{"text":"' + b"a" * 5000 + b'"}],' + usage
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    for cut in range(1, len(usage)):
        upstream, relayed = Upstream(owner, report_every=2), Relayed()
        upstream.connection_made(Transport())
        relayed.tenant = "somebody"
        upstream.begin(WORK, relayed, REQUEST)
        upstream.flush()
        upstream.data_received(head + body[:-cut])
        upstream.data_received(body[-cut:])
        await turns()

        assert (relayed.ended, relayed.answer_tokens) == (1, 21), cut
        assert upstream.usage() == UpstreamUsage(7, 3), cut


@pytest.mark.parametrize("size", [1, 7, 40])
async def test_usage_counts_in_however_many_pieces_it_comes(asked, size):
    upstream, relayed = asked
    relayed.tenant = "somebody"
    usage = (
        b'data: {"usage":{"prompt_tokens":7,"completion_tokens":21,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
    )
    rest = EVENT * 100 + b"%x\r\n" % len(usage) + usage + b"\r\n" + LAST

    upstream.data_received(HEAD + EVENT)
    for begin in range(0, len(rest), size):
        upstream.data_received(rest[begin : begin + size])
    await turns()

    assert (relayed.ended, relayed.answer_tokens) == (1, 21)
    assert upstream.usage() == UpstreamUsage(7, 3)


@pytest.mark.parametrize("size", [1, 2, 7, 60])
async def test_usage_counts_in_however_many_chunks_it_comes(asked, size):
    """Split the usage into HTTP chunks of any size, as a proxy in front of the server may do."""
    upstream, relayed = asked
    relayed.tenant = "somebody"
    usage = b'data: {"usage":{"prompt_tokens":1234,"completion_tokens":567,"prompt_tokens_details":{"cached_tokens":89}}}\n\n'
    pieces = [usage[first : first + size] for first in range(0, len(usage), size)]

    upstream.data_received(
        HEAD + EVENT + b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + LAST
    )
    await turns()

    assert upstream.usage() == UpstreamUsage(1234, 89)
    assert relayed.answer_tokens == 567


@pytest.mark.parametrize("size", [1, 30, 900, 4096, 5000, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "chunked"])
async def test_usage_counts_however_much_of_the_answer_follows_it(asked, size, chunked):
    """Put more fields behind the usage, as vLLM does with `prompt_logprobs` and `prompt_token_ids` if it does not stream."""
    upstream, relayed = asked
    relayed.tenant = "somebody"
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":21,"prompt_tokens_details":{"cached_tokens":3}}'
    text, ids = b'{"choices":[{"text":"' + b"data: a" * 900 + b'"}],', b',"prompt_token_ids":[' + b"5," * 9000 + b"5]}"
    body = text + usage + ids
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    if chunked:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        body = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (text + usage[:30], usage[30:] + ids)) + LAST
    answer = head + body

    for begin in range(0, len(answer), size):
        upstream.data_received(answer[begin : begin + size])
    await turns()

    assert (relayed.ended, relayed.answer_tokens) == (1, 21)
    assert upstream.usage() == UpstreamUsage(7, 3)


@pytest.mark.parametrize("piece", [EVENT, b"3e8\r\n" + bytes(1000) + b"\r\n"], ids=["events", "something else"])
async def test_however_long_an_answer_is_little_of_it_is_kept(asked, piece):
    upstream, _ = asked
    upstream.data_received(HEAD + EVENT)
    for _ in range(1000):
        upstream.data_received(piece)

    assert len(upstream.earlier + upstream.latest) <= 2 * USAGE_BYTES + len(piece)


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: chunked\t",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    ],
)
def test_head_that_leaves_the_end_open_is_refused(lines):
    """A client and the router could read another end, so a second answer could follow for the client's next request."""
    with pytest.raises(UnclearEnd):
        read_head(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\n")


def test_answer_with_another_coding_ends_with_its_connection():
    """Its length may be that of the content before it was coded."""
    head = read_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\ncontent-length: 2\r\n\r\n")
    assert (head.chunked, head.until_close, head.reusable) == (False, True, False)


async def test_last_event_may_follow_an_event_whose_end_came_alone(asked):
    upstream, _ = asked
    upstream.data_received(HEAD + EVENT)
    for byte in EVENT[:-1]:
        upstream.data_received(bytes([byte]))
    assert not upstream.at_event_boundary()
    upstream.data_received(EVENT[-1:])
    assert upstream.at_event_boundary()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\nlink: </b.css>; rel=preload\r\n\r\n"
BARE = b"HTTP/1.1 100\r\n\r\n"


@pytest.mark.parametrize(
    "interim", [CONTINUE, HINTS, HINTS + CONTINUE, CONTINUE * MAX_INTERIM_HEADS, BARE, BARE + HINTS]
)
@pytest.mark.parametrize("chunks", [True, False])
async def test_interim_heads_are_skipped_wherever_they_are_split(owner, interim, chunks):
    sent = interim + HEAD + EVENT + LAST
    for cut in range(1, len(sent)):
        upstream, relayed = Upstream(owner, report_every=2), Relayed()
        relayed.chunks = chunks
        upstream.connection_made(Transport())
        upstream.begin(WORK, relayed, REQUEST)
        upstream.flush()
        upstream.data_received(sent[:cut])
        upstream.data_received(sent[cut:])
        await turns()

        assert relayed.ended == 1, cut
        assert relayed.client.written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert relayed.client.written.endswith(EVENT + LAST if chunks else b"\r\n\r\ndata: a\n\n")


@pytest.mark.parametrize(
    "said",
    [
        CONTINUE * (MAX_INTERIM_HEADS + 1),
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        CONTINUE + b"hello\r\n\r\n",
    ],
)
@pytest.mark.parametrize("size", [10, 10_000])
async def test_too_many_interim_heads_or_other_bytes_fail(owner, asked, said, size):
    upstream, relayed = asked
    sent = said + HEAD + EVENT + LAST
    for begin in range(0, len(sent), size):
        if not upstream.transport.closed:
            upstream.data_received(sent[begin : begin + size])
    await turns()

    assert [event for event, *_ in owner.told] == ["failed"]
    assert relayed.client.written == b""


async def test_interim_head_shows_that_the_request_was_seen(owner, asked):
    """Close a used connection after an interim head: the request counts as failed, and is not sent again as after an idle time."""
    upstream, _ = asked
    upstream.data_received(HEAD + EVENT + LAST)
    await turns()
    owner.told.clear()
    upstream.begin(WORK, Relayed(), REQUEST)
    upstream.flush()
    upstream.data_received(CONTINUE)

    upstream.connection_lost(None)

    assert [event for event, *_ in owner.told] == ["failed"]


@pytest.mark.parametrize("told", [b"-5", b'"many"', b"9" * 10, b"9" * 99])
async def test_invalid_token_count_is_not_charged(asked, told):
    upstream, relayed = asked
    relayed.tenant = "somebody"
    body = b'{"prompt_tokens":1,"completion_tokens":' + told + b"}"
    upstream.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await turns()

    assert (relayed.ended, relayed.answer_tokens) == (1, 1)


def test_connection_headers_are_not_passed_on():
    head = read_head(
        b"HTTP/1.1 200 OK\r\nServer: x\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n"
        b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Fleet-Request-Id: forged\r\n\r\n"
    )

    assert head.start == (
        b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    )
    assert head.plain_start == b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: text/event-stream\r\n"
    assert head.streams
    assert head.reusable


@pytest.mark.parametrize(
    ("content", "until_close", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n", False, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: Close\r\n\r\n", False, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\n", False, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\nconnection: keep-alive\r\n\r\n", False, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", True, False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, True),
    ],
)
def test_where_an_answer_ends_and_whether_another_may_follow(content, until_close, reusable):
    head = read_head(content)

    assert (head.until_close, head.reusable) == (until_close, reusable)


@pytest.mark.parametrize(
    ("event", "tells"),
    [
        (b'{"type": "response.created", "response": {}}', False),
        (b'{"type": "message_start", "message": {}}', False),
        (b'{"type": "ping"}', False),
        (b'{"type": "response.output_text.delta", "delta": "a"}', True),
        (b'{"type": "content_block_start", "index": 0}', True),
        (b'{"choices": [{"delta": {"role": "assistant"}}]}', False),
        (b'{"choices": [{"delta": {"content": "a"}}]}', True),
    ],
)
def test_events_before_the_engine_answers_are_no_content(event, tells):
    assert has_content(b"data: " + event + b"\n\n") is tells
