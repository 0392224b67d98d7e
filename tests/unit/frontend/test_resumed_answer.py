"""Tests of resumed answers: wherever a stream is cut, both streams together give the text and tokens of an undisturbed answer."""

import asyncio
from collections.abc import Sequence
from hashlib import sha256

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    Admitted,
    AnswerParsers,
    AnswerParsing,
    CallDelta,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateRequest,
    Resume,
    Sampling,
    TextPrompt,
)
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.core.work import ParsedDelta, Progress
from fleet.frontend.access_log import AccessLog
from fleet.frontend.generation import INLINE_CHARACTERS, INLINE_TOKENS, Generation
from fleet.frontend.resume_tokens import ResumeClaims, ResumeTokens
from fleet.frontend.resumed_answer import ResumedAnswer
from fleet.frontend.text.codec import AnswerText, load_codec
from fleet.frontend.text.parsed_answer import EngineParsedAnswer, TemplateParsedAnswer
from fleet.frontend.text.response_templates import ResponseTemplates
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.router.server import AnswerKeyChanged
from fleet.router.tenants import Tenants, TenantSettings
from tests.support.builders import MODEL, a_request, token_ids
from tests.support.frontend.text_model import EOS, write_json, write_model, write_seeing_model
from tests.support.router.fake_router import FakeRouter, FakeStream, a_model_card
from tests.support.waiting import turns

GREEDY = Sampling(max_tokens=100, temperature=0)
TEXT = "Zwölf 漢字 🎉 of STOP, STOPPED"


@pytest.fixture(scope="module")
def codec(model_dir):
    return load_codec(model_dir)


@pytest.fixture
def open_generation(codec):
    """Return a factory that makes the `Generation` of a router; all routers belong to one cluster."""
    threads = TokenizerThreads()

    def make(router, codec=codec, counts: Tenants | None = None, **tenants) -> Generation:
        clock = SystemClock()
        return Generation(
            router,
            {MODEL: codec},
            clock=clock,
            tenants=counts or Tenants(tenants, clock.now()),
            tenant_secret=b"",
            metrics=RouterProcessMetrics(CollectorRegistry()),
            threads=threads,
            resume_tokens=ResumeTokens(b"secret", 60, lambda: 1000),
            kept_answers=router,
        )

    yield make
    threads.close()


async def events_of(generation, request, **options):
    return [event async for event in generation.generate(request, **options)]


def received(events):
    """Return the text, the tokens and the latest resume token of these events."""
    text = "".join(event.text for event in events if isinstance(event, Delta | Finished))
    tokens = tuple(token for event in events if isinstance(event, Delta) for token in event.token_ids)
    latest = [event.resume_token for event in events if isinstance(event, Admitted | Delta) and event.resume_token]
    return text, tokens, latest[-1] if latest else ""


def resumption(events, *, known: int | None = None) -> Resume:
    text, tokens, token = received(events)
    return Resume(token=token, token_ids=tokens[:known], position=len(tokens), text=text)


@pytest.mark.parametrize("stop", [(), ("STOPPED",), ("STOP", "g S")])
@pytest.mark.parametrize("known", [None, 0, 3])
@pytest.mark.parametrize("step", [1, 3])
async def test_answer_cut_anywhere_goes_on_exactly(open_generation, codec, stop, known, step):
    answer = [*token_ids(codec.encode(TEXT))[1:], EOS]
    first, second = (open_generation(FakeRouter(answer, step=step)) for _ in range(2))
    request = a_request(sampling=GREEDY, stop=stop, resumable=True)
    whole = await events_of(first, request)
    expected, finished = received(whole), whole[-1]

    for cut in range(1, len(whole)):
        seen = whole[:cut]
        rest = await events_of(second, structs.replace(request, resume=resumption(seen, known=known)))
        text, tokens, _ = received(seen)
        more, further, _ = received(rest)

        assert (text + more, tokens + further) == expected[:2], cut
        assert rest[-1].finish is finished.finish
        assert rest[-1].stop_string == finished.stop_string
        assert rest[-1].usage == finished.usage


