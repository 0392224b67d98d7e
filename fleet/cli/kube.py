"""`fleet kube`: prints Fleet's Kubernetes manifests, without a cluster and without Helm."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from fleet.cli.console.exits import DONE, FAILED
from fleet.core.errors import ConfigurationRefused, split_validation_error, with_allowed_values
from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.api.serving_request import ServingRequestSpec
from operators.chart.crds import KINDS, definition
from operators.controller.serving_request import proposed
from operators.imports.detection import imported
from operators.manifests.names import DesiredDeployment
from operators.manifests.pods import Images
from operators.manifests.shared import shared
from operators.manifests.workloads import revision, workers
from operators.proposals import Infeasible, propose

IMAGES = Images(
    router="fleet-router:0.1.0",
    worker_cpu="fleet-worker-cpu:0.1.0",
    worker_cuda="fleet-worker-cuda:0.1.0",
    worker_rocm="fleet-worker-rocm:0.1.0",
)

MOST_CHARACTERS = 1 << 20
MOST_VALUES = 1 << 18
"""Maximum number of values in a file, counting each use of a YAML alias. Without a limit, a few lines of YAML could
expand to billions of values."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
REQUEST_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""Pattern of valid names for a ServingRequest, as in `operators.api.serving_request.REQUEST_RULES`."""

_NAMED = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
_QUOTED = re.compile(r"""(['"])(?!<)..+\1""")
"""Finds the quoted words in an error message of the YAML library. They come from the file, which may contain secrets.
Words of the library itself (``'<stream end>'``) are not matched."""

FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")

Manifest = dict[str, Any]
Spec = TypeVar("Spec", DisaggDeploymentSpec, ServingRequestSpec)


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="kube_command", required=True, metavar="COMMAND", parser_class=type(parser))
    render = commands.add_parser(
        "render",
        help="print the objects that a DisaggDeployment becomes",
        description="Print the objects that a DisaggDeployment becomes, with all replicas at once.",
    )
    render.add_argument("-f", "--file", required=True, type=Path, metavar="FILE", help="YAML; - is standard input")
    render.add_argument("--namespace", default="default", help="if the file names none (default: default)")
    for name in Images.__struct_fields__:
        render.add_argument(
            f"--{name.replace('_', '-')}", default=getattr(IMAGES, name), metavar="IMAGE", help="(default: %(default)s)"
        )
    _takes_form(render)
    propose = commands.add_parser(
        "propose",
        help="print a DisaggDeployment that keeps the goals of a ServingRequest",
        description="Print the DisaggDeployment that keeps what a ServingRequest asks for, as the operator would make it. What is predicted, "
        "or why there is none, is on standard error.",
    )
    propose.add_argument("-f", "--file", required=True, type=Path, metavar="FILE", help="YAML; - is standard input")
    _takes_form(propose)
    crds = commands.add_parser(
        "crds",
        help="print the custom resource definitions",
        description="Print the custom resource definitions, as the Helm chart installs them: pipe them into `kubectl apply --server-side -f -`.",
    )
    _takes_form(crds)
    imports = commands.add_parser(
        "import",
        help="turn another project's deployment into a DisaggDeployment",
        description="Turn a values file of vLLM's production stack, or a DynamoGraphDeployment of NVIDIA Dynamo, into a "
        "DisaggDeployment. Warnings say what has no equal.",
    )
    imports.add_argument("file", type=Path, metavar="FILE", help="YAML; - is standard input")
    imports.add_argument(
        "--name", default="", help="name of the deployment (default: that of the file, or of its model)"
    )
    imports.add_argument("--namespace", default="", help="(default: as the file says)")
    imports.add_argument("--json", action="store_true", help="warnings as JSON, one a line")
    _takes_form(imports)


def _takes_form(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", choices=("yaml", "json"), default="yaml", help="format of the output (default: yaml)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Return the exit status: 0 if done, 1 if the goals of at least one ServingRequest can be kept by no deployment.

    Raises:
        ConfigurationRefused: The file or an option cannot be used.
    """
    match arguments.kube_command:
        case "crds":
            _write([definition(kind) for kind in KINDS], arguments.output)
        case "import":
            _import(arguments)
        case "propose":
            return _propose(arguments)
        case _:
            images = Images(**{name: getattr(arguments, name) for name in Images.__struct_fields__})
            _write(_rendered(_read(arguments.file), arguments.namespace, images), arguments.output)
    return DONE


def _import(arguments: argparse.Namespace) -> None:
    if arguments.name and not NAME.fullmatch(arguments.name):
        raise ConfigurationRefused(f"--name: {_no_name()}")
    documents = _read(arguments.file)
    try:
        made = imported(documents, arguments.name, arguments.namespace)
    except ConfigurationRefused as refused:
        raise ConfigurationRefused(f"{arguments.file}: {refused}") from refused
    for note in made.notes:
        line = msgspec.json.encode(note).decode() if arguments.json else f"fleet: warning: {note}"
        print(line, file=sys.stderr)
    _write(list(made.objects), arguments.output)


def _propose(arguments: argparse.Namespace) -> int:
    proposals, missing = [], False
    for number, content in enumerate(_read(arguments.file), start=1):
        try:
            metadata, asked = _document(content, "ServingRequest", "default", ServingRequestSpec)
            if not REQUEST_NAME.fullmatch(metadata["name"]):
                raise ConfigurationRefused(
                    "metadata.name: must be at most 47 characters of a-z 0-9 and -, the first of them a letter"
                )
        except ConfigurationRefused as refused:
            raise ConfigurationRefused(f"document {number}: {refused}") from refused
        found = propose(asked)
        print(f"fleet: {metadata['name']}: {found.reason}: {found.message}", file=sys.stderr)
        if isinstance(found, Infeasible):
            missing = True
            continue
        print(f"fleet: {metadata['name']}: rests on {found.basis}", file=sys.stderr)
        made = proposed(metadata["name"], found)
        if "namespace" in content["metadata"]:
            made["metadata"]["namespace"] = metadata["namespace"]
        proposals.append(made)
    if not proposals and not missing:
        raise ConfigurationRefused("the file is empty")
    _write(proposals, arguments.output)
    return FAILED if missing else DONE


def _rendered(objects: list[Any], namespace: str, images: Images) -> list[Manifest]:
    """Return the Kubernetes objects for all documents of a file, in the order of the documents.

    Raises:
        ConfigurationRefused: There is no document, or a document is not a valid DisaggDeployment.
    """
    if not objects:
        raise ConfigurationRefused("the file is empty")
    made: list[Manifest] = []
    for number, each in enumerate(objects, start=1):
        try:
            deployment = _deployment(each, namespace)
        except ConfigurationRefused as refused:
            raise ConfigurationRefused(f"document {number}: {refused}") from refused
        made += shared(deployment, images)
        present = revision(deployment, images)
        for role in deployment.workers:
            *others, child = workers(deployment, role, present, images)
            child["spec"]["replicas"] = 0 if deployment.spec.suspend else role.replicas
            made += [*others, child]
    return made


def _deployment(content: Any, namespace: str) -> DesiredDeployment:
    """Return the desired deployment of a document.

    Raises:
        ConfigurationRefused: The document is not a valid DisaggDeployment; the message names the field.
    """
    named, spec = _document(content, "DisaggDeployment", namespace, DisaggDeploymentSpec)
    for path, cause in contradictions(spec, named["name"]):
        raise ConfigurationRefused(f"{path}: {cause}")
    return DesiredDeployment(name=named["name"], namespace=named["namespace"], spec=spec)


def _document(content: Any, kind: str, namespace: str, of: type[Spec]) -> tuple[dict[str, str], Spec]:
    """Return the name, the namespace and the specification of an object of the kind `kind`, one of Fleet's kinds.

    If the object names no namespace, `namespace` is used.

    Raises:
        ConfigurationRefused: The document is not a valid object of this kind; the message names the field.
    """
    is_ours = isinstance(content, dict) and content.get("kind") == kind
    if not is_ours or content.get("apiVersion") != f"{GROUP}/{VERSION}":
        raise ConfigurationRefused(f"is not a {kind} of {GROUP}/{VERSION}")
    if unknown := [name for name in content if name not in FIELDS]:
        raise ConfigurationRefused(f"{unknown[0]}: is not a known key")
    metadata = content.get("metadata")
    if not isinstance(metadata, dict) or "name" not in metadata:
        raise ConfigurationRefused("metadata.name: is missing")
    named = {"name": metadata["name"], "namespace": metadata.get("namespace") or namespace}
    for field, name in named.items():
        # A name with dots is refused later, by an error that proposes a valid name.
        plain = name.replace(".", "-") if field == "name" and isinstance(name, str) else name
        if not isinstance(plain, str) or not NAME.fullmatch(plain):
            raise ConfigurationRefused(f"metadata.{field}: {_no_name()}")
    try:
        return named, msgspec.convert(content.get("spec"), of)
    except msgspec.ValidationError as error:
        raise ConfigurationRefused(_value_error(error, of)) from error


def _value_error(error: msgspec.ValidationError, kind: object) -> str:
    """Return the text of an error in a specification: the path of the field, and what is wrong."""
    cause, path = split_validation_error(error)
    advised = with_allowed_values(cause, kind, path)
    if named := _NAMED.fullmatch(cause):
        said = "is missing" if named[1] == "missing required" else "is not a known key"
        return f"spec{path}.{named[2]}: {said}{advised.removeprefix(cause)}"
    return f"spec{path}: {advised}"


def _no_name() -> str:
    return "must be at most 63 characters of a-z 0-9 and -, with a letter or digit at both ends"


def _read(path: Path) -> list[Any]:
    """Return the documents of a file.

    Raises:
        ConfigurationRefused: The file cannot be read, is too long, is not YAML, has more than `MOST_VALUES` values, or has a
            value of a type that JSON lacks.
    """
    try:
        text = sys.stdin.read(MOST_CHARACTERS + 1) if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationRefused(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigurationRefused(f"{path}: is longer than {MOST_CHARACTERS} characters")
    try:
        # msgspec's decoder is not used: its libyaml ends the process if a file is nested very deeply.
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: an invalid date
        raise ConfigurationRefused(f"{path}: {_error_text(error)}") from error
    except (AttributeError, KeyError) as error:  # raised by the YAML library if a value does not fit its tag
        raise ConfigurationRefused(f"{path}: a value is not of the type that its tag says") from error
    _check_values(documents, path)
    return documents


def _error_text(error: Exception) -> str:
    """Return why the YAML could not be read, without quoting the content, which may be secret."""
    said = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        said = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return _QUOTED.sub("'...'", " ".join(said.split()))


def _check_values(documents: list[Any], path: Path) -> None:
    """Check that all values have types that JSON has, and that there are at most `MOST_VALUES`."""
    count, left = 0, list(documents)
    while left:
        value = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise ConfigurationRefused(f"{path}: stands for more than {MOST_VALUES} values, aliases counted each time")
        if isinstance(value, dict):
            if odd := [name for name in value if not isinstance(name, str)]:
                raise ConfigurationRefused(f"{path}: a key must be a text, not {odd[0]!r:.50}; put it in quotes")
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif not isinstance(value, str | int | float | bool | None):
            raise ConfigurationRefused(
                f"{path}: a value must be a text, not a {type(value).__name__}; put it in quotes"
            )


def _write(objects: list[Manifest], form: str) -> None:
    """Write all objects with one write, so that nothing is printed if one of them cannot be encoded."""
    if form == "json":
        collected = {"apiVersion": "v1", "kind": "List", "items": objects}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(collected), indent=2).decode() + "\n")
        return
    sys.stdout.write("".join(f"---\n{msgspec.yaml.encode(each).decode()}" for each in objects))
