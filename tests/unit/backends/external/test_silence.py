"""The silence detector, with servers simulated in steps of a tenth of a second."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.backends.external.silence import (
    AbandonRequest,
    EndHold,
    ForgetTrial,
    HoldBack,
    OutstandingRequest,
    ReturnToRotation,
    SendTrial,
    SilenceDetector,
    TakeOutOfRotation,
    TrialOutcome,
)
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.settings.router import OpenAiWorkerSettings

LOOK = 100 * MILLISECOND
USUAL = 50 * MILLISECOND
NEVER = Nanos(10**18)


@dataclass
class Asked:
    work_id: RequestId
    sent_at: Nanos
    answered_at: Nanos  # when its first byte comes
    size: int
    streams: bool
    turn: int
    begun_at: Nanos | None = None
    quiet_since: int = 0
    moved: bool = False


@dataclass
class Server:
    """One simulated server, with the router's silence detector for it."""

    silence: SilenceDetector
    usual: int = USUAL
    hung: bool = False
    speaks: bool = True  # True: it goes on with streams that have begun
    refuses_trials: bool = False
    works: dict[RequestId, Asked] = field(default_factory=dict)
    said: list[object] = field(default_factory=list)
    trial_at: Nanos | None = None


class World:
    """Servers of one model."""

    def __init__(self, count: int = 2, **fields: object) -> None:
        made = OpenAiWorkerSettings(worker_id="w", url="http://h:1", model="m", **fields)
        self.servers = [Server(SilenceDetector(made)) for _ in range(count)]
        self.now = Nanos(1000 * SECOND)
        self.sent = 0

    def send(self, server: Server, seconds: float | None = None, *, size: int = 500, streams: bool = True) -> Asked:
        """Send a request that is answered after `seconds`; None: after the server's usual time."""
        self.sent += 1
        waits = server.usual if seconds is None else int(seconds * SECOND)
        turn = server.silence.answers + len(server.works) + 1
        asked = Asked(RequestId(f"r{self.sent}"), self.now, Nanos(self.now + waits), size, streams, turn)
        server.works[asked.work_id] = asked
        return asked

    def leave(self, server: Server, asked: Asked) -> None:
        """Let the client of a request leave, so that the request ends."""
        if server.works.pop(asked.work_id, None) is not None and asked.begun_at is None:
            server.silence.abandoned(self._seen(server, asked), self.now)

    def finish(self, server: Server, asked: Asked) -> None:
        server.works.pop(asked.work_id, None)

    def _seen(self, server: Server, asked: Asked) -> OutstandingRequest:
        begun = asked.begun_at is not None
        progressed = begun and server.speaks and not server.hung
        if progressed:
            asked.quiet_since = self.now
        return OutstandingRequest(
            work_id=asked.work_id,
            sent_at=asked.sent_at,
            size=asked.size,
            streams=asked.streams,
            begun=begun,
            progressed=progressed,
            quiet_for=Nanos(self.now - max(asked.quiet_since, asked.sent_at)),
            overtaken=server.silence.answers - asked.turn,
            moved=asked.moved,
        )

    def run(self, seconds: float, *, judged: bool = True) -> None:
        """Let time pass in steps of `LOOK`. With `judged`, let the silence detectors decide after each step."""
        for _ in range(round(seconds * SECOND / LOOK)):
            self.now = Nanos(self.now + LOOK)
            for server in self.servers:
                self._answer(server)
            for server in self.servers:
                server.silence.note(self.now, [self._seen(server, each) for each in server.works.values()])
            for server in self.servers if judged else ():
                siblings = [each.silence for each in self.servers if each is not server and not each.silence.out]
                for command in server.silence.decide(self.now, siblings, spare=True):
                    server.said.append(command)
                    self._obey(server, command)

    def _answer(self, server: Server) -> None:
        if server.trial_at is not None and (server.refuses_trials or not server.hung):
            waited = Nanos(self.now - server.trial_at)
            server.trial_at = None
            server.silence.trial_ended(
                self.now, waited, TrialOutcome.REFUSED if server.refuses_trials else TrialOutcome.ANSWERED
            )
        for each in list(server.works.values()):
            if each.begun_at is None and each.answered_at <= self.now and not server.hung:
                each.begun_at = each.answered_at
                waited = Nanos(each.answered_at - each.sent_at)
                server.silence.answered(each.sent_at, waited, each.size, streams=each.streams)
                if not each.streams:
                    self.finish(server, each)

    def _obey(self, server: Server, command: object) -> None:
        match command:
            case SendTrial():
                server.trial_at = self.now
            case ForgetTrial():
                server.trial_at = None
            case AbandonRequest(work_id=work_id):
                server.works.pop(work_id, None)

    def warm(self, seconds: float | None = None, times: int = 40, **fields: object) -> None:
        for _ in range(times):
            for server in self.servers:
                asked = self.send(server, seconds, **fields)
                self.run(max(0.1, seconds or 0.1))
                self.finish(server, asked)
        for server in self.servers:
            server.said.clear()


