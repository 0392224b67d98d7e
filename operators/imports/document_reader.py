"""A document of another project, read field by field, so that what nobody has read is known in the end.

Rules:

1. What is read has its type checked; a value of another type is refused with its path. Charts write numbers as texts, so texts of
   digits are numbers.
2. What is not read has no equal, and a note says so with its path. Not of what is empty, false or 0: defaults that somebody copied.
3. Notes repeat names and never values, which may be secret.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused

NO_EQUAL = "has no equal here and is left out"


class Note(Struct, frozen=True):
    """Something that a person has to look at."""

    path: str
    """Of the field, as in ``spec.services.Frontend.ingress``; empty: of no field."""

    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class DocumentReader:
    """One object. Whatever is read of it counts as taken over."""

    def __init__(self, fields: Mapping[str, Any], path: str, notes: list[Note]) -> None:
        self._fields = fields
        self._unread = dict.fromkeys(fields)
        self._inner: list[DocumentReader] = []
        self.path = path
        self.notes = notes

    def __contains__(self, name: str) -> bool:
        return bool(self._fields.get(name))

    def skip(self, *names: str) -> None:
        """Read some fields and do nothing with them."""
        for name in names:
            self._unread.pop(name, None)

    def skip_all(self) -> None:
        self._unread.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all fields."""
        return tuple(self._fields)

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def note(self, name: str, message: str) -> None:
        """Say something about a field, which is read by that."""
        self.any(name)
        self.notes.append(Note(self.at(name), message))

    def note_if(self, name: str, message: str = NO_EQUAL) -> None:
        """The same where the field says something."""
        if says_something(self.any(name)):
            self.note(name, message)

    def any(self, name: str) -> Any:
        """Whatever it is; None: nothing."""
        self._unread.pop(name, None)
        return self._fields.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(name, "a text", value)
        return str(value)

    def number(self, name: str, default: int = 0, *, most: int = 10_000) -> int:
        value = self.any(name)
        if value is None or value == "":
            return default
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self._wrong(name, f"a whole number from 0 to {most}", value)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def table(self, name: str) -> "DocumentReader":
        """An object; where there is none, an empty one."""
        value = self.any(name)
        if value is None or value == "":
            value = {}
        return self._reader(value, self.at(name))

    def tables(self, name: str) -> list["DocumentReader"]:
        """A list of objects."""
        return [self._reader(each, f"{self.at(name)}[{index}]") for index, each in enumerate(self.values(name))]

    def named(self) -> "Mapping[str, DocumentReader]":
        """All fields, which are objects."""
        return {name: self.table(name) for name in self._fields}

    def values(self, name: str) -> list[Any]:
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        values = self.values(name)
        for index, each in enumerate(values):
            if isinstance(each, bool) or not isinstance(each, str | int | float):
                raise self._wrong(f"{name}[{index}]", "a text", each)
        return [str(each) for each in values]

    def words(self, name: str) -> dict[str, str]:
        """An object of texts: labels, annotations."""
        table = self.table(name)
        return {each: table.text(each) for each in table.names}

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects, as they are."""
        for each in self.tables(name):
            each.skip_all()
        return self.values(name)

    def rest(self, but: Mapping[str, str] | None = None) -> None:
        """Note what was not read, here and inside.

        Args:
            but: What to say of some fields in place of that they have no equal; empty: nothing.
        """
        said = but or {}
        for name in list(self._unread):
            message = said.get(name, NO_EQUAL)
            if message and says_something(self._fields[name]):
                self.note(name, message)
        self._unread.clear()
        for inner in self._inner:
            inner.rest()

    def _reader(self, value: Any, path: str) -> "DocumentReader":
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigurationRefused(f"{path}: must be an object, not {kind_of(value)}")
        reader = DocumentReader(value, path, self.notes)
        self._inner.append(reader)
        return reader

    def _wrong(self, name: str, what: str, value: Any) -> ConfigurationRefused:
        return ConfigurationRefused(f"{self.at(name)}: must be {what}, not {kind_of(value)}")


def says_something(value: Any) -> bool:
    """Whether a value is more than a default that was written out."""
    if isinstance(value, dict):
        return (
            bool(value) and value.get("enabled") is not False and any(says_something(each) for each in value.values())
        )
    return bool(value)


def kind_of(value: Any) -> str:
    """What a value is, without saying it."""
    match value:
        case bool():
            return "a boolean"
        case None:
            return "nothing"
        case str():
            return "a text"
        case int() | float():
            return "another number"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"
