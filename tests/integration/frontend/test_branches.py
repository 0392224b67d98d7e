"""Tests of requests with several answers or prompts, or with details, with OpenAI's own client."""

import asyncio
import json
import shutil

import httpx
import openai
import pytest

from fleet.core.errors import Reason, RequestRejected
from fleet.core.requests import AnswerParsers, Logprobs, PairForm, PoolingModel, PoolingTask
from fleet.frontend.generation import INLINE_CHARACTERS
from fleet.router.tenants import TenantSettings
from tests.support.builders import token_ids
from tests.support.frontend.frontends import Frontends, open_frontends
from tests.support.frontend.http_clients import error_of
from tests.support.frontend.text_model import EOS, write_json
from tests.support.router.fake_router import a_model_card
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "user", "content": "Größe?"}]


@pytest.fixture
async def client(frontends: Frontends):
    async with openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def will_answer_in_turn(frontends: Frontends, *texts: str, logprob: float = -1.0) -> list[list[int]]:
    """Let the requests get these texts in the order of their arrival; return the ids."""
    answers = [token_ids(frontends.codec.encode(text))[1:] for text in texts]
    frontends.router.in_turn = [
        (ids, [Logprobs(logprob * (index + 1), (ids[0],), (-0.5,))] * len(ids)) for index, ids in enumerate(answers)
    ]
    return answers


async def test_n_answers_have_their_index_and_a_summed_usage(frontends, client):
    answers = will_answer_in_turn(frontends, "the fox", "a dog jumps", "once")

    chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=7)

    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert [choice.message.content for choice in chat.choices] == ["the fox", "a dog jumps", "once"]
    lead, *others = frontends.router.submitted
    assert chat.usage.prompt_tokens == len(lead.tokens) // 4
    assert chat.usage.completion_tokens == sum(map(len, answers))
    assert chat.id == f"chatcmpl-{lead.request_id}"
    assert [other.request_id for other in others] == [f"{lead.request_id}-1", f"{lead.request_id}-2"]
    assert [arrived.sampling.seed for arrived in (lead, *others)] == [7, 8, 9]
    assert {other.tokens for other in others} == {lead.tokens}
    assert len(chat.fleet["kv"]) == 3


EMBEDS = a_model_card(pooling=PoolingModel(task=PoolingTask.EMBED))
SCORES_PAIRS = a_model_card(pooling=PoolingModel(task=PoolingTask.CLASSIFY, pairs=PairForm.SEPARATED))


@pytest.mark.parametrize(
    ("path", "fields", "wrong", "card"),
    [
        ("/v1/completions", {"prompt": "once", "n": 6}, "n", a_model_card()),
        ("/v1/completions", {"prompt": "once", "best_of": 6}, "best_of", a_model_card()),
        ("/v1/completions", {"prompt": ["once", "the fox"], "n": 3}, "prompt", a_model_card()),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 6}, "n", a_model_card()),
        ("/v1/embeddings", {"input": ["once"] * 6}, "input", EMBEDS),
        ("/v1/rerank", {"query": "once", "documents": ["the fox"] * 6}, "documents", SCORES_PAIRS),
        ("/v1/score", {"text_1": "once", "text_2": ["the fox"] * 6}, "text_2", SCORES_PAIRS),
        ("/v1/score", {"queries": "0", "items": ["1", "2", "3", "4", "5"]}, "items", EMBEDS),
    ],
)
async def test_more_branches_than_the_limit_are_refused_for_free(model_dir, path, fields, wrong, card):
    """A retry could never succeed, and each would use up the limit."""
    limits = {"acme": TenantSettings(requests_per_minute=5)}
    async with (
        open_frontends(model_dir, limits) as frontends,
        httpx.AsyncClient(base_url=frontends.url, trust_env=False, timeout=60) as http,
    ):
        frontends.router.cards = (card,)
        answer = await http.post(path, json={"model": "tiny", "fleet": {"tenant": "acme"}, **fields})

        assert (answer.status_code, error_of(answer.content)["param"]) == (400, wrong)
        assert "makes 6 requests, and this tenant has 5 a minute" in answer.text
        assert frontends.tenants.usage()["acme"].requests == 0


