"""Candidate table: all workers of a model for one request, with their loads and with what each of them holds of the prompt.

What is fixed about the workers until the next one joins or leaves is the *topology* of the pool; it is computed once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Placement, Role
from fleet.core.work import LoraAdapter, WorkerDescription
from fleet.router.policy import Candidates, Flags, Floats, Rows
from fleet.router.settings.router import RouterSettings


class PrefillPartners(Struct, frozen=True):
    """The prefill workers of one decode worker."""

    pool: Rows  # prefill workers of its pool, compatible or not
    rows: Rows  # the compatible ones among them
    paths: Mapping[int, KvPath]  # KV path by row


class WorkerSizes(Struct, frozen=True):
    """The different limits of some workers in tokens, sorted."""

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


_PAIR = Placement.DISAGGREGATED  # a module variable is ten times as fast as the enum attribute


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
        """Return which workers obey all these sampling fields."""
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
    able: Flags  # not draining
    answering: Flags  # the able workers that decode
    rows: Rows  # rows of the answering workers

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
    warm: bool = True  # a worker may hold a part of the prompt
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
