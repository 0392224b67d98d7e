"""Trace exporter: sends ended spans to a collector, from a thread of its own.

Rules:

1. No request or call waits for the collector. Ended spans wait in a queue until the next export. Spans that the
   collector does not take in time are dropped and counted. Each entry of the queue is a function that makes the spans
   of one request, attempt or call (`EndedSpans`). Entries that arrive while the queue is full are dropped and counted
   too.
2. Memory is bounded by `most_waiting` entries, one batch, and the maximum length of a collector's answer.
3. Spans are made in the exporter's thread, from data that does not change any more. A thread that serves requests only
   has to put this data into an entry.
4. OpenTelemetry is imported when an exporter opens, and only then.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import StoreNotStarted
from kvstore.tracing.settings import TracingSettings, is_header
from kvstore.tracing.spans import EndedSpans, SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

# A batch is sent as soon as it has at least this many spans: about 500 KB, an eighth of gRPC's default limit.
BATCH_SPANS = 512
CLOSE_SECONDS = 2.0  # time limit to send the waiting spans when the process ends
LONGEST_CAUSE = 500  # maximum number of characters that are logged of the message why an export failed
# Words of headers' values with at least this number of characters are masked in messages. Shorter words are not secret,
# and masking them would also change other words that contain them.
SHORTEST_SECRET = 4

SendSpans = Callable[[Sequence[SpanRecord]], bool]
"""A function that sends spans within a time limit, and returns True if the collector has taken them."""


class TraceExporter:
    """Keeps the queue of ended spans, and the thread that sends them to the collector."""

    def __init__(
        self, send: SendSpans, most_waiting: int, export_seconds: float, cause: Callable[[], str] = str
    ) -> None:
        """Start the thread. Only this thread calls `send` and `cause`.

        `cause` returns why the collector has not taken the latest spans; empty if that is not known.
        """
        self.exported = 0  # number of spans that the collector has taken
        # number of spans that were dropped because the collector did not take them; an entry whose spans cannot be made
        # counts as one
        self.failed = 0
        self.overflowed = 0  # number of entries (rule 1) that were dropped because too many waited
        self._send = send
        self._most_waiting = most_waiting
        self._export_seconds = export_seconds
        self._cause = cause
        self._waiting: deque[EndedSpans] = deque()
        self._stop = threading.Event()
        self._reachable = True
        self._thread = threading.Thread(target=self._run, name="trace exporter", daemon=True)
        self._thread.start()

    def put(self, ended: EndedSpans, share: float = 1.0) -> bool:
        """Queue an entry (rule 1) for the next export, or drop it and return False if too many wait.

        Any thread may call this.

        Args:
            ended: The entry.
            share: Share of the queue, from 0 to 1. The entry is dropped if at least this share of the queue is filled.
        """
        if len(self._waiting) >= self._most_waiting * share:
            self.overflowed += 1
            return False
        self._waiting.append(ended)
        return True

    @property
    def waiting(self) -> int:
        """The number of entries (rule 1) that wait for the next export."""
        return len(self._waiting)

    def close(self) -> None:
        """Send the spans of the waiting entries (rule 1); wait at most `CLOSE_SECONDS` until this is done."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    # Only the exporter's thread calls the methods below.

    def _run(self) -> None:
        while not self._stop.wait(self._export_seconds):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        batch: list[SpanRecord] = []
        for _ in range(len(self._waiting)):
            try:
                batch.extend(self._waiting.popleft()())
            # Supervisor: if the spans of one entry cannot be made, the spans of the other entries are still exported.
            except Exception:
                log.exception("trace dropped, its spans cannot be made")
                self.failed += 1
            if len(batch) >= BATCH_SPANS:
                self._export(batch)
                batch = []
        if batch:
            self._export(batch)

    def _export(self, batch: Sequence[SpanRecord]) -> None:
        try:
            taken = self._send(batch)
        except Exception:  # supervisor: the library may raise any exception; only this batch is dropped
            log.exception("trace export failed")
            taken = False
        if taken:
            self.exported += len(batch)
        else:
            self.failed += len(batch)
        if taken is not self._reachable:
            self._reachable = taken
            if taken:
                log.info("trace collector takes spans again", extra={"dropped_spans": self.failed})
            else:
                log.warning(
                    "trace collector takes no spans, they are dropped",
                    extra={"spans": len(batch), "cause": self._cause()},
                )