def outs(server: Server) -> list[TakeOutOfRotation]:
    return [each for each in server.said if isinstance(each, TakeOutOfRotation)]


def given_up(server: Server) -> list[RequestId]:
    return [each.work_id for each in server.said if isinstance(each, AbandonRequest)]


def a_hung_server(**fields):
    """Return a world that has served for a while, and its first server, which has just hung."""
    world = World(**fields)
    world.warm()
    hung = world.servers[0]
    hung.hung = True
    return world, hung


@pytest.mark.parametrize("streams", [True, False])
def test_hung_server_leaves_rotation_and_request_moves(streams):
    world = World()
    world.warm(streams=streams)
    hung = world.servers[0]
    hung.hung = True
    asked = world.send(hung, streams=streams)
    world.run(1.2)

    assert hung.silence.out
    assert given_up(hung) == [asked.work_id]
    assert not world.servers[1].said


@pytest.mark.parametrize("patience", [0.6, 1.0, 2.0])
def test_leaving_clients_do_not_hide_a_hung_server(patience):
    world, hung = a_hung_server()
    lost = 0
    while not hung.silence.out:
        asked = world.send(hung)
        world.run(patience)
        lost += asked.work_id in hung.works
        world.leave(hung, asked)
        assert lost <= 2


def test_suspect_server_is_held_and_requests_move_early():
    world, hung = a_hung_server()
    asked = world.send(hung)
    world.run(0.7)
    assert hung.silence.held
    assert not given_up(hung), "the trial request has waited for too short a time"
    world.run(0.2)

    assert given_up(hung) == [asked.work_id]
    assert not hung.silence.out
    world.run(0.4)
    assert hung.silence.out, "the request that moved is remembered"
    assert not hung.silence.held


def test_answered_trial_ends_the_hold():
    """Let a server pause for a moment, as in a garbage collection."""
    world, paused = a_hung_server()
    world.send(paused, 0.65)
    world.run(0.6)
    assert paused.silence.held
    paused.hung = False
    world.run(0.2)

    assert not paused.silence.held
    assert [type(each) for each in paused.said] == [SendTrial, HoldBack, EndHold]


def test_equally_silent_servers_are_not_held():
    world = World()
    world.warm()
    world.run(0.3)  # no server has sent anything since its requests were sent
    for server in world.servers:
        server.hung = True
        world.send(server)
    world.run(3)

    assert not any(isinstance(each, HoldBack) for server in world.servers for each in server.said)


def test_server_refusing_trials_is_not_held_for_long():
    world, hung = a_hung_server()
    hung.refuses_trials = True
    world.send(hung)
    world.run(0.9)

    assert not hung.silence.held
    assert not given_up(hung), "nothing was found out about it"


