"""Tests of two peer routers on one event loop over real sockets: message rate, sessions, and owners of leases."""

import asyncio
import random
from contextlib import suppress

import grpc
import pytest

from fleet.client.errors import error_of
from fleet.core.clock import SECOND
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import Incarnation, WorkerId
from fleet.core.system_clock import SystemClock
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.membership.messages import MemberJoined, Register
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.peers import routers as replicas
from fleet.peers.messages import encode_bookings
from fleet.peers.routers import PeerLimits, PeerRouters
from fleet.router.machine import RouterMachine
from fleet.router.messages import ReservationTotals
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from fleet.router.tenants import Tenants, TenantSettings, admit_with_peers
from fleet.v1 import replica_pb2
from fleet.v1 import selection_pb2 as pb
from kvstore.net.frames import connect, open_server
from tests.support.builders import a_prompt
from tests.support.kvstore.builders import ManualClock
from tests.support.router.peer_routers import (
    CountingRouterServer,
    NoWorkers,
    PeerRouterSetup,
    SeverableLink,
    are_connected,
)
from tests.support.waiting import pace, stays, until

pytestmark = pytest.mark.integration


class SilentRouter:
    """A router that accepts connections and answers nothing."""

    def received(self, payload):
        pass

    def resumed(self):
        pass

    def lost(self, cause):
        pass


@pytest.fixture(autouse=True)
def _meeting_soon(monkeypatch):
    monkeypatch.setattr(replicas, "DIAL_SECONDS", 0.05)


async def test_idle_routers_update_peers_twice_a_second(tmp_path):
    """Check that receiving an update is not itself an update to send."""
    async with PeerRouterSetup(tmp_path, 0, 2).running() as a, PeerRouterSetup(tmp_path, 1, 2).running() as b:
        await until(lambda: are_connected(a, b) and a.server.times and b.server.times)
        a.server.times = b.server.times = 0
        clock = asyncio.get_running_loop()
        began = clock.time()

        selected = await a.select()
        await until(lambda: b.booked_elsewhere() == 1)

        def few() -> bool:
            """Return whether there were no updates but the periodic ones and that of the reservation."""
            periodic = 1 + (clock.time() - began) / replicas.FULL_STATE_SECONDS
            return b.server.times <= 1 + periodic and a.server.times <= periodic

        await stays(few, 0.2, "routers that answer an update with an update would send hundreds meanwhile")
        assert b.server.booked() == {}
        await a.stub.Release(pb.ReleaseRequest(lease_id=selected.lease_id))
        await until(lambda: b.booked_elsewhere() == 0)


async def test_few_of_many_requests_change_in_one_message(tmp_path, monkeypatch):
    """Send the third of three changes to 17 running requests at once, and the two before it in the same message."""
    monkeypatch.setattr(replicas, "FULL_STATE_SECONDS", 600.0)
    monkeypatch.setattr(replicas, "FEW_CHANGES_SECONDS", 600.0)
    monkeypatch.setattr(replicas, "SILENCE_SECONDS", 600.0)
    async with PeerRouterSetup(tmp_path, 0, 2).running() as a, PeerRouterSetup(tmp_path, 1, 2).running() as b:
        await until(lambda: are_connected(a, b))
        with monkeypatch.context() as every_change_counts:
            every_change_counts.setattr(replicas, "FEW_CHANGES", 0)
            for _ in range(16):
                await a.select()
            await until(lambda: b.booked_elsewhere() == 16)
        await a.select()
        await until(lambda: b.booked_elsewhere() == 17)
        b.server.times = 0

        for _ in range(3):
            await a.select()
            await pace(2 * replicas.SEND_SECONDS, "the next change comes after a message of this one would be sent")
        await until(lambda: b.booked_elsewhere() == 20)

        assert b.server.times == 1