async def test_long_answer_is_replayed_in_a_thread_and_goes_on(open_generation, codec):
    answer = token_ids(codec.encode(TEXT * 20))[1:]
    assert len(answer) > INLINE_TOKENS + 10
    request = a_request(sampling=structs.replace(GREEDY, max_tokens=1000), stop=("nowhere",), resumable=True)
    whole = await events_of(open_generation(FakeRouter(answer)), request)
    seen = whole[: INLINE_TOKENS + 5]

    rest = await events_of(open_generation(FakeRouter(answer)), structs.replace(request, resume=resumption(seen)))

    assert received(seen)[0] + received(rest)[0] == received(whole)[0]
    assert received(seen)[1] + received(rest)[1] == tuple(answer)


async def test_router_gets_tokens_and_weights_of_the_answer(open_generation, codec):
    answer = token_ids(codec.encode(TEXT))[1:]
    router = FakeRouter(answer)
    request = a_request(sampling=GREEDY, resumable=True)
    seen = (await events_of(open_generation(FakeRouter(answer)), request))[:5]

    rest = await events_of(open_generation(router), structs.replace(request, resume=resumption(seen)))

    (arrived,) = router.submitted
    assert arrived.answered == tuple(answer[:4])
    assert arrived.fingerprint == "weights"
    assert arrived.request_id == f"{request.id}.r1"
    again = await events_of(
        open_generation(router), structs.replace(request, resume=resumption([*seen, *rest[:-1]][:7]))
    )
    assert again[0].request_id == f"{request.id}.r2", "its token comes from the second router"


async def test_resumed_request_counts_once_against_limits(open_generation, codec):
    answer = token_ids(codec.encode(TEXT))[1:]
    limit = TenantSettings(requests_per_minute=1)
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme")
    seen = (await events_of(open_generation(FakeRouter(answer), acme=limit), request))[:5]
    second = open_generation(FakeRouter(answer), acme=limit)
    resumed = structs.replace(request, resume=resumption(seen))

    await events_of(second, resumed)
    await events_of(second, request)  # the only request that the limit allows in this minute

    with pytest.raises(RequestRejected) as refused:
        await events_of(second, resumed)
    assert refused.value.reason is Reason.RATE_LIMITED, "a token is free once"


async def test_charged_resumption_counts_the_tokens_that_it_brings(open_generation, codec):
    """Resume with invented tokens: if they did not count, a client could send a prompt as tokens of an answer for free."""
    answer = token_ids(codec.encode(TEXT))[1:]
    tenants = Tenants({"acme": TenantSettings()}, SystemClock().now())
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme")
    router = FakeRouter(answer)
    generation = open_generation(router, counts=tenants)
    first = await events_of(generation, request)
    invented = tuple(answer[:1] * 60)
    resume = Resume(token=received(first)[2], token_ids=invented, position=60)
    usage = tenants.usage()["acme"]
    charged = []
    for _ in range(3):
        before = usage.prompt_tokens
        await events_of(generation, structs.replace(request, resume=resume))
        charged.append(usage.prompt_tokens - before)

    prompt = first[0].prompt_tokens
    assert charged == [0, prompt + 60, prompt + 60]
    assert all(arrived.answered == invented for arrived in router.submitted[1:])


async def test_stop_string_in_known_tokens_gives_no_tokens_back(open_generation, codec):
    """A client may claim tokens beyond the stop string that ended its answer, so the replay ends before the last known token."""
    answer = token_ids(codec.encode(TEXT))[1:]
    tenants = Tenants({"acme": TenantSettings()}, SystemClock().now())
    generation = open_generation(FakeRouter(answer), counts=tenants)
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme", stop=(TEXT[:1],))
    first = await events_of(generation, request)
    usage = tenants.usage()["acme"]
    before = usage.answer_tokens
    claimed = structs.replace(resumption(first), token_ids=tuple(answer))

    for _ in range(2):
        events = await events_of(generation, structs.replace(request, resume=claimed))
        assert isinstance(events[-1], Finished)

    assert usage.answer_tokens == before


async def test_resumption_over_the_limit_is_refused_unsearched(open_generation):
    """Resume over the rate limit: it is refused before the search for tokens, which costs more than most answers."""
    router = FakeRouter(range(100, 120))
    generation = open_generation(router, acme=TenantSettings(requests_per_minute=1))
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True, tenant="acme")
    seen = await events_of(generation, request)
    resumed = structs.replace(request, resume=Resume(token=received(seen)[2], position=5))
    await events_of(generation, resumed)  # this resumption is free
    searches = router.searches

    with pytest.raises(RequestRejected) as refused:
        await events_of(generation, resumed)

    assert refused.value.reason is Reason.RATE_LIMITED
    assert router.searches == searches == 1


