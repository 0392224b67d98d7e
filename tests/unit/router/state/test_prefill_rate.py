"""Prefill rate of a worker, and the rejections that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, Sampling
from fleet.core.roles import Role
from fleet.core.work import KvStored
from fleet.router.machine import OTHER_WORKERS_TRIED
from fleet.router.messages import KvChanged
from fleet.router.state.live_requests import EVIDENCE, PrefillRate
from fleet.router.state.prefill_order import DUE_SHARE
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, Reject, RouterMachineDriver, the

GREEDY = Sampling(temperature=0.0, max_tokens=2)
WINDOW = 1000


def a_pace(tokens=1000, seconds=1.0, times=10):
    pace, now = PrefillRate(), 0
    pace.busy(Nanos(now))
    for _ in range(times):
        now += int(seconds * SECOND)
        pace.computed(tokens, Nanos(now))
    return pace, Nanos(now)


def test_no_prediction_without_evidence():
    pace, now = a_pace(times=EVIDENCE - 1)
    assert pace.seconds_to_wait(1000, 1000, now) is None
    pace.computed(1000, Nanos(now + SECOND))
    assert pace.seconds_to_wait(1000, 1000, Nanos(now + SECOND)) is not None


@given(
    tokens=st.integers(100, 10_000), seconds=st.floats(0.01, 10), sent=st.integers(0, 10**5), held=st.integers(0, 10**6)
)
def test_steady_rate_is_predicted_exactly(tokens, seconds, sent, held):
    pace, now = a_pace(tokens, seconds)
    told = pace.seconds_to_wait(sent, held, now)
    assert told is not None
    assert abs(told - (sent + held) / tokens * seconds) <= 0.01 * told + 1e-6


def test_elapsed_time_of_current_prompt_is_subtracted():
    pace, now = a_pace()
    later = Nanos(now + 5 * SECOND)
    assert 9.9 < pace.seconds_to_wait(8000, 2000, now) < 10.1
    assert 4.9 < pace.seconds_to_wait(8000, 2000, later) < 5.1
    assert 1.9 < pace.seconds_to_wait(8000, 2000, Nanos(now + 60 * SECOND)) < 2.1, "what is held has not begun"


def test_idle_time_does_not_lower_the_rate():
    pace, now = a_pace()
    pace.idle()
    pace.busy(Nanos(now + 1000 * SECOND))
    pace.computed(1000, Nanos(now + 1001 * SECOND))
    told = pace.seconds_to_wait(1000, 0, Nanos(now + 1001 * SECOND))
    assert told is not None
    assert 0.9 < told < 1.1


class Lane(RouterMachineDriver):
    """A router whose workers have computed a thousand tokens a second."""

    def __init__(self, workers=1, **settings):
        super().__init__(*((f"d{n}", Role.DECODE) for n in range(workers)), prefill_window_tokens=WINDOW, **settings)
        self.count = 0
        for number in range(workers * (EVIDENCE + 1)):
            self.serve(self.ask(1000, pin=WorkerId(f"d{number % workers}")), 1.0)

    def ask(self, tokens, **fields):
        self.count += 1
        prompt = bytes(4 * tokens - 4) + self.count.to_bytes(4, "little")
        prompt = self.count.to_bytes(4, "little") + prompt[4:]  # no two prompts share a block
        return self.send(an_arrival(request_id=f"r{self.count}", tokens=prompt, sampling=GREEDY, **fields))

    def serve(self, commands, seconds):
        """Let the worker compute a prompt in `seconds`; return the router's commands, such as the next prompt for the worker."""
        work = the(Dispatch, commands)
        self.now = Nanos(self.now + int(seconds * SECOND))
        return self.step(work, 1, 2, finish=Finish.LENGTH)


def test_too_long_prefill_queue_rejects_at_once():
    router = Lane(max_queue_seconds=3.5)
    answers = [router.ask(1000) for _ in range(6)]

    assert isinstance(answers[0][0], Dispatch)
    assert answers[1:4] == [[]] * 3, "they wait one, two and three seconds"
    refusal = the(Reject, answers[4])
    assert refusal.reason is Reason.QUEUE_FULL
    assert 3500 <= refusal.retry_after_ms <= 4500
    assert "4 s" in refusal.message
    assert the(Reject, answers[5])


def test_high_priority_ignores_prompts_behind_it():
    router = Lane(max_queue_seconds=3.5)
    for _ in range(6):
        router.ask(1000)

    assert not router.ask(1000, priority=1)


def test_prefill_queue_wait_past_deadline_rejects():
    router = Lane()
    for _ in range(4):
        router.ask(1000)

    assert "deadline" in the(Reject, router.ask(1000, deadline=Nanos(router.now + 2 * SECOND))).message
    assert not router.ask(1000, deadline=Nanos(router.now + 20 * SECOND))


def test_full_prefill_queues_give_way_to_a_worker_without_one():
    """Let more workers than `OTHER_WORKERS_TRIED` have the prompt cached, all with prompts to compute: a free worker is taken."""
    router = Lane(workers=OTHER_WORKERS_TRIED + 3, max_queue_seconds=1.0)
    busy = [WorkerId(f"d{number}") for number in range(OTHER_WORKERS_TRIED + 2)]
    prompt = a_prompt(110 * BLOCK_TOKENS)
    for worker_id in busy:
        stored = KvStored(tuple(chain(prompt, BLOCK_TOKENS)))
        router.send(KvChanged(worker_id=worker_id, events=(stored,)))
        router.ask(2000, pin=worker_id)

    sent = the(Dispatch, router.send(an_arrival(request_id="late", tokens=prompt, sampling=GREEDY)))

    assert sent.worker_id == f"d{len(busy)}"