async def test_request_with_too_many_branches_is_counted_once(model_dir):
    limits = {"acme": TenantSettings(requests_per_minute=5)}
    async with open_frontends(model_dir, limits) as frontends, httpx.AsyncClient(base_url=frontends.url) as http:
        body = {"model": "tiny", "fleet": {"tenant": "acme"}, "prompt": ["once", "the fox"], "n": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 400

        counted = {
            sample.labels["outcome"]: sample.value
            for metric in frontends.registry.collect()
            for sample in metric.samples
            if sample.name == "fleet_requests_total" and sample.value
        }
        assert counted == {"invalid_argument": 1}


async def test_too_many_pairs_are_refused_before_tokenizing(model_dir, monkeypatch):
    limits = {"acme": TenantSettings(requests_per_minute=5)}
    async with (
        open_frontends(model_dir, limits) as frontends,
        httpx.AsyncClient(base_url=frontends.url, trust_env=False, timeout=60) as http,
    ):
        tokenized: list[str] = []

        def noted(codec, first: str, second: str):
            tokenized.append(second)
            return codec.encode(first + second), 1

        monkeypatch.setattr(type(frontends.codec), "encode_pair", noted)
        frontends.router.cards = (SCORES_PAIRS,)
        body = {"model": "tiny", "fleet": {"tenant": "acme"}, "query": "once", "documents": ["the fox"] * 6}
        answer = await http.post("/v1/rerank", json=body)

        assert (answer.status_code, error_of(answer.content)["param"]) == (400, "documents")
        assert tokenized == []


@pytest.mark.parametrize(
    ("path", "field", "card"),
    [
        ("/v1/completions", "prompt", a_model_card()),
        ("/v1/embeddings", "input", EMBEDS),
    ],
)
async def test_short_prompts_are_tokenized_over_several_turns(frontends, monkeypatch, path, field, card):
    """Count the characters that are tokenized between two turns of the event loop."""
    in_turn = [0]
    encode = type(frontends.codec).encode

    def noted(codec, text: str, special: bool = True) -> bytes:
        in_turn[-1] += len(text)
        return encode(codec, text, special)

    async def count_turns() -> None:
        while True:
            in_turn.append(0)
            await turns()

    monkeypatch.setattr(type(frontends.codec), "encode", noted)
    frontends.router.cards = (card,)
    frontends.router.hold_after = 0
    texts = [f"{number:1000}" for number in range(40)]
    async with httpx.AsyncClient(base_url=frontends.url, timeout=60) as client:
        asked = asyncio.create_task(client.post(path, json={"model": "tiny", field: texts}))
        counting = asyncio.create_task(count_turns())
        await until(lambda: len(frontends.router.submitted) == len(texts))
        for each in (asked, counting):
            each.cancel()
        await asyncio.gather(asked, counting, return_exceptions=True)

    assert sum(in_turn) == 1000 * len(texts)
    assert max(in_turn) <= INLINE_CHARACTERS


async def test_tool_calls_are_parsed_in_every_answer(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": template})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with (
        open_frontends(folder) as frontends,
        openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        frontends.router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
        frontends.will_answer('<tool_call>{"name": "add", "arguments": {}}</tool_call>', then=[EOS])

        chat = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=tools, tool_choice="required", n=3
        )

    assert [choice.finish_reason for choice in chat.choices] == ["tool_calls"] * 3
    assert [[call.function.name for call in choice.message.tool_calls] for choice in chat.choices] == [["add"]] * 3
    lead, *others = frontends.router.submitted
    assert [other.parsing for other in others] == [lead.parsing] * 2
    assert [other.sampling.form for other in others] == [lead.sampling.form] * 2
    assert lead.sampling.form is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_other_answers_wait_for_the_first_token_of_the_lead(frontends, client, stream):
    frontends.will_answer("the quick brown fox")
    frontends.router.hold_after = 0
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            client.completions.create(model="tiny", prompt="once", n=3, max_tokens=3, stream=stream)
        )
        await frontends.router.until(frontends.router.submitted)
        assert len(frontends.router.submitted) == 1

        frontends.router.hold_after = 1  # the lead goes on to its second step, and waits there
        held, frontends.router.release = frontends.router.release, asyncio.Event()
        held.set()
        await frontends.router.until(frontends.router.submitted, 3)

        frontends.router.release.set()
        answer = await asking
        if stream:
            async for _ in answer:
                pass
    assert len(frontends.router.completed) == 3


