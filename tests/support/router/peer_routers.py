"""Peer routers in one process: routers with their selection services, and links between two routers that a test can cut."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import grpc

from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.gateway.selection import SelectionService
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.peers.routers import PeerLimits, PeerRouters
from fleet.router.machine import RouterMachine
from fleet.router.messages import PeerReserved
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings, SelectionSettings
from fleet.router.tenants import Tenants, TenantSettings
from fleet.v1 import selection_pb2 as pb
from fleet.v1.selection_pb2_grpc import SelectionStub
from tests.support.builders import a_joined_worker, a_prompt

WORKERS = ("w0", "w1", "w2", "w3")


class NoWorkers:
    def start(self, worker_id, start):
        raise AssertionError("work was sent")

    def cancel(self, worker_id, request_id):
        raise AssertionError("work was cancelled that was never sent")


class CountingRouterServer(RouterServer):
    """Counts the peer reservations that the router server receives."""

    times = 0

    def hear(self, event):
        self.times += isinstance(event, PeerReserved)
        super().hear(event)


class SeverableLink:
    """Forwards connections from one socket to another unless the link is cut; bytes arrive `latency_seconds` later."""

    def __init__(self, folder, number, latency_seconds=0.0):
        self._latency_seconds = latency_seconds
        self._from, self._to = f"{folder}/wire{number}", f"{folder}/{number}"
        self._writers = []
        self.open_connections = 0

    async def heal(self):
        self._server = await asyncio.start_unix_server(self._passing, self._from)

    def cut(self):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _passing(self, reader, writer):
        self.open_connections += 1
        try:
            beyond, to = await asyncio.open_unix_connection(self._to)
        except OSError:  # the peer does not listen yet
            writer.transport.abort()
        else:
            self._writers += [writer, to]
            await asyncio.gather(self._pass(reader, to), self._pass(beyond, writer))
        self.open_connections -= 1

    async def _pass(self, reader, writer):
        def write(piece):
            if not writer.is_closing():
                writer.write(piece)

        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                if self._latency_seconds:
                    loop.call_later(self._latency_seconds, write, piece)
                else:
                    write(piece)
        loop.call_later(self._latency_seconds, writer.close)


class PeerRouterSetup:
    """Holds a router with its selection service on its own port."""

    def __init__(self, folder, number, count, *, link="", joined=a_joined_worker, limits=None, private=0, **settings):
        """Create a router, which dials each peer at the path `link` with the number of the peer.

        `joined` makes the event by which a worker joins. `limits` has the requests per minute by tenant. `private` is
        the fingerprint of the routers' secret.
        """
        others = tuple(f"unix:{folder}/{link}{each}" for each in range(count) if each != number)
        settings = RouterSettings(
            router_id=f"r{number}", replicas_listen=f"unix:{folder}/{number}", replicas=others, **settings
        )
        selecting = SelectionAwareWorkers(NoWorkers())
        self.machine = RouterMachine(settings, random.Random(number))
        self.server = CountingRouterServer(self.machine, selecting, SystemClock())
        for worker_id in WORKERS:
            self.server.hear(joined(worker_id, Role.BOTH))
        self.selection = SelectionService(self.server, selecting, SelectionSettings(), tenant_secret=b"")
        self.members = RegistryServer(MembershipSettings(lease_ms=60_000), SystemClock())
        clock = SystemClock()
        tenants = {name: TenantSettings(requests_per_minute=limit) for name, limit in (limits or {}).items()}
        self.tenants = Tenants(tenants, clock.now())
        self.replicas = PeerRouters(
            settings,
            self.server,
            self.members,
            self.selection,
            lambda: "",
            limits=PeerLimits(self.tenants, clock) if limits else None,
            private=private,
        )
        self.selection.others = self.replicas
        self._asked = 0

    @asynccontextmanager
    async def running(self):
        port = grpc.aio.server()
        self.selection.add(port)
        address = f"127.0.0.1:{port.add_insecure_port('127.0.0.1:0')}"
        await port.start()
        running = asyncio.create_task(self.replicas.run())
        async with grpc.aio.insecure_channel(address) as channel:
            self.stub = SelectionStub(channel)
            yield self
        running.cancel()
        await asyncio.wait([running])
        await port.stop(0)

    async def select(self, **fields):
        self._asked += 1
        return await self.stub.Select(pb.SelectRequest(tokens=a_prompt(100, first=1000 * self._asked), **fields))

    async def worker_of(self, session):
        selected = await self.select(session=session)
        await self.stub.Release(pb.ReleaseRequest(lease_id=selected.lease_id))
        return selected.decode.worker_id

    def foretold(self):
        """Return the number of peer prompts of all workers."""
        return sum(len(worker.peer_prompts.chains()) for worker in self.machine.registry)

    def assumed_blocks(self):
        """Return the number of blocks in the assumed caches of all workers."""
        return sum(len(worker.assumed) for worker in self.machine.registry)

    def homes(self):
        """Return the worker that each session is bound to, by session."""
        return {binding.key[1]: binding.worker_id for binding in self.server.sessions.latest()}

    def booked(self):
        return sum(worker.booked_requests for pool in self.server.status().pools for worker in pool.workers)

    def booked_elsewhere(self):
        return sum(worker.booked_elsewhere for pool in self.server.status().pools for worker in pool.workers)


def are_connected(*routers, others=0):
    return all(len(each.replicas.links) == len(routers) - 1 + others for each in routers)
