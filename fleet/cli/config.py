"""`fleet config`: lists the keys of all settings files with meaning, unit and default, and checks a settings file."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from fleet.app.settings_reference import KINDS, SettingsKey, command_of, described_schema, settings_keys
from fleet.cli.console.exits import CONFIGURATION_REFUSED, DONE
from fleet.config import load, read_file
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.local.settings import Topology
from fleet.local.topology import check_metrics_ranges, check_overflow
from fleet.planner.settings import PlannerSettings
from fleet.router.settings.router import RouterSettings

WIDTH = 110  # maximum number of characters in a line of a key's meaning


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "part",
        nargs="?",
        metavar="PART",
        choices=tuple(KINDS),
        help=f"list the file of one part only: {', '.join(KINDS)}; `up` is the topology of fleet up",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="check a settings file instead; without PART, as the file of the part that has most of its keys",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: a JSON schema by part")


def run(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        return _check(arguments.check, arguments.part, arguments.json)
    parts = KINDS if arguments.part is None else {arguments.part: KINDS[arguments.part]}
    if arguments.json:
        print(msgspec.json.encode({part: described_schema(kind) for part, kind in parts.items()}).decode())
        return DONE
    for part, kind in parts.items():
        print(f"# {command_of(part)} --config\n")
        for key in settings_keys(kind):
            print("\n".join(_lines(key)))
        print()
    return DONE


def _check(file: Path, part: str | None, as_json: bool) -> int:
    """Check a settings file, print the result, and return the exit status.

    If the file cannot be used, print the error as JSON if `as_json` is true. If `as_json` is false, raise ConfigurationRefused.
    """
    try:
        content = read_file(file)  # only once, because the file may be a pipe
        part = part or _most_likely_part(content)
        _check_content(file, content, KINDS[part])
    except ConfigurationRefused as refused:
        if not as_json:
            raise
        found = {"file": str(file), "part": part, "valid": False, "error": str(refused)}
        print(msgspec.json.encode(found).decode())
        return CONFIGURATION_REFUSED
    if as_json:
        print(msgspec.json.encode({"file": str(file), "part": part, "valid": True}).decode())
    else:
        print(f"{file}: a valid settings file of {command_of(part)}")
    return DONE


def _check_content(file: Path, content: Mapping[str, Any], kind: type[Struct]) -> None:
    """Check a settings file, and the other files and names in it by which a process would fail when it starts.

    Raises:
        ConfigurationRefused: The file cannot be used; the message begins with the file.
    """
    from fleet.app.planner import priced_settings, scaling_rule  # noqa: PLC0415 - the list of keys needs none of these
    from fleet.app.router import check_overflow_models  # noqa: PLC0415

    settings = load(file, kind, content=content)
    try:
        match settings:
            case Topology():
                _check_topology(file, content, settings)
            case PlannerSettings():
                scaling_rule(priced_settings(settings))
            case RouterSettings():
                check_overflow_models(settings)
            case _:
                pass
    except ConfigurationRefused as refused:
        raise ConfigurationRefused(f"{file}: {refused}") from refused
    if isinstance(settings, Topology):
        _check_planner(file, content)


def _check_topology(file: Path, content: Mapping[str, Any], topology: Topology) -> None:
    from fleet.app.hub import topology_model_name  # noqa: PLC0415 - the list of keys needs none of it

    check_metrics_ranges(topology)
    # without both keys, only an option of `fleet up` may name the model
    if topology.cluster.served_name or "model" in content.get("cluster", {}):
        check_overflow(topology, topology_model_name(topology, file.parent))


def _check_planner(file: Path, content: Mapping[str, Any]) -> None:
    from fleet.app.planner import scaling_rule  # noqa: PLC0415 - the list of keys needs none of these
    from fleet.cli.planner.topology_planner import topology_planner  # noqa: PLC0415

    if (settings := topology_planner(file, content, ModelName("model"))) is None:
        return
    try:
        scaling_rule(settings)
    except ConfigurationRefused as refused:
        raise ConfigurationRefused(f"{file}: planner.{refused}") from refused


def _most_likely_part(content: Mapping[str, Any]) -> str:
    """Return the part (`KINDS`) whose settings file may contain the largest number of the top-level keys in `content`.

    Content without keys counts as that of a topology.
    """
    given = content.keys()
    known = {part: {field.encode_name for field in structs.fields(kind)} for part, kind in KINDS.items()}
    return max(("up", *KINDS), key=lambda part: len(given & known[part]))


def _lines(key: SettingsKey) -> Iterator[str]:
    unit = f"  [{key.unit}]" if key.unit else ""
    yield f"{key.path}  default: {key.default}{unit}" if key.default != "required" else f"{key.path}  required{unit}"
    yield from textwrap.wrap(key.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
