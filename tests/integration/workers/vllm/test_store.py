"""Tests of real vLLM engines on a real store node: blocks move, and the tokens equal those of one engine.

An engine without blocks computes equal tokens too, so every test counts blocks.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from fleet.core.errors import Reason
from fleet.core.requests import STATE_FIELDS, Finish, Source
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.work import Rejected
from fleet.local.tiny_model import build_tiny_model
from kvstore.block import blocks_for, chain
from kvstore.client.store_client import StoreClient
from kvstore.tracing.context import TraceContext
from kvstore.tracing.settings import TracingSettings
from tests.contract.workers import engine_contract as engine_promises
from tests.contract.workers.engine_contract import ALONE, CONTINUED, PAIRED, answer_continues_exactly
from tests.support.builders import token_bytes
from tests.support.fleet_processes import command_of
from tests.support.kvstore.builders import NodeProcess, a_node, a_short_folder, a_store_client
from tests.support.servers.otlp_collector import OtlpCollector, an_otlp_collector
from tests.support.waiting import eventually
from tests.support.workers.engine_driver import (
    an_attempt,
    blocks_from,
    bytes_from,
    fresh_prompt,
    greedy,
    reported_early_and_late,
    run_disaggregated,
    without_tiers,
)
from tests.support.workers.vllm_engines import VllmEngines, hosted, tiny_namespace, vllm_worker
from workers.ports import EngineDied

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

BLOCK_TOKENS = 32
BLOCK_BYTES = 128 << 10
OFFER_SECONDS = 20  # for blocks written in idle time


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with a_short_folder() as folder, an_otlp_collector(folder) as collector:
        yield collector


@pytest.fixture(scope="module")
def node(collector: OtlpCollector) -> Iterator[NodeProcess]:
    with a_node(capacity_bytes=256 << 20, tracing=TracingSettings(endpoint=collector.grpc)) as node:
        yield node


@pytest.fixture(scope="module")
def pair(model_dir: Path, node: NodeProcess) -> Iterator[VllmEngines]:
    worker = vllm_worker(model_dir, store=node.address, kv_paths=(KvPath.STORE,))
    with hosted(worker, worker) as pair:
        yield pair


@pytest.fixture(scope="module")
def ranks(model_dir: Path, node: NodeProcess) -> Iterator[VllmEngines]:
    """Open an engine of two tensor-parallel ranks; each has one of the model's two heads."""
    worker = vllm_worker(model_dir, store=node.address, kv_paths=(KvPath.STORE,))
    settings = msgspec.structs.replace(worker.vllm, extra_args={"tensor_parallel_size": 2})
    with hosted(msgspec.structs.replace(worker, vllm=settings)) as ranks:
        yield ranks


@pytest.fixture
def client(pair: VllmEngines, model_dir: Path, node: NodeProcess) -> Iterator[StoreClient]:
    with a_store_client(node.address, tiny_namespace(model_dir)) as client:
        yield client


def until_held(client: StoreClient, tokens: bytes, blocks: int) -> None:
    """Wait until the store holds that many blocks of a prompt."""
    names = chain(tokens, BLOCK_TOKENS)[:blocks]
    eventually(lambda: len(client.match(names, lease_seconds=0)) >= blocks, OFFER_SECONDS)


@pytest.mark.parametrize("promise", ALONE, ids=lambda promise: promise.__name__)
def test_vllm_keeps_the_contract(promise, pair):
    pair.run(promise(pair.engines[0]))


@pytest.mark.parametrize(
    "promise",
    [
        engine_promises.greedy_tokens_are_the_same_alone_and_in_a_batch,
        engine_promises.cancelled_request_ends_and_frees_its_blocks,
        engine_promises.request_cancelled_at_once_ends_too,
        engine_promises.tenants_never_share_a_block,
        engine_promises.cache_events_name_the_blocks_of_the_chain,
    ],
    ids=lambda promise: promise.__name__,
)
def test_vllm_on_two_ranks_keeps_the_contract(promise, ranks):
    ranks.run(promise(ranks.engines[0]))


@pytest.mark.parametrize("promise", PAIRED, ids=lambda promise: promise.__name__)
def test_pair_of_vllm_engines_keeps_the_contract(promise, pair):
    pair.run(promise(*pair.engines, KvPath.STORE))


@pytest.mark.parametrize("case", CONTINUED)
def test_other_vllm_engine_continues_exactly(case, pair):
    begins, continues = pair.engines
    assert continues.engine.facts.continued_fields == STATE_FIELDS

    pair.run(answer_continues_exactly(begins, continues, CONTINUED[case]))


