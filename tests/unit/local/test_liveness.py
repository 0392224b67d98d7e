"""Liveness: a hung child process is distinguished from one that is slow, traced, loading or suspended with the machine."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.local.liveness import (
    SAMPLE_INTERVAL,
    SUPERVISOR_PAUSE,
    HangDetected,
    Liveness,
    LivenessLimits,
    ProcessSample,
)

LIMITS = LivenessLimits(stopped=Nanos(3 * SECOND), silent=Nanos(5 * SECOND))
IDLE = ProcessSample()
STOPPED = ProcessSample(stopped=True)


class Watched:
    """A child process that the supervisor samples at regular intervals."""

    def __init__(self, limits: LivenessLimits = LIMITS, *, beats: bool = True) -> None:
        self.now = Nanos(0)
        self.liveness = Liveness(limits, self.now)
        if beats:
            assert self.look(heartbeat=True) is None

    def look(
        self, look: ProcessSample = IDLE, *, heartbeat: bool = False, after: int = SAMPLE_INTERVAL
    ) -> HangDetected | None:
        self.now = Nanos(self.now + after)
        return self.liveness.observe(look, heartbeat=heartbeat, now=self.now)

    def until_hang(self, look: ProcessSample, most_seconds: int = 3600) -> float | None:
        """Give equal samples, and return the seconds until the child counts as hung; None if it never does."""
        began = self.now
        while self.now < began + most_seconds * SECOND:
            if self.look(look) is not None:
                return (self.now - began) / SECOND
        return None


def test_a_child_that_is_stopped_hangs_after_its_limit():
    assert Watched().until_hang(STOPPED) == 3


def test_a_child_that_is_stopped_while_it_loads_hangs_too():
    assert Watched(beats=False).until_hang(STOPPED) == 3


def test_a_child_that_says_nothing_hangs_after_its_limit():
    assert Watched().until_hang(IDLE) == 5


def test_a_child_that_sends_no_beats_need_not_speak():
    assert Watched(LivenessLimits(stopped=LIMITS.stopped), beats=False).until_hang(IDLE) is None


def test_a_child_that_loads_for_an_hour_does_not_hang():
    assert Watched(beats=False).until_hang(IDLE) is None


def test_child_with_a_spinning_loop_hangs():
    watched = Watched()
    found = [watched.look(ProcessSample(runnable=True, ran=Nanos(n * SAMPLE_INTERVAL))) for n in range(1, 11)]

    assert found[-1] == HangDetected("has said nothing for 5 s")
    assert found[:-1] == [None] * 9


def test_a_child_that_a_debugger_holds_does_not_hang():
    assert Watched().until_hang(ProcessSample(stopped=True, traced=True)) is None


def test_a_debugger_that_lets_go_gives_the_whole_limit_again():
    watched = Watched()
    assert watched.until_hang(ProcessSample(traced=True), 60) is None
    assert watched.until_hang(IDLE) == 5


def test_time_without_samples_does_not_count():
    watched = Watched()
    for _ in range(9):
        assert watched.look() is None
    assert watched.look(STOPPED, after=60 * SECOND) is None
    assert watched.until_hang(IDLE) == 5


def test_a_child_that_gets_no_core_does_not_hang():
    assert Watched().until_hang(ProcessSample(runnable=True)) is None


def test_time_that_a_child_waited_for_a_core_does_not_count():
    watched = Watched()
    waiting = 4 * SAMPLE_INTERVAL // 5  # the child runs for a fifth of the time, as beside four busy loops
    found = [watched.look(ProcessSample(waited=Nanos(n * waiting), ran=Nanos(n))) for n in range(1, 60)]

    assert found.index(HangDetected("has said nothing for 5 s")) == 49


LOOKS = st.tuples(
    st.builds(ProcessSample, stopped=st.booleans(), traced=st.booleans(), runnable=st.booleans()),
    st.booleans(),
    st.integers(MILLISECOND, 3 * SUPERVISOR_PAUSE),
)


@given(st.lists(LOOKS, max_size=80))
def test_no_child_hangs_before_its_limit_of_time_looked_at(looks):
    watched, since_sign = Watched(), 0
    for look, heartbeat, after in looks:
        hang = watched.look(look, heartbeat=heartbeat, after=after)
        void = look.traced or after >= SUPERVISOR_PAUSE or (heartbeat and not look.stopped)
        since_sign = 0 if void else since_sign + after
        if hang is not None:
            assert since_sign >= LIMITS.stopped
            return
