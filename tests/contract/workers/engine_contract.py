"""Contract suite of the engine port (`workers.ports.Engine`), as functions that take any engine.

Functions in `ALONE` take one engine. Functions in `PAIRED` take a prefill engine, an equally configured decode engine, and their
KV path. `answer_continues_exactly` takes two equally configured engines, or one engine twice, and parameters of `CONTINUED`. Tests may
share engines, whose caches are then not empty, so the functions use new prompts. The vocabulary has at least 4000 tokens, the model at
least 1024 positions, and the batch at least 4 places.
"""

import random

import msgspec

from fleet.core.errors import Reason
from fleet.core.requests import ENGINE_FIELDS, TOKEN_BYTES, Choice, Finish, JsonSchema, Sampling, Source
from fleet.core.roles import KvPath, Phase
from fleet.core.work import Progress, Rejected
from kvstore.block import blocks_for, chain
from tests.support.builders import token_bytes
from tests.support.waiting import until
from tests.support.workers.engine_driver import (
    EngineDriver,
    an_attempt,
    blocks_from,
    bytes_from,
    fresh_prompt,
    greedy,
    reported_early_and_late,
    run_disaggregated,
)


def steps_of(one: EngineDriver) -> int:
    return sum(pulse.steps for pulse in one.engine.pulses())


def is_working(one: EngineDriver) -> bool:
    pulses = one.engine.pulses()
    assert pulses, "the engine shows no steps"
    return any(pulse.working for pulse in pulses)


async def every_request_ends_once_with_all_its_tokens(one: EngineDriver) -> None:
    starts = [an_attempt(fresh_prompt(length), 3 + length % 5) for length in (1, 5, 31, 32, 33, 64, 100, 300)]
    one.submit(*starts)

    for start in starts:
        end = await one.end_of(start)
        assert isinstance(end, Progress)
        assert end.finish is Finish.LENGTH
        assert len(one.tokens[start.request_id]) == start.sampling.max_tokens
    await one.idle()


async def greedy_tokens_are_the_same_alone_and_in_a_batch(one: EngineDriver) -> None:
    prompts = [fresh_prompt(length) for length in (20, 70, 130)]
    alone = [(await one.do(an_attempt(prompt)))[0] for prompt in prompts]
    together = [an_attempt(prompt) for prompt in prompts]
    one.submit(*together)

    assert [one.tokens[start.request_id] for start in together if await one.end_of(start)] == alone


async def cancelled_request_ends_and_frees_its_blocks(one: EngineDriver) -> None:
    start = an_attempt(fresh_prompt(100), 900)
    one.submit(start)
    await one.until(lambda: len(one.tokens[start.request_id]) >= 2)

    one.engine.cancel(start.request_id)

    end = await one.end_of(start)
    assert isinstance(end, Progress)
    assert end.finish is Finish.CANCELLED
    assert len(one.tokens[start.request_id]) < 900
    await one.idle()


async def request_cancelled_at_once_ends_too(one: EngineDriver) -> None:
    starts = [an_attempt(fresh_prompt(50), 100) for _ in range(6)]
    one.submit(*starts)

    for start in starts:
        one.engine.cancel(start.request_id)

    for start in starts:
        end = await one.end_of(start)
        assert isinstance(end, Progress)
        assert end.finish is Finish.CANCELLED
    await one.idle()


async def cancelling_an_unknown_request_changes_nothing(one: EngineDriver) -> None:
    start = an_attempt(fresh_prompt(10), 4)
    await one.do(start)

    one.engine.cancel(start.request_id)
    one.engine.cancel(an_attempt(b"").request_id)

    _, end = await one.do(an_attempt(fresh_prompt(10), 4))
    assert end.finish is Finish.LENGTH


async def reports_add_up_and_name_the_engines_own_cache(one: EngineDriver) -> None:
    block_tokens = one.engine.facts.block_tokens
    prompt = fresh_prompt(5 * block_tokens + 3)
    _, first = await one.do(an_attempt(prompt))
    _, again = await one.do(an_attempt(prompt))

    for end in (first, again):
        assert end.kv is not None
        assert end.kv.prompt_blocks == blocks_for(5 * block_tokens + 3, block_tokens) == 6
    assert blocks_from(first.kv, Source.COMPUTED) == 6
    assert first.kv is not None
    assert first.kv.cached_tokens == 0
    assert blocks_from(again.kv, Source.ENGINE) == 5
    assert blocks_from(again.kv, Source.COMPUTED) == 1
    assert again.kv is not None
    assert again.kv.cached_tokens == 5 * block_tokens


