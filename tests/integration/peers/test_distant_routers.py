"""Tests of four peer routers whose messages take 1, 5 and 50 ms: limits, sessions, thresholds, reservations and assumed caches."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import WorkerId
from fleet.core.system_clock import SystemClock
from fleet.peers import routers as replicas
from fleet.router.kv_index.prefix_index import Knowledge
from fleet.router.tenants import admit_with_peers
from fleet.v1 import selection_pb2 as pb
from tests.support.builders import a_joined_worker, a_prompt
from tests.support.router.peer_routers import PeerRouterSetup, SeverableLink, are_connected
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("latency_ms", [1, 5, 50])]

ROUTERS = 4
LIMIT = 20  # requests per minute of the tenant


def a_worker_without_events(worker_id, role):
    joined = a_joined_worker(worker_id, role)
    return structs.replace(joined, knowledge=Knowledge.APPROXIMATE, believed_for=Nanos(600 * SECOND))


@asynccontextmanager
async def distant_links(folder, latency_ms):
    """Delay all messages to each router; router `n` is reached as `wire` with this number."""
    links = [SeverableLink(folder, number, latency_ms / 1000) for number in range(ROUTERS)]
    for link in links:
        await link.heal()
    yield
    for link in links:
        link.cut()
    await until(lambda: not any(link.open_connections for link in links))


@asynccontextmanager
async def connected_routers(folder, latency_ms, count=ROUTERS, **settings):
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(distant_links(folder, latency_ms))
        routers = [
            await opened.enter_async_context(
                PeerRouterSetup(folder, number, ROUTERS, link="wire", **settings).running()
            )
            for number in range(count)
        ]
        await until(lambda: are_connected(*routers))
        yield routers


@pytest.fixture(autouse=True)
def _meeting_soon(monkeypatch):
    monkeypatch.setattr(replicas, "DIAL_SECONDS", 0.05)


async def test_limit_of_a_tenant_holds_over_all_routers(tmp_path, latency_ms):
    """One request too many may pass for each further router, before the routers have heard of each other's."""
    async with connected_routers(tmp_path, latency_ms, limits={"acme": LIMIT}) as routers:
        await until(lambda: all(each.tenants.others == ROUTERS - 1 for each in routers))

        async def asked_of(router):
            admitted = 0
            for _ in range(LIMIT):
                with suppress(RequestRejected):
                    await admit_with_peers(router.tenants, "acme", 1, SystemClock())
                    admitted += 1
            return admitted

        admitted = sum(await asyncio.gather(*map(asked_of, routers)))

        assert LIMIT <= admitted <= LIMIT + ROUTERS - 1


async def test_sessions_have_the_same_worker_everywhere(tmp_path, latency_ms):
    """Include sessions that all routers bind at the same moment."""
    async with connected_routers(tmp_path, latency_ms, session_affinity="hard") as routers:
        contested = [router.select(session=f"contested {number}") for number in range(5) for router in routers]
        await asyncio.gather(
            *contested, *(router.select(session=f"of {place}") for place, router in enumerate(routers))
        )
        await until(lambda: all(len(each.homes()) == 5 + ROUTERS for each in routers))

        await until(lambda: all(each.homes() == routers[0].homes() for each in routers))

        for session, worker_id in routers[0].homes().items():
            assert {await each.worker_of(session) for each in routers} == {worker_id}, session


async def test_latest_thresholds_hold_at_every_router(tmp_path, latency_ms):
    async with connected_routers(tmp_path, latency_ms) as routers:
        for router, tokens in ((routers[2], 77), (routers[0], 99)):
            thresholds = structs.replace(router.server.thresholds(), remote_prefill_min_tokens=tokens)
            router.server.tune(thresholds)
            router.replicas.tuned(thresholds)
            await until(
                lambda tokens=tokens: (
                    {each.server.thresholds().remote_prefill_min_tokens for each in routers} == {tokens}
                )
            )


async def test_reservations_of_all_routers_keep_workers_free(tmp_path, latency_ms):
    """The last router sends everything to the only worker that the others do not use, and none of them forgets a release."""
    async with connected_routers(tmp_path, latency_ms) as routers:
        *others, last = routers
        leases = []
        for place, router in enumerate(others):
            leases += [(router, await router.select(pin=WorkerId(f"w{place}"))) for _ in range(6)]
        await until(lambda: last.booked_elsewhere() == len(leases))

        chosen = [await last.select() for _ in range(5)]

        assert {each.decode.worker_id for each in chosen} == {"w3"}
        leases += [(last, each) for each in chosen]
        await until(lambda: {each.booked() + each.booked_elsewhere() for each in routers} == {len(leases)})
        for router, lease in leases:
            await router.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
        await until(lambda: {each.booked() + each.booked_elsewhere() for each in routers} == {0})


async def test_later_router_is_told_what_servers_without_events_hold(tmp_path, latency_ms):
    """It is told by routers that have not sent the prompts themselves, too: the first router has ended before."""
    prompts = [a_prompt(640, first=10_000 * number) for number in range(1, 7)]
    common = {"joined": a_worker_without_events, "private": 5}
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(distant_links(tmp_path, latency_ms))
        setups = [PeerRouterSetup(tmp_path, number, ROUTERS, link="wire", **common) for number in range(3)]
        async with setups[0].running() as first:
            second = await opened.enter_async_context(setups[1].running())
            await until(lambda: are_connected(first, second))
            homes = []
            for prompt in prompts:
                selected = await first.stub.Select(pb.SelectRequest(tokens=prompt))
                homes.append(selected.decode.worker_id)
                await first.stub.Release(pb.ReleaseRequest(lease_id=selected.lease_id))
            await until(lambda: second.assumed_blocks() == first.assumed_blocks() > 0)
        later = await opened.enter_async_context(setups[2].running())
        await until(lambda: later.assumed_blocks() == second.assumed_blocks())

        found = [await later.stub.Select(pb.SelectRequest(tokens=prompt)) for prompt in prompts]

        assert [each.decode.worker_id for each in found] == homes
