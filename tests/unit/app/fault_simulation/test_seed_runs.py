"""Seed runs: a seed gives the same run again, its events can be left out, and a bug that a test plants breaks a promise."""

import logging
from collections.abc import Callable

import pytest
from msgspec import structs

from fleet.app.fault_simulation.campaign import replay, run_campaign, shrink
from fleet.app.fault_simulation.fault_points import FaultPoint
from fleet.app.fault_simulation.promises import Promise
from fleet.app.fault_simulation.schedule import draw
from fleet.batching.handoff_leases import HandoffLeases
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.errors import ConfigurationRefused
from fleet.membership.machine import Membership
from fleet.membership.messages import Register
from fleet.router.machine import RouterMachine
from fleet.router.messages import Complete, Dispatch, Emit
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.worker_registry import WorkerRegistry
from kvstore.hierarchy.machine import Hierarchy
from kvstore.messages import CORRUPT, BlockOutcome, FetchResult
from kvstore.pool.machine import BlockMachine
from workers.engines.simulated.direct_transfer import BlockBorrower

SEEDS = range(1, 101)  # each planted bug breaks its promise with at least one of these seeds
MOST_HAPPENINGS = 30


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_seed_replays_to_the_same_digest():
    first, second, other = replay(7, None), replay(7, None), replay(8, None)

    assert first == second
    assert first.digest != other.digest


def test_selection_runs_only_its_happenings():
    requests = [index for index, happening in enumerate(draw(3)) if "request" in str(happening)]

    outcome = replay(3, requests[:2])

    probes = 4  # one for each worker that answers, and one handoff
    assert (outcome.requests, sum(outcome.ends.values())) == (2 + probes, 2 + probes)
    assert not outcome.promise


def test_unknown_happening_is_refused():
    with pytest.raises(ConfigurationRefused, match="--keep: seed 3 has the happenings 0 to"):
        replay(3, [999])


def test_promises_hold_and_most_fault_points_are_reached():
    result = run_campaign(1, 100, processes=1)

    assert not result.failures
    assert result.good
    reached = [name for name, count in result.points.items() if count]
    assert len(reached) >= len(FaultPoint) - 3, set(result.points) - set(reached)
    assert result.tokens_compared > 10_000


# Planted bugs. Each of these functions wraps a public method of the production code.


def wrap(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrapper: Callable) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


def end_twice(original, machine, event, now):
    commands = original(machine, event, now)
    return [
        each for command in commands for each in ((command, command) if isinstance(command, Complete) else (command,))
    ]


def forget_ends_of_long_answers(original, machine, event, now):
    live = {request_id: len(request.sent) for request_id, request in machine.live_requests.items()}
    commands = original(machine, event, now)
    return [each for each in commands if not (isinstance(each, Complete) and live.get(each.request_id, 0) > 20)]


def repeat_a_token(original, machine, event, now):
    commands = original(machine, event, now)
    for index, command in enumerate(commands):
        if isinstance(command, Emit) and len(command.progress.token_ids) and now % 7 == 0:
            doubled = structs.replace(command.progress, token_ids=command.progress.token_ids * 2)
            commands[index] = structs.replace(command, progress=doubled)
    return commands


def keep_reservations_of_lost_workers(original, registry, live, worker_id):
    if live.failures:
        live.reserved_on.remove(worker_id)
    else:
        original(registry, live, worker_id)


def refuse_restarted_workers(original, membership, event, now):
    if isinstance(event, Register) and not event.incarnation.endswith("-1"):
        return []
    return original(membership, event, now)


def forget_the_begun_answer(original, machine, event, now):
    commands = original(machine, event, now)
    for index, command in enumerate(commands):
        if isinstance(command, Dispatch):
            commands[index] = structs.replace(command, start=structs.replace(command.start, generated_tokens=0))
    return commands


def publish_corrupt_records(original, hierarchy, promotion_id, answers, now):
    good = FetchResult(BlockOutcome.MOVED, 1)
    return original(hierarchy, promotion_id, [good if answer is CORRUPT else answer for answer in answers], now)


def publish_what_was_not_written(original, machine, reservation_id, checksums, *, owner, now):
    return original(machine, reservation_id, dict.fromkeys(checksums, 1), owner=owner, now=now)


PLANTED = {
    "ended_twice": (Promise.ONE_END, RouterMachine, "handle", end_twice),
    "end_not_told": (Promise.ENDS_IN_TIME, RouterMachine, "handle", forget_ends_of_long_answers),
    "token_repeated": (Promise.EXACT_TOKENS, RouterMachine, "handle", repeat_a_token),
    "state_not_rebuilt": (Promise.EXACT_TOKENS, RouterMachine, "handle", forget_the_begun_answer),
    "reservation_leaked": (Promise.CONSISTENT, WorkerRegistry, "release", keep_reservations_of_lost_workers),
    "restarted_worker_refused": (Promise.GETS_WELL, Membership, "handle", refuse_restarted_workers),
    "handoff_lease_never_ends": (
        Promise.NOTHING_HELD, HandoffLeases, "expire", lambda _original, _leases, _now: (),
    ),
    "store_lease_never_ends": (Promise.NOTHING_HELD, BlockMachine, "expire", lambda _original, _machine, _now: None),
    "transfer_never_ends": (
        Promise.NOTHING_HELD, Hierarchy, "failed", lambda _original, _hierarchy, _transfer, _started, _now: None,
    ),
    "corrupt_record_published": (Promise.PUBLISHED, Hierarchy, "fetched", publish_corrupt_records),
    "unwritten_block_published": (Promise.PUBLISHED, BlockMachine, "publish", publish_what_was_not_written),
    "damaged_block_used": (
        Promise.RIGHT_BLOCKS, BlockBorrower, "receive",
        lambda original, borrower, loan: original(borrower, loan)[:0] + [lent.content for lent in loan.blocks if lent],
    ),
    "blocks_freed_twice": (
        Promise.CONSISTENT, KvBlocks, "release",
        lambda original, blocks, keys: (original(blocks, keys), original(blocks, keys[:1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_breaks_its_promise_and_shrinks(bug, monkeypatch):
    promise, owner, method, wrapper = PLANTED[bug]
    wrap(monkeypatch, owner, method, wrapper)

    seed = next(seed for seed in SEEDS if replay(seed, None).promise == promise)
    failure = shrink(seed)

    assert failure.promise == promise
    assert len(failure.happenings) <= MOST_HAPPENINGS
    assert failure.replay == f"fleet sim faults --seed {seed} --keep {','.join(map(str, failure.keep)) or 'none'}"
    assert replay(seed, failure.keep).promise == promise


def test_answer_that_could_continue_must_not_be_rejected(monkeypatch):
    monkeypatch.setattr(LiveRequest, "may_continue", property(lambda _: False))

    assert any(replay(seed, None).promise == Promise.RETRIED for seed in SEEDS)
