"""The way between hosts that have a fast fabric: the client reads and writes the node's pool by NIXL, past the node's processor.

Rules:

1. A block that was read is MOVED when its checksum is right and the node's stamp of its place, read after the bytes had
   arrived, is still the slot's generation. Generations never come again, so the place was the block's all the while.
   A wrong checksum under the right stamp is CORRUPT, and everything else GONE.
2. A block is written when the stamp is the slot's generation before, and is MOVED when it is so after. A writer whose
   reservation ends in between may spoil the block that comes next, whose reader then sees a wrong checksum.
3. NIXL has no deadlines, and a transfer that is late may write to its destination at any later time. So the first failure
   or missed deadline closes the agent, which ends all its transfers, before the call returns: buffers whose outcome is
   GONE are the caller's again. Calls stop waiting `CLOSING` before their deadline to have time for it.
4. A new agent is opened in the background, when a breaker lets it; until then everything is GONE at once. What the node
   offers then is asked again, since it may have another agent by now.
5. UCX authenticates nobody: whoever reaches its ports and has an agent's metadata can read and write the pool. Metadata
   goes to clients that the control plane has let in; networks have to keep strangers off the ports.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvstore.breaker import Breaker
from kvstore.buffers import Block, ByteArray, MutableBlock, crc32c, pieces, size_of
from kvstore.clock import MILLISECOND, Clock, Nanos, seconds
from kvstore.errors import StoreError, StoreUnreachable
from kvstore.messages import Outcome, Slot
from kvstore.settings import PAGE_BYTES
from kvstore.transports.nixl_agent import Agent, AgentFailed, Span, Way, joined

CHUNK_BYTES = 8 << 20
"""Of one transfer: checksums are taken of one while the next is on its way."""

BATCH = 1024  # blocks whose stamps are read together
STAMP_BYTES = 8

CLOSING = Nanos(300 * MILLISECOND)
SHORTEST = Nanos(50 * MILLISECOND)  # that a call waits, if its deadline is as near as that

SPINS = 200  # looks at a transfer before the pauses between them begin: small ones are done by then
PAUSE_SECONDS = 50e-6
NUDGE_AFTER = Nanos(2 * MILLISECOND)
NUDGE_EVERY = Nanos(500 * MILLISECOND)


class NixlOffer(Struct, frozen=True):
    """What a node tells of its agent in the handshake."""

    metadata: bytes
    blocks: int  # address of the pool's first byte in the agent's process
    stamps: int  # address of the first stamp


class NixlTransport:
    """See `kvstore.ports.Transport`. Threads take turns."""

    def __init__(
        self,
        offer: NixlOffer,
        block_bytes: int,
        clock: Clock,
        deadline: Nanos,
        renew: Callable[[Nanos], NixlOffer | None],
        make_agent: Callable[[str], Agent] = Agent,
    ):
        """Opens an agent and connects it.

        Args:
            offer: The node's.
            block_bytes: Of the namespace, which the node has opened.
            clock: For deadlines.
            deadline: Of the connection.
            renew: Asks the node for its offer, until a deadline; None: it has none now. Called in a thread of its own.
            make_agent: With a name that no other agent has.

        Raises:
            StoreUnreachable: NIXL cannot be used here, or the node's agent does not answer in time.
        """
        self._block_bytes = block_bytes
        self._clock = clock
        self._renew = renew
        self._make_agent = make_agent
        self._breaker = Breaker()
        self._turn = threading.Lock()
        self._closed = False
        self._opening = False
        try:
            self._link: _Link | None = _Link(offer, make_agent, clock, deadline)
        except AgentFailed as error:
            raise StoreUnreachable(f"no way by NIXL: {error}") from error

    def get(self, slots: Sequence[Slot], into: Sequence[MutableBlock], deadline: Nanos) -> list[Outcome]:
        return self._exchange(_get, slots, into, deadline)

    def put(self, slots: Sequence[Slot], blocks: Sequence[Block], deadline: Nanos) -> list[Outcome]:
        return self._exchange(_put, slots, blocks, deadline)

    def close(self) -> None:
        """Waits for the call in progress, which has a deadline."""
        self._closed = True
        with self._turn:
            self._drop()

    def _exchange(
        self, act: "_Act", slots: Sequence[Slot], blocks: Sequence[Block | MutableBlock], deadline: Nanos
    ) -> list[Outcome]:
        work = [_Moving(slot, self._pieces(block)) for slot, block in zip(slots, blocks, strict=True)]
        started = self._clock.now()
        left = seconds(deadline - started)
        if work and left > 0 and self._turn.acquire(timeout=left):
            try:
                link = self._current(started)
                if link is not None:
                    until = max(Nanos(deadline - CLOSING), min(Nanos(started + SHORTEST), deadline))
                    for start in range(0, len(work), BATCH):
                        act(link, work[start : start + BATCH], until)
            except AgentFailed:
                for each in work:  # nothing is known of those that were under way
                    each.outcome = each.settled
                self._drop()
                self._breaker.failed(started, self._clock.now())
            finally:
                self._turn.release()
        return [each.outcome for each in work]
