from typing import Literal

import pytest
from msgspec import Struct

from fleet.core.errors import allowed_values, with_allowed_values
from fleet.core.roles import Role


class Inner(Struct):
    role: Role
    mode: Literal["a", "b"] | None = None


class Other(Struct, tag=True):
    role: Literal["c"]


class Outer(Struct):
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
