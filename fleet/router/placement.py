"""Which workers serve a request: who can, who is best by the policy, and whether one worker or two.

Rules:

1. The decode worker is chosen first, as if it had to do everything: of the workers that decode and have room, the one that the
   policy takes (`fleet.router.policies`). The default policy's cost counts, in KV blocks, the prefill that waits there and that
   the prompt would add, less what of it is cached, and the decode blocks that live requests hold there, this one's included.
2. Whether another worker computes the prompt is the `split` rule, and nothing else.
3. The prefill worker is chosen by the same policy among those that pair with the decode worker, without the decode term: it
   holds blocks only while it computes. A prefill pool are workers of role PREFILL; one of role BOTH computes prompts for a
   DECODE worker, but for another BOTH only when the client asks for it: that would move work for nothing.
4. Two workers pair when their blocks hold the same values (equal fingerprints), they are of one generation, and there is a
   way for the blocks that both can go: through one and the same store, which takes blocks of any layout and number of ranks,
   or direct, where these are equal too. The store is the first choice unless settings prefer direct.
5. A decision keeps what it was made on. The terms of all candidates, which add up to their costs, are worked out from that
   when somebody asks, by the same functions.
6. What the client asked for and nobody can do is refused, naming the field and the cause; what cannot be done *now* waits.
"""

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from msgspec import Struct

from fleet.errors import Reason
from fleet.ids import WorkerId
from fleet.roles import KvPath, Phase, Placement, Role
from fleet.router.candidates import (
    BELOW_BLOCKS,
    BLOCK_TOKENS,
    COMING_BLOCKS,
    ENGINE_BLOCKS,
    LIMIT,
    REQUESTS,
    STORE_BLOCKS,
    Asked,
    Candidates,
    Chance,
    Flags,
    Rows,
    token_seconds,
)
from fleet.router.crossover import Crossover
from fleet.router.members import Members, Standings, common_path
from fleet.router.policies.ports import Policy
from fleet.router.settings import RouterSettings
from fleet.work import Description


class Why(StrEnum):
    """Why a request went to one worker, or to a pair. Recorded with each decision, counted in metrics."""

    # One worker.
    SHORT_UNCACHED_PROMPT = "short_uncached_prompt"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_COMPATIBLE_PAIR = "no_compatible_pair"
    PREFILL_WORKERS_BUSY = "prefill_workers_busy"
    PREFILL_LOST = "prefill_lost"  # the prefill workers that are left have failed this request before
    # A pair.
    PROMPT_LONG_UNCACHED = "prompt_long_uncached"
    # Either.
    ASKED_BY_CLIENT = "asked_by_client"


class Unfit(StrEnum):
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


class Terms(Struct, frozen=True, kw_only=True):
    """A candidate's cost, and the terms that add up to it."""

    worker_id: WorkerId
    cost: float
    parts: dict[str, float]


class Placed(Struct, frozen=True, kw_only=True):
    """A decision with its explanation. Without `prefill` the decode worker does it all."""

    decode: WorkerId
    prefill: WorkerId | None = None
    kv_path: KvPath | None = None
    why: Why
    policy: str  # that chose the decode worker
    prefill_policy: str = ""
    uncached_tokens: int  # that the decode worker would have to compute itself
    min_tokens: int  # of these, from which on another worker computes the prompt
    prefill_tokens: int  # that whoever computes the prompt has to compute
    candidates: tuple[Terms, ...]
    prefill_candidates: tuple[Terms, ...] = ()
    unfit: tuple[tuple[WorkerId, Unfit], ...] = ()


