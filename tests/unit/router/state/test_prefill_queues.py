"""Prefill queues: the order in which prompts are sent, and that every prompt is sent or removed."""

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from fleet.router.messages import RequestCancelled
from fleet.router.state.live_requests import PrefillQueues
from fleet.router.state.prefill_order import MOST_COMPARED, PrefillPace, WaitingPrompt
from tests.support.builders import BLOCK_TOKENS, a_handoff, a_prompt, an_arrival
from tests.support.router.machine_driver import START, CancelAttempt, Dispatch, RouterMachineDriver

W1, W2 = WorkerId("w1"), WorkerId("w2")
GREEDY = Sampling(temperature=0.0, max_tokens=8)
ONE = (("d1", Role.DECODE),)
WINDOW = 100
DUE = 1000
"""Second at which prompts are due in tests without an order; of two prompts, the later one is due first."""


def enter(queues: PrefillQueues, name: str, tokens: int, rank: int = 0, worker: WorkerId = W1) -> bool:
    if queues.enter(RequestId(name), worker, tokens):
        return True
    seq = int(name.strip("r"))
    queues.wait(worker, WaitingPrompt(RequestId(name), tokens, rank, seq, due=Nanos(DUE * SECOND - seq)))
    return False


def sent_next(queues: PrefillQueues) -> RequestId | None:
    """Take the next prompt; nothing is known of the times of the workers."""
    found = queues.next(Nanos(0), lambda *_: None)
    return None if found is None else found[0]


def test_worker_gets_prompts_up_to_the_window():
    queues = PrefillQueues(WINDOW)

    went = [enter(queues, name, 60) for name in ("r1", "r2", "r3")]

    assert went == [True, True, False]
    assert sent_next(queues) is None
    queues.check()


def test_lowest_position_goes_first():
    queues = PrefillQueues(WINDOW)
    enter(queues, "r1", 500)
    enter(queues, "r2", 80, rank=9)
    enter(queues, "r3", 80, rank=5)
    enter(queues, "r4", 80, rank=7)

    queues.leave(RequestId("r1"))
    went = [sent_next(queues), sent_next(queues), sent_next(queues)]

    assert went == ["r3", "r4", None]
    queues.check()


def test_prefill_queues_of_workers_are_independent():
    queues = PrefillQueues(WINDOW)
    enter(queues, "r1", 500, worker=W1)
    enter(queues, "r2", 500, worker=W1)

    assert enter(queues, "r3", 500, worker=W2)
    queues.leave(RequestId("r3"))
    assert sent_next(queues) is None


def test_zero_window_sends_all_prompts_at_once():
    queues = PrefillQueues(0)

    assert all(enter(queues, f"r{number}", 10_000) for number in range(1, 9))
    queues.leave(RequestId("r1"))
    queues.check()


def test_unsent_prompt_frees_no_window_tokens():
    queues = PrefillQueues(WINDOW)
    enter(queues, "r1", 500)
    enter(queues, "r2", 10)
    enter(queues, "r3", 10, rank=1)

    queues.leave(RequestId("r2"))

    assert sent_next(queues) is None
    assert queues.holds(RequestId("r3"))
    queues.leave(RequestId("r1"))
    assert sent_next(queues) == "r3"


def test_prompts_that_are_late_anyway_do_not_hide_one_due_soon():
    queues = PrefillQueues(WINDOW)
    enter(queues, "r1", 500)
    late = [
        WaitingPrompt(RequestId(f"r{n}"), 17_000, (100 + n) * SECOND, n, Nanos(0)) for n in range(2, 2 + MOST_COMPARED)
    ]
    soon = WaitingPrompt(RequestId("r90"), 2000, 20 * SECOND, 90, Nanos(2 * SECOND + 1))
    new = [WaitingPrompt(RequestId(f"r{n}"), 500, 5 * SECOND, n, Nanos(8 * SECOND)) for n in (91, 92, 93)]
    for each in (*late, soon, *new):
        queues.wait(W1, each)
    queues.leave(RequestId("r1"))

    found = queues.next(Nanos(1), lambda *_: PrefillPace(begin_seconds=0.0, token_seconds=1e-3))

    assert found is not None
    assert found[0] == "r90"


