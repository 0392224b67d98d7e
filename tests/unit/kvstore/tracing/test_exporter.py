"""Tests of the trace exporter: its callers never wait for the collector, and its memory is limited."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat, takewhile

import pytest

from kvstore.errors import StoreNotStarted
from kvstore.tracing.exporter import BATCH_SPANS, TraceExporter, open_trace_exporter
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import SpanRecord
from tests.support.waiting import eventually


def a_span(name: str = "span") -> SpanRecord:
    return SpanRecord(name=name, trace_id=bytes(15) + b"1", span_id=bytes(7) + b"1", began=1, ended=2)


class Collector:
    """A collector that accepts spans, refuses them, or lets its callers wait."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.takes = True
        self.waits = threading.Event()
        self.waits.set()

    def send(self, spans: Sequence[SpanRecord]) -> bool:
        self.waits.wait(60)
        self.batches.append([span.name for span in spans])
        return self.takes


def test_ended_spans_reach_the_collector_in_batches():
    collector = Collector()
    exporter = TraceExporter(collector.send, most_waiting=10_000, export_seconds=0.01)
    for number in range(BATCH_SPANS + 1):
        exporter.put(lambda number=number: [a_span(f"{number}")])
    exporter.close()
    assert [name for batch in collector.batches for name in batch] == [f"{number}" for number in range(BATCH_SPANS + 1)]
    assert max(map(len, collector.batches)) <= BATCH_SPANS
    assert (exporter.exported, exporter.failed, exporter.overflowed) == (BATCH_SPANS + 1, 0, 0)


def test_hanging_collector_costs_a_bounded_queue():
    collector = Collector()
    collector.waits.clear()
    exporter = TraceExporter(collector.send, most_waiting=5, export_seconds=0.001)
    exporter.put(lambda: [a_span("first")])
    eventually(lambda: not exporter.waiting)  # the thread holds it and hangs
    for number in range(20):
        exporter.put(lambda number=number: [a_span(f"{number}")])
    assert exporter.waiting == 5
    assert exporter.overflowed == 15

    collector.waits.set()
    eventually(lambda: exporter.exported == 6)
    exporter.close()
    assert [name for batch in collector.batches for name in batch] == ["first", "0", "1", "2", "3", "4"]


def test_entries_with_a_share_leave_the_rest_of_the_queue():
    exporter = TraceExporter(Collector().send, most_waiting=10, export_seconds=600)
    assert [exporter.put(lambda: [a_span("refused")], 0.5) for _ in range(20)] == [True] * 5 + [False] * 15
    assert exporter.waiting == 5
    assert all(exporter.put(lambda: [a_span("failed")]) for _ in range(5))
    assert (exporter.waiting, exporter.overflowed) == (10, 15)
    exporter.close()


def test_refused_spans_are_dropped_and_logged_once(caplog):
    caplog.set_level("INFO")
    collector = Collector()
    collector.takes = False
    exporter = TraceExporter(collector.send, most_waiting=10, export_seconds=0.001)
    for number in range(3):
        exporter.put(lambda: [a_span()])
        eventually(lambda number=number: exporter.failed == number + 1)
    collector.takes = True
    exporter.put(lambda: [a_span()])
    eventually(lambda: exporter.exported == 1)
    exporter.close()
    assert [record.message for record in caplog.records if "collector" in record.message] == [
        "trace collector takes no spans, they are dropped",
        "trace collector takes spans again",
    ]


def test_trace_that_cannot_be_made_does_not_end_the_others(caplog):
    collector = Collector()
    exporter = TraceExporter(collector.send, most_waiting=10, export_seconds=0.001)

    def fail():
        raise RuntimeError("a bug")

    exporter.put(fail)
    exporter.put(lambda: [a_span("next")])
    eventually(lambda: exporter.exported == 1)
    exporter.close()
    assert exporter.failed == 1


