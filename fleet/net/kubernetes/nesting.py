"""Nesting limit: handles JSON that is nested too deeply to be decoded. Pure.

An API server accepts ten thousand levels in fields without a schema, the decoder here a thousand, and later code fewer.
One namespace's objects must not keep the operator from reading others, so everything deeper than DEEPEST is left out.
No built-in kind of Kubernetes has so many levels, so the server will refuse what is made of the rest, and say why.
"""

import re
from collections.abc import Iterator
from typing import Any

DEEPEST = 100
"""The levels that are kept."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def shallow(content: bytes) -> bytes:
    """Return the JSON with null for every object and list below DEEPEST; invalid JSON stays invalid."""
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
    """Replace every object and list below that many levels by None; `root` is the first level."""
    containers: list[Any] = [root]
    for _ in range(levels - 1):
        containers = [inner for each in containers for _, inner in _inside(each)]
        if not containers:
            return
    for each in containers:
        for place, _ in list(_inside(each)):
            each[place] = None


def _inside(container: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Return the objects and lists in a container, each with its place."""
    places = container.items() if isinstance(container, dict) else enumerate(container)
    return ((place, inner) for place, inner in places if isinstance(inner, dict | list))