async def test_prompt_list_gives_a_choice_per_prompt_and_answer(frontends, client):
    frontends.will_answer("x")

    completion = await client.completions.create(model="tiny", prompt=["once", "the fox jumps"], n=2, max_tokens=4)
    tokens = await client.completions.create(model="tiny", prompt=[[3, 4], [5, 6, 7]], max_tokens=4)

    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({arrived.request_id for arrived in frontends.router.submitted}) == 6
    once, fox = (len(frontends.codec.encode(text)) // 4 for text in ("once", "the fox jumps"))
    assert completion.usage.prompt_tokens == once + fox
    assert tokens.usage.prompt_tokens == 5
    assert completion.usage.completion_tokens == 2 * tokens.usage.completion_tokens


async def test_streamed_answers_are_told_apart_by_their_index(frontends, client):
    frontends.will_answer("the quick brown fox")

    stream = await client.completions.create(
        model="tiny", prompt=["once", "a dog"], n=2, max_tokens=99, stream=True, stream_options={"include_usage": True}
    )
    texts = dict.fromkeys(range(4), "")
    ends = {}
    usage = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        if chunk.usage is not None:
            usage.append(chunk.usage)

    assert texts == dict.fromkeys(range(4), "the quick brown fox")
    assert ends == dict.fromkeys(range(4), "length")
    assert [each.completion_tokens for each in usage] == [4 * len(frontends.router.answer)]


async def test_streamed_chat_answers_each_have_a_role(frontends, client):
    frontends.will_answer("the quick brown fox")

    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stream=True)
    deltas = [(choice.index, choice.delta) async for chunk in stream for choice in chunk.choices]

    for index in (0, 1):
        assert next(delta.role for at, delta in deltas if at == index) == "assistant"
        assert "".join(delta.content or "" for at, delta in deltas if at == index) == "the quick brown fox"


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_branch_ends_all_others(frontends, client, stream):
    frontends.will_answer("the quick brown fox")
    frontends.router.pause_seconds = 0.001
    mine = client.with_options(default_headers={"x-request-id": "mine"})

    async def ask() -> None:
        answer = await mine.completions.create(model="tiny", prompt="once", n=4, max_tokens=99, stream=stream)
        if stream:
            async for _ in answer:
                pass

    frontends.router.break_after = 2
    frontends.router.breaks = {"mine-2"}

    with pytest.raises(openai.APIError, match="its worker is gone"):
        await ask()

    router = frontends.router
    await until(lambda: len(router.cancelled) + len(router.completed) >= len(router.submitted))
    assert "mine-2" in router.cancelled
    assert frontends.generation.running == 0


async def test_refused_branch_names_its_prompt(frontends, client):
    frontends.will_answer("x")

    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(model="tiny", prompt=[[3], [4, 501]], max_tokens=1)

    assert raised.value.param == "prompt[1][1]"
    assert frontends.generation.running == 0


async def test_best_answers_are_returned_and_all_are_counted(frontends, client):
    answers = will_answer_in_turn(frontends, "worst", "middle", "best", logprob=-3.0)
    frontends.router.in_turn = list(reversed(frontends.router.in_turn))

    completion = await client.completions.create(model="tiny", prompt="once", n=2, best_of=3, max_tokens=99)

    assert [choice.text for choice in completion.choices] == ["worst", "middle"]
    assert [choice.logprobs for choice in completion.choices] == [None, None]
    assert completion.usage.completion_tokens == sum(map(len, answers))


