"""Telemetry: provides the request metrics and the log format of a router process.

`fleet.frontend.generation` measures the times. Requests are counted in plain Python numbers, which are converted to
metrics only when the metrics page is read. Incrementing a counter of the Prometheus client library would take longer
than most other steps of a request in the router.
"""

import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import Metric

from fleet.core.errors import Reason
from fleet.core.ids import ModelName
from fleet.core.requests import ChatPrompt, Finish, GenerateRequest, KvPhase, PoolingTask, Source, Usage
from fleet.core.roles import Phase
from kvstore.metric_definitions import (
    BucketCounts,
    CounterDefinition,
    HistogramDefinition,
    Labels,
    MetricDefinition,
)

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
    # The Renard series R10, rounded: neighbouring bounds differ by a factor of at most 1.28, which limits the error of quantiles.
)


def _per_decade(steps: Sequence[float], first: int, last: int) -> tuple[float, ...]:
    """Return the multiples `steps` of each power of ten from `first` to `last` - 1, and at the end ten to the power of `last`."""
    bounds = [float(f"{step}e{power}") for power in range(first, last) for step in steps]
    return (*bounds, float(f"1e{last}"))


LATENCY_BUCKETS = (*_per_decade(_STEPS, -3, 2), 125.0, 160.0, 200.0, 250.0, 315.0, 400.0, 500.0, 600.0)
"""Bounds of the histograms of latencies, in seconds, from 1 ms to 600 s."""

TOKEN_BUCKETS = (*_per_decade(_STEPS, -4, 0), 1.6, 2.5, 4.0, 6.3, 10.0, 25.0, 63.0, 160.0, 600.0)
"""Bounds of the histograms of seconds per token: from 0.1 ms (for small models) to 1 s, then in wider steps to 600
s."""

UNKNOWN_MODEL = ModelName("unknown")
"""Value of the label `model` for all requests for models that are not served. Clients may invent any number of names,
and each name would otherwise become a label value."""

CHAT, COMPLETION, EMBEDDINGS, SCORE = "chat", "text_completion", "embeddings", "score"
"""Operations of requests. All names except `score` come from OpenTelemetry's conventions for generative AI."""

PROVIDER = "fleet"
"""Value of the label `gen_ai_provider_name` in the metrics with OpenTelemetry's names."""

REQUESTS = CounterDefinition(
    "fleet_requests", "Requests that ended, by how and by where they ran", ("model", "outcome", "placement")
)
RESUMED = CounterDefinition(
    "fleet_resumed_requests", "Requests that went on with an answer of a stream that broke", ("model",)
)
TTFT = HistogramDefinition("fleet_ttft_seconds", "Arrival to first token", ("model",), bounds=LATENCY_BUCKETS)
TPOT = HistogramDefinition(
    "fleet_tpot_seconds", "Mean time per token after the first, a request", ("model",), bounds=TOKEN_BUCKETS
)
LONGEST_GAP = HistogramDefinition(
    "fleet_itl_max_seconds", "Longest gap between two tokens, a request", ("model",), bounds=LATENCY_BUCKETS
)
DURATION = HistogramDefinition(
    "fleet_request_seconds", "Arrival to end of the answer", ("model",), bounds=LATENCY_BUCKETS
)
PROMPT_TOKENS = CounterDefinition("fleet_prompt_tokens", "Tokens of prompts that were admitted", ("model",))
COMPLETION_TOKENS = CounterDefinition("fleet_completion_tokens", "Tokens generated", ("model",))
CACHED_TOKENS = CounterDefinition(
    "fleet_cached_tokens", "Prompt tokens that no engine computed for their request", ("model",)
)
KV_BLOCKS = CounterDefinition(
    "fleet_kv_blocks", "Prompt blocks by where a phase had them from", ("model", "phase", "source")
)
KV_BYTES = CounterDefinition("fleet_kv_bytes", "Bytes of KV that moved", ("model", "phase", "source"))
UNSERVED = CounterDefinition(
    "fleet_http_unserved_requests",
    "HTTP requests that no handler takes, because of their path, method or kind of body",
    ("status",),
)