async def reports_come_with_the_first_tokens_and_the_finish(one: EngineDriver) -> None:
    prompt = fresh_prompt(5 * one.engine.facts.block_tokens + 3)
    for _ in range(2):
        start = an_attempt(prompt)
        one.submit(start)
        await one.until(lambda start=start: one.tokens[start.request_id])
        assert one.told[start.request_id], "the first tokens carry the report"

        end = await one.end_of(start)

        assert isinstance(end, Progress)
        assert end.kv is not None
        assert reported_early_and_late(one.told[start.request_id], end.kv, end.kv)


async def tenants_never_share_a_block(one: EngineDriver) -> None:
    prompt = fresh_prompt(100)
    ours, _ = await one.do(an_attempt(prompt, salt=b"a" * 32))
    theirs, end = await one.do(an_attempt(prompt, salt=b"b" * 32))

    assert end.kv is not None
    assert end.kv.cached_tokens == 0
    assert theirs == ours, "a salt separates blocks and changes nothing else"


async def cache_events_name_the_blocks_of_the_chain(one: EngineDriver) -> None:
    block_tokens = one.engine.facts.block_tokens
    prompt = fresh_prompt(4 * block_tokens)
    salt = b"s" * 32
    await one.do(an_attempt(prompt, 1, salt=salt))

    names = chain(prompt, block_tokens, salt=salt)

    await one.until(lambda: one.cached.issuperset(names[:3]))  # an engine may not keep the last block


async def a_stop_token_ends_the_answer(one: EngineDriver) -> None:
    prompt = fresh_prompt(40)
    tokens, _ = await one.do(an_attempt(prompt, 8))
    stop = next(token for token in tokens[1:] if token != tokens[0])

    stopped, end = await one.do(an_attempt(prompt, sampling=greedy(8, stop_token_ids=(stop,))))

    assert end.finish is Finish.STOP
    assert stopped == tokens[: tokens.index(stop) + 1]


async def sampling_with_a_seed_is_reproducible(one: EngineDriver) -> None:
    prompt = fresh_prompt(40)

    def seeded(seed: int) -> Sampling:
        return Sampling(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)

    tokens, _ = await one.do(an_attempt(prompt, sampling=seeded(1)))

    assert (await one.do(an_attempt(prompt, sampling=seeded(1))))[0] == tokens
    assert (await one.do(an_attempt(prompt, sampling=seeded(2))))[0] != tokens


async def logprobs_come_when_asked_for(one: EngineDriver) -> None:
    start = an_attempt(fresh_prompt(20), sampling=greedy(4, logprobs=2))
    await one.do(start)

    assert len(one.logprobs[start.request_id]) == 4
    for token, logprobs in zip(one.tokens[start.request_id], one.logprobs[start.request_id], strict=True):
        assert logprobs.top_ids[0] == token, "greedy sampling takes the most likely token"
        assert len(logprobs.top_ids) == len(logprobs.top) >= 2
        assert logprobs.chosen <= 0


async def unsupported_fields_are_rejected_by_name(one: EngineDriver) -> None:
    unknown = an_attempt(token_bytes([5, 2**31]))
    one.submit(unknown)

    end = await one.end_of(unknown)

    assert isinstance(end, Rejected)
    assert (end.reason, end.field) == (Reason.INVALID_ARGUMENT, "tokens")
    await one.do(an_attempt(fresh_prompt(10)))


async def disaggregated_tokens_equal_aggregated_ones(prefill: EngineDriver, decode: EngineDriver, path: KvPath) -> None:
    """Check that the blocks really move, because equal tokens alone would not prove it."""
    block_tokens = decode.engine.facts.block_tokens
    for length in (1, block_tokens - 1, block_tokens, 2 * block_tokens + 1, 300):
        prompt = fresh_prompt(length)
        tokens, prefilled, decoded = await run_disaggregated(prefill, decode, prompt, 12, path)

        moved = blocks_from(decoded.kv, Source(path.value))
        assert moved == length // block_tokens, (length, decoded.kv)
        assert (bytes_from(decoded.kv, Source(path.value)) > 0) == (moved > 0)
        assert blocks_from(prefilled.kv, Source.COMPUTED) == blocks_for(length, block_tokens)
        assert decoded.kv is not None
        assert decoded.kv.cached_tokens == moved * block_tokens
        aggregated, _ = await prefill.do(an_attempt(prompt, 12))
        assert tokens == aggregated, length
    await prefill.idle()
    await decode.idle()


