"""The interface of placement policies: what a policy knows, and the parts that it is made of.

Rules:

1. A policy gets the request and a table of candidates. The table has a row for each quantity and a column for each worker, in the order
   in which the workers joined. A sum over workers is therefore one numpy operation, and one copied array keeps the data of a decision.
2. Most policies consist of filters, then scorers, then a picker. A whole policy or one of its parts may come from an entry point of the
   groups `fleet.policies`, `fleet.filters`, `fleet.scorers` and `fleet.pickers`. A plug-in is a `msgspec.Struct` whose fields are its
   parameters; the settings set them by name.
3. Costs add up: the cost of a candidate is the sum of weight × cost over the scorers, and lower is better.
4. A filter names the candidates to keep; if it would keep none, it is skipped. Workers that *cannot* serve a request are not among the
   candidates that a policy gets (`fleet.router.placement.candidate_table`).
5. The same history leads to the same choices: a policy uses no clock, and draws random numbers only from the `RandomSource` that it is
   given.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fleet.core.clock import Nanos
from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Phase, Placement
from fleet.core.work import LoraAdapter

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]

# Rows of the candidate table that are kept between requests.
BACKLOG_TOKENS = 0  # number of prompt tokens that are reserved on the worker and not computed yet
ACTIVE_BLOCKS = 1  # unique blocks of live requests on the worker; an answer near its expected end counts less
REQUESTS = 2  # number of requests that are reserved on the worker
BOOKED = 3  # number of the rows above; every reservation changes them, and peer routers report their own sums for them
LIMIT = 3  # the maximum number of requests that may be reserved on the worker
MAX_RUNNING = 4  # the maximum number of requests in one batch of the engine
KV_BLOCKS = 5  # number of blocks that the engine's KV cache can hold
BLOCK_TOKENS = 6
PREFILL_SPEED = 7  # speed of prefill on the worker's hardware, relative to other workers of the model; 2: twice as fast
DECODE_SPEED = 8
TOKEN_SECONDS = 9  # recent seconds per prompt token, including the wait for other prompts; 0: not measured yet
# Rows of the candidate table that are computed anew for each request.
LIVE_BLOCKS = 10  # number of leading blocks of the prompt that live requests on the worker hold or will soon compute
NEW_BLOCKS = 11  # number of blocks of the prompt that no live request on the worker holds or will soon compute
ENGINE_BLOCKS = 12  # number of leading blocks of the prompt in the engine's prefix cache
# Number of the next blocks, after those of the row above, that live requests on the worker hold or will soon compute.
COMING_BLOCKS = 13
STORE_BLOCKS = 14  # number of the next blocks, after those of the two rows above, in the memory of the worker's store
# Number of the next blocks, after those of the three rows above, that are in a slower tier of the worker's store.
BELOW_BLOCKS = 15
CONVERSION = 16  # cost of converting all blocks that come from the store, in blocks of prefill; 0: nothing to convert
QUANTITIES = 17


class RandomSource(Protocol):
    """Port: a source of random numbers. `random.Random` implements it."""

    def randrange(self, stop: int, /) -> int: ...


class PlacementRequest(Struct, frozen=True, kw_only=True, gc=False):
    """The properties of one request that placement uses; the values are those at the instant `now`."""

    prompt_tokens: int
    answer_tokens: int = 1  # the maximum number of tokens that the answer may have
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    session: str = ""
    bound: WorkerId | None = None  # the worker of the session's last request; None: none is known, or it does not count
    must_keep: bool = False  # True if only the worker `bound` may serve the request
    pin: WorkerId | None = None  # the only worker that the client lets answer; None: any worker may answer
    labels: tuple[str, ...] = ()  # labels that the worker must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may be chosen; None: all
    adapter: LoraAdapter | None = None  # LoRA adapter that the worker must have or be able to load; None: none is used
    form: bool = False  # True if the worker must support structured output
    needs: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that the worker must support
    fingerprint: str = (
        # The fingerprint of the worker that began the answer; the next worker must have the same. Empty: any fingerprint will do.
        ""
    )
    continues: tuple[
        str, ...
        # The `fleet.core.requests.STATE_FIELDS` in use whose state the worker must rebuild, because the answer has begun.
    ] = ()
    first_key: int = 0  # block key of the prompt's first full block; 0: there is none, or no block keys were computed
    seconds_left: float | None = None  # seconds until the request's deadline; None: there is no deadline
    now: Nanos = Nanos(0)  # the instant of the decision


def token_seconds(columns: Floats, row: int) -> float:
    """Return the seconds per prompt token on a worker; if it has no measurement, the mean of the other workers of its model; 0: unknown."""
    known = columns[TOKEN_SECONDS]
    if known[row] > 0:
        return float(known[row])
    computing = known[known > 0]
    return float(computing.mean()) if len(computing) else 0.0


class Candidates(Struct, frozen=True, eq=False):
    """The workers that may be chosen for one request. A policy must not write to the arrays."""

    everybody: Sequence[WorkerId]
    columns: Floats  # one row for each quantity, one column for each candidate
    # Positions of the candidates in `everybody`, in the order of the columns; None: all workers are candidates.
    rows: Rows | None = None
    # False if it is certain that no worker and no store holds the beginning of the prompt, or will soon hold it.
    warm: bool = True
    even: bool = False  # True if the speeds of prefill and decoding are 1 for all workers of the model

    def __len__(self) -> int:
        count: int = self.columns.shape[1]
        return count

    def _row(self, quantity: int) -> Floats:
        row: Floats = self.columns[quantity]
        return row

    @property
    def worker_ids(self) -> Sequence[WorkerId]:
        if self.rows is None:
            return self.everybody
        return [self.everybody[row] for row in self.rows.tolist()]

    @property
    def backlog_tokens(self) -> Floats:
        return self._row(BACKLOG_TOKENS)

    @property
    def active_blocks(self) -> Floats:
        return self._row(ACTIVE_BLOCKS)

    @property
    def new_blocks(self) -> Floats:
        return self._row(NEW_BLOCKS)

    @property
    def requests(self) -> Floats:
        return self._row(REQUESTS)

    @property
    def max_running(self) -> Floats:
        return self._row(MAX_RUNNING)

    @property
    def kv_blocks(self) -> Floats:
        return self._row(KV_BLOCKS)

    @property
    def block_tokens(self) -> Floats:
        return self._row(BLOCK_TOKENS)

    @property
    def prefill_speed(self) -> Floats:
        return self._row(PREFILL_SPEED)

    @property
    def decode_speed(self) -> Floats:
        return self._row(DECODE_SPEED)

    @property
    def token_seconds(self) -> Floats:
        return self._row(TOKEN_SECONDS)

    @property
    def engine_blocks(self) -> Floats:
        return self._row(ENGINE_BLOCKS)

    @property
    def coming_blocks(self) -> Floats:
        return self._row(COMING_BLOCKS)

    @property
    def store_blocks(self) -> Floats:
        return self._row(STORE_BLOCKS)

    @property
    def below_blocks(self) -> Floats:
        return self._row(BELOW_BLOCKS)

    @property
    def conversion(self) -> Floats:
        return self._row(CONVERSION)

    def held_blocks(self) -> Floats:
        """Return, for each candidate, the number of leading blocks of the prompt that it need not compute."""
        held: Floats = self.columns[ENGINE_BLOCKS : BELOW_BLOCKS + 1].sum(axis=0)
        return held

    def uncached_tokens(self, prompt_tokens: int) -> Floats:
        """Return, for each candidate, the prompt tokens that it would compute: at least one, because engines always compute the last token."""
        return np.maximum(1.0, prompt_tokens - self.held_blocks() * self.block_tokens)

    def copy(self) -> "Candidates":
        """Return these candidates with a copy of the table, for policies that might write to it."""
        return Candidates(self.everybody, self.columns.copy(), rows=self.rows, warm=self.warm, even=self.even)

    def only(self, rows: Rows) -> "Candidates":
        """Return those of these candidates that are at the positions `rows`, in this order."""
        among = rows if self.rows is None else self.rows[rows]
        columns = self.columns.take(rows, axis=1)
        return Candidates(self.everybody, columns, rows=among, warm=self.warm, even=self.even)


class Filter(Protocol):
    def keep(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Flags | None:
        """Return an array with a flag for each candidate: True keeps it. None keeps all."""
        ...


class Scorer(Protocol):
    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        """Return a finite cost for each candidate in a new array; lower is better.

        Args:
            request: The request.
            candidates: At least one candidate.
            phase: AGGREGATED if the worker would do everything, PREFILL if it would only compute the prompt.
        """
        ...


@runtime_checkable
class ItemizedScorer(Protocol):
    """Port: a scorer that can also return the parts of its costs."""

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """Return the parts of the costs by name, as arrays. The sum of the parts is the result of `Scorer.costs`."""
        ...


@runtime_checkable
class RankingScorer(Protocol):
    """Port: a scorer that can find the lowest cost without computing an array of all costs."""

    def lowest(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> list[int]:
        """Return the positions of all candidates with the lowest cost, in ascending order.

        Raises:
            ValueError: A cost is not finite.
        """
        ...


class Picker(Protocol):
    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:
        """Return the position of the chosen candidate."""
        ...


class PlacementPolicy(Protocol):
    """Port: chooses the workers of one router's requests. A policy may remember its choices."""

    @property
    def name(self) -> str: ...

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> "tuple[int, PlacementPolicy]":
        """Return the position of the chosen candidate, and the policy that chose it: another one if this policy failed."""
        ...

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        """Return the parts of the costs by name, each as an array with one number for each candidate.

        The router calls this only for an explanation, or when a gateway needs further workers to fall back on.
        """
        ...


class PolicyPlugin(Protocol):
    """Port: a Struct that an entry point of `fleet.policies` names. It makes a policy from its parameters."""

    def policy(self) -> PlacementPolicy: ...
