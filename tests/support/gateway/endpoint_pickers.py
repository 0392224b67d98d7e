"""Endpoint picker for tests: it listens on a real port and places by a real router; the test plays the gateway."""

import asyncio
import random
from contextlib import asynccontextmanager
from functools import cache

from prometheus_client import CollectorRegistry

from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.generation import Generation
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.gateway.endpoint_picker import EndpointPicker, open_endpoint_picker
from fleet.gateway.prompts import ApiPromptReader
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.gateway.selection import SelectionService
from fleet.router.machine import RouterMachine
from fleet.router.messages import WorkerJoined
from fleet.router.server import RouterServer
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.router import RouterSettings, SelectionSettings
from fleet.router.tenants import Tenants
from tests.support.builders import MODEL, a_description
from tests.support.gateway.envoy import a_completion, a_gateway
from tests.support.router.fake_workers import UnusedWorkers
from tests.support.waiting import until

LONG = [number * number % 401 + 50 for number in range(1000)]
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


a_codec = cache(load_codec)


class PickerSetup:
    """Holds a router with its endpoint picker, and a gateway that calls the picker."""

    def __init__(self, machine, router, picker, selection, gateway, tenants):
        self.machine = machine
        self.router = router
        self.selection = selection
        self.picker = picker
        self.gateway = gateway
        self.tenants = tenants

    def request(self):
        return self.gateway.request()

    async def one_behind_another(self):
        """Send two requests to a worker that takes one at a time; return the running and the queued request."""
        first, waiting = self.request(), self.request()
        await first.ask(a_completion())
        await waiting.head()
        await waiting.body(a_completion())
        await until(lambda: self.router.status().queued == 1)
        return first, waiting

    def booked(self):
        """Return the number of reserved requests by worker; workers without one are left out."""
        pools = self.router.status().pools
        return {each.worker_id: each.booked_requests for pool in pools for each in pool.workers if each.booked_requests}

    def blocks(self):
        return sum(each.booked_blocks for pool in self.router.status().pools for each in pool.workers)

    async def idle(self):
        await until(lambda: not self.booked() and not self.picker.held_bytes)
        assert self.router.status().active == 0


def a_joined_endpoint(worker_id, address, role=Role.DECODE, **fields):
    return WorkerJoined(description=a_description(worker_id=worker_id, role=role, **fields), address=address)


D1 = a_joined_endpoint("d1", "10.0.0.1:8000")
D2 = a_joined_endpoint("d2", "10.0.0.2:8000")
ONE_AT_A_TIME = a_joined_endpoint("d1", "10.0.0.1:8000", max_running=1)
P1 = a_joined_endpoint("p1", "10.0.1.1:8000", Role.PREFILL)


@asynccontextmanager
async def a_picker_setup(
    model_dir, *workers, picker=None, standing=None, tenants=None, connection_seconds=0, **settings
):
    """Open a router with these workers and an endpoint picker. The workers need not exist, because the router sends them nothing."""
    clock, threads = SystemClock(), TokenizerThreads()
    known = Tenants(tenants or {}, clock.now())
    selecting = SelectionAwareWorkers(UnusedWorkers())
    machine = RouterMachine(RouterSettings(**settings), random.Random(0))
    router = RouterServer(machine, selecting, clock)
    for worker in workers:
        router.hear(worker)
    generation = Generation(
        router,
        {MODEL: a_codec(model_dir)},
        clock=clock,
        tenants=known,
        tenant_secret=b"",
        metrics=RouterProcessMetrics(CollectorRegistry()),
        threads=threads,
    )
    selection = SelectionService(router, selecting, SelectionSettings(), tenant_secret=b"")
    limits = EndpointPickerSettings(**{"host": "127.0.0.1", "port": 0, **(picker or {})})
    made = EndpointPicker(limits, router, selection, ApiPromptReader(generation, None, known, clock), standing)
    async with (
        asyncio.timeout(60),
        open_endpoint_picker(limits, made, connection_seconds=connection_seconds),
        a_gateway(made.address) as gateway,
    ):
        yield PickerSetup(machine, router, made, selection, gateway, known)
    threads.close()