@pytest.mark.parametrize("concurrent", [True, False])
def test_whole_answer_moves_early_if_trials_do_not_queue(concurrent):
    world = World()
    world.warm(0.3, streams=False)
    server = world.servers[0]
    for _ in range(6 if concurrent else 0):
        world.send(server, 0.6, streams=False)
        quick = world.send(server, 0.3, streams=False)
        quick.sent_at = Nanos(quick.sent_at + 1)
        world.run(0.8)
    server.said.clear()
    server.hung = True
    asked = world.send(server, streams=False)
    world.run(3)

    assert given_up(server) == ([asked.work_id] if concurrent else [])


def test_impatient_clients_together_raise_suspicion():
    """Let clients leave one after the other, each of them before its own wait is a suspicious silence."""
    world, hung = a_hung_server()
    lost = 0
    while not hung.silence.held:
        asked = world.send(hung)
        world.run(0.3)
        world.leave(hung, asked)
        lost += 1
        assert lost <= 3
    world.run(1.5)

    assert hung.silence.out


def test_server_refusing_trials_is_out_after_three_silences():
    world, hung = a_hung_server()
    hung.refuses_trials = True
    for _ in range(3):
        assert not hung.silence.out
        asked = world.send(hung)
        world.run(1)
        world.leave(hung, asked)
    world.run(0.1)

    assert outs(hung)


def test_three_silent_requests_suffice_without_trials():
    world, hung = a_hung_server(trial_requests=False)
    for _ in range(3):
        world.leave(hung, asked := world.send(hung))
        assert asked.begun_at is None
    assert not outs(hung), "they left at once"
    for _ in range(3):
        asked = world.send(hung)
        world.run(1)
        world.leave(hung, asked)
    world.run(0.1)

    assert outs(hung)
    assert not any(isinstance(each, SendTrial) for each in hung.said)


def test_server_that_answers_again_returns():
    world, hung = a_hung_server()
    world.send(hung)
    world.run(3)
    assert hung.silence.out
    hung.hung = False
    world.run(0.3)

    assert not hung.silence.out
    assert any(isinstance(each, ReturnToRotation) for each in hung.said)


def test_continuing_stream_returns_its_server():
    world = World()
    world.warm()
    server = world.servers[0]
    world.send(server)
    world.run(1)
    server.hung = True
    world.run(4)
    assert server.silence.out
    server.hung = False
    world.run(0.2)

    assert not server.silence.out
    assert not given_up(server), "what it had begun goes on"


def test_repeated_hangs_lengthen_the_pause():
    world, hung = a_hung_server()
    pauses = []
    for _ in range(4):
        hung.hung = True
        world.send(hung)
        world.run(3)
        assert hung.silence.out
        hung.hung, began = False, world.now
        while hung.silence.out:
            world.run(0.1)
        pauses.append(world.now - began)

    assert pauses[-1] > 2 * SECOND > pauses[0]


def test_begun_answer_is_abandoned_after_silence_cut():
    world = World(silence_cut_seconds=10.0)
    world.warm()
    server = world.servers[0]
    asked = world.send(server)
    world.run(1)
    server.hung = True
    world.run(9)
    assert server.silence.out
    assert not given_up(server)
    world.run(2)

    assert given_up(server) == [asked.work_id]


def test_only_server_stays_and_its_requests_time_out():
    world = World(1, silence_cut_seconds=10.0)
    world.warm()
    server = world.servers[0]
    server.hung = True
    asked = world.send(server)
    world.run(9)
    assert not outs(server)
    assert not given_up(server)
    world.run(2)

    assert given_up(server) == [asked.work_id]


