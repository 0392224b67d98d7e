"""The validation rules of custom resources: CEL, evaluated by Google's own implementation.

`self` is the value at the node, and `oldSelf` is its previous value. A rule that names `oldSelf` is checked only at an
update, and only for a value that has a previous value: a field with the same name, or an item of a list-map with the
same key. Values within atomic lists and sets never have a previous value.

The functions that Kubernetes adds to CEL (quantities, URLs, addresses, `sum` of lists) are missing here. A rule without
these functions gives the same results here and on a real server. This module has no cost limit, unlike a real server.
"""

import functools
import re
from collections.abc import Iterator

import msgspec
from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_math, ext_optional, ext_strings

from tests.support.kube.api.errors import ErrorCause
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Json, Object, key_of, within

RESERVED = frozenset(
    {
        *(
            "true",
            "false",
            "null",
            "in",
            "as",
            "break",
            "const",
            "continue",
            "else",
            "for",
            "function",
            "if",
            "import",
            "let",
        ),
        *("loop", "package", "namespace", "return", "var", "void", "while"),
    }
)
"""Field names that rules have to write between double underscores, as listed in Kubernetes' documentation of CEL."""


class BadRule(Exception):
    """Raised for a rule that does not compile."""


class Rule(msgspec.Struct, frozen=True):
    text: str
    message: str
    message_expression: str
    reason: str
    field_path: str
    of_changes: bool
    """True if the rule names `oldSelf`."""


@functools.cache
def _environment() -> cel.Env:
    extensions = [ext_strings.ExtStrings(), ext_math.ExtMath(), ext_bindings.ExtBindings(), ext_optional.ExtOptional()]
    return cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}, extensions=extensions)


@functools.lru_cache(maxsize=4096)
def compiled(text: str) -> cel.Expression:
    """Compile a rule.

    Raises:
        BadRule: The rule does not compile; the message is that of the compiler.
    """
    try:
        return _environment().compile(text)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BadRule(str(error)) from error


@functools.lru_cache(maxsize=4096)
def _names_old_value(text: str) -> bool:
    return bool(re.search(r"\boldSelf\b", text))


def rules_of(node: Object) -> list[Rule]:
    return [
        Rule(
            text=each["rule"],
            message=each.get("message", ""),
            message_expression=each.get("messageExpression", ""),
            reason=each.get("reason", "FieldValueInvalid"),
            field_path=each.get("fieldPath", ""),
            of_changes=_names_old_value(each["rule"]),
        )
        for each in node.get("x-kubernetes-validations", ())
    ]


def has_rules(node: Json) -> bool:
    """Return whether a schema has a rule at any depth."""
    if isinstance(node, dict):
        return "x-kubernetes-validations" in node or any(has_rules(each) for each in node.values())
    return isinstance(node, list) and any(has_rules(each) for each in node)


def broken_rules(value: Json, old: Json, shape: StructuralSchema, path: str = "") -> Iterator[ErrorCause]:
    """Yield an error cause for each broken rule of a node and of everything below it.

    `old` is the previous value; None if there is none.
    """
    if value is None:
        return
    rules = [rule for rule in rules_of(shape.node) if old is not None or not rule.of_changes]
    known = {"self": _escaped(value, shape), "oldSelf": _escaped(old, shape)} if rules else {}
    for rule in rules:
        if (said := _judge(rule, known)) is not None:
            yield ErrorCause(rule.reason, f"Invalid value: {said}", (path or "<nil>") + rule.field_path)
    if isinstance(value, dict):
        for name, each in value.items():
            if (child := shape.field(name)) is not None:
                before = old.get(name) if isinstance(old, dict) else None
                yield from broken_rules(each, before, child, within(path, name))
    elif isinstance(value, list):
        before_by_key = {}
        if shape.list_type == "map" and isinstance(old, list):
            before_by_key = {key_of(shape.keys_of(each), shape.keys): each for each in old if isinstance(each, dict)}
        for index, each in enumerate(value):
            before = before_by_key.get(key_of(shape.keys_of(each), shape.keys)) if isinstance(each, dict) else None
            yield from broken_rules(each, before, shape.item, f"{path}[{index}]")


def _judge(rule: Rule, known: Object) -> str | None:
    """Return why the rule is broken for these values of its variables; None if it holds."""
    outcome = compiled(rule.text).eval(data=known)
    if outcome.type() == cel.Type.ERROR:
        return f"{rule.text}: {outcome.value()}"
    if outcome.value() is True:
        return None
    if rule.message_expression:
        said = compiled(rule.message_expression).eval(data=known)
        if said.type() == cel.Type.STRING:
            return str(said.value())
    return rule.message or f"failed rule: {rule.text}"


def _escaped(value: Json, shape: StructuralSchema | None) -> Json:
    """Replace field names that CEL does not allow by their escaped form; keys of maps stay as they are."""
    if isinstance(value, dict):
        named = shape is not None and shape.named
        return {
            (_name(key) if named else key): _escaped(each, None if shape is None else shape.field(key))
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_escaped(each, None if shape is None else shape.item) for each in value]
    return value


@functools.lru_cache(maxsize=4096)
def _name(name: str) -> str:
    if name in RESERVED:
        return f"__{name}__"
    for sign, word in (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")):
        name = name.replace(sign, word)
    return name