@pytest.mark.parametrize("case", ["penalties_and_seed", "form"])
def test_vllm_engine_of_several_ranks_continues_exactly(case, ranks):
    (one,) = ranks.engines

    ranks.run(answer_continues_exactly(one, one, CONTINUED[case]))


def test_the_fingerprint_is_that_of_the_namespace_of_the_model(pair, model_dir, node):
    for driver in pair.engines:
        facts = driver.engine.facts
        assert facts.fingerprint == tiny_namespace(model_dir).fingerprint
        assert facts.store_id == node.settings.store_id
        assert facts.kv_blocks == (256 << 20) // BLOCK_BYTES


@pytest.mark.parametrize(("length", "max_tokens"), [(50, 40), (3000, 40)])
def test_decoding_from_the_store_gives_the_tokens_of_one_engine(pair, length, max_tokens):
    prompt = fresh_prompt(length)

    async def both():
        prefill, decode = pair.engines
        # This request shares no block with the next one.
        alone, _ = await decode.do(an_attempt(prompt, max_tokens, salt=b"x" * 32))
        return alone, await run_disaggregated(prefill, decode, prompt, max_tokens, KvPath.STORE)

    alone, (tokens, prefilled, decoded) = pair.run(both())

    full = length // BLOCK_TOKENS
    assert tokens == alone
    assert blocks_from(prefilled.kv, Source.COMPUTED) == blocks_for(length, BLOCK_TOKENS)
    assert blocks_from(decoded.kv, Source.STORE) == full
    assert bytes_from(decoded.kv, Source.STORE) == full * BLOCK_BYTES
    assert decoded.kv.origins[0].origin == "store-1"
    assert decoded.kv.cached_tokens == full * BLOCK_TOKENS


def test_prompts_with_a_shared_prefix_compute_only_what_differs(pair):
    prefix = fresh_prompt(20 * BLOCK_TOKENS)
    prompts = [prefix + fresh_prompt(40) for _ in range(3)]

    async def run():
        prefill, decode = pair.engines
        ends = []
        for prompt in prompts:
            alone, _ = await decode.do(an_attempt(prompt, 10, salt=b"y" * 32))
            tokens, prefilled, decoded = await run_disaggregated(prefill, decode, prompt, 10, KvPath.STORE)
            assert tokens == alone
            ends.append((prefilled.kv, decoded.kv))
        return ends

    (first, _), *others = pair.run(run())

    assert blocks_from(first, Source.COMPUTED) == 22
    for prefilled, decoded in others:
        assert (blocks_from(prefilled, Source.ENGINE), blocks_from(prefilled, Source.COMPUTED)) == (20, 2)
        assert (blocks_from(decoded, Source.ENGINE), blocks_from(decoded, Source.STORE)) == (20, 1)


def test_eight_requests_at_once_keep_apart_and_all_move(pair):
    prompts = [fresh_prompt(150 + 40 * number) for number in range(8)]

    async def run():
        prefill, decode = pair.engines
        async with asyncio.TaskGroup() as tasks:
            splits = [
                tasks.create_task(run_disaggregated(prefill, decode, prompt, 40, KvPath.STORE)) for prompt in prompts
            ]
        alone = [(await decode.do(an_attempt(prompt, 40, salt=b"z" * 32)))[0] for prompt in prompts]
        return [task.result() for task in splits], alone

    splits, alone = pair.run(run())

    assert [tokens for tokens, _, _ in splits] == alone
    for prompt, (_, _, decoded) in zip(prompts, splits, strict=True):
        assert blocks_from(decoded.kv, Source.STORE) == len(prompt) // 4 // BLOCK_TOKENS


def test_prompt_seen_by_another_worker_is_not_recomputed(pair, client):
    prompt = fresh_prompt(2000)
    one, other = pair.engines
    tokens, _ = pair.run(one.do(an_attempt(prompt, 40)))
    until_held(client, prompt, 62)

    again, end = pair.run(other.do(an_attempt(prompt, 40)))

    assert again == tokens
    assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.COMPUTED)) == (62, 1)


