"""Document reader: reads a document of another project field by field.

At the end, the reader reports the fields that no call has read.

Rules:

1. Each method that reads a field, except `any`, checks the type of the value. For a wrong type, it raises an error that
   names the path of the field. Helm charts write numbers as texts, so a text of digits counts as a number.
2. A field that no call has read has no equivalent in Fleet, and a note with its path says so. Fields that are empty,
   false or 0 get no note, because they probably repeat a default.
3. Notes contain the names of fields, but never their values, which may be secret.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused

NO_EQUAL = "has no equal here and is left out"


class Note(Struct, frozen=True):
    """Holds a remark about an import, for the person who runs the import."""

    path: str
    """Path of the field, such as ``spec.services.Frontend.ingress``, or an empty text if the note is not about one
    field."""

    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class DocumentReader:
    """Reads the fields of one object of a document, and reports at the end which fields were not read."""

    def __init__(self, fields: Mapping[str, Any], path: str, notes: list[Note]) -> None:
        self._fields = fields
        self._unread = dict.fromkeys(fields)
        self._inner: list[DocumentReader] = []
        self.path = path
        self.notes = notes

    def __contains__(self, name: str) -> bool:
        return bool(self._fields.get(name))

    def skip(self, *names: str) -> None:
        """Mark fields as read without using them, so that they get no note."""
        for name in names:
            self._unread.pop(name, None)

    def skip_all(self) -> None:
        self._unread.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields of the object."""
        return tuple(self._fields)

    def at(self, name: str) -> str:
        """Return the path of a field in the document."""
        return f"{self.path}.{name}" if self.path else name

    def note(self, name: str, message: str) -> None:
        """Add a note about a field, which then counts as read."""
        self.any(name)
        self.notes.append(Note(self.at(name), message))

    def note_if(self, name: str, message: str = NO_EQUAL) -> None:
        """Read a field, and add a note about it if its value was probably written on purpose (`says_something`)."""
        if says_something(self.any(name)):
            self.note(name, message)

    def any(self, name: str) -> Any:
        """Return the value of a field of any type, or None if the field is absent. The field then counts as read."""
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
        """Return a reader for the object in a field; if the field is absent, the object is empty."""
        value = self.any(name)
        if value is None or value == "":
            value = {}
        return self._reader(value, self.at(name))

    def tables(self, name: str) -> list["DocumentReader"]:
        """Return a reader for each object of the list in a field."""
        return [self._reader(each, f"{self.at(name)}[{index}]") for index, each in enumerate(self.values(name))]

    def named(self) -> "Mapping[str, DocumentReader]":
        """Return a reader for each field of this object, by the field's name; the value of each field must be an object."""
        return {name: self.table(name) for name in self._fields}

    def values(self, name: str) -> list[Any]:
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def texts(self, name: str) -> list[str]:
        """Return the list of texts in a field; numbers in the list become texts."""
        values = self.values(name)
        for index, each in enumerate(values):
            if isinstance(each, bool) or not isinstance(each, str | int | float):
                raise self._wrong(f"{name}[{index}]", "a text", each)
        return [str(each) for each in values]

    def words(self, name: str) -> dict[str, str]:
        """Return the object in a field, such as labels or annotations, with its values as texts."""
        table = self.table(name)
        return {each: table.text(each) for each in table.names}

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return the list of objects in a field unchanged; all fields of these objects count as read."""
        for each in self.tables(name):
            each.skip_all()
        return self.values(name)

    def rest(self, but: Mapping[str, str] | None = None) -> None:
        """Add a note for each field that was not read, in this object and in its inner objects.

        Args:
            but: Texts of notes about fields of this object itself, by the name of the field. Notes about other fields have the
                text NO_EQUAL. A field whose text is empty gets no note.
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
    """Return whether a value was probably written on purpose.

    Return False for a value that is empty, false or 0, and for an object that has `enabled: false` or only such values,
    because these probably repeat a default.
    """
    if isinstance(value, dict):
        return (
            bool(value) and value.get("enabled") is not False and any(says_something(each) for each in value.values())
        )
    return bool(value)


def kind_of(value: Any) -> str:
    """Return the type of a value in words, such as "a list", for an error message that must not contain the value."""
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
