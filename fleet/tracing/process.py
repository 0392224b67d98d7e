"""Tracing of a process: opens the exporter of a router or a worker. Store nodes open their exporter in `kvstore`."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import StoreNotStarted
from kvstore.protocol.versions import own_protocols
from kvstore.tracing.exporter import TraceExporter, open_trace_exporter
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import SpanIds


@contextmanager
def open_tracing(settings: TracingSettings, service: str, instance: str) -> Iterator[TraceExporter | None]:
    """Open the exporter of this process. The `with` block gets None if the settings name no collector.

    Args:
        settings: The tracing settings of the process.
        service: Name of the kind of process, such as ``fleet-router``.
        instance: Name of this process.

    Raises:
        ConfigurationRefused: OpenTelemetry is not installed, or the certificate or the headers cannot be read.
    """
    if not settings.is_on:
        yield None
        return
    with ExitStack() as opened:
        try:
            exporter = opened.enter_context(open_trace_exporter(settings, service, instance, own_protocols().product))
        except StoreNotStarted as error:
            raise ConfigurationRefused(str(error)) from error
        yield exporter


def new_span_ids() -> SpanIds:
    """Return a source of trace and span ids, which are different in every process."""
    return SpanIds(secrets.randbits(128))
