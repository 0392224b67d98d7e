"""NIXL process: holds a node's NIXL agent (``python -m kvstore.transports.nixl_process POOL CAPACITY_BYTES``).

The process maps the pool behind the file descriptor POOL and registers it with the agent. Then it writes a `NixlOffer`
as msgpack to its standard output, and closes this output. It serves peers until its standard input ends. The process
has no state besides the pool, so the node can replace it at any time.
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
"""Pause between two polls while no peer needs help with its transfers. Such polling costs 1 % of a core. A client that
connects, or that calls `NixlAgent.nudge`, waits up to this time."""

BUSY_SECONDS = 0.0001
BUSY_AFTER_A_NUDGE = Nanos(1 * SECOND)

STDIN, STDOUT, STDERR = 0, 1, 2


def serve(pool: int, capacity_bytes: int) -> None:
    """Map and register the pool, write the offer to standard output, and serve peers until standard input ends."""
    answer = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # sends the output of NIXL and UCX to standard error, so that it is not part of the answer
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
