"""What a connection to a foreign server passes on and tells of an answer, and when: transports by hand."""

import asyncio

import pytest

from fleet.adapters.upstream import AnswerHeads, Upstream, read_head
from fleet.ids import RequestId

WORK = RequestId("r#1")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: a\n\n\r\n"
LAST = b"0\r\n\r\n"


class Transport:
    def __init__(self):
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

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
    body = b"{}"

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
        self.told = []

    def advanced(self, work_id, tokens):
        self.told.append(("advanced", tokens))

    def finished(self, upstream, work_id, tokens, *, reusable):
        self.told.append(("finished", tokens, "reusable" if reusable else "of no use"))

    def failed(self, work_id, reason, message):
        self.told.append(("failed", message))

    def closed(self, upstream):
        self.told.append(("closed",))


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def asked(owner):
    """A connection that was just asked something."""
    upstream = Upstream(owner, report_every=2)
    upstream.connection_made(Transport())
    relayed = Relayed()
    upstream.begin(WORK, relayed, b"POST / HTTP/1.1\r\n\r\n")
    return upstream, relayed


async def test_a_client_has_its_answer_before_anything_is_told_of_it(owner, asked):
    upstream, relayed = asked

    upstream.data_received(HEAD + EVENT + LAST)

    assert relayed.client.written.endswith(EVENT + LAST)
    assert owner.told == []
    await asyncio.sleep(0)
    assert owner.told == [("finished", 1, "reusable")]
    assert relayed.ended == relayed.answer_tokens == 1


async def test_tokens_are_told_once_however_many_come_in_a_turn(owner, asked):
    upstream, relayed = asked

    upstream.data_received(HEAD + EVENT)
    for _ in range(4):
        upstream.data_received(EVENT)
    upstream.data_received(EVENT + LAST)
    await asyncio.sleep(0)

    assert sum(tokens for _, tokens, *_ in owner.told) == relayed.answer_tokens == 6
    assert owner.told[-1][0] == "finished"


async def test_nothing_is_told_of_an_answer_that_was_dropped_in_the_same_turn(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream.drop()
    await asyncio.sleep(0)

    assert owner.told == []
    assert not relayed.ended


async def test_a_connection_that_ends_right_after_its_answer_has_not_failed(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream._transport.closed = True
    upstream.connection_lost(None)
    await asyncio.sleep(0)

    assert owner.told == [("finished", 1, "of no use")]
    assert relayed.ended == 1


async def test_what_follows_a_complete_answer_ends_the_connection_and_not_the_answer(owner, asked):
    upstream, relayed = asked
    upstream.data_received(HEAD + EVENT + LAST)

    upstream.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.sleep(0)

    assert relayed.client.written.endswith(EVENT + LAST)
    assert owner.told == [("finished", 1, "of no use")]


def test_what_concerns_one_connection_stays_there():
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
