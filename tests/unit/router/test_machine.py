"""Decisions of the router's machine, event by event; the machine checks its invariants after every event."""

import pytest
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import STATE_FIELDS, AnyObject, Finish, Sampling, Source, ToolCallForm
from fleet.core.roles import KvPath, Phase, Placement, Role
from fleet.core.work import KvCleared, KvRemoved, KvStored, ParsedDelta, ParsingTask
from fleet.router.messages import (
    KvChanged,
    KvPathsChanged,
    LoadReported,
    RouterTicked,
    StartedOver,
    StoreChanged,
    WorkerDraining,
    WorkerResumed,
)
from fleet.router.placement.decision import PlacementReason
from fleet.router.placement.wait_or_reject import RejectionCause
from fleet.router.state.live_requests import IllegalRequestTransition, RequestStage, RequestTransition, advance
from kvstore.block import chain
from tests.support.builders import (
    BLOCK_TOKENS,
    FINGERPRINT,
    STORE,
    a_description,
    a_handoff,
    a_kv_report,
    a_load,
    a_prompt,
    an_arrival,
    token_ids,
)
from tests.support.router.machine_driver import (
    START,
    CancelAttempt,
    Complete,
    Dispatch,
    Emit,
    Reject,
    RouterMachineDriver,
    dispatched,
    the,
)

GREEDY = Sampling(temperature=0.0, max_tokens=8)
SEEDED = Sampling(temperature=1.0, seed=7, max_tokens=8)
ONE = (("d1", Role.DECODE),)
TWO = (("d1", Role.DECODE), ("d2", Role.DECODE))
PAIR = (("p1", Role.PREFILL), ("d1", Role.DECODE))
LONG = 1000  # tokens of a long prompt; more than `remote_prefill_min_tokens`

LENGTH = Finish.LENGTH


def a_long_arrival(**fields):
    return an_arrival(tokens=LONG, **{"sampling": GREEDY, **fields})


# Aggregated requests.


def test_worker_tokens_reach_the_client():
    router = RouterMachineDriver(*ONE)

    work = the(Dispatch, router.send(an_arrival(sampling=GREEDY)))
    first = router.step(work, 11)
    last = router.step(work, 12, finish=Finish.STOP, kv=a_kv_report(10))

    assert (work.worker_id, work.start.phase) == ("d1", Phase.AGGREGATED)
    assert work.start.tokens == a_prompt(10)
    assert work.start.sampling == GREEDY
    emitted = the(Emit, first)
    assert (emitted.request_id, emitted.progress.request_id) == ("r1", "r1")
    assert emitted.progress.token_ids == (11,)
    assert the(Emit, last).progress.token_ids == (12,)
    complete = the(Complete, last)
    assert (complete.finish, complete.cached_tokens) == (Finish.STOP, 0)
    assert [(phase.phase, phase.worker_id) for phase in complete.kv] == [(Phase.AGGREGATED, "d1")]


def test_kv_report_of_finish_replaces_the_first_report():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival(tokens=LONG, sampling=GREEDY)))

    first = the(Emit, router.step(work, 11, kv=a_kv_report(LONG, cached_blocks=9)))
    second = the(Emit, router.step(work, 12))
    complete = the(Complete, router.step(work, 13, finish=LENGTH, kv=a_kv_report(LONG, cached_blocks=7)))

    assert [phase.report for phase in first.kv] == [a_kv_report(LONG, cached_blocks=9)]
    assert (second.kv, first.cached_tokens, second.cached_tokens) == (first.kv, 9 * BLOCK_TOKENS, 9 * BLOCK_TOKENS)
    assert [phase.report for phase in complete.kv] == [a_kv_report(LONG, cached_blocks=7)]
    assert complete.cached_tokens == 7 * BLOCK_TOKENS


def test_emitted_tokens_carry_kv_reports_of_both_workers():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))

    handed_over = router.step(prefill, 11, finish=LENGTH, kv=a_kv_report(LONG, cached_blocks=3), handoff=a_handoff())
    first = the(Emit, handed_over)
    told = a_kv_report(LONG + 1, cached_blocks=31, source=Source.STORE)
    second = the(Emit, router.step(the(Dispatch, handed_over), 12, kv=told))

    assert [phase.phase for phase in first.kv] == [Phase.PREFILL]
    assert [(phase.phase, phase.worker_id) for phase in second.kv] == [(Phase.PREFILL, "p1"), (Phase.DECODE, "d1")]
    assert second.kv[1].report == told
    assert second.cached_tokens == 3 * BLOCK_TOKENS


def test_kv_report_of_a_lost_worker_is_kept():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(tokens=LONG, sampling=GREEDY)))
    router.step(work, 11, kv=a_kv_report(LONG))
    again = the(Dispatch, router.leave(work.worker_id))

    first = the(Emit, router.step(again, 12, kv=a_kv_report(LONG + 1, cached_blocks=31, source=Source.STORE)))

    assert [phase.worker_id for phase in first.kv] == [work.worker_id, again.worker_id]
    assert first.cached_tokens == 0, "the lost worker computed all of it"


def test_request_without_workers_is_rejected_with_retry_hint():
    refusal = the(Reject, RouterMachineDriver().send(an_arrival()))

    assert refusal.reason is Reason.NO_WORKER
    assert refusal.retry_after_ms == 1000


def test_request_goes_only_to_workers_of_its_model():
    router = RouterMachineDriver(*ONE)

    assert the(Reject, router.send(an_arrival(model=ModelName("other")))).reason is Reason.NO_WORKER


def test_models_lists_only_models_with_answering_workers():
    router = RouterMachineDriver(*PAIR, ("d2", Role.DECODE))
    router.join("px", Role.PREFILL, model=ModelName("half"))

    (card,) = router.machine.models()

    assert (card.name, card.workers, card.block_tokens, card.max_model_len) == ("tiny", 3, BLOCK_TOKENS, 4096)


@pytest.mark.parametrize(("fields", "limits"), [(("logit_bias",), False), (("thinking_tokens",), True)])
@pytest.mark.parametrize("role", [Role.BOTH, Role.PREFILL])
def test_model_limits_the_reasoning_if_every_worker_can(fields, limits, role):
    router = RouterMachineDriver()
    router.join("w1", Role.BOTH, sampling_fields=("thinking_tokens",))
    router.join("w2", role, sampling_fields=fields)

    assert [card.limits_reasoning for card in router.machine.models()] == [limits]


