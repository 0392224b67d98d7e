"""Settings reference: describes the keys of all settings files, as the page docs/settings.md, as a list, and as JSON schemas.

These three outputs are generated from the types that define the settings. `make docs` and `make chart` write the page, and
a unit test compares it with the types. `fleet config` prints the list and the schemas.
"""

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from fleet.local.settings import Topology
from fleet.planner.settings import PlannerSettings
from fleet.router.settings.router import RouterSettings
from kvstore.service.settings import StoreSettings
from operators.chart.docstrings import documented_fields, structs_of
from operators.planner.settings import KubePlannerSettings
from operators.settings import OperatorSettings
from workers.settings import WorkerSettings

KINDS: Mapping[str, type[Struct]] = {
    "router": RouterSettings,
    "worker": WorkerSettings,
    "kvstore": StoreSettings,
    "operator": OperatorSettings,
    "planner": PlannerSettings,
    "kube-planner": KubePlannerSettings,
    "up": Topology,
}
"""The type of each settings file, by the part of `fleet serve` that reads it; `up` is the topology of `fleet up`."""

UNITS = (
    ("_ms_per_token", "milliseconds per token"),
    ("_ms_per_mib", "milliseconds per MiB"),
    ("dollars_per_million_prompt_tokens", "US dollars per million tokens"),
    ("dollars_per_million_answer_tokens", "US dollars per million tokens"),
    ("_bytes_per_second", "bytes per second"),
    ("_tokens_per_second", "tokens per second"),
    ("_per_minute", "per minute"),
    ("dollars_per_hour", "US dollars per hour"),
    ("_seconds", "seconds"),
    ("_ms", "milliseconds"),
    ("_days", "days"),
    ("_mib", "MiB"),
    ("_gib", "GiB"),
    ("_bytes", "bytes"),
    ("_blocks", "KV blocks"),
    ("_tokens", "tokens"),
    ("_share", "share from 0 to 1"),
)
"""Endings of the names of keys, each with the unit of the key's number. The first ending that matches is used."""

NUMBERS = (int, float)


class SettingsKey(Struct, frozen=True, kw_only=True):
    """One key of a settings file."""

    path: str
    """Path in the file. `NAME` stands for any key of a table, and `[]` for any element of an array."""

    unit: str
    """Unit of the value. Empty: the value is no number, or the name of the key states no unit."""

    default: str
    """Default value as JSON, or "required", "none" (null or an empty value), or "see the section"."""

    meaning: str


def command_of(part: str) -> str:
    """Return the command that reads the settings file of one part, such as `fleet serve router`."""
    return "fleet up" if part == "up" else f"fleet serve {part}"


def settings_keys(kind: type[Struct], path: str = "", outer: tuple[type[Struct], ...] = ()) -> Iterator[SettingsKey]:
    """Yield all keys of a settings file; the keys of a section follow the key of the section.

    `outer` are the sections around `kind`. They are not listed again inside `kind`, because a section that contains itself
    would be listed endlessly.
    """
    texts = documented_fields(kind)
    for field in structs.fields(kind):
        key = f"{path}{field.encode_name}"
        yield SettingsKey(
            path=key, unit=_unit(field), default=_default(field).strip("`"), meaning=texts.get(field.encode_name, "")
        )
        for tag_field, meaning in _tags(field.type):
            yield SettingsKey(
                path=f"{key}{_step(field.type)}.{tag_field}", unit="", default="required", meaning=meaning
            )
        for section in _struct_types(field.type):
            if section not in (kind, *outer):
                yield from settings_keys(section, f"{key}{_step(field.type)}.", (*outer, kind))


def described_schema(kind: type[Struct]) -> dict[str, Any]:
    """Return the JSON schema of a settings file, with the meanings and units of its keys as descriptions."""
    schema = msgspec.json.schema(kind)
    for name, each in structs_of(kind).items():
        units = {field.encode_name: _unit(field) for field in structs.fields(each)}
        properties = schema["$defs"].get(name, {}).get("properties", {})
        for field, text in documented_fields(each).items():
            if field in properties:
                properties[field] = {"description": text} | properties[field]
        for field, unit in units.items():
            if unit and field in properties:
                properties[field] = properties[field] | {"x-unit": unit}
    return schema


