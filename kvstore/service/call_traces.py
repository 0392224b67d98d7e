"""Call traces: makes a span for each match, reservation and publication that a client asks for in a traced request.

Rules:

1. Only calls with a valid field `trace` get a span. Callers send this field only for sampled requests, so this module
   samples nothing itself.
2. No call waits for the collector (`kvstore.tracing.exporter`).
"""

from collections.abc import Callable

from kvstore.clock import Clock, Nanos
from kvstore.tracing.context import SPAN_ID_BYTES, TRACE_ID_BYTES
from kvstore.tracing.exporter import TraceExporter
from kvstore.tracing.spans import Attributes, SpanIds, SpanRecord, SpanSide


class CallTraces:
    """Makes the spans of the calls that one node answers."""

    def __init__(
        self, store_id: str, exporter: TraceExporter, clock: Clock, unix_nanoseconds: Callable[[], int], ids: SpanIds
    ) -> None:
        self._store_id = store_id
        self._exporter = exporter
        self._clock = clock
        self._unix_nanoseconds = unix_nanoseconds
        self._ids = ids

    def called(self, name: str, trace: bytes, began: Nanos, attributes: Attributes) -> None:
        """Export the span of a call that ends now.

        Args:
            name: Name of the call.
            trace: The field `trace` of the call's request message. If it is empty or has a wrong length, nothing is
                exported.
            began: Instant at which the call began.
            attributes: Attributes of the span, such as the numbers of blocks that were asked for and found.
        """
        if len(trace) != TRACE_ID_BYTES + SPAN_ID_BYTES:
            return
        ended = self._clock.now()
        offset = self._unix_nanoseconds() - ended
        record = SpanRecord(
            name=name,
            trace_id=trace[:TRACE_ID_BYTES],
            span_id=self._ids.span_id(),
            parent_id=trace[TRACE_ID_BYTES:],
            side=SpanSide.SERVER,
            began=began + offset,
            ended=ended + offset,
            attributes={"fleet.store.id": self._store_id, **attributes},
        )
        self._exporter.put(lambda: (record,))