class Decision(Struct, frozen=True, kw_only=True):
    """What was decided, and on what. Without `prefill` the decode worker does it all."""

    decode: WorkerId
    prefill: WorkerId | None = None
    kv_path: KvPath | None = None
    why: Why
    uncached_tokens: int
    min_tokens: int
    prefill_tokens: int
    asked: Asked
    standings: Standings
    rows: Rows  # of the candidates
    policy: Policy
    prefill_rows: Rows | None = None
    prefill_policy: Policy | None = None

    def explained(self) -> Placed:
        """The decision with the terms of all candidates."""
        candidates = self.standings.candidates(self.rows)
        partners: tuple[Terms, ...] = ()
        if self.prefill_rows is not None and self.prefill_policy is not None:
            able = self.standings.candidates(self.prefill_rows)
            partners = _terms(self.prefill_policy, self.asked, able, Phase.PREFILL)
        return Placed(
            decode=self.decode,
            prefill=self.prefill,
            kv_path=self.kv_path,
            why=self.why,
            policy=self.policy.name,
            prefill_policy="" if self.prefill_policy is None else self.prefill_policy.name,
            uncached_tokens=self.uncached_tokens,
            min_tokens=self.min_tokens,
            prefill_tokens=self.prefill_tokens,
            candidates=_terms(self.policy, self.asked, candidates, Phase.AGGREGATED),
            prefill_candidates=partners,
            unfit=tuple(_unfit(self.asked, self.standings, set(candidates.worker_ids)).items()),
        )

    def next_best(self, most: int) -> tuple[WorkerId, ...]:
        """Who else could have answered, the best first."""
        terms = _terms(self.policy, self.asked, self.standings.candidates(self.rows), Phase.AGGREGATED)
        others = sorted((each for each in terms if each.worker_id != self.decode), key=lambda each: each.cost)
        return tuple(each.worker_id for each in others[:most])


class Wait(Struct, frozen=True):
    """All who could serve it are at their limits."""


class Impossible(Struct, frozen=True, kw_only=True):
    reason: Reason
    cause: Cause
    message: str
    field: str = ""


def decide(
    asked: Asked,
    standings: Standings,
    policy: Policy,
    settings: RouterSettings,
    chance: Chance,
    crossover: Crossover | None = None,
) -> Decision | Wait | Impossible:
    """Place one request on the workers of its model (all of them, in any state).

    Args:
        asked: The request.
        standings: The workers.
        policy: That chooses among those who can.
        settings: The router's.
        chance: For ties.
        crossover: What was learned of hand-offs, where that counts.
    """
    members, columns = standings.members, standings.columns
    rows = _at_home(standings, _able(asked, standings).nonzero()[0])
    if len(rows) == 0:
        return _nobody(asked, standings)
    place, by = policy.choose(asked, standings.candidates(rows), Phase.AGGREGATED, chance)
    row = int(rows[place])
    uncached = _uncached(asked, standings, row) if standings.warm else asked.prompt_tokens

    min_tokens = settings.remote_prefill_min_tokens
    if crossover is not None:
        min_tokens = crossover.min_tokens(token_seconds(columns, row), int(columns[REQUESTS, row]), min_tokens)
    if asked.placement is Placement.AUTO and uncached < min_tokens:
        splitting, why = False, Why.SHORT_UNCACHED_PROMPT
    elif asked.placement is Placement.AGGREGATED:
        splitting, why = False, Why.ASKED_BY_CLIENT
    else:
        partners = members.partners(row, asked.placement, asked.kv_path)
        paired = _paired(asked, standings, row)
        prefill_rows = paired[columns[REQUESTS, paired] < columns[LIMIT, paired]] if len(paired) else paired
        prefill_rows = _at_home(standings, prefill_rows)
        splitting, why = split(
            asked.placement,
            uncached,
            min_tokens,
            pool=_pool(standings, partners.pool),
            paired=len(paired) > 0,
            free=len(prefill_rows) > 0,
        )
        if why is Why.NO_COMPATIBLE_PAIR and asked.kv_path is not None:
            return _no_pair(asked)
        if splitting:
            place, prefill_by = policy.choose(asked, standings.candidates(prefill_rows), Phase.PREFILL, chance)
            prefill_row = int(prefill_rows[place])
            return Decision(
                decode=members.worker_ids[row],
                prefill=members.worker_ids[prefill_row],
                kv_path=partners.paths[prefill_row],
                why=why,
                uncached_tokens=uncached,
                min_tokens=min_tokens,
                prefill_tokens=_uncached(asked, standings, prefill_row, coming=True),
                asked=asked,
                standings=standings,
                rows=rows,
                policy=by,
                prefill_rows=prefill_rows,
                prefill_policy=prefill_by,
            )
    return Decision(
        decode=members.worker_ids[row],
        why=why,
        uncached_tokens=uncached,
        min_tokens=min_tokens,
        prefill_tokens=_uncached(asked, standings, row, coming=True) if standings.warm else uncached,
        asked=asked,
        standings=standings,
        rows=rows,
        policy=by,
    )


