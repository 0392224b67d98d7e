"""Detection: finds out from which project a document comes, and converts it to DisaggDeployments."""

from collections.abc import Sequence
from typing import Any

from fleet.core.errors import ConfigurationRefused
from operators.imports import dynamo, production_stack
from operators.imports.assembly import Imported
from operators.imports.document_reader import Note


def imported(documents: Sequence[Any], name: str = "", namespace: str = "") -> Imported:
    """Convert the documents of a file to DisaggDeployments.

    Args:
        documents: The parsed YAML documents of one file.
        name: Name of the deployment, if the file results in only one. If it is empty, the name of the document or of
            its model is used.
        namespace: Namespace of all deployments. If it is empty, the namespaces in the documents are used.

    Raises:
        ConfigurationRefused: No document belongs to a known project, or a document is not an object. A field is missing or
            has an impossible value, or two fields contradict each other. Or `name` is given, and the file results in several
            deployments.
    """
    objects: list[dict[str, Any]] = []
    notes: list[Note] = []
    found = False
    for number, each in enumerate(documents, start=1):
        at = f"document {number}: " if len(documents) > 1 else ""
        if not isinstance(each, dict):
            raise ConfigurationRefused(f"document {number}: is no object")
        if each.get("kind") == dynamo.KIND:
            made = dynamo.imported(each, name, namespace)
        elif production_stack.SIGN in each:
            made = production_stack.imported(each, name, namespace)
        else:
            what = each.get("kind") if isinstance(each.get("kind"), str) else "object"
            notes.append(Note(f"document {number}", f"this {what} is no part of a deployment; apply it as it is"))
            continue
        found = True
        objects += made.objects
        notes += [Note(f"{at}{note.path}", note.message) for note in made.notes]
    if not found:
        raise ConfigurationRefused(
            f"is neither a values file of vLLM's production stack ({production_stack.SIGN}) nor a {dynamo.KIND} of NVIDIA Dynamo"
        )
    if name and len(objects) > 1:
        raise ConfigurationRefused(
            f"becomes {len(objects)} deployments, which cannot all be called {name}; leave it out"
        )
    return Imported(tuple(objects), tuple(notes))