@contextmanager
def http_collector(
    head: bytes, pieces: Iterator[bytes], requests: list[bytes] | None = None
) -> Iterator[tuple[str, list[int]]]:
    """Serve one connection; yield the endpoint, and a list that gets the number of sent bytes at the end.

    `requests` gets the head of the request. The server reads the body, too: closing a connection with unread bytes
    resets it, and the client may then lose the answer.
    """
    sent: list[int] = []

    def serve() -> None:
        connection, _ = listener.accept()
        count = 0
        with connection, connection.makefile("rb") as received, suppress(OSError):
            lines = list(takewhile(bytes.strip, received))
            lengths = [line.split(b":")[1] for line in lines if line.lower().startswith(b"content-length:")]
            received.read(int(lengths[0]) if lengths else 0)
            if requests is not None:
                requests.append(b"".join(lines))
            connection.sendall(head)
            for piece in pieces:
                connection.sendall(piece)
                count += len(piece)
        sent.append(count)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", sent
        thread.join(60)


def paced(piece: bytes) -> Iterator[bytes]:
    """Yield a piece again and again, ten times a second."""
    pause = threading.Event()
    while not pause.wait(0.1):
        yield piece


MEBIBYTE = bytes(1 << 20)
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"


@pytest.mark.parametrize(
    "pieces", [lambda: repeat(MEBIBYTE, 200), lambda: paced(b"x")], ids=["large answer", "slow answer"]
)
def test_endless_answer_of_a_collector_is_cut(pieces):
    with http_collector(ENDLESS, pieces()) as (endpoint, sent):
        settings = TracingSettings(endpoint=endpoint, protocol="http", export_seconds=0.1, timeout_seconds=0.5)
        with open_trace_exporter(settings, "fleet-test", "one", "") as exporter:
            exporter.put(lambda: [a_span()])
            eventually(lambda: exporter.failed == 1)
        eventually(lambda: sent)
    assert sent[0] < 100 * len(MEBIBYTE)