def test_prompt_goes_to_the_worker_with_its_blocks():
    router = RouterMachineDriver(*TWO)
    hashes = chain(a_prompt(320), BLOCK_TOKENS)
    router.send(KvChanged(worker_id=WorkerId("d2"), events=(KvStored(tuple(hashes)),)))

    assert the(Dispatch, router.send(an_arrival(tokens=320))).worker_id == "d2"
    router.cancel()
    router.send(KvChanged(worker_id=WorkerId("d2"), events=(KvRemoved((hashes[0],)),)))
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(tuple(hashes[:1])),)))
    assert the(Dispatch, router.send(an_arrival(tokens=320))).worker_id == "d1"
    router.cancel()
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvCleared(),)))
    assert router.machine.snapshot().index_blocks == 9


def test_another_salt_gives_no_cache_hit():
    router = RouterMachineDriver(*TWO)
    hashes = chain(a_prompt(320), BLOCK_TOKENS, salt=b"s" * 32)
    router.send(KvChanged(worker_id=WorkerId("d2"), events=(KvStored(tuple(hashes)),)))

    for seed_like in range(3):
        request_id = f"salted-{seed_like}"
        work = the(Dispatch, router.send(an_arrival(request_id=request_id, tokens=320, salt=b"s" * 32)))
        assert work.worker_id == "d2"
        assert work.start.salt == b"s" * 32
        router.cancel(request_id)


def test_store_blocks_count_as_cached():
    router = RouterMachineDriver(*PAIR)
    hashes = chain(a_prompt(LONG), BLOCK_TOKENS)
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=tuple(hashes)))

    assert dispatched(router.send(a_long_arrival())).phase is Phase.AGGREGATED
    assert router.machine.explain(RequestId("r1")).placements[0].why is PlacementReason.SHORT_UNCACHED_PROMPT
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, reset=True))
    assert router.machine.snapshot().index_blocks == 0
    assert dispatched(router.send(a_long_arrival(request_id="r2"))).phase is Phase.PREFILL


def test_block_in_engine_and_store_counts_once():
    router = RouterMachineDriver(*PAIR)
    hashes = chain(a_prompt(LONG), BLOCK_TOKENS)
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=tuple(hashes[:10])))
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(tuple(hashes[:8])),)))

    router.send(a_long_arrival())

    (placed,) = router.machine.explain(RequestId("r1")).placements
    assert placed.uncached_tokens == LONG - 10 * BLOCK_TOKENS
    assert -placed.candidates[0].parts["credit"] == 8 + 0.75 * 2


def test_store_tier_of_a_block_decides_its_credit():
    router = RouterMachineDriver(*PAIR)
    hashes = tuple(chain(a_prompt(LONG), BLOCK_TOKENS))

    def credit(request_id: str) -> float:
        router.send(a_long_arrival(request_id=request_id))
        (placed,) = router.machine.explain(RequestId(request_id)).placements
        router.cancel(request_id)
        return -placed.candidates[0].parts["credit"]

    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=hashes[:8]))
    in_memory = credit("r1")
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, tier="ssd", stored=hashes[:8]))
    in_both = credit("r2")
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, removed=hashes[:8]))
    demoted = credit("r3")
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=hashes[:2]))
    partly_promoted = credit("r4")
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, reset=True))

    assert (in_memory, in_both, demoted, partly_promoted) == (6, 6, 4, 2 * 0.75 + 6 * 0.5)
    assert credit("r5") == 0
    assert router.machine.snapshot().stores == ()


def test_store_blocks_of_another_fingerprint_do_not_count():
    router = RouterMachineDriver(*PAIR)
    hashes = chain(a_prompt(LONG), BLOCK_TOKENS)
    router.send(StoreChanged(store_id=STORE, fingerprint="another", stored=tuple(hashes)))

    assert dispatched(router.send(a_long_arrival())).phase is Phase.PREFILL


# Disaggregated requests.


def test_long_prompt_is_served_by_a_prefill_decode_pair():
    router = RouterMachineDriver(*PAIR)

    prefill = the(Dispatch, router.send(a_long_arrival()))
    handoff = a_handoff(num_tokens=LONG)
    handed = router.step(prefill, 11, finish=LENGTH, kv=a_kv_report(LONG, cached_blocks=3), handoff=handoff)
    decode = the(Dispatch, handed)
    last = router.step(decode, 12, 13, finish=LENGTH, kv=a_kv_report(LONG, cached_blocks=31, source=Source.STORE))

    assert (prefill.worker_id, prefill.start.phase, prefill.start.kv_path) == ("p1", Phase.PREFILL, KvPath.STORE)
    assert prefill.start.sampling.max_tokens == 1
    assert (decode.worker_id, decode.start.phase, decode.start.handoff) == ("d1", Phase.DECODE, handoff)
    assert decode.start.request_id != prefill.start.request_id
    assert the(Emit, last).progress.token_ids == (12, 13)
    complete = the(Complete, last)
    assert [phase.phase for phase in complete.kv] == [Phase.PREFILL, Phase.DECODE]
    assert complete.cached_tokens == 3 * BLOCK_TOKENS  # the prefill worker computed the rest


def test_store_path_emits_the_prefill_token_at_once():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))

    handed = router.step(prefill, 11, finish=LENGTH, handoff=a_handoff())

    assert the(Emit, handed).progress.token_ids == (11,)
    start = dispatched(handed)
    assert token_ids(start.tokens) == [*token_ids(a_prompt(LONG)), 11]
    assert start.sampling.max_tokens == GREEDY.max_tokens - 1


@pytest.mark.parametrize(
    ("sampling", "kv_path"), [(SEEDED, KvPath.STORE), (GREEDY, KvPath.DIRECT), (SEEDED, KvPath.DIRECT)]
)
def test_other_paths_leave_every_token_to_the_decode_worker(sampling, kv_path):
    router = RouterMachineDriver()
    for worker_id, role in PAIR:
        router.join(worker_id, role, kv_paths=(KvPath.STORE, KvPath.DIRECT))
    prefill = the(Dispatch, router.send(a_long_arrival(sampling=sampling, kv_path=kv_path)))

    handed = router.step(prefill, 11, finish=LENGTH, handoff=a_handoff(kv_path=kv_path))

    assert not [command for command in handed if isinstance(command, Emit)]
    start = dispatched(handed)
    assert start.tokens == a_prompt(LONG)
    assert start.sampling == sampling


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_request_ended_by_prefill_token_skips_decode(finish):
    sampling = Sampling(temperature=1.0, seed=7, max_tokens=8 if finish is Finish.STOP else 1)
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival(sampling=sampling)))

    ended = router.step(prefill, 11, finish=finish, kv=a_kv_report(LONG), handoff=a_handoff())

    assert the(Emit, ended).progress.token_ids == (11,)
    assert the(Complete, ended).finish is finish
    assert not [command for command in ended if isinstance(command, Dispatch)]
    assert router.booked("d1") == router.booked("p1") == (0, 0, 0)


