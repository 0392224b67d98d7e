"""Tests of the election in etcd: when a candidate leads. Time is virtual, and the test gives etcd's answers."""

import asyncio

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.planner.settings import EtcdElectionSettings
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_loop import VirtualLoop

pytest.importorskip("aetcd", reason="the extra `etcd` is not installed")

from fleet.planner.election.etcd import EtcdElection
from tests.support.waiting import pace

SETTINGS = EtcdElectionSettings(endpoints=("etcd:2379",), lease_seconds=12)


class LoopClock:
    def now(self):
        return Nanos(round(asyncio.get_running_loop().time() * SECOND))


class Channels:
    """Fake channels to an etcd; this candidate owns the key while the test says so (`owned`)."""

    def __init__(self):
        self.owned = True

    async def call(self, ask):
        return self.owned


def test_owner_stops_leading_when_another_owns_the_key():
    led = []

    async def play():
        channels = Channels()
        election = EtcdElection(SETTINGS, channels, "a", LoopClock())
        running = asyncio.create_task(election.run())
        await pace(1, "the key is owned and was renewed")
        led.append(election.leads())
        channels.owned = False
        await pace(2, "the next renewal, in virtual time")
        led.append(election.leads())
        running.cancel()
        await asyncio.wait([running])

    VirtualLoop(Kernel(1), Nanos(0)).complete(play())

    assert led == [True, False]
