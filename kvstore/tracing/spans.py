"""Spans: values that describe ended spans, without types of the library OpenTelemetry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from random import Random

from msgspec import Struct

from kvstore.tracing.context import SPAN_ID_BYTES, TRACE_ID_BYTES

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]


class SpanSide(StrEnum):
    """The side of a call at which a span was made. The values are OpenTelemetry's span kinds."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class SpanEvent(Struct, frozen=True, kw_only=True):
    name: str
    at: int  # time of the event as Unix time in nanoseconds
    attributes: Attributes = {}


class SpanLink(Struct, frozen=True, kw_only=True):
    """A link to another span of the same trace."""

    span_id: bytes
    attributes: Attributes = {}


class SpanRecord(Struct, frozen=True, kw_only=True):
    """Describes a span that has ended."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""  # id of the parent span; empty if this span is the root of its trace
    state: str = ""  # `tracestate` of the trace; empty if it has none
    side: SpanSide = SpanSide.INTERNAL
    began: int  # time of the beginning as Unix time in nanoseconds
    ended: int
    attributes: Attributes = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    error: str = ""  # description of the failure; empty if nothing failed


EndedSpans = Callable[[], Iterable[SpanRecord]]
"""A function that makes the spans of a request, an attempt or a call that has ended. The exporter's thread calls it."""


class SpanIds:
    """Makes random ids of spans and traces."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def trace_id(self) -> bytes:
        return self._nonzero(TRACE_ID_BYTES)

    def span_id(self) -> bytes:
        return self._nonzero(SPAN_ID_BYTES)

    def _nonzero(self, size: int) -> bytes:
        while not any(made := self._random.randbytes(size)):
            pass
        return made