@pytest.mark.parametrize("kv_path", KvPath)
def test_random_end_token_counts_only_if_it_is_emitted(kv_path):
    router = RouterMachineDriver()
    for worker_id, role in PAIR:
        router.join(worker_id, role, kv_paths=(KvPath.STORE, KvPath.DIRECT))
    sampling = Sampling(temperature=1.0, max_tokens=8)
    prefill = the(Dispatch, router.send(a_long_arrival(sampling=sampling, kv_path=kv_path)))

    after = router.step(prefill, 2, finish=Finish.STOP, kv=a_kv_report(LONG), handoff=a_handoff(kv_path=kv_path))

    if kv_path is KvPath.STORE:
        assert the(Complete, after).finish is Finish.STOP
    else:  # the decode worker samples the first token again, so the end of the prefill does not count
        assert dispatched(after).tokens == a_prompt(LONG)


def test_model_with_only_draining_workers_is_not_served():
    router = RouterMachineDriver(("w1", Role.BOTH), ("w2", Role.BOTH))

    router.send(WorkerDraining(worker_id=WorkerId("w1")))
    assert [card.name for card in router.machine.models()] == ["tiny"]
    router.send(WorkerDraining(worker_id=WorkerId("w2")))

    assert router.machine.models() == ()


def test_request_goes_only_where_prompt_and_answer_fit():
    router = RouterMachineDriver()
    router.join("short", max_model_len=104)
    router.join("long", max_model_len=108)

    for number in range(4):
        arrival = an_arrival(request_id=f"r{number}", tokens=100, sampling=GREEDY)
        assert the(Dispatch, router.send(arrival)).worker_id == "long"


def test_prefill_worker_pairs_after_joining_its_store_late():
    router = RouterMachineDriver()
    router.join("p1", Role.PREFILL, kv_paths=(), store_id=None)
    router.join("d1", Role.DECODE)
    alone = the(Dispatch, router.send(a_long_arrival()))
    assert (alone.worker_id, alone.start.phase) == ("d1", Phase.AGGREGATED)
    described = a_description(worker_id="d1", role=Role.DECODE)

    router.send(KvPathsChanged(worker_id="p1", kv_paths=described.kv_paths, store_id=described.store_id))

    paired = the(Dispatch, router.send(a_long_arrival(request_id="r2")))
    assert (paired.worker_id, paired.start.phase) == ("p1", Phase.PREFILL)
    assert router.booked("d1")[0] > 0, "what ran there is booked as before"


def test_pairs_follow_joining_and_leaving_prefill_workers():
    router = RouterMachineDriver(*PAIR)
    router.leave("p1")

    assert dispatched(router.send(a_long_arrival(request_id="alone"))).phase is Phase.AGGREGATED
    assert router.machine.explain(RequestId("alone")).placements[0].why is PlacementReason.NO_PREFILL_WORKER
    router.join("p2", Role.PREFILL)
    assert dispatched(router.send(a_long_arrival(request_id="pair"))).phase is Phase.PREFILL


# Reservations.


def test_reservations_follow_the_request_phases():
    router = RouterMachineDriver(*PAIR)
    blocks = 32  # 1000 tokens are 31 full blocks and a partly filled one

    prefill = the(Dispatch, router.send(a_long_arrival()))
    assert router.booked("p1") == (1, blocks, LONG)
    assert router.booked("d1") == (1, blocks, 0)

    decode = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff()))
    assert router.booked("p1") == (0, 0, 0)
    assert router.booked("d1") == (1, blocks, 0)

    router.step(decode, 12, finish=LENGTH)
    assert router.booked("d1") == (0, 0, 0)


def test_first_token_releases_the_prefill_backlog():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival(tokens=100)))
    assert router.booked("d1") == (1, 4, 100)

    router.step(work, 11)

    assert router.booked("d1") == (1, 4, 0)


def test_cached_tokens_are_not_in_the_backlog():
    router = RouterMachineDriver(*ONE)
    hashes = chain(a_prompt(100), BLOCK_TOKENS)
    router.send(KvChanged(worker_id=WorkerId("d1"), events=(KvStored(tuple(hashes[:2])),)))

    router.send(an_arrival(tokens=100))

    assert router.booked("d1") == (1, 4, 100 - 2 * BLOCK_TOKENS)


def test_shared_prefix_is_reserved_once():
    router = RouterMachineDriver(*ONE)
    prefix = a_prompt(320)

    first = the(Dispatch, router.send(an_arrival(request_id="a", tokens=prefix + a_prompt(64, first=5000))))
    assert router.booked("d1")[1] == 12
    router.send(an_arrival(request_id="b", tokens=prefix + a_prompt(32, first=9000)))
    assert router.booked("d1")[1] == 13
    router.step(first, 1, finish=Finish.STOP)
    assert router.booked("d1")[1] == 11
    router.cancel("b")
    assert router.booked("d1") == (0, 0, 0)