def test_request_without_prefill_wait_is_not_rejected():
    """Send a slow worker two prompts: the second one fits into the prefill window, so it is sent at once and not rejected."""
    router = Lane(max_queue_seconds=0.1)
    router.ask(500)
    assert the(Dispatch, router.ask(500))


def test_no_rejection_before_the_rate_is_known():
    router = RouterMachineDriver(("d1", Role.DECODE), prefill_window_tokens=WINDOW, max_queue_seconds=0.1)
    for number in range(20):
        assert not [
            c for c in router.send(an_arrival(request_id=f"r{number}", tokens=1000 + number)) if isinstance(c, Reject)
        ]


def test_rejoined_worker_is_measured_anew():
    router = Lane(max_queue_seconds=0.5)
    router.leave("d0")
    router.join("d0", incarnation="2")
    router.ask(1000)

    assert not router.ask(1000)


class BusyLane(Lane):
    """A worker that computes its prompts one after another; `sent` are those that the router has sent to it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.began = self.now
        self.sent: list[Dispatch] = []

    def offer(self, tokens, **fields):
        """Send a request; return whether the router rejected it."""
        commands = self.ask(tokens, **fields)
        self._take(commands)
        return any(isinstance(each, Reject) for each in commands)

    def compute(self, slowness=1) -> int:
        """Compute the worker's first prompt, in a millisecond times `slowness` for each token; return its length in tokens."""
        work = self.sent.pop(0)
        tokens = len(work.start.tokens) // TOKEN_BYTES
        self.now = Nanos(self.now + tokens * slowness * SECOND // 1000)
        self._take(self.step(work, 1, 2, finish=Finish.LENGTH))
        return tokens

    def lose(self, worker_id):
        self.sent = [each for each in self.sent if each.worker_id != worker_id]
        self._take(self.leave(worker_id))

    def _take(self, commands):
        self.sent += [each for each in commands if isinstance(each, Dispatch)]

    @property
    def seconds(self) -> float:
        return (self.now - self.began) / SECOND

    def compute_until(self, tokens, offered=2):
        """Compute prompts, and offer `offered` of 600 tokens for each, until a prompt of this length is computed."""
        while self.seconds < 30.0:
            for _ in range(offered):
                self.offer(600)
            if self.compute() == tokens:
                return


@pytest.mark.parametrize(
    ("wait", "longest"),
    [({}, 10.0), ({"most_wait": Nanos(6 * SECOND)}, 6.0), ({"deadline": 7}, 7.0)],
)
def test_waiting_long_prompt_is_computed_before_it_is_late(wait, longest):
    """Give a worker short prompts all the time while a long one waits: the long one goes first when it must."""
    router = BusyLane(max_queue_seconds=10.0)
    router.offer(1000)
    if "deadline" in wait:
        wait = {"deadline": Nanos(router.now + wait["deadline"] * SECOND)}
    router.offer(3000, **wait)
    router.compute_until(3000)

    assert 4.0 < router.seconds <= DUE_SHARE * longest


def test_prompt_of_a_lost_worker_gets_a_new_wait():
    """Lose a worker with a long prompt after nine seconds: the other worker computes it before another long wait has passed."""
    router = BusyLane(workers=2, max_queue_seconds=10.0)
    router.offer(3000)
    lost = router.sent.pop()
    other = WorkerId("d1" if lost.worker_id == "d0" else "d0")
    for _ in range(5):
        router.offer(600, pin=other)
    while router.seconds < 9.0:
        router.offer(600, pin=other)
        router.compute()
    returned = router.seconds
    router.lose(lost.worker_id)
    router.compute_until(3000, offered=1)

    assert returned < router.seconds <= returned + DUE_SHARE * 10.0


def test_delay_of_a_prompt_in_time_is_no_error():
    """Let short prompts overtake a long one that is still in time: the limit gets no margin by this delay."""
    router = BusyLane(max_queue_seconds=10.0)
    router.offer(1000)
    router.offer(2000)
    router.compute_until(2000)
    while router.sent:
        router.compute()

    assert not any(router.offer(1000) for _ in range(10))


def test_deferred_prompt_leaves_a_margin_only_up_to_the_due_time():
    """Let prompts be late so that others are in time: requests are admitted until their predicted waits reach the due time."""
    router = BusyLane(max_queue_seconds=10.0)
    for tokens in (1000, 2500, 2500, 2500):
        router.offer(tokens)
    for _ in range(14):
        router.offer(600)
        router.compute()
    while router.sent:
        router.compute()

    rejected = [router.offer(1000) for _ in range(12)]

    assert router.seconds > 14.0, "a prompt of 2,500 tokens was late"
    assert 8 <= rejected.index(True) <= 10


def test_queue_that_is_slower_than_predicted_raises_the_margin():
    """Let a worker become three times as slow after it was given prompts: fewer requests are admitted than its present pace allows."""
    router = BusyLane(max_queue_seconds=10.0)
    for _ in range(10):
        router.offer(1000)
    while router.sent:
        router.compute(slowness=3)
    for _ in range(20):
        router.offer(1000)
        router.compute(slowness=1)

    rejected = [router.offer(1000) for _ in range(12)]

    assert rejected.index(True) <= 7


def test_short_prompt_is_not_rejected_for_long_ones_behind_it():
    """Let long prompts wait longer than the limit: a short one, which goes before them, is admitted, and a long one is rejected."""
    router = BusyLane(max_queue_seconds=5.0)
    router.offer(1000)
    router.offer(4000)
    router.offer(2500)

    assert router.offer(5000)
    assert not router.offer(50)
    router.compute()
    assert router.compute() == 50
