"""Nesting limit: leaves the deepest levels out of JSON that is nested too deeply to be decoded.

An API server accepts ten thousand levels in fields without a schema. The JSON decoder of this project accepts a
thousand, and the code after it fewer. One deeply nested object must not keep the operator from reading all other
objects, so every object and list deeper than `DEEPEST` becomes null. No built-in kind of Kubernetes has that many
levels. If the operator makes a child from a shortened object, the API server may refuse the child because of the null,
and the operator reports the reason.
"""

import re
from collections.abc import Iterator
from typing import Any

DEEPEST = 100
"""Number of levels of nested objects and lists that are kept; everything deeper becomes null."""

_CONTAINERS = (dict, list)
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def shallow(content: bytes) -> bytes:
    """Return the JSON with null for every object and list deeper than `DEEPEST`; invalid JSON stays invalid."""
    kept, begin, depth = bytearray(), 0, 0
    for token in _TOKEN.finditer(content):
        sign = token[0]
        if sign in b"[{":
            depth += 1
            if depth == DEEPEST + 1:
                kept += content[begin : token.start()] + b"null"
        elif sign in b"]}":
            if depth == DEEPEST + 1:
                begin = token.end()
            depth -= 1
    return bytes(kept + content[begin:]) if depth <= DEEPEST else bytes(kept)


def prune(root: dict[str, Any], levels: int = DEEPEST) -> None:
    """Replace every object and list that is deeper than the given number of levels by None; `root` is the first level."""
    containers: list[Any] = [root]
    for _ in range(levels - 1):
        contents = [each.values() if isinstance(each, dict) else each for each in containers]
        containers = [inner for content in contents for inner in content if isinstance(inner, _CONTAINERS)]
        if not containers:
            return
    for each in containers:
        for place, _ in list(_inside(each)):
            each[place] = None


def _inside(container: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Return the objects and lists in a container, each with its key or index."""
    places = container.items() if isinstance(container, dict) else enumerate(container)
    return ((place, inner) for place, inner in places if isinstance(inner, _CONTAINERS))
