"""What becomes of a request that nobody can be chosen for: it waits, or is refused with a cause of its own.

Rules:

1. Where somebody is only at its limit, the request waits: time mends that, whatever else there is against the others.
2. Else it is refused. The cause that is named is the most particular to this request: what the client asked for (a worker, a form,
   a session, a pair, a length) before what has become of the workers.
"""

from enum import StrEnum

from msgspec import Struct

from fleet.errors import Reason
from fleet.ids import WorkerId
from fleet.roles import Placement, Role
from fleet.router.candidates import Asked
from fleet.router.eligibility import Unfit, unfit
from fleet.router.standings import Standings


class Cause(StrEnum):
    """Why nobody can serve a request. Public and stable, as `Reason` is; finer."""

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
    NO_FORM = "no_form"
    SESSION_LOST = "session_lost"


_SESSION_GONE = {Unfit.OTHER_SESSION, Unfit.DRAINING, Unfit.FAILED_BEFORE}


class Wait(Struct, frozen=True):
    """All who could serve it are at their limits."""

    busy: frozenset[WorkerId] = frozenset()
    """These; nothing else will help but one of them. None at all where a pair was asked for: who is at its limit may be either."""


class Impossible(Struct, frozen=True, kw_only=True):
    reason: Reason
    cause: Cause
    message: str
    field: str = ""


def nobody(asked: Asked, standings: Standings) -> Wait | Impossible:
    """Why there is no candidate: the cause that time can mend comes first."""
    members = standings.members
    others = unfit(asked, standings, set())
    causes = set(others.values())
    if Unfit.AT_LIMIT in causes:
        if asked.placement is Placement.DISAGGREGATED:
            return Wait()
        return Wait(frozenset([worker_id for worker_id, cause in others.items() if cause is Unfit.AT_LIMIT]))
    if asked.pin is not None and asked.pin not in others:
        return Impossible(
            reason=Reason.INVALID_ARGUMENT,
            cause=Cause.PIN_UNKNOWN,
            message=f"pin: {asked.pin} is no worker that answers for this model; leave it out to let the router choose",
            field="pin",
        )
    if asked.pin is None and causes == {Unfit.NOT_AMONG}:
        return Impossible(
            reason=Reason.NO_WORKER,
            cause=Cause.NONE_AMONG,
            message="none of the workers that may be chosen serves this model now; retry when one does",
        )
    causes.discard(Unfit.NOT_AMONG)  # those that may not be chosen do not tell why the others cannot be
    if Unfit.KEEPS_NO_FORM in causes and causes <= {Unfit.KEEPS_NO_FORM, Unfit.NOT_PINNED}:
        return Impossible(
            reason=Reason.INVALID_ARGUMENT,
            cause=Cause.NO_FORM,
            message="sampling.form: no worker of this model, or not the one that was asked for, can keep an answer to a form",
            field="sampling.form",
        )
    if asked.must_keep and Unfit.OTHER_SESSION in causes and causes <= _SESSION_GONE:
        return Impossible(
            reason=Reason.WORKER_LOST,
            cause=Cause.SESSION_LOST,
            message=f"session: its worker {asked.bound} is gone; the next request of the session starts on another",
            field="session",
        )
    if asked.pin is not None and Unfit.NO_PAIR not in causes and Unfit.TOO_SMALL not in causes:
        return Impossible(
            reason=Reason.NO_WORKER,
            cause=Cause.PIN_UNFIT,
            message=f"pin: {asked.pin} takes no requests now ({others[asked.pin].value}); name another or none",
            field="pin",
        )
    if Unfit.NO_PAIR in causes:
        roles = zip(members.descriptions, standings.draining.tolist(), strict=True)
        if not any(each.role is not Role.DECODE and not draining for each, draining in roles):
            return Impossible(
                reason=Reason.NO_WORKER,
                cause=Cause.NO_PREFILL_WORKER,
                message="no prefill worker is up",
                field="placement",
            )
        return no_pair(asked)
    if Unfit.TOO_SMALL in causes:
        longest = max(each.max_model_len for each in members.descriptions if each.role is not Role.PREFILL)
        return Impossible(
            reason=Reason.TOO_LARGE,
            cause=Cause.TOO_LARGE,
            message=f"prompt: {asked.prompt_tokens} tokens and {asked.answer_tokens} to generate fit no worker of this "
            f"model (longest: {longest})",
            field="prompt",
        )
    if Unfit.FAILED_BEFORE in causes:
        return Impossible(
            reason=Reason.WORKER_LOST,
            cause=Cause.ALL_FAILED,
            message="every worker of this model has failed the request",
        )
    if Unfit.LABEL_MISSING in causes:
        return Impossible(
            reason=Reason.NO_WORKER,
            cause=Cause.NO_LABEL,
            message=f"labels: no worker that takes requests has {', '.join(asked.labels)}",
            field="labels",
        )
    if Unfit.DRAINING in causes:
        return Impossible(
            reason=Reason.NO_WORKER,
            cause=Cause.ALL_DRAINING,
            message="all workers of this model are going away; retry when another is up",
        )
    if asked.adapter is not None and Unfit.NO_ADAPTER in causes:
        return Impossible(
            reason=Reason.NO_WORKER,
            cause=Cause.NO_ADAPTER,
            message=f"model: no worker has the adapter {asked.adapter.identity} now; retry when one is up",
            field="model",
        )
    return Impossible(
        reason=Reason.NO_WORKER,
        cause=Cause.NO_WORKER,
        message="no worker serves this model now; retry when one is up",
    )


def no_pair(asked: Asked) -> Impossible:
    """Why there is no pair, or none that shares the path that was asked for."""
    if asked.kv_path is None:
        return Impossible(
            reason=Reason.KV_MISMATCH,
            cause=Cause.NO_PAIR,
            message="placement: no prefill and decode worker fit together",
            field="placement",
        )
    return Impossible(
        reason=Reason.KV_MISMATCH,
        cause=Cause.NO_PATH,
        message=f"kv_path: no prefill and decode worker share the path {asked.kv_path.value}",
        field="kv_path",
    )
