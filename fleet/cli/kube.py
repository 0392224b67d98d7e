"""`fleet kube`: what Fleet is on Kubernetes, as manifests, without a cluster and without Helm."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from fleet.cli.exits import DONE
from fleet.errors import ConfigurationRefused
from operators.children import Deployment, Images, revision, shared, workers
from operators.crds import KINDS, definition
from operators.resources import GROUP, VERSION, DisaggDeploymentSpec

IMAGES = Images(
    router="fleet-router:0.1.0",
    worker_cpu="fleet-worker-cpu:0.1.0",
    worker_cuda="fleet-worker-cuda:0.1.0",
    worker_rocm="fleet-worker-rocm:0.1.0",
)

MOST_CHARACTERS = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="kube_command", required=True, metavar="COMMAND", parser_class=type(parser))
    render = commands.add_parser(
        "render",
        help="print the objects that a DisaggDeployment becomes",
        description="Print the objects that a DisaggDeployment becomes, with all replicas at once.",
    )
    render.add_argument("-f", "--file", required=True, type=Path, metavar="FILE", help="YAML; - is standard input")
    render.add_argument("--namespace", default="default", help="where the file names none (default: default)")
    for name in Images.__struct_fields__:
        render.add_argument(
            f"--{name.replace('_', '-')}", default=getattr(IMAGES, name), metavar="IMAGE", help="(default: %(default)s)"
        )
    commands.add_parser("crds", help="print the custom resource definitions")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0; 3 when the file is not a DisaggDeployment."""
    if arguments.kube_command == "crds":
        _write(definition(kind) for kind in KINDS)
        return DONE
    images = Images(**{name: getattr(arguments, name) for name in Images.__struct_fields__})
    _write(_rendered(_read(arguments.file), arguments.namespace, images))
    return DONE


def _rendered(objects: list[Any], namespace: str, images: Images) -> Iterator[dict[str, Any]]:
    """All made before the first is yielded, so that nothing is printed of a file with a mistake in it."""
    if not objects:
        raise ConfigurationRefused("the file is empty")
    made: list[dict[str, Any]] = []
    for at, each in enumerate(objects):
        where = f"document {at + 1}"
        if not isinstance(each, dict) or (each.get("apiVersion"), each.get("kind")) != (
            f"{GROUP}/{VERSION}",
            "DisaggDeployment",
        ):
            raise ConfigurationRefused(f"{where}: is no {GROUP}/{VERSION} DisaggDeployment")
        try:
            spec = msgspec.convert(each.get("spec"), DisaggDeploymentSpec)
        except msgspec.ValidationError as error:
            raise ConfigurationRefused(f"{where}: spec: {error}") from error
        metadata = each.get("metadata") or {}
        if not isinstance(name := metadata.get("name"), str):
            raise ConfigurationRefused(f"{where}: metadata.name: is missing")
        deployment = Deployment(name=name, namespace=metadata.get("namespace", namespace), spec=spec)
        made += shared(deployment, images)
        present = revision(deployment, images)
        for role in deployment.workers:
            *others, child = workers(deployment, role, present, images)
            child["spec"]["replicas"] = 0 if spec.suspend else role.replicas
            made += [*others, child]
    yield from made


def _read(path: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationRefused(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigurationRefused(f"{path}: is longer than {MOST_CHARACTERS} characters")
    try:
        # Not msgspec's: libyaml, which that uses, ends the process where a file is nested very deeply.
        return [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationRefused(f"{path}: {' '.join(str(error).split())}") from error


def _write(objects: Iterator[dict[str, Any]]) -> None:
    for each in objects:
        sys.stdout.write(f"---\n{msgspec.yaml.encode(each).decode()}")
