"""Package of the Helm chart: generates `Chart.yaml` with the annotations of Artifact Hub, and the README."""

import base64
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.chart.crds import KINDS, description_of
from operators.chart.docstrings import documented_fields
from operators.chart.presets import PRESETS
from operators.chart.values import ChartImages, Image, Values

CHART_VERSION = "0.1.0"
"""Version of the chart and of the images. A test checks that it equals the version of the Python package."""

REPOSITORY = Path(__file__).parents[2]
ICON = REPOSITORY / "deploy" / "helm" / "fleet" / "icon.svg"
EXAMPLES = ("samples/cpu.yaml", "samples/plans/h100-llama-70b.yaml", "samples/requests/llama-70b.yaml")
"""Paths, relative to deploy/, of the sample objects that Artifact Hub shows."""

PUBLISHING = """\
# Whoever publishes this chart sets Homepage in pyproject.toml to a page of their own (`home` and `maintainers` follow), and adds what only
# they know: `sources`, and the annotations artifacthub.io/links, artifacthub.io/signKey, and artifacthub.io/images with their registry.
"""

INTRODUCTION = """\
Disaggregated serving of large language models: a KV-aware router, an operator for pools of prefill and decode workers, and a planner.

```sh
helm install fleet deploy/helm/fleet --namespace serving --create-namespace --set images.registry=registry.example.org/llm
```

- `docs/kubernetes/install.md` of the project installs Fleet, serves a first model, and removes everything again.
- `docs/kubernetes/operate.md` has the daily tasks, and `docs/kubernetes/reference.md` every object and status.
- `examples/` has values for clusters with H100, B200 and MI300X GPUs.
- `helm test fleet --namespace serving` sends a request through the routers.
"""


def chart_yaml() -> str:
    """Return the text of `Chart.yaml`; its field `home` is the homepage in `pyproject.toml`."""
    home = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    chart = {
        "apiVersion": "v2",
        "name": "fleet",
        "description": "Disaggregated LLM serving: routers, the operator, and the kinds that people write",
        "type": "application",
        "version": CHART_VERSION,
        "appVersion": CHART_VERSION,
        # Tests cover Kubernetes 1.30 to 1.37. Version 1.25 is allowed too, because `helm template` of older Helm versions assumes it.
        "kubeVersion": ">=1.25.0-0",
        "home": home,
        "icon": f"data:image/svg+xml;base64,{base64.b64encode(ICON.read_bytes()).decode()}",
        "keywords": ["llm", "inference", "vllm", "gateway", "kv-cache"],
        "maintainers": [{"name": "Fleet maintainers", "url": home}],
        "annotations": _annotations(),
    }
    return str(yaml.safe_dump(chart, sort_keys=False, width=10_000, allow_unicode=True))


def _annotations() -> dict[str, str]:
    """Return the annotations for Artifact Hub (https://artifacthub.io/docs/topics/annotations/helm/)."""
    kinds = [
        {
            "kind": kind.name,
            "version": VERSION,
            "name": f"{kind.plural}.{GROUP}",
            "displayName": kind.name,
            "description": description_of(kind),
        }
        for kind in KINDS
    ]
    samples = [each for name in EXAMPLES for each in yaml.safe_load_all((REPOSITORY / "deploy" / name).read_text())]
    images = [
        {"name": name.replace("_", "-"), "image": f"{image.repository}:{CHART_VERSION}"}
        for name, image in msgspec.structs.asdict(ChartImages()).items()
        if isinstance(image, Image)
    ]
    return {
        "artifacthub.io/category": "ai-machine-learning",
        "artifacthub.io/license": "Apache-2.0",
        "artifacthub.io/operator": "true",
        "artifacthub.io/operatorCapabilities": "Seamless Upgrades",
        "artifacthub.io/crds": _text(kinds),
        "artifacthub.io/crdsExamples": _text(samples),
        "artifacthub.io/images": _text(images),
    }


def _text(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=10_000, allow_unicode=True))


def readme(header: str) -> str:
    """Return the text of the chart's `README.md`.

    Args:
        header: The line that tells by which command the page is generated.
    """
    lines = [f"<!-- {header} -->", "", "# Fleet", "", INTRODUCTION.rstrip(), "", "## Values", ""]
    lines += ["| value | default | meaning |", "|---|---|---|", *_rows(Values, Values(), "")]
    lines += ["", "## Resource presets", ""]
    lines += ["| component | preset | CPU requested | memory requested | memory limit |", "|---|---|---|---|---|"]
    lines += [
        f"| {component} | {preset} | {each['requests']['cpu']} | {each['requests']['memory']} | {each['limits']['memory']} |"
        for component, presets in PRESETS.items()
        for preset, each in presets.items()
    ]
    return "\n".join(lines) + "\n"


def _rows(kind: type[Struct], value: Struct, path: str) -> Iterator[str]:
    texts = documented_fields(kind)
    for field in msgspec.structs.fields(kind):
        key, inner = f"{path}{field.encode_name}", getattr(value, field.name)
        text = texts.get(field.encode_name, "")
        if isinstance(inner, Struct) and type(inner).__module__ == Values.__module__:
            if text:
                yield f"| `{key}` | | {_cell(text)} |"
            yield from _rows(type(inner), inner, f"{key}.")
            continue
        plain = {} if isinstance(inner, Struct) else msgspec.to_builtins(inner)
        default = msgspec.json.encode(plain).decode()
        yield f"| `{key}` | `{textwrap.shorten(default, 200)}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
