"""Reservations: the values that placement reads from them."""

import random

import numpy as np
import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import Sampling
from fleet.core.roles import Role
from fleet.router.kv_index.prefix_index import RadixTree
from fleet.router.policy import ACTIVE_BLOCKS, QUANTITIES, TOKEN_SECONDS
from fleet.router.state.worker_table import WorkerReservations
from tests.support.builders import an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

R1 = RequestId("r1")
START = Nanos(0)


def reservations() -> tuple[WorkerReservations, np.ndarray]:
    made, column = WorkerReservations(32, RadixTree(), 1), np.zeros(QUANTITIES)
    made.keep_in(column)
    return made, column


def test_answer_near_its_end_counts_less_but_at_least_one():
    """Let an answer of 320 expected tokens grow by a block of 32 tokens at a time: towards its end, a smaller share of it counts."""
    made, column = reservations()
    made.reserve(R1, (1, 2), 64, 64, START, expected_tokens=320)
    counted = []
    for _ in range(12):
        made.grown(R1, 32)
        made.check()
        counted.append(column[ACTIVE_BLOCKS] - 2)

    assert counted == [1, 2, 3, 3, 3, 3, 3, 2, 1, 1, 1, 1]
    assert made.blocks == 2 + 12, "what is held is still what is held"
    made.release(R1)
    assert column[ACTIVE_BLOCKS] == 0


def test_every_block_counts_without_expected_length():
    made, column = reservations()
    made.reserve(R1, (1, 2), 64, 64, START)
    for blocks in range(1, 12):
        made.grown(R1, 32)
        assert column[ACTIVE_BLOCKS] == 2 + blocks


def test_any_order_of_growth_and_release_ends_at_zero():
    rng = random.Random(3)
    made, column = reservations()
    running: list[RequestId] = []
    for step in range(2000):
        action = rng.randrange(4)
        if action == 0 or not running:
            request_id = RequestId(f"r{step}")
            keys = tuple(range(rng.randrange(6)))
            expected = rng.choice([0, 1, 50, 500])
            made.reserve(request_id, keys, len(keys) * 32 + rng.randrange(32), 10, START, expected_tokens=expected)
            running.append(request_id)
        elif action == 1:
            made.release(running.pop(rng.randrange(len(running))))
        else:
            made.grown(rng.choice(running), rng.randrange(1, 70))
        made.check()
        assert column[ACTIVE_BLOCKS] >= 0
    for request_id in running:
        made.release(request_id)
    made.check()
    assert column.tolist() == [0.0] * QUANTITIES


def test_token_seconds_include_the_wait_for_other_prompts():
    made, column = reservations()
    made.reserve(R1, (), 1000, 1000, START)
    made.reserve(RequestId("r2"), (), 1000, 1000, START)

    made.computed(R1, Nanos(SECOND))  # 1,000 tokens in 1 s
    assert column[TOKEN_SECONDS] == pytest.approx(1e-3)
    made.computed(RequestId("r2"), Nanos(2 * SECOND))  # behind 1,000 other tokens: the same rate
    assert column[TOKEN_SECONDS] == pytest.approx(1e-3)
    made.reserve(RequestId("r3"), (), 10, 10, START)
    made.computed(RequestId("r3"), Nanos(SECOND))  # a short prompt says nothing about the time per token
    assert column[TOKEN_SECONDS] == pytest.approx(1e-3)
    made.reserve(RequestId("r4"), (), 1000, 1000, START)
    made.computed(RequestId("r4"), Nanos(5 * SECOND))
    assert column[TOKEN_SECONDS] == pytest.approx(2e-3), "a quarter of the newest"


def test_expected_length_reduces_the_reserved_blocks():
    router = RouterMachineDriver(("d1", Role.BOTH))
    arrival = an_arrival(tokens=64, sampling=Sampling(max_tokens=500), expected_tokens=64)
    work = the(Dispatch, router.send(arrival))

    for token in range(64):
        router.step(work, token)

    (pool,) = router.machine.registry.tables.values()
    assert pool.columns[ACTIVE_BLOCKS, 0] == 3  # the blocks of the prompt, and one of the answer
    assert router.booked("d1")[1] == 4
