"""Access records: writes a rotated file with a JSON object for each request that ended or was refused.

`fleet.frontend.access_log` builds the records. `SCHEMA` names the format. A record names the request, its model, tenant and session, and the
workers. It contains the text of the prompt and of the answer only if the settings demand it. `fleet.recording.traces` reads the records as a trace, for simulations of the same traffic.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from prometheus_client.core import Metric

from fleet.core.requests import ToolCall
from fleet.recording.rotated_file import RotatedFile
from kvstore.metric_definitions import CounterDefinition, MetricDefinition

log = logging.getLogger(__name__)

SCHEMA = "fleet.access.v1"

RECORDS = CounterDefinition("fleet_access_records", "Access records that were written", unit="records")
DROPPED = CounterDefinition(
    "fleet_access_records_dropped",
    "Access records that were lost, because the disk was full or too slow, or because they could not be encoded",
    unit="records",
)
METRICS: Sequence[MetricDefinition] = (RECORDS, DROPPED)


class PlacementRecord(Struct, frozen=True, kw_only=True):
    """One placement of a request. `fleet explain` shows it in more detail."""

    worker: str  # id of the worker that generates the answer
    prefill_worker: str = ""  # id of the worker that computes the prompt; empty: `worker` computes it, too
    why: str


class KvRecord(Struct, frozen=True, kw_only=True):
    """Says where the blocks of a prompt came from in one phase of a request."""

    phase: str
    worker: str
    blocks: dict[str, int]  # number of blocks by source, such as "engine" or "store"
    bytes: int


class AccessRecord(Struct, frozen=True, kw_only=True):
    """The record of one request.

    Durations are in seconds. A duration is null if it does not exist, such as the time to a first token that never came,
    or if it is not known.
    """

    schema: str = SCHEMA
    time: str  # when the request arrived, in ISO 8601 and UTC
    arrival: int  # when the request arrived, in nanoseconds of Unix time
    request_id: str
    trace_id: str = ""
    tenant: str = ""
    model: str
    operation: str  # OpenTelemetry's `gen_ai.operation.name`: chat, text_completion, embeddings, …
    session_id: str = ""
    stream: bool
    external: bool = False  # True if the request was relayed to an external backend
    outcome: str
    placement: str = ""  # "aggregated" or "disaggregated"; empty: no worker has reported where the prompt was computed
    # All placements of the request in the order of time; several if an attempt has failed. Empty if the request was refused, or if the
    # router has forgotten the placements.
    placements: tuple[PlacementRecord, ...] = ()
    kv: tuple[KvRecord, ...] = ()
    prompt_tokens: int | None = None  # null: the request was not admitted, or its number of tokens is not known
    cached_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    # From the arrival at the router machine until the request was first sent to a worker.
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    itl_max_seconds: float | None = None
    duration_seconds: float
    prompt: Any = UNSET
    answer: str | UnsetType = UNSET
    calls: tuple[ToolCall, ...] | UnsetType = UNSET


class AccessRecordFile:
    """Writes access records to a file. The object is also a collector of metrics for a `CollectorRegistry`."""

    def __init__(self, file: RotatedFile, *, content: bool) -> None:
        """Write to an open file. `content` is True if records contain the text of prompts and answers."""
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._unencodable = 0
        self.content = content

    def write(self, record: AccessRecord) -> None:
        """Add a record to the file, without waiting for the disk. Drop and log a record that cannot be encoded."""
        try:
            line = self._encoder.encode(record)
        except (ValueError, TypeError) as error:  # for instance, a client's text that is not valid Unicode
            self._unencodable += 1
            log.warning("access record dropped", extra={"request": record.request_id, "cause": str(error)})
            return
        self._file.add(line + b"\n")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client expects."""
        yield RECORDS.value(self._file.lines)
        yield DROPPED.value(self._file.dropped + self._unencodable)
