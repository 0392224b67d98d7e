"""Which workers serve a request: candidates, filters, scores, choice.

Rules:

1. The decode worker is chosen first, as if it had to do everything: workers that decode and have room are scored by

       cost = max(0, (backlog + prompt tokens) / block - credit)  +  decode blocks  +  running requests × their weight

   in KV blocks. *Backlog* is prefill work booked there and not done; *credit* counts the prompt's leading blocks that
   need no computing, by where they are (engine 1, the store's memory 0.75, a tier below that 0.5), and may eat into the
   backlog but not below zero;
   *decode blocks* are the unique blocks that live requests hold there, this one included. (Dynamo's cost function.)
2. Whether another worker computes the prompt is the `split` rule, and nothing else.
3. The prefill worker is the cheapest of those that pair with the decode worker, by the same cost without the decode
   term: it holds blocks only while it computes. A prefill pool are workers of role PREFILL; one of role BOTH computes
   prompts for a DECODE worker, but for another BOTH only when the client asks for it: that would move work for nothing.
4. Two workers pair when their KV layouts have equal fingerprints and there is a way for the blocks that both can go:
   through one and the same store, or direct. The store is the first choice unless settings prefer direct.
5. The lowest cost wins; exact ties are drawn uniformly. Every decision carries the terms of all candidates.
6. What the client asked for and nobody can do is refused, naming the field; what cannot be done *now* waits.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from fleet.errors import Reason
from fleet.ids import WorkerId
from fleet.roles import KvPath, Placement, Role
from fleet.router.settings import RouterSettings
from fleet.work import Description
from kvstore.block import blocks_for


class Chance(Protocol):
    """Where ties get their luck from; `random.Random` is one."""

    def randrange(self, stop: int, /) -> int: ...


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

    DRAINING = "draining"
    FAILED_BEFORE = "failed_before"  # this very request
    TOO_SMALL = "too_small"  # the prompt does not fit
    AT_LIMIT = "at_limit"
    NO_PAIR = "no_pair"  # a pair was asked for, and nobody pairs with it


class Standing(Struct, frozen=True, kw_only=True):
    """One worker as it stands for one request."""

    description: Description
    draining: bool = False
    failed: bool = False  # on this request, in this incarnation
    backlog_tokens: int = 0  # of prefill booked and not done
    active_blocks: int = 0  # unique, of live requests
    new_blocks: int  # unique, that this prompt would add
    requests: int = 0  # booked
    engine_blocks: int = 0  # leading blocks of the prompt in the engine's cache
    store_blocks: int = 0  # leading blocks beyond those that the worker's store holds in memory
    below_blocks: int = 0  # leading blocks beyond those that it holds in a slower tier

    @property
    def held_blocks(self) -> int:
        """Leading blocks that need no computing."""
        return self.engine_blocks + self.store_blocks + self.below_blocks

    @property
    def worker_id(self) -> WorkerId:
        return self.description.worker_id

    @property
    def decodes(self) -> bool:
        return self.description.role is not Role.PREFILL


class Asked(Struct, frozen=True, kw_only=True):
    """What placement has to know of a request."""

    prompt_tokens: int
    answer_tokens: int = 1  # at most
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None


class Terms(Struct, frozen=True, kw_only=True):
    """A candidate's cost, in blocks: ``max(0, prefill - credit) + decode + requests``."""

    worker_id: WorkerId
    prefill: float
    credit: float
    decode: float
    requests: float
    cost: float


class Placed(Struct, frozen=True, kw_only=True):
    """A decision with its explanation. Without `prefill` the decode worker does it all."""

    decode: WorkerId
    prefill: WorkerId | None = None
    kv_path: KvPath | None = None
    why: Why
    uncached_tokens: int  # that the decode worker would have to compute itself
    prefill_tokens: int  # that whoever computes the prompt has to compute
    candidates: tuple[Terms, ...]
    prefill_candidates: tuple[Terms, ...] = ()
    unfit: tuple[tuple[WorkerId, Unfit], ...] = ()


class Wait(Struct, frozen=True):
    """All who could serve it are at their limits."""


class Impossible(Struct, frozen=True, kw_only=True):
    reason: Reason
    message: str
    field: str = ""


