"""Request rows: writes a row for each ended request, as JSON lines or Parquet.

A file of JSON lines can be used as a trace (`fleet.recording.traces`). If the file contains block names, the requests of this trace
share the same prefixes as in the run.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from fleet.core.errors import ConfigurationRefused
from fleet.sim.results.outcomes import EndedRequest, Slo

GROUP = 20_000
"""Number of rows in one row group of a Parquet file. The rows of one group are kept in memory until the group is
written."""

PARQUET = ".parquet"


class RequestRow(Struct, frozen=True, kw_only=True):
    """One row of the file: an ended request. Instants are in nanoseconds since the start of the simulation, durations in ms."""

    request_id: str
    session: int  # number of the session; 0: the request belongs to no known session
    arrival: int  # instant at which the client sent the request for the first time
    first_token: int | None  # instant of the first token; None: the request ended without a token
    end: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int  # number of answer tokens that the client asked for
    retries: int
    good: bool  # True if the request kept the SLO
    refused: str  # reason of the rejection; empty: not rejected
    block_tokens: int | UnsetType = UNSET
    hash_ids: tuple[int, ...] | UnsetType = UNSET


def request_row(ended: EndedRequest, slo: Slo, block_tokens: int | None) -> RequestRow:
    """Return the row of a request. The row contains the block names of the prompt only if `block_tokens` is not None."""
    answered = ended.first_token is not None and not ended.refused
    return RequestRow(
        request_id=ended.request_id,
        session=ended.session,
        arrival=ended.arrival,
        first_token=ended.first_token,
        end=ended.end,
        ttft_ms=None if ended.first_token is None else ended.ttft_ms,
        tpot_ms=None if ended.first_token is None else ended.tpot_ms,
        e2e_ms=ended.e2e_ms,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        output_tokens=ended.output_tokens,
        max_tokens=ended.max_tokens,
        retries=ended.retries,
        good=answered and slo.kept_by(ended),
        refused=ended.refused,
        block_tokens=UNSET if block_tokens is None else block_tokens,
        hash_ids=UNSET if block_tokens is None else ended.chain,
    )


@contextmanager
def row_writer(path: Path, name: str, slo: Slo, block_tokens: int | None) -> Iterator[Callable[[EndedRequest], None]]:
    """Open a file for rows, and yield a function that writes the row of a request.

    If `name` ends with `.parquet`, rows are written as Parquet; otherwise as JSON lines.

    Raises:
        ConfigurationRefused: Parquet was requested, and pyarrow is not installed.
        OSError: The file cannot be opened or written.
    """
    if name.endswith(PARQUET):
        parquet = _Parquet(path, with_blocks=block_tokens is not None)
        try:
            yield lambda ended: parquet.add(request_row(ended, slo, block_tokens))
        finally:
            parquet.close()
        return
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:

        def write(ended: EndedRequest) -> None:
            file.write(encode(request_row(ended, slo, block_tokens)) + b"\n")

        yield write


class _Parquet:
    """Writes rows to a Parquet file, one row group at a time."""

    def __init__(self, path: Path, *, with_blocks: bool):
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigurationRefused(
                "--requests: Parquet needs pyarrow: pip install 'fleet-serving[parquet]'; or name a file in .jsonl"
            ) from error
        fields = [(field.name, field.type) for field in structs.fields(RequestRow)]
        if not with_blocks:
            fields = [(name, type_) for name, type_ in fields if name not in {"block_tokens", "hash_ids"}]
        self._names = [name for name, _ in fields]
        self._schema = self._arrow.schema([(name, self._column(type_)) for name, type_ in fields])
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[RequestRow] = []

    def add(self, row: RequestRow) -> None:
        self._rows.append(row)
        if len(self._rows) == GROUP:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        columns = {name: [getattr(row, name) for row in self._rows] for name in self._names}
        self._writer.write_table(self._arrow.Table.from_pydict(columns, schema=self._schema))
        self._rows.clear()

    def _column(self, type_: Any) -> Any:
        arrow = self._arrow
        for python, column in (
            (bool, arrow.bool_()),
            (str, arrow.string()),
            (float, arrow.float64()),
            (int, arrow.int64()),
        ):
            if type_ is python or type_ in (python | None, python | UnsetType):
                return column
        return arrow.list_(arrow.int64())
