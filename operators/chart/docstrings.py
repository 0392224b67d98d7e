"""Docstrings: reads the docstrings of types, from which CRDs, chart values and docs/settings.md are generated."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct


def structs_of(of: type[Struct]) -> dict[str, type[Struct]]:
    """Return a Struct type, and every Struct type that occurs in its fields at any depth, by name."""
    return {name: each for name, each in named_types(of).items() if issubclass(each, Struct)}


def named_types(of: type[Struct]) -> dict[str, type[Struct] | type[Enum]]:
    """Return a Struct type, and every Struct type and enumeration that occurs in its fields at any depth, by name."""
    found: dict[str, type[Struct | Enum]] = {}

    def look(info: Any) -> None:
        if isinstance(info, msgspec.inspect.EnumType):
            found[info.cls.__name__] = info.cls
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls.__name__ in found:
                return
            found[info.cls.__name__] = info.cls
            for field in info.fields:
                look(field.type)
            return
        for name in ("item_type", "key_type", "value_type"):
            if (inner := getattr(info, name, None)) is not None:
                look(inner)
        for inner in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
            look(inner)
        if isinstance(info, msgspec.inspect.Metadata):
            look(info.type)

    look(msgspec.inspect.type_info(of))
    return found


@cache
def documented_fields(kind: type[Struct] | None) -> Mapping[str, str]:
    """Return the docstring of each field of a type and its bases, by the name that the field has in JSON.

    Fields without a docstring are left out. The result is empty if `kind` is None.
    """
    if kind is None:
        return {}
    wire = {each.name: each.encode_name for each in msgspec.structs.fields(kind)}
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Struct) and each is not Struct:
            texts |= {wire[name]: text for name, text in _own_docstrings(each) if name in wire}
    return texts


@cache
def documented_values(kind: type[Enum]) -> Mapping[str, str]:
    """Return the docstring of each member of an enumeration, by the value of the member."""
    return {str(kind[name].value): text for name, text in _own_docstrings(kind)}


def _own_docstrings(kind: type[Struct] | type[Enum]) -> Iterator[tuple[str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    if not isinstance(node, ast.ClassDef):
        return
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                yield name, " ".join(words.split())
            case _:
                pass
