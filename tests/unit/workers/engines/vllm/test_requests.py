"""KV report with the first token: it is computed from the few numbers that vLLM gives at that time."""

import pytest
from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Handoff
from kvstore.tracing.context import TraceContext, call_trace
from tests.support.workers.engine_driver import an_attempt, fresh_prompt
from workers.engines.vllm.requests import counts_at_start, transfer_params
from workers.engines.vllm.store_planner import HANDOFF, TRACE, PromptBlockCounts

BLOCK = 32


class Stats(Struct):
    """The used fields of vLLM's `PrefillStats`."""

    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cached_tokens: int = 0


def stats(engine: int = 0, store: int = 0, direct: int = 0) -> Stats:
    """Return vLLM's counts for these tokens by origin, after the KV connector has corrected them."""
    return Stats(engine, direct, engine + store + direct)


def handed_off(path: KvPath):
    handoff = Handoff(kv_path=path, prefill_worker=WorkerId("p"), fingerprint="f", num_tokens=200, params=b"{}")
    return an_attempt(fresh_prompt(200), phase=Phase.DECODE, handoff=handoff)


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        (stats(), PromptBlockCounts()),
        (stats(engine=64, store=96), PromptBlockCounts(engine=2, store=3)),
        (stats(engine=64), PromptBlockCounts(engine=2)),
    ],
)
def test_cached_tokens_beyond_the_engine_count_as_store(tokens, counts):
    assert counts_at_start(an_attempt(fresh_prompt(200)), tokens, BLOCK) == counts


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        (stats(engine=64, direct=136), PromptBlockCounts(engine=2, direct=5)),  # the last block is not full
        (stats(direct=64), PromptBlockCounts(direct=2)),
        (stats(), PromptBlockCounts()),
    ],
)
def test_pulled_tokens_count_as_direct(tokens, counts):
    assert counts_at_start(handed_off(KvPath.DIRECT), tokens, BLOCK) == counts


def test_store_blocks_after_a_failed_pull_count_as_store():
    assert counts_at_start(handed_off(KvPath.DIRECT), stats(engine=32, store=160), BLOCK) == PromptBlockCounts(
        engine=1, store=5
    )


def test_uncorrected_counts_follow_the_handoffs_kv_path():
    tokens = Stats(0, 128, 128)  # the numbers that vLLM sets when it admits a request

    assert counts_at_start(handed_off(KvPath.DIRECT), tokens, BLOCK) == PromptBlockCounts(direct=4)
    assert counts_at_start(handed_off(KvPath.STORE), tokens, BLOCK) == PromptBlockCounts(store=4)


@pytest.mark.parametrize("sampled", [False, True])
def test_sampled_attempt_passes_its_trace_to_connectors(sampled):
    trace = TraceContext(trace_id=b"t" * 16, parent_id=b"p" * 8, sampled=sampled)
    start = an_attempt(fresh_prompt(200), phase=Phase.PREFILL, kv_path=KvPath.STORE, trace=trace)

    expected = {HANDOFF: True} | ({TRACE: call_trace(trace).hex()} if sampled else {})
    assert transfer_params(start) == expected
    assert TRACE not in transfer_params(an_attempt(fresh_prompt(200)))
