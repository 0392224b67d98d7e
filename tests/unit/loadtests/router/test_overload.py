"""Overload test: how its client reads answers, and which goals it reports as missed."""

import asyncio
import random

import pytest

from loadtests.router import overload
from loadtests.router.overload import LoadedStep, OverloadClient, missed_goals
from loadtests.router.soak.trend import TrendSample

STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSES = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
FLAT = [TrendSample(seconds=second, rss_bytes=1 << 27, files=9, threads=4) for second in range(0, 1000, 10)]


def a_chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


def an_answer(*events: bytes) -> bytes:
    return STREAM + b"".join(map(a_chunk, events)) + b"0\r\n\r\n"


def a_refusal(status: bytes = b"429 Too Many Requests", hint: bytes = b"Retry-After: 2\r\n") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + hint + b"Content-Length: 2\r\n\r\n{}"


async def asked(*answers: bytes, goal_seconds: float = 60.0) -> tuple[LoadedStep, int]:
    """Send a request for each of these answers, which a server gives in turn; return the results, and the number of connections."""
    step, left, connections = LoadedStep(rate=1.0, seconds=1.0), list(answers), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while left and (head := await reader.readuntil(b"\r\n\r\n")):
            length = int(overload.CONTENT_LENGTH.search(head)[1])
            await reader.readexactly(length)
            answer = left.pop(0)
            writer.write(answer)
            if answer.startswith(CLOSES):
                break
            if not answer.endswith((b"0\r\n\r\n", b"{}")):
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = OverloadClient(f"http://127.0.0.1:{port}", goal_seconds, random.Random(1))
        for _ in answers:
            await client.ask(step)
        client.close()
    return step, connections


async def test_whole_streams_count_by_the_time_of_their_first_token():
    whole = an_answer(b"data: {}\n\n", b"data: [DONE]\n\n")

    in_time, connections = await asked(whole, whole)
    late, _ = await asked(whole, goal_seconds=0.0)

    assert (in_time.in_time, in_time.late, connections) == (2, 0, 1)
    assert (late.in_time, late.late) == (0, 1)
    assert not in_time.failed


async def test_refusals_are_timed_and_checked_for_a_hint():
    step, connections = await asked(a_refusal(), a_refusal(b"503 Service Unavailable", b""))

    assert (len(step.refusal_seconds), step.without_hint, connections) == (2, 1, 1)
    assert not step.failed


@pytest.mark.parametrize(
    "answer",
    [
        an_answer(b"data: {}\n\n"),
        STREAM + a_chunk(b"data: {}\n\n"),
        a_refusal(b"400 Bad Request"),
        an_answer(b'data: {"error": {}}\n\n'),
        b"",
    ],
    ids=["no-end", "cut", "bad-request", "error-event", "closed"],
)
async def test_other_ends_count_as_failures(answer):
    step, _ = await asked(answer)

    assert step.failed.total() == step.sent == 1
    assert (step.in_time, step.late, step.refusal_seconds) == (0, 0, [])


async def test_request_over_a_closed_idle_connection_is_sent_again():
    whole = an_answer(b"data: {}\n\n", b"data: [DONE]\n\n")
    closing = whole.replace(b"HTTP/1.1 200 OK\r\n", CLOSES)

    step, connections = await asked(closing, whole)

    assert (step.in_time, connections) == (2, 2)
    assert not step.failed


def an_overload(**changed) -> LoadedStep:
    good = {"rate": 30.0, "seconds": 10.0, "sent": 300, "in_time": 95, "refusal_seconds": [0.01] * 99 + [0.4]}
    return LoadedStep(**{**good, **changed})


def test_overload_within_all_goals_misses_none():
    assert missed_goals(10.0, an_overload(refusal_seconds=[0.01] * 200 + [0.4]), FLAT) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"in_time": 89}, "goodput is below 90% of its peak"),
        ({"refusal_seconds": []}, "nothing was refused"),
        ({"refusal_seconds": [0.01] * 97 + [0.06] * 3}, "took over 50 ms"),
        ({"without_hint": 1}, "no retry-after"),
        ({"failed": overload.Counter({"OSError": 1})}, "requests failed"),
    ],
)
def test_each_missed_goal_is_named(changed, complaint):
    missed = missed_goals(10.0, an_overload(**{"refusal_seconds": [0.01] * 100, **changed}), FLAT)

    assert len(missed) == 1
    assert complaint in missed[0]


def test_growing_memory_is_a_missed_goal():
    growing = [
        TrendSample(seconds=second, rss_bytes=(1 << 27) + (second << 16), files=9, threads=4)
        for second in range(0, 1000, 10)
    ]
    (missed,) = missed_goals(10.0, an_overload(refusal_seconds=[0.01] * 100), growing)
    assert "memory grows" in missed
