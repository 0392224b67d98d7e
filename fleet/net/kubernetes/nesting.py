"""JSON that is nested more deeply than it can be read, or worked with. Pure.

An API server takes ten thousand levels where a schema leaves open what is written, a reader here has a thousand, and who makes something of it fewer. So
that what one namespace holds does not keep anybody from reading the others, whatever lies deeper than DEEPEST is left out: no kind of Kubernetes' own has
so many levels, so the server will refuse what is made of the rest, and say why.
"""

import re
from collections.abc import Iterator
from typing import Any

DEEPEST = 100
"""Levels that are kept."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def shallow(content: bytes) -> bytes:
    """The same, with null for every object and list below DEEPEST. What is no JSON stays none."""
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
    """Have None in place of every object and list below so many levels, of which `root` is the first."""
    containers: list[Any] = [root]
    for _ in range(levels - 1):
        containers = [inner for each in containers for _, inner in _inside(each)]
        if not containers:
            return
    for each in containers:
        for place, _ in list(_inside(each)):
            each[place] = None


def _inside(container: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Objects and lists in it, each with its place."""
    places = container.items() if isinstance(container, dict) else enumerate(container)
    return ((place, inner) for place, inner in places if isinstance(inner, dict | list))