async def test_resumptions_of_long_request_ids_do_not_collide(open_generation):
    """Resume requests with ids of the maximum length that begin alike, because a resumption's id has only their beginning."""
    router = FakeRouter(range(100, 120))
    generation = open_generation(router)
    resumed = []
    for number in range(12):
        request_id = RequestId(f"{'x' * 126}{number:02}")
        request = a_request(id=request_id, sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
        seen = await events_of(generation, request)
        resumed.append(structs.replace(request, resume=Resume(token=received(seen)[2], position=5)))
    router.hold_after = 2

    running = [asyncio.create_task(events_of(generation, each)) for each in resumed]
    await router.until(router.submitted, 24)
    router.release.set()

    ends = await asyncio.gather(*running)
    assert all(isinstance(each[-1], Finished) for each in ends)
    assert len({each[0].request_id for each in ends}) == 12


async def test_of_simultaneous_uses_of_a_token_one_is_free(open_generation, codec):
    """Send requests with a long prompt, which a thread tokenizes, so that all of them arrive before the first one is admitted."""
    answer = token_ids(codec.encode(TEXT))[1:]
    limit = TenantSettings(requests_per_minute=1)
    prompt = TextPrompt(text="a " * INLINE_CHARACTERS)
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme", prompt=prompt)
    router = FakeRouter(answer, cards=[a_model_card(max_model_len=100_000)])
    seen = (await events_of(open_generation(router, acme=limit), request))[:5]
    second = open_generation(router, acme=limit)
    resumed = structs.replace(request, resume=resumption(seen))

    ends = await asyncio.gather(*(events_of(second, resumed) for _ in range(4)), return_exceptions=True)

    refused = [end.reason for end in ends if isinstance(end, RequestRejected)]
    assert refused == [Reason.RATE_LIMITED] * 2, "one is free, and one is the one request of this minute"


async def test_tokens_of_both_routers_are_charged_once(open_generation, codec):
    answer = token_ids(codec.encode(TEXT))[1:]
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme")
    seen = (await events_of(open_generation(FakeRouter(answer)), request))[:5]
    usage = Tenants({"acme": TenantSettings()}, SystemClock().now())
    second = open_generation(FakeRouter(answer), counts=usage)
    await events_of(second, structs.replace(request, resume=resumption(seen)))

    counted = usage.usage()["acme"]
    assert (counted.requests, counted.prompt_tokens, counted.answer_tokens) == (0, 0, len(answer) - 4)


async def test_streams_of_one_answer_at_random_keep_their_tokens_apart(open_generation):
    """Resume twice from one event, as a client does whose first try reached a router that hangs and goes on later."""
    router = FakeRouter()
    generation = open_generation(router)
    request = a_request(sampling=Sampling(max_tokens=100), resumable=True, is_kept=True)
    begun = Resume(token="")

    async def got(answer: Sequence[int], events: int, resume: Resume = begun) -> Resume:
        """Return the next `Resume` of a client that gets only the first `events` events of a stream with this answer."""
        router.answer = list(answer)
        asked = request if resume is begun else structs.replace(request, resume=resume)
        seen = (await events_of(generation, asked))[:events]
        return Resume(token=received(seen)[2], position=resume.position + len(received(seen)[1]))

    seen = await got(range(100, 120), 6)
    ours = await got([*range(100, 105), *range(200, 215)], 6, seen)
    await got([*range(100, 105), *range(300, 315)], 20, seen)

    await got([0] * 20, 20, ours)

    assert router.submitted[-1].answered == (*range(100, 105), *range(200, 205))


async def resumed_after(open_generation, router, request, cut):
    """Resume a stream after its first `cut` events by tokens that workers keep; return the events that follow."""
    seen = (await events_of(open_generation(router), request))[:cut]
    resume = Resume(token=received(seen)[2], position=len(received(seen)[1]))
    return seen, await events_of(open_generation(router), structs.replace(request, resume=resume))


@pytest.mark.parametrize("cut", range(1, 22))
async def test_random_answer_with_lost_worker_and_router_goes_on(open_generation, cut):
    """Lose a worker that keeps tokens which no client got: the resume token must name the tokens of the other worker."""
    router = FakeRouter(range(100, 120))
    router.retry_after = 9
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
    seen, rest = await resumed_after(open_generation, router, request, cut)

    tokens = received(seen)[1]
    assert tokens + received(rest)[1] == tuple(range(100, 120))
    if len(router.submitted) > 1:  # otherwise the answer had ended before the cut
        assert router.submitted[-1].answered == tokens


async def test_resumed_answer_lost_before_new_tokens_goes_on(open_generation):
    """Lose the second router before a worker gets its attempt, so that only the first worker keeps the tokens."""
    router = FakeRouter(range(100, 120))
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
    seen, rest = await resumed_after(open_generation, router, request, 9)
    held = len(received(seen)[1])
    router.kept[router.submitted[-1].answer_key] = []

    resume = Resume(token=received(rest[:1])[2], position=held)
    again = await events_of(open_generation(router), structs.replace(request, resume=resume))

    assert received(again)[1] == tuple(range(100 + held, 120))


async def test_resumable_answer_has_one_time_of_its_beginning(open_generation):
    """Compare the time at which the answer began: clients see it as `created`, before and after the resumption."""
    router = FakeRouter(range(100, 120))
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
    seen, rest = await resumed_after(open_generation, router, request, 9)

    assert [event.began for event in (*seen, *rest) if isinstance(event, Admitted)] == [1000, 1000]


async def test_many_long_answers_are_resumed_at_once(open_generation):
    """Resume 100 long answers at the same time, as after the loss of a router: none may be refused."""
    router = FakeRouter(range(100, 100 + INLINE_TOKENS + 100))
    request = a_request(sampling=Sampling(max_tokens=INLINE_TOKENS + 100), resumable=True)
    seen = (await events_of(open_generation(router), request))[: INLINE_TOKENS + 50]
    again = structs.replace(request, resume=resumption(seen))
    generation = open_generation(router)

    answers = await asyncio.gather(*(events_of(generation, again) for _ in range(100)))

    assert {received(answer)[1][-1] for answer in answers} == {100 + INLINE_TOKENS + 99}


async def test_resumption_waits_for_the_workers_of_its_model(open_generation):
    """Workers register one after the other at a router that has just started, and a resume token says that there was one."""
    router = FakeRouter(range(100, 120))
    generation = open_generation(router)
    request = structs.replace(await resumption_of_kept_answer(generation), model=ModelName("tuned"))

    with pytest.raises(RequestRejected) as refused:
        await events_of(generation, request)

    assert refused.value.reason is Reason.NO_WORKER
    assert refused.value.retry_after_ms > 0


async def resumption_of_kept_answer(generation) -> GenerateRequest:
    """Break a stream whose tokens workers keep, and return the request that resumes it."""
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
    seen = (await events_of(generation, request))[:9]
    resume = Resume(token=received(seen)[2], position=len(received(seen)[1]))
    return structs.replace(request, resume=resume)


async def test_second_resumption_during_a_search_is_served(open_generation):
    """Resume twice, as a client does whose connection breaks while the router searches for its tokens."""
    router = FakeRouter(range(100, 120))
    generation = open_generation(router)
    again = await resumption_of_kept_answer(generation)
    router.search_turns = 5

    one, other = await asyncio.gather(events_of(generation, again), events_of(generation, again))

    assert received(one)[1] == received(other)[1] == tuple(range(100 + again.resume.position, 120))


async def test_client_that_leaves_during_a_search_is_counted(open_generation):
    router = FakeRouter(range(100, 120))
    generation = open_generation(router)
    again = await resumption_of_kept_answer(generation)
    router.search_turns = 1000
    task = asyncio.create_task(events_of(generation, again))
    await turns(3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    (counted,) = [each.outcomes for each in generation.metrics.requests.values() if each.outcomes]
    assert sorted(outcome for outcome, _ in counted) == [Reason.CANCELLED, Finish.LENGTH]


@pytest.mark.parametrize("stream", [-1, -(2**40)])
def test_token_with_an_impossible_stream_is_refused(stream):
    """Forge a token, as anybody can if the router has no secret: it must not disturb the searches of other clients."""
    tokens = ResumeTokens(b"", 60, lambda: 0)
    forged = tokens.issue(ResumeClaims(RequestId("r"), "", 0, 0, b"", stream))
    with pytest.raises(RequestRejected):
        tokens.read(forged, "")


@pytest.mark.parametrize("name", [0, 1.5, None, {}, []])
@pytest.mark.parametrize("field", ["request_id", "fingerprint"])
def test_token_with_a_name_of_another_type_is_refused(monkeypatch, field, name):
    """Sign a token with a field of another type, as anybody can if the router has no secret."""
    tokens = ResumeTokens(b"", 60, lambda: 0)
    monkeypatch.setattr("fleet.frontend.resume_tokens._packed", lambda packed: packed)
    claims = ResumeClaims(RequestId("r"), "", 0, 0, b"", 1, "f")
    with pytest.raises(RequestRejected):
        tokens.read(tokens.issue(structs.replace(claims, **{field: name})), "")


async def test_late_token_comes_with_the_first_tokens_alone(open_generation):
    router = FakeRouter(range(100, 120))
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True, late_token=True)
    admitted, first, *rest = await events_of(open_generation(router), request)

    assert admitted.resume_token == ""
    assert first.token_ids
    assert first.resume_token
    assert [each.resume_token for each in rest if isinstance(each, Delta)] == [""] * 19


async def test_answer_that_ends_after_a_lost_worker_keeps_its_token(open_generation):
    """Let the attempt on another worker end without tokens, so that the earlier resume token, which names the weights, stays valid."""

    class EndingStream(FakeStream):
        async def __anext__(self):
            event = await super().__anext__()
            if isinstance(event, AnswerKeyChanged):
                self._answer = self._answer[: self._sent]
            return event

    router = FakeRouter(range(100, 120))
    router.submit = lambda arrived: EndingStream(router, arrived)
    router.retry_after = 3
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True, late_token=True)
    events = await events_of(open_generation(router), request)

    assert received(events)[1] == (100, 101, 102)
    assert [each.token_ids for each in events if isinstance(each, Delta) and each.resume_token] == [(100,)]


