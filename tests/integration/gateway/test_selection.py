"""Tests of the selection service over a real port: its reservations and their ends."""

import asyncio
import random
from contextlib import asynccontextmanager

import grpc
import pytest

from fleet.client.errors import error_of
from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.gateway.selected_requests import SelectionAwareWorkers
from fleet.gateway.selection import SelectionService
from fleet.router.machine import RouterMachine
from fleet.router.messages import WorkerLeft
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings, SelectionSettings
from fleet.v1 import selection_pb2 as pb
from fleet.v1.selection_pb2_grpc import SelectionStub
from tests.support.builders import a_joined_worker, a_prompt
from tests.support.router.fake_workers import UnusedWorkers
from tests.support.waiting import until

pytestmark = pytest.mark.integration

PROMPT = a_prompt(100)
LONG = a_prompt(1000)


class SelectionSetup:
    def __init__(self, server, service, stub, address):
        self.server = server
        self.service = service
        self.address = address
        self._stub = stub

    async def select(self, tokens=PROMPT, **fields):
        return await self._stub.Select(pb.SelectRequest(tokens=tokens, **fields), timeout=60)

    async def report(self, lease_id, **fields):
        return await self._stub.Report(pb.ReportRequest(lease_id=lease_id, **fields), timeout=60)

    async def release(self, lease_id):
        await self._stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=60)

    def booked(self):
        """Return requests and prefill tokens by worker."""
        return {
            worker.worker_id: (worker.booked_requests, worker.booked_prefill_tokens)
            for pool in self.server.status().pools
            for worker in pool.workers
        }

    async def refused(self, call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return error_of(caught.value)


@asynccontextmanager
async def a_selection_setup(*workers, limits=SelectionSettings(caller_share=1), **settings):  # noqa: B008 - frozen
    selecting = SelectionAwareWorkers(UnusedWorkers())
    server = RouterServer(RouterMachine(RouterSettings(**settings), random.Random(0)), selecting, SystemClock())
    for worker_id, role, fields in workers:
        server.hear(a_joined_worker(worker_id, role, **fields))
    service = SelectionService(server, selecting, limits, tenant_secret=b"")
    port = grpc.aio.server()
    service.add(port)
    address = f"127.0.0.1:{port.add_insecure_port('127.0.0.1:0')}"
    await port.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield SelectionSetup(server, service, SelectionStub(channel), address)
    await port.stop(0)


def decode(worker_id, **fields):
    return worker_id, Role.DECODE, fields


async def test_selection_reserves_at_once_and_release_frees_it():
    async with a_selection_setup(decode("d1"), decode("d2")) as brain:
        first = await brain.select()
        second = await brain.select(tokens=a_prompt(100, first=5000))

        assert {first.decode.worker_id, second.decode.worker_id} == {"d1", "d2"}
        assert first.decode.address
        assert first.uncached_tokens == 100
        assert brain.booked() == {"d1": (1, 100), "d2": (1, 100)}
        for selected in (first, second, first):
            await brain.release(selected.lease_id)
        assert brain.booked() == {"d1": (0, 0), "d2": (0, 0)}


async def test_concurrent_selections_see_each_others_reservations():
    workers = [decode(f"d{number}") for number in range(8)]
    async with a_selection_setup(*workers) as brain, grpc.aio.insecure_channel(brain.address) as channel:
        other = SelectionSetup(brain.server, brain.service, SelectionStub(channel), brain.address)
        prompts = [a_prompt(100, first=1000 * number) for number in range(1, 81)]

        async with asyncio.TaskGroup() as callers:
            for number, prompt in enumerate(prompts):
                callers.create_task((brain, other)[number % 2].select(tokens=prompt))

        # Each placement saw all earlier reservations; equal views would have chosen the same worker.
        assert brain.booked() == {worker_id: (10, 1000) for worker_id, *_ in workers}


async def test_first_tokens_free_prefill_and_later_ones_add_load():
    async with a_selection_setup(decode("d1")) as brain:
        selected = await brain.select()
        await brain.report(selected.lease_id, answer_tokens=1)
        assert brain.booked() == {"d1": (1, 0)}
        blocks = brain.server.status().pools[0].workers[0].booked_blocks
        await brain.report(selected.lease_id, answer_tokens=64)
        assert brain.server.status().pools[0].workers[0].booked_blocks == blocks + 2


async def test_long_prompt_gets_a_pair_and_frees_each_share_in_turn():
    async with a_selection_setup(("p1", Role.PREFILL, {}), decode("d1")) as brain:
        selected = await brain.select(tokens=LONG, max_tokens=10)
        assert (selected.prefill.worker_id, selected.decode.worker_id) == ("p1", "d1")
        assert selected.kv_path == "store"
        assert brain.booked() == {"p1": (1, 1000), "d1": (1, 0)}

        await brain.report(selected.lease_id, prefilled=True)
        assert brain.booked() == {"p1": (0, 0), "d1": (1, 0)}
        await brain.report(selected.lease_id, answer_tokens=3)
        await brain.release(selected.lease_id)
        assert brain.booked() == {"p1": (0, 0), "d1": (0, 0)}


async def test_lease_ends_unless_it_is_renewed():
    async with a_selection_setup(decode("d1")) as brain:
        forgotten = await brain.select(lease_ms=300)
        kept = await brain.select(tokens=a_prompt(50, first=9000), lease_ms=60_000)

        await until(lambda: brain.booked() == {"d1": (1, 50)})
        gone = await brain.refused(brain.report(forgotten.lease_id, answer_tokens=1))
        assert gone.reason is Reason.REQUEST_NOT_FOUND
        assert (await brain.report(kept.lease_id)).lease_ms == 60_000


async def test_reservation_ends_with_its_worker():
    async with a_selection_setup(decode("d1"), decode("d2")) as brain:
        selected = await brain.select()
        brain.server.hear(WorkerLeft(worker_id=WorkerId(selected.decode.worker_id)))
        gone = await brain.refused(brain.report(selected.lease_id))
        assert gone.reason is Reason.REQUEST_NOT_FOUND
        assert set(brain.booked().values()) == {(0, 0)}


async def test_pair_reservation_ends_when_its_decode_worker_is_lost():
    async with a_selection_setup(("p1", Role.PREFILL, {}), decode("d1"), decode("d2")) as brain:
        selected = await brain.select(tokens=LONG, max_tokens=10)
        assert selected.prefill.worker_id == "p1"
        brain.server.hear(WorkerLeft(worker_id=WorkerId(selected.decode.worker_id)))
        await brain.report(selected.lease_id, prefilled=True)

        await until(lambda: set(brain.booked().values()) == {(0, 0)})
        gone = await brain.refused(brain.report(selected.lease_id))
        assert gone.reason is Reason.REQUEST_NOT_FOUND


async def test_lease_is_kept_without_its_explanation():
    async with a_selection_setup(decode("d1"), explained_requests=1) as brain:
        leases = [(await brain.select(tokens=a_prompt(100, first=5000 * number))).lease_id for number in range(4)]
        for lease_id in leases:
            await brain.report(lease_id, answer_tokens=1)
        assert brain.booked() == {"d1": (4, 0)}


async def test_worker_lost_before_the_answer_is_named_in_the_error(monkeypatch):
    async with a_selection_setup(decode("d1")) as brain:
        opened = brain.server.open

        def open_and_lose(arrived, stream):
            opened(arrived, stream)
            brain.server.hear(WorkerLeft(worker_id=WorkerId("d1")))

        monkeypatch.setattr(brain.server, "open", open_and_lose)

        lost = await brain.refused(brain.select())

        assert lost.reason is Reason.WORKER_LOST
        assert brain.service.bookings == {}


async def test_leases_do_not_delay_the_router_end():
    async with a_selection_setup(decode("d1")) as brain:
        await brain.select()
        brain.service.drain()
        assert await brain.server.drain(Nanos(0)) == 0


async def test_caller_that_stops_waiting_reserves_nothing():
    workers = [decode(name, max_running=1) for name in ("d1", "d2")]
    async with a_selection_setup(*workers, oversubscribe=1.0) as brain:
        await brain.select(pin="d1")
        late = await brain.refused(brain.select(tokens=a_prompt(9, first=700), timeout_ms=100, pin="d1"))
        assert late.reason is Reason.DEADLINE_PASSED
        assert brain.server.status().queued == 0
        assert brain.booked() == {"d1": (1, 100), "d2": (0, 0)}


async def test_leases_of_one_caller_stay_within_its_share():
    workers = [decode(name, max_running=4) for name in ("d1", "d2")]
    async with a_selection_setup(*workers, oversubscribe=2.0, limits=SelectionSettings(caller_share=0.5)) as brain:
        leases = [(await brain.select(tokens=a_prompt(9, first=100 * number))).lease_id for number in range(8)]

        over = await brain.refused(brain.select(timeout_ms=50))

        assert (over.reason, over.retry_after_seconds) == (Reason.QUEUE_FULL, 1.0)
        assert "selection.caller_share" in over.message
        await brain.release(leases[0])
        assert (await brain.select()).lease_id
        assert sum(requests for requests, _ in brain.booked().values()) == 8


async def test_expired_lease_frees_its_share():
    limits = SelectionSettings(caller_share=0.01)
    async with a_selection_setup(decode("d1"), limits=limits) as brain:
        await brain.select(lease_ms=50)
        assert (await brain.refused(brain.select())).reason is Reason.QUEUE_FULL

        await until(lambda: brain.booked() == {"d1": (0, 0)})

        assert (await brain.select()).lease_id


async def test_leases_and_waits_beyond_the_limits_are_rejected():
    async with a_selection_setup(decode("d1"), limits=SelectionSettings(max_lease_ms=5000, max_wait_ms=2000)) as brain:
        assert (await brain.select()).lease_ms == 5000
        for field in ("lease_ms", "timeout_ms"):
            refused = await brain.refused(brain.select(**{field: 5001}))
            assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokens": b""}, "tokens"),
        ({"tokens": b"12345"}, "tokens"),
        ({"placement": "nowhere"}, "placement"),
        ({"model": "other"}, "model"),
        ({"lease_ms": 60_001}, "lease_ms"),
        ({"timeout_ms": 60_001}, "timeout_ms"),
        ({"session": "s" * 300}, "session"),
        ({"labels": ["l"] * 20}, "labels"),
        ({"priority": 1000}, "priority"),
    ],
)
async def test_invalid_fields_are_named_and_reserve_nothing(fields, field):
    async with a_selection_setup(decode("d1")) as brain:
        refused = await brain.refused(brain.select(**fields))
        assert refused.field == field
        assert brain.booked() == {"d1": (0, 0)}


async def test_unlimited_answer_reserves_what_the_prompt_leaves():
    async with a_selection_setup(("p1", Role.PREFILL, {}), decode("d1")) as brain:
        selected = await brain.select(tokens=LONG)
        await brain.report(selected.lease_id, prefilled=True)
        await brain.report(selected.lease_id, answer_tokens=5)
        assert brain.booked() == {"p1": (0, 0), "d1": (1, 0)}


async def test_tokens_beyond_the_request_are_not_counted():
    async with a_selection_setup(decode("d1")) as brain:
        selected = await brain.select(max_tokens=64)
        for _ in range(5):
            await brain.report(selected.lease_id, answer_tokens=60)
        # These are the blocks of the prompt, and two of the answer.
        assert brain.server.status().pools[0].workers[0].booked_blocks == 4 + 2
