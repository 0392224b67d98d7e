"""The JSONPath of printer columns and selectable fields: names, indices, and `[?(@.type=="Ready")]`."""

import re

from tests.support.kube.api.values import Json

STEP = re.compile(
    r"""\.(?P<name>(?:\\.|[^.\[\\])+)
      | \[(?P<index>-?\d+)\]
      | \[(?P<all>\*)\]
      | \[['"](?P<quoted>[^'"]+)['"]\]
      | \[\?\(\s*@\.(?P<key>[\w./-]+)\s*==\s*['"]?(?P<wanted>[^'")]*)['"]?\s*\)\]""",
    re.VERBOSE,
)


class BadPath(ValueError):
    """Raised for a text that is not a JSONPath, or that uses a feature of JSONPath that this module does not support."""


def steps(path: str) -> list[re.Match[str]]:
    """Parse a JSONPath.

    Raises:
        BadPath: The text is not a JSONPath that this module supports.
    """
    path = path.strip().removeprefix("{").removesuffix("}").removeprefix("$")
    found, at = [], 0
    while at < len(path):
        step = STEP.match(path, at)
        if step is None:
            raise BadPath(f"cannot read the JSONPath {path!r} from character {at} on")
        found.append(step)
        at = step.end()
    return found


def look_up(value: Json, path: str) -> list[Json]:
    """Return every value that the path selects, without nulls."""
    found = [value]
    for step in steps(path):
        following: list[Json] = []
        for each in found:
            following += _follow(each, step)
        found = [each for each in following if each is not None]
    return found


def _follow(value: Json, step: re.Match[str]) -> list[Json]:
    if (name := step["name"] or step["quoted"]) is not None:
        return [value[plain]] if isinstance(value, dict) and (plain := name.replace("\\", "")) in value else []
    if not isinstance(value, list):
        return list(value.values()) if step["all"] and isinstance(value, dict) else []
    if step["all"]:
        return value
    if step["index"] is not None:
        index = int(step["index"])
        return [value[index]] if -len(value) <= index < len(value) else []
    return [each for each in value if isinstance(each, dict) and str(each.get(step["key"])) == step["wanted"]]
