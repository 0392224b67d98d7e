"""Prober: it sends the probes of a deployment one after the other, few in all at the same time, while the operator leads."""

import asyncio
from contextlib import asynccontextmanager

import msgspec

from fleet.core.clock import Nanos
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_loop import VirtualLoop
from operators.keys import deployment_key
from operators.probes.evidence import PendingProbes, ProbeCompletion, ProbeEvidence, ProbeFailure, unanswered
from operators.probes.prober import Prober
from tests.support.waiting import turns
from tests.unit.operators.probes.test_evidence import REFUSED, a_subject, an_aim

TURNS = 20  # enough turns of the event loop to send a probe, or to receive its answer


class Clients:
    """A probe sender that answers when the test says so."""

    def __init__(self):
        self.asked = []
        self.addresses = []
        self.on_the_way = 0
        self.changed = asyncio.Event()
        self.answers = asyncio.Queue()

    async def ask(self, probe):
        self.asked.append((probe.deployment, probe.worker))
        self.addresses.append(probe.router_address)
        self.on_the_way += 1
        self.changed.set()
        try:
            return await self.answers.get()
        finally:
            self.on_the_way -= 1

    async def until(self, count):
        """Wait until `count` probes were sent."""
        async with asyncio.timeout(60):
            while len(self.asked) < count:
                self.changed.clear()
                await self.changed.wait()


class TimedClients(Clients):
    """A probe sender that also notes when each probe was sent."""

    def __init__(self):
        super().__init__()
        self.times = []

    async def ask(self, probe):
        self.times.append(asyncio.get_running_loop().time())
        return await super().ask(probe)


@asynccontextmanager
async def a_prober(clients, at_once=2, leads=lambda: True, longest_seconds=0.01):
    heard = []
    prober = Prober(clients, at_once, longest_seconds, leads, heard.append)
    running = asyncio.create_task(prober.run())
    await turns()
    yield prober, heard
    running.cancel()
    await asyncio.wait([running])


def a_want(*workers):
    return PendingProbes(a_subject(*map(an_aim, workers)), ProbeEvidence())


async def test_concurrent_probes_are_limited_and_one_per_deployment():
    clients = Clients()
    async with a_prober(clients) as (prober, _):
        for at in range(5):
            prober.want(deployment_key("ns", f"dd-{at}"), a_want("a", "b"))
        await turns(TURNS)
        assert clients.asked == [("dd-0", "a"), ("dd-1", "a")]
        for sent in range(3, 11):
            clients.answers.put_nowait(ProbeCompletion(True))
            await clients.until(sent)
            assert clients.on_the_way <= 2

    assert sorted(clients.asked) == [(f"dd-{at}", worker) for at in range(5) for worker in "ab"]


async def test_unneeded_probe_is_cancelled_and_evidence_kept():
    clients, key = Clients(), deployment_key("ns", "dd")
    async with a_prober(clients) as (prober, heard):
        wanted = a_want("a", "b")
        prober.want(key, wanted)
        clients.answers.put_nowait(ProbeCompletion(True))
        await clients.until(2)
        prober.want(key, None)
        await turns(TURNS)

        assert clients.on_the_way == 0
        assert [target.worker.pod for target in unanswered(wanted.subject, prober.of(key))] == ["b"]
        assert heard == [], "nothing that anybody waits for"
        prober.forget(key)
        assert prober.of(key) == ProbeEvidence()


async def test_new_pods_are_probed_at_once_and_known_ones_not_again():
    clients, key = Clients(), deployment_key("ns", "dd")
    async with a_prober(clients) as (prober, heard):
        prober.want(key, a_want("a"))
        await turns(TURNS)
        prober.want(key, a_want("a"))
        await turns(TURNS)
        prober.want(key, a_want("b"))
        await turns(TURNS)
        assert clients.asked == [("dd", "a"), ("dd", "b")]
        clients.answers.put_nowait(ProbeCompletion(True))
        await turns(TURNS)

        prober.want(key, PendingProbes(a_want("b").subject, prober.of(key)))
        await turns(TURNS)

        assert (len(clients.asked), heard) == (2, [key])