# Names, units and bounds follow OpenTelemetry's conventions for generative AI, with more bounds for long durations.
_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
GEN_AI_DURATION = HistogramDefinition(
    "gen_ai_server_request_duration_seconds",
    "OpenTelemetry's gen_ai.server.request.duration: arrival to end of the answer, of all requests",
    (*_GEN_AI_LABELS, "error_type"),
    bounds=tuple(round(0.01 * 2**power, 2) for power in range(17)),
)
GEN_AI_TTFT = HistogramDefinition(
    "gen_ai_server_time_to_first_token_seconds",
    "OpenTelemetry's gen_ai.server.time_to_first_token: arrival to first token",
    _GEN_AI_LABELS,
    bounds=(
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(30.0, 60.0, 120.0, 300.0, 600.0),
    ),
)
GEN_AI_TPOT = HistogramDefinition(
    "gen_ai_server_time_per_output_token_seconds",
    "OpenTelemetry's gen_ai.server.time_per_output_token: mean time per token after the first, a request",
    _GEN_AI_LABELS,
    bounds=(
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
        *(10.0, 60.0, 600.0),
    ),
)

METRICS: Sequence[MetricDefinition] = (
    *(REQUESTS, RESUMED, TTFT, TPOT, LONGEST_GAP, DURATION, PROMPT_TOKENS, COMPLETION_TOKENS, CACHED_TOKENS),
    *(KV_BLOCKS, KV_BYTES, UNSERVED, GEN_AI_DURATION, GEN_AI_TTFT, GEN_AI_TPOT),
)


_LATENCY_BOUNDS = tuple(sorted({*LATENCY_BUCKETS, *GEN_AI_DURATION.bounds, *GEN_AI_TTFT.bounds}))
_TOKEN_BOUNDS = tuple(sorted({*TOKEN_BUCKETS, *GEN_AI_TPOT.bounds}))


class Durations:
    """Counts durations in fine buckets, from which histograms with wider buckets are computed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = _LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration in seconds."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self, bounds: Sequence[float]) -> BucketCounts:
        """Return the counts for wider buckets, and the sum of all durations in seconds.

        `bounds` are the bounds of these buckets. Each of them must be one of the fine bounds.
        """
        counts, first = [], 0
        for bound in bounds:
            end = bisect_left(self.bounds, bound) + 1
            counts.append(sum(self.counts[first:end]))
            first = end
        return [*counts, sum(self.counts[first:])], self.total


def summed(several: Iterable[Durations]) -> Durations:
    """Return the sum of several counts of durations, which must have the same bounds; empty counts if there are none."""
    total = Durations()
    for number, each in enumerate(several):
        if not number:
            total = Durations(each.bounds)
        total.counts = [mine + theirs for mine, theirs in zip(total.counts, each.counts, strict=True)]
        total.total += each.total
    return total


class GenAiTimes(Struct, frozen=True):
    """Holds the times of all requests of one model and operation, for the metrics with OpenTelemetry's names."""

    model: str
    operation: str  # value of OpenTelemetry's attribute `gen_ai.operation.name`
    durations: Mapping[str, Durations]  # durations by `error.type`, which is empty for successful requests
    first_token: Durations | None = None  # TTFTs; None if requests of this operation generate no tokens
    # Mean time per token after the first one, of each request; None if the requests generate no tokens, or their times are unknown.
    token_gaps: Durations | None = None


def operation_of(request: GenerateRequest) -> str:
    """Return the operation of a request: `CHAT`, `COMPLETION`, `EMBEDDINGS` or `SCORE`."""
    if request.pooling is not None:
        return EMBEDDINGS if request.pooling.task is PoolingTask.EMBED else SCORE
    return CHAT if isinstance(request.prompt, ChatPrompt) else COMPLETION