def test_answer_reserves_one_block_per_block_tokens():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival(tokens=64, sampling=Sampling(max_tokens=200))))

    blocks = []
    for token in range(100):
        router.step(work, token)
        blocks.append(router.booked("d1")[1])

    assert blocks == [2 + -(-generated // BLOCK_TOKENS) for generated in range(1, 101)]


# The queue.


def busy(*, max_running: int = 1, **settings) -> tuple[RouterMachineDriver, Dispatch]:
    """Return a router whose only worker has no room for another request, and the last running request."""
    router = RouterMachineDriver(oversubscribe=1.0, **settings)
    router.join("d1", max_running=max_running)
    return router, the(Dispatch, router.send(an_arrival(request_id="running")))


def test_queued_request_runs_when_a_worker_has_room():
    router, running = busy()

    assert router.send(an_arrival()) == []
    assert router.machine.snapshot().queued == 1
    after = router.step(running, 1, finish=Finish.STOP)

    assert the(Dispatch, after).start.request_id.startswith("r1#")
    assert router.machine.snapshot().queued == 0


def test_full_queue_rejects_with_retry_hint():
    router, _ = busy(max_queued=2)
    router.send(an_arrival(request_id="a"))
    router.send(an_arrival(request_id="b"))

    refusal = the(Reject, router.send(an_arrival(request_id="c")))

    assert (refusal.request_id, refusal.reason, refusal.retry_after_ms) == ("c", Reason.QUEUE_FULL, 1000)


def test_queue_orders_by_priority_then_arrival():
    router, running = busy()
    for request_id, priority in (("low", -1), ("a", 0), ("high", 5), ("b", 0)):
        router.send(an_arrival(request_id=request_id, priority=priority))

    order = []
    while True:
        commands = router.step(running, 1, finish=Finish.STOP)
        started = [command for command in commands if isinstance(command, Dispatch)]
        if not started:
            break
        (running,) = started
        order.append(running.start.request_id.split("#")[0])

    assert order == ["high", "a", "b", "low"]


def test_cancelled_request_leaves_the_queue():
    router, running = busy()
    router.send(an_arrival())

    assert router.cancel() == []
    assert router.machine.snapshot().queued == 0
    assert not [c for c in router.step(running, 1, finish=Finish.STOP) if isinstance(c, Dispatch)]


def test_joining_worker_takes_queued_requests():
    router, _ = busy()
    router.send(an_arrival())

    assert the(Dispatch, router.join("d2")).worker_id == "d2"


def test_queued_requests_are_rejected_when_last_worker_leaves():
    router, _ = busy()
    router.send(an_arrival())

    refusals = [command for command in router.leave("d1") if isinstance(command, Reject)]

    assert {refusal.request_id: refusal.reason for refusal in refusals} == {
        "r1": Reason.NO_WORKER,
        "running": Reason.WORKER_LOST,
    }


def test_busy_model_does_not_delay_other_models():
    router, _ = busy()
    router.send(an_arrival())
    other = ModelName("other")
    router.join("o1", model=other)

    assert the(Dispatch, router.send(an_arrival(request_id="r2", model=other))).worker_id == "o1"


# Deadlines.


def test_request_past_its_deadline_is_rejected_on_arrival():
    router = RouterMachineDriver(*ONE)

    refusal = the(Reject, router.send(an_arrival(deadline=START)))

    assert (refusal.reason, refusal.retry_after_ms) == (Reason.DEADLINE_PASSED, 0)


def test_deadline_ends_a_queued_request():
    router, _ = busy()
    router.send(an_arrival(deadline=Nanos(START + SECOND)))
    assert router.machine.next_deadline() == START + SECOND

    router.now = Nanos(START + SECOND)
    commands = router.send(RouterTicked())

    assert the(Reject, commands).reason is Reason.DEADLINE_PASSED
    assert router.machine.next_deadline() is None


def test_deadline_cancels_a_running_attempt():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival(deadline=Nanos(START + SECOND))))
    assert work.start.timeout_ms == 1000

    router.now = Nanos(START + 2 * SECOND)
    commands = router.send(RouterTicked())

    assert the(CancelAttempt, commands) == CancelAttempt(worker_id=work.worker_id, request_id=work.start.request_id)
    assert the(Reject, commands).reason is Reason.DEADLINE_PASSED
    assert router.booked("d1") == (0, 0, 0)


def test_dispatch_carries_the_time_left():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival(deadline=Nanos(START + SECOND))))
    router.now = Nanos(START + 400 * MILLISECOND)

    assert dispatched(router.step(prefill, 11, finish=LENGTH, handoff=a_handoff())).timeout_ms == 600


# Cancelling.


def test_cancel_reaches_the_working_worker():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))

    commands = router.cancel()

    assert commands == [CancelAttempt(worker_id=WorkerId("p1"), request_id=prefill.start.request_id)]
    assert router.booked("p1") == router.booked("d1") == (0, 0, 0)


def test_cancel_after_the_end_does_nothing():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival()))
    router.step(work, 1, finish=Finish.STOP)

    assert router.cancel() == []


def test_progress_of_a_cancelled_attempt_is_ignored():
    router = RouterMachineDriver(*ONE)
    work = the(Dispatch, router.send(an_arrival()))
    router.cancel()

    assert router.step(work, 1) == []
    assert router.step(work, finish=Finish.CANCELLED) == []
    assert router.machine.snapshot().counters.late_messages == 2


def test_reused_request_id_ignores_late_tokens():
    router = RouterMachineDriver(*ONE)
    past = the(Dispatch, router.send(an_arrival()))
    router.cancel()
    present = the(Dispatch, router.send(an_arrival()))

    assert router.step(past, 99) == []
    assert the(Emit, router.step(present, 11)).progress.token_ids == (11,)


# Failures before the first token.


def test_request_on_a_lost_worker_is_placed_again():
    router = RouterMachineDriver(*TWO)
    lost = the(Dispatch, router.send(an_arrival()))

    again = the(Dispatch, router.leave(lost.worker_id))

    assert again.worker_id != lost.worker_id
    assert again.start.request_id != lost.start.request_id
    assert again.start.tokens == lost.start.tokens


@pytest.mark.parametrize("how", ["reject", "undelivered", "given_up"])
def test_rejected_attempt_is_placed_on_another_worker(how):
    router = RouterMachineDriver(*TWO)
    first = the(Dispatch, router.send(an_arrival()))

    match how:
        case "reject":
            commands = router.reject(first, Reason.DRAINING)
        case "undelivered":
            commands = router.fail_to_deliver(first)
        case _:
            commands = router.step(first, finish=Finish.CANCELLED)

    assert the(Dispatch, commands).worker_id != first.worker_id
    assert router.booked(first.worker_id) == (0, 0, 0)


def test_rejection_for_the_requests_fault_reaches_the_client():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival()))

    refusal = the(Reject, router.reject(work, Reason.INVALID_ARGUMENT, "sampling.top_k"))

    assert (refusal.reason, refusal.field, refusal.retry_after_ms) == (Reason.INVALID_ARGUMENT, "sampling.top_k", 0)


def test_request_is_rejected_after_its_last_attempt():
    router = RouterMachineDriver(*((f"d{number}", Role.DECODE) for number in range(5)), max_attempts=3)
    commands = router.send(an_arrival())

    for _ in range(2):
        commands = router.reject(the(Dispatch, commands), Reason.INTERNAL)
    refusal = the(Reject, router.reject(the(Dispatch, commands), Reason.INTERNAL))

    assert refusal.reason is Reason.INTERNAL


def test_losing_the_only_worker_gives_a_retry_hint():
    router = RouterMachineDriver(*ONE)
    router.send(an_arrival())

    refusal = the(Reject, router.leave("d1"))

    assert (refusal.reason, refusal.retry_after_ms) == (Reason.WORKER_LOST, 1000)


def test_restarted_worker_may_retry_a_failed_request():
    router = RouterMachineDriver(*TWO)
    first = the(Dispatch, router.send(an_arrival()))
    second = the(Dispatch, router.reject(first, Reason.DRAINING))
    router.join(first.worker_id, incarnation="2")

    assert the(Dispatch, router.leave(second.worker_id)).worker_id == first.worker_id


