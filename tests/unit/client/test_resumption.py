import pytest

from fleet.client.errors import DeadlineExceeded, FleetError, InvalidRequest, Unavailable
from fleet.client.results import StreamedAnswer
from fleet.client.resumption import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    RESUME_SECONDS,
    Resumption,
    RouterRing,
    addresses_of,
    resume_limit,
)
from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.v1 import inference_pb2 as pb
from tests.support.kvstore.builders import ManualClock

GONE = Unavailable("Socket closed")
FULL = Unavailable("all workers are busy", Reason.QUEUE_FULL, retry_after_seconds=2.0)


def tries(clock=None, *, routers=2, resume_seconds=10.0, timeout_seconds=None) -> Resumption:
    return Resumption(
        pb.GenerateRequest(text="hello"),
        routers=routers,
        resume_seconds=resume_seconds,
        timeout_seconds=timeout_seconds,
        clock=clock or ManualClock(),
    )


class Received(StreamedAnswer):
    """An answer that has received these messages."""

    def __init__(self, *messages: pb.GenerateResponse) -> None:
        super().__init__()
        for message in messages:
            self._take(message)


ADMITTED = pb.GenerateResponse(admitted=pb.Admitted(request_id="mine", model="tiny", resume_token="first"))


def a_delta(text: str, *token_ids: int, token: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=token_ids, resume_token=token))


def test_first_round_has_no_pause_and_later_ones_longer_pauses():
    broken = tries(resume_seconds=60.0)
    pauses = [broken.pause(GONE) for _ in range(12)]
    assert pauses[:2] == [0, 0]
    assert pauses[2:4] == [2 * FIRST_PAUSE_SECONDS] * 2
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_tries_end_with_the_last_error_after_their_time():
    clock = ManualClock()
    broken = tries(clock)
    broken.pause(GONE)
    clock.move(10 * SECOND)
    with pytest.raises(Unavailable) as raised:
        broken.pause(FULL)
    assert raised.value is FULL


def test_message_that_arrives_begins_the_time_anew():
    clock = ManualClock()
    broken = tries(clock)
    broken.pause(GONE)
    clock.move(9 * SECOND)
    broken.arrived()
    assert broken.pause(GONE) == 0
    clock.move(9 * SECOND)
    assert broken.pause(GONE) == 0


def test_deadline_ends_tries_with_its_own_error():
    clock = ManualClock()
    broken = tries(clock, timeout_seconds=5.0)
    broken.pause(GONE)
    clock.move(4 * SECOND)
    assert broken.request(Received())[1] == 1.0
    clock.move(1 * SECOND)
    with pytest.raises(DeadlineExceeded):
        broken.pause(GONE)


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        InvalidRequest("no"),
        Unavailable("lost", Reason.WORKER_LOST),
        Unavailable("slow down", Reason.RATE_LIMITED),
    ],
)
def test_error_of_a_router_that_answers_is_final(error):
    with pytest.raises(FleetError) as raised:
        tries().pause(error)
    assert raised.value is error


def test_full_router_is_tried_again_while_the_stream_is_broken():
    broken = tries()
    assert broken.pause(Unavailable("stopping", Reason.DRAINING)) == 0
    assert broken.pause(FULL) > 0, "it said that it takes a while"
    broken.arrived()
    with pytest.raises(Unavailable):
        broken.pause(FULL)


def test_without_resumption_every_error_is_final():
    never = tries(resume_seconds=0.0)
    with pytest.raises(Unavailable):
        never.pause(GONE)
    assert not never.request(Received())[0].resumable


def test_next_request_has_latest_token_and_all_that_was_received():
    answer = Received(ADMITTED, a_delta("Hel", 1, 2, token="second"), a_delta("lo", 3))

    message, timeout = tries().request(answer)

    assert timeout is None
    assert message.text == "hello"
    assert message.resumable
    assert message.resume == pb.Resume(token="second", token_ids=[1, 2, 3], text="Hello")


def test_request_of_which_nothing_arrived_is_sent_as_it_was():
    message, _ = tries().request(Received())
    assert not message.HasField("resume")


def test_begun_answer_without_a_resume_token_is_not_sent_again():
    """Break an answer that has begun and has no resume token: a new request would repeat the first tokens."""
    answer = Received(pb.GenerateResponse(admitted=pb.Admitted(request_id="mine", model="tiny")), a_delta("Hel", 1, 2))
    with pytest.raises(Unavailable, match="set prompt_secret or tenant_secret"):
        tries().request(answer)


def test_resumed_answer_keeps_the_id_of_the_first_request():
    again = pb.GenerateResponse(admitted=pb.Admitted(request_id="mine.r1", model="tiny", resume_token="third"))
    answer = Received(ADMITTED, a_delta("a", 1), again)
    assert answer.request_id == "mine"
    assert answer.resume().token == "third"


def test_ring_moves_on_once_from_a_router_that_failed():
    ring = RouterRing(["a", "b", "c"], ["a:1", "b:1", "c:1"])
    ring.leave("a")
    ring.leave("a")
    assert ring.current == "b"
    ring.leave("b")
    ring.leave("c")
    assert ring.current == "a"


def test_limits_and_addresses_are_checked():
    assert (resume_limit(None, 1), resume_limit(None, 2), resume_limit(3.0, 1)) == (0, RESUME_SECONDS, 3.0)
    assert addresses_of("a:1") == ("a:1",)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigurationRefused, match="resume_seconds"):
            resume_limit(wrong, 2)
    with pytest.raises(ConfigurationRefused, match="address"):
        addresses_of([])
