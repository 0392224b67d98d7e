"""What is passed on of the head of an answer."""

import pytest

from fleet.adapters.upstream import read_head


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
