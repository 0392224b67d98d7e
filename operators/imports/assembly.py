"""Assembly of imported documents: builds the parts of a DisaggDeployment that all kinds of imports have in common."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath
from fleet.net.kubernetes.kinds import GROUP, VERSION
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    Drain,
    EngineKind,
    Gpus,
    KvTransfer,
    Parallelism,
    RoleSpec,
    RoleType,
)
from operators.api.fields import GpuVendor
from operators.imports.document_reader import Note
from operators.manifests.pods import GRACE_SECONDS

LONGEST_NAME = 30


class Imported(Struct, frozen=True):
    """Holds the Kubernetes objects that an import has made, and notes about fields that it has changed or left out."""

    objects: tuple[dict[str, Any], ...]
    notes: tuple[Note, ...]


class Names:
    """Makes valid Kubernetes names, and never returns the same name twice."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._given: set[str] = set()

    def give(self, text: str) -> str:
        """Return a valid name that resembles `text` and that this object has not returned before."""
        parted = re.sub(r"([a-z])([A-Z])", r"\1-\2", text)  # splits VllmDecodeWorker into Vllm-Decode-Worker
        base = re.sub(r"[^a-z0-9]+", "-", parted.lower()).strip("-")
        base = re.sub(r"^[^a-z]+", "", base)[:LONGEST_NAME].rstrip("-") or self._otherwise
        name, number = base, 1
        while name in self._given:
            number += 1
            name = f"{base[: LONGEST_NAME - 1 - len(str(number))]}-{number}"
        self._given.add(name)
        return name


def spread(
    parallelism: Parallelism, gpus: int, nodes: int, vendor: GpuVendor, path: str, notes: list[Note]
) -> tuple[Gpus, int]:
    """Return the GPUs of a replica, and its number of nodes, adapted to the engine's parallelism.

    Args:
        parallelism: Parallelism of the engine.
        gpus: Number of GPUs that the document requests for a replica, on all its nodes together; 0 if it requests none.
        nodes: Number of nodes of a replica in the document.
        vendor: Vendor of the GPUs.
        path: Path of the pool in the imported document, for notes.
        notes: Receives a note for each number that was changed.
    """
    ranks = parallelism.tensor * parallelism.pipeline * parallelism.data
    if not gpus and ranks == 1 and nodes == 1:
        return Gpus(vendor=vendor), 1
    if gpus != ranks:
        notes.append(
            Note(path, f"asks for {gpus} GPUs a replica and its engine has {ranks} ranks; gpus.perReplica is {ranks}")
        )
    if not parallelism.fits(nodes):
        notes.append(Note(path, f"{ranks} ranks cannot be shared out evenly among {nodes} nodes; nodesPerReplica is 1"))
        nodes = 1
    return Gpus(vendor=vendor, per_replica=ranks), nodes


def paired(roles: Sequence[RoleSpec], path: str, notes: list[Note]) -> tuple[RoleSpec, ...]:
    """Return the roles so that a prefill role never exists without a decode role, nor a decode role without a prefill role.

    If there are prefill roles and no decode role, the prefill roles become aggregated roles. If there are decode roles and
    no prefill role, the decode roles become aggregated roles.
    """
    types = {role.type for role in roles}
    if (RoleType.PREFILL in types) == (RoleType.DECODE in types):
        return tuple(roles)
    alone = RoleType.PREFILL if RoleType.PREFILL in types else RoleType.DECODE
    notes.append(Note(path, f"has workers of type {alone.value} and none of the other; they do both (aggregated)"))
    return tuple(
        msgspec.structs.replace(role, type=RoleType.AGGREGATED) if role.type is alone else role for role in roles
    )


def transferred(
    transfer: KvTransfer, engine: EngineKind, roles: Sequence[RoleSpec], path: str, notes: list[Note]
) -> KvTransfer:
    """Return the requested KV transfer settings. If these name a store that the engines cannot use, return the default settings.

    Args:
        transfer: The KV transfer that the document requests.
        engine: Engine of all roles.
        roles: Roles of workers.
        path: Path of the object with the roles in the imported document, for notes.
        notes: Receives a note if the default settings are returned instead.
    """
    # The store can hold the blocks of an engine only if its ranks split each block by attention heads alone
    # (`workers.engines.vllm.launch.UNSHARED`).
    unshared = any(role.nodes_per_replica > 1 or not role.parallelism.by_heads for role in roles)
    if KvPath.STORE not in transfer.paths or engine is not EngineKind.VLLM or not unshared:
        return transfer
    notes.append(
        Note(
            path,
            "blocks of an engine over several nodes, stages or data parallel ranks cannot be kept for later; no store is made",
        )
    )
    return KvTransfer()


def document(name: str, spec: DisaggDeploymentSpec, namespace: str = "") -> dict[str, Any]:
    """Return the manifest of a DisaggDeployment, without fields that have their defaults.

    Raises:
        ConfigurationRefused: A value is not allowed in its field of DisaggDeployment, or two fields contradict each
            other.
    """
    written = said(spec)
    try:
        fitting = msgspec.convert(written, DisaggDeploymentSpec)
    except msgspec.ValidationError as error:
        raise ConfigurationRefused(f"DisaggDeployment {name}: spec: {error}") from error
    for path, cause in contradictions(fitting, name):
        raise ConfigurationRefused(f"DisaggDeployment {name}: {path}: {cause}")
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "DisaggDeployment", "metadata": metadata, "spec": written}


def said(value: Any) -> Any:
    """Return a value as plain dicts, lists, texts and numbers, without fields that have their defaults."""
    match value:
        case Struct():
            fields = msgspec.structs.fields(value)
            return {
                field.encode_name: said(getattr(value, field.name))
                for field in fields
                if field.required or getattr(value, field.name) != _default(field)
            }
        case Enum():
            return value.value
        case tuple() | list():
            return [said(each) for each in value]
        case dict():
            return {name: said(each) for name, each in value.items()}
        case _:
            return value


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def drain(grace_seconds: int | None) -> Drain:
    """Return drain settings that fit into a pod's grace period, or the default settings if `grace_seconds` is None."""
    return Drain() if grace_seconds is None else Drain(timeout_seconds=max(1, grace_seconds - GRACE_SECONDS))
