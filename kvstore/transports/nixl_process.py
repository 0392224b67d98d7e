"""The process that holds a node's NIXL agent: ``python -m kvstore.transports.nixl_process POOL CAPACITY_BYTES``.

It maps the pool behind the file descriptor POOL, registers it, writes a `NixlOffer` as msgpack to standard output and closes
that, then lets peers connect and move bytes until its standard input ends. It has nothing that is not in the pool: the node
starts another one when it dies.
"""

import os
import select
import sys
import uuid

import msgspec

from kvstore.clock import SECOND, Nanos
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.shared_memory import Mapping
from kvstore.transports.nixl import NixlOffer
from kvstore.transports.nixl_agent import NixlAgent, spans

IDLE_SECONDS = 0.01
"""Between two looks while nobody needs this process's help to move bytes: 1 % of a core. A client that connects waits that
long, and so does one whose bytes this processor has to move, until its nudge is seen."""

BUSY_SECONDS = 0.0001
BUSY_AFTER_A_NUDGE = Nanos(1 * SECOND)

STDIN, STDOUT, STDERR = 0, 1, 2


def serve(pool: int, capacity_bytes: int) -> None:
    """Until standard input ends."""
    answer = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # what NIXL and UCX print is no answer
    mapping = Mapping(pool, capacity_bytes)
    agent = NixlAgent(f"kvstore-node-{uuid.uuid4().hex}")
    both = [(int(each.__array_interface__["data"][0]), each.nbytes) for each in (mapping.bytes, mapping.stamps)]
    agent.register(spans(both))
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.msgpack.encode(NixlOffer(agent.metadata, *(address for address, _ in both))))
    clock = MonotonicClock()
    busy_until = clock.now()
    while True:
        now = clock.now()
        if agent.attend():
            busy_until = Nanos(now + BUSY_AFTER_A_NUDGE)
        pause = BUSY_SECONDS if now < busy_until else IDLE_SECONDS
        if select.select([STDIN], [], [], pause)[0] and not os.read(STDIN, 1):
            return


if __name__ == "__main__":
    serve(*(int(argument) for argument in sys.argv[1:]))