async def test_closed_stream_cancels_every_branch(frontends, client):
    frontends.will_answer("the quick brown fox")
    frontends.router.hold_after = 2
    stream = await client.completions.create(model="tiny", prompt=["once", "a dog"], n=2, max_tokens=99, stream=True)
    await anext(aiter(stream))
    await frontends.router.until(frontends.router.submitted, 4)

    await stream.close()

    await frontends.router.until(frontends.router.cancelled, 4)


async def test_echo_scores_the_prompt_as_lm_eval_asks(frontends, client):
    prompt = [0, *token_ids(frontends.codec.encode("the fox"))[1:]]
    answer = frontends.will_answer("jumps")
    frontends.router.logprobs = [Logprobs(-0.25, (answer[0], 5), (-0.25, -3.0))] * len(answer)
    frontends.router.prompt_logprobs = [Logprobs(-1.5, (token, 7, 8), (-1.5, -2.0, -4.0)) for token in prompt[1:]]

    scored = await client.completions.create(model="tiny", prompt=[prompt] * 2, max_tokens=1, logprobs=1, echo=True)
    alone = await client.completions.create(model="tiny", prompt=prompt, max_tokens=0, logprobs=2, echo=True)

    assert [choice.index for choice in scored.choices] == [0, 1]
    for choice in scored.choices:
        logprobs = choice.logprobs
        assert choice.text == "".join(logprobs.tokens) == "<s>the fox" + frontends.codec.token_text(answer[0])
        assert logprobs.token_logprobs == [None, *[-1.5] * (len(prompt) - 1), -0.25]
        assert logprobs.top_logprobs[0] is None
        assert all(len(top) == 1 for top in logprobs.top_logprobs[1:-1])
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:at])) for at in range(len(prompt) + 1)]
    (choice,) = alone.choices
    assert (choice.text, choice.finish_reason, alone.usage.completion_tokens) == ("<s>the fox", "length", 0)
    assert choice.logprobs.token_logprobs == [None, *[-1.5] * (len(prompt) - 1)]
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[1:])
    assert frontends.router.submitted[-1].sampling.max_tokens == 1


async def test_echo_of_a_text_is_the_text_in_every_answer(frontends, client):
    frontends.will_answer(" jumps")

    whole = await client.completions.create(model="tiny", prompt="the fox", n=2, max_tokens=99, echo=True)
    stream = await client.completions.create(model="tiny", prompt="the fox", n=2, max_tokens=99, echo=True, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text

    assert [choice.text for choice in whole.choices] == texts == ["the fox jumps"] * 2
    assert all(arrived.sampling.prompt_logprobs is None for arrived in frontends.router.submitted)


async def test_prompt_logprobs_are_in_vllms_form(frontends, client):
    frontends.will_answer("x")
    frontends.router.prompt_logprobs = [Logprobs(-5.0, (7,), (-0.5,)), Logprobs(-0.5, (4,), (-0.5,))]

    ask = {"model": "tiny", "extra_body": {"prompt_logprobs": 1}}
    completion = await client.completions.create(prompt=[0, 3, 4], max_tokens=1, **ask)
    frontends.router.prompt_logprobs = []
    chat = await client.chat.completions.create(messages=MESSAGES, max_tokens=1, model="tiny", n=1)

    first, second, third = completion.choices[0].prompt_logprobs
    assert first is None
    assert second["7"] == {"logprob": -0.5, "rank": 1, "decoded_token": frontends.codec.token_text(7)}
    assert (second["3"]["logprob"], second["3"]["rank"]) == (-5.0, None)
    assert third == {"4": {"logprob": -0.5, "rank": 1, "decoded_token": frontends.codec.token_text(4)}}
    assert not hasattr(chat.choices[0], "prompt_logprobs")


async def test_token_ids_are_where_vllm_has_them(frontends, client):
    answer = frontends.will_answer("the fox")
    extra = {"return_token_ids": True}

    completion = await client.completions.create(model="tiny", prompt=[3, 4], max_tokens=99, extra_body=extra)
    chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    stream = await client.completions.create(model="tiny", prompt=[3, 4], max_tokens=99, extra_body=extra, stream=True)
    streamed = [chunk.choices[0] async for chunk in stream]

    assert (completion.choices[0].prompt_token_ids, completion.choices[0].token_ids) == ([3, 4], answer)
    assert chat.choices[0].token_ids == answer
    assert chat.prompt_token_ids == token_ids(frontends.router.submitted[1].tokens)
    assert [getattr(choice, "prompt_token_ids", None) for choice in streamed] == [[3, 4], *[None] * (len(streamed) - 1)]
    assert [token for choice in streamed for token in choice.token_ids] == answer


async def test_every_event_has_its_usage_on_demand(frontends, client):
    answer = frontends.will_answer("the quick fox")

    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    chunks = [chunk async for chunk in stream]

    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[: len(answer)] == list(range(1, len(answer) + 1))
    assert counts[-1] == len(answer)
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


async def test_log_probabilities_may_name_tokens_by_id(frontends, client):
    answer = frontends.will_answer("the fox")
    frontends.router.logprobs = [Logprobs(-0.25, (token, 5), (-0.25, -3.0)) for token in answer]

    completion = await client.completions.create(
        model="tiny", prompt="once", logprobs=2, extra_body={"return_tokens_as_token_ids": True}
    )

    assert completion.choices[0].logprobs.tokens == [f"token_id:{token}" for token in answer]
    assert set(completion.choices[0].logprobs.top_logprobs[0]) == {f"token_id:{answer[0]}", "token_id:5"}


async def test_rejection_of_all_branches_has_its_status(frontends, client):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "no", retry_after_ms=1500)

    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt=["a", "b"], n=2)

    assert frontends.generation.running == 0