def decide(
    asked: Asked, standings: Sequence[Standing], settings: RouterSettings, chance: Chance
) -> Placed | Wait | Impossible:
    """Place one request on the workers of its model (all of them, in any state)."""
    pairs = _pairs(asked, standings, settings)
    unfit: dict[WorkerId, Unfit] = {}
    candidates = []
    for standing in standings:
        if not standing.decodes:
            continue
        if (cause := _unfit(standing, asked, pairs, settings)) is None:
            candidates.append(standing)
        else:
            unfit[standing.worker_id] = cause
    if not candidates:
        return _nobody(asked, standings, unfit)

    terms = [score(s, asked.prompt_tokens, settings) for s in candidates]
    decode = candidates[cheapest(terms, chance)]
    uncached = uncached_tokens(decode, asked.prompt_tokens)
    if (partnered := pairs.get(decode.worker_id)) is None:
        partnered = partners(decode, standings, asked, settings)
    free = [(p, path) for p, path in partnered if _has_room(p, settings)]
    splitting, why = split(
        asked.placement,
        uncached,
        settings.remote_prefill_min_tokens,
        pool=_pool(decode, standings, asked.placement),
        paired=bool(partnered),
        free=bool(free),
    )
    if why is Why.NO_COMPATIBLE_PAIR and asked.kv_path is not None:
        return _no_pair(asked)
    if not splitting:
        return Placed(
            decode=decode.worker_id,
            why=why,
            uncached_tokens=uncached,
            prefill_tokens=uncached,
            candidates=tuple(terms),
            unfit=tuple(unfit.items()),
        )
    prefill_terms = [score(p, asked.prompt_tokens, settings, decoding=False) for p, _ in free]
    prefill, kv_path = free[cheapest(prefill_terms, chance)]
    return Placed(
        decode=decode.worker_id,
        prefill=prefill.worker_id,
        kv_path=kv_path,
        why=why,
        uncached_tokens=uncached,
        prefill_tokens=uncached_tokens(prefill, asked.prompt_tokens),
        candidates=tuple(terms),
        prefill_candidates=tuple(prefill_terms),
        unfit=tuple(unfit.items()),
    )


def decide_decode(
    prefill: Description,
    kv_path: KvPath,
    asked: Asked,
    standings: Sequence[Standing],
    settings: RouterSettings,
    chance: Chance,
) -> WorkerId | None:
    """Another worker to fetch what `prefill` has computed, when the chosen one went away; None when nobody can.

    Limits give way here: the work is already under way, and a queue would only keep its blocks from being freed.
    """
    able = [
        s
        for s in standings
        if s.decodes
        and not (s.draining or s.failed)
        and _fits(s, asked.prompt_tokens, asked.answer_tokens)
        and common_path(prefill, s.description, kv_path, settings) is not None
    ]
    if not able:
        return None
    roomy = [s for s in able if _has_room(s, settings)] or able
    terms = [score(s, asked.prompt_tokens, settings) for s in roomy]
    return roomy[cheapest(terms, chance)].worker_id


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


def score(standing: Standing, prompt_tokens: int, settings: RouterSettings, *, decoding: bool = True) -> Terms:
    """Cost of a candidate (rule 1); for prefill work without the decode term (rule 3)."""
    prefill = (standing.backlog_tokens + prompt_tokens) / standing.description.block_tokens
    credit = (
        settings.engine_hit_credit * standing.engine_blocks
        + settings.store_hit_credit * standing.store_blocks
        + settings.lower_tier_hit_credit * standing.below_blocks
    )
    decode = float(standing.active_blocks + standing.new_blocks) if decoding else 0.0
    requests = settings.running_request_blocks * standing.requests
    return Terms(
        worker_id=standing.worker_id,
        prefill=prefill,
        credit=credit,
        decode=decode,
        requests=requests,
        cost=max(0.0, prefill - credit) + decode + requests,
    )


def cheapest(terms: Sequence[Terms], chance: Chance) -> int:
    """Index of the lowest cost; exact ties are drawn uniformly, so that equal workers get equal shares."""
    lowest = min(term.cost for term in terms)
    ties = [index for index, term in enumerate(terms) if term.cost == lowest]
    return ties[0] if len(ties) == 1 else ties[chance.randrange(len(ties))]


def uncached_tokens(standing: Standing, prompt_tokens: int) -> int:
    """Prompt tokens that this worker would have to compute: at least one, since the last one yields the first answer."""
    return max(1, prompt_tokens - standing.held_blocks * standing.description.block_tokens)


def partners(
    decode: Standing, standings: Sequence[Standing], asked: Asked, settings: RouterSettings
) -> list[tuple[Standing, KvPath]]:
    """Prefill workers that pair with a decode worker (rules 3 and 4), each with the way for the blocks."""
    return [
        (prefill, path)
        for prefill in standings
        if _prefills_for(prefill, decode, asked.placement)
        and not (prefill.draining or prefill.failed)
        and _fits(prefill, asked.prompt_tokens, answer_tokens=1)
        and (path := common_path(prefill.description, decode.description, asked.kv_path, settings)) is not None
    ]


