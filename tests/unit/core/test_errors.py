"""Validation errors are split into the cause and the path of the value."""

from typing import Annotated

import msgspec
import pytest

from fleet.core.errors import install_command, path_with_keys, split_validation_error


class Nested(msgspec.Struct):
    tables: dict[str, list[dict[str, int]]] = {}
    pair: tuple[int, dict[str, int]] | None = None


class Value(msgspec.Struct, forbid_unknown_fields=True):
    named: dict[Annotated[str, msgspec.Meta(pattern="^a+$")], int] = {}
    rows: list[int] = []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], ("Expected `object`, got `array`", "")),
        ({"rows": [1, "x"]}, ("Expected `int`, got `str`", ".rows[1]")),
        ({"named": {"a": "x"}}, ("Expected `int`, got `str`", ".named[...]")),
        ({"named": {"b": 1}}, ("its keys: Expected `str` matching regex '^a+$'", ".named")),
        ({"more": 1}, ("Object contains unknown field `more`", "")),
    ],
)
def test_validation_error_is_split_into_cause_and_path(value, told):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, Value)
    assert split_validation_error(refused.value) == told


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"tables": {"a": [{"x": 1}], "b.c": [{"x": 1}, {"y": 2, "z": "no"}]}}, ".tables.b.c[1].z"),
        ({"tables": {"a": [{"x": 1}], "b": 5}}, ".tables.b"),
        ({"pair": [1, {"x": 1, "y": None}]}, ".pair[1].y"),
        ({"tables": []}, ".tables"),
        ([], ""),
    ],
)
def test_path_has_the_keys_of_tables(value, path):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, Nested)
    assert path_with_keys(refused.value, value, Nested) == path


def test_make_is_named_only_where_there_is_a_makefile(tmp_path, monkeypatch):
    monkeypatch.setattr("fleet.core.errors.CHECKOUT", tmp_path)
    assert install_command("vllm") == "pip install 'fleet-serving[vllm]'"

    (tmp_path / "Makefile").touch()
    assert install_command("vllm") == "make install"