def test_load_of_a_traced_attempt_is_a_span_of_the_store_node(pair, client, collector):
    prompt = fresh_prompt(2000)
    one, other = pair.engines
    pair.run(one.do(an_attempt(prompt, 4)))
    until_held(client, prompt, 62)
    trace = TraceContext(trace_id=secrets.token_bytes(16), parent_id=secrets.token_bytes(8), sampled=True)

    _, end = pair.run(other.do(an_attempt(prompt, 4, trace=trace)))

    assert blocks_from(end.kv, Source.STORE) == 62
    (span,) = collector.wait_for(trace.trace_id.hex(), "store match")
    assert span.parent_id == trace.parent_id.hex()
    assert 62 in span.attributes.values()


def test_another_worker_continues_an_answer_from_the_store(pair, client):
    prompt = fresh_prompt(40)
    one, other = pair.engines
    answer, _ = pair.run(one.do(an_attempt(prompt, 200)))
    so_far = prompt + token_bytes(answer[:150])
    until_held(client, so_far, 190 // BLOCK_TOKENS)

    rest, end = pair.run(other.do(an_attempt(so_far, 50)))

    assert rest == answer[150:]
    assert blocks_from(end.kv, Source.STORE) == 190 // BLOCK_TOKENS


def test_an_engine_of_two_ranks_reads_what_one_of_one_rank_wrote(pair, ranks, client):
    prompt = fresh_prompt(2000)
    one, two = pair.engines[0], ranks.engines[0]
    tokens, _ = pair.run(one.do(an_attempt(prompt, 40)))
    until_held(client, prompt, 62)

    again, end = ranks.run(two.do(an_attempt(prompt, 40)))

    assert again == tokens
    assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.COMPUTED)) == (62, 1)
    assert bytes_from(end.kv, Source.STORE) == 62 * BLOCK_BYTES
    assert (two.engine.facts.kv.tp, two.engine.facts.kv_blocks) == (2, one.engine.facts.kv_blocks)


def test_one_rank_reads_blocks_of_two_ranks_once_written(pair, ranks, client):
    prompt = fresh_prompt(40)
    one, two = pair.engines[1], ranks.engines[0]
    before = client.stats()
    answer, _ = ranks.run(two.do(an_attempt(prompt, 200)))
    so_far = prompt + token_bytes(answer[:150])
    until_held(client, so_far, 190 // BLOCK_TOKENS)

    rest, end = pair.run(one.do(an_attempt(so_far, 50)))

    assert rest == answer[150:]
    assert blocks_from(end.kv, Source.STORE) == 190 // BLOCK_TOKENS
    after = client.stats()
    assert after.bytes_written - before.bytes_written == (after.written - before.written) * BLOCK_BYTES
    assert after.written - before.written <= 240 // BLOCK_TOKENS, "one object per block, whoever wrote it"
    assert after.reservations == 0


@pytest.mark.parametrize("prefills", ["one rank", "two ranks"])
def test_engines_of_one_and_two_ranks_hand_off_to_each_other(pair, ranks, prefills):
    prompt = fresh_prompt(777)
    one, two = (pair, pair.engines[0]), (ranks, ranks.engines[0])
    (prefilling, prefill), (decoding, decode) = (one, two) if prefills == "one rank" else (two, one)
    first, prefilled = prefilling.run(prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE)))
    so_far = prompt + token_bytes(first)

    rest, end = decoding.run(decode.do(an_attempt(so_far, 39, phase=Phase.DECODE, handoff=prefilled.handoff)))

    alone, _ = pair.run(pair.engines[1].do(an_attempt(prompt, 40, salt=b"t" * 32)))
    assert first + rest == alone
    assert blocks_from(end.kv, Source.STORE) == 777 // BLOCK_TOKENS
    assert bytes_from(end.kv, Source.STORE) == 777 // BLOCK_TOKENS * BLOCK_BYTES


def test_block_bad_for_one_rank_is_computed_by_both(pair, ranks, client, node):
    prompt = fresh_prompt(300)
    one, two = pair.engines[0], ranks.engines[0]
    pair.run(one.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE)))
    flip_a_byte(node, client, chain(prompt, BLOCK_TOKENS), index=4, at=BLOCK_BYTES - 1)  # of the second rank's head

    tokens, end = ranks.run(two.do(an_attempt(prompt, 12)))

    assert tokens == pair.run(one.do(an_attempt(prompt, 12, salt=b"c" * 32)))[0]
    assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.COMPUTED)) == (4, 6)
    until_held(client, prompt, 9)  # the block was written again
    assert client.stats().leases == 0


