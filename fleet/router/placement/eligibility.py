"""Who could serve a request now, and why the others could not.

Rules:

1. A candidate decodes, has room, can have a request of this length, adapter and form, and is one that the client accepts. Where
   a pair was asked for, somebody who pairs with it has room as well.
2. Most requests ask for nothing special while everybody has room: for them there is nothing to look at worker by worker.
3. The cause that is named for a worker is the first that applies: what was asked for before what happens to be.
"""

from enum import StrEnum

import numpy as np

from fleet.core.ids import WorkerId
from fleet.core.roles import Placement
from fleet.router.candidates import LIMIT, REQUESTS, Flags, PlacementRequest, Rows
from fleet.router.native.costs import all_have_room
from fleet.router.placement.candidate_table import CandidateTable
from fleet.router.placement.topology import PoolTopology


class IneligibleReason(StrEnum):
    """Why a worker was no candidate."""

    NOT_PINNED = "not_pinned"  # the client named another
    NOT_AMONG = "not_among"  # those that may be chosen
    LABEL_MISSING = "label_missing"
    NO_ADAPTER = "no_adapter"  # it has none of this name, or another revision
    KEEPS_NO_FORM = "keeps_no_form"
    ADAPTER_ELSEWHERE = "adapter_elsewhere"  # others have it loaded, or have a slot for it
    OTHER_SESSION = "other_session"  # the session is kept on another
    DRAINING = "draining"
    FAILED_BEFORE = "failed_before"  # this very request
    TOO_SMALL = "too_small"  # the prompt does not fit
    AT_LIMIT = "at_limit"
    NO_PAIR = "no_pair"  # a pair was asked for, and nobody pairs with it


_PAIR = Placement.DISAGGREGATED  # looked up in its enum it takes ten times as long


def eligible(asked: PlacementRequest, standings: CandidateTable) -> Rows:
    """Who could serve it now."""
    fits = standings.members.all_fit(asked.prompt_tokens, asked.answer_tokens)
    if fits and standings.failed is None and all_have_room(standings.columns) and _anybody_will_do(asked):
        return standings.serving.rows  # as for most requests
    return at_home(standings, _able(asked, standings).nonzero()[0])


def _anybody_will_do(asked: PlacementRequest) -> bool:
    """Whether the request asks for nothing that a worker of its model may not have."""
    return (
        asked.pin is None
        and not asked.labels
        and asked.among is None
        and asked.adapter is None
        and not asked.form
        and not asked.must_keep
        and asked.placement is not _PAIR
    )


def _able(asked: PlacementRequest, standings: CandidateTable) -> Flags:
    """Who is a candidate, wherever its adapter is."""
    members, columns = standings.members, standings.columns
    able = capable(asked, members, standings.answering & (columns[REQUESTS] < columns[LIMIT]), asked.answer_tokens)
    if asked.pin is not None or asked.labels or asked.must_keep:
        able = able & np.array([_excluded(asked, members, row) is None for row in range(len(members))], dtype=np.bool_)
    if asked.placement is Placement.DISAGGREGATED:
        for row in able.nonzero()[0].tolist():
            able[row] = len(_free_partners(asked, standings, row)) > 0
    return able


def capable(asked: PlacementRequest, members: PoolTopology, flags: Flags, answer_tokens: int) -> Flags:
    """Of some workers, those that could have the request, did nothing else run there."""
    if not members.all_fit(asked.prompt_tokens, answer_tokens):
        flags = flags & members.fit(asked.prompt_tokens, answer_tokens)
    if asked.adapter is not None:
        flags = flags & members.with_adapter(asked.adapter)
    if asked.form:
        flags = flags & members.keeping_forms
    if asked.among is not None:
        flags = flags & members.among(asked.among)
    return flags


def at_home(standings: CandidateTable, rows: Rows) -> Rows:
    """Of some workers, those where the request's adapter is best off; all of them where it has none."""
    for home in standings.homes:
        if len(there := rows[home[rows]]):
            return there
    return rows


def paired(asked: PlacementRequest, standings: CandidateTable, decode_row: int) -> Rows:
    """Prefill workers that pair with a decode worker and could take the prompt, had they room."""
    rows = standings.members.partners(decode_row, asked.placement, asked.kv_path).rows
    if len(rows) == 0:
        return rows
    able: Rows = rows[capable(asked, standings.members, standings.able, 1)[rows]]
    return able


def _free_partners(asked: PlacementRequest, standings: CandidateTable, decode_row: int) -> Rows:
    rows = paired(asked, standings, decode_row)
    free: Rows = rows[standings.columns[REQUESTS, rows] < standings.columns[LIMIT, rows]]
    return free


def _excluded(asked: PlacementRequest, members: PoolTopology, row: int) -> IneligibleReason | None:
    description = members.descriptions[row]
    if asked.pin is not None and description.worker_id != asked.pin:
        return IneligibleReason.NOT_PINNED
    if asked.among is not None and description.worker_id not in asked.among:
        return IneligibleReason.NOT_AMONG
    if not set(asked.labels) <= set(description.labels):
        return IneligibleReason.LABEL_MISSING
    if asked.adapter is not None and asked.adapter not in description.adapters:
        return IneligibleReason.NO_ADAPTER
    if asked.form and not description.keeps_forms:
        return IneligibleReason.KEEPS_NO_FORM
    if asked.must_keep and asked.bound is not None and description.worker_id != asked.bound:
        return IneligibleReason.OTHER_SESSION
    return None


def unfit(
    asked: PlacementRequest, standings: CandidateTable, candidates: set[WorkerId]
) -> dict[WorkerId, IneligibleReason]:
    """Why each of the others was no candidate."""
    members, columns = standings.members, standings.columns
    fits = members.fit(asked.prompt_tokens, asked.answer_tokens)
    causes = {}
    for row in members.decodes.nonzero()[0].tolist():
        worker_id = members.worker_ids[row]
        if worker_id in candidates:
            continue
        if (cause := _excluded(asked, members, row)) is not None:
            causes[worker_id] = cause
        elif standings.draining[row]:
            causes[worker_id] = IneligibleReason.DRAINING
        elif standings.failed is not None and standings.failed[row]:
            causes[worker_id] = IneligibleReason.FAILED_BEFORE
        elif not fits[row]:
            causes[worker_id] = IneligibleReason.TOO_SMALL
        elif asked.placement is Placement.DISAGGREGATED and not len(paired(asked, standings, row)):
            causes[worker_id] = IneligibleReason.NO_PAIR
        elif standings.homes and columns[REQUESTS, row] < columns[LIMIT, row]:
            causes[worker_id] = IneligibleReason.ADAPTER_ELSEWHERE
        else:
            assert columns[REQUESTS, row] >= columns[LIMIT, row] or asked.placement is Placement.DISAGGREGATED
            causes[worker_id] = IneligibleReason.AT_LIMIT  # or half of its pair is
    return causes