@pytest.mark.parametrize("request_fields", [{"tokens": a_prompt(2000)}, {"tokens": a_prompt(10), "session": "s1"}])
async def test_long_prompts_and_sessions_are_told_at_once(request_fields, tmp_path, monkeypatch):
    """Send them without the wait for more changes, so that the next request which begins alike goes to the same worker."""
    monkeypatch.setattr(replicas, "FULL_STATE_SECONDS", 600.0)
    monkeypatch.setattr(replicas, "FEW_CHANGES_SECONDS", 600.0)
    monkeypatch.setattr(replicas, "SILENCE_SECONDS", 600.0)
    monkeypatch.setattr(replicas, "FEW_CHANGES", 1000)
    routers = [PeerRouterSetup(tmp_path, number, 2, session_affinity="hard").running() for number in range(2)]
    async with routers[0] as a, routers[1] as b:
        await until(lambda: are_connected(a, b))
        await a.select()
        await until(lambda: b.booked_elsewhere() == 1)

        first = await a.stub.Select(pb.SelectRequest(**request_fields))
        await until(lambda: b.booked_elsewhere() == 2)
        second = await b.stub.Select(pb.SelectRequest(**request_fields))

        assert second.decode.worker_id == first.decode.worker_id


async def test_session_is_known_to_all_and_to_later_routers(tmp_path):
    hard = {"session_affinity": "hard"}
    async with PeerRouterSetup(tmp_path, 0, 3, **hard).running() as a:
        async with PeerRouterSetup(tmp_path, 1, 3, **hard).running() as b:
            await until(lambda: a.replicas.links and b.replicas.links)
            homes = {f"s{number}": await (a, b)[number % 2].worker_of(f"s{number}") for number in range(12)}
            assert len(set(homes.values())) > 1
            await until(lambda: all(len(each.server.sessions) == len(homes) for each in (a, b)))
            assert {session: await b.worker_of(session) for session in homes} == homes
        async with PeerRouterSetup(tmp_path, 2, 3, **hard).running() as c:
            await until(lambda: len(c.server.sessions) == len(homes))

            assert {session: await c.worker_of(session) for session in homes} == homes


async def test_later_router_learns_registrations_before_catch_up(tmp_path):
    worker = MemberJoined(worker_id=WorkerId("w9"), incarnation=Incarnation("1"), address="unix:/w9")
    async with PeerRouterSetup(tmp_path, 0, 2).running() as a:
        a.members.register(Register(worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address))
        async with PeerRouterSetup(tmp_path, 1, 2).running() as b:
            async with asyncio.timeout(60):
                await b.replicas.caught_up()

            assert b.members.members == {worker.worker_id: worker}
            assert b.members.registrations() == [], "a router forwards no registration of a peer"


async def test_state_of_another_router_does_not_end_catch_up(tmp_path):
    """Check that only the process at the Unix socket counts, and not a router that is no process of this command."""
    async with PeerRouterSetup(tmp_path, 1, 2).running() as b:
        await until((tmp_path / "1").exists)
        other = await connect(f"unix:{tmp_path}/1", lambda _: SilentRouter())
        hello = replica_pb2.ReplicaMessage(hello=replica_pb2.ReplicaHello(router_id="other"))
        held = {WorkerId("w0"): ReservationTotals(prefill_tokens=0, blocks=1.0, requests=1)}
        for message in (hello, encode_bookings(held)):
            other.send(message.SerializeToString())
        await until(lambda: b.booked_elsewhere() == 1)
        waiting = asyncio.create_task(b.replicas.caught_up())
        await stays(lambda: not waiting.done(), 0.05, "the state of the other router has arrived already")

        async with PeerRouterSetup(tmp_path, 0, 2).running(), asyncio.timeout(60):
            await waiting


