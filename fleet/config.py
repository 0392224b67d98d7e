"""Settings loader: the only module of `fleet` that reads settings files and environment variables.

Rules:

1. A settings Struct is defined next to the code that uses it, and documents each field.
2. A file is TOML (`.toml`) or JSON (any other suffix) of exactly one Struct. An unknown key, a wrong type or a value
   out of range raises `ConfigurationRefused` with the file, the path of the key and the cause, in one line.
3. No setting comes from the environment. The environment only says where caches and the user's Kubernetes configuration
   are, which authorities gRPC knows, and whether to use colours. Child processes get the whole environment.
4. Command-line options are in `fleet.cli`; the options of `fleet up` override the file (`fleet.cli.up`).
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from fleet.core.errors import (
    ConfigurationRefused,
    did_you_mean,
    known_fields,
    path_with_keys,
    split_validation_error,
    with_allowed_values,
)

Settings = TypeVar("Settings", bound=Struct)

MOST_BYTES = 64 << 20
"""Maximum length of a settings file. A device such as /dev/zero has no end."""

_NO_SHA256 = "Expected `str` matching regex '^[0-9a-f]{64}$'"


def load(
    path: Path,
    kind: type[Settings],
    changes: Mapping[str, Any] | None = None,
    *,
    content: Mapping[str, Any] | None = None,
) -> Settings:
    """Read settings from a file.

    Args:
        path: The file.
        kind: The Struct that the file describes.
        changes: Values that replace or complement the file's, by path (``router.policy``, ``pools.0.gpus``).
        content: The content of the file, if the caller has it from `read_file`: a pipe can be read only once. It stays unchanged.

    Raises:
        ConfigurationRefused: The file cannot be read, is not TOML or JSON, or does not fit `kind`; or a change cannot be applied.
    """
    raw = _read(path) if content is None else content
    try:
        if changes and content is not None:
            raw = deepcopy(content)
        for where, value in (changes or {}).items():
            _change(raw, where, value)
        settings = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationRefused(f"{path}: {_with_path(error, kind, raw)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationRefused(f"{path}: {_one_line(str(error))}") from error
    if (huge := _path_of(raw, _is_too_long)) is not None:
        raise ConfigurationRefused(f"{path}: {huge}: must be an integer of at most 64 bits")
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a settings file as it is written, without a check of its keys.

    Raises:
        ConfigurationRefused: The file cannot be read, or is not a TOML or JSON object.
    """
    raw = _read(path)
    if not isinstance(raw, dict):
        raise ConfigurationRefused(f"{path}: is not an object with keys")
    return raw


