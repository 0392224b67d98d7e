"""Adapters (LoRA) of the models: which there are, and where requests for them go.

Rules:

1. An adapter is served by the workers that list it: they have it, or load it when the first request for it comes. Of adapters of
   one name and several revisions the one counts that joined first, of workers that do not drain, so that a new revision takes
   over when the last worker of the old one drains; and only workers that have this very one serve it.
2. A request goes where its adapter is loaded, or is being loaded for a request before it; where none has it, or the batches of
   all who have are full, to a worker with a slot for it; where there is none, to any that can have it, which will then drop
   another. Among those the policy chooses.
3. Blocks of an adapter have a salt of its own (`kvstore.block.adapter_salt`), so no cache ever mixes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from fleet.core.ids import ModelName
from fleet.core.requests import ModelCard
from fleet.core.work import LoadReport, LoraAdapter, WorkerDescription
from fleet.router.candidates import MAX_RUNNING, REQUESTS, Flags, Floats
from fleet.router.placement.topology import PoolTopology
from kvstore.block import adapter_salt


class LoraWorker(Protocol):
    """What is looked at of a worker."""

    @property
    def description(self) -> WorkerDescription: ...

    @property
    def load(self) -> LoadReport: ...

    @property
    def adapters_booked(self) -> Mapping[str, int]:
        """Requests that are booked there, by adapter."""
        ...


def homes(
    adapter: LoraAdapter, members: PoolTopology, workers: Iterable[LoraWorker], columns: Floats
) -> Sequence[Flags]:
    """Groups of workers to choose from, the best first; the first of which somebody can take the request counts."""
    able = members.with_adapter(adapter)
    loaded: Flags = np.zeros(len(members), dtype=np.bool_)
    free: Flags = np.zeros(len(members), dtype=np.bool_)
    for row, worker in enumerate(workers):
        if not able[row]:
            continue
        slots = worker.description.adapter_slots
        there = {*worker.load.adapters, *worker.adapters_booked}
        loaded[row] = not slots or adapter.name in there
        free[row] = len(there) < slots
    roomy: Flags = columns[REQUESTS] < columns[MAX_RUNNING]
    return (loaded & roomy, free & ~loaded, able)


class ModelTarget(Struct, frozen=True):
    """What a model's card stands for, as workers know it."""

    model: ModelName
    adapter: LoraAdapter | None
    salt: bytes


def resolve_model(card: ModelCard, salt: bytes) -> ModelTarget:
    """A model itself, or an adapter of one, whose chains have a salt of their own (rule 3).

    Args:
        card: That a request names.
        salt: Of its tenant.
    """
    if not card.parent:
        return ModelTarget(card.name, None, salt)
    adapter = LoraAdapter(card.name, card.revision)
    return ModelTarget(card.parent, adapter, adapter_salt(adapter.identity, salt))


def listed(descriptions: Iterable[WorkerDescription]) -> dict[ModelName, tuple[ModelName, LoraAdapter]]:
    """The adapters of some workers, in order of joining, with their model, by name; the first counts (rule 1)."""
    found: dict[ModelName, tuple[ModelName, LoraAdapter]] = {}
    for each in descriptions:
        for adapter in each.adapters:
            found.setdefault(adapter.name, (each.model, adapter))
    return found
