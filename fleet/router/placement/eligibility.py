"""Eligibility: which workers could serve a request now, and why the others could not.

Rules:

1. A candidate decodes, has room, supports the request's length, LoRA adapter and output format, and satisfies the client's demands. If
   the client demands a pair, a prefill worker that pairs with the candidate has room as well. If an answer has begun, a candidate has
   the fingerprint of the worker that began it: other weights would continue it with another model's tokens. It also rebuilds the
   state of all sampling fields whose effect depends on the tokens of the answer so far.
2. Most requests demand nothing special while every worker has room; then no worker has to be checked by itself.
3. The reason for a worker is the first that applies; demands of the client come before the state of the worker.
"""

from enum import StrEnum

import numpy as np

from fleet.core.ids import WorkerId
from fleet.core.roles import Placement
from fleet.router.native.costs import all_have_room
from fleet.router.placement.candidate_table import CandidateTable, PoolTopology
from fleet.router.policy import LIMIT, REQUESTS, Flags, PlacementRequest, Rows


class IneligibleReason(StrEnum):
    """Why a worker was no candidate."""

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


_PAIR = Placement.DISAGGREGATED  # a module variable is ten times as fast as the enum attribute


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
            causes[worker_id] = IneligibleReason.AT_LIMIT  # its prefill worker may be the one at the limit
    return causes
