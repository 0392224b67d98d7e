"""Watchdog: tests of rules 1 to 8 of `workers.watchdog`."""

from collections.abc import Iterator

import msgspec
import pytest

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from workers.ports import Pulse
from workers.watchdog import EngineHealth, Watchdog, WatchdogSettings

TICK = 100 * MILLISECOND
SETTINGS = WatchdogSettings(floor_seconds=10, ceiling_seconds=300, step_factor=20)


class Watched:
    """An engine of one scheduler, and the watchdog that looks at it ten times a second."""

    def __init__(self, settings: WatchdogSettings = SETTINGS) -> None:
        self.watchdog = Watchdog(settings)
        self.now = Nanos(5 * SECOND)
        self.pulse = Pulse(steps=0, tokens=0, working=False)
        self.seen: list[EngineHealth] = []

    def look(self, after: int = TICK, **changed) -> EngineHealth:
        self.pulse = msgspec.structs.replace(self.pulse, **changed)
        self.now = Nanos(self.now + after)
        self.seen.append(self.watchdog.look([self.pulse], self.now))
        return self.seen[-1]

    def steps(self, number: int, *, tokens: int, each_seconds: float) -> None:
        """Make `number` steps, each of which takes `each_seconds`, one after the other."""
        for _ in range(number):
            self.look(working=True, steps=self.pulse.steps + 1, tokens=tokens)
            self.stand_still(each_seconds - TICK / SECOND)

    def stand_still(self, seconds: float, **changed) -> None:
        for _ in range(round(seconds * SECOND / TICK)):
            self.look(**changed)

    def seconds_until(self, health: EngineHealth, **changed) -> float:
        """Let the engine make no progress until the watchdog reports this health; return the seconds until then."""
        began = self.now
        while self.look(**changed) is not health:
            assert self.now - began < 1000 * SECOND
        return (self.now - began) / SECOND


def test_an_engine_that_stops_stepping_is_suspect_and_then_hung():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)

    assert engine.seconds_until(EngineHealth.SUSPECT) == pytest.approx(5, abs=0.2)
    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(5, abs=0.2)


def test_patience_is_a_multiple_of_the_slowest_step_of_that_size():
    engine = Watched()
    engine.steps(5, tokens=2048, each_seconds=2.0)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(40, abs=4)


def test_slow_prompts_do_not_make_decode_steps_slow_to_miss():
    engine = Watched()
    engine.steps(5, tokens=2048, each_seconds=5.0)
    engine.steps(20, tokens=4, each_seconds=0.1)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(10, abs=0.2)


def test_a_size_not_seen_gets_time_in_proportion_to_its_tokens():
    engine = Watched()
    engine.steps(20, tokens=1, each_seconds=0.1)
    engine.look(steps=engine.pulse.steps + 1, tokens=64)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(20 * 0.1 * 64, rel=0.2)


def test_a_size_not_seen_gets_no_more_time_than_a_larger_one():
    engine = Watched()
    engine.steps(20, tokens=2, each_seconds=0.1)
    engine.steps(5, tokens=4096, each_seconds=1.0)
    engine.look(steps=engine.pulse.steps + 1, tokens=512)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(20, abs=2)


def test_an_engine_that_has_not_stepped_yet_gets_the_ceiling():
    engine = Watched()
    engine.look(working=True)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(300, abs=0.2)


def test_work_of_a_new_kind_gets_the_ceiling_and_teaches_nothing():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.look(steps=engine.pulse.steps + 1, novel=True)
    engine.stand_still(290)
    assert set(engine.seen) == {EngineHealth.HEALTHY, EngineHealth.SUSPECT}

    engine.look(steps=engine.pulse.steps + 1, novel=False)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(10, abs=0.2)


def test_requests_to_a_hung_engine_give_it_no_more_time():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.stand_still(3)

    assert engine.seconds_until(EngineHealth.HUNG, novel=True) == pytest.approx(7, abs=0.2)


FETCH = Nanos(30 * SECOND)


def test_stalled_kv_transfer_is_no_hang_within_its_limit():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.look(steps=21, working=True, fetch_limit=FETCH)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(30, abs=0.5)


def test_stall_of_a_kv_transfer_is_not_learned_as_a_step():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.look(steps=21, working=True, fetch_limit=FETCH)
    engine.stand_still(14)
    engine.look(steps=22, fetch_limit=Nanos(0))

    assert EngineHealth.HUNG not in engine.seen
    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(10, abs=0.2)


