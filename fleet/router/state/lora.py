"""LoRA adapters: which adapters the workers serve, and which workers suit a request for an adapter.

Rules:

1. The workers that list an adapter serve it: they have it loaded, or they load it with the first request. If workers list several revisions
   under one name, the revision of the worker that joined first counts; workers that drain are left out. So a new revision takes over when
   the last worker of the old one drains. Only workers with exactly this revision serve it.
2. A request goes to a worker that has its adapter loaded, or is loading it for an earlier request. If there is no such worker, or the
   batches of all such workers are full, the request goes to a worker with a free slot. If no slot is free, it goes to any worker that can
   load the adapter, and this worker unloads another adapter. In each case, the policy chooses among these workers.
3. The blocks of an adapter have a salt of their own (`fleet.frontend.generation.resolve_model`), so no cache ever mixes the blocks of
   two adapters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from fleet.core.ids import ModelName
from fleet.core.work import LoadReport, LoraAdapter, WorkerDescription
from fleet.router.placement.candidate_table import PoolTopology
from fleet.router.policy import MAX_RUNNING, REQUESTS, Flags, Floats


class LoraWorker(Protocol):
    """Port: the properties of a worker that the choice by LoRA adapter needs."""

    @property
    def description(self) -> WorkerDescription: ...

    @property
    def load(self) -> LoadReport: ...

    @property
    def adapters_reserved(self) -> Mapping[str, int]:
        """The number of requests that are reserved on the worker, by the name of their LoRA adapter."""
        ...


def lora_groups(
    adapter: LoraAdapter, topology: PoolTopology, workers: Iterable[LoraWorker], columns: Floats
) -> Sequence[Flags]:
    """Return groups of workers for an adapter, the best group first (rule 2).

    Placement uses the first group that contains a worker that can take the request.
    """
    able = topology.with_adapter(adapter)
    loaded: Flags = np.zeros(len(topology), dtype=np.bool_)
    free: Flags = np.zeros(len(topology), dtype=np.bool_)
    for row, worker in enumerate(workers):
        if not able[row]:
            continue
        slots = worker.description.adapter_slots
        there = {*worker.load.adapters, *worker.adapters_reserved}
        loaded[row] = not slots or adapter.name in there
        free[row] = len(there) < slots
    roomy: Flags = columns[REQUESTS] < columns[MAX_RUNNING]
    return (loaded & roomy, free & ~loaded, able)


def listed_loras(descriptions: Iterable[WorkerDescription]) -> dict[ModelName, tuple[ModelName, LoraAdapter]]:
    """Return the LoRA adapters of some workers by name, each with the name of its base model.

    If several workers list an adapter with the same name, the first of these workers counts (rule 1).
    """
    found: dict[ModelName, tuple[ModelName, LoraAdapter]] = {}
    for each in descriptions:
        for adapter in each.adapters:
            found.setdefault(adapter.name, (each.model, adapter))
    return found
