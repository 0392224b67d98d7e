from typing import Literal

import msgspec
import pytest
from msgspec import Struct

from fleet.core.errors import allowed_values, split_validation_error, with_allowed_values
from fleet.core.roles import Role


class Inner(Struct):
    role: Role
    mode: Literal["a", "b"] | None = None


class Other(Struct, tag=True):
    role: Literal["c"]


class Red(Struct, tag_field="kind", tag="red"):
    pass


class Blue(Struct, tag_field="kind", tag="blue"):
    pass


class Outer(Struct):
    colour: Red | Blue
    one: Inner | None
    listed: list[Inner]
    pair: tuple[Inner, ...]
    named: dict[str, Role]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (".one.role", ["prefill", "decode", "both"]),
        (".one.mode", ["a", "b"]),
        (".listed[0].role", ["prefill", "decode", "both"]),
        (".pair[...].mode", ["a", "b"]),
        (".named[...]", ["prefill", "decode", "both"]),
        (".colour.kind", ["red", "blue"]),
        (".listed", []),
        (".nothing.there", []),
        ("", []),
    ],
)
def test_values_at_a_path_are_found_through_containers(path, values):
    assert allowed_values(Outer, path) == values


def test_only_errors_of_enumerations_get_their_values():
    assert with_allowed_values("Invalid enum value 'x'", Inner, ".role") == (
        "Invalid enum value 'x'; use prefill, decode or both"
    )
    assert with_allowed_values("Expected `int`", Inner, ".role") == "Expected `int`"
    assert with_allowed_values("Invalid enum value 'x'", Inner, ".other") == "Invalid enum value 'x'"
    assert with_allowed_values("Invalid enum value 'x'", Other, ".role").endswith("; use c")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"kind": "green"}, "Invalid value 'green'; use red or blue"),
        ({}, "Object missing required field `kind`; use red or blue"),
    ],
)
def test_errors_of_tags_get_the_values_of_the_union(value, said):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"colour": value}, Outer)
    cause, path = split_validation_error(refused.value)
    assert with_allowed_values(cause, Outer, path) == said
