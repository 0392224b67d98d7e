"""Continuous batching: each request gets the tokens that it would get alone, whichever requests share its batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.batching.attempts import EngineLimits
from fleet.core.requests import Finish, KvOrigin, Sampling, Source
from fleet.core.roles import KvPath, Phase
from fleet.core.work import LoadReport, Start
from tests.support.builders import a_prompt, a_start
from workers.engines.simulated.batch import Batch
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.model import SimulatedModel
from workers.engines.simulated.sequence import Sequence, SequenceContext

BLOCK_TOKENS = 4
MODEL = SimulatedModel(seed=0, vocab_size=512, eos_token_ids=(2,), eos_probability=0.02, block_bytes=BLOCK_TOKENS * 8)
LAYOUT = EngineLayout(layers=1, kv_heads=2, block_tokens=BLOCK_TOKENS, head_bytes=4, tensor_parallel=2, kv_layout="NHD")


class Engine:
    """A batch whose steps the test makes, without time and without loads from a store."""

    def __init__(self, *, blocks: int = 64, max_running: int = 4, max_batched_tokens: int = 16) -> None:
        self.shape = SequenceContext(model=MODEL, layout=LAYOUT, block_tokens=BLOCK_TOKENS, max_model_len=64)
        self.step_tokens = max_batched_tokens
        limits = EngineLimits(
            kv_blocks=blocks, block_tokens=BLOCK_TOKENS, max_running=max_running, step_tokens=max_batched_tokens
        )
        self.batch = Batch(limits)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.order: list[str] = []
        self.reports = {}

    def add(self, *starts: Start) -> None:
        for start in starts:
            self.batch.add(Sequence(start, self.shape))

    def step(self) -> bool:
        if (plan := self.batch.plan()) is None:
            return False
        assert plan.prompt_tokens + plan.decodes <= max(self.step_tokens, plan.decodes)
        for advanced in self.batch.perform(plan):
            request_id = advanced.sequence.start.request_id
            if request_id not in self.order:
                self.order.append(request_id)
            if advanced.sampled is not None:
                self.tokens.setdefault(request_id, []).append(advanced.sampled.token)
                if advanced.sampled.finish is not None:
                    self.finish[request_id] = advanced.sampled.finish
                    self.reports[request_id] = advanced.sequence.report()
                    self.batch.remove(request_id)
        self.batch.memory.changed()
        self.batch.check()
        return True

    def run(self, *starts: Start) -> None:
        self.add(*starts)
        while self.step():
            pass
        assert self.batch.load == LoadReport(running=0, waiting=0, kv_blocks_used=0)


def alone(start: Start) -> tuple[list[int], Finish]:
    engine = Engine()
    engine.run(start)
    return engine.tokens[start.request_id], engine.finish[start.request_id]


prompts = st.builds(
    lambda family, length: a_prompt(length, first=1 + family), st.sampled_from([0, 1, 200]), st.integers(1, 40)
)
some_starts = st.lists(
    st.tuples(prompts, st.integers(1, 20), st.booleans(), st.integers(-1, 1)), min_size=1, max_size=8
).map(
    lambda drawn: [
        a_start(
            request_id=f"r{number}",
            tokens=tokens,
            sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos),
            priority=priority,
        )
        for number, (tokens, max_tokens, ignore_eos, priority) in enumerate(drawn)
    ]
)


@settings(deadline=None)
@given(some_starts, st.integers(16, 40), st.integers(1, 4), st.integers(1, 16))
def test_tokens_do_not_depend_on_batch_chunks_cache_or_pool(starts, blocks, places, budget):
    engine = Engine(blocks=blocks, max_running=places, max_batched_tokens=budget)

    engine.run(*starts)

    for start in starts:
        assert (engine.tokens[start.request_id], engine.finish[start.request_id]) == alone(start)
        report = engine.reports[start.request_id]
        assert report.prompt_blocks == -(-len(start.tokens) // 4 // BLOCK_TOKENS)


def test_preempted_request_is_computed_again_with_same_tokens():
    engine = Engine(blocks=10)
    starts = [
        a_start(
            request_id=name,
            tokens=a_prompt(12, first=first),
            sampling=Sampling(max_tokens=20, temperature=0, ignore_eos=True),
        )
        for name, first in (("first", 1), ("second", 200))
    ]

    engine.run(*starts)

    assert engine.batch.preempted >= 1
    for start in starts:
        assert (engine.tokens[start.request_id], engine.finish[start.request_id]) == alone(start)


@settings(deadline=None)
@given(some_starts, st.data())
def test_removing_at_any_time_frees_everything(starts, data):
    engine = Engine(blocks=20)
    engine.add(*starts)
    left = [start.request_id for start in starts]
    while left:
        engine.step()
        removed = left.pop(data.draw(st.integers(0, len(left) - 1)))
        engine.batch.remove(removed)
        engine.batch.check()
        assert removed not in engine.batch.sequences

    assert engine.batch.load == LoadReport(running=0, waiting=0, kv_blocks_used=0)


def test_repeated_prompt_is_cached_except_for_its_last_token():
    engine = Engine()
    engine.run(a_start(request_id="first", tokens=16))

    engine.run(a_start(request_id="second", tokens=16))

    assert engine.reports["second"].origins == (
        KvOrigin(source=Source.ENGINE, blocks=3),
        KvOrigin(source=Source.COMPUTED, blocks=1),
    )
    assert engine.reports["second"].cached_tokens == 12
    assert engine.tokens["second"] == engine.tokens["first"]


def test_tenants_with_different_salts_share_no_block():
    engine = Engine()
    engine.run(a_start(request_id="first", tokens=16, salt=b"a" * 32))

    engine.run(a_start(request_id="second", tokens=16, salt=b"b" * 32))

    assert engine.reports["second"].cached_tokens == 0


def test_one_wrong_byte_in_the_cache_changes_the_output():
    engine = Engine()
    start = a_start(request_id="first", tokens=16, sampling=Sampling(temperature=0, max_tokens=8))
    engine.run(start)
    (block, *_) = engine.batch.memory.find(Sequence(start, engine.shape).reusable_names)
    block[5] ^= 1

    engine.run(a_start(request_id="second", tokens=16, sampling=start.sampling))

    assert engine.tokens["second"] != engine.tokens["first"]


def test_generated_blocks_are_found_again_by_a_longer_prompt():
    engine = Engine()
    engine.run(a_start(request_id="first", tokens=8, sampling=Sampling(temperature=0, max_tokens=9, ignore_eos=True)))
    answer = b"".join(token.to_bytes(4, "little") for token in engine.tokens["first"])

    engine.run(a_start(request_id="next turn", tokens=a_prompt(8) + answer))

    assert engine.reports["next turn"].cached_tokens == 16


def test_higher_priority_goes_first_then_arrival():
    engine = Engine(max_running=1)

    engine.run(
        a_start(request_id="low", priority=-1),
        a_start(request_id="first"),
        a_start(request_id="second"),
        a_start(request_id="high", priority=5),
    )

    assert engine.order == ["high", "first", "second", "low"]


def test_no_request_overtakes_one_that_waits_for_blocks():
    engine = Engine(blocks=8)
    engine.add(
        a_start(request_id="running", tokens=20, sampling=Sampling(max_tokens=8, temperature=0, ignore_eos=True))
    )
    engine.step()
    engine.add(
        a_start(request_id="large", tokens=a_prompt(20, first=300), sampling=Sampling(max_tokens=8)),
        a_start(request_id="small", tokens=1, sampling=Sampling(max_tokens=1)),
    )

    engine.step()
    assert engine.order == ["running"]

    engine.run()
    assert engine.order == ["running", "large", "small"]


def test_long_prompt_is_computed_in_chunks_beside_decoding():
    engine = Engine(max_batched_tokens=8)
    engine.add(
        a_start(request_id="decoding", tokens=4, sampling=Sampling(max_tokens=30, temperature=0, ignore_eos=True))
    )
    engine.step()
    engine.add(a_start(request_id="long", tokens=32))
    for _ in range(3):
        engine.step()

    assert len(engine.tokens["decoding"]) == 4
    assert "long" not in engine.tokens
    engine.step()
    assert len(engine.tokens["long"]) == 1


@pytest.mark.parametrize(
    ("sampling", "finish", "length"),
    [
        (Sampling(max_tokens=5, temperature=0, ignore_eos=True), Finish.LENGTH, 5),
        (Sampling(max_tokens=1000, temperature=0, ignore_eos=True), Finish.LENGTH, 54),
    ],
)
def test_generation_ends_at_max_tokens_or_model_length(sampling, finish, length):
    tokens, ended = alone(a_start(tokens=10, sampling=sampling))

    assert (len(tokens), ended) == (length, finish)


def test_a_stop_token_ends_the_answer_and_belongs_to_it():
    tokens, _ = alone(a_start(sampling=Sampling(max_tokens=8, temperature=0, ignore_eos=True)))

    stopped, finish = alone(
        a_start(sampling=Sampling(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=(tokens[3],)))
    )

    assert (stopped, finish) == (tokens[:4], Finish.STOP)


def test_no_end_of_sequence_before_min_tokens():
    for first in range(1, 60):
        start = a_start(tokens=a_prompt(5, first=first), sampling=Sampling(max_tokens=40, temperature=0, min_tokens=30))
        tokens, _ = alone(start)
        assert 2 not in tokens[:30]


def test_prefill_work_ends_with_its_first_token():
    start = a_start(
        phase=Phase.PREFILL, kv_path=KvPath.STORE, tokens=16, sampling=Sampling(max_tokens=50, temperature=0)
    )

    tokens, _ = alone(start)

    assert tokens == alone(a_start(tokens=16, sampling=Sampling(max_tokens=50, temperature=0)))[0][:1]