def test_new_incarnation_ends_attempts_of_the_old_one():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival()))

    commands = router.join("d1", incarnation="2")

    assert the(Reject, commands).reason is Reason.WORKER_LOST
    assert router.step(first, 1) == []


def test_draining_worker_only_finishes_its_attempts():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival()))
    router.send(WorkerDraining(worker_id=work.worker_id))

    assert all(
        the(Dispatch, router.send(an_arrival(request_id=f"next-{n}"))).worker_id != work.worker_id for n in range(4)
    )
    assert the(Complete, router.step(work, 1, finish=Finish.STOP)).finish is Finish.STOP


def test_lost_prefill_worker_is_replaced():
    router = RouterMachineDriver(*PAIR, ("p2", Role.PREFILL))
    lost = the(Dispatch, router.send(a_long_arrival()))

    again = the(Dispatch, router.leave(lost.worker_id))

    assert again.start.phase is Phase.PREFILL
    assert {lost.worker_id, again.worker_id} == {"p1", "p2"}


@pytest.mark.parametrize("placement", [Placement.AUTO, Placement.DISAGGREGATED])
def test_decode_worker_computes_prompt_without_prefill_worker(placement):
    """Lose the prefill worker: the decode worker computes the prompt itself, even if the client demanded a pair."""
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival(placement=placement)))

    commands = router.reject(prefill, Reason.INTERNAL)

    work = the(Dispatch, commands)
    assert (work.worker_id, work.start.phase) == ("d1", Phase.AGGREGATED)
    assert router.machine.snapshot().counters.fallbacks == 1
    assert router.machine.explain(RequestId("r1")).placements[-1].why is PlacementReason.PREFILL_LOST
    assert the(Complete, router.step(work, 1, finish=LENGTH, kv=a_kv_report(LONG))).finish is LENGTH


def test_prefill_token_is_reserved_on_the_decode_worker():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(an_arrival(tokens=BLOCK_TOKENS * 40, sampling=GREEDY)))
    before = router.booked("d1")[1]
    router.step(prefill, 11, finish=LENGTH, handoff=a_handoff())

    assert router.booked("d1")[1] == before + 1


def test_only_end_listener_gets_only_the_end():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(only_end=True)))

    assert router.step(work, 11, 12) == []
    assert the(Complete, router.step(work, 13, finish=LENGTH)).request_id == "r1"


def test_only_end_answer_still_measures_prefill_time():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(tokens=100, only_end=True)))
    router.now = Nanos(router.now + SECOND)

    router.step(work, 11, 12, finish=LENGTH)

    paces = {each.worker_id: each.token_seconds for each in router.machine.remote_prefill().workers}
    assert paces[work.worker_id] == 1 / 100
    assert router.booked(work.worker_id) == (0, 0, 0)


def test_prefill_without_handoff_counts_as_failed():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))

    assert dispatched(router.step(prefill, 11, finish=LENGTH)).phase is Phase.AGGREGATED


def test_unreadable_handoff_makes_decode_worker_compute_prompt():
    """Let the decode worker reject a handoff: it gets the request again without it, and computes the prompt."""
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))
    decode = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff(fingerprint="other")))

    again = the(Dispatch, router.reject(decode, Reason.KV_MISMATCH, "handoff.fingerprint"))

    assert (again.worker_id, again.start.phase) == ("d1", Phase.AGGREGATED)


def test_decode_worker_lost_during_prefill_is_replaced():
    router = RouterMachineDriver(*PAIR, ("d2", Role.DECODE))
    prefill = the(Dispatch, router.send(a_long_arrival()))
    chosen = next(worker for worker in ("d1", "d2") if router.booked(worker)[0])
    assert not [c for c in router.leave(chosen) if isinstance(c, Dispatch | Reject)]

    decode = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff()))

    assert {chosen, decode.worker_id} == {"d1", "d2"}
    assert router.booked(decode.worker_id)[0] == 1


def test_decode_worker_draining_during_prefill_is_replaced():
    router = RouterMachineDriver(*PAIR, ("d2", Role.DECODE))
    prefill = the(Dispatch, router.send(a_long_arrival()))
    chosen = next(worker for worker in ("d1", "d2") if router.booked(worker)[0])
    router.send(WorkerDraining(worker_id=WorkerId(chosen)))

    decode = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff()))

    assert {chosen, decode.worker_id} == {"d1", "d2"}
    assert router.booked(chosen) == (0, 0, 0)


@pytest.mark.parametrize("drains", [False, True])
def test_prefill_worker_serves_alone_without_its_decode_worker(drains):
    """Lose the decode worker of a pair whose workers have both roles: the prefill worker generates the answer itself."""
    router = RouterMachineDriver(("b1", Role.BOTH), ("b2", Role.BOTH))
    prefill = the(Dispatch, router.send(a_long_arrival(placement=Placement.DISAGGREGATED, pin=WorkerId("b2"))))
    assert (prefill.worker_id, prefill.start.phase) == ("b1", Phase.PREFILL)
    router.send(WorkerDraining(worker_id=WorkerId("b2"))) if drains else router.leave("b2")

    again = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff()))

    assert (again.worker_id, again.start.phase) == ("b1", Phase.AGGREGATED)


def test_handoff_without_decode_worker_is_rejected():
    router = RouterMachineDriver(*PAIR)
    prefill = the(Dispatch, router.send(a_long_arrival()))
    router.leave("d1")

    commands = router.step(prefill, 11, finish=LENGTH, handoff=a_handoff())

    assert the(Reject, commands).reason is Reason.WORKER_LOST


# Failures after tokens were sent.


def test_greedy_stream_continues_after_the_sent_tokens():
    router = RouterMachineDriver(*TWO)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY)))
    router.step(first, 11)
    router.step(first, 12, 13)

    second = the(Dispatch, router.leave(first.worker_id))

    assert second.start.phase is Phase.AGGREGATED
    assert token_ids(second.start.tokens) == [*range(1, 11), 11, 12, 13]
    assert second.start.sampling.max_tokens == GREEDY.max_tokens - 3
    last = router.step(second, 14, finish=LENGTH)
    assert the(Emit, last).progress.token_ids == (14,)
    assert router.machine.snapshot().counters.continued == 1