async def decode_side_may_sample_the_first_token(prefill: EngineDriver, decode: EngineDriver, path: KvPath) -> None:
    prompt = fresh_prompt(200)
    tokens, _, decoded = await run_disaggregated(prefill, decode, prompt, 6, path, pass_first_token=False)

    assert blocks_from(decoded.kv, Source(path.value)) == 199 // decode.engine.facts.block_tokens
    assert tokens == (await prefill.do(an_attempt(prompt, 6)))[0]
    await prefill.idle()


async def useless_handoff_costs_only_time(prefill: EngineDriver, decode: EngineDriver, path: KvPath) -> None:
    for params in (b"", b"[]", b"{}", b'{"address":"127.0.0.1:1","lease":"none"}'):
        prompt = fresh_prompt(200)
        # The handoff belongs to another prompt.
        _, prefilled = await prefill.do(an_attempt(fresh_prompt(3), phase=Phase.PREFILL, kv_path=path))
        assert prefilled.handoff is not None
        handoff = msgspec.structs.replace(prefilled.handoff, params=params)
        tokens, end = await decode.do(an_attempt(prompt, 6, phase=Phase.DECODE, handoff=handoff))

        assert blocks_from(end.kv, Source.COMPUTED) == blocks_for(200, decode.engine.facts.block_tokens)
        assert tokens == (await prefill.do(an_attempt(prompt, 6)))[0]


async def handed_off_blocks_stay_with_their_tenant(prefill: EngineDriver, decode: EngineDriver, path: KvPath) -> None:
    prompt = fresh_prompt(200)
    _, prefilled = await prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=path, salt=b"a" * 32))

    tokens, end = await decode.do(an_attempt(prompt, 6, phase=Phase.DECODE, handoff=prefilled.handoff, salt=b"b" * 32))

    assert end.kv is not None
    assert end.kv.cached_tokens == 0
    assert tokens == (await prefill.do(an_attempt(prompt, 6)))[0]


async def prompt_known_to_the_decode_side_is_not_moved(
    prefill: EngineDriver, decode: EngineDriver, path: KvPath
) -> None:
    prompt = fresh_prompt(200)
    first, _, _ = await run_disaggregated(prefill, decode, prompt, 6, path)
    again, prefilled, decoded = await run_disaggregated(prefill, decode, prompt, 6, path)

    full = 200 // decode.engine.facts.block_tokens
    assert again == first
    assert blocks_from(prefilled.kv, Source.ENGINE) == full
    assert blocks_from(decoded.kv, Source.ENGINE) == full
    assert blocks_from(decoded.kv, Source(path.value)) == 0
    await prefill.idle()


async def cancelled_decode_has_reported_its_blocks(prefill: EngineDriver, decode: EngineDriver, path: KvPath) -> None:
    prompt = fresh_prompt(200)
    first, prefilled = await prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=path))
    start = an_attempt(prompt + token_bytes(first), 800, phase=Phase.DECODE, handoff=prefilled.handoff)
    decode.submit(start)
    await decode.until(lambda: decode.tokens[start.request_id])

    decode.engine.cancel(start.request_id)

    end = await decode.end_of(start)
    assert isinstance(end, Progress)
    assert end.finish is Finish.CANCELLED
    (told,) = decode.told[start.request_id]
    full = 200 // decode.engine.facts.block_tokens
    assert blocks_from(told, Source(path.value)) == full
    assert blocks_from(told, Source.COMPUTED) == told.prompt_blocks - full
    assert bytes_from(told, Source(path.value)) > 0
    assert told.cached_tokens == full * decode.engine.facts.block_tokens
    await prefill.idle()
    await decode.idle()


async def concurrent_disaggregated_requests_stay_apart(
    prefill: EngineDriver, decode: EngineDriver, path: KvPath
) -> None:
    prompts = [fresh_prompt(length) for length in (40, 90, 200, 333)]
    prefills = [an_attempt(prompt, phase=Phase.PREFILL, kv_path=path) for prompt in prompts]
    prefill.submit(*prefills)
    decodes = []
    for start in prefills:
        end = await prefill.end_of(start)
        assert isinstance(end, Progress)
        tokens = start.tokens + token_bytes(end.token_ids)
        decodes.append(an_attempt(tokens, 7, phase=Phase.DECODE, handoff=end.handoff))
        decode.submit(decodes[-1])

    for prompt, first, rest in zip(prompts, prefills, decodes, strict=True):
        await decode.end_of(rest)
        tokens = prefill.tokens[first.request_id] + decode.tokens[rest.request_id]
        assert tokens == (await prefill.do(an_attempt(prompt, 8)))[0]


