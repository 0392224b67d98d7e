"""Schema values: makes a small value that a JSON schema allows.

The module supports the parts of schemas that tools and structured outputs commonly use: types, enumerations, constants,
objects, arrays, numeric and length limits, common formats, alternatives and references within the schema. It ignores
patterns. A schema of a few bytes may demand a value of any size, so the size of a value is limited. From the level
`FULL_DEPTH` on, arrays are as short as the schema allows, and null is chosen where it is allowed. Values of recursive
schemas, such as trees, are therefore finite.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
FULL_DEPTH = 8  # level of nesting from which on arrays are as short as allowed, and null is preferred if it is allowed
MAX_CHARACTERS = 65536  # approximate limit of the size of a value as JSON, far more than an answer of a simulated model
_NULL = {"type": "null"}
FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
}


def value_of(schema: Any) -> Any:
    """Return a value that a schema allows.

    Raises:
        ValueError: The schema is malformed, allows nothing, is nested too deeply, or demands too large a value.
    """
    try:
        return _value(schema, _Document(schema), 0)
    except (TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise ValueError(f"the schema is malformed: {error}") from error


class _Document:
    """Holds a schema, so that references in it can be resolved, and limits the size of the value."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._left = MAX_CHARACTERS

    def grow(self, characters: int) -> None:
        """Count characters that are about to be added to the value; raise ValueError if it then exceeds `MAX_CHARACTERS`."""
        self._left -= characters
        if self._left < 0:
            raise ValueError(f"the schema demands a value of more than {MAX_CHARACTERS} characters")


def _value(schema: Any, root: _Document, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    root.grow(1)
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the schema allows nothing")
    if "$ref" in schema:
        return _value(_referenced(schema["$ref"], root), root, depth + 1)
    for keyword in ("const", "default"):
        if keyword in schema:
            return _given(schema[keyword], root)
    if "enum" in schema:
        if not schema["enum"]:
            raise ValueError("the schema allows nothing: an enum is empty")
        return _given(schema["enum"][0], root)
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            rest = {name: value for name, value in schema.items() if name != keyword}
            chosen = schema[keyword][0]
            if depth >= FULL_DEPTH and _NULL in schema[keyword]:
                chosen = _NULL
            return _value({**rest, **_resolved(chosen, root)}, root, depth + 1)
    if schema.get("allOf"):
        merged = {name: value for name, value in schema.items() if name != "allOf"}
        for part in schema["allOf"]:
            merged = _merged(merged, _resolved(part, root))
        return _value(merged, root, depth + 1)
    return _typed(schema, root, depth)


def _given(value: Any, root: _Document) -> Any:
    """Return a value that the schema contains literally, such as a constant or a default."""
    root.grow(len(json.dumps(value)))
    return value


def _typed(schema: Mapping[str, Any], root: _Document, depth: int) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            names = schema.get("required") or list(properties)
            root.grow(sum(map(len, names)))
            return {name: _value(properties.get(name, True), root, depth + 1) for name in names}
        case "array":
            prefix = [_value(item, root, depth + 1) for item in schema.get("prefixItems") or ()]
            fewest = schema.get("minItems", 1 if depth < FULL_DEPTH else 0)
            count = min(max(fewest, len(prefix)), schema.get("maxItems", math.inf))
            more = int(count) - len(prefix)
            root.grow(max(0, more))
            return prefix + [_value(schema.get("items", {"type": "string"}), root, depth + 1) for _ in range(more)]
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return True
        case "null":
            return None
        case "string":
            text = FORMATS.get(schema.get("format", ""), "text")
            root.grow(max(len(text), schema.get("minLength", 0)))
            return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]
        case _:
            raise ValueError(f"{str(kind)[:50]!r} is no type of JSON")


def _number(schema: Mapping[str, Any], kind: str) -> float:
    step = schema.get("multipleOf", 1)
    low = schema.get("minimum", -math.inf)
    if "exclusiveMinimum" in schema:
        low = max(low, math.floor(schema["exclusiveMinimum"] / step) * step + step)
    high = schema.get("maximum", math.inf)
    if "exclusiveMaximum" in schema:
        high = min(high, math.ceil(schema["exclusiveMaximum"] / step) * step - step)
    number = min(max(step, math.ceil(low / step) * step if low > -math.inf else step), high)
    return int(number) if kind == "integer" or float(number).is_integer() else number


def _referenced(reference: str, root: _Document) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"{reference[:100]!r} is outside the schema")
    found = root.root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if name not in found:
            raise ValueError(f"{reference[:100]!r} is not in the schema")
        found = found[name]
    return found


def _resolved(schema: Any, root: _Document) -> dict[str, Any]:
    for _ in range(MAX_DEPTH):
        if "$ref" not in schema:
            return dict(schema)
        schema = _referenced(schema["$ref"], root)
    raise ValueError("the schema refers to itself")


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**one, **other}
    if "properties" in one and "properties" in other:
        merged["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        merged["required"] = [*one["required"], *other["required"]]
    return merged