def decide_decode(
    prefill: Description,
    kv_path: KvPath,
    asked: Asked,
    standings: Standings,
    policy: Policy,
    settings: RouterSettings,
    chance: Chance,
) -> WorkerId | None:
    """Another worker to fetch what `prefill` has computed, when the chosen one went away; None when nobody can.

    Limits give way here: the work is already under way, and a queue would only keep its blocks from being freed.
    """
    members, columns = standings.members, standings.columns
    able = standings.answering & members.fit(asked.prompt_tokens, asked.answer_tokens)
    if asked.adapter is not None:
        able &= members.with_adapter(asked.adapter)
    if asked.form:
        able &= members.keeping_forms
    if asked.among is not None:
        able &= members.among(asked.among)
    reads = [
        row
        for row in able.nonzero()[0].tolist()
        if members.worker_ids[row] != prefill.worker_id
        and common_path(prefill, members.descriptions[row], kv_path, settings) is not None
    ]
    if not reads:
        return None
    rows = np.array(reads, dtype=np.intp)
    roomy = rows[columns[REQUESTS, rows] < columns[LIMIT, rows]]
    if len(roomy) > 0:
        rows = roomy
    rows = _at_home(standings, rows)
    place, _ = policy.choose(asked, standings.candidates(rows), Phase.AGGREGATED, chance)
    return members.worker_ids[int(rows[place])]


class Pool(StrEnum):
    """The prefill workers that could serve a decode worker, were they compatible and free."""

    ALIVE = "alive"
    ALL_FAILED = "all_failed"  # on this request
    EMPTY = "empty"


def split(
    placement: Placement, uncached: int, min_tokens: int, *, pool: Pool, paired: bool, free: bool
) -> tuple[bool, Why]:
    """Whether another worker computes the prompt, and why: the first line that applies.

    Args:
        placement: What the client asked for.
        uncached: Prompt tokens that the decode worker would have to compute; what its store holds counts as cached.
        min_tokens: From which on it is worth a hand-off.
        pool: Whether there are prefill workers at all.
        paired: Whether one of them is compatible with the decode worker.
        free: Whether one of those has room.
    """
    if placement is not Placement.AUTO:
        return placement is Placement.DISAGGREGATED, Why.ASKED_BY_CLIENT
    if uncached < min_tokens:
        return False, Why.SHORT_UNCACHED_PROMPT
    if pool is Pool.EMPTY:
        return False, Why.NO_PREFILL_WORKER
    if pool is Pool.ALL_FAILED:
        return False, Why.PREFILL_LOST
    if not paired:
        return False, Why.NO_COMPATIBLE_PAIR
    if not free:
        return False, Why.PREFILL_WORKERS_BUSY
    return True, Why.PROMPT_LONG_UNCACHED


def _able(asked: Asked, standings: Standings) -> Flags:
    """Who is a candidate."""
    members, columns = standings.members, standings.columns
    able: Flags = standings.answering & (columns[REQUESTS] < columns[LIMIT])
    if not members.all_fit(asked.prompt_tokens, asked.answer_tokens):
        able &= members.fit(asked.prompt_tokens, asked.answer_tokens)
    if asked.adapter is not None:
        able &= members.with_adapter(asked.adapter)
    if asked.form:
        able &= members.keeping_forms
    if asked.among is not None:
        able &= members.among(asked.among)
    if asked.pin is not None or asked.labels or asked.must_keep:
        able &= np.array([_excluded(asked, members, row) is None for row in range(len(members))], dtype=np.bool_)
    if asked.placement is Placement.DISAGGREGATED:
        for row in able.nonzero()[0].tolist():
            able[row] = len(_free_partners(asked, standings, row)) > 0
    return able


def _at_home(standings: Standings, rows: Rows) -> Rows:
    """Of some workers, those where the request's adapter is best off; all of them where it has none."""
    for home in standings.homes:
        if len(there := rows[home[rows]]):
            return there
    return rows


def _paired(asked: Asked, standings: Standings, decode_row: int) -> Rows:
    """Prefill workers that pair with a decode worker and could take the prompt, had they room."""
    rows = standings.members.partners(decode_row, asked.placement, asked.kv_path).rows
    if len(rows) == 0:
        return rows
    able = standings.able[rows]
    if not standings.members.all_fit(asked.prompt_tokens, 1):
        able &= standings.members.fit(asked.prompt_tokens, 1)[rows]
    if asked.adapter is not None:
        able = able & standings.members.with_adapter(asked.adapter)[rows]
    if asked.form:
        able = able & standings.members.keeping_forms[rows]
    if asked.among is not None:
        able = able & standings.members.among(asked.among)[rows]
    paired: Rows = rows[able]
    return paired


