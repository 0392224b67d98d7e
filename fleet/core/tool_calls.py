"""Tool calls of an answer, put together from the parts that a stream has."""

from collections.abc import Iterable

from msgspec import Struct

from fleet.core.requests import CallDelta


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call. `arguments` is a JSON object as text, unless `max_tokens` ended the answer within it."""

    id: str
    name: str
    arguments: str


def join_calls(parts: Iterable[CallDelta]) -> list[ToolCall]:
    """Return the calls whose parts are given, in the order of their indices."""
    calls: dict[int, list[CallDelta]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [
        ToolCall(
            id="".join([part.id for part in calls[index]]),
            name="".join([part.name for part in calls[index]]),
            arguments="".join([part.arguments for part in calls[index]]),
        )
        for index in sorted(calls)
    ]
