"""Azure's public inference traces: reads CSV files with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, one request a line.

The traces were published with the papers "Splitwise" (ISCA 2024) and "DynamoLLM" (HPCA 2025). They do not describe
prefixes, so prompts share no blocks.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fleet.core.clock import Nanos
from fleet.recording.trace_rows import LONGEST_NUMBER, LONGEST_PROMPT, TraceError, TraceLine, UnsharedNames
from kvstore.eviction.trace_replay import TraceRequest

TIME, PROMPT, ANSWER = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
MICROSECOND = timedelta(microseconds=1)


def is_header(line: bytes) -> bool:
    """Return True if the first line of a file is the header of an Azure trace."""
    return TIME.encode() in line and not line.lstrip().startswith((b"{", b"["))


def azure_requests(
    path: Path, header: TraceLine, lines: Iterator[TraceLine], chain: UnsharedNames, *, ordered: bool
) -> Iterator[TraceRequest]:
    """Yield a request for each row. Arrivals are times since the first row. `chain` makes names for the blocks of prompts.

    Raises:
        TraceError: A column is missing, a row is malformed, or `ordered` is set and a row is earlier than the row before it.
    """
    columns = [name.strip() for name in header[1].decode("utf-8-sig", "replace").split(",")]
    for name in (TIME, PROMPT, ANSWER):
        if name not in columns:
            raise TraceError(f"{path}:{header[0]}: {name}: there is no such column")
    time, prompt, answer = columns.index(TIME), columns.index(PROMPT), columns.index(ANSWER)
    began: datetime | None = None
    latest = 0
    for number, line in lines:
        fields = line.decode("ascii", "replace").split(",")
        if len(fields) != len(columns):
            raise TraceError(f"{path}:{number}: has {len(fields)} fields, not {len(columns)}")
        moment = _moment(path, number, fields[time].strip())
        began = began or moment
        arrival = (moment - began) // MICROSECOND * 1000
        if ordered and arrival < latest:
            raise TraceError(f"{path}:{number}: {TIME}: {fields[time].strip()} is before the row above")
        latest = arrival
        prompt_tokens = _tokens(path, number, PROMPT, fields[prompt], 1, LONGEST_PROMPT)
        answer_tokens = _tokens(path, number, ANSWER, fields[answer], 0, LONGEST_NUMBER)
        yield TraceRequest(Nanos(arrival), prompt_tokens, chain(prompt_tokens), answer_tokens)


def _moment(path: Path, number: int, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {TIME}: {text!r} is not a time") from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _tokens(path: Path, number: int, field: str, text: str, least: int, most: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 13 or not least <= int(text) <= most:
        raise TraceError(f"{path}:{number}: {field}: {text!r} is not a number of tokens from {least} to {most}")
    return int(text)
