"""Virtual engine: several steps simulated at once are compared with single steps, and its numbers of blocks are always right."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.batching.attempts import EngineLimits, Job
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.sim.kernel import Kernel
from fleet.sim.virtual_engine import StepProgress, VirtualEngine

BLOCK = 16


class StraightLine:
    """Step times: 10 ms a step, 1 ms a prompt token, 1 ms a sequence, 10 µs a token of context."""

    def seconds(self, prefill_tokens: float, prefill_pairs: float, decodes: float, decode_context: float) -> float:
        return 0.010 + 0.001 * prefill_tokens + 0.001 * decodes + 1e-5 * decode_context


class OneByOne(VirtualEngine):
    """An engine that simulates every step by itself."""

    def _steps_together(self) -> int:
        return 1


class Bench:
    """An engine with its clock and all its reports."""

    def __init__(self, kind: type[VirtualEngine] = VirtualEngine, seed: int = 1, **limits: int):
        self.kernel = Kernel(seed)
        self.told: dict[str, list[tuple[Nanos, StepProgress]]] = {}
        self.stored: set[int] = set()
        given = {"kv_blocks": 100, "block_tokens": BLOCK, "max_running": 8, "step_tokens": 64, **limits}
        self.engine = kind(self.kernel, StraightLine(), EngineLimits(**given), self._tell, self._changed)

    def _tell(self, told: list[StepProgress]) -> None:
        for each in told:
            self.told.setdefault(each.attempt_id, []).append((self.kernel.now(), each))
        self.engine.check()

    def _changed(self, stored: list[int], removed: list[int]) -> None:
        self.stored = (self.stored - set(removed)) | set(stored)

    def work(self, name: str, prompt: int, answer: int, at: float = 0.0, keys: tuple[int, ...] | None = None) -> None:
        """Submit a job to the engine at `at` seconds; it shares no blocks with other jobs unless `keys` names its blocks."""
        chain = tuple(hash((name, index)) for index in range(prompt // BLOCK)) if keys is None else keys
        job = Job(attempt_id=RequestId(name), prompt_tokens=prompt, answer_tokens=answer, keys=chain)
        self.kernel.at(Nanos(round(at * SECOND)), lambda: self.engine.submit(job))

    def run(self) -> None:
        self.kernel.run()
        self.engine.check()
        assert not self.engine.held
        assert not self.engine.kv_blocks_used

    def instants(self, name: str) -> tuple[float, float]:
        """Return the instants of the first token and of the end in seconds."""
        return self.told[name][0][0] / SECOND, self.told[name][-1][0] / SECOND

    def tokens(self, name: str) -> int:
        return sum(told.tokens for _, told in self.told[name])

    def cached(self, name: str) -> int | None:
        return self.told[name][0][1].cached_tokens


def test_single_request_takes_prompt_and_decode_steps():
    bench = Bench()
    bench.work("one", 40, 11)
    bench.run()
    first = 0.010 + 40 * 0.001
    # Ten more tokens; the context is the prompt and the tokens before.
    rest = sum(0.011 + 1e-5 * (41 + step) for step in range(10))
    assert bench.instants("one") == (pytest.approx(first), pytest.approx(first + rest))
    assert bench.tokens("one") == 11


def test_long_prompt_takes_several_steps():
    bench = Bench(step_tokens=64)
    bench.work("one", 150, 1)
    bench.run()
    assert bench.instants("one")[0] == pytest.approx(3 * 0.010 + 150 * 0.001)
    assert bench.engine.computed_tokens == 150


def test_arrival_ends_step_run_after_current_step():
    bench = Bench()
    bench.work("long", 16, 1000)
    bench.work("short", 16, 1, at=1.0)
    bench.run()
    assert 1.0 < bench.instants("short")[0] < 1.0 + 0.025 + 0.045


def test_cached_prompt_is_not_computed_again():
    bench = Bench()
    bench.work("one", 64, 2)
    bench.work("again", 64, 2, at=1.0, keys=tuple(hash(("one", index)) for index in range(4)))
    bench.run()
    assert bench.cached("one") == 0
    assert bench.cached("again") == 48  # the last block is computed again for its last token's logits
    assert bench.engine.computed_tokens == 64 + 16


def test_oldest_idle_block_is_evicted_first():
    bench = Bench(kv_blocks=10)
    for number in range(5):
        bench.work(f"old {number}", 32, 2, at=float(number))
    bench.work("last", 128, 2, at=9.0)
    bench.run()
    assert {hash(("last", index)) for index in range(8)} <= bench.stored
    assert hash(("old 0", 0)) not in bench.stored
    assert hash(("old 4", 0)) in bench.stored


def test_prompt_waits_for_room():
    bench = Bench(kv_blocks=10)
    bench.work("first", 96, 20)
    bench.work("second", 96, 2, at=0.001)
    bench.run()
    assert bench.instants("second")[0] > bench.instants("first")[1]


def test_growing_answers_preempt_youngest_and_all_end():
    bench = Bench(kv_blocks=10)
    bench.work("first", 48, 80)
    bench.work("second", 48, 80, at=0.001)
    bench.run()
    assert bench.engine.preempted >= 1
    assert bench.tokens("first") == bench.tokens("second") == 80
    assert bench.instants("first")[1] < bench.instants("second")[1]


def test_fetched_blocks_are_not_computed():
    bench = Bench()
    keys = tuple(range(1, 7))
    job = Job(attempt_id=RequestId("one"), prompt_tokens=96, answer_tokens=3, keys=keys, fetched_tokens=95)
    assert bench.engine.fetch(job) == 6
    assert bench.kernel.run() == 0  # nothing happens before the blocks arrive
    bench.engine.fetched(job.attempt_id)
    bench.run()
    assert bench.engine.computed_tokens == 1
    assert bench.tokens("one") == 3


def test_cached_blocks_are_not_fetched_again():
    bench = Bench()
    keys = tuple(range(1, 7))
    bench.work("before", 64, 1, keys=keys[:4])
    bench.kernel.run()
    job = Job(attempt_id=RequestId("one"), prompt_tokens=96, answer_tokens=1, keys=keys, fetched_tokens=95)
    assert bench.engine.fetch(job) == 2
    bench.engine.cancel(job.attempt_id)
    bench.engine.fetched(job.attempt_id)  # too late, so it has no effect
    bench.run()


def test_handoff_without_room_is_queued():
    bench = Bench(kv_blocks=8)
    bench.work("before", 96, 10)
    bench.kernel.run(until=Nanos(50 * MILLISECOND))
    job = Job(attempt_id=RequestId("one"), prompt_tokens=64, answer_tokens=1, keys=(1, 2, 3, 4), fetched_tokens=63)
    assert bench.engine.fetch(job) is None
    bench.run()
    assert bench.engine.computed_tokens == 96 + 64


def test_cancelled_attempt_leaves_nothing_in_any_state():
    bench = Bench(kv_blocks=20, max_running=2)
    bench.work("runs", 48, 100)
    bench.work("is computed", 160, 5, at=0.2)
    bench.work("waits", 48, 5, at=0.2)
    bench.kernel.run(until=Nanos(SECOND // 4))
    for name in ("runs", "is computed", "waits", "never was"):
        bench.engine.cancel(RequestId(name))
        bench.engine.check()
    bench.run()


jobs = st.lists(
    st.tuples(
        st.integers(0, 200_000),  # arrival in ticks of 10 µs; all steps last whole ticks
        st.integers(1, 120),  # tokens of the prompt
        st.integers(1, 60),  # tokens of the answer
        st.integers(0, 3),  # which of four prefixes it has
    ),
    min_size=1,
    max_size=12,
)


def instants_of(ticks: set[int]) -> dict[int, float]:
    """Return the instant of each tick in seconds, moved a little, so that the distance of two instants is never a whole number of ticks.

    The engine's steps end whole ticks after an arrival, so no other arrival falls on the end of a step.
    """
    return {tick: tick * 1e-5 + place * 8e-7 for place, tick in enumerate(sorted(ticks))}


@given(jobs=jobs, kv_blocks=st.integers(13, 40))
@example(jobs=[(30_933, 102, 12, 0), (55_208, 1, 1, 0)], kv_blocks=15)  # not moved, it comes at a step's end
@settings(max_examples=60, deadline=None)
def test_step_run_ends_when_single_steps_would(jobs, kv_blocks):
    benches = [Bench(kind, kv_blocks=kv_blocks) for kind in (VirtualEngine, OneByOne)]
    instants = instants_of({tick for tick, *_ in jobs})
    for bench in benches:
        for number, (tick, prompt, answer, family) in enumerate(jobs):
            keys = tuple(100 * family + index for index in range(prompt // BLOCK))
            bench.work(str(number), prompt, answer, instants[tick], keys)
        bench.run()
    jumping, stepping = benches
    for name in map(str, range(len(jobs))):
        assert jumping.instants(name) == pytest.approx(stepping.instants(name), abs=1e-6)
        assert jumping.tokens(name) == stepping.tokens(name) == jobs[int(name)][2]
        assert jumping.cached(name) == stepping.cached(name)
    assert jumping.engine.preempted == stepping.engine.preempted
    assert jumping.stored == stepping.stored
    assert jumping.engine.busy == pytest.approx(stepping.engine.busy, abs=1000)


def test_arrival_at_step_end_comes_first_in_step_run():
    """Let a request arrive exactly at the end of a step: among single steps, the seed decides the order; in a step run, it comes first."""
    found: list[set[tuple[float, float]]] = []
    for kind in (VirtualEngine, OneByOne):
        benches = [Bench(kind, seed) for seed in range(12)]
        for bench in benches:
            bench.work("long", 102, 12)
            bench.work("short", 1, 1, at=0.24275)  # prompt steps of 74 and 48 ms, and ten decode steps
            bench.run()
        found.append({bench.instants("short") for bench in benches})
    in_step_run, by_single_steps = found
    assert len(by_single_steps) == 2
    assert in_step_run == {min(by_single_steps)}


@pytest.mark.parametrize("instant", [0.06, 0.2, 0.45, 0.7])
def test_fetch_in_step_run_preempts_when_single_steps_would(instant):
    benches = [Bench(kind, kv_blocks=20) for kind in (VirtualEngine, OneByOne)]
    for bench in benches:
        bench.work("old", 16, 100)
        bench.work("young", 16, 100)
        name = RequestId("fetched")
        job = Job(attempt_id=name, prompt_tokens=128, answer_tokens=5, keys=tuple(range(8)), fetched_tokens=127)

        def fetch(bench=bench, job=job) -> None:
            if bench.engine.fetch(job) is not None:
                bench.kernel.after(5 * SECOND, lambda: bench.engine.fetched(job.attempt_id))

        bench.kernel.at(Nanos(round(instant * SECOND) + 1), fetch)
        bench.run()
    jumping, stepping = benches
    assert jumping.engine.preempted == stepping.engine.preempted == 1
    for name in ("old", "young", "fetched"):
        assert jumping.instants(name) == pytest.approx(stepping.instants(name), abs=1e-6)
        assert jumping.tokens(name) == stepping.tokens(name)


def test_next_turn_finds_named_answer_blocks():
    bench = Bench()
    job = Job(attempt_id=RequestId("one"), prompt_tokens=40, answer_tokens=30, keys=(1, 2), answer_keys=(3, 4, 5))
    bench.kernel.at(Nanos(0), lambda: bench.engine.submit(job))
    bench.work("next", 96, 2, at=9.0, keys=(1, 2, 3, 4, 5, 6))
    bench.run()
    assert bench.cached("next") == 64  # 69 of 70 tokens have KV; the last token's is never computed


def test_slowdown_begins_with_next_step():
    bench = Bench()
    bench.work("one", 16, 101)
    bench.kernel.at(Nanos(SECOND // 2), lambda: bench.engine.slow(3.0))
    bench.kernel.at(Nanos(SECOND), lambda: bench.engine.recover(3.0))
    bench.run()
    usual = Bench()
    usual.work("one", 16, 101)
    usual.run()
    # During the half second, a third of the usual work is done, apart from the steps in which the speed changes.
    assert bench.instants("one")[1] - usual.instants("one")[1] == pytest.approx(1 / 3, abs=0.035)


@pytest.mark.parametrize("instant", [0.0, 0.02, 0.026, 0.03, 0.5, 0.9, 1.4999, 30.0])
def test_progress_in_step_run_equals_single_steps(instant):
    told = []
    for kind in (VirtualEngine, OneByOne):
        bench = Bench(kind)
        bench.work("one", 16, 300)
        bench.work("two", 40, 100, at=0.3)
        seen: list[dict[str, int]] = []
        at = Nanos(round(instant * SECOND) + 1)

        def look(bench=bench, seen=seen) -> None:
            new = {told.attempt_id: told.tokens for told in bench.engine.progress()}
            seen.append({name: bench.tokens(name) + new.get(name, 0) for name in bench.told})

        bench.kernel.at(at, look)
        bench.run()
        assert bench.tokens("one") + bench.tokens("two") <= 400  # `progress` reports no token twice
        told += seen
    assert told[0] == told[1]
