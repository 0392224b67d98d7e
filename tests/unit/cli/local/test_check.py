"""Verdicts of `fleet up --check`."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from fleet.cli.local.check import (
    FEWEST,
    WITHIN,
    CheckedCompletion,
    blocks_received,
    check,
    complaint,
    disaggregated,
    judge,
    reference_prompts,
)
from fleet.cli.local.cluster import LocalClusterOptions
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import TOKEN_BYTES, KvOrigin, KvPhase, KvReport, Source
from fleet.core.roles import KvPath, Phase
from fleet.local.settings import Topology

BLOCK = 32


def an_answer(tokens=(1, 2, 3), *, moved=2, source=Source.STORE, held=0, computed=1, **fields):
    origins = (
        KvOrigin(source=source, origin="elsewhere", blocks=moved, bytes=moved * 4096),
        KvOrigin(source=Source.ENGINE, blocks=held),
        KvOrigin(source=Source.COMPUTED, blocks=computed),
    )
    report = KvReport(prompt_blocks=moved + held + computed, origins=origins, cached_tokens=0)
    return CheckedCompletion(
        tokens=tuple(tokens),
        kv=(KvPhase(phase=Phase.DECODE, worker_id="decode-0", report=report),),
        **{"ttft": Nanos(10 * MILLISECOND), "rest": Nanos(6 * MILLISECOND)} | fields,
    )


def complain(answer, *, path=KvPath.STORE, tokens=80):
    return complaint(path, tokens, BLOCK, an_answer(), answer)


def test_the_same_tokens_and_moved_blocks_are_good():
    assert complain(an_answer()) is None


def test_one_other_token_is_bad():
    assert complain(an_answer((1, 2, 4))) == "token 2 differs"


def test_a_shorter_answer_is_bad():
    assert complain(an_answer((1, 2))) == "another number of tokens"


def test_equal_tokens_without_moved_blocks_fail_the_check():
    wrong = complain(an_answer(moved=0, computed=3))

    assert wrong == "no block moved by store; of the decode phase's blocks were 3 computed"


def test_blocks_that_came_another_way_do_not_count():
    assert complain(an_answer(source=Source.STORE), path=KvPath.DIRECT) is not None


def test_a_request_that_failed_is_bad():
    assert complain(None) == "no answer"


def test_a_verdict_sums_up():
    verdict = judge(KvPath.STORE, [an_answer()] * 3, [an_answer(), an_answer((1, 2, 4)), None], [])

    assert verdict.ok
    assert (verdict.prompts, verdict.identical) == (3, 1)
    assert (verdict.blocks_moved, verdict.bytes_moved) == (4, 4 * 4096)
    assert (verdict.ttft_ms, verdict.tpot_ms) == (10, 3)


def test_one_complaint_is_enough_for_a_bad_verdict():
    assert not judge(KvPath.STORE, [an_answer()], [an_answer()], ["token 2 differs"]).ok


def test_a_cluster_that_did_not_start_counts_nothing():
    verdict = judge(KvPath.DIRECT, [an_answer()], [None], ["no answer"])

    assert (verdict.identical, verdict.blocks_moved, verdict.ttft_ms, verdict.tpot_ms) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "moved", "held", "good"),
    [
        (32, 0, 0, True),  # the only full block contains the last token, which is always computed
        (33, 0, 0, False),
        (33, 1, 0, True),
        (33, 0, 1, True),  # the decode engine had the block
        (97, 0, 2, False),  # the decode engine had two of three blocks, so the third one had to move
        (97, 1, 2, True),
    ],
)
def test_blocks_must_move_unless_the_engine_has_them(tokens, moved, held, good):
    assert blocks_received(an_answer(moved=moved, held=held), KvPath.STORE, tokens, BLOCK) is good


@pytest.mark.parametrize("path", list(KvPath))
def test_router_of_the_check_queues_as_long_as_the_check(path):
    topology = disaggregated(Topology(), path)

    assert topology.router.max_queue_seconds * SECOND >= WITHIN[path]
    assert all(pool.watchdog.enabled for pool in topology.pools)


@pytest.mark.parametrize("path", list(KvPath))
def test_check_touches_no_file_of_a_running_cluster(path, tmp_path):
    router = {
        "record": f"{tmp_path}/record",
        "access_records": {"path": f"{tmp_path}/access"},
        "overflow": {
            "tiny": {
                "url": "https://b",
                "dollars_per_hour": 1,
                "dollars_per_million_prompt_tokens": 1,
                "dollars_per_million_answer_tokens": 1,
                "ledger": f"{tmp_path}/ledger",
            }
        },
    }
    tiers = [{"kind": "ssd", "directories": [f"{tmp_path}/ssd"], "capacity_bytes": 1 << 30}]
    topology = msgspec.convert({"router": router, "store": {"tiers": tiers}}, Topology)

    assert str(tmp_path) in str(topology)
    assert str(tmp_path) not in str(disaggregated(topology, path))


@pytest.mark.parametrize("max_tokens", [2, 33, 100, 239, 240, 3000])
def test_no_prompt_is_longer_than_allowed(model_dir, max_tokens):
    lengths = [len(prompt) // TOKEN_BYTES for prompt in reference_prompts(model_dir, max_tokens=max_tokens)]

    assert len(lengths) >= FEWEST
    assert 1 <= min(lengths) <= max(lengths) <= max_tokens


def test_context_without_room_for_a_block_is_refused():
    topology = Topology()
    topology = structs.replace(topology, cluster=structs.replace(topology.cluster, max_model_len=88))

    with pytest.raises(ConfigurationRefused, match=r"cluster\.max_model_len: --check needs at least 89"):
        asyncio.run(check(topology, LocalClusterOptions(relative_to=Path(), logs=None), ()))
