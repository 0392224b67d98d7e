"""Trace collector in its own process: it takes OTLP over gRPC and HTTP, and writes each span to a file as one line.

Run as ``python -m tests.support.servers.otlp_collector FILE GRPC_PORT HTTP_PORT MODE``. The messages are those of the package
`opentelemetry-proto`, so the collector refuses malformed exports as a real one does.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tests.support.servers.processes import ServerProcess, a_free_port, can_connect
from tests.support.waiting import eventually

SLOW_SECONDS = 0.5


class CollectorMode(StrEnum):
    """Says what the collector does with every export."""

    TAKES = "takes"
    HANGS = "hangs"  # it accepts connections and never answers
    REFUSES = "refuses"  # it answers that it has no room
    SLOW = "slow"  # it takes each export after `SLOW_SECONDS`


class CollectedSpan(Struct, frozen=True, kw_only=True):
    """Holds a span as the collector got it."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    links: tuple[tuple[str, str, dict[str, Any]], ...]  # trace id, span id, attributes
    error: str | None  # None: the status is not an error


class OtlpCollector(ServerProcess):
    """Runs a collector in its own process. A restart in another mode does not change the ports."""

    def __init__(self, folder: Path, mode: CollectorMode = CollectorMode.TAKES) -> None:
        self.file = folder / "spans"
        self.file.touch()
        self.grpc_port, self.http_port = a_free_port(), a_free_port()
        self.grpc = f"http://127.0.0.1:{self.grpc_port}"
        self.http = f"http://127.0.0.1:{self.http_port}/v1/traces"
        super().__init__(self._command(mode), folder, lambda: can_connect(("127.0.0.1", self.http_port)))

    def restart(self, mode: CollectorMode) -> None:
        self.kill()
        self.command = self._command(mode)
        self.start()

    def _command(self, mode: CollectorMode) -> list[str]:
        ports = (str(self.grpc_port), str(self.http_port))
        root = str(Path(__file__).parents[3])
        code = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import main; main()"
        return [sys.executable, "-c", code, str(self.file), *ports, mode.value]

    def spans(self) -> list[CollectedSpan]:
        """Return all spans that the collector has accepted so far."""
        whole = self.file.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line, type=CollectedSpan) for line in whole.splitlines()]

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans() if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, *names: str) -> list[CollectedSpan]:
        """Wait until a trace has spans with all these names, and return all of its spans."""

        def has_all() -> list[CollectedSpan] | None:
            found = self.trace(trace_id)
            missing = list(names)
            for span in found:
                if span.name in missing:
                    missing.remove(span.name)
            return None if missing else found

        return eventually(has_all, otherwise=lambda: [span.name for span in self.trace(trace_id)])  # type: ignore[return-value]


@contextmanager
def an_otlp_collector(folder: Path, mode: CollectorMode = CollectorMode.TAKES) -> Iterator[OtlpCollector]:
    collector = OtlpCollector(folder, mode)
    try:
        yield collector
    finally:
        collector.kill()


def main() -> None:
    """Serve until killed."""
    import grpc
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
        TraceServiceServicer,
        add_TraceServiceServicer_to_server,
    )

    path, grpc_port, http_port, named = sys.argv[1:]
    mode = CollectorMode(named)
    turns = threading.Lock()

    def take(request: ExportTraceServiceRequest) -> None:
        if mode is CollectorMode.SLOW:
            threading.Event().wait(SLOW_SECONDS)
        with turns, Path(path).open("ab") as file:
            file.writelines(msgspec.json.encode(span) + b"\n" for span in spans_of(request))

    class TraceService(TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - the name of the method
            if mode is CollectorMode.HANGS:
                threading.Event().wait()
            if mode is CollectorMode.REFUSES:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
            take(request)
            return ExportTraceServiceResponse()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if mode is CollectorMode.HANGS:
                threading.Event().wait()
            if mode is CollectorMode.REFUSES or self.path != "/v1/traces":
                self.send_error(503 if mode is CollectorMode.REFUSES else 404)
                return
            take(ExportTraceServiceRequest.FromString(content))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
            """Log nothing about requests."""

    server = grpc.server(ThreadPoolExecutor(8))
    add_TraceServiceServicer_to_server(TraceService(), server)
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    server.start()
    ThreadingHTTPServer(("127.0.0.1", int(http_port)), Receiver).serve_forever()


def spans_of(request: Any) -> Iterator[CollectedSpan]:
    """Yield the spans of an export."""
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    for resource in request.resource_spans:
        about = attributes_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    service=about["service.name"],
                    instance=about.get("service.instance.id", ""),
                    name=span.name,
                    kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    state=span.trace_state,
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes=attributes_of(span.attributes),
                    events=tuple((each.name, attributes_of(each.attributes)) for each in span.events),
                    links=tuple(
                        (each.trace_id.hex(), each.span_id.hex(), attributes_of(each.attributes)) for each in span.links
                    ),
                    error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
                )


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


if __name__ == "__main__":
    main()