def common_path(
    prefill: Description, decode: Description, asked: KvPath | None, settings: RouterSettings
) -> KvPath | None:
    """The way that blocks take from one worker to another; None when there is none, or not the one asked for."""
    if prefill.fingerprint != decode.fingerprint:
        return None
    open_paths = [path for path in KvPath if path in prefill.kv_paths and path in decode.kv_paths]
    if KvPath.STORE in open_paths and (prefill.store_id is None or prefill.store_id != decode.store_id):
        open_paths.remove(KvPath.STORE)
    if asked is not None:
        return asked if asked in open_paths else None
    preferred = KvPath.DIRECT if settings.prefer_direct else KvPath.STORE
    return preferred if preferred in open_paths else next(iter(open_paths), None)


def limit(description: Description, settings: RouterSettings) -> int:
    """Requests that may be booked on a worker."""
    return max(1, int(description.max_running * settings.oversubscribe))


def _has_room(standing: Standing, settings: RouterSettings) -> bool:
    return standing.requests < limit(standing.description, settings)


def _fits(standing: Standing, prompt_tokens: int, answer_tokens: int) -> bool:
    """Whether prompt and answer fit into the model's length, and the prompt and one token into the cache."""
    description = standing.description
    return (
        prompt_tokens + answer_tokens <= description.max_model_len
        and blocks_for(prompt_tokens + 1, description.block_tokens) <= description.kv_blocks
    )


def _prefills_for(prefill: Standing, decode: Standing, placement: Placement) -> bool:
    if prefill.worker_id == decode.worker_id:
        return False
    match prefill.description.role:
        case Role.PREFILL:
            return True
        case Role.BOTH:
            return decode.description.role is Role.DECODE or placement is Placement.DISAGGREGATED
        case Role.DECODE:
            return False


def _pairs(
    asked: Asked, standings: Sequence[Standing], settings: RouterSettings
) -> dict[WorkerId, list[tuple[Standing, KvPath]]]:
    """Partners of every decode worker, where a pair was asked for; else only the chosen one's are looked for."""
    if asked.placement is not Placement.DISAGGREGATED:
        return {}
    return {s.worker_id: partners(s, standings, asked, settings) for s in standings if s.decodes}


def _pool(decode: Standing, standings: Sequence[Standing], placement: Placement) -> Pool:
    pool = [s for s in standings if _prefills_for(s, decode, placement) and not s.draining]
    if not pool:
        return Pool.EMPTY
    return Pool.ALL_FAILED if all(s.failed for s in pool) else Pool.ALIVE


def _unfit(
    standing: Standing,
    asked: Asked,
    pairs: dict[WorkerId, list[tuple[Standing, KvPath]]],
    settings: RouterSettings,
) -> Unfit | None:
    if standing.draining:
        return Unfit.DRAINING
    if standing.failed:
        return Unfit.FAILED_BEFORE
    if not _fits(standing, asked.prompt_tokens, asked.answer_tokens):
        return Unfit.TOO_SMALL
    if asked.placement is Placement.DISAGGREGATED:
        partnered = pairs[standing.worker_id]
        if not partnered:
            return Unfit.NO_PAIR
        if not any(_has_room(prefill, settings) for prefill, _ in partnered):
            return Unfit.AT_LIMIT  # half of the pair is
    if not _has_room(standing, settings):
        return Unfit.AT_LIMIT
    return None


def _nobody(asked: Asked, standings: Sequence[Standing], unfit: dict[WorkerId, Unfit]) -> Wait | Impossible:
    """Why there is no candidate: the cause that time can mend comes first."""
    causes = unfit.values()
    if Unfit.AT_LIMIT in causes:
        return Wait()
    if Unfit.NO_PAIR in causes:
        if not any(s.description.role is not Role.DECODE and not s.draining for s in standings):
            return Impossible(reason=Reason.NO_WORKER, message="no prefill worker is up", field="placement")
        return _no_pair(asked)
    if Unfit.TOO_SMALL in causes:
        longest = max(s.description.max_model_len for s in standings if s.decodes)
        return Impossible(
            reason=Reason.TOO_LARGE,
            message=f"prompt: {asked.prompt_tokens} tokens and {asked.answer_tokens} to generate fit no worker of this "
            f"model (longest: {longest})",
            field="prompt",
        )
    if Unfit.FAILED_BEFORE in causes:
        return Impossible(reason=Reason.WORKER_LOST, message="every worker of this model has failed the request")
    return Impossible(reason=Reason.NO_WORKER, message="no worker serves this model now; retry when one is up")


def _no_pair(asked: Asked) -> Impossible:
    if asked.kv_path is None:
        return Impossible(
            reason=Reason.KV_MISMATCH, message="placement: no prefill and decode worker fit together", field="placement"
        )
    return Impossible(
        reason=Reason.KV_MISMATCH,
        message=f"kv_path: no prefill and decode worker share the path {asked.kv_path.value}",
        field="kv_path",
    )
