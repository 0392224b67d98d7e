"""Schema values: a small value that a JSON schema allows.

It covers what tools and structured outputs commonly use: types, enumerations, constants, objects, arrays, numeric and
length limits, common formats, alternatives and references within the schema. Patterns are not kept.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
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
        ValueError: The schema is malformed, allows nothing, or is nested too deeply.
    """
    try:
        return _value(schema, schema, 0)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"the schema is malformed: {error}") from error


def _value(schema: Any, root: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the schema allows nothing")
    if "$ref" in schema:
        return _value(_referenced(schema["$ref"], root), root, depth + 1)
    for keyword in ("const", "default"):
        if keyword in schema:
            return schema[keyword]
    if "enum" in schema:
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            rest = {name: value for name, value in schema.items() if name != keyword}
            return _value({**rest, **_resolved(schema[keyword][0], root)}, root, depth + 1)
    if schema.get("allOf"):
        merged = {name: value for name, value in schema.items() if name != "allOf"}
        for part in schema["allOf"]:
            merged = _merged(merged, _resolved(part, root))
        return _value(merged, root, depth + 1)
    return _typed(schema, root, depth)


def _typed(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            names = schema.get("required") or list(properties)
            return {name: _value(properties.get(name, True), root, depth + 1) for name in names}
        case "array":
            prefix = [_value(item, root, depth + 1) for item in schema.get("prefixItems") or ()]
            count = min(max(schema.get("minItems", 1), len(prefix)), schema.get("maxItems", math.inf))
            more = int(count) - len(prefix)
            return prefix + [_value(schema.get("items", {"type": "string"}), root, depth + 1) for _ in range(more)]
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return True
        case "null":
            return None
        case "string":
            text = FORMATS.get(schema.get("format", ""), "text")
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


def _referenced(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"{reference[:100]!r} is outside the schema")
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
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