def reference() -> str:
    """Return the content of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Settings files are TOML. Each table lists the keys of one file or of one section in it. `fleet serve PART --set KEY=VALUE` changes a key.",
        "An unknown key or a value out of range is an error that names the key. `fleet config` prints the same list, `fleet config --json` a JSON schema of each file,",
        "and `fleet config --check FILE` checks a file. This page is generated by `make chart`.",
    ]
    seen: dict[type[Struct], str] = {}
    for part, kind in KINDS.items():
        command = f"`{command_of(part)} --config`"
        lines += ["", f"## {command}", ""]
        lines += _sections(kind, "", seen, command)
    return "\n".join(lines) + "\n"


def _sections(kind: type[Struct], path: str, seen: dict[type[Struct], str], command: str) -> Iterator[str]:
    """Yield the lines of a type's table, then the lines of its sections, without sections that the page has shown already."""
    texts = documented_fields(kind)
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    inner: list[tuple[str, type[Struct]]] = []
    for field in structs.fields(kind):
        key = f"{path}{field.encode_name}"
        sections = [each for each in _struct_types(field.type) if each not in seen]
        for section in sections:
            seen[section] = command
            inner.append((key, section))
        yield f"| `{key}` | {_default(field)} | {texts.get(field.encode_name, '').replace('|', chr(92) + '|')} |"
        for tag_field, meaning in _tags(field.type):
            yield f"| `{key}.{tag_field}` | required | {meaning} |"
    for key, section in inner:
        yield ""
        yield f"### {command}: section `{key}` ({_named(section)})"
        yield ""
        yield from _sections(section, f"{key}.", seen, command)


def _struct_types(of: Any) -> list[type[Struct]]:
    """Return the Structs that the annotation of a field contains, in their order."""
    if isinstance(of, type) and issubclass(of, Struct):
        return [of]
    return [found for each in getattr(of, "__args__", ()) for found in _struct_types(each)]


def _tags(of: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each key that selects one of several Structs for a section, such as `kind`.

    msgspec does not list such a key among the fields of these Structs.
    """
    tags: dict[str, list[str]] = {}
    for section in _struct_types(of):
        if (tag_field := section.__struct_config__.tag_field) is not None:
            tags.setdefault(tag_field, []).append(f"`{section.__struct_config__.tag}`")
    for tag_field, values in tags.items():
        if len(values) > 1:
            yield tag_field, f"Selects the other keys of the section: {', '.join(values[:-1])} or {values[-1]}."


def _named(section: type[Struct]) -> str:
    """Return the name of a Struct for a heading, with the value of its tag if it has one."""
    config = section.__struct_config__
    return section.__name__ if config.tag_field is None else f"{section.__name__}, {config.tag_field} {config.tag}"


def _step(of: Any) -> str:
    """Return the text between the path of a section and its keys: `[]` for an array, `.NAME` for a table of sections, else nothing."""
    inner = getattr(of, "__args__", ())
    if getattr(of, "__origin__", None) is dict:
        return ".NAME"
    if getattr(of, "__origin__", None) in (tuple, list):
        return "[]"
    return next((step for each in inner if (step := _step(each))), "")


def _unit(field: structs.FieldInfo) -> str:
    """Return the unit of a field by the ending of its name. Return an empty text if the field is not a number or has no known ending."""
    if not any(each in NUMBERS for each in _leaves(field.type)):
        return ""
    return next((unit for end, unit in UNITS if f"_{field.encode_name}".endswith(end)), "")


def _leaves(of: Any) -> Iterator[Any]:
    """Yield the types in an annotation that have no type arguments, such as str and int in `dict[str, int]`."""
    inner = getattr(of, "__args__", ())
    if not inner:
        yield of
    for each in inner:
        yield from _leaves(each)


def _default(field: structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    elif field.default is not msgspec.NODEFAULT:
        value = field.default
    else:
        return "required"
    if isinstance(value, Struct) or (isinstance(value, tuple) and any(isinstance(each, Struct) for each in value)):
        return "see the section"
    shown = value.value if isinstance(value, Enum) else value
    if shown is None or shown in ("", (), {}):
        return "none"
    return f"`{msgspec.json.encode(shown).decode()}`"


def main() -> int:
    """Write the page docs/settings.md to the path that the first command-line argument names."""
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