def test_eight_requests_at_once_on_two_ranks_keep_apart(pair, ranks):
    prompts = [fresh_prompt(150 + 40 * number) for number in range(8)]
    one, two = pair.engines[0], ranks.engines[0]

    async def prefill():
        async with asyncio.TaskGroup() as tasks:
            works = [an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE) for prompt in prompts[:4]]
            for each in works:
                tasks.create_task(one.do(each))

    async def both(engine, salt: bytes = b""):
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(engine.do(an_attempt(prompt, 40, salt=salt))) for prompt in prompts]
        return [each.result() for each in done]

    pair.run(prefill())
    answers = ranks.run(both(two))

    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in pair.run(both(one, b"8" * 32))]
    loaded = [blocks_from(end.kv, Source.STORE) for _, end in answers]
    assert loaded == [len(prompt) // 4 // BLOCK_TOKENS for prompt in prompts[:4]] + [0] * 4


def test_a_corrupt_block_is_computed_and_counted_as_computed(pair, client, node):
    prompt = fresh_prompt(300)
    prefill, decode = pair.engines
    first, prefilled = pair.run(prefill.do(an_attempt(prompt, 12, phase=Phase.PREFILL, kv_path=KvPath.STORE)))
    flip_a_byte(node, client, chain(prompt, BLOCK_TOKENS), index=4)

    decoding = an_attempt(prompt + token_bytes(first), 11, phase=Phase.DECODE, handoff=prefilled.handoff)
    rest, end = pair.run(decode.do(decoding))

    alone, _ = pair.run(decode.do(an_attempt(prompt, 12, salt=b"c" * 32)))
    assert first + rest == alone
    assert (blocks_from(end.kv, Source.STORE), blocks_from(end.kv, Source.COMPUTED)) == (4, 6)
    assert end.kv.cached_tokens == 4 * BLOCK_TOKENS
    told = decode.told[decoding.request_id]
    assert reported_early_and_late(told, without_tiers(end.kv), end.kv), (
        "the first tokens claim no block that did not arrive"
    )
    until_held(client, prompt, 9)  # the block was written again


def test_a_prompt_whose_first_block_is_corrupt_is_computed(pair, client, node):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    pair.run(prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE)))
    flip_a_byte(node, client, chain(prompt, BLOCK_TOKENS), index=0)

    tokens, end = pair.run(decode.do(an_attempt(prompt, 12)))

    assert blocks_from(end.kv, Source.COMPUTED) == 4
    assert tokens == pair.run(decode.do(an_attempt(prompt, 12, salt=b"d" * 32)))[0]


def flip_a_byte(node: NodeProcess, client: StoreClient, names: list[bytes], *, index: int, at: int = 1000) -> None:
    slot = client.match(names, lease_seconds=0).slots[index]
    with a_store_client(node.address, client.namespace, prefer=("shm",)) as vandal:
        vandal.connection.session.transport.mapping.bytes[slot.offset + at] ^= 0x10


def test_handoff_of_another_layout_is_rejected_before_transfer(pair, client):
    prompt = fresh_prompt(100)
    prefill, decode = pair.engines
    _, prefilled = pair.run(prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.STORE)))
    before = client.stats()
    handoff = msgspec.structs.replace(prefilled.handoff, fingerprint="0" * 32)
    start = an_attempt(prompt, phase=Phase.DECODE, handoff=handoff)

    async def run():
        decode.submit(start)
        return await decode.end_of(start)

    end = pair.run(run())

    assert isinstance(end, Rejected)
    assert (end.reason, end.field) == (Reason.KV_MISMATCH, "handoff.fingerprint")
    assert client.stats().hits == before.hits


def test_sampling_that_vllm_refuses_is_rejected(pair):
    start = an_attempt(fresh_prompt(10), sampling=greedy(4, top_p=7.0))

    async def run():
        pair.engines[0].submit(start)
        return await pair.engines[0].end_of(start)

    end = pair.run(run())

    assert isinstance(end, Rejected)
    assert (end.reason, end.field) == (Reason.INVALID_ARGUMENT, "sampling")
    assert "top_p" in end.message


def test_cancelled_request_stops_within_a_step(pair):
    engine = pair.engines[0]
    cancelled, other = an_attempt(fresh_prompt(50), 2000), an_attempt(fresh_prompt(50), 300)

    async def run():
        engine.submit(cancelled, other)
        await engine.until(lambda: len(engine.tokens[cancelled.request_id]) >= 5)
        steps, tokens = engine.steps, len(engine.tokens[cancelled.request_id])
        engine.engine.cancel(cancelled.request_id)
        end = await engine.end_of(cancelled)
        more = engine.steps - steps, len(engine.tokens[cancelled.request_id]) - tokens
        return end, more, await engine.end_of(other)

    end, (steps, tokens), other_end = pair.run(run())

    assert end.finish is Finish.CANCELLED
    assert steps <= 3  # its own end and the running step
    assert tokens <= 1
    assert other_end.finish is Finish.LENGTH


