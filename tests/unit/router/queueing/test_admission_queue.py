"""The admission queue: order, fairness, dropped requests, and predicted waits."""

import random
from itertools import count

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import ModelName, RequestId
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest
from fleet.router.state.departure_rate import EVIDENCE
from fleet.router.state.live_requests import queue_position

MODEL = ModelName("tiny")
NOBODY: dict[str, float] = {}


class Room:
    """An admission queue with a clock; it checks itself after each step."""

    def __init__(self, weights=NOBODY, *, priority_seconds=10.0, size_seconds=0.0):
        self.room = AdmissionQueue(weights)
        self.now = Nanos(0)
        self._seq = count(1)
        self._worth = {"priority_seconds": priority_seconds, "size_seconds": size_seconds}
        self.tokens: dict[str, int] = {}

    def add(self, name, tenant="", *, priority=0, tokens=100, stays=False, model=MODEL):
        self.tokens[name] = tokens
        waiting = QueuedRequest(
            request_id=RequestId(name),
            model=model,
            tenant=tenant,
            rank=queue_position(self.now, priority, tokens, **self._worth),
            seq=next(self._seq),
            tokens=tokens,
            stays=stays,
        )
        self.room.add(waiting, self.now)
        self.room.check()

    def serve(self, model=MODEL):
        name = self.room.first(model)
        assert name is not None
        self.room.served(name, model, self.tokens[name], self.tokens[name], self.now)
        self.room.check()
        return name

    def serve_all(self):
        return [self.serve() for _ in range(len(self.room.waiting))]


def test_first_come_first_served_by_default():
    room = Room()
    for name in "abc":
        room.add(name, tokens=300 - 100 * "abc".index(name))
        room.now += SECOND
    assert room.serve_all() == ["a", "b", "c"]


def test_higher_priority_goes_first():
    room = Room()
    room.add("low")
    room.now += SECOND
    room.add("high", priority=1)
    assert room.serve_all() == ["high", "low"]


def test_low_priority_is_served_in_bounded_time():
    room = Room(priority_seconds=10.0)
    room.add("low", priority=0)
    served = None
    for second in range(100):
        room.now = Nanos(second * SECOND)
        room.add(f"high{second}", priority=3)
        room.add(f"more{second}", priority=3)  # two requests arrive for each one that is served
        if room.serve() == "low":
            served = second
            break
    assert served == pytest.approx(60, abs=2)  # 30 s of arrivals, two a second, go before it


def test_very_large_priority_seconds_are_strict():
    room = Room(priority_seconds=1e6)
    room.add("low")
    room.now += 3600 * SECOND
    room.add("high", priority=1)
    assert room.serve_all() == ["high", "low"]


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_huge_priority_seconds_do_not_overflow(seconds):
    room = Room(priority_seconds=seconds, size_seconds=seconds)
    room.add("plain", tokens=0)
    room.add("high", priority=100, tokens=0)
    room.add("higher", priority=101, tokens=0)
    room.add("long", priority=0, tokens=1_000_000)
    assert room.serve_all() == ["higher", "high", "plain", "long"]


def test_size_seconds_prefer_short_prompts_within_bounds():
    room = Room(size_seconds=10.0)
    room.add("long", tokens=6000)
    for second in range(200):
        room.now = Nanos(second * SECOND)
        room.add(f"short{second}", tokens=10)
        room.add(f"other{second}", tokens=10)
        if room.serve() == "long":
            break
    assert 100 < second < 130  # 60 s of arrivals, two a second, go before it


