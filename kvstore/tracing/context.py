"""Trace context: reads the W3C headers that say to which trace a request belongs.

Rules (https://www.w3.org/TR/trace-context/, https://www.w3.org/TR/baggage/):

1. An invalid `traceparent` makes the whole context invalid. The request then begins a trace of its own.
2. A `tracestate` that is invalid or exceeds the specification's limits is dropped. The rest of the context is used. A
   valid `tracestate` is passed on unchanged.
3. Only the keys of `baggage` that the caller names are read. A member that cannot be parsed is left out.
4. The length of a header is checked before anything else, so that a very long header of an attacker costs no time.
"""

import re
from collections.abc import Collection
from urllib.parse import unquote

from msgspec import Struct

TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8

# Maximum number of characters of a valid `traceparent`. Version 00 has 55, and later versions may have more.
LONGEST_PARENT = 256
# Maximum number of characters of a valid `tracestate`. The specification demands that at least 512 are accepted.
LONGEST_STATE = 512
MOST_STATE_MEMBERS = 32
LONGEST_BAGGAGE = 8192
MOST_BAGGAGE_MEMBERS = 64  # limit of the specification for `baggage`
LONGEST_BAGGAGE_VALUE = 256

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_STATE_MEMBER = re.compile(
    rf"[ \t]*(?:{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e])?[ \t]*"
)
_SAMPLED = 1


class TraceContext(Struct, frozen=True, kw_only=True):
    """Names the trace of a request, and the caller's span, which is the parent of the request's spans."""

    trace_id: bytes  # 16 bytes, not all zero
    parent_id: bytes = b""  # the 8 bytes of the calling span's id; empty if the trace begins with this request
    # True: the request is traced. False: its spans are exported only if the request fails or is slow (tail sampling).
    sampled: bool = False
    state: str = ""  # the client's `tracestate`, unchanged; empty if there is none or it is invalid (rule 2)
    # Members of the header `baggage` with those keys that `read_trace_context` was given (rule 3).
    baggage: tuple[tuple[str, str], ...] = ()


def read_trace_context(
    traceparent: str, tracestate: str = "", baggage: str = "", keys: Collection[str] = ()
) -> TraceContext | None:
    """Read the context of a request from its headers; None if `traceparent` is invalid (rule 1).

    Args:
        traceparent: The header of this name.
        tracestate: The header of this name; empty: there is none.
        baggage: The header of this name; empty: there is none.
        keys: Keys of the baggage that are read.
    """
    if len(traceparent) > LONGEST_PARENT or (parts := _PARENT.fullmatch(traceparent)) is None:
        return None
    version, trace_id, parent_id, flags, rest = parts.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return TraceContext(
        trace_id=bytes.fromhex(trace_id),
        parent_id=bytes.fromhex(parent_id),
        sampled=bool(int(flags, 16) & _SAMPLED),
        state=tracestate if is_trace_state(tracestate) else "",
        baggage=read_baggage(baggage, keys) if keys else (),
    )


def is_trace_state(text: str) -> bool:
    """Return whether a text is a valid `tracestate`, and not empty."""
    if not text or len(text) > LONGEST_STATE:
        return False
    members = text.split(",")
    return len(members) <= MOST_STATE_MEMBERS and all(map(_STATE_MEMBER.fullmatch, members))


def read_baggage(text: str, keys: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return the members of `baggage` with these keys; none if the header is longer than allowed.

    Members after the first `MOST_BAGGAGE_MEMBERS` are ignored. A value is cut after `LONGEST_BAGGAGE_VALUE` characters.
    """
    if not text or len(text) > LONGEST_BAGGAGE:
        return ()
    found: dict[str, str] = {}
    for member in text.split(",")[:MOST_BAGGAGE_MEMBERS]:
        key, equals, value = member.partition(";")[0].partition("=")
        if equals and (key := key.strip()) in keys:
            found[key] = unquote(value.strip())[:LONGEST_BAGGAGE_VALUE]
    return tuple(found.items())


def call_trace(context: TraceContext | None) -> bytes:
    """Return the value of the field `trace` in an attempt's calls to store nodes; empty if the request is not sampled.

    Through this field, the node's spans become children of the router's span. If they were children of the worker's
    span, they would have no parent after the worker's death.
    """
    if context is None or not context.sampled:
        return b""
    return context.trace_id + context.parent_id


def traceparent_of(context: TraceContext) -> str:
    """Return the header `traceparent` for a call that this context's parent span makes."""
    return f"00-{context.trace_id.hex()}-{context.parent_id.hex()}-{_SAMPLED if context.sampled else 0:02x}"