async def test_routers_send_a_known_prompt_to_the_same_worker(tmp_path):
    """Check it before the engine reports the prompt, with idle workers, for a later router too, and until the end."""
    async with PeerRouterSetup(tmp_path, 0, 3).running() as a:
        async with PeerRouterSetup(tmp_path, 1, 3).running() as b:
            await until(lambda: a.replicas.links and b.replicas.links)
            first = await a.stub.Select(pb.SelectRequest(tokens=a_prompt(2000)))
            await until(lambda: b.booked_elsewhere() == 1)
            second = await b.stub.Select(pb.SelectRequest(tokens=a_prompt(2000)))
            assert second.decode.worker_id == first.decode.worker_id
            await b.stub.Release(pb.ReleaseRequest(lease_id=second.lease_id))
        async with PeerRouterSetup(tmp_path, 2, 3).running() as c:
            await until(lambda: c.booked_elsewhere() == 1)
            third = await c.stub.Select(pb.SelectRequest(tokens=a_prompt(2000)))
            assert third.decode.worker_id == first.decode.worker_id
            for router, lease in ((c, third), (a, first)):
                await router.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
            await until(lambda: c.booked_elsewhere() == 0)
            assert c.foretold() == 0


async def test_reconnected_routers_agree_on_sessions(tmp_path):
    """Keep the latest binding, whoever made it, without a further request."""
    wires = [SeverableLink(tmp_path, number) for number in range(2)]
    for wire in wires:
        await wire.heal()
    async with (
        PeerRouterSetup(tmp_path, 0, 2, link="wire").running() as a,
        PeerRouterSetup(tmp_path, 1, 2, link="wire").running() as b,
    ):
        await until(lambda: are_connected(a, b))
        for session in ("first a", "first b"):
            await a.select(session=session, pin=WorkerId("w3"))
        await until(lambda: a.homes() == b.homes() == {"first a": "w3", "first b": "w3"})
        for wire in wires:
            wire.cut()
        await until(lambda: not a.replicas.links and not b.replicas.links)
        for router, session, worker in (
            (a, "first a", "w0"),
            (b, "first a", "w1"),
            (b, "first b", "w1"),
            (a, "first b", "w0"),
        ):
            await router.select(session=session, pin=WorkerId(worker))
        assert a.homes() == {"first a": "w0", "first b": "w0"}
        assert b.homes() == {"first a": "w1", "first b": "w1"}

        for wire in wires:
            await wire.heal()

        await until(lambda: a.homes() == b.homes() == {"first a": "w1", "first b": "w0"})
    for wire in wires:
        wire.cut()


async def test_session_stamps_keep_nanoseconds_of_unix_time(tmp_path):
    """Order two bindings that routers make within one millisecond before they have met."""
    clock, unix_ns = ManualClock(), 1_700_000_000_000_999_999
    settings = RouterSettings(router_id="r", replicas_listen=f"unix:{tmp_path}/r", replicas=(f"unix:{tmp_path}/none",))
    server = RouterServer(RouterMachine(settings, random.Random(1)), SelectionAwareWorkers(NoWorkers()), clock)
    members = RegistryServer(MembershipSettings(lease_ms=60_000), clock)
    peers = PeerRouters(settings, server, members, None, lambda: "", now_unix_ns=lambda: unix_ns)
    running = asyncio.create_task(peers.run())
    await until((tmp_path / "r").exists)

    server.sessions.bind(("", "s"), WorkerId("w0"), clock.now())

    (binding,) = server.sessions.latest()
    assert binding.stamp == unix_ns
    running.cancel()
    await asyncio.wait([running])


async def test_lease_can_be_reported_and_released_at_any_router(tmp_path):
    async with PeerRouterSetup(tmp_path, 0, 2).running() as a, PeerRouterSetup(tmp_path, 1, 2).running() as b:
        await until(lambda: are_connected(a, b))
        selected = await a.select(lease_ms=40_000)

        told = await b.stub.Report(pb.ReportRequest(lease_id=selected.lease_id, answer_tokens=1))

        assert told.lease_ms == 40_000
        worker = next(iter(a.server.booked().values()))
        assert (worker.requests, worker.prefill_tokens) == (1, 0)
        await b.stub.Release(pb.ReleaseRequest(lease_id=selected.lease_id))
        assert (a.booked(), b.booked()) == (0, 0)
        for router in (a, b):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.stub.Report(pb.ReportRequest(lease_id=selected.lease_id))
            assert error_of(caught.value).reason is Reason.REQUEST_NOT_FOUND
            await router.stub.Release(pb.ReleaseRequest(lease_id=selected.lease_id))


