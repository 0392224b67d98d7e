"""Tests of the process of a node's NIXL agent; a script replaces the agent."""

import asyncio
import sys
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_loop import VirtualLoop
from kvstore.errors import StoreNotStarted
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports.nixl import NixlOffer
from kvstore.transports.nixl_node import NixlNode
from tests.support.waiting import pace, until

AGENT = """\
#!/bin/sh
cat {offer}
exec cat
"""


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Replace the agent by a script, and return the file whose content the script sends as its offer."""
    (tmp_path / "agent").write_text(AGENT.format(offer=tmp_path / "offer"))
    (tmp_path / "agent").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "agent"))
    return tmp_path / "offer"


@pytest.fixture
def node():
    tier = SharedMemoryTier(1 << 20)
    yield NixlNode(tier)
    tier.close()


async def test_ports_are_warned_of_once_and_only_if_nixl_starts(node, offer, caplog):
    offer.write_bytes(b"no offer")
    with pytest.raises(StoreNotStarted, match="the agent process did not start"):
        await node.start()
    assert not caplog.records

    offer.write_bytes(msgspec.msgpack.encode(NixlOffer(b"agent", 1, 2)))
    for _ in range(2):
        await node.start()
        assert node.offer == NixlOffer(b"agent", 1, 2)
        await node.stop()
    assert [record.message for record in caplog.records] == ["port open to other hosts"]


@pytest.mark.parametrize(
    ("lifetime", "pauses"),
    [(1.0, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]), (3600.0, [1.0] * 8)],
    ids=["soon", "late"],
)
def test_pause_grows_only_while_the_agent_dies_soon(node, monkeypatch, lifetime, pauses):
    """Let the agent die again and again in virtual time, and check the pauses before its restarts."""
    starts = []

    async def live() -> int:
        await pace(lifetime, "the agent lives that long")
        return 1

    async def start() -> None:
        starts.append(asyncio.get_running_loop().time())
        node.process = SimpleNamespace(wait=live)

    async def play() -> None:
        await start()
        running = asyncio.create_task(node.run())
        await until(lambda: len(starts) > len(pauses), 10 * sum(pauses), between_seconds=1.0)
        running.cancel()

    monkeypatch.setattr(node, "start", start)
    VirtualLoop(Kernel(1), Nanos(0)).complete(play())

    assert [later - earlier - lifetime for earlier, later in pairwise(starts)][: len(pauses)] == pauses