def _read(path: Path) -> Any:
    try:
        content = _content(path).decode()
        return tomllib.loads(content) if path.suffix == ".toml" else msgspec.json.decode(content)
    except OSError as error:
        raise ConfigurationRefused(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigurationRefused(f"{path}: is not a text in UTF-8, and so no {kind} file") from error
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ConfigurationRefused(f"{path}: {_one_line(str(error))}") from error


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigurationRefused(f"{path}: has more than {MOST_BYTES >> 20} MiB; name a smaller file")
    return content


def parse_changes(assignments: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Parse ``path=value`` options. A value that is valid in TOML is parsed as TOML; any other value is a string.

    Args:
        assignments: The options; later ones win.
        option: Name of the option, for error messages.

    Raises:
        ConfigurationRefused: An option has no path or no equals sign.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigurationRefused(f"{option}: {assignment!r} is not PATH=VALUE, as in router.policy=random")
        changes.pop(path, None)
        changes[path] = parse_value(value)
    return changes


def merge_changes(changes: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of changes. A path that is in both has the value of `later`.

    All paths of `later` stand at the end, because changes are applied in order.
    """
    return {path: value for path, value in changes.items() if path not in later} | dict(later)


def read_file_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse ``path=file`` options and read the files: a `.json` file as JSON, any other file as text.

    So a mounted Secret need not be in a settings file or in a process list. A line break at the end of a text is
    removed.

    Raises:
        ConfigurationRefused: An option has no path, or its file cannot be read, is not JSON although its name ends with `.json`,
            or is not UTF-8. The message never quotes the content.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, name = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigurationRefused(f"--set-file: {assignment!r} is not PATH=FILE, as in tenant_secret=/run/secret")
        try:
            content = _content(Path(name))
            changes[path] = (
                msgspec.json.decode(content) if name.endswith(".json") else content.decode().removesuffix("\n")
            )
        except OSError as error:
            raise ConfigurationRefused(f"--set-file: {name}: {error.strerror}") from error
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            kind = "JSON" if name.endswith(".json") else "UTF-8"
            raise ConfigurationRefused(f"--set-file: {name}: is not {kind}") from None
    return changes


def parse_value(text: str) -> Any:
    """Return the value that a text states in TOML; if the text is no TOML value, return the text itself."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML value, or one with thousands of digits or brackets
        return text
    return read["value"] if len(read) == 1 else text


def _change(raw: Any, where: str, value: Any) -> None:
    """Set one value in the parsed content of a file.

    Raises:
        ValueError: The path leads into a value without fields, or to an element that an array does not have.
    """
    *parents, last = where.split(".")
    inner = raw
    for name in parents:
        inner = inner.setdefault(name, {}) if isinstance(inner, dict) else _element(inner, name, where)
    if isinstance(inner, dict):
        inner[last] = value
    else:
        _element(inner, last, where)
        inner[int(last)] = value


def _element(array: Any, index: str, where: str) -> Any:
    if not isinstance(array, list) or not index.isdecimal() or int(index) >= len(array):
        raise ValueError(f"{where}: there is no {index!r} there")
    return array[int(index)]


def build_settings(kind: Callable[..., Settings], **fields: Any) -> Settings:
    """Build settings from values of the program, such as command-line options.

    Raises:
        ConfigurationRefused: A value is not allowed, or values contradict each other.
    """
    try:
        return kind(**fields)
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def save(settings: Struct, path: Path) -> None:
    """Write settings as JSON for a child process. Only the owner can read the file, because it may contain secrets.

    Raises:
        ConfigurationRefused: A number is not finite, which JSON cannot express.
        OSError: The file cannot be written; the error's `filename` is the path.
    """
    if (where := _path_of(msgspec.to_builtins(settings), _is_not_finite)) is not None:
        raise ConfigurationRefused(f"{where}: must be finite")
    try:
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(settings))
    except OSError as error:  # if the disk is full, the system's error names no file, so the message adds it
        raise OSError(error.errno, error.strerror, str(path)) from error


def default_cache_dir() -> Path:
    """Return the folder for built and downloaded models, in the user's cache folder (XDG base directory specification)."""
    home = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - this is the loader
    return (Path(home) if home else Path.home() / ".cache") / "fleet"


def grpc_authorities() -> str:
    """Return the path of the file with the certificate authorities that gRPC trusts by default."""
    named = os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH")  # noqa: TID251 - this is the loader
    return named or str(files("grpc") / "_cython" / "_credentials" / "roots.pem")


def child_environment() -> dict[str, str]:
    """Return the environment variables for child processes: those of this process, and one that makes Python's output unbuffered."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}  # noqa: TID251 - this is the loader


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not isfinite(value)


def _is_too_long(value: Any) -> bool:
    """Return True for an integer of more than 64 bits, which the JSON files for child processes cannot contain."""
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _path_of(value: Any, is_wrong: Callable[[Any], bool]) -> str | None:
    """Return the path of the first inner value for which `is_wrong` is true; None if there is none, an empty text for `value` itself."""
    match value:
        case dict():
            inner = list(value.items())
        case list() | tuple():
            inner = list(enumerate(value))
        case _:
            return "" if is_wrong(value) else None
    for name, each in inner:
        if (where := _path_of(each, is_wrong)) is not None:
            return f"{name}.{where}".rstrip(".")
    return None


def _with_path(error: msgspec.ValidationError, kind: Any, raw: Any) -> str:
    """Return the text of a validation error with the path of the key at its beginning. `raw` is the value that has the error.

    For example, 'Object contains unknown field `x` - at `$.router`' becomes 'router.x: is not a known key'.
    """
    cause, path = split_validation_error(error)
    cause = with_allowed_values(cause, kind, path)
    path, shown = path.removeprefix("."), path_with_keys(error, raw, kind).removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", cause):
        known = known_fields(kind, f".{path}" if path else "")
        meant = did_you_mean(unknown[1], known) or ("" if path else _in_sections(unknown[1], kind, known))
        return (
            f"{shown}.{unknown[1]}: is not a known key{meant}" if path else f"{unknown[1]}: is not a known key{meant}"
        )
    cause = cause.replace(_NO_SHA256, "must have 64 of the digits 0-9 and a-f, as sha256sum prints")
    return _one_line(_place_in(path, shown, cause, kind) if path else cause)


def _in_sections(key: str, kind: Any, sections: Sequence[str]) -> str:
    """Return a question that proposes the sections which have this key; empty if no section has it."""
    found = [repr(f"{section}.{key}") for section in sections if key in known_fields(kind, f".{section}")]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _place_in(path: str, shown: str, cause: str, kind: Any) -> str:
    """Put the path of a section before a cause. If the cause begins with the section's name and a field, do not repeat the name.

    `shown` is the path with the keys of tables.
    """
    section, _, field = cause.partition(": ")[0].partition(".")
    if section == path.rpartition(".")[2] and field in known_fields(kind, f".{path}"):
        return shown.removesuffix(section) + cause
    return f"{shown}: {cause}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
