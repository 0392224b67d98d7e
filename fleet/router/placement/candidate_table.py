"""Candidate table: all workers of a model for one request, which of them are eligible, and why the others are not.

The table holds the loads of the workers, and what each of them holds of the prompt. What is fixed about the workers until the
next one joins or leaves is the *topology* of the pool; it is computed once.

Rules of eligibility:

1. A candidate decodes, has room, supports the request's length, LoRA adapter and output format, and satisfies the client's demands. If
   the client demands a pair, a prefill worker that pairs with the candidate has room as well. If an answer has begun, a candidate has
   the fingerprint of the worker that began it: other weights would continue it with another model's tokens. It also rebuilds the
   state of all sampling fields whose effect depends on the tokens of the answer so far.
2. Most requests demand nothing special while every worker has room; then no worker has to be checked by itself.
3. The reason for a worker is the first that applies; demands of the client come before the state of the worker.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Placement, Role
from fleet.core.work import LoraAdapter, WorkerDescription
from fleet.router.native.costs import all_have_room
from fleet.router.policy import LIMIT, REQUESTS, Candidates, Flags, Floats, PlacementRequest, Rows
from fleet.router.settings.router import RouterSettings

_PAIR = Placement.DISAGGREGATED  # a module variable is ten times as fast as the enum attribute


class PrefillPartners(Struct, frozen=True):
    """The prefill workers of one decode worker."""

    pool: Rows  # prefill workers of its pool, compatible or not
    rows: Rows  # the prefill workers of `pool` that are compatible
    paths: Mapping[int, KvPath]  # KV path to the decode worker, by the row of the prefill worker


class WorkerSizes(Struct, frozen=True):
    """The different limits of a group of workers, in tokens and in ascending order."""

    lengths: tuple[int, ...] = ()  # longest context
    capacities: tuple[int, ...] = ()  # tokens in the KV cache

    def reach(self, prompt_tokens: int, whole_tokens: int) -> tuple[int, int, int]:
        """Return a value that is equal for requests that fit on the same workers.

        Args:
            prompt_tokens: Tokens of the prompt.
            whole_tokens: Tokens of the prompt and of the longest answer.
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
    """Workers in the order of joining; a *row* is the position of a worker in that order."""

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
        """Return whether `fit` is true for all workers."""
        return prompt_tokens + answer_tokens <= self.shortest and prompt_tokens < self.smallest

    def fit(self, prompt_tokens: int, answer_tokens: int) -> Flags:
        """Return where prompt and answer fit into the model's context, and the prompt and one token into the KV cache."""
        fit: Flags = (prompt_tokens + answer_tokens <= self.lengths) & (prompt_tokens < self.capacities)
        return fit

    def with_adapter(self, adapter: LoraAdapter) -> Flags:
        """Return which workers have exactly this adapter, with this revision, or can load it."""
        if (flags := self._with_adapter.get(adapter)) is None:
            able = [adapter in each.adapters for each in self.descriptions]
            flags = self._with_adapter[adapter] = np.array(able, dtype=np.bool_)
        return flags

    def obeying(self, needs: tuple[str, ...]) -> Flags:
        """Return which workers support all these sampling fields."""
        if (flags := self._obeying.get(needs)) is None:
            able = [set(needs) <= set(each.sampling_fields) for each in self.descriptions]
            flags = self._obeying[needs] = np.array(able, dtype=np.bool_)
        return flags

    def continuing(self, fields: tuple[str, ...]) -> Flags:
        """Return which workers rebuild the state of all these sampling fields when they continue an answer."""
        able = [set(fields) <= set(each.continued_fields) for each in self.descriptions]
        flags: Flags = np.array(able, dtype=np.bool_)
        return flags

    def with_fingerprint(self, fingerprint: str) -> Flags:
        """Return which workers have this fingerprint, so that they compute the same tokens."""
        flags: Flags = np.array([each.fingerprint == fingerprint for each in self.descriptions], dtype=np.bool_)
        return flags

    def among(self, worker_ids: Sequence[WorkerId]) -> Flags:
        """Return which workers are in a list."""
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
    """Return the KV path from one worker to another; None if there is none, or not the requested one."""
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
    """Return how many requests may be reserved on a worker."""
    return max(1, int(description.max_running * settings.oversubscribe))