def test_continuing_worker_parses_the_answer_from_its_beginning():
    router = RouterMachineDriver(*TWO)
    task = ParsingTask(tools="[]")
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY, parsing=task)))
    told = router.step(first, 11, parsed=ParsedDelta(text="a", from_start=True))
    router.step(first, 12, 13)

    second = the(Dispatch, router.leave(first.worker_id))

    assert first.start.parsing == task
    assert the(Emit, told).progress.parsed == ParsedDelta(text="a", from_start=True)
    assert (second.start.parsing, second.start.generated_tokens) == (task, 3)


STATEFUL = {
    "seed": Sampling(temperature=0.8, seed=7, max_tokens=8),
    "presence_penalty": Sampling(temperature=0.0, presence_penalty=0.5, max_tokens=8),
    "frequency_penalty": Sampling(temperature=0.0, frequency_penalty=-0.5, max_tokens=8),
    "repetition_penalty": Sampling(temperature=0.0, repetition_penalty=1.1, max_tokens=8),
    "min_tokens": Sampling(temperature=0.0, min_tokens=5, max_tokens=8),
    "form": Sampling(temperature=0.0, form=AnyObject(), max_tokens=8),
    "bad_tokens": Sampling(temperature=0.0, bad_tokens=((3, 4),), max_tokens=8),
}


@pytest.mark.parametrize(("field", "sampling"), STATEFUL.items())
def test_answer_with_state_continues_on_an_able_worker(field, sampling):
    router = RouterMachineDriver()
    for worker in ("d1", "d2"):
        router.join(worker, keeps_forms=True, continued_fields=(field,))
    first = the(Dispatch, router.send(an_arrival(sampling=sampling)))
    router.step(first, 11, 12)

    start = the(Dispatch, router.leave(first.worker_id)).start

    assert (first.start.generated_tokens, start.generated_tokens) == (0, 2)
    assert token_ids(start.tokens) == [*range(1, 11), 11, 12]
    rest = structs.replace(sampling, max_tokens=6, min_tokens=max(0, sampling.min_tokens - 2))
    assert start.sampling == rest


@pytest.mark.parametrize(("field", "sampling"), STATEFUL.items())
def test_answer_with_state_ends_without_an_able_worker(field, sampling):
    router = RouterMachineDriver()
    for worker in ("d1", "d2"):
        others = [each for each in STATE_FIELDS if each != field]
        router.join(worker, keeps_forms=True, continued_fields=others)
    first = the(Dispatch, router.send(an_arrival(sampling=sampling)))
    router.step(first, 11)

    refusal = the(Reject, router.leave(first.worker_id))

    assert refusal.reason is Reason.WORKER_LOST
    assert f"cannot continue an answer with {field}" in refusal.message.replace("no other worker can", "cannot")
    assert refusal.cause == RejectionCause.LOSES_STATE
    assert refusal.retry_after_ms > 0


def test_answer_with_state_goes_to_the_able_worker_only():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=SEEDED)))
    router.step(first, 11)
    router.join("d2")
    router.join("d3", continued_fields=STATE_FIELDS)
    router.send(an_arrival(request_id="r2", pin=WorkerId("d3")))  # d3 has more to do

    assert the(Dispatch, router.leave("d1")).worker_id == "d3"


def test_worker_that_failed_the_answer_does_not_count_as_able():
    router = RouterMachineDriver()
    router.join("d1", continued_fields=STATE_FIELDS)
    first = the(Dispatch, router.send(an_arrival(sampling=SEEDED, whole=True)))
    router.join("d2")
    router.step(first, 11)

    commands = router.reject(first, Reason.INTERNAL)

    assert isinstance(commands[0], StartedOver)
    assert the(Dispatch, commands).worker_id == "d2"


def test_whole_answer_with_state_continues_on_an_able_worker():
    router = RouterMachineDriver()
    for worker in ("d1", "d2"):
        router.join(worker, continued_fields=STATE_FIELDS)
    first = the(Dispatch, router.send(an_arrival(sampling=SEEDED, whole=True)))
    router.step(first, 11)

    commands = router.leave(first.worker_id)

    assert not any(isinstance(each, StartedOver) for each in commands)
    assert the(Dispatch, commands).start.generated_tokens == 1


@pytest.mark.parametrize("demand", [Placement.AUTO, Placement.DISAGGREGATED])
def test_answer_with_state_continues_on_one_worker(demand):
    router = RouterMachineDriver(("p1", Role.PREFILL))
    for worker in ("d1", "d2"):
        router.join(worker, continued_fields=STATE_FIELDS)
    prefill = the(Dispatch, router.send(a_long_arrival(sampling=SEEDED, placement=demand)))
    decode = the(Dispatch, router.step(prefill, 99, finish=LENGTH, handoff=a_handoff()))
    router.step(decode, 11)

    again = the(Dispatch, router.leave(decode.worker_id))

    assert (again.start.phase, again.start.generated_tokens) == (Phase.AGGREGATED, 1)


def test_answer_with_state_waits_for_room_on_the_able_worker():
    router = RouterMachineDriver(*ONE, oversubscribe=1.0)
    first = the(Dispatch, router.send(an_arrival(sampling=SEEDED)))
    router.step(first, 11)
    router.join("d2", max_running=1, continued_fields=STATE_FIELDS)
    busy = the(Dispatch, router.send(an_arrival(request_id="r2", pin=WorkerId("d2"))))
    router.join("d3")
    assert not any(isinstance(each, Dispatch) for each in router.leave("d1"))

    after = router.step(busy, 5, finish=LENGTH)

    assert the(Dispatch, after).worker_id == "d2"


def test_prompt_logprobs_are_asked_for_only_once():
    router = RouterMachineDriver()
    for worker in ("d1", "d2"):
        router.join(worker)
    first = the(Dispatch, router.send(an_arrival(sampling=structs.replace(GREEDY, prompt_logprobs=2))))
    router.step(first, 11)

    second = the(Dispatch, router.leave(first.worker_id))

    assert (first.start.sampling.prompt_logprobs, second.start.sampling.prompt_logprobs) == (2, None)


def test_demanded_calls_are_not_continued_on_another_worker():
    router = RouterMachineDriver()
    sampling = structs.replace(GREEDY, form=ToolCallForm())
    for worker in ("d1", "d2"):
        router.join(worker, keeps_forms=True)
    first = the(Dispatch, router.send(an_arrival(sampling=sampling, parsing=ParsingTask(tools="[]"))))
    router.step(first, 11)

    assert the(Reject, router.leave(first.worker_id)).reason is Reason.WORKER_LOST