async def structured_output_is_obeyed_or_rejected(one: EngineDriver) -> None:
    """Check that the engine obeys structured output, or rejects the request and names the field."""
    start = an_attempt(fresh_prompt(20), sampling=greedy(8, ignore_eos=False, form=Choice(("no", "yes"))))
    one.submit(start)

    end = await one.end_of(start)

    if one.engine.facts.keeps_forms:
        assert isinstance(end, Progress), end
        assert end.finish is Finish.STOP, "the answer is one of the choices"
    else:
        assert isinstance(end, Rejected), end
        assert (end.reason, end.field) == (Reason.INVALID_ARGUMENT, "sampling.form")


async def sampling_fields_are_obeyed(one: EngineDriver) -> None:
    """Check that the engine obeys the sampling fields that it claims to obey."""
    prompt = fresh_prompt(50)
    plain = (await one.do(an_attempt(prompt, 6)))[0]
    # An engine limits reasoning only if it has a parser for it; test_thinking_budget.py tests this.
    assert {*ENGINE_FIELDS} - {*one.engine.facts.sampling_fields} <= {"thinking_tokens"}

    biased = (await one.do(an_attempt(prompt, sampling=greedy(6, logit_bias=((77, 100.0),)))))[0]
    banned = (await one.do(an_attempt(prompt, sampling=greedy(6, logit_bias=((plain[0], -100.0),)))))[0]
    allowed = (await one.do(an_attempt(prompt, sampling=greedy(6, allowed_token_ids=(5, 9)))))[0]
    without = (await one.do(an_attempt(prompt, sampling=greedy(6, bad_tokens=((plain[0],), (70, 71))))))[0]
    pair = greedy(6, allowed_token_ids=(70, 71), bad_tokens=((70, 71), (71, 70)))
    alternating = (await one.do(an_attempt(prompt, sampling=pair)))[0]

    assert biased == (77,) * 6
    assert plain[0] not in banned
    assert set(allowed) <= {5, 9}
    assert plain[0] not in without
    assert len(set(alternating)) == 1
    assert (await one.do(an_attempt(prompt, 6)))[0] == plain, "no field outlives its request"


def _with_state(**fields: object) -> Sampling:
    return Sampling(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **fields})  # type: ignore[arg-type]


HOT = {"temperature": 1.0, "seed": 11}
FEW = (70, 71, 72)
CONTINUED = {
    "greedy": _with_state(logprobs=2),
    "seed": _with_state(**HOT),
    "seed_and_filters": _with_state(temperature=0.75, seed=5, top_p=0.875, top_k=40, min_p=0.015625),
    "presence_penalty": _with_state(presence_penalty=2.0, allowed_token_ids=tuple(range(70, 100))),
    "frequency_penalty": _with_state(frequency_penalty=0.75, allowed_token_ids=FEW),
    "repetition_penalty": _with_state(repetition_penalty=1.5),
    "penalties_and_seed": _with_state(**HOT, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.25),
    "few_tokens_and_penalty": _with_state(**HOT, allowed_token_ids=FEW, frequency_penalty=1.0),
    "min_tokens": _with_state(**HOT, allowed_token_ids=FEW, stop_token_ids=(71,), ignore_eos=False, min_tokens=12),
    "bad_tokens": _with_state(**HOT, allowed_token_ids=FEW, bad_tokens=((70, 70), (71, 72), (72, 70, 71))),
    "form": _with_state(
        **HOT, ignore_eos=False, form=JsonSchema('{"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 9}')
    ),
}
"""Sampling parameters of answers that another engine continues."""


async def answer_continues_exactly(one: EngineDriver, other: EngineDriver, sampling: Sampling) -> None:
    """Let `other` continue an answer of `one` after 1, after 8, and after all but one of its tokens; compare the tokens."""
    if sampling.form is not None and not other.engine.facts.keeps_forms:
        return
    prompt = token_bytes(random.Random(75).sample(range(300, 4000), 75))
    whole = an_attempt(prompt, sampling=sampling)
    tokens, end = await one.do(whole)
    assert len(tokens) >= 10
    for begun in (1, 8, len(tokens) - 1):
        rest = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - begun, min_tokens=max(0, sampling.min_tokens - begun)
        )
        again = an_attempt(prompt + token_bytes(tokens[:begun]), sampling=rest, generated_tokens=begun)

        continued, finished = await other.do(again)

        assert continued == tokens[begun:], f"from token {begun}"
        assert finished.finish is end.finish
        assert finished.kv is not None
        assert finished.kv.prompt_blocks == blocks_for(75 + begun, other.engine.facts.block_tokens)
        assert [each.top_ids for each in other.logprobs[again.request_id]] == [
            each.top_ids for each in one.logprobs[whole.request_id][begun:]
        ]