class ServingWorkers(Struct, frozen=True):
    """The workers that take requests, until the next one drains or resumes."""

    draining: Flags
    able: Flags  # workers that do not drain
    answering: Flags  # the able workers that decode
    rows: Rows  # the indices of these workers in the table

    @classmethod
    def of(cls, topology: PoolTopology, draining: Flags) -> "ServingWorkers":
        answering = ~draining & topology.decodes
        return cls(draining, ~draining, answering, answering.nonzero()[0])


class CandidateTable(Struct, frozen=True, eq=False, gc=False):
    """All workers of a model for one request. Nothing in it changes, so that the decision can be explained later."""

    topology: PoolTopology
    columns: Floats  # the quantities of `fleet.router.policy`
    serving: ServingWorkers
    failed: Flags | None = None  # workers that failed this request in this incarnation; None: none
    warm: bool = True  # True if a worker may hold a part of the prompt
    lora_groups: Sequence[
        Flags
    ] = ()  # groups of workers for the request's LoRA adapter, the best first (`fleet.router.state.lora`)

    def __len__(self) -> int:
        return len(self.topology)

    @property
    def draining(self) -> Flags:
        return self.serving.draining

    @property
    def able(self) -> Flags:
        """The workers that take requests: neither draining nor failed."""
        return self.serving.able if self.failed is None else self.serving.able & ~self.failed

    @property
    def answering(self) -> Flags:
        """The able workers that decode."""
        return self.serving.answering if self.failed is None else self.serving.answering & ~self.failed

    def candidates(self, rows: Rows) -> Candidates:
        """Return some of the workers, in the order of `rows`, each once."""
        topology = self.topology
        everybody = Candidates(topology.worker_ids, self.columns, None, self.warm, topology.even)
        return everybody if len(rows) == len(topology.worker_ids) else everybody.only(rows)


class IneligibleReason(StrEnum):
    """Reason for which a worker was no candidate."""

    NOT_PINNED = "not_pinned"  # the client named another worker
    NOT_AMONG = "not_among"  # the worker is not in the list of allowed workers
    LABEL_MISSING = "label_missing"
    NO_ADAPTER = "no_adapter"  # it has no LoRA adapter of this name, or another revision
    OTHER_WEIGHTS = "other_weights"  # a worker with another fingerprint began the answer
    LOSES_STATE = "loses_state"  # it cannot rebuild the state of a sampling field from the tokens of the begun answer
    KEEPS_NO_FORM = "keeps_no_form"
    LACKS_FIELD = "lacks_field"
    ADAPTER_ELSEWHERE = "adapter_elsewhere"  # another worker has the LoRA adapter loaded, or has a free slot
    OTHER_SESSION = "other_session"  # the session is bound to another worker
    DRAINING = "draining"
    FAILED_BEFORE = "failed_before"  # it failed this request before
    TOO_SMALL = "too_small"  # the prompt does not fit
    AT_LIMIT = "at_limit"
    NO_PAIR = "no_pair"  # a pair was demanded, and no prefill worker pairs with it


def eligible(request: PlacementRequest, table: CandidateTable) -> Rows:
    """Return the workers that could serve a request now."""
    fits = table.topology.all_fit(request.prompt_tokens, request.answer_tokens)
    if fits and table.failed is None and all_have_room(table.columns) and _has_no_demands(request):
        return table.serving.rows  # the most frequent case
    return prefer_lora_workers(table, _able_workers(request, table).nonzero()[0])


def _has_no_demands(request: PlacementRequest) -> bool:
    """Return whether the request demands nothing that a worker of its model may lack."""
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
    """Return the candidates before LoRA adapters are considered."""
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
    """Return which of some workers could serve the request if they were idle."""
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
    """Return the rows where the request's LoRA adapter is served best; all rows if it has none."""
    for group in table.lora_groups:
        if len(there := rows[group[rows]]):
            return there
    return rows


def prefill_partners(request: PlacementRequest, table: CandidateTable, decode_row: int) -> Rows:
    """Return the prefill workers that pair with a decode worker and could take the prompt if they had room."""
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
    """Return why each other worker was no candidate."""
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
            causes[worker_id] = IneligibleReason.AT_LIMIT  # the prefill worker of its pair may be at the limit
    return causes
