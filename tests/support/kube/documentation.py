"""Documented examples: the chart values and manifests in the documents and in `deploy/samples`.

A manifest that shows only a part of an object is completed.
"""

import re
from typing import Any

import yaml

from fleet.net.kubernetes.kinds import GROUP, VERSION
from tests.support.documents import all_blocks
from tests.support.kube.charts import CHART, Document

DEPLOY = CHART.parents[1]
SHELL = re.compile(r"<<END\n(.*?)^END", re.DOTALL | re.MULTILINE)
"""Helm values in a command of the documents: the here-document between `<<END` and `END`."""


def shown_values() -> list[Document]:
    commands = (each for block in all_blocks() if block.language == "sh" for each in SHELL.findall(block.text))
    return [each for each in _examples() if _is_values(each)] + [yaml.safe_load(each) for each in commands]


def shown_manifests() -> list[Document]:
    """Return the manifests of the documents, then those of the samples."""
    shown = [_whole(each) for each in _examples() if not _is_values(each)]
    for path in sorted((DEPLOY / "samples").rglob("*.yaml")):
        shown += yaml.safe_load_all(path.read_text())
    return shown


def is_ours(manifest: Document) -> bool:
    return bool(manifest["apiVersion"].startswith(f"{GROUP}/"))


def _examples() -> list[Any]:
    return [
        yaml.safe_load(block.text) for block in all_blocks() if block.language == "yaml" and "skip" not in block.clauses
    ]


def _is_values(block: Any) -> bool:
    return isinstance(block, dict) and block.keys() <= yaml.safe_load((CHART / "values.yaml").read_text()).keys()


def _whole(block: Any) -> Document:
    """Return a manifest that can be applied. If the block is only a specification or a list of roles, add what is missing."""
    match block:
        case {"apiVersion": _, "kind": _}:
            return block
        case {"containers": _}:
            return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "shown"}, "spec": block}
        case [{"type": "decode"}]:
            return _deployment(roles=[{"name": "prefill", "type": "prefill"}, *block])
        case {"kvTransfer": _} | {"model": _}:
            return _deployment(roles=[{"name": "workers", "type": "aggregated"}], **block)
    raise AssertionError(f"nobody knows what this block of the pages is a part of: {str(block)[:80]}")


def _deployment(**spec: Any) -> Document:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DisaggDeployment",
        "metadata": {"name": "shown"},
        "spec": {"model": {"name": "llama"}} | spec,
    }
