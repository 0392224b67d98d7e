"""Generator of the Helm chart: writes the files of the chart that are generated from types.

The command is `python -m operators.chart.generate deploy/helm/fleet`. A test compares the chart with the generated
content, which comes from these modules:

- `operators.chart.values`: the values and their schema
- `operators.chart.package`: `Chart.yaml` and the README
- `operators.chart.presets`: resource presets
- `operators.chart.crds`: custom resource definitions
- `operators.rbac`: the rights of operator and planner
- `operators.chart.dashboards`: dashboards
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from operators.chart.crds import KINDS, definition
from operators.chart.dashboards import DASHBOARDS
from operators.chart.docstrings import documented_fields, structs_of
from operators.chart.package import PUBLISHING, chart_yaml, readme
from operators.chart.presets import PRESETS
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
"""First lines of the field `metadata` of each CustomResourceDefinition in the chart; the name follows them."""


def generated() -> dict[str, str]:
    """Return the content of every generated file, by the file's path in the chart."""
    dashboards = {
        f"files/dashboards/{name}.json": f"{msgspec.json.format(msgspec.json.encode(made()), indent=1).decode()}\n"
        for name, made in DASHBOARDS.items()
    }
    definitions = {f"templates/crds/{kind.plural}.yaml": _definition(definition(kind)) for kind in KINDS}
    return {
        "values.yaml": values(),
        "values.schema.json": f"{msgspec.json.format(msgspec.json.encode(schema()), indent=1).decode()}\n",
        "Chart.yaml": f"{HEADER.replace('the types', 'operators/chart/package.py')}\n{PUBLISHING}{chart_yaml()}",
        "README.md": readme(HEADER.removeprefix("# ")),
        "files/presets.yaml": f"{HEADER}\n{_yaml(PRESETS)}",
        "files/operator-access.yaml": f"{HEADER}\n{_yaml(rules(ACCESS) | {'cluster': rules(CLUSTER_ACCESS)['deployments']})}",
        "files/planner-access.yaml": f"{HEADER}\n{_yaml(rules(PLANNER_ACCESS))}",
        **definitions,
        **dashboards,
    }


def values() -> str:
    """Return the text of `values.yaml`: every value with its default, and its meaning as a comment."""
    lines = [HEADER.replace("the types", "operators/chart/values.py")]
    for each in _lines(Values, Values()):
        if not each.startswith((" ", "#")) and not lines[-1].startswith("#"):
            lines.append("")
        lines.append(each)
    return "\n".join(lines) + "\n"


def schema() -> Schema:
    """Return the JSON schema in `values.schema.json`, in draft 7, which Helm 3 and Helm 4 can read."""
    kinds: list[type[Struct]] = [Values, OperatorSettings, KubePlannerSettings]
    (root, *_), parts = msgspec.json.schema_components(kinds, ref_template="#/definitions/{name}")
    structs = {name: kind for each in kinds for name, kind in structs_of(each).items()}
    for name, part in parts.items():
        for field, text in documented_fields(structs.get(name)).items():
            part["properties"][field] = {"description": text} | part["properties"][field]
    # In `Values`, the field `settings` of operator and planner may be any object, because the chart adds required settings to it.
    # The schema names the real type.
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
    """Yield the names of the definitions to which a JSON schema refers."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    for each in node if isinstance(node, list) else ():
        yield from _references(each)


def rules(access: Sequence[RoleRule]) -> dict[str, list[dict[str, list[str]]]]:
    """Return the rules of a process's two Roles: in the namespaces of deployments, and in its own namespace."""
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
    """Return a CustomResourceDefinition as a Helm template.

    The values of the chart decide whether the definition is installed, and whether it stays when the release is
    removed.

    Raises:
        ConfigurationRefused: A text of the definition contains two braces.
    """
    text = _yaml(made)
    if "{{" in text:
        raise ConfigurationRefused(
            f"{made['metadata']['name']}: has two braces in a text, which Helm reads as a template"
        )
    head, _, rest = text.partition("metadata:\n")
    return f"{HEADER}\n{{{{- if .Values.crds.install }}}}\n{head}{METADATA}{rest}{{{{- end }}}}\n"


def _yaml(value: Any) -> str:
    # The width is large enough that no text is broken into several lines, which could break a Helm template inside it.
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


def write(chart: Path) -> None:
    """Write the generated files into a chart's folder."""
    for name, content in generated().items():
        path = chart / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m operators.chart.generate",
        description="Write the parts of the Helm chart that come from types.",
    )
    parser.add_argument("chart", type=Path, help="the chart's folder: deploy/helm/fleet")
    write(parser.parse_args().chart)


if __name__ == "__main__":
    main()
