"""Label and field selectors."""

import re
from collections.abc import Callable

from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.kinds.jsonpath import look_up
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.values import Object, dig

Test = Callable[[Object], bool]
_REQUIREMENT = re.compile(
    r"""\s*(?:
        (?P<absent>!)?\s*(?P<key>[\w./-]+)\s*
        (?:(?P<sign>==|=|!=)\s*(?P<value>[\w.-]*)|\s(?P<word>in|notin)\s*\((?P<values>[^)]*)\))?
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def label_test(selector: str) -> Test:
    """Parse a label selector, and return a function that tests whether an object matches.

    Raises:
        ApiError: The selector is malformed (400).
    """
    tests: list[Test] = []
    at = 0
    while at < len(selector):
        found = _REQUIREMENT.match(selector, at)
        if found is None:
            raise ApiError("BadRequest", f'unable to parse requirement: found {selector[at:]!r} in "{selector}"')
        tests.append(_label(found))
        at = found.end()
    return lambda item: all(test(item) for test in tests)


def _label(found: re.Match[str]) -> Test:
    key = found["key"]

    def label(item: Object) -> str | None:
        return (item["metadata"].get("labels") or {}).get(key)

    if found["absent"]:
        return lambda item: label(item) is None
    if found["word"]:
        values = {each.strip() for each in found["values"].split(",")}
        return (
            (lambda item: label(item) in values) if found["word"] == "in" else (lambda item: label(item) not in values)
        )
    if found["sign"] == "!=":
        return lambda item: label(item) != found["value"]
    if found["sign"]:
        return lambda item: label(item) == found["value"]
    return lambda item: label(item) is not None


def field_test(selector: str, resource: ServedResource) -> Test:
    """Parse a field selector, and return a function that tests whether an object matches.

    Raises:
        ApiError: The selector names a field for which the kind has no selectors (400).
    """
    tests: list[Test] = []
    for each in filter(None, selector.split(",")):
        name, sign, value = re.split(r"(!=|==|=)", each, maxsplit=1) if "=" in each else (each, "", "")
        if not sign or name not in resource.selectable:
            raise ApiError(
                "BadRequest", f'field label not supported: "{name}"; try one of {", ".join(resource.selectable)}'
            )
        tests.append(_field(name, sign, value))
    return lambda item: all(test(item) for test in tests)


def _field(name: str, sign: str, value: str) -> Test:
    def matches(item: Object) -> bool:
        found = look_up(item, f".{name}")
        return (_text(found[0]) if found else "") == value

    return (lambda item: not matches(item)) if sign == "!=" else matches


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def selector_text(selector: Object | None) -> str:
    """Return a LabelSelector as text."""
    parts = [f"{key}={value}" for key, value in sorted((dig(selector, "matchLabels") or {}).items())]
    for each in dig(selector, "matchExpressions") or ():
        key, values = each["key"], ",".join(sorted(each.get("values") or ()))
        parts.append(
            {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key}.get(
                each["operator"], f"!{key}"
            )
        )
    return ",".join(parts)