def test_short_answer_of_a_collector_takes_the_spans():
    with http_collector(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", iter([b"ab", b"cd"])) as (endpoint, _):
        settings = TracingSettings(endpoint=endpoint, protocol="http", export_seconds=0.1)
        with open_trace_exporter(settings, "fleet-test", "one", "") as exporter:
            exporter.put(lambda: [a_span()])
            eventually(lambda: exporter.exported == 1)


@pytest.mark.parametrize(
    ("protocol", "head", "cause"),
    [
        ("http", b"HTTP/1.1 401 no key like Bearer s3cret-key\r\nContent-Length: 0\r\n\r\n", "no key like"),
        ("grpc", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "UNAVAILABLE"),
    ],
)
def test_log_says_why_the_collector_takes_no_spans(caplog, protocol, head, cause):
    with http_collector(head, iter([])) as (endpoint, _):
        settings = TracingSettings(
            endpoint=endpoint if protocol == "http" else endpoint.removesuffix("/v1/traces"),
            protocol=protocol,
            export_seconds=0.1,
            timeout_seconds=0.5,
            headers={"authorization": "Bearer s3cret-key"},
        )
        with open_trace_exporter(settings, "fleet-test", "one", "") as exporter:
            exporter.put(lambda: [a_span()])
            eventually(lambda: exporter.failed == 1)
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.message == "trace collector takes no spans, they are dropped"
    assert cause in record.cause
    assert "s3cret" not in record.cause


def causes_of(caplog) -> list[str]:
    message = "trace collector takes no spans, they are dropped"
    return [record.cause for record in caplog.records if record.message == message]


def refuse_spans(exporter: TraceExporter) -> None:
    exporter.put(lambda: [a_span()])
    eventually(lambda: exporter.failed == 1)


REPEATED_KEYS = b"HTTP/1.1 401 %s: no key like key-of-store or key-of-worker\r\nContent-Length: 0\r\n\r\n"


def test_exporters_of_a_process_mask_the_keys_of_all(caplog):
    with ExitStack() as opened:
        worker, store = (
            opened.enter_context(
                open_trace_exporter(
                    TracingSettings(
                        endpoint=opened.enter_context(http_collector(REPEATED_KEYS % name.encode(), iter([])))[0],
                        protocol="http",
                        export_seconds=0.1,
                        headers={"x-key": f"key-of-{name}"},
                    ),
                    "fleet-test",
                    name,
                    "",
                )
            )
            for name in ("worker", "store")
        )
        refuse_spans(store)
        refuse_spans(worker)
    causes = causes_of(caplog)
    assert [("store:" in cause, "worker:" in cause) for cause in causes] == [(True, False), (False, True)]
    assert not any("key-of" in cause for cause in causes)


@pytest.mark.parametrize("is_closed", [False, True], ids=["both are open", "one is closed"])
def test_exporters_of_a_process_log_their_own_causes(caplog, is_closed):
    with ExitStack() as opened:
        ports = [opened.enter_context(socket.socket()) for _ in range(2)]  # they are bound, but do not listen
        for port in ports:
            port.bind(("127.0.0.1", 0))
        endpoints = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
        worker, store = (
            TracingSettings(endpoint=f"http://{each}", export_seconds=0.1, timeout_seconds=0.5) for each in endpoints
        )
        exporter = opened.enter_context(open_trace_exporter(worker, "fleet-test", "worker", ""))
        with ExitStack() as inner:
            refuse_spans(inner.enter_context(open_trace_exporter(store, "fleet-test", "store", "")))
            if not is_closed:
                opened.push(inner.pop_all())
        refuse_spans(exporter)
    numbers = [endpoint.split(":")[1] for endpoint in endpoints]
    of_store, of_worker = causes_of(caplog)
    assert [number in of_store for number in numbers] == [False, True]
    assert [number in of_worker for number in numbers] == [True, False]


def test_headers_of_a_file_are_sent_beside_those_of_the_settings(tmp_path):
    file, requests = tmp_path / "headers", []
    file.write_text("Authorization: Bearer a:b=\n\nx-scope: fleet\n")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with http_collector(answer, iter([]), requests) as (endpoint, _):
        settings = TracingSettings(
            endpoint=endpoint, protocol="http", export_seconds=0.1, headers={"x-one": "1"}, headers_file=str(file)
        )
        with open_trace_exporter(settings, "fleet-test", "one", "") as exporter:
            exporter.put(lambda: [a_span()])
            eventually(lambda: exporter.exported == 1)
    lines = requests[0].splitlines()
    assert {b"authorization: Bearer a:b=", b"x-scope: fleet", b"x-one: 1"} <= set(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"secret", "line 1 is not `name: value`"),
        (b"a: b\nsecret word: c", "line 2 is not"),
        (b"\xff\xfe", "is not text"),
        (b"x-key: secret\nX-Key: secret", "line 2: the header X-Key is in an earlier line"),
        (b"\nX-One: secret", "line 2: the header X-One is .* in `tracing.headers` already"),
    ],
)
def test_unusable_file_of_headers_is_named_without_its_content(tmp_path, content, message):
    file = tmp_path / "headers"
    if content is not None:
        file.write_bytes(content)
    settings = TracingSettings(endpoint="http://127.0.0.1:1", headers={"x-one": "1"}, headers_file=str(file))
    with (
        pytest.raises(StoreNotStarted, match=message) as refused,
        open_trace_exporter(settings, "fleet-test", "one", ""),
    ):
        pass
    assert str(refused.value).startswith(f"tracing.headers_file: {file}: ")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "collector:4317"}, "endpoint: 'collector:4317' must be http"),
        (
            {"endpoint": "http://:password@host:4317"},
            "^endpoint: must hold no user name and no password; use headers_file$",
        ),
        ({"endpoint": "http://host:port"}, "must be http"),
        ({"endpoint": "http://host:4317/v1/traces"}, "has a path, which gRPC does not use"),
        ({"endpoint": "http://host:4317", "certificate": "ca.pem"}, "certificate: is for https"),
        ({"endpoint": "http://host:4317", "headers": {"a b": "c"}}, "headers: 'a b'"),
        ({"endpoint": "http://host:4317", "headers_file": "/key"}, "endpoint: headers_file would cross the network"),
        ({"endpoint": "http://host:4317", "headers": {"a": "c\r\nd: e"}}, "headers: 'a'"),
        ({"endpoint": "http://127.0.0.1:4317", "headers": {"x-a": "1", "X-A": "2"}}, "headers: 'X-A' is there twice"),
    ],
)
def test_unusable_settings_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        TracingSettings(**fields)
