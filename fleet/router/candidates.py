"""What a policy knows: the request, and the workers that could serve it, as columns.

A table has a row for each quantity and a column for each worker, in the order in which they joined. So a sum over workers is
one numpy operation, and what a decision was made on is kept by copying one array.
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

# Kept from request to request.
BACKLOG_TOKENS = 0  # of prefill booked and not done
ACTIVE_BLOCKS = 1  # unique, of live requests; those of an answer near its expected end count less
REQUESTS = 2  # booked
BOOKED = 3  # rows that change with every booking
LIMIT = 3  # of requests booked
MAX_RUNNING = 4  # requests in one batch
KV_BLOCKS = 5  # capacity of the engine's cache
BLOCK_TOKENS = 6
PREFILL_SPEED = 7  # of this hardware; 1: as the others
DECODE_SPEED = 8
TOKEN_SECONDS = 9  # that a prompt token took lately, waiting for the others included; 0: not known
# Of one request.
LIVE_BLOCKS = 10  # leading blocks of the prompt that live requests hold there, or are about to compute
NEW_BLOCKS = 11  # unique, that the prompt would add
ENGINE_BLOCKS = 12  # leading blocks of the prompt in the engine's cache
COMING_BLOCKS = 13  # leading blocks beyond those that live requests hold there, or are about to compute
STORE_BLOCKS = 14  # leading blocks beyond those that the worker's store holds in memory
BELOW_BLOCKS = 15  # leading blocks beyond those that it holds in a slower tier
CONVERSION = 16  # what converting those two costs, in blocks of prefill
QUANTITIES = 17


class RandomSource(Protocol):
    """Where choices get their luck from; `random.Random` is one."""

    def randrange(self, stop: int, /) -> int: ...


class PlacementRequest(Struct, frozen=True, kw_only=True):
    """What placement has to know of a request."""

    prompt_tokens: int
    answer_tokens: int = 1  # at most
    placement: Placement = Placement.AUTO
    kv_path: KvPath | None = None
    session: str = ""
    bound: WorkerId | None = None  # where this session's last request went
    must_keep: bool = False  # to that worker, or to none
    pin: WorkerId | None = None  # the only worker that the client accepts
    labels: tuple[str, ...] = ()  # that the worker must have
    among: tuple[WorkerId, ...] | None = None  # the only workers that may take part; None: all
    adapter: LoraAdapter | None = None  # that it must have, or be able to load
    form: bool = False  # whether it must keep the answer to one
    first_key: int = 0  # of the prompt's first full block; 0: it has none
    seconds_left: float | None = None  # for the first token
    now: Nanos = Nanos(0)  # the instant of the decision


def token_seconds(columns: Floats, row: int) -> float:
    """That a prompt token takes on a worker; where it has computed none, on those of its model that have. 0: not known."""
    known = columns[TOKEN_SECONDS]
    if known[row] > 0:
        return float(known[row])
    computing = known[known > 0]
    return float(computing.mean()) if len(computing) else 0.0


class Candidates(Struct, frozen=True, eq=False):
    """Workers that may be chosen for one request. The arrays are the policy's to read, not to write."""

    everybody: Sequence[WorkerId]
    columns: Floats  # QUANTITIES x workers
    rows: Rows | None = None  # of those meant, among everybody; None: all
    warm: bool = True  # somebody may hold something of the prompt
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
        """Leading blocks that need no computing, wherever they are."""
        held: Floats = self.columns[ENGINE_BLOCKS : BELOW_BLOCKS + 1].sum(axis=0)
        return held

    def uncached_tokens(self, prompt_tokens: int) -> Floats:
        """Prompt tokens that each would have to compute: at least one, since the last one yields the first answer."""
        return np.maximum(1.0, prompt_tokens - self.held_blocks() * self.block_tokens)

    def copy(self) -> "Candidates":
        """For those who cannot be trusted to leave the arrays as they are."""
        return Candidates(self.everybody, self.columns.copy(), rows=self.rows, warm=self.warm, even=self.even)

    def only(self, rows: Rows) -> "Candidates":
        """Some of them, in the order of `rows`."""
        among = rows if self.rows is None else self.rows[rows]
        columns = self.columns.take(rows, axis=1)
        return Candidates(self.everybody, columns, rows=among, warm=self.warm, even=self.even)