def test_overtaken_requests_count_as_silent():
    """Let a server behave as if it had two engines, one of which hangs."""
    world = World()
    world.warm()
    server = world.servers[0]
    stuck = []
    for number in range(60):
        asked = world.send(server, None if number % 2 else 10_000)
        stuck += [asked.work_id] if number % 2 == 0 else []
        world.run(0.3)
        if number % 2:
            world.finish(server, asked)

    assert set(given_up(server)) <= set(stuck)
    assert len(given_up(server)) >= 10
    assert outs(server)


# No false alarms.


def test_first_requests_of_all_servers_may_take_long():
    world = World(silence_timeout_seconds=600.0)
    for server in world.servers:
        world.send(server, 500)
    world.run(510)

    assert not any(outs(server) or given_up(server) for server in world.servers)


def test_loading_server_returns_after_its_load():
    world = World()
    loads, serves = world.servers
    loads.hung = True
    asked = world.send(loads)
    for _ in range(20):
        world.finish(serves, world.send(serves))
        world.run(0.2)
        world.finish(serves, next(iter(serves.works.values()), asked))
    world.run(600)
    loads.hung = False
    world.run(1)

    assert not loads.silence.out
    assert not outs(serves)


def test_permanently_slow_server_is_used_again():
    world = World()
    slow, quick = world.servers
    slow.usual = 6 * SECOND
    for _ in range(10):
        world.finish(quick, world.send(quick))
        world.run(0.2)
    slow.hung = True  # its trial takes as long as its requests
    world.send(slow)
    world.run(6)
    slow.hung = False
    world.run(1)
    slow.said.clear()
    asked = world.send(slow)
    world.run(6.2)

    assert asked.begun_at is not None
    assert not outs(slow)


@pytest.mark.parametrize("alone", [True, False])
def test_very_long_prompt_is_no_hang(alone):
    """Let a server compute one prompt after the other, so that later prompts wait for a very long one."""
    world = World()
    world.warm(size=4000)
    server = world.servers[0]
    world.send(server, 90, size=400_000)
    server.trial_at = None
    for _ in range(0 if alone else 10):
        world.run(1)
        world.send(server, 80, size=4000)
    server.refuses_trials = True  # a server that computes one prompt at a time would not answer a trial, either
    world.run(88)

    assert not outs(server)
    assert not given_up(server)


def test_moving_queue_is_no_hang():
    """Queue forty requests that are answered 0.9 s after each other, by a server that answered in 0.1 s before."""
    world = World()
    world.warm(0.1)
    server = world.servers[0]
    for number in range(40):
        world.send(server, 1.0 * (number + 1) * 0.9)
    world.run(40)

    assert not outs(server)


def test_equally_slow_servers_stay():
    world = World(3)
    world.warm()
    for server in world.servers:
        server.hung = True
    for _ in range(30):
        for server in world.servers:
            world.send(server)
        world.run(1)

    assert not any(outs(server) for server in world.servers)


def test_long_whole_answer_is_no_hang():
    world = World()
    world.warm(2.0, streams=False)
    server = world.servers[0]
    world.send(server, 14, streams=False)
    world.run(15)

    assert not outs(server)
    assert not given_up(server)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    usual=st.sampled_from([0.005, 0.05, 0.5, 3.0]),
    spread=st.sampled_from([0.1, 0.3, 0.5]),
    streams=st.booleans(),
)
def test_servers_with_usual_latency_never_leave(seed, usual, spread, streams):
    """Let clients do anything: some leave, some send many requests at once, some send none for a long time."""
    source = random.Random(seed)
    world = World(2)

    def time() -> float:
        return min(usual * source.lognormvariate(0, spread), 5 * usual)

    for _ in range(60):
        for server in world.servers:
            asked = world.send(server, time(), streams=streams)
            if source.random() < 0.3:
                world.leave(server, asked)
        world.run(source.choice([0.1, usual, 3 * usual, 10]))
        for server in world.servers:
            for asked in list(server.works.values()):
                if asked.begun_at is not None or source.random() < 0.05:
                    world.leave(server, asked)

    assert not any(outs(server) for server in world.servers)
