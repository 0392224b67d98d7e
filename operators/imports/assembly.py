"""DisaggDeployments put together from what was read elsewhere, and written with what is said only."""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from operators.api.consistency import contradictions
from operators.api.disagg_deployment import (
    DisaggDeploymentSpec,
    Drain,
    EngineKind,
    Gpus,
    KvPath,
    KvTransfer,
    Parallelism,
    RoleSpec,
    RoleType,
)
from operators.api.fields import GROUP, VERSION, GpuVendor
from operators.imports.document_reader import Note

LONGEST_NAME = 30
GRACE_SECONDS = 30
"""That a pod of ours has after its drain (`operators.manifests`)."""


class Imported(Struct, frozen=True):
    """What became of a document."""

    objects: tuple[dict[str, Any], ...]
    notes: tuple[Note, ...]


class Names:
    """Names of one kind, each given once, in the shape that ours have."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._given: set[str] = set()

    def give(self, text: str) -> str:
        """One that is like `text`."""
        parted = re.sub(r"([a-z])([A-Z])", r"\1-\2", text)  # VllmDecodeWorker
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
    """GPUs of a replica and its nodes, made to agree with how the engine is spread.

    Args:
        parallelism: Of the engine.
        gpus: Asked for, on all nodes together; 0: none.
        nodes: Of a replica.
        vendor: Of the GPUs.
        path: Of the pool.
        notes: Where to say what was changed.
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
    """Roles that may stand beside each other: prefill and decode, or neither."""
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
    """How blocks travel, less what the engines as they are spread cannot do.

    Args:
        transfer: That was wished.
        engine: Of all roles.
        roles: Of workers.
        path: Of what has the roles.
        notes: Where to say what was changed.
    """
    # The store shares blocks out by heads: see `workers.engines.vllm.launch.UNSHARED`.
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
    """The object as people write it.

    Raises:
        ConfigurationRefused: What was read does not fit into a field of ours, or not together.
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
    """A value without the fields that are as they would be anyway."""
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
    """Of pods that have so long between the word that they end and their end; None: it is not said."""
    return Drain() if grace_seconds is None else Drain(timeout_seconds=max(1, grace_seconds - GRACE_SECONDS))