@pytest.mark.parametrize("retry_after", range(1, 20))
async def test_last_ids_of_a_parsed_answer_name_its_own_tokens(open_generation, tmp_path, retry_after):
    """End the answer by a stop string, for some cases in the first step of another worker, whose delta joins the rest of the text."""
    folder = write_model(tmp_path)
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    codec = load_codec(folder)
    router = FakeRouter(token_ids(codec.encode("Sun and more STOP, STOPPED"))[1:])
    router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
    router.retry_after = retry_after
    tools = '[{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]'
    prompt = ChatPrompt((ChatMessage(role="user", content="x"),), tools=tools)
    request = a_request(
        prompt=prompt, sampling=GREEDY, stop=("STOP",), resumable=True, is_kept=True, parsing=AnswerParsing()
    )

    events = await events_of(open_generation(router, codec), request)
    _, tokens, token = received(events)

    assert events[-1].stop_string == "STOP"
    stream = ResumeTokens(b"secret", 60, lambda: 1000).read(token, "").stream
    assert tuple(router.kept[stream][: len(tokens)]) == tokens


async def test_parsed_answer_of_a_client_without_tokens_is_not_resumed(open_generation):
    """Resume a parsed answer without its tokens: the router cannot know which part of the text the client has, and refuses."""
    router = FakeRouter(range(100, 110))
    router.cards = (a_model_card(parsers=AnswerParsers(reasoning="qwen3", in_engine=True)),)
    router.parsed = [ParsedDelta(text=letter) for letter in "abcdefghij"]
    request = a_request(
        sampling=structs.replace(GREEDY, max_tokens=10),
        resumable=True,
        is_kept=True,
        late_token=True,
        parsing=AnswerParsing(),
    )
    seen = (await events_of(open_generation(router), request))[:4]
    assert received(seen)[0] == "abc"
    resume = Resume(token=received(seen)[2], position=3)

    refused = await refusal_of(open_generation(router), structs.replace(request, resume=resume))

    assert refused.reason is Reason.WORKER_LOST
    from_the_beginning = structs.replace(request, resume=structs.replace(resume, position=0))
    assert received(await events_of(open_generation(router), from_the_beginning))[0] == "abcdefghij"


