"""Generator of the Helm chart: `python -m operators.chart.generate deploy/helm/fleet` writes what comes from types.

Values and their schema come from `operators.chart.values`, custom resource definitions from `operators.chart.crds`, the
rights of operator and planner from `operators.rbac`, and dashboards from `operators.chart.dashboards`. A test compares the chart
with the generated content.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from operators.chart.crds import KINDS, definition
from operators.chart.dashboards import DASHBOARDS
from operators.chart.values import OWNED, Values
from operators.planner.settings import KubePlannerSettings
from operators.rbac import ACCESS, CLUSTER_ACCESS, PLANNER_ACCESS, RoleRule
from operators.settings import OperatorSettings

Schema = dict[str, Any]

HEADER = "# Made by `python -m operators.chart.generate`: change the types, not this file."
WIDTH = 118
METADATA = """\
metadata:
{{- if .Values.crds.keep }}
  annotations: {helm.sh/resource-policy: keep}
{{- end }}
  labels: {{- include "fleet.labels" (list . "crds") | nindent 4 }}
"""
"""Metadata of a definition, before its name."""


def generated() -> dict[str, str]:
    """Return the content of every generated file, by its path in the chart."""
    dashboards = {
        f"files/dashboards/{name}.json": f"{msgspec.json.format(msgspec.json.encode(made()), indent=1).decode()}\n"
        for name, made in DASHBOARDS.items()
    }
    definitions = {f"templates/crds/{kind.plural}.yaml": _definition(definition(kind)) for kind in KINDS}
    return {
        "values.yaml": values(),
        "values.schema.json": f"{msgspec.json.format(msgspec.json.encode(schema()), indent=1).decode()}\n",
        "files/operator-access.yaml": f"{HEADER}\n{_yaml(rules(ACCESS) | {'cluster': rules(CLUSTER_ACCESS)['deployments']})}",
        "files/planner-access.yaml": f"{HEADER}\n{_yaml(rules(PLANNER_ACCESS))}",
        **definitions,
        **dashboards,
    }


def values() -> str:
    """Return `values.yaml`: every value with its meaning and its default."""
    lines = [HEADER.replace("the types", "operators/chart/values.py")]
    for each in _lines(Values, Values()):
        if not each.startswith((" ", "#")) and not lines[-1].startswith("#"):
            lines.append("")
        lines.append(each)
    return "\n".join(lines) + "\n"


def schema() -> Schema:
    """Return `values.schema.json`, in the draft that both versions of Helm know."""
    kinds: list[type[Struct]] = [Values, OperatorSettings, KubePlannerSettings]
    (root, *_), parts = msgspec.json.schema_components(kinds, ref_template="#/definitions/{name}")
    structs = {name: kind for each in kinds for name, kind in _structs(each).items()}
    for name, part in parts.items():
        for field, text in documented_fields(structs.get(name)).items():
            part["properties"][field] = {"description": text} | part["properties"][field]
    # Not the field's type, because only the chart knows the values of settings without a default.
    for values_name, kind in (("OperatorValues", OperatorSettings), ("PlannerValues", KubePlannerSettings)):
        parts[values_name]["properties"]["settings"] |= {"$ref": f"#/definitions/{kind.__name__}"}
    for owner, names in OWNED.items():
        for name in names:
            del parts[owner]["properties"][name]
        parts[owner]["required"] = [each for each in parts[owner].get("required", ()) if each not in names]
    referenced = set(_references([root, *parts.values()]))
    kept = {name: part for name, part in parts.items() if name in referenced}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **root, "definitions": kept}


def _references(node: Any) -> Iterator[str]:
    """Yield the names of definitions that a schema refers to."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        yield from _references(each)


def rules(access: Sequence[RoleRule]) -> dict[str, list[dict[str, list[str]]]]:
    """Return the rules of a process's Roles: in the namespaces of deployments, and in its own."""
    parts: dict[str, list[dict[str, list[str]]]] = {"deployments": [], "own": []}
    for name, own in (("deployments", False), ("own", True)):
        alike: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for each in access:
            if each.own_namespace is own:
                alike.setdefault((each.group, each.verbs, each.names), []).append(each.resource)
        parts[name] = [
            {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}
            | ({"resourceNames": list(names)} if names else {})
            for (group, verbs, names), resources in alike.items()
        ]
    return parts


def _definition(made: Schema) -> str:
    """Return a definition as a template, which is installed and kept as the values say."""
    text = _yaml(made)
    if "{{" in text:
        raise ConfigurationRefused(
            f"{made['metadata']['name']}: has two braces in a text, which Helm reads as a template"
        )
    head, _, rest = text.partition("metadata:\n")
    return f"{HEADER}\n{{{{- if .Values.crds.install }}}}\n{head}{METADATA}{rest}{{{{- end }}}}\n"


def _yaml(value: Any) -> str:
    # Each text gets one line, because folded lines would look like the white space of templates.
    return str(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, width=10_000, allow_unicode=True))


def _lines(kind: type[Struct], value: Struct) -> Iterator[str]:
    described = documented_fields(kind)
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if text := described.get(name):
            yield from textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
        inner = getattr(value, field.name)
        if isinstance(inner, Struct) and type(inner).__module__ == Values.__module__:
            yield f"{name}:"
            yield from (f"  {line}" for line in _lines(type(inner), inner))
        else:
            plain = {} if isinstance(inner, Struct) else msgspec.to_builtins(inner)
            flow = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10_000)
            yield f"{name}: {flow.removesuffix('...' + chr(10)).strip()}"


def _structs(of: type[Struct]) -> dict[str, type[Struct]]:
    """Return every Struct that is a part of one, by name."""
    found: dict[str, type[Struct]] = {}

    def look(info: Any) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls.__name__ in found:
                return
            found[info.cls.__name__] = info.cls
            for field in info.fields:
                look(field.type)
            return
        for name in ("item_type", "key_type", "value_type"):
            if (inner := getattr(info, name, None)) is not None:
                look(inner)
        for inner in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
            look(inner)
        if isinstance(info, msgspec.inspect.Metadata):
            look(info.type)

    look(msgspec.inspect.type_info(of))
    return found


@cache
def documented_fields(kind: type[Struct] | None) -> Mapping[str, str]:
    """Return the docstrings of the fields of a type and its bases, by the fields' names on the wire."""
    if kind is None:
        return {}
    wire = {each.name: each.encode_name for each in msgspec.structs.fields(kind)}
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Struct) and each is not Struct:
            texts |= {wire[name]: text for name, text in _own_docstrings(each) if name in wire}
    return texts


def _own_docstrings(kind: type[Struct]) -> Iterator[tuple[str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    if not isinstance(node, ast.ClassDef):
        return
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                yield name, " ".join(words.split())
            case _:
                pass


def write(chart: Path) -> None:
    """Write the generated files into a chart's folder."""
    for name, content in generated().items():
        path = chart / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m operators.chart.generate",
        description="Write the parts of the Helm chart that come from types.",
    )
    parser.add_argument("chart", type=Path, help="the chart's folder: deploy/helm/fleet")
    write(parser.parse_args().chart)


if __name__ == "__main__":
    main()