async def test_failed_probe_repeats_after_pause_and_is_reported_once():
    clients, key = Clients(), deployment_key("ns", "dd")
    async with a_prober(clients) as (prober, heard):
        prober.want(key, a_want("a"))
        for sent in range(2, 5):
            clients.answers.put_nowait(REFUSED)
            await clients.until(sent)
        assert heard == [key]
        clients.answers.put_nowait(ProbeFailure(500, "something else"))
        await clients.until(5)
        clients.answers.put_nowait(ProbeCompletion(True))
        await turns(TURNS)

    assert heard == [key] * 3


async def test_the_routers_take_turns():
    clients, key = Clients(), deployment_key("ns", "dd")
    async with a_prober(clients) as (prober, _):
        subject = msgspec.structs.replace(a_want("a").subject, addresses=("10.0.0.1", "10.0.0.2"))
        prober.want(key, PendingProbes(subject, ProbeEvidence()))
        for sent in range(2, 4):
            clients.answers.put_nowait(REFUSED)
            await clients.until(sent)

    assert clients.addresses == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


async def test_failing_deployments_leave_room_for_others():
    clients = Clients()
    async with a_prober(clients, longest_seconds=0) as (prober, _):
        for name in ("dd-0", "dd-1"):
            prober.want(deployment_key("ns", name), a_want("a"))
            clients.answers.put_nowait(REFUSED)
        await clients.until(3)
        await turns(TURNS)  # the pauses, which have no length, are over
        prober.want(deployment_key("ns", "other"), a_want("a"))
        await clients.until(4)

        assert clients.asked[3] == ("other", "a")
        assert clients.on_the_way == 2


async def test_after_a_failure_there_is_a_pause():
    clients = Clients()
    async with a_prober(clients, longest_seconds=30) as (prober, _):
        prober.want(deployment_key("ns", "dd"), a_want("a"))
        clients.answers.put_nowait(REFUSED)
        await clients.until(1)
        await turns(TURNS)
        assert (len(clients.asked), clients.on_the_way) == (1, 0)


def test_pause_is_the_shortest_again_after_an_answer():
    """Let probes be refused in virtual time, and compare the pauses before and after an answer."""
    clients = TimedClients()
    for answer in (REFUSED, REFUSED, REFUSED, ProbeCompletion(True), REFUSED, ProbeCompletion(True)):
        clients.answers.put_nowait(answer)

    async def play():
        async with a_prober(clients, longest_seconds=30) as (prober, _):
            prober.want(deployment_key("ns", "dd"), a_want("a", "b"))
            await clients.until(6)

    VirtualLoop(Kernel(1), Nanos(0)).complete(play())

    assert [worker for _, worker in clients.asked] == ["a", "a", "a", "a", "b", "b"]
    assert clients.times == [0.0, 0.5, 1.5, 3.5, 3.5, 4.0]


async def test_follower_sends_no_probes_until_it_leads_again():
    clients, key, leading = Clients(), deployment_key("ns", "dd"), []
    async with a_prober(clients, leads=lambda: bool(leading)) as (prober, _):
        prober.want(key, a_want("a"))
        await turns(TURNS)
        assert clients.asked == []
        leading.append(True)
        prober.want(key, a_want("a"))
        await turns(TURNS)
        assert clients.asked == [("dd", "a")]


async def test_probes_wanted_before_the_start_are_sent():
    clients = Clients()
    prober = Prober(clients, 1, 1.0, lambda: True, lambda key: None)
    prober.want(deployment_key("ns", "dd"), a_want("a"))
    running = asyncio.create_task(prober.run())

    await clients.until(1)

    running.cancel()
    await asyncio.wait([running])