async def test_answer_that_has_ended_can_be_resumed_again(open_generation):
    router = FakeRouter(range(100, 120))
    request = a_request(sampling=Sampling(max_tokens=20), resumable=True, is_kept=True)
    _, rest = await resumed_after(open_generation, router, request, 21)
    assert [type(event) for event in rest] == [Admitted, Finished]

    resume = Resume(token=received(rest)[2], position=20)
    again = await events_of(open_generation(router), structs.replace(request, resume=resume))

    assert again[-1].finish is rest[-1].finish
    assert len(router.submitted) == 1


async def test_access_log_names_resumed_request_and_its_tenant(open_generation, codec, caplog):
    """Resume with an API key and no tenant: the access log names the key's tenant, as for any request."""
    answer = token_ids(codec.encode(TEXT))[1:]
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme")
    seen = (await events_of(open_generation(FakeRouter(answer)), request))[:5]
    keys = {"acme": TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),))}
    threads = TokenizerThreads()
    router = FakeRouter(answer)
    second = Generation(
        router,
        {MODEL: codec},
        clock=SystemClock(),
        tenants=Tenants(keys, SystemClock().now()),
        tenant_secret=b"",
        metrics=RouterProcessMetrics(CollectorRegistry()),
        threads=threads,
        resume_tokens=ResumeTokens(b"secret", 60, lambda: 1000),
        access=AccessLog(router, SystemClock(), lambda: 0, logs=True),
    )
    caplog.set_level("INFO", "fleet.access")

    resumed = structs.replace(request, tenant="", resume=resumption(seen))
    await events_of(second, resumed, authorization="Bearer key")
    threads.close()

    (record,) = [each for each in caplog.records if each.name == "fleet.access"]
    assert (record.request, record.tenant) == (f"{request.id}.r1", "acme")