async def test_headers_of_unmodified_clients_are_hints(frontends, client):
    frontends.will_answer("x")
    hinted = client.with_options(
        default_headers={"x-session-id": "s1", "x-vllm-priority": "-4", "x-request-id": "mine"}
    )

    completion = await hinted.completions.create(model="tiny", prompt="once", max_tokens=1)
    async with httpx.AsyncClient() as plain:
        refused = await plain.post(
            f"{frontends.url}/v1/completions", json={"prompt": "x"}, headers={"x-fleet-priority": "high"}
        )

    (arrived,) = frontends.router.submitted
    assert (arrived.session, arrived.priority, arrived.request_id) == ("s1", 4, "mine")
    assert completion.id == "cmpl-mine"
    assert (refused.status_code, json.loads(refused.content)["error"]["param"]) == (400, "x-fleet-priority")


async def test_request_id_in_use_is_not_taken_again(frontends, client):
    frontends.will_answer("x")
    frontends.router.hold_after = 0
    mine = client.with_options(default_headers={"x-request-id": "mine"})
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(mine.completions.create(model="tiny", prompt="once", max_tokens=1))
        await frontends.router.until(frontends.router.submitted, 2)
        frontends.router.release.set()

    assert len({arrived.request_id for arrived in frontends.router.submitted}) == 2


async def test_branch_takes_no_id_that_a_client_has_chosen(frontends, client):
    frontends.will_answer("x")
    frontends.router.hold_after = 0
    other = client.with_options(default_headers={"x-request-id": "mine-1"})
    mine = client.with_options(default_headers={"x-request-id": "mine"})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other.completions.create(model="tiny", prompt="once", max_tokens=1))
        await frontends.router.until(frontends.router.submitted, 1)
        asked = tasks.create_task(mine.completions.create(model="tiny", prompt=["a", "b"], max_tokens=1))
        await frontends.router.until(frontends.router.submitted, 3)
        frontends.router.release.set()

    ids = [arrived.request_id for arrived in frontends.router.submitted]
    assert len(asked.result().choices) == 2
    assert ids[:2] == ["mine-1", "mine"]
    assert ids[2].startswith("mine-1-")


async def test_longest_request_id_has_room_for_branches(frontends, client):
    frontends.will_answer("x")
    longest = "i" * 128
    named = client.with_options(default_headers={"x-request-id": longest})

    await named.completions.create(model="tiny", prompt="once", n=2, max_tokens=1)

    assert [arrived.request_id for arrived in frontends.router.submitted] == [longest, f"{longest[:126]}-1"]