def test_continued_stream_goes_where_sent_tokens_are_cached():
    router = RouterMachineDriver(*ONE)
    sampling = Sampling(temperature=0.0, max_tokens=200)
    first = the(Dispatch, router.send(an_arrival(tokens=64, sampling=sampling)))
    answer = range(65, 65 + 64)
    router.step(first, *answer)
    router.join("d2")
    router.join("d3")
    hashes = chain(a_prompt(128), BLOCK_TOKENS)
    router.send(KvChanged(worker_id=WorkerId("d2"), events=(KvStored(tuple(hashes[:2])),)))
    router.send(KvChanged(worker_id=WorkerId("d3"), events=(KvStored(tuple(hashes[:4])),)))

    again = the(Dispatch, router.leave("d1"))

    assert again.worker_id == "d3"
    assert router.booked("d3") == (1, 4, 1)


def test_stream_continues_when_lost_after_the_handoff():
    router = RouterMachineDriver(*PAIR, ("d2", Role.DECODE))
    prefill = the(Dispatch, router.send(a_long_arrival()))
    decode = the(Dispatch, router.step(prefill, 11, finish=LENGTH, handoff=a_handoff()))
    router.step(decode, 12)

    again = the(Dispatch, router.leave(decode.worker_id))

    assert token_ids(again.start.tokens)[-2:] == [11, 12]
    assert again.start.phase is Phase.PREFILL  # because the prompt is long and uncached
    handed = router.step(again, 13, finish=LENGTH, handoff=a_handoff())
    assert the(Emit, handed).progress.token_ids == (13,)
    assert dispatched(handed).sampling.max_tokens == GREEDY.max_tokens - 3


def test_stream_with_stateful_sampling_is_rejected_when_lost():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(sampling=SEEDED)))
    router.step(work, 11)

    refusal = the(Reject, router.leave(work.worker_id))

    assert refusal.reason is Reason.WORKER_LOST


PENALISED = Sampling(temperature=0.0, presence_penalty=0.5, max_tokens=8)


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED])
def test_unseen_answer_starts_over(sampling):
    router = RouterMachineDriver(*TWO)
    first = the(Dispatch, router.send(an_arrival(sampling=sampling, whole=True)))
    router.step(first, 11, 12)

    commands = router.leave(first.worker_id)

    assert isinstance(commands[0], StartedOver)
    second = the(Dispatch, commands)
    assert second.start.tokens == first.start.tokens
    assert second.start.sampling == sampling
    assert the(Complete, router.step(second, *range(8), finish=LENGTH)).finish is LENGTH
    assert router.machine.snapshot().counters.retried == 1


def test_whole_answer_continues_if_sampling_allows():
    router = RouterMachineDriver(*TWO)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY, whole=True)))
    router.step(first, 11)

    commands = router.leave(first.worker_id)

    assert not any(isinstance(each, StartedOver) for each in commands)
    assert token_ids(the(Dispatch, commands).start.tokens)[-1] == 11


def test_begun_answer_continues_only_with_the_same_weights():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY)))
    router.step(first, 11)
    router.join("d2")
    router.join("d3", fingerprint="other weights")
    router.send(an_arrival(request_id="r2", pin=WorkerId("d2")))  # d2 has more to do

    assert the(Dispatch, router.leave("d1")).worker_id == "d2"


def test_begun_answer_ends_if_only_other_weights_are_left():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY)))
    router.step(first, 11)
    router.join("d2", fingerprint="other weights")

    refusal = the(Reject, router.leave("d1"))

    assert refusal.reason is Reason.WORKER_LOST
    assert "weights" in refusal.message
    assert refusal.cause == RejectionCause.OTHER_WEIGHTS
    assert refusal.retry_after_ms > 0


def test_answer_that_was_passed_on_is_not_continued():
    """Lose the worker of an external request that has begun: the router does not know its tokens, so it cannot continue the answer."""
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY, external=True)))
    router.join("d2")
    router.step(first, 11)

    refusal = the(Reject, router.leave("d1"))

    assert (refusal.reason, refusal.cause) == (Reason.WORKER_LOST, RejectionCause.PASSED_ON)


def test_begun_answer_without_any_worker_ends_with_that_cause():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY)))
    router.step(first, 11)

    refusal = the(Reject, router.leave("d1"))

    assert (refusal.reason, refusal.cause) == (Reason.WORKER_LOST, RejectionCause.NO_WORKER)
    assert "no other worker of its model is left" in refusal.message
    assert router.machine.snapshot().counters.impossible == {RejectionCause.NO_WORKER: 1}


def test_answer_of_another_router_goes_on_after_its_tokens():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY, answered=(11, 12), fingerprint=FINGERPRINT)))

    assert token_ids(first.start.tokens) == [*range(1, 11), 11, 12]
    assert first.start.sampling.max_tokens == GREEDY.max_tokens - 2
    router.join("d2")
    router.step(first, 13)
    second = the(Dispatch, router.leave(first.worker_id))
    assert token_ids(second.start.tokens) == [*range(1, 11), 11, 12, 13]
    assert router.machine.fingerprint(RequestId("r1")) == FINGERPRINT


def test_answer_of_another_router_keeps_its_state():
    router = RouterMachineDriver()
    router.join("d1", continued_fields=STATE_FIELDS)

    work = the(Dispatch, router.send(an_arrival(sampling=SEEDED, answered=(11, 12), fingerprint=FINGERPRINT)))

    assert (work.start.phase, work.start.generated_tokens) == (Phase.AGGREGATED, 2)


@pytest.mark.parametrize(
    "demand",
    [{"placement": Placement.DISAGGREGATED}, {"pin": WorkerId("d9")}],
    ids=["pair", "pin"],
)
def test_resumed_answer_goes_on_without_what_its_client_demanded(demand):
    """The same router would go on so after the loss of a worker."""
    router = RouterMachineDriver(*ONE)
    new = router.send(an_arrival(sampling=GREEDY, request_id="new", **demand))

    again = router.send(an_arrival(sampling=GREEDY, answered=(11, 12), fingerprint=FINGERPRINT, **demand))
    unknown = router.send(an_arrival(sampling=GREEDY, request_id="unknown", fingerprint=FINGERPRINT, **demand))

    assert [type(each) for each in new] == [Reject]
    assert the(Dispatch, again).worker_id == the(Dispatch, unknown).worker_id == "d1"


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"sampling": SEEDED, "fingerprint": FINGERPRINT}, "seed"), ({"fingerprint": "other weights"}, "weights")],
)
def test_answer_of_another_router_that_cannot_go_on_is_refused(fields, why):
    router = RouterMachineDriver(*ONE)

    refusal = the(Reject, router.send(an_arrival(**{"sampling": GREEDY, "answered": (11,), **fields})))

    assert refusal.reason is Reason.WORKER_LOST
    assert "cannot be resumed" in refusal.message
    assert why in refusal.message
    assert router.booked("d1") == (0, 0, 0)


