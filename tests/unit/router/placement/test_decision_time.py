"""Time limits of one placement decision, and of the processing of KV events."""

import random
import time

import pytest

from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.core.work import KvEvents, KvRemoved, KvStored
from fleet.router.machine import RouterMachine
from fleet.router.messages import KvChanged, RequestCancelled
from fleet.router.placement.decision import Decision, decide
from fleet.router.placement.policies.built_in import BUILT_IN
from fleet.router.policy import LIMIT, REQUESTS
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest
from fleet.v1 import worker_pb2
from fleet.wire.worker import decode_worker_message, encode_worker_message
from kvstore.block import chain
from tests.support.builders import a_joined_worker, an_arrival
from tests.support.router.machine_driver import START

BLOCK = 64
TRIES = 20  # only one of these rounds must keep the budget, because other processes use the core, too
BUDGET_SECONDS = 2e-3
"""Processor time for placing a prompt of 32k tokens with 64 workers, including its hashes. A quiet core takes a fifth of it. Code whose
work grows with workers × blocks exceeds it."""


@pytest.mark.parametrize("name", BUILT_IN.policies)
def test_decision_over_64_workers_is_within_budget(name):
    rng = random.Random(0)
    machine = RouterMachine(RouterSettings(policy=name), random.Random(0))
    shared = rng.randbytes(4 * 16_384)
    held = tuple(chain(shared, BLOCK))
    for number in range(64):
        worker_id = f"w{number}"
        machine.handle(
            a_joined_worker(worker_id, Role.BOTH, block_tokens=BLOCK, max_model_len=65_536, kv_blocks=100_000), START
        )
        event = KvStored(held[: rng.randrange(1, len(held))])
        machine.handle(KvChanged(worker_id=WorkerId(worker_id), events=(event,)), START)

    def p99() -> float:
        seconds = []
        for number in range(100):
            arrival = an_arrival(request_id=f"r{number}", tokens=shared + rng.randbytes(4 * 16_384))
            live = LiveRequest(arrived=arrival, seq=number, since=START)
            began = time.thread_time()
            candidate_table = machine.registry.candidate_table(live)
            if number % 2:  # one worker is full, each time another one
                candidate_table.columns[REQUESTS, number % 64] = candidate_table.columns[LIMIT, number % 64]
            outcome = decide(live.placement_request(START), candidate_table, machine.policy, machine.settings, rng)
            seconds.append(time.thread_time() - began)
            assert isinstance(outcome, Decision)
        return sorted(seconds)[98]

    assert any(p99() < BUDGET_SECONDS for _ in range(TRIES))


BLOCKS, WORKERS = 1_000_000, 512
EVENT_SECONDS = 50e-6
"""Processor time for a KV event of eight blocks from a worker: with this time, 10,000 events a second take half a core. A quiet core
takes a third of it."""


def test_ten_thousand_kv_events_leave_time_for_requests():
    """Process KV events with stored and removed blocks, and place a request after each ten events; limit the time of both."""
    rng = random.Random(0)
    machine = RouterMachine(RouterSettings(), random.Random(0))
    for number in range(WORKERS):
        machine.handle(a_joined_worker(f"w{number}", Role.BOTH, block_tokens=BLOCK, kv_blocks=100_000), START)
    prompt = rng.randbytes(4 * 2048)
    shared = tuple(chain(prompt, BLOCK))
    held = [tuple(rng.randbytes(16) for _ in range(BLOCKS // WORKERS + 1)) for _ in range(WORKERS)]
    for number, own in enumerate(held):
        event = KvChanged(worker_id=WorkerId(f"w{number}"), events=(KvStored(shared[: number % 33]), KvStored(own)))
        machine.handle(event, START)
    assert len(machine.registry.index) >= BLOCKS

    told: list[tuple[WorkerId, bytes]] = []
    for number in range(2000):
        worker = rng.randrange(WORKERS)
        first = rng.randrange(0, BLOCKS // WORKERS - 8)
        blocks = held[worker][first : first + 8] if number % 4 else tuple(rng.randbytes(16) for _ in range(8))
        for kind in (KvRemoved, KvStored) if number % 4 else (KvStored, KvRemoved):
            message = encode_worker_message(KvEvents(sequence=0, events=(kind(blocks),)))
            told.append((WorkerId(f"w{worker}"), message.SerializeToString()))

    def rounds() -> tuple[float, float]:
        """Return the mean seconds of an event, and the 99th percentile of the seconds of a request."""
        spent, requests = 0.0, []
        for number, (worker_id, content) in enumerate(told):
            began = time.thread_time()
            message = decode_worker_message(worker_pb2.WorkerMessage.FromString(content))
            assert isinstance(message, KvEvents)
            machine.handle(KvChanged(worker_id=worker_id, events=message.events), START)
            spent += time.thread_time() - began
            if number % 10 == 0:
                arrival = an_arrival(request_id=f"r{number}", tokens=prompt[: 4 * (1 + number % 2048)])
                began = time.thread_time()
                machine.handle(arrival, START)
                requests.append(time.thread_time() - began)
                machine.handle(RequestCancelled(request_id=arrival.request_id), START)
        return spent / len(told), sorted(requests)[int(0.99 * len(requests))]

    measured = (rounds() for _ in range(TRIES))
    assert any(event < EVENT_SECONDS and request < BUDGET_SECONDS for event, request in measured)
    assert len(machine.registry.index) >= BLOCKS