async def answer_whose_form_is_complete_gets_no_more_tokens(one: EngineDriver, other: EngineDriver) -> None:
    """Let `other` continue an answer of `one` after its last token, as for a client that lacks only the end of the stream."""
    sampling = _with_state(**HOT, ignore_eos=False, form=Choice(("one", "two")))
    prompt = token_bytes(random.Random(76).sample(range(300, 4000), 75))
    tokens, end = await one.do(an_attempt(prompt, sampling=sampling))
    rest = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(tokens))

    continued, finished = await other.do(
        an_attempt(prompt + token_bytes(tokens), sampling=rest, generated_tokens=len(tokens))
    )

    assert end.finish is Finish.STOP
    assert (continued, finished.finish) == ((), Finish.STOP)


async def prompt_logprobs_come_once_for_all_but_the_first_token(one: EngineDriver) -> None:
    prompt = fresh_prompt(5 * one.engine.facts.block_tokens + 3)
    for _ in range(2):  # the second time, the engine has the blocks in its cache
        start = an_attempt(prompt, sampling=greedy(3, prompt_logprobs=2))
        tokens, end = await one.do(start)

        assert (len(tokens), end.finish) == (3, Finish.LENGTH)
        told = [each for each in one.progress[start.request_id] if each.prompt_logprobs]
        assert len(told) == 1
        assert len(told[0].prompt_logprobs) == len(prompt) // TOKEN_BYTES - 1
        assert told[0].token_ids, "they come with the first tokens"
        for one_token in told[0].prompt_logprobs:
            assert one_token.chosen <= 0
            assert len(one_token.top_ids) == len(one_token.top) == 2
            assert one_token.top[0] >= max(one_token.top[1], one_token.chosen - 1e-3)


async def structured_output_of_a_pair_equals_that_of_one(
    prefill: EngineDriver, decode: EngineDriver, path: KvPath
) -> None:
    """Let the decode engine sample every token, because structured output needs the answer from its start."""
    if not decode.engine.facts.keeps_forms:
        return
    sampling = greedy(8, ignore_eos=False, form=Choice(("no", "yes")))
    prompt = fresh_prompt(100)
    tokens, _, end = await run_disaggregated(
        prefill, decode, prompt, 8, path, pass_first_token=False, sampling=sampling
    )

    assert end.finish is Finish.STOP
    assert tokens == (await prefill.do(an_attempt(prompt, sampling=sampling)))[0]


async def steps_are_shown_while_the_engine_works(one: EngineDriver) -> None:
    """Check what the watchdog relies on: a working engine steps, and an engine that does not step has no work."""
    await until(lambda: not is_working(one))
    before = steps_of(one)
    start = an_attempt(fresh_prompt(70), 40)
    one.submit(start)
    await one.until(lambda: len(one.tokens[start.request_id]) >= 20)
    during = steps_of(one)
    assert is_working(one), "the engine holds a request"
    await one.end_of(start)

    await until(lambda: not is_working(one))

    assert before + 20 <= during <= before + 60, "a step gives each request at most one token and is counted once"
    assert during + 10 <= steps_of(one)
    assert not one.engine.traced()


ALONE = (
    every_request_ends_once_with_all_its_tokens,
    greedy_tokens_are_the_same_alone_and_in_a_batch,
    cancelled_request_ends_and_frees_its_blocks,
    request_cancelled_at_once_ends_too,
    cancelling_an_unknown_request_changes_nothing,
    reports_add_up_and_name_the_engines_own_cache,
    reports_come_with_the_first_tokens_and_the_finish,
    tenants_never_share_a_block,
    cache_events_name_the_blocks_of_the_chain,
    a_stop_token_ends_the_answer,
    sampling_with_a_seed_is_reproducible,
    logprobs_come_when_asked_for,
    unsupported_fields_are_rejected_by_name,
    structured_output_is_obeyed_or_rejected,
    sampling_fields_are_obeyed,
    prompt_logprobs_come_once_for_all_but_the_first_token,
    steps_are_shown_while_the_engine_works,
)

PAIRED = (
    disaggregated_tokens_equal_aggregated_ones,
    decode_side_may_sample_the_first_token,
    useless_handoff_costs_only_time,
    handed_off_blocks_stay_with_their_tenant,
    prompt_known_to_the_decode_side_is_not_moved,
    cancelled_decode_has_reported_its_blocks,
    concurrent_disaggregated_requests_stay_apart,
    structured_output_of_a_pair_equals_that_of_one,
)