def test_tenants_share_computation_by_weight():
    """Serve requests of different sizes and numbers: the shares of the tenants are within 5 % of their weights."""
    weights = {"gold": 3.0, "silver": 2.0}
    room = Room(weights)
    dice = random.Random(5)
    tenant_of = {}
    mean = {"gold": 200, "silver": 2000, "other": 500}
    for number in range(4000):
        tenant = ("gold", "gold", "gold", "gold", "gold", "gold", "silver", "other")[number % 8]
        name = f"r{number}"
        tenant_of[name] = tenant
        room.add(name, tenant, tokens=dice.randrange(1, 2 * mean[tenant]))
    computed = dict.fromkeys(mean, 0)
    while sum(computed.values()) < 600_000:
        name = room.serve()
        computed[tenant_of[name]] += room.tokens[name]
    shares = {tenant: tokens / sum(computed.values()) for tenant, tokens in computed.items()}
    assert shares["gold"] == pytest.approx(3 / 6, rel=0.05)
    assert shares["silver"] == pytest.approx(2 / 6, rel=0.05)
    assert shares["other"] == pytest.approx(1 / 6, rel=0.05)


def test_idle_tenant_earns_no_credit():
    room = Room()
    for number in range(100):
        room.add(f"a{number}", "a")
    for _ in range(50):
        room.serve()
    for number in range(100):
        room.add(f"b{number}", "b")
    served = [room.serve()[0] for _ in range(20)]
    assert abs(served.count("a") - served.count("b")) <= 1


def test_priorities_do_not_overtake_other_tenants():
    room = Room()
    for number in range(10):
        room.add(f"a{number}", "a", priority=100)
        room.add(f"b{number}", "b", priority=0)
    served = [room.serve()[0] for _ in range(10)]
    assert served.count("b") == 5


def test_queue_of_a_model_does_not_delay_another():
    room = Room()
    room.add("here")
    room.add("there", model=ModelName("other"))
    assert room.serve(ModelName("other")) == "there"
    assert room.serve() == "here"


def test_full_queue_drops_newest_of_largest_tenant():
    room = Room()
    for number in range(5):
        room.now += SECOND
        room.add(f"flood{number}", "flood")
    room.add("modest", "modest")
    assert room.room.request_to_drop() == "flood4"


def test_tenant_weight_allows_more_waiting_tokens():
    room = Room({"large": 10.0})
    for number in range(5):
        room.add(f"large{number}", "large")
    room.add("small0", "small")
    assert room.room.request_to_drop() == "small0"


def test_previously_placed_request_is_not_dropped():
    room = Room()
    room.add("old")
    room.now += SECOND
    room.add("again", stays=True)
    assert room.room.request_to_drop() == "old"
    room.room.discard(RequestId("old"))
    assert room.room.request_to_drop() is None


def test_no_wait_prediction_without_evidence():
    room = Room()
    for number in range(EVIDENCE + 1):
        room.add(f"r{number}")
    assert room.room.seconds_to_wait(MODEL, "", room.now) is None
    for _ in range(EVIDENCE - 1):
        room.now += SECOND
        room.serve()
    assert room.room.seconds_to_wait(MODEL, "", room.now) is None
    room.now += SECOND
    room.serve()
    assert room.room.seconds_to_wait(MODEL, "", room.now) == pytest.approx(1.0)


def test_predicted_wait_is_backlog_over_departure_rate():
    room = Room()
    for number in range(EVIDENCE + 40):
        room.add(f"r{number}", "heavy")
    for _ in range(EVIDENCE):
        room.now += SECOND // 2
        room.serve()
    room.add("one", "light")
    assert room.room.seconds_to_wait(MODEL, "heavy", room.now) == pytest.approx(41 / 2)
    assert room.room.seconds_to_wait(MODEL, "light", room.now) == pytest.approx(1.0)
    assert room.room.seconds_to_wait(MODEL, "third", room.now) == 0


def test_predicted_wait_grows_without_departures():
    room = Room()
    for number in range(EVIDENCE + 10):
        room.add(f"r{number}")
    for _ in range(EVIDENCE):
        room.now += SECOND
        room.serve()
    before = room.room.seconds_to_wait(MODEL, "", room.now)
    room.now += 30 * SECOND
    assert room.room.seconds_to_wait(MODEL, "", room.now) > 10 * before


def test_queue_forgets_departed_tenants():
    room = Room()
    for number in range(2000):
        room.add(f"r{number}", f"tenant{number}")
        room.serve()
    (queue,) = room.room.queues.values()
    assert len(queue.clocks) < 200
