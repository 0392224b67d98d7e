"""JSON that is nested more deeply than it can be read. Pure.

An API server takes ten thousand levels where a schema leaves open what is written, and a reader here has a thousand. So that what one namespace
holds does not keep anybody from reading the others, whatever lies deeper than DEEPEST is left out: no kind of Kubernetes' own has so many levels,
so the server will refuse what is made of the rest, and say why.
"""

import re

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
