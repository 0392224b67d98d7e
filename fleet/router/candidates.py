"""Candidates: what a placement policy knows about a request and about the workers that could serve it.

A table has a row for each quantity and a column for each worker, in the order in which the workers joined. A sum over workers is
therefore one numpy operation, and one copied array keeps the data of a decision.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fleet.core.clock import Nanos
from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Placement
from fleet.core.work import LoraAdapter

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]

# Kept between requests.
BACKLOG_TOKENS = 0  # reserved prompt tokens that are not computed yet
ACTIVE_BLOCKS = 1  # unique blocks of live requests; an answer near its expected end counts less
REQUESTS = 2  # reserved requests
BOOKED = 3  # number of rows that change with every reservation
LIMIT = 3  # the most requests that may be reserved
MAX_RUNNING = 4  # the most requests in one batch
KV_BLOCKS = 5  # capacity of the engine's cache
BLOCK_TOKENS = 6
PREFILL_SPEED = 7  # relative speed of this hardware
DECODE_SPEED = 8
TOKEN_SECONDS = 9  # recent seconds per prompt token, including the wait for other prompts; 0: unknown
# Computed for one request.
LIVE_BLOCKS = 10  # leading blocks of the prompt that live requests hold there or will soon compute
NEW_BLOCKS = 11  # unique blocks that the prompt would add
ENGINE_BLOCKS = 12  # leading blocks of the prompt in the engine's cache
COMING_BLOCKS = 13  # further leading blocks that live requests hold there or will soon compute
STORE_BLOCKS = 14  # further leading blocks in the memory of the worker's store
BELOW_BLOCKS = 15  # further leading blocks in a slower tier of the store
CONVERSION = 16  # cost of converting the blocks from the store, in blocks of prefill
QUANTITIES = 17


class RandomSource(Protocol):
    """A source of random numbers; `random.Random` is one."""

    def randrange(self, stop: int, /) -> int: ...


class PlacementRequest(Struct, frozen=True, kw_only=True):
    """The properties of a request that placement needs."""

    prompt_tokens: int
    answer_tokens: int = 1  # at most
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    session: str = ""
    bound: WorkerId | None = None  # the worker of this session's last request
    must_keep: bool = False  # only the worker `bound` may serve the request
    pin: WorkerId | None = None  # the only worker that the client accepts
    labels: tuple[str, ...] = ()  # labels that the worker must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may be chosen; None: all
    adapter: LoraAdapter | None = None  # the LoRA adapter that the worker must have or be able to load
    form: bool = False  # True if the worker must support structured output
    first_key: int = 0  # block key of the first full block; 0: there is none
    seconds_left: float | None = None  # time left for the first token
    now: Nanos = Nanos(0)  # the instant of the decision


def token_seconds(columns: Floats, row: int) -> float:
    """Return the seconds per prompt token on a worker; if it has computed none, the mean of the workers of its model. 0: unknown."""
    known = columns[TOKEN_SECONDS]
    if known[row] > 0:
        return float(known[row])
    computing = known[known > 0]
    return float(computing.mean()) if len(computing) else 0.0


class Candidates(Struct, frozen=True, eq=False):
    """Workers that may be chosen for one request. A policy must not write to the arrays."""

    everybody: Sequence[WorkerId]
    columns: Floats  # QUANTITIES x workers
    rows: Rows | None = None  # rows of the candidates in `everybody`; None: all
    warm: bool = True  # a worker may hold a part of the prompt
    even: bool = False  # all speeds are 1

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
        """Return the leading blocks of the prompt that need no computing, wherever they are."""
        held: Floats = self.columns[ENGINE_BLOCKS : BELOW_BLOCKS + 1].sum(axis=0)
        return held

    def uncached_tokens(self, prompt_tokens: int) -> Floats:
        """Return the prompt tokens that each worker would compute: at least one, because the last token yields the first answer."""
        return np.maximum(1.0, prompt_tokens - self.held_blocks() * self.block_tokens)

    def copy(self) -> "Candidates":
        """Return a copy, for policies that cannot be trusted not to write to the arrays."""
        return Candidates(self.everybody, self.columns.copy(), rows=self.rows, warm=self.warm, even=self.even)

    def only(self, rows: Rows) -> "Candidates":
        """Return some of the candidates, in the order of `rows`."""
        among = rows if self.rows is None else self.rows[rows]
        columns = self.columns.take(rows, axis=1)
        return Candidates(self.everybody, columns, rows=among, warm=self.warm, even=self.even)