class _LastMessages(logging.Handler):
    """A log handler that keeps the last message of OpenTelemetry's loggers for each thread, and writes no log.

    A process may have several exporters: a worker and its embedded store have one each. All of them use the same loggers,
    each from its own thread. Collectors may repeat the values of headers, which can be secret. The values of all
    exporters' headers are therefore masked in every message. There is one object for the whole process, because the
    thread of an exporter may still send after the exporter was closed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._secrets: list[str] = []  # the longest first, because a secret may be a part of another one
        self._of_thread = threading.local()

    def collect(self, headers: Iterable[str]) -> None:
        """Begin to keep the messages of OpenTelemetry's loggers.

        `headers` are the values of an exporter's headers. These values, and those of earlier calls, are masked in the
        messages.
        """
        words = {word for value in headers for word in (value, *value.split()) if len(word) >= SHORTEST_SECRET}
        self.acquire()
        try:
            self._secrets = sorted(words.union(self._secrets), key=len, reverse=True)
        finally:
            self.release()
        library = logging.getLogger("opentelemetry")
        library.setLevel(logging.WARNING)
        library.propagate = False
        library.addHandler(self)
        # The logger of the gRPC exporter has a filter that drops a message that equals the message before it. The message
        # before may come from another exporter, so the filter is removed.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters.clear()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        self._of_thread.text = "".join(filter(str.isprintable, text))[:LONGEST_CAUSE]

    def of_this_thread(self) -> str:
        """Return the last message that the calling thread has caused; empty if there is none."""
        return getattr(self._of_thread, "text", "")


_last_messages = _LastMessages()


@contextmanager
def open_trace_exporter(
    settings: TracingSettings, service: str, instance: str, version: str
) -> Iterator[TraceExporter]:
    """Open the exporter of a process.

    Args:
        settings: Settings with an endpoint.
        service: Name of the kind of process (`service.name`), such as ``fleet-router``.
        instance: Name of this process (`service.instance.id`).
        version: Version of the program (`service.version`); empty: no version is sent.

    Raises:
        StoreNotStarted: OpenTelemetry is not installed, or the certificate or the headers cannot be read.
    """
    headers = {**settings.headers, **_headers_of_file(settings.headers_file, settings.headers)}
    try:
        exporter = _otlp_exporter(settings, headers)
    except ModuleNotFoundError as error:
        message = f"tracing.endpoint: needs the package {error.name}: pip install 'fleet-serving[tracing]'"
        raise StoreNotStarted(message) from error
    # The library would log a line for each batch that the collector does not take. Our own log line contains the
    # library's last message.
    _last_messages.collect(headers.values())
    send = _sender(exporter, service, instance, version)
    queue = TraceExporter(send, settings.most_waiting, settings.export_seconds, _last_messages.of_this_thread)
    log.info("traces go to a collector", extra={"endpoint": settings.endpoint, "sample_ratio": settings.sample_ratio})
    try:
        yield queue
    finally:
        queue.close()
        exporter.shutdown()


def _otlp_exporter(settings: TracingSettings, headers: Mapping[str, str]) -> "SpanExporter":
    secured = settings.endpoint.startswith("https:")
    try:
        authority = Path(settings.certificate).read_bytes() if settings.certificate else None
    except OSError as error:
        raise StoreNotStarted(f"tracing.certificate: {settings.certificate}: {error.strerror}") from error
    if settings.protocol == "grpc":
        import grpc  # noqa: PLC0415 - few processes trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - the library is optional

        return OTLPSpanExporter(
            settings.endpoint,
            insecure=not secured,
            credentials=grpc.ssl_channel_credentials(authority) if secured else None,
            headers={name.lower(): value for name, value in headers.items()},
            timeout=settings.timeout_seconds,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter  # noqa: PLC0415

    from kvstore.tracing.collector_session import collector_session  # noqa: PLC0415 - its library is optional

    return HttpExporter(
        settings.endpoint,
        certificate_file=settings.certificate or None,
        headers=dict(headers),
        timeout=settings.timeout_seconds,
        session=collector_session(settings.timeout_seconds),
    )


def _headers_of_file(path: str, others: Iterable[str]) -> dict[str, str]:
    """Read the headers in `tracing.headers_file`; none if the path is empty.

    An error names a line, but does not show its content, which is secret.

    Args:
        path: The file.
        others: Names of the headers in `tracing.headers`, which the file must not have.
    """
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise StoreNotStarted(f"tracing.headers_file: {path}: {why}") from error
    headers = {}
    taken = {name.lower() for name in others}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not is_header(name, value):
            raise StoreNotStarted(
                f"tracing.headers_file: {path}: line {number} is not `name: value` in printable ASCII"
            )
        if name.lower() in taken:
            raise StoreNotStarted(
                f"tracing.headers_file: {path}: line {number}: the header {name} is in an earlier line or in"
                " `tracing.headers` already; leave out one of the two"
            )
        taken.add(name.lower())
        headers[name] = value
    return headers


def _sender(exporter: "SpanExporter", service: str, instance: str, version: str) -> SendSpans:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - the library is optional
    from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415 - the library is optional

    resource = Resource({"service.name": service, "service.instance.id": instance})
    if version:
        resource = resource.merge(Resource({"service.version": version}))

    def send(batch: Sequence[SpanRecord]) -> bool:
        spans = [_readable(record, resource) for record in batch]
        return exporter.export(spans) is SpanExportResult.SUCCESS

    return send


def _readable(record: SpanRecord, resource: "Resource") -> "ReadableSpan":
    """Return the span in OpenTelemetry's own type, as its exporters need it."""
    from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415 - the library is optional
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415 - the library is optional
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState  # noqa: PLC0415 - the library is optional
    from opentelemetry.trace.status import Status, StatusCode  # noqa: PLC0415 - the library is optional

    state = TraceState.from_header([record.state]) if record.state else TraceState()

    def context(span_id: bytes) -> SpanContext:
        return SpanContext(
            int.from_bytes(record.trace_id),
            int.from_bytes(span_id),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=state,
        )

    return ReadableSpan(
        record.name,
        context(record.span_id),
        context(record.parent_id) if record.parent_id else None,
        resource,
        record.attributes,
        [Event(each.name, each.attributes, each.at) for each in record.events],
        [Link(context(each.span_id), each.attributes) for each in record.links],
        SpanKind[record.side],
        status=Status(StatusCode.ERROR, record.error) if record.error else Status(),
        start_time=record.began,
        end_time=record.ended,
        instrumentation_scope=InstrumentationScope("fleet"),
    )