def test_transfers_that_reach_a_hung_engine_give_it_no_time():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)

    assert engine.seconds_until(EngineHealth.HUNG, fetch_limit=FETCH) == pytest.approx(10, abs=0.2)


def test_a_slow_step_is_forgotten():
    engine = Watched()
    engine.steps(1, tokens=4, each_seconds=8.0)
    engine.steps(1, tokens=4, each_seconds=0.1)
    engine.steps(12_000, tokens=4, each_seconds=0.1)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(20 * 8 / 4, rel=0.05)  # two half-lives later


def test_an_idle_engine_never_hangs():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.look(working=False)

    engine.stand_still(3600)

    assert set(engine.seen) == {EngineHealth.HEALTHY}


def test_an_engine_stopped_while_idle_is_hung_when_work_comes():
    engine = Watched()
    engine.steps(20, tokens=4, each_seconds=0.1)
    engine.look(working=False)
    engine.stand_still(3600)

    assert engine.seconds_until(EngineHealth.HUNG, working=True) == pytest.approx(10, abs=0.3)


def test_prompt_of_100_000_tokens_is_no_hang():
    engine = Watched()
    engine.steps(50, tokens=4, each_seconds=0.1)
    for chunk in range(49):  # chunks of 2048 tokens; the last ones take five times as long as the first
        engine.steps(1, tokens=2048, each_seconds=2.0 + chunk / 6)

    assert engine.now > 300 * SECOND
    assert set(engine.seen) == {EngineHealth.HEALTHY}


@pytest.mark.parametrize("seconds", [5, 60, 86_400])
def test_a_machine_that_was_suspended_is_no_hang(seconds):
    engine = Watched()
    engine.steps(50, tokens=4, each_seconds=0.1)

    engine.look(after=seconds * SECOND)

    assert engine.seen[-1] is EngineHealth.HEALTHY
    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(9, abs=0.3), "what follows is watched as before"


def test_a_starved_watchdog_still_notices_a_hang():
    engine = Watched()
    engine.steps(50, tokens=4, each_seconds=0.1)

    seconds = [engine.look(after=3 * SECOND) for _ in range(10)]

    assert seconds[-1] is EngineHealth.HUNG


def test_a_suspension_is_not_learned_as_the_time_of_a_step():
    engine = Watched()
    engine.steps(50, tokens=4, each_seconds=0.1)
    engine.look(after=3600 * SECOND, steps=engine.pulse.steps + 1)

    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(10, abs=0.3)


def test_an_excused_engine_is_measured_anew():
    engine = Watched()
    engine.steps(50, tokens=4, each_seconds=0.1)
    engine.stand_still(8)

    engine.watchdog.excuse()

    assert engine.look() is EngineHealth.HEALTHY
    assert engine.seconds_until(EngineHealth.HUNG) == pytest.approx(10, abs=0.3)


def test_an_engine_is_as_bad_as_its_worst_scheduler():
    watchdog = Watchdog(SETTINGS)

    def look(now: Nanos, number: int) -> EngineHealth:
        good, bad = (Pulse(steps=steps, tokens=4, working=True) for steps in (number, min(number, 40)))
        return watchdog.look([good, bad], now)

    found = [look(Nanos(number * TICK), number) for number in range(200)]

    assert found[-1] is EngineHealth.HUNG
    assert EngineHealth.HUNG not in found[:100]


def looks(watchdog: Watchdog, pulses: list[Pulse], seconds: int) -> Iterator[EngineHealth]:
    return (watchdog.look(pulses, Nanos(number * TICK)) for number in range(seconds * 10))


def test_an_engine_that_shows_no_steps_is_not_watched():
    assert set(looks(Watchdog(SETTINGS), [], 1000)) == {EngineHealth.HEALTHY}


def test_a_watchdog_that_is_off_finds_nothing():
    settings = msgspec.structs.replace(SETTINGS, enabled=False)

    found = set(looks(Watchdog(settings), [Pulse(steps=1, tokens=1, working=True)], 1000))

    assert found == {EngineHealth.HEALTHY}


def test_a_ceiling_below_the_floor_is_refused():
    with pytest.raises(ValueError, match=r"^ceiling_seconds: 5 is below floor_seconds, 10"):
        WatchdogSettings(ceiling_seconds=5)
