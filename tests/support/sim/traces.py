"""Excerpts of public traces in tests/data; each is read only once."""

from functools import cache
from pathlib import Path

from fleet.recording.traces import Trace, read_trace

DATA = Path(__file__).parents[2] / "data"
CONVERSATION = DATA / "conversation_1500.jsonl.gz"
AGENTIC = DATA / "agentic_20.jsonl.gz"


@cache
def conversation() -> Trace:
    return read_trace(CONVERSATION)


@cache
def agentic() -> Trace:
    return read_trace(AGENTIC)