def _free_partners(asked: Asked, standings: Standings, decode_row: int) -> Rows:
    rows = _paired(asked, standings, decode_row)
    free: Rows = rows[standings.columns[REQUESTS, rows] < standings.columns[LIMIT, rows]]
    return free


def _pool(standings: Standings, rows: Rows) -> Pool:
    alive = rows[~standings.draining[rows]] if len(rows) else rows
    if len(alive) == 0:
        return Pool.EMPTY
    if standings.failed is not None and bool(standings.failed[alive].all()):
        return Pool.ALL_FAILED
    return Pool.ALIVE


def _uncached(asked: Asked, standings: Standings, row: int, *, coming: bool = False) -> int:
    """Prompt tokens that a worker would have to compute: at least one, since the last one yields the first answer.

    Blocks that are coming count as cached where it is about work, and not where it is about whether there is something to
    hand over: on a decode worker they may come from the very hand-off.
    """
    quantities = standings.columns[:, row].tolist()
    held = quantities[ENGINE_BLOCKS] + quantities[STORE_BLOCKS] + quantities[BELOW_BLOCKS]
    if coming:
        held += quantities[COMING_BLOCKS]
    return max(1, asked.prompt_tokens - int(held * quantities[BLOCK_TOKENS]))


def _excluded(asked: Asked, members: Members, row: int) -> Unfit | None:
    description = members.descriptions[row]
    if asked.pin is not None and description.worker_id != asked.pin:
        return Unfit.NOT_PINNED
    if asked.among is not None and description.worker_id not in asked.among:
        return Unfit.NOT_AMONG
    if not set(asked.labels) <= set(description.labels):
        return Unfit.LABEL_MISSING
    if asked.adapter is not None and asked.adapter not in description.adapters:
        return Unfit.NO_ADAPTER
    if asked.form and not description.keeps_forms:
        return Unfit.KEEPS_NO_FORM
    if asked.must_keep and asked.bound is not None and description.worker_id != asked.bound:
        return Unfit.OTHER_SESSION
    return None


def _unfit(asked: Asked, standings: Standings, candidates: set[WorkerId]) -> dict[WorkerId, Unfit]:
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
            causes[worker_id] = Unfit.DRAINING
        elif standings.failed is not None and standings.failed[row]:
            causes[worker_id] = Unfit.FAILED_BEFORE
        elif not fits[row]:
            causes[worker_id] = Unfit.TOO_SMALL
        elif asked.placement is Placement.DISAGGREGATED and not len(_paired(asked, standings, row)):
            causes[worker_id] = Unfit.NO_PAIR
        elif standings.homes and columns[REQUESTS, row] < columns[LIMIT, row]:
            causes[worker_id] = Unfit.ADAPTER_ELSEWHERE
        else:
            assert columns[REQUESTS, row] >= columns[LIMIT, row] or asked.placement is Placement.DISAGGREGATED
            causes[worker_id] = Unfit.AT_LIMIT  # or half of its pair is
    return causes


def _nobody(asked: Asked, standings: Standings) -> Wait | Impossible:
    """Why there is no candidate: the cause that time can mend comes first."""
    members = standings.members
    unfit = _unfit(asked, standings, set())
    causes = set(unfit.values())
    if Unfit.AT_LIMIT in causes:
        return Wait()
    if asked.pin is not None and asked.pin not in unfit:
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
            message=f"pin: {asked.pin} takes no requests now ({unfit[asked.pin].value}); name another or none",
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
        return _no_pair(asked)
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


def _no_pair(asked: Asked) -> Impossible:
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


def _terms(policy: Policy, asked: Asked, candidates: Candidates, phase: Phase) -> tuple[Terms, ...]:
    parts: Mapping[str, list[float]] = {
        name: costs.tolist() for name, costs in policy.costs(asked, candidates, phase).items()
    }
    return tuple(
        Terms(
            worker_id=worker_id,
            cost=sum(costs[place] for costs in parts.values()),
            parts={name: costs[place] for name, costs in parts.items()},
        )
        for place, worker_id in enumerate(candidates.worker_ids)
    )