async def refusal_of(generation, request):
    with pytest.raises(RequestRejected) as refused:
        await events_of(generation, request)
    return refused.value


async def test_token_for_another_prompt_or_tenant_is_refused(open_generation, codec):
    generation = open_generation(FakeRouter(token_ids(codec.encode(TEXT))[1:]))
    request = a_request(sampling=GREEDY, resumable=True, tenant="acme")
    request = structs.replace(request, resume=resumption((await events_of(generation, request))[:5]))

    for wrong in ({"prompt": TextPrompt("another prompt")}, {"tenant": "other"}):
        refused = await refusal_of(generation, structs.replace(request, **wrong))
        assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, "resume.token"), wrong


@pytest.mark.parametrize("image", [b"a", b"b"])
async def test_answer_is_resumed_only_with_the_same_image(image, open_generation, tmp_path):
    seeing = load_codec(write_seeing_model(tmp_path))
    answer = token_ids(seeing.encode("the quick brown fox jumps"))[1:]
    chat = ChatPrompt((ChatMessage(role="user", content="see", parts=("see", None)),))
    request = a_request(prompt=chat, images=(b"a",), sampling=GREEDY, resumable=True)
    router = FakeRouter(answer, cards=[a_model_card(takes_images=True)])
    seen = (await events_of(open_generation(router, seeing), request))[:3]
    resumed = structs.replace(request, images=(image,), resume=resumption(seen))

    second = open_generation(router, seeing)
    if image == b"a":
        assert isinstance((await events_of(second, resumed))[-1], Finished)
        first, again = router.submitted
        assert again.keys == first.keys
    else:
        refused = await refusal_of(second, resumed)
        assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, "resume.token")


async def test_missing_tokens_of_random_answers_are_refused(open_generation, codec):
    generation = open_generation(FakeRouter(token_ids(codec.encode(TEXT))[1:]))
    request = a_request(sampling=Sampling(max_tokens=100), resumable=True)
    seen = (await events_of(generation, request))[:5]

    refused = await refusal_of(generation, structs.replace(request, resume=resumption(seen, known=2)))

    assert refused.reason is Reason.WORKER_LOST
    assert "only 2 are known here" in refused.message


async def test_missing_tokens_under_a_models_default_are_refused(open_generation, tmp_path):
    """The router that began the answer may have had another default than temperature 0."""
    folder = write_model(tmp_path)
    write_json(folder / "generation_config.json", {"eos_token_id": EOS, "temperature": 0.0})
    codec = load_codec(folder, model_defaults=True)
    generation = open_generation(FakeRouter(token_ids(codec.encode("a text of tokens"))[1:]), codec=codec)
    request = a_request(sampling=Sampling(max_tokens=100), unset=frozenset({"temperature"}), resumable=True)
    seen = (await events_of(generation, request))[:5]

    refused = await refusal_of(generation, structs.replace(request, resume=resumption(seen, known=2)))

    assert refused.reason is Reason.WORKER_LOST


