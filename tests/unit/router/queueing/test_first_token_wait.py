"""Rejection by the predicted first token: the wait in the engine of a full worker, and the margin for errors of predictions."""

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, Sampling
from fleet.core.roles import Placement, Role
from fleet.core.work import KvStored
from fleet.router.machine import OTHER_WORKERS_TRIED
from fleet.router.messages import KvChanged, PeerReserved, ReservationTotals, ThresholdsChanged
from fleet.router.queueing.prediction_errors import ENOUGH, FORGOTTEN_AFTER, KEPT, PredictionErrors
from fleet.router.state.departure_rate import EVIDENCE
from fleet.router.state.worker_table import RATE_USED_FOR
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, a_prompt, an_arrival
from tests.support.router.machine_driver import START, Dispatch, Reject, RouterMachineDriver, the

GREEDY = Sampling(temperature=0.0, max_tokens=8)


class FullWorker(RouterMachineDriver):
    """A router with a worker that answers one request at a time, each in one second; the router sends it up to four requests.

    With `workers`, there are several such workers.
    """

    def __init__(self, *, workers=("d1",), max_running=1, kv_blocks=1024, **settings):
        super().__init__(oversubscribe=4.0, **settings)
        for worker_id in workers:
            self.join(worker_id, Role.DECODE, max_running=max_running, kv_blocks=kv_blocks)
        self.on_worker: list[Dispatch] = []

    def limit(self, seconds: float):
        """Change the longest predicted wait with which a request is admitted."""
        thresholds = structs.replace(self.machine.thresholds(), max_queue_seconds=seconds)
        self.send(ThresholdsChanged(thresholds=thresholds))

    def arrive(self, name, **fields):
        commands = self.send(an_arrival(request_id=name, sampling=GREEDY, **fields))
        self.on_worker += [each for each in commands if isinstance(each, Dispatch)]
        return commands

    def answer(self, seconds=1.0):
        """Let `seconds` pass, and answer the worker's first request; the router then sends it the next ones."""
        self.now = Nanos(self.now + round(seconds * SECOND))
        self.step(self.on_worker[0], 1)
        commands = self.step(self.on_worker.pop(0), 2, finish=Finish.STOP)
        self.on_worker += [each for each in commands if isinstance(each, Dispatch)]

    def warm_up(self, seconds=1.0, prompt_tokens=10, pin="d1"):
        """Answer requests one after another, each after some time, while another one waits on the worker."""
        for number in range(EVIDENCE + 2):
            prompt = a_prompt(prompt_tokens, first=1 + number * prompt_tokens)
            self.arrive(f"warm{number}", tokens=prompt, pin=WorkerId(pin))
            if number:
                self.answer(seconds)
        while self.on_worker:
            self.answer(seconds)


def a_warm_worker(**settings) -> FullWorker:
    router = FullWorker(**settings)
    router.warm_up()
    return router


def test_request_that_would_wait_too_long_on_worker_is_rejected():
    router = a_warm_worker(max_queue_seconds=2.5)
    for name in ("runs", "waits"):
        assert the(Dispatch, router.arrive(name))

    refusal = the(Reject, router.arrive("late"))

    assert (refusal.request_id, refusal.reason) == ("late", Reason.QUEUE_FULL)
    assert "about 3 s" in refusal.message
    assert "max_queue_seconds" in refusal.message
    assert 2500 <= refusal.retry_after_ms <= 3500
    assert router.booked("d1")[0] == 2


LONG = a_prompt(60 * BLOCK_TOKENS, first=10_001)