def test_engine_computes_without_its_store_and_rejoins_it(pair, node, client):
    prefill, decode = pair.engines
    long = an_attempt(fresh_prompt(500), 300)

    async def lose_the_node():
        prefill.submit(long)
        await prefill.until(lambda: len(prefill.tokens[long.request_id]) >= 5)
        await asyncio.to_thread(node.kill)
        return await prefill.end_of(long)

    assert pair.run(lose_the_node()).finish is Finish.LENGTH
    prompt = fresh_prompt(200)
    tokens, _, decoded = pair.run(run_disaggregated(prefill, decode, prompt, 20, KvPath.STORE))
    assert tokens == pair.run(prefill.do(an_attempt(prompt, 20, salt=b"n" * 32)))[0]
    assert blocks_from(decoded.kv, Source.COMPUTED) == 7

    node.start()

    deadline = time.monotonic() + 60
    while True:  # the clients' circuit breakers notice within seconds
        _, _, decoded = pair.run(run_disaggregated(prefill, decode, fresh_prompt(200), 4, KvPath.STORE))
        if blocks_from(decoded.kv, Source.STORE) == 6:
            break
        assert time.monotonic() < deadline, decoded.kv


def test_killed_rank_ends_its_engine_and_spares_the_store(ranks, node, model_dir):
    children = psutil.Process().children(recursive=True)
    second = next(child for child in children if command_of(child)[:1] == ["VLLM::Worker_TP1"])
    engine = second.parent()

    second.kill()

    error = ranks.ended.exception(60)
    assert isinstance(error, BaseExceptionGroup)
    assert error.subgroup(EngineDied) is not None
    engine.wait(30)
    with a_store_client(node.address, tiny_namespace(model_dir)) as client:
        assert client.stats().reservations == 0


def test_end_of_an_idle_engine_is_reported(pair):
    """Run last, because this test ends the engines that the tests share."""
    children = psutil.Process().children(recursive=True)
    cores = [child for child in children if command_of(child)[:1] == ["VLLM::EngineCore"]]
    assert len(cores) == 2

    cores[0].kill()

    error = pair.ended.exception(60)
    assert isinstance(error, BaseExceptionGroup)
    assert error.subgroup(EngineDied) is not None
    assert psutil.wait_procs(children_of_vllm(children), timeout=60)[1] == [], "processes were left behind"


def children_of_vllm(children: list[psutil.Process]) -> list[psutil.Process]:
    return [child for child in children if "".join(command_of(child)).startswith("VLLM")]


def test_engines_that_start_beside_a_hung_store_join_it_later(model_dir, monkeypatch):
    """Start a prefill engine with no other KV path; it can hand off as soon as the node answers."""
    monkeypatch.setattr("workers.engines.vllm.engine.STORE_SECONDS", 0.5)
    with a_node(capacity_bytes=64 << 20) as node:
        node.freeze()
        told = [
            vllm_worker(model_dir, role=role, store=node.address, kv_paths=(KvPath.STORE,))
            for role in (Role.PREFILL, Role.DECODE)
        ]
        with hosted(*told) as late:
            prefill, decode = late.engines
            for driver in late.engines:
                assert (driver.engine.facts.store_id, driver.engine.facts.kv_paths) == (None, ())
            prompt = fresh_prompt(300)
            alone, _ = late.run(decode.do(an_attempt(prompt, 20, salt=b"x" * 32)))
            assert len(alone) == 20

            node.thaw()
            for driver in late.engines:
                eventually(lambda: driver.engine.facts.store_id == "store-1")  # noqa: B023 - called at once
                assert driver.engine.facts.kv_paths == (KvPath.STORE,)

            async def handed_over():
                fresh = fresh_prompt(300)
                _, _, decoded = await run_disaggregated(prefill, decode, fresh, 20, KvPath.STORE)
                return blocks_from(decoded.kv, Source.STORE)

            eventually(lambda: late.run(handed_over()) == 300 // BLOCK_TOKENS)
            tokens, _, _ = late.run(run_disaggregated(prefill, decode, prompt, 20, KvPath.STORE))
            assert tokens == alone
