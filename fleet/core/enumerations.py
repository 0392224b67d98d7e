"""Enumerations in settings and messages: the values that are allowed at a path, for errors that name them."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect
from msgspec.inspect import Type

INVALID = "Invalid enum value"  # the beginning of msgspec's message

_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")


def with_allowed_values(cause: str, kind: Any, path: str) -> str:
    """Return the cause of a validation error; that of a wrong enumeration value ends with the allowed ones.

    Args:
        cause: As `fleet.core.errors.split_validation_error` gives it.
        kind: The type that was decoded.
        path: The path of the wrong value in it, such as ``.pools[0].role``.
    """
    if not cause.startswith(INVALID):
        return cause
    allowed = allowed_values(kind, path)
    return f"{cause}; use {_in_words(allowed)}" if allowed else cause


def allowed_values(kind: Any, path: str) -> list[str]:
    """Return the values of the enumerations at a path of a type; empty if there are none."""
    places = [msgspec.inspect.type_info(kind)]
    for name, _ in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, name)]
    values = [str(value) for place in places for value in _values(place)]
    return list(dict.fromkeys(values))


def _inside(place: Type, name: str) -> Iterator[Type]:
    """Yield the types of a field, or of the elements if there is no name."""
    match place:
        case msgspec.inspect.StructType(fields=fields) if name:
            yield from (field.type for field in fields if field.encode_name == name)
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                yield from _inside(each, name)
        case msgspec.inspect.Metadata(type=inner):
            yield from _inside(inner, name)
        case msgspec.inspect.DictType(value_type=inner):
            yield inner
        case (
            msgspec.inspect.ListType(item_type=inner)
            | msgspec.inspect.VarTupleType(item_type=inner)
            | msgspec.inspect.SetType(item_type=inner)
            | msgspec.inspect.FrozenSetType(item_type=inner)
        ):
            yield inner
        case msgspec.inspect.TupleType(item_types=types):
            yield from types
        case _:
            pass


def _values(place: Type) -> Iterator[object]:
    match place:
        case msgspec.inspect.EnumType(cls=kind):
            yield from (each.value for each in kind)
        case msgspec.inspect.LiteralType(values=values):
            yield from values
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                yield from _values(each)
        case msgspec.inspect.Metadata(type=inner):
            yield from _values(inner)
        case _:
            pass


def _in_words(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