def a_router(**settings):
    return RouterMachineDriver(*ONE, **{"prefill_window_tokens": WINDOW, "prefill_size_seconds": 10.0, **settings})


def arrive(router: RouterMachineDriver, name: str, tokens: int, first: int = 1, **fields) -> list[Dispatch]:
    prompt = a_prompt(tokens, first=first)
    commands = router.send(an_arrival(request_id=name, tokens=prompt, sampling=GREEDY, **fields))
    return [command for command in commands if isinstance(command, Dispatch)]


def prompt_of(work: Dispatch) -> int:
    return len(work.start.tokens) // 4


def sent_with(commands) -> list[int]:
    """Return the lengths of the sent prompts, in order."""
    return [prompt_of(each) for each in commands if isinstance(each, Dispatch)]


def test_short_prompt_overtakes_a_queued_long_one():
    router = a_router()
    (running,) = arrive(router, "r1", 400, first=1)
    assert arrive(router, "r2", 600, first=10_000) == []
    router.now = Nanos(START + SECOND)
    assert arrive(router, "r3", 40, first=20_000) == []

    went = router.step(running, 7)

    assert sent_with(went) == [40, 600]  # forty tokens leave room for another prompt


def test_long_prompt_is_overtaken_only_for_a_while():
    router = a_router(prefill_size_seconds=10.0)  # 600 tokens more count like 6 seconds
    (running,) = arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 640, first=10_000)
    router.now = Nanos(START + 7 * SECOND)
    arrive(router, "r3", 40, first=20_000)

    went = router.step(running, 7)

    assert sent_with(went) == [640]


def test_higher_priority_goes_first_in_the_prefill_queue():
    router = a_router(prefill_size_seconds=0.0)
    (running,) = arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 50, first=10_000)
    arrive(router, "r3", 60, first=20_000, priority=1)

    went = router.step(running, 7)

    assert sent_with(went) == [60, 50]


def test_queued_prompt_is_reserved_on_its_worker():
    router = a_router()
    arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 200, first=10_000)

    requests, _, prefill_tokens = router.booked("d1")

    assert (requests, prefill_tokens) == (2, 600)


def test_cancelling_an_unsent_prompt_sends_nothing():
    router = a_router()
    (running,) = arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 200, first=10_000)

    commands = router.send(RequestCancelled(request_id=RequestId("r2")))

    assert not [command for command in commands if isinstance(command, CancelAttempt)]
    assert not sent_with(router.step(running, 7))
    assert router.booked("d1")[0] == 1


def test_cancelling_a_sent_prompt_moves_the_queue():
    router = a_router()
    arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 200, first=10_000)

    assert sent_with(router.cancel("r1")) == [200]


def test_prompt_queued_for_a_lost_worker_moves():
    router = a_router()
    arrive(router, "r1", 400, first=1)
    arrive(router, "r2", 200, first=10_000)
    router.join("d2")

    went = [command for command in router.leave("d1") if isinstance(command, Dispatch)]
    while len(went) < 2:
        went += [command for command in router.step(went[-1], 7) if isinstance(command, Dispatch)]

    assert {prompt_of(each) for each in went} == {400, 200}
    assert {each.worker_id for each in went} == {"d2"}


def test_handoff_skips_the_prefill_queue():
    router = RouterMachineDriver(
        ("p1", Role.PREFILL),
        ("d1", Role.DECODE),
        prefill_window_tokens=WINDOW,
        remote_prefill_min_tokens=BLOCK_TOKENS,
    )
    (first,) = arrive(router, "r1", 400, first=1)
    assert arrive(router, "r2", 400, first=10_000) == []

    went = router.step(first, 7, finish=Finish.LENGTH, handoff=a_handoff(num_tokens=400))

    assert [command.worker_id for command in went if isinstance(command, Dispatch)] == ["d1", "p1"]


def test_only_end_request_does_not_fill_the_window():
    router = a_router()

    went = [arrive(router, f"r{number}", 400, first=1000 * number, only_end=True) for number in range(1, 5)]

    assert all(went)