def workers_with_prompt(full: list[str]) -> FullWorker:
    """Return a router with the workers `full`, which have cached the prompt LONG, and `idle`, which has not.

    On a worker in `full`, a request with LONG would wait a second for blocks.
    """
    router = FullWorker(workers=(*full, "idle"), max_running=4, kv_blocks=100, max_queue_seconds=60.0)
    stored = KvStored(tuple(chain(LONG, BLOCK_TOKENS)))
    for worker_id in full:
        router.warm_up(seconds=0.5, pin=worker_id, prompt_tokens=len(LONG) // TOKEN_BYTES)
        router.send(KvChanged(worker_id=WorkerId(worker_id), events=(stored,)))
    for number, worker_id in enumerate(full):
        prompt = a_prompt(50 * BLOCK_TOKENS, first=20_001 + 2_000 * number)
        assert the(Dispatch, router.arrive(f"runs-{worker_id}", pin=WorkerId(worker_id), tokens=prompt))
    assert the(Dispatch, router.arrive("preferred", tokens=LONG)).worker_id in full
    router.cancel("preferred")
    router.limit(0.75)
    return router


def test_full_workers_with_the_prompt_give_way_to_an_idle_one():
    router = workers_with_prompt([f"d{number}" for number in range(OTHER_WORKERS_TRIED + 2)])

    assert the(Dispatch, router.arrive("late", tokens=LONG)).worker_id == "idle"


def test_pair_with_a_full_decode_worker_takes_another_one():
    """Place a prompt on a pair whose decode worker is full: another decode worker is taken, as there is only one prefill worker."""
    router = workers_with_prompt(["full"])
    router.join("p1", Role.PREFILL)

    sent = the(Dispatch, router.arrive("late", tokens=LONG, placement=Placement.DISAGGREGATED))

    assert (sent.worker_id, router.booked("full")[0], router.booked("idle")[0]) == ("p1", 1, 1)


def test_request_with_a_free_place_is_never_rejected():
    """Send a request to a worker with a free place, whose measured rate of first tokens is slow because the worker was full."""
    router = a_warm_worker(max_queue_seconds=0.5)

    assert the(Dispatch, router.arrive("next"))


def test_blocks_that_another_request_holds_count_once():
    """Send requests to a worker of ten blocks: two with the same eight prompt blocks fit, two with different ones do not."""
    router = FullWorker(max_running=2, kv_blocks=10)
    router.warm_up(prompt_tokens=8 * BLOCK_TOKENS)
    router.limit(0.5)
    shared, other = (a_prompt(8 * BLOCK_TOKENS, first=first) for first in (10_001, 20_001))
    assert the(Dispatch, router.arrive("runs", tokens=shared))

    assert the(Reject, router.arrive("other", tokens=other)).reason is Reason.QUEUE_FULL
    assert the(Dispatch, router.arrive("shares", tokens=shared))


def test_slow_rate_is_forgotten_and_measured_again():
    """Let a full worker be slow: if its rate were kept for ever, it would never again be full, and so never measured again."""
    router = FullWorker(max_queue_seconds=60.0)
    router.warm_up(seconds=12.0)
    router.limit(10.0)
    router.arrive("runs")
    assert "about 24 s" in the(Reject, router.arrive("early")).message

    router.now = Nanos(router.now + RATE_USED_FOR + 1)
    for number in range(EVIDENCE):
        assert the(Dispatch, router.arrive(f"more{number}")), number
        router.answer()
    for number in range(2):
        assert the(Dispatch, router.arrive(f"waits{number}"))
    router.limit(3.5)

    assert "about 4 s" in the(Reject, router.arrive("late")).message, "the fast rate is used"


def test_wait_on_worker_adds_to_the_wait_in_the_queue():
    """Put four requests on the worker, which take four seconds; each request in the queue adds another second."""
    router = a_warm_worker(max_queue_seconds=5.5)
    for number in range(4 + EVIDENCE):
        router.arrive(f"more{number}")
        if number >= 4:
            router.answer()
    assert len(router.on_worker) == 4

    waiting = [router.arrive(f"waits{number}") for number in range(2)]
    refusal = the(Reject, router.arrive("late"))

    assert waiting == [[], []]
    assert "about 6 s" in refusal.message


def test_request_without_token_by_its_deadline_is_rejected():
    router = a_warm_worker()
    for name in ("runs", "waits"):
        router.arrive(name)
    tight, loose = (Nanos(router.now + seconds * SECOND) for seconds in (2, 5))

    refusal = the(Reject, router.arrive("tight", deadline=tight))

    assert "deadline" in refusal.message
    assert the(Dispatch, router.arrive("loose", deadline=loose))


def test_requests_of_peers_make_a_worker_full():
    router = a_warm_worker(max_queue_seconds=0.5)
    elsewhere = {WorkerId("d1"): ReservationTotals(0, 0, 1)}
    router.send(PeerReserved(replica="peer", booked=elsewhere))

    assert the(Reject, router.arrive("late")).reason is Reason.QUEUE_FULL


def test_uneven_first_tokens_make_the_limit_stricter():
    """Let requests that wait on the worker be answered after two seconds on average, but half of them after nearly three."""
    router = a_warm_worker(max_queue_seconds=2.6)
    for number in range(ENOUGH - 1):
        router.arrive(f"runs{number}")
        assert the(Dispatch, router.arrive(f"waits{number}")), number
        for _ in range(2):
            router.answer(seconds=1.4 if number % 2 else 0.6)

    router.arrive("runs")

    refusal = the(Reject, router.arrive("late"))
    assert "about 2 s" in refusal.message


def test_margin_is_a_high_quantile_of_the_latest_errors():
    errors, now = PredictionErrors(), START
    for number in range(ENOUGH - 1):
        errors.note(1.0, now)
        assert errors.margin(now) == 0.0, number
    errors.note(1.0, now)
    assert errors.margin(now) == 1.0
    for number in range(KEPT):
        errors.note(number / KEPT, now)
    assert errors.margin(now) == pytest.approx(0.98, abs=0.01)


def test_early_first_tokens_give_no_margin():
    errors = PredictionErrors()
    for _ in range(ENOUGH):
        errors.note(-1.0, START)
    assert errors.margin(START) == 0.0


def test_old_errors_are_forgotten():
    errors = PredictionErrors()
    for _ in range(ENOUGH):
        errors.note(60.0, START)
    later = Nanos(START + FORGOTTEN_AFTER + 1)
    assert errors.margin(later) == 0.0
    errors.note(60.0, later)
    assert errors.margin(later) == 0.0, "one error is not enough again"
