"""Telemetry of a router process: its request metrics and its log format.

Metrics of the router itself, its workers, relays and hosted endpoints are in `fleet.frontend.metrics`.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from fleet.core.errors import Reason
from fleet.core.requests import Finish, KvPhase, Source, Usage
from fleet.core.roles import Phase, Placement

_STEPS = (
    1,
    1.25,
    1.6,
    2,
    2.5,
    3.15,
    4,
    5,
    6.3,
    8,
)  # Renard's series R10: neighbouring bounds differ by a factor of at most 1.28, so quantiles are that exact


def _per_decade(steps: Sequence[float], first: int, last: int) -> tuple[float, ...]:
    """Return bounds in seconds with these steps, from ten to the power of `first` up to ten to the power of `last`."""
    bounds = [float(f"{step}e{power}") for power in range(first, last) for step in steps]
    return (*bounds, float(f"1e{last}"))


LATENCY_BUCKETS = _per_decade(_STEPS, -3, 2)
"""Upper bounds of buckets for latencies, in seconds, from 1 ms to 100 s."""

TOKEN_BUCKETS = _per_decade(_STEPS, -4, 0)
"""Upper bounds of buckets for times per token, in seconds, from 0.1 ms (small models) to 1 s."""


class RouterProcessMetrics:
    """Metrics of a router process. Label values come from enums, so their number is limited."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # the series of creation times would double the output, and are not used
        self.registry = registry
        self._unserved = Counter(
            "fleet_http_unserved_requests",
            "HTTP requests that no handler takes, because of their path, method or kind of body",
            ["status"],
            registry=registry,
        )
        self._requests = Counter(
            "fleet_requests",
            "Requests that ended, by how and by where they ran",
            ["outcome", "placement"],
            registry=registry,
        )
        self._resumed = Counter(
            "fleet_resumed_requests", "Requests that went on with an answer of a stream that broke", registry=registry
        )
        self._ttft = Histogram(
            "fleet_ttft_seconds", "Arrival to first token", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._tpot = Histogram(
            "fleet_tpot_seconds",
            "Mean time per token after the first, a request",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._longest_gap = Histogram(
            "fleet_itl_max_seconds",
            "Longest gap between two tokens, a request",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "fleet_request_seconds", "Arrival to end of the answer", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._prompt_tokens = Counter("fleet_prompt_tokens", "Tokens of prompts that were admitted", registry=registry)
        self._completion_tokens = Counter("fleet_completion_tokens", "Tokens generated", registry=registry)
        self._cached_tokens = Counter(
            "fleet_cached_tokens", "Prompt tokens that no engine computed for their request", registry=registry
        )
        self._kv_blocks = Counter(
            "fleet_kv_blocks", "Prompt blocks by where a phase had them from", ["phase", "source"], registry=registry
        )
        self._kv_bytes = Counter("fleet_kv_bytes", "Bytes of KV that moved", ["phase", "source"], registry=registry)
        for phase in Phase:  # export every series with 0 before the first request
            for source in Source:
                self._kv_blocks.labels(phase, source)
                self._kv_bytes.labels(phase, source)

    def follow_certificate(self, ends_at: Callable[[], float]) -> None:
        """Export the end of the certificate of the ports for clients; `ends_at` returns it in seconds of Unix time."""
        end = Gauge(
            "fleet_tls_certificate_end_timestamp_seconds",
            "End of the certificate of the ports for clients, in Unix time",
            registry=self.registry,
        )
        end.set_function(ends_at)

    def resumed(self) -> None:
        """Record that a request continues an answer that was begun before."""
        self._resumed.inc()

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._ttft.observe(seconds)

    def ended(
        self, outcome: Finish | Reason, kv: Iterable[KvPhase], usage: Usage | None, seconds: float | None
    ) -> None:
        """Record a request that ended.

        Args:
            outcome: The finish of the answer, or the reason of the rejection.
            kv: KV reports of the request's phases.
            usage: The tokens that the tenant was charged for; None if the request was not admitted.
            seconds: Time from arrival to end; None if the client got no part of an answer.
        """
        placement = Placement.AUTO  # the value for requests that were not placed, or whose placement is unknown
        for phase in kv:
            aggregated = phase.phase is Phase.AGGREGATED
            placement = Placement.AGGREGATED if aggregated else Placement.DISAGGREGATED
            for origin in phase.report.origins:
                self._kv_blocks.labels(phase.phase, origin.source).inc(origin.blocks)
                self._kv_bytes.labels(phase.phase, origin.source).inc(origin.bytes)
        self._requests.labels(outcome, "unknown" if placement is Placement.AUTO else placement).inc()
        if seconds is not None:
            self._duration.observe(seconds)
        if usage is not None:
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._completion_tokens.inc(usage.completion_tokens)
            self._cached_tokens.inc(usage.cached_tokens)

    def unserved(self, status: int) -> None:
        """Record an HTTP request that no handler takes."""
        self._unserved.labels(status).inc()

    def gaps(self, mean_seconds: float, longest_seconds: float) -> None:
        """Record the times between tokens of a request that took more than one step."""
        self._tpot.observe(mean_seconds)
        self._longest_gap.observe(longest_seconds)


def configure_logging(level: str = "INFO") -> None:
    """Log to standard error, one line per entry, with the fields of `extra` after the message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class LogLineFormatter(logging.Formatter):
    """Format ``time level logger message key=value …`` as one line; line breaks are escaped, except in tracebacks."""

    _STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the method's name in the library `logging`
        """Return the line without a traceback."""
        extras = "".join(f" {key}={value}" for key, value in record.__dict__.items() if key not in self._STANDARD)
        return (super().formatMessage(record) + extras).replace("\r", "\\r").replace("\n", "\\n")