@pytest.mark.parametrize("tokens", [(7,) * 101, (1 << 31,)])
async def test_impossible_tokens_of_an_answer_are_refused(open_generation, codec, tokens):
    generation = open_generation(FakeRouter(token_ids(codec.encode(TEXT))[1:]))
    request = a_request(sampling=GREEDY, resumable=True)
    resume = structs.replace(resumption((await events_of(generation, request))[:5]), token_ids=tokens)

    refused = await refusal_of(generation, structs.replace(request, resume=resume))

    assert refused.field == "resume.token_ids"


async def test_event_ids_are_refused_by_a_router_without_tokens(codec):
    """Ask for event ids at a router that issues no resume tokens: with ids, the stream would look as if it could be resumed."""
    router, threads = FakeRouter(token_ids(codec.encode(TEXT))[1:]), TokenizerThreads()
    generation = Generation(
        router,
        {MODEL: codec},
        clock=SystemClock(),
        tenants=Tenants({}, 0),
        tenant_secret=b"",
        metrics=RouterProcessMetrics(CollectorRegistry()),
        threads=threads,
    )
    request = a_request(sampling=GREEDY, resumable=True)

    refused = await refusal_of(generation, structs.replace(request, is_kept=True))
    by_library = await events_of(generation, request)
    threads.close()

    assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, "resumable")
    assert "prompt_secret" in refused.message
    assert received(by_library)[::2] == (TEXT, "")
    assert len(router.submitted) == 1


async def test_ordinary_stream_has_no_resume_tokens(open_generation, codec):
    generation = open_generation(FakeRouter(token_ids(codec.encode(TEXT))[1:]))
    assert received(await events_of(generation, a_request(sampling=GREEDY)))[2] == ""


def test_engine_parsed_answer_goes_on_after_what_the_client_has():
    answer = EngineParsedAnswer("r")
    answer.resume(5, "Hello wo", "thought", [CallDelta(index=0, id="a", name="f", arguments='{"x"')])
    parsed = ParsedDelta(
        text="Hello world",
        reasoning="thought",
        calls=(CallDelta(index=0, id="a", name="f", arguments='{"x": 1}'),),
        from_start=True,
    )

    delta = answer.take(Progress(request_id="r", token_ids=(9,), parsed=parsed))

    assert (delta.text, delta.reasoning) == ("rld", "")
    assert delta.calls == (CallDelta(index=0, arguments=": 1}"),)
    assert answer.num_tokens == 6
    assert answer.has_calls is True


def replayed(codec, text: str) -> Delta | None:
    """Replay an answer with these known tokens, without events for them; return the known part as one delta."""
    templates, parsers = ResponseTemplates(), AnswerParsers(tool_calls="hermes", reasoning="qwen3")
    templates.load()
    decoded = AnswerText(codec.decoder(b"", special=True), end_token_ids=frozenset({EOS}))
    template = templates.compiled("both", None, parsers)
    known = tuple(token_ids(codec.encode(text))[1:])
    resume = Resume(token="", token_ids=known, position=len(known), from_start=True)
    claims = ResumeClaims("r", "", 0, 0, b"", 0)
    resumed = ResumedAnswer(resume=resume, claims=claims, is_free=True)
    resumed.replay(TemplateParsedAnswer("r", decoded, template, prompt="", tools=[]))
    return resumed.known


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def test_known_reasoning_text_and_calls_are_one_part(codec):
    known = replayed(codec, f"<think>why</think>Wait. {CALL}\n{CALL}")

    assert (known.reasoning, known.text) == ("why", "Wait. ")
    assert [call.index for call in known.calls] == [0, 1]


@pytest.mark.parametrize("text", [f"{CALL} then", f"Wait. {CALL}then {CALL}", f"{CALL}<think>why</think>"])
def test_known_text_after_a_call_is_refused(codec, text):
    """Replay text after a tool call: one delta cannot say that the text comes after the call, so the resumption is refused."""
    with pytest.raises(RequestRejected) as refused:
        replayed(codec, text)

    assert refused.value.reason is Reason.WORKER_LOST
    assert "after a tool call" in refused.value.message