def test_unseen_answer_starts_over_with_other_weights():
    router = RouterMachineDriver(*ONE)
    first = the(Dispatch, router.send(an_arrival(sampling=GREEDY, whole=True)))
    router.step(first, 11)
    router.join("d2", fingerprint="other weights")

    commands = router.leave("d1")

    assert isinstance(commands[0], StartedOver)
    assert the(Dispatch, commands).start.tokens == first.start.tokens


def test_restarts_count_against_max_attempts():
    router = RouterMachineDriver(*((f"d{number}", Role.DECODE) for number in range(5)), max_attempts=3)
    commands = router.send(an_arrival(sampling=SEEDED, whole=True))
    for _ in range(2):
        work = the(Dispatch, commands)
        router.step(work, 11)
        commands = router.leave(work.worker_id)
    work = the(Dispatch, commands)
    router.step(work, 11)

    refusal = the(Reject, router.leave(work.worker_id))

    assert (refusal.reason, refusal.retry_after_ms) == (Reason.WORKER_LOST, 1000)


def test_cut_relayed_answer_is_rejected_without_blaming_sampling():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(sampling=Sampling(max_tokens=9, seed=0), only_end=True)))
    router.step(work, 0)

    refusal = the(Reject, router.reject(work, Reason.WORKER_LOST))

    assert refusal.reason is Reason.WORKER_LOST
    assert refusal.retry_after_ms == 1000
    assert "sampling" not in refusal.message
    assert "passed on" in refusal.message


def test_resumed_worker_gets_work_again():
    router = RouterMachineDriver(*ONE, oversubscribe=1.0)
    router.send(WorkerDraining(worker_id=WorkerId("d1")))
    assert the(Reject, router.send(an_arrival())).reason is Reason.NO_WORKER

    router.send(WorkerResumed(worker_id=WorkerId("d1")))

    assert the(Dispatch, router.send(an_arrival(request_id="next"))).worker_id == "d1"
    router.send(WorkerResumed(worker_id=WorkerId("nobody")))


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=2, temperature=0), Sampling(max_tokens=2, seed=7)])
def test_stream_missing_only_the_finish_is_complete(sampling):
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(sampling=sampling)))
    router.step(work, 5, 6)

    commands = router.leave(work.worker_id)

    assert the(Complete, commands).finish is Finish.LENGTH
    assert not any(isinstance(command, Dispatch) for command in commands)


def test_only_end_answer_is_not_complete_by_its_length():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(sampling=Sampling(max_tokens=2, seed=0), only_end=True)))
    router.step(work, 0, 0)

    assert the(Reject, router.leave(work.worker_id)).reason is Reason.WORKER_LOST


def test_stateful_sampling_is_placed_again_before_first_token():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival(sampling=SEEDED)))

    assert dispatched(router.leave(work.worker_id)).sampling == SEEDED


def test_continued_stream_waits_first_when_all_are_busy():
    router = RouterMachineDriver(oversubscribe=1.0)
    router.join("d1", max_running=1)
    first = the(Dispatch, router.send(an_arrival(request_id="stream", sampling=GREEDY)))
    router.join("d2", max_running=1)
    other = the(Dispatch, router.send(an_arrival(request_id="other")))
    router.send(an_arrival(request_id="waiting"))
    router.step(first, 11)

    router.leave(first.worker_id)
    commands = router.step(other, 1, finish=Finish.STOP)

    assert the(Dispatch, commands).start.request_id.startswith("stream#")


def test_continued_stream_subtracts_sent_tokens_from_min_tokens():
    router = RouterMachineDriver(*TWO)
    sampling = Sampling(temperature=0.0, max_tokens=8, min_tokens=1)
    first = the(Dispatch, router.send(an_arrival(sampling=sampling)))
    router.step(first, 11)

    assert dispatched(router.leave(first.worker_id)).sampling.min_tokens == 0


# Views.


def test_explanation_lasts_until_newer_requests_replace_it():
    router = RouterMachineDriver(*PAIR, explained_requests=2)
    for number in range(3):
        router.send(a_long_arrival(request_id=f"r{number}"))

    assert router.machine.explain(RequestId("r0")) is None
    (placed,) = router.machine.explain(RequestId("r2")).placements
    assert (placed.why, placed.decode, placed.prefill) == (PlacementReason.PROMPT_LONG_UNCACHED, "d1", "p1")
    assert placed.candidates[0].cost > 0


def test_snapshot_shows_pools_loads_and_counters():
    router = RouterMachineDriver(*PAIR)
    router.send(LoadReported(worker_id=WorkerId("d1"), load=a_load(running=3, waiting=1, kv_blocks_used=9)))
    work = the(Dispatch, router.send(an_arrival(request_id="short")))
    router.step(work, 1, finish=Finish.STOP)
    router.send(a_long_arrival(request_id="long"))
    router.cancel("long")
    router.send(an_arrival(request_id="late", deadline=START))

    snapshot = router.machine.snapshot()

    assert [(pool.model, pool.role, len(pool.workers)) for pool in snapshot.pools] == [
        ("tiny", Role.PREFILL, 1),
        ("tiny", Role.DECODE, 1),
    ]
    decode = snapshot.pools[1].workers[0]
    assert (decode.running, decode.waiting, decode.kv_blocks_used, decode.state) == (3, 1, 9, "serving")
    counters = snapshot.counters
    assert (counters.completed, counters.cancelled, counters.aggregated, counters.disaggregated) == (1, 1, 1, 1)
    assert counters.refused == {Reason.DEADLINE_PASSED: 1}
    assert counters.ended == 3


def test_messages_of_unknown_workers_are_ignored():
    router = RouterMachineDriver()

    assert router.send(LoadReported(worker_id=WorkerId("x"), load=a_load())) == []
    assert router.send(KvChanged(worker_id=WorkerId("x"), events=(KvCleared(),))) == []
    assert router.send(WorkerDraining(worker_id=WorkerId("x"))) == []
    assert router.leave("x") == []


def test_worker_cannot_advance_attempts_of_another_worker():
    router = RouterMachineDriver(*TWO)
    work = the(Dispatch, router.send(an_arrival()))
    other = "d2" if work.worker_id == "d1" else "d1"

    assert router.step(Dispatch(worker_id=WorkerId(other), start=work.start), 1) == []


def test_transition_outside_the_table_raises():
    with pytest.raises(IllegalRequestTransition, match="HANDED_OVER in QUEUED"):
        advance(RequestStage.QUEUED, RequestTransition.HANDED_OVER)
