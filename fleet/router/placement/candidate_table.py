"""Candidate table: all workers of a model for one request, which of them are eligible, and why the others are not.

The table holds the loads of the workers, and what each of them holds of the prompt. The values that change only when a worker joins, leaves
or gets other KV paths, or when settings change, are the *topology* of the pool. They are not computed again for each request.

Rules of eligibility:

1. A candidate decodes, has room, does not drain, and has not failed this request. It supports the request's length, LoRA adapter and output
   format, and satisfies the client's demands. If the client demands a pair, a prefill worker that pairs with the candidate has room as
   well. If an answer has begun, a candidate has the fingerprint of the worker that began it: other weights would continue it with another
   model's tokens. The candidate can also rebuild the state of all sampling fields whose effect depends on the tokens of the answer so far.
2. Most requests demand nothing special, and usually all workers have room. Then the workers are not checked one by one.
3. If several reasons exclude a worker, only the first one is reported. Demands of the client are checked before the state of the worker.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct, structs

from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Placement, Role
from fleet.core.work import LoraAdapter, WorkerDescription
from fleet.router.native.costs import all_have_room
from fleet.router.policy import (
    ACTIVE_BLOCKS,
    KV_BLOCKS,
    LIMIT,
    MAX_RUNNING,
    NEW_BLOCKS,
    REQUESTS,
    Candidates,
    Flags,
    Floats,
    PlacementRequest,
    Rows,
)
from fleet.router.settings.router import RouterSettings

_PAIR = Placement.DISAGGREGATED  # reading a module variable is three to ten times as fast as reading the enum attribute


class PrefillPartners(Struct, frozen=True):
    """The prefill workers that can compute prompts for one decode worker. Rows are positions in `PoolTopology`."""

    pool: Rows  # rows of all prefill workers for this decode worker, compatible with it or not
    rows: Rows  # rows of the compatible prefill workers
    paths: Mapping[int, KvPath]  # for each row in `rows`, the KV path to the decode worker


class WorkerSizes(Struct, frozen=True):
    """The different sizes of a group of workers, in tokens and in ascending order."""

    lengths: tuple[int, ...] = ()  # the different maximum lengths of prompt and answer together
    capacities: tuple[int, ...] = ()  # the different capacities of the engines' KV caches

    def reach(self, prompt_tokens: int, whole_tokens: int) -> tuple[int, int, int]:
        """Return a value that is equal for requests that fit on the same workers.

        Args:
            prompt_tokens: Tokens of the prompt.
            whole_tokens: Tokens of the prompt and of the longest possible answer together.
        """
        lengths, capacities = self.lengths, self.capacities
        if lengths and whole_tokens <= lengths[0] and prompt_tokens < capacities[0]:
            return 0, 0, 0  # the most frequent case
        return (
            bisect_left(lengths, whole_tokens),
            bisect_left(lengths, prompt_tokens + 1),
            bisect_right(capacities, prompt_tokens),
        )


class PoolTopology:
    """Holds what is fixed about the workers of a model, in the order of joining. A *row* is the position of a worker in that order."""

    def __init__(self, descriptions: Sequence[WorkerDescription], settings: RouterSettings):
        self._settings = settings
        self.descriptions = tuple(descriptions)
        self.worker_ids = tuple(each.worker_id for each in descriptions)
        self.rows = {worker_id: row for row, worker_id in enumerate(self.worker_ids)}
        self.decodes: Flags = np.array([each.role is not Role.PREFILL for each in descriptions], dtype=np.bool_)
        self.lengths: Floats = np.array([each.max_model_len for each in descriptions], dtype=np.float64)
        self.capacities: Floats = np.array([each.kv_blocks * each.block_tokens for each in descriptions], np.float64)
        self.shortest = min((each.max_model_len for each in descriptions), default=0)
        self.smallest = min((each.kv_blocks * each.block_tokens for each in descriptions), default=0)
        self.sizes = WorkerSizes(
            tuple(sorted({each.max_model_len for each in descriptions})),
            tuple(sorted({each.kv_blocks * each.block_tokens for each in descriptions})),
        )
        self.keeping_forms: Flags = np.array([each.keeps_forms for each in descriptions], dtype=np.bool_)
        self.even = all(each.prefill_speed == 1 and each.decode_speed == 1 for each in descriptions)
        self._partners: dict[tuple[int, bool, KvPath | None], PrefillPartners] = {}
        self._with_adapter: dict[LoraAdapter, Flags] = {}
        self._obeying: dict[tuple[str, ...], Flags] = {}

    def __len__(self) -> int:
        return len(self.descriptions)

    def all_fit(self, prompt_tokens: int, answer_tokens: int) -> bool:
        """Return whether a request fits on all workers (see `fit`)."""
        return prompt_tokens + answer_tokens <= self.shortest and prompt_tokens < self.smallest

    def fit(self, prompt_tokens: int, answer_tokens: int) -> Flags:
        """Return a flag for each worker: True if prompt and answer fit into its context, and the prompt and one token into its KV cache."""
        fit: Flags = (prompt_tokens + answer_tokens <= self.lengths) & (prompt_tokens < self.capacities)
        return fit

    def with_adapter(self, adapter: LoraAdapter) -> Flags:
        """Return a flag for each worker: True if it has exactly this revision of the LoRA adapter, or can load it."""
        if (flags := self._with_adapter.get(adapter)) is None:
            able = [adapter in each.adapters for each in self.descriptions]
            flags = self._with_adapter[adapter] = np.array(able, dtype=np.bool_)
        return flags

    def obeying(self, needs: tuple[str, ...]) -> Flags:
        """Return a flag for each worker: True if it supports everything in `needs` (`PlacementRequest.needs`)."""
        if (flags := self._obeying.get(needs)) is None:
            able = [set(needs) <= set(each.sampling_fields) for each in self.descriptions]
            flags = self._obeying[needs] = np.array(able, dtype=np.bool_)
        return flags

    def continuing(self, fields: tuple[str, ...]) -> Flags:
        """Return a flag for each worker: True if it can rebuild the state of all these sampling fields when it continues an answer."""
        able = [set(fields) <= set(each.continued_fields) for each in self.descriptions]
        flags: Flags = np.array(able, dtype=np.bool_)
        return flags

    def with_fingerprint(self, fingerprint: str) -> Flags:
        """Return a flag for each worker: True if it has this fingerprint, so that it can continue an answer of a worker that has it too."""
        flags: Flags = np.array([each.fingerprint == fingerprint for each in self.descriptions], dtype=np.bool_)
        return flags

    def among(self, worker_ids: Sequence[WorkerId]) -> Flags:
        """Return a flag for each worker: True if it is in the list `worker_ids`."""
        meant = frozenset(worker_ids)
        flags: Flags = np.array([each in meant for each in self.worker_ids], dtype=np.bool_)
        return flags

    def partners(self, decode_row: int, placement: Placement, kv_path: KvPath | None) -> PrefillPartners:
        """Return the prefill workers that pair with a decode worker (`fleet.router.placement.decision`, rules 3 and 4)."""
        key = (decode_row, placement is _PAIR, kv_path)
        if (known := self._partners.get(key)) is None:
            known = self._partners[key] = self._found(decode_row, placement, kv_path)
        return known

    def _found(self, decode_row: int, placement: Placement, kv_path: KvPath | None) -> PrefillPartners:
        decode = self.descriptions[decode_row]
        pool, rows, paths = [], [], {}
        for row, prefill in enumerate(self.descriptions):
            if row == decode_row or not _prefills_for(prefill.role, decode.role, placement):
                continue
            pool.append(row)
            if (path := common_path(prefill, decode, kv_path, self._settings)) is not None:
                rows.append(row)
                paths[row] = path
        return PrefillPartners(np.array(pool, dtype=np.intp), np.array(rows, dtype=np.intp), paths)


def common_path(
    prefill: WorkerDescription, decode: WorkerDescription, wanted: KvPath | None, settings: RouterSettings
) -> KvPath | None:
    """Return the KV path from a prefill to a decode worker; None if they have no common path, or not the path `wanted`.

    If `wanted` is None and both paths are possible, the settings decide (`prefer_direct`).
    """
    if (prefill.fingerprint, prefill.generation) != (decode.fingerprint, decode.generation):
        return None
    open_paths = [path for path in KvPath if path in prefill.kv_paths and path in decode.kv_paths]
    if KvPath.STORE in open_paths and (prefill.store_id is None or prefill.store_id != decode.store_id):
        open_paths.remove(KvPath.STORE)
    if KvPath.DIRECT in open_paths and prefill.kv != decode.kv:
        open_paths.remove(KvPath.DIRECT)
    if wanted is not None:
        return wanted if wanted in open_paths else None
    preferred = KvPath.DIRECT if settings.prefer_direct else KvPath.STORE
    return preferred if preferred in open_paths else next(iter(open_paths), None)


def _prefills_for(prefill: Role, decode: Role, placement: Placement) -> bool:
    match prefill:
        case Role.PREFILL:
            return True
        case Role.BOTH:
            return decode is Role.DECODE or placement is Placement.DISAGGREGATED
        case Role.DECODE:
            return False


def max_requests(description: WorkerDescription, settings: RouterSettings) -> int:
    """Return how many requests may be reserved on a worker at the same time."""
    return max(1, int(description.max_running * settings.oversubscribe))


class ServingWorkers(Struct, frozen=True):
    """Flags of the workers that take requests, one for each row.

    They are computed again when a worker joins or leaves, or begins or ends draining.
    """

    draining: Flags
    able: Flags  # workers that do not drain, whatever their role
    answering: Flags  # the workers in `able` that decode
    rows: Rows  # rows of the workers whose flag in `answering` is True

    @classmethod
    def of(cls, topology: PoolTopology, draining: Flags) -> "ServingWorkers":
        answering = ~draining & topology.decodes
        return cls(draining, ~draining, answering, answering.nonzero()[0])


class CandidateTable(Struct, frozen=True, eq=False, gc=False):
    """The values of all workers of a model for one request. The table never changes, so that the decision can be explained later."""

    topology: PoolTopology
    columns: Floats  # one row for each quantity of `fleet.router.policy`, one column for each worker
    serving: ServingWorkers
    # Flags of the workers that have failed this request in their present incarnation; None: none has.
    failed: Flags | None = None
    warm: bool = True  # False if it is certain that no worker and no store holds the beginning of the prompt, or will soon hold it
    # Groups of workers for the request's LoRA adapter, the best first (`fleet.router.state.lora`); empty: the request has no adapter.
    lora_groups: Sequence[Flags] = ()

    def __len__(self) -> int:
        return len(self.topology)

    @property
    def draining(self) -> Flags:
        return self.serving.draining

    @property
    def able(self) -> Flags:
        """Flags of the workers that neither drain nor have failed this request."""
        return self.serving.able if self.failed is None else self.serving.able & ~self.failed

    @property
    def answering(self) -> Flags:
        """Flags of the workers in `able` that also decode."""
        return self.serving.answering if self.failed is None else self.serving.answering & ~self.failed

    def full_workers(self) -> list[WorkerId]:
        """Return the workers that would be full with this request, so that it would have to wait in their engines."""
        columns = self.columns
        blocks = columns[ACTIVE_BLOCKS] + columns[NEW_BLOCKS]
        lacks_blocks = (blocks > columns[KV_BLOCKS]) & (columns[KV_BLOCKS] > 0)
        full = (columns[REQUESTS] >= columns[MAX_RUNNING]) | lacks_blocks
        return [self.topology.worker_ids[row] for row in full.nonzero()[0].tolist()]

    def without(self, worker_ids: Iterable[WorkerId]) -> "CandidateTable":
        """Return the table as if these workers had failed the request. Workers of other models are ignored."""
        rows = self.topology.rows
        failed = np.zeros(len(self), dtype=np.bool_) if self.failed is None else self.failed.copy()
        failed[[rows[each] for each in worker_ids if each in rows]] = True
        return structs.replace(self, failed=failed)

    def candidates(self, rows: Rows) -> Candidates:
        """Return the candidates at these rows. The rows must be in ascending order, and each at most once."""
        topology = self.topology
        everybody = Candidates(topology.worker_ids, self.columns, None, self.warm, topology.even)
        return everybody if len(rows) == len(topology.worker_ids) else everybody.only(rows)


class IneligibleReason(StrEnum):
    """The reason why a worker was not a candidate."""

    NOT_PINNED = "not_pinned"  # the client has pinned another worker
    NOT_AMONG = "not_among"  # the gateway does not allow the worker for this request, or the worker has no endpoint
    LABEL_MISSING = "label_missing"
    NO_ADAPTER = "no_adapter"  # the worker has no LoRA adapter of this name, or another revision of it
    OTHER_WEIGHTS = "other_weights"  # a worker with another fingerprint began the answer
    # The worker cannot rebuild the state of a sampling field from the tokens of the begun answer.
    LOSES_STATE = "loses_state"
    KEEPS_NO_FORM = "keeps_no_form"
    LACKS_FIELD = "lacks_field"
    # Another worker is preferred, because it has the LoRA adapter loaded or has a free slot.
    ADAPTER_ELSEWHERE = "adapter_elsewhere"
    OTHER_SESSION = "other_session"  # the session is bound to another worker
    DRAINING = "draining"
    FAILED_BEFORE = "failed_before"  # an earlier attempt of this request on the worker has failed
    TOO_SMALL = "too_small"  # the worker's context is too short for the request, or its KV cache is too small
    AT_LIMIT = "at_limit"
    NO_PAIR = "no_pair"  # the client demanded a pair, and no prefill worker pairs with this worker


def eligible(request: PlacementRequest, table: CandidateTable) -> Rows:
    """Return the rows of the workers that could answer a request now; for a LoRA adapter, only its best group (`prefer_lora_workers`)."""
    fits = table.topology.all_fit(request.prompt_tokens, request.answer_tokens)
    if fits and table.failed is None and all_have_room(table.columns) and _has_no_demands(request):
        return table.serving.rows  # the most frequent case
    return prefer_lora_workers(table, _able_workers(request, table).nonzero()[0])


def _has_no_demands(request: PlacementRequest) -> bool:
    """Return True if the request demands nothing that some worker of its model may lack."""
    return (
        request.pin is None
        and not request.labels
        and request.among is None
        and request.adapter is None
        and not request.form
        and not request.needs
        and not request.fingerprint
        and not request.continues
        and not request.must_keep
        and request.placement is not _PAIR
    )


def _able_workers(request: PlacementRequest, table: CandidateTable) -> Flags:
    """Return a flag for each worker: True if it could answer the request now (rule 1). `prefer_lora_workers` is applied later."""
    topology, columns = table.topology, table.columns
    able = capable(request, topology, table.answering & (columns[REQUESTS] < columns[LIMIT]), request.answer_tokens)
    if request.pin is not None or request.labels or request.must_keep:
        able = able & np.array(
            [_unmet_demand(request, topology, row) is None for row in range(len(topology))], dtype=np.bool_
        )
    if request.placement is Placement.DISAGGREGATED:
        for row in able.nonzero()[0].tolist():
            able[row] = len(_free_partners(request, table, row)) > 0
    return able


def capable(request: PlacementRequest, topology: PoolTopology, flags: Flags, answer_tokens: int) -> Flags:
    """Return `flags`, but with False for each worker that could not serve the request even when idle.

    The pin, the labels, the session and a demanded pair are not considered here.
    """
    if not topology.all_fit(request.prompt_tokens, answer_tokens):
        flags = flags & topology.fit(request.prompt_tokens, answer_tokens)
    if request.adapter is not None:
        flags = flags & topology.with_adapter(request.adapter)
    if request.form:
        flags = flags & topology.keeping_forms
    if request.needs:
        flags = flags & topology.obeying(request.needs)
    if request.fingerprint:
        flags = flags & topology.with_fingerprint(request.fingerprint)
    if request.continues:
        flags = flags & topology.continuing(request.continues)
    if request.among is not None:
        flags = flags & topology.among(request.among)
    return flags


def prefer_lora_workers(table: CandidateTable, rows: Rows) -> Rows:
    """Return those of the rows that are in the best group for the request's LoRA adapter (`CandidateTable.lora_groups`).

    If no group contains one of the rows, or the request has no adapter, return all rows.
    """
    for group in table.lora_groups:
        if len(there := rows[group[rows]]):
            return there
    return rows


def prefill_partners(request: PlacementRequest, table: CandidateTable, decode_row: int) -> Rows:
    """Return the rows of the prefill workers that pair with a decode worker and could compute the prompt if they had room."""
    rows = table.topology.partners(decode_row, request.placement, request.kv_path).rows
    if len(rows) == 0:
        return rows
    able: Rows = rows[capable(request, table.topology, table.able, 1)[rows]]
    return able


def _free_partners(request: PlacementRequest, table: CandidateTable, decode_row: int) -> Rows:
    rows = prefill_partners(request, table, decode_row)
    free: Rows = rows[table.columns[REQUESTS, rows] < table.columns[LIMIT, rows]]
    return free


def _unmet_demand(request: PlacementRequest, topology: PoolTopology, row: int) -> IneligibleReason | None:
    description = topology.descriptions[row]
    if request.pin is not None and description.worker_id != request.pin:
        return IneligibleReason.NOT_PINNED
    if request.among is not None and description.worker_id not in request.among:
        return IneligibleReason.NOT_AMONG
    if not set(request.labels) <= set(description.labels):
        return IneligibleReason.LABEL_MISSING
    if request.adapter is not None and request.adapter not in description.adapters:
        return IneligibleReason.NO_ADAPTER
    if request.fingerprint and description.fingerprint != request.fingerprint:
        return IneligibleReason.OTHER_WEIGHTS
    if not set(request.continues) <= set(description.continued_fields):
        return IneligibleReason.LOSES_STATE
    if request.form and not description.keeps_forms:
        return IneligibleReason.KEEPS_NO_FORM
    if not set(request.needs) <= set(description.sampling_fields):
        return IneligibleReason.LACKS_FIELD
    if request.must_keep and request.bound is not None and description.worker_id != request.bound:
        return IneligibleReason.OTHER_SESSION
    return None


def ineligible_reasons(
    request: PlacementRequest, table: CandidateTable, candidates: set[WorkerId]
) -> dict[WorkerId, IneligibleReason]:
    """Return, for each worker that decodes and is not in `candidates`, why it is not a candidate."""
    topology, columns = table.topology, table.columns
    fits = topology.fit(request.prompt_tokens, request.answer_tokens)
    causes = {}
    for row in topology.decodes.nonzero()[0].tolist():
        worker_id = topology.worker_ids[row]
        if worker_id in candidates:
            continue
        if (cause := _unmet_demand(request, topology, row)) is not None:
            causes[worker_id] = cause
        elif table.draining[row]:
            causes[worker_id] = IneligibleReason.DRAINING
        elif table.failed is not None and table.failed[row]:
            causes[worker_id] = IneligibleReason.FAILED_BEFORE
        elif not fits[row]:
            causes[worker_id] = IneligibleReason.TOO_SMALL
        elif request.placement is Placement.DISAGGREGATED and not len(prefill_partners(request, table, row)):
            causes[worker_id] = IneligibleReason.NO_PAIR
        elif table.lora_groups and columns[REQUESTS, row] < columns[LIMIT, row]:
            causes[worker_id] = IneligibleReason.ADAPTER_ELSEWHERE
        else:
            assert columns[REQUESTS, row] >= columns[LIMIT, row] or request.placement is Placement.DISAGGREGATED
            # In a pair, the worker at its limit may be the prefill worker.
            causes[worker_id] = IneligibleReason.AT_LIMIT
    return causes