class ModelRequests:
    """Counts the requests for one model and operation.

    For speed, the methods that run for each request call no other methods of this class.
    """

    def __init__(self, model: str, operation: str) -> None:
        self.model = model
        self.operation = operation
        self.resumed = 0  # number of requests that continued the answer of a broken stream
        self.outcomes: dict[Labels, int] = {}  # number of ended requests, by outcome (finish or reason) and placement
        self.first_token = Durations()
        self.token_gaps = Durations(_TOKEN_BOUNDS)
        self.longest_gaps = Durations()
        self.durations: dict[tuple[str, bool], Durations] = {}
        """Durations of requests from arrival to end, by the error (empty for successful requests), and by whether a part of the answer
        was sent."""

        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.kv_blocks: dict[Labels, int] = dict.fromkeys(_KV_LABELS, 0)
        self.kv_bytes: dict[Labels, int] = dict.fromkeys(_KV_LABELS, 0)

    def ended(
        self, outcome: Finish | Reason, kv: Iterable[KvPhase], usage: Usage | None, seconds: float, *, answered: bool
    ) -> None:
        """Record a request that ended.

        Args:
            outcome: How the request ended.
            kv: The KV reports of all phases of the request.
            usage: The token counts for which the tenant of the request is charged, or None if the request was not
                admitted.
            seconds: Time from the request's arrival to its end.
            answered: True if at least a part of the answer was sent.
        """
        placement = "unknown"
        for phase in kv:
            placement = "aggregated" if phase.phase is _AGGREGATED else "disaggregated"
            for origin in phase.report.origins:
                key = phase.phase, origin.source
                self.kv_blocks[key] += origin.blocks
                self.kv_bytes[key] += origin.bytes
        ended = outcome, placement
        self.outcomes[ended] = self.outcomes.get(ended, 0) + 1
        error = outcome if isinstance(outcome, Reason) else ""
        if (durations := self.durations.get((error, answered))) is None:
            durations = self.durations[error, answered] = Durations()
        durations.counts[bisect_left(_LATENCY_BOUNDS, seconds)] += 1
        durations.total += seconds
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
            self.cached_tokens += usage.cached_tokens

    def gaps(self, mean_seconds: float, longest_seconds: float) -> None:
        """Record the mean and the longest time between tokens of one request whose answer took more than one step."""
        mean, longest = self.token_gaps, self.longest_gaps
        mean.counts[bisect_left(_TOKEN_BOUNDS, mean_seconds)] += 1
        mean.total += mean_seconds
        longest.counts[bisect_left(_LATENCY_BOUNDS, longest_seconds)] += 1
        longest.total += longest_seconds

    def answered(self) -> Durations:
        """Return the durations of all requests for which at least a part of the answer was sent."""
        return summed(each for (_, answered), each in self.durations.items() if answered)

    def times(self) -> GenAiTimes:
        """Return the times for the metrics with OpenTelemetry's names."""
        by_error: dict[str, list[Durations]] = {}
        for (error, _), each in self.durations.items():
            by_error.setdefault(error, []).append(each)
        durations = {error: summed(alike) for error, alike in by_error.items()}
        if self.operation in {EMBEDDINGS, SCORE}:  # their answers have no tokens
            return GenAiTimes(self.model, self.operation, durations)
        return GenAiTimes(self.model, self.operation, durations, self.first_token, self.token_gaps)


_AGGREGATED = Phase.AGGREGATED  # reading a module variable is three to ten times as fast as reading the enum attribute
_KV_LABELS: tuple[Labels, ...] = tuple((phase, source) for phase in Phase for source in Source)


