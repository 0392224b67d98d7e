"""Requests without a candidate: decides whether a request waits or is rejected, and names the cause.

Rules:

1. If some worker is excluded only because it is at its limit, the request waits, whatever excludes the other workers. The request is
   still rejected if the admission queue is full or the predicted wait is too long (`fleet.router.queueing.admission`). The order of the
   waiting requests is decided in `fleet.router.queueing.admission_queue`. After a request was placed, its prompt may wait once more in the
   prefill queue of its worker (`fleet.router.state.live_requests`, rule 2).
2. Otherwise the request is rejected. If there are several causes, most demands of the client (a worker, structured output, a session, a
   pair, a length) are named before the state of the workers. A length is named only if the request fits on no worker that meets the other
   demands, so that a client does not give up a request that would fit on a draining worker.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.requests import IMAGES
from fleet.core.roles import Placement, Role
from fleet.router.placement.candidate_table import CandidateTable, IneligibleReason, ineligible_reasons
from fleet.router.policy import PlacementRequest


class RejectionCause(StrEnum):
    """The cause of a rejection: why no worker can serve a request, or continue its answer.

    The values are public and stable like those of `Reason`, but more detailed.
    """

    NO_WORKER = "no_worker"
    ALL_DRAINING = "all_draining"
    ALL_FAILED = "all_failed"
    TOO_LARGE = "too_large"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_PAIR = "no_pair"
    NO_PATH = "no_path"
    PIN_UNKNOWN = "pin_unknown"
    PIN_UNFIT = "pin_unfit"
    NO_LABEL = "no_label"
    NONE_AMONG = "none_among"
    NO_ADAPTER = "no_adapter"
    OTHER_WEIGHTS = "other_weights"
    LOSES_STATE = "loses_state"
    PASSED_ON = "passed_on"
    NO_FORM = "no_form"
    NO_FIELD = "no_field"
    SESSION_LOST = "session_lost"


_SESSION_GONE = {IneligibleReason.OTHER_SESSION, IneligibleReason.DRAINING, IneligibleReason.FAILED_BEFORE}
_MEETS_DEMANDS = {IneligibleReason.DRAINING, IneligibleReason.FAILED_BEFORE, IneligibleReason.TOO_SMALL}


class WaitForRoom(Struct, frozen=True):
    """Result: the request waits, because all workers that could serve it are at their limits."""

    busy: frozenset[WorkerId] = frozenset()
    """The workers for which the request waits. Empty if a pair was demanded, because the prefill or the decode worker may lack room."""


class Rejection(Struct, frozen=True, kw_only=True):
    reason: Reason
    cause: RejectionCause
    message: str
    field: str = ""


def explain_no_candidate(request: PlacementRequest, table: CandidateTable) -> WaitForRoom | Rejection:
    """Return why there is no candidate: `WaitForRoom` if waiting can help, or else the rejection of the request."""
    topology = table.topology
    others = ineligible_reasons(request, table, set())
    causes = set(others.values())
    if IneligibleReason.AT_LIMIT in causes:
        if request.placement is Placement.DISAGGREGATED:
            return WaitForRoom()
        return WaitForRoom(
            frozenset([worker_id for worker_id, cause in others.items() if cause is IneligibleReason.AT_LIMIT])
        )
    if request.pin is not None and request.pin not in others:
        return Rejection(
            reason=Reason.INVALID_ARGUMENT,
            cause=RejectionCause.PIN_UNKNOWN,
            message=f"pin: no worker {request.pin!r} answers requests for this model; leave it out to let the router choose",
            field="pin",
        )
    if request.pin is None and causes == {IneligibleReason.NOT_AMONG}:
        return Rejection(
            reason=Reason.NO_WORKER,
            cause=RejectionCause.NONE_AMONG,
            message="none of the allowed workers serves this model now; retry when one does",
        )
    # Workers that the gateway has excluded do not explain why the others are no candidates.
    causes.discard(IneligibleReason.NOT_AMONG)
    if IneligibleReason.KEEPS_NO_FORM in causes and causes <= {
        IneligibleReason.KEEPS_NO_FORM,
        IneligibleReason.NOT_PINNED,
    }:
        return Rejection(
            reason=Reason.INVALID_ARGUMENT,
            cause=RejectionCause.NO_FORM,
            message="sampling.form: no worker of this model, or not the pinned one, supports structured output",
            field="sampling.form",
        )
    if IneligibleReason.LACKS_FIELD in causes and causes <= {
        IneligibleReason.LACKS_FIELD,
        IneligibleReason.NOT_PINNED,
    }:
        field = next(
            (need for need in request.needs if all(need not in each.sampling_fields for each in topology.descriptions)),
            request.needs[0],
        )
        if field == IMAGES:
            return Rejection(
                reason=Reason.INVALID_ARGUMENT,
                cause=RejectionCause.NO_FIELD,
                message="chat.messages: no worker of this model, or not the pinned one, takes images",
                field="chat.messages",
            )
        return Rejection(
            reason=Reason.INVALID_ARGUMENT,
            cause=RejectionCause.NO_FIELD,
            message=f"sampling.{field}: no worker of this model, or not the pinned one, obeys it; leave it out",
            field=f"sampling.{field}",
        )
    if IneligibleReason.OTHER_WEIGHTS in causes:
        return Rejection(
            reason=Reason.WORKER_LOST,
            cause=RejectionCause.OTHER_WEIGHTS,
            message="no worker with the same weights is left to continue the answer; send the request again",
        )
    if IneligibleReason.LOSES_STATE in causes:
        return Rejection(
            reason=Reason.WORKER_LOST,
            cause=RejectionCause.LOSES_STATE,
            message=f"no worker is left that can continue an answer with {', '.join(request.continues)}; send the request again",
        )
    if request.must_keep and IneligibleReason.OTHER_SESSION in causes and causes <= _SESSION_GONE:
        return Rejection(
            reason=Reason.WORKER_LOST,
            cause=RejectionCause.SESSION_LOST,
            message=f"session: its worker {request.bound} is gone; the next request of the session may go to any worker",
            field="session",
        )
    if request.pin is not None and IneligibleReason.NO_PAIR not in causes and IneligibleReason.TOO_SMALL not in causes:
        return Rejection(
            reason=Reason.NO_WORKER,
            cause=RejectionCause.PIN_UNFIT,
            message=f"pin: {request.pin} takes no requests now ({others[request.pin].value}); name another or none",
            field="pin",
        )
    if IneligibleReason.NO_PAIR in causes:
        roles = zip(topology.descriptions, table.draining.tolist(), strict=True)
        if not any(each.role is not Role.DECODE and not draining for each, draining in roles):
            return Rejection(
                reason=Reason.NO_WORKER,
                cause=RejectionCause.NO_PREFILL_WORKER,
                message="no prefill worker is connected; retry when one is",
                field="placement",
            )
        return reject_without_pair(request)
    if IneligibleReason.TOO_SMALL in causes and (longest := _longest_if_all_too_small(request, table, others)):
        return Rejection(
            reason=Reason.TOO_LARGE,
            cause=RejectionCause.TOO_LARGE,
            message=f"prompt: {request.prompt_tokens} tokens and {request.answer_tokens} to generate exceed every worker that may "
            f"serve the request (longest: {longest})",
            field="prompt",
        )
    if IneligibleReason.FAILED_BEFORE in causes:
        return Rejection(
            reason=Reason.WORKER_LOST,
            cause=RejectionCause.ALL_FAILED,
            message="every worker that may serve the request now has failed it",
        )
    if IneligibleReason.LABEL_MISSING in causes and IneligibleReason.TOO_SMALL not in causes:
        return Rejection(
            reason=Reason.NO_WORKER,
            cause=RejectionCause.NO_LABEL,
            message=f"labels: no available worker has {', '.join(request.labels)}",
            field="labels",
        )
    if IneligibleReason.DRAINING in causes:
        return Rejection(
            reason=Reason.NO_WORKER,
            cause=RejectionCause.ALL_DRAINING,
            message="all workers that may serve the request are draining; retry when another one is connected",
        )
    if request.adapter is not None and IneligibleReason.NO_ADAPTER in causes:
        return Rejection(
            reason=Reason.NO_WORKER,
            cause=RejectionCause.NO_ADAPTER,
            message=f"model: no worker has the LoRA adapter {request.adapter.identity} now; retry when one is connected",
            field="model",
        )
    return Rejection(
        reason=Reason.NO_WORKER,
        cause=RejectionCause.NO_WORKER,
        message="no worker serves this model now; retry when one is connected",
    )


def _longest_if_all_too_small(
    request: PlacementRequest, table: CandidateTable, reasons: Mapping[WorkerId, IneligibleReason]
) -> int:
    """Return the longest context of the workers that meet the client's demands; 0 if the request fits on one of them.

    Workers that drain or have failed the request count too, because such a worker, or the one that replaces it, may take requests later.
    """
    topology = table.topology
    rows = [topology.rows[worker_id] for worker_id, reason in reasons.items() if reason in _MEETS_DEMANDS]
    if topology.fit(request.prompt_tokens, request.answer_tokens)[rows].any():
        return 0
    return max(topology.descriptions[row].max_model_len for row in rows)


def reject_without_pair(request: PlacementRequest) -> Rejection:
    """Return the rejection of a request for which there is no pair, or no pair with the requested KV path."""
    if request.kv_path is None:
        return Rejection(
            reason=Reason.KV_MISMATCH,
            cause=RejectionCause.NO_PAIR,
            message="placement: no prefill and decode worker are compatible",
            field="placement",
        )
    return Rejection(
        reason=Reason.KV_MISMATCH,
        cause=RejectionCause.NO_PATH,
        message=f"kv_path: no prefill and decode worker share the KV path {request.kv_path.value}",
        field="kv_path",
    )