async def test_hung_router_does_not_delay_lease_reports(tmp_path, monkeypatch):
    """Let two routers answer, while the third accepts connections and stays silent."""
    monkeypatch.setattr(replicas, "ANSWER_SECONDS", 60.0)
    silent = open_server("replicas", f"unix:{tmp_path}/2", lambda _: SilentRouter())
    async with silent, PeerRouterSetup(tmp_path, 0, 3).running() as a, PeerRouterSetup(tmp_path, 1, 3).running() as b:
        await until(lambda: are_connected(a, b, others=1))
        selected = await a.select()

        await b.stub.Report(pb.ReportRequest(lease_id=selected.lease_id), timeout=20)


async def test_reservations_of_a_dead_router_are_released(tmp_path):
    async with PeerRouterSetup(tmp_path, 0, 2).running() as a:
        async with PeerRouterSetup(tmp_path, 1, 2).running() as b:
            await until(lambda: are_connected(a, b))
            await b.select(pin=WorkerId("w0"))
            await until(lambda: a.booked_elsewhere() == 1)

        await until(lambda: a.booked_elsewhere() == 0)


def a_limited_router(address, others, limit=12):
    """Run a router alone that shares tenant limits."""
    clock = SystemClock()
    tenants = Tenants({"acme": TenantSettings(requests_per_minute=limit)}, clock.now())
    settings = RouterSettings(router_id=address, replicas_listen=address, replicas=others)
    router = CountingRouterServer(RouterMachine(settings, random.Random(1)), SelectionAwareWorkers(NoWorkers()), clock)
    members = RegistryServer(MembershipSettings(lease_ms=60_000), clock)
    shared = PeerRouters(settings, router, members, None, lambda: "", limits=PeerLimits(tenants, clock))
    return tenants, shared, clock


async def admitted(tenants, clock, count):
    number = 0
    for _ in range(count):
        with suppress(RequestRejected):
            await admit_with_peers(tenants, "acme", 1, clock)
            number += 1
    return number


async def test_silent_router_delays_no_rate_limit(tmp_path):
    """Wait for the silent router once; then the others count without it."""
    address, deaf = f"unix:{tmp_path}/r", f"unix:{tmp_path}/deaf"
    async with open_server("listen", deaf, lambda _: SilentRouter()):
        tenants, shared, clock = a_limited_router(address, (deaf,))
        running = asyncio.create_task(shared.run())
        await until(lambda: tenants.others == 1)
        began = clock.now()

        assert await admitted(tenants, clock, 20) == 12

        assert tenants.others == 0
        assert clock.now() - began < 60 * SECOND
        running.cancel()
        await asyncio.wait([running])


async def test_later_router_shares_the_rate_limit(tmp_path):
    one, other = f"unix:{tmp_path}/one", f"unix:{tmp_path}/other"
    tenants, shared, clock = a_limited_router(one, (other,))
    running = [asyncio.create_task(shared.run())]
    assert await admitted(tenants, clock, 8) == 8
    later, shared_later, _ = a_limited_router(other, (one,))
    running.append(asyncio.create_task(shared_later.run()))
    await until(lambda: tenants.others == later.others == 1 and later.left(clock.now()))

    let_in_by_both = await admitted(later, clock, 10) + await admitted(tenants, clock, 10)

    assert 4 <= let_in_by_both <= 5, "one request too many may pass before the other router knows"
    for each in running:
        each.cancel()
    await asyncio.wait(running)