class RouterProcessMetrics:
    """Collects the request metrics of a router process.

    Label values are members of enumerations or names of served models, so their number is limited.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        # By default, the library adds a creation time to each metric. Fleet does not need it, and it doubles the size
        # of the metrics page.
        disable_created_metrics()
        self.registry = registry
        self.requests: dict[tuple[str, str], ModelRequests] = {}
        """Counts of requests by model and operation; `begin` creates them for the first request."""

        self.times: list[Callable[[], Iterable[GenAiTimes]]] = [
            lambda: [each.times() for each in self.requests.values()]
        ]
        """Functions that return the times for the metrics with OpenTelemetry's names. The relay to external backends adds its own
        function."""

        self._unserved: dict[int, int] = {}
        registry.register(self)

    def begin(self, model: str, operation: str) -> ModelRequests:
        """Return the counts for a model and an operation, which begin at zero if they are new."""
        return self.requests.setdefault((model, operation), ModelRequests(model, operation))

    def unserved(self, status: int) -> None:
        """Record an HTTP request that no handler has taken, such as one for an unknown path, by the status code of its answer."""
        self._unserved[status] = self._unserved.get(status, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus_client calls this method at each scrape."""
        yield UNSERVED.samples({(str(status),): count for status, count in self._unserved.items()})
        yield self._summed(REQUESTS, lambda each: each.outcomes)
        yield self._summed(RESUMED, lambda each: {(): each.resumed})
        yield self._summed(PROMPT_TOKENS, lambda each: {(): each.prompt_tokens})
        yield self._summed(COMPLETION_TOKENS, lambda each: {(): each.completion_tokens})
        yield self._summed(CACHED_TOKENS, lambda each: {(): each.cached_tokens})
        yield self._summed(KV_BLOCKS, lambda each: each.kv_blocks)
        yield self._summed(KV_BYTES, lambda each: each.kv_bytes)
        yield self._histogram(TTFT, lambda each: each.first_token)
        yield self._histogram(TPOT, lambda each: each.token_gaps)
        yield self._histogram(LONGEST_GAP, lambda each: each.longest_gaps)
        yield self._histogram(DURATION, lambda each: each.answered())
        yield from self._gen_ai()

    def _summed(self, definition: CounterDefinition, read: Callable[[ModelRequests], Mapping[Labels, float]]) -> Metric:
        """Return a counter whose labels are the model and the keys of the mapping that `read` returns."""
        sums: dict[Labels, float] = {}
        for each in self.requests.values():
            for labels, value in read(each).items():
                key = (each.model, *labels)
                sums[key] = sums.get(key, 0) + value
        return definition.samples(sums)

    def _histogram(self, definition: HistogramDefinition, read: Callable[[ModelRequests], Durations]) -> Metric:
        """Return a histogram with the label `model` from the durations that `read` returns."""
        by_model: dict[str, list[Durations]] = {}
        for each in self.requests.values():
            by_model.setdefault(each.model, []).append(read(each))
        return definition.samples(
            {(model,): summed(each).buckets(definition.bounds) for model, each in by_model.items()}
        )

    def _gen_ai(self) -> Iterator[Metric]:
        duration: dict[Labels, BucketCounts] = {}
        ttft: dict[Labels, BucketCounts] = {}
        tpot: dict[Labels, BucketCounts] = {}
        for each in [times for source in self.times for times in source()]:
            labels = each.operation, PROVIDER, each.model
            for error, durations in each.durations.items():
                duration[*labels, error] = durations.buckets(GEN_AI_DURATION.bounds)
            if each.first_token is not None:
                ttft[labels] = each.first_token.buckets(GEN_AI_TTFT.bounds)
            if each.token_gaps is not None:
                tpot[labels] = each.token_gaps.buckets(GEN_AI_TPOT.bounds)
        yield GEN_AI_DURATION.samples(duration)
        yield GEN_AI_TTFT.samples(ttft)
        yield GEN_AI_TPOT.samples(tpot)


def configure_logging(level: str = "INFO") -> None:
    """Log to standard error, one line per entry, with the fields of `extra` after the message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPED_IN_LOGS = {code: repr(chr(code))[1:-1] for code in _CONTROLS}
"""Escaped forms of control characters and of characters that change the direction of text, for `str.translate`. Log
lines may contain such characters, because clients choose some names."""


class LogLineFormatter(logging.Formatter):
    """Formats a log record as one line ``time level logger message key=value …``, and escapes control characters.

    A traceback follows the line, and is not escaped.
    """

    _STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the method's name in the library `logging`
        """Return the line of a record without its traceback."""
        extras = "".join(f" {key}={value}" for key, value in record.__dict__.items() if key not in self._STANDARD)
        return (super().formatMessage(record) + extras).translate(ESCAPED_IN_LOGS)
