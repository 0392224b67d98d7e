"""Session pins: tests of rules 1 to 5 of `workers.store.session_pins`."""

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.requests import Finish
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Rejected
from kvstore.eviction.session_pauses import LEAST_SEEN
from tests.support.builders import a_prompt, a_start, some_progress, token_bytes
from workers.ports import PinChain, UnpinChain
from workers.store import session_pins as holds
from workers.store.session_pins import SessionPinPolicy, store_session_name

LONGEST = Nanos(100 * SECOND)
PROMPT = a_prompt(40)
AGENT = store_session_name("agent", b"")


def at(seconds: float) -> Nanos:
    return Nanos(round(seconds * SECOND))


class Worker:
    """A worker that runs attempts one after the other, and pins the blocks of their sessions."""

    def __init__(self):
        self.holds = SessionPinPolicy(LONGEST)
        self.works = 0

    def begin(self, now=0.0, **fields) -> str:
        self.works += 1
        start = a_start(request_id=f"w{self.works}", **{"tokens": PROMPT, "session": "agent", **fields})
        self.holds.began(start, at(now))
        return start.request_id

    def hear(self, work, *tokens, now=0.0, finish=None) -> list:
        return list(self.holds.stepped([some_progress(*tokens, request_id=work, finish=finish)], at(now)))

    def turn(self, began: float, ended: float) -> PinChain:
        """Run one request from its beginning to its end, and return the command to pin its blocks."""
        work = self.begin(began)
        self.hear(work, 1, now=began)
        (hold,) = self.hear(work, 2, now=ended, finish=Finish.STOP)
        return hold


def test_ended_attempt_pins_prompt_and_computed_answer():
    worker = Worker()
    work = worker.begin(salt=b"s" * 32)
    worker.hear(work, 7)
    worker.hear(work, 8, 9)

    (hold,) = worker.hear(work, 10, finish=Finish.STOP)

    name = store_session_name("agent", b"s" * 32)
    tokens = PROMPT + token_bytes([7, 8, 9])
    assert hold == PinChain(session=name, tokens=tokens, salt=b"s" * 32, lasting=LONGEST)


def test_attempt_with_tokens_pins_its_chain_however_it_ends():
    for finish in Finish:
        worker = Worker()
        work = worker.begin()
        worker.hear(work, 7)

        assert [type(each) for each in worker.hear(work, finish=finish)] == [PinChain]


def test_attempt_without_tokens_or_session_pins_nothing():
    worker = Worker()

    assert worker.hear(worker.begin(), finish=Finish.CANCELLED) == []
    assert worker.hear(worker.begin(session=""), 7, finish=Finish.STOP) == []
    assert worker.hear(worker.begin(phase=Phase.PREFILL, kv_path=KvPath.STORE), 7, finish=Finish.LENGTH) == []
    rejected = worker.begin()
    assert list(worker.holds.stepped([Rejected(request_id=rejected, reason=Reason.INTERNAL, message="")], at(0))) == []
    assert worker.hear(rejected, 7, finish=Finish.STOP) == []


def test_pin_ends_with_the_first_tokens_of_the_next_attempt():
    worker = Worker()
    worker.turn(0, 1)
    work = worker.begin(5)

    assert worker.hear(work, now=6) == []
    assert worker.hear(work, 7, now=7) == [UnpinChain(session=AGENT)]
    assert worker.hear(work, 8, now=8) == []


def test_pin_lasts_as_long_as_most_pauses_did():
    worker = Worker()
    now = 0.0
    for _ in range(LEAST_SEEN + 1):
        assert worker.turn(now, now + 1).lasting == LONGEST
        now += 1 + 10

    assert at(10) <= worker.turn(now, now + 1).lasting <= at(10 * 1.25)


def test_no_pin_lasts_longer_than_the_limit():
    worker = Worker()

    assert {worker.turn(turn * 1000, turn * 1000 + 1).lasting for turn in range(2 * LEAST_SEEN)} == {LONGEST}


def test_tenants_do_not_share_a_store_session():
    names = {store_session_name("agent", salt) for salt in (b"", b"a" * 32, b"b" * 32)}

    assert len(names) == 3


def test_oldest_sessions_are_forgotten_above_the_limit(monkeypatch):
    monkeypatch.setattr(holds, "MAX_SESSIONS", 3)
    worker = Worker()
    for index in range(10):
        work = worker.begin(session=f"agent {index}")
        worker.hear(work, 1, 2, finish=Finish.STOP)

    assert len(worker.holds.sessions) == 3
    assert not worker.holds.works
