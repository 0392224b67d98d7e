"""Functions on JSON values that every part of the server uses: copies of values, and paths within values."""

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Json = Any
Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""


def clone(value: T) -> T:
    """Return a deep copy, several times faster than `copy.deepcopy`, because JSON has neither cycles nor classes."""
    copy: Json = value
    if isinstance(value, dict):
        copy = {key: clone(each) for key, each in value.items()}
    elif isinstance(value, list):
        copy = [clone(each) for each in value]
    return copy  # type: ignore[no-any-return]


def dig(value: Json, *path: str) -> Json:
    """Return the value at a path of field names; None if a field on the path is missing."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def without(value: Object, *names: str) -> Object:
    return {key: each for key, each in value.items() if key not in names}


def within(path: str, name: str) -> str:
    """Return the path of a field as error messages write it: `spec.roles[0].name`."""
    return f"{path}.{name}" if path else name


def key_of(item: Object, keys: list[str]) -> tuple[str, ...]:
    """Return the key of a list-map's item: the values of its key fields as texts."""
    return tuple(str(item.get(key)) for key in keys)


def every_dict(value: Json) -> Iterator[Object]:
    """Yield all JSON objects within a value, outer objects first."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from every_dict(each)
    elif isinstance(value, list):
        for each in value:
            yield from every_dict(each)
