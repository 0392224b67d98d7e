import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName
from fleet.core.requests import (
    TOKEN_BYTES,
    Admitted,
    AnswerParsers,
    AnswerParsing,
    CallDelta,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Logprobs,
    Pooling,
    PoolingModel,
    PoolingTask,
    Sampling,
    TextPrompt,
    TokenBytes,
    TokenPrompt,
    ToolCallForm,
    ToolChoice,
)
from fleet.core.roles import Placement
from fleet.core.telemetry import RouterProcessMetrics
from fleet.core.work import ParsedDelta, ParsingTask
from fleet.frontend.access_log import AccessLog
from fleet.frontend.generation import INLINE_CHARACTERS, REGISTRATION_SECONDS, Generation
from fleet.frontend.text import image_keys
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import MAX_TASKS, TokenizerThreads
from fleet.router.ports import TextCodec
from fleet.router.tenants import Tenants, TenantSettings
from kvstore.block import tenant_salt
from tests.support.builders import BLOCK_TOKENS, MODEL, a_prompt, a_request, token_ids
from tests.support.counted_calls import count_calls
from tests.support.frontend.text_model import END, EOS, write_model, write_seeing_model
from tests.support.router.fake_router import FakeRouter, a_model_card
from tests.support.waiting import turns

SECRET = b"secret"


class Stopped:
    """A clock whose time changes only when the test sets it."""

    def __init__(self) -> None:
        self.instant = Nanos(10 * SECOND)

    def now(self) -> Nanos:
        return self.instant


@pytest.fixture(scope="session")
def codec(model_dir):
    return load_codec(model_dir)


@pytest.fixture
def generations(codec):
    """Return a factory of generations that share their threads."""
    threads = TokenizerThreads()

    def make(
        router: FakeRouter,
        codecs: Mapping[ModelName, TextCodec] | None = None,
        counted: Tenants | None = None,
        logs_access: bool = False,
        clock: Stopped | None = None,
        **tenants: TenantSettings,
    ) -> Generation:
        metrics = RouterProcessMetrics(CollectorRegistry())
        return Generation(
            router,
            {MODEL: codec} if codecs is None else codecs,
            clock=clock or Stopped(),
            tenants=counted or Tenants(tenants, Stopped().now()),
            tenant_secret=SECRET,
            metrics=metrics,
            threads=threads,
            access=AccessLog(router, Stopped(), lambda: 0, logs=True) if logs_access else None,
        )

    yield make
    threads.close()


def ids_of(codec: TextCodec, text: str) -> list[int]:
    return token_ids(codec.encode(text))[1:]  # without the start token of a prompt


async def collect(events: AsyncIterator[GenerateEvent]) -> tuple[str, list[int], Finished]:
    text, tokens, finished = "", [], None
    async for event in events:
        match event:
            case Admitted():
                pass
            case Delta():
                text += event.text
                tokens += event.token_ids
            case Finished():
                text += event.text
                finished = event
    assert finished is not None
    return text, tokens, finished


def outcomes(generation: Generation) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in generation.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "fleet_requests_total" and sample.value
    }


async def test_answer_has_text_usage_and_kv_report(generations, codec):
    answer = ids_of(codec, "the quick brown fox")
    generation = generations(FakeRouter([*answer, EOS], step=2))

    events = [event async for event in generation.generate(a_request(sampling=Sampling(max_tokens=100)))]

    assert isinstance(events[0], Admitted)
    text, tokens, finished = await collect(_again(events))
    assert (text, tokens) == ("the quick brown fox", [*answer, EOS])
    assert finished.finish is Finish.STOP
    assert finished.usage.prompt_tokens == events[0].prompt_tokens == len(codec.encode("once upon a time")) // 4
    assert finished.usage.completion_tokens == len(answer) + 1
    assert [phase.worker_id for phase in finished.kv] == ["w1"]
    assert outcomes(generation) == {"stop": 1}


async def _again(events: list[GenerateEvent]) -> AsyncIterator[GenerateEvent]:
    for event in events:
        yield event


async def test_engine_gets_the_stop_token_ids(generations):
    router = FakeRouter([5])
    generation = generations(router)

    await collect(generation.generate(a_request(sampling=Sampling(stop_token_ids=(7, EOS)))))
    await collect(generation.generate(a_request(sampling=Sampling(stop_token_ids=(7,), ignore_eos=True))))

    assert [arrived.sampling.stop_token_ids for arrived in router.submitted] == [(7, EOS, END), (7,)]


async def test_stop_string_cancels_engine_and_ends_the_count(generations, codec):
    router = FakeRouter(ids_of(codec, "the quick brown fox jumps over the lazy dog"))
    generation = generations(router)

    text, tokens, finished = await collect(
        generation.generate(a_request(stop=("n fox j", "lazy"), sampling=Sampling(max_tokens=100)))
    )

    assert (text, finished.finish) == ("the quick brow", Finish.STOP)
    assert finished.usage.completion_tokens == len(tokens) == router.steps_taken < len(router.answer)
    assert router.cancelled == ["r1"]
    assert outcomes(generation) == {"stop": 1}


async def test_answer_ended_by_stop_string_has_a_kv_report(generations, codec):
    router = FakeRouter(ids_of(codec, "the quick brown fox jumps over the lazy dog"))
    router.cached_blocks = 2
    request = a_request(prompt=TokenPrompt(a_prompt(100)), stop=("fox",), sampling=Sampling(max_tokens=100))

    _, _, finished = await collect(generations(router).generate(request))

    assert router.cancelled == ["r1"]
    (phase,) = finished.kv
    assert (phase.worker_id, phase.report.prompt_blocks) == ("w1", 4)
    assert finished.usage.cached_tokens == phase.report.cached_tokens == 2 * BLOCK_TOKENS


async def test_engine_stops_before_a_slow_client_reads_last_text(generations, codec):
    router = FakeRouter(ids_of(codec, "the quick brown fox"))
    stop = codec.token_text(router.answer[0])

    async with aclosing(generations(router).generate(a_request(stop=(stop,)))) as events:
        assert isinstance(await anext(events), Admitted)
        assert isinstance(await anext(events), Delta)
        assert router.cancelled == ["r1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    answer=st.lists(st.integers(3, 500), max_size=24),
    stop=st.lists(st.sampled_from(["e", "t", "the", "ö", " ", "qu", "\ufffd"]), min_size=1, max_size=3, unique=True),
    step=st.integers(1, 6),
)
async def test_streamed_text_equals_text_up_to_first_stop_string(answer, stop, step, generations, codec):
    whole, _, _ = await collect(
        generations(FakeRouter(answer, step=step)).generate(a_request(sampling=Sampling(max_tokens=99)))
    )
    cut = (
        min((whole.find(one) + len(one), whole.find(one)) for one in [*stop, whole + "x"] if one in whole)
        if any(one in whole for one in stop)
        else None
    )

    text, _, finished = await collect(
        generations(FakeRouter(answer, step=step)).generate(
            a_request(stop=tuple(stop), sampling=Sampling(max_tokens=99))
        )
    )

    assert text == (whole if cut is None else whole[: cut[1]])
    assert finished.finish is (Finish.LENGTH if cut is None else Finish.STOP)


async def test_closing_the_iterator_cancels_the_request(generations, codec):
    router = FakeRouter(ids_of(codec, "the quick brown fox"))
    generation = generations(router)

    async with aclosing(generation.generate(a_request())) as events:
        await anext(events)
        await anext(events)
        assert generation.running == 1

    assert router.cancelled == ["r1"]
    assert generation.running == 0
    assert outcomes(generation) == {"cancelled": 1}


async def test_cancelling_the_task_cancels_the_request(generations):
    router = FakeRouter([5], step=1)
    router.hold_after = 0
    generation = generations(router)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(collect(generation.generate(a_request())))
        await router.until(router.submitted)

        task.cancel()

    assert router.cancelled == ["r1"]
    assert outcomes(generation) == {"cancelled": 1}


async def test_incomplete_request_is_rejected_with_the_routers_reason(generations):
    router = FakeRouter([5, 6, 7])
    router.break_after = 2
    generation = generations(router)

    with pytest.raises(RequestRejected) as refused:
        await collect(generation.generate(a_request()))

    assert (refused.value.reason, refused.value.retry_after_ms) == (Reason.WORKER_LOST, 1500)
    assert outcomes(generation) == {"worker_lost": 1}


@pytest.mark.parametrize("after", [1, 3, 5])
async def test_restarted_answer_has_no_void_tokens(generations, codec, after):
    router = FakeRouter(ids_of(codec, "the quick brown fox jumps over"))
    expected = [event async for event in generations(router).generate(a_request(whole=True))]
    router.start_over_after = after

    events = [event async for event in generations(router).generate(a_request(whole=True))]

    assert events == expected
    assert [type(event) for event in events] == [Admitted, Delta, Finished]
    assert router.submitted[-1].whole


async def test_whole_answer_equals_its_stream(generations, codec):
    router = FakeRouter(ids_of(codec, "the quick brown fox jumps over"))
    request = a_request(stop=("fox",))
    pieces = [event async for event in generations(router).generate(request)]
    whole = [event async for event in generations(router).generate(structs.replace(request, whole=True))]

    deltas = [event for event in pieces if isinstance(event, Delta)]
    (delta,) = [event for event in whole if isinstance(event, Delta)]
    assert len(deltas) > 1
    assert delta.text == "".join(each.text for each in deltas)
    assert delta.token_ids == tuple(token for each in deltas for token in each.token_ids)
    assert whole[-1] == pieces[-1]


async def test_unexpected_error_counts_as_internal_and_is_raised(generations):
    router = FakeRouter([5])
    router.bug = ZeroDivisionError("bug")
    generation = generations(router)

    with pytest.raises(ZeroDivisionError):
        await collect(generation.generate(a_request()))

    assert outcomes(generation) == {"internal": 1}
    assert generation.running == 0


@pytest.mark.parametrize(
    ("cards", "model", "reason", "said"),
    [
        ((a_model_card(),), "other", Reason.MODEL_NOT_FOUND, "'other' is not served here; served: tiny"),
        ((), MODEL, Reason.NO_WORKER, "no worker serves 'tiny' now"),
        (
            (),
            "tuned",
            Reason.NO_WORKER,
            "'tuned' is not known: this router has just started; it may be a LoRA adapter of tiny",
        ),
        ((), "", Reason.NO_WORKER, "no worker serves any model yet"),
        ((a_model_card(), a_model_card(name="big")), "", Reason.INVALID_ARGUMENT, "must be one of big, tiny"),
        ((a_model_card(), a_model_card(name="big")), "big", Reason.MODEL_NOT_FOUND, "served: tiny"),
    ],
)
async def test_unknown_model_is_rejected_with_the_served_models(generations, cards, model, reason, said):
    router = FakeRouter([5], cards=cards)

    with pytest.raises(RequestRejected) as refused:
        await collect(generations(router).generate(a_request(model=model)))

    assert refused.value.reason is reason
    assert said in refused.value.message
    assert router.submitted == []
    assert (refused.value.retry_after_ms > 0) == (reason is Reason.NO_WORKER)


async def test_unknown_model_is_wrong_after_the_time_of_registration(generations):
    """Until then it may be an adapter of a model whose workers still come. Afterwards it is a mistake, though some model has no worker."""
    clock = Stopped()
    generation = generations(FakeRouter([5], cards=()), clock=clock)
    clock.instant = Nanos(clock.instant + REGISTRATION_SECONDS * SECOND)

    with pytest.raises(RequestRejected) as refused:
        await collect(generation.generate(a_request(model="tuned")))

    assert refused.value.reason is Reason.MODEL_NOT_FOUND


async def test_single_model_needs_no_name(generations):
    events = [event async for event in generations(FakeRouter([5])).generate(a_request(model=""))]

    assert isinstance(events[0], Admitted)
    assert events[0].model == MODEL


async def test_access_log_names_the_model_that_served(generations, caplog):
    caplog.set_level("INFO", logger="fleet.access")

    await collect(generations(FakeRouter([5]), logs_access=True).generate(a_request(model="")))

    assert [record.model for record in caplog.records] == [MODEL]


@pytest.mark.parametrize(
    "request_",
    [
        a_request(prompt=TextPrompt("")),
        a_request(prompt=TokenPrompt(a_prompt(5000))),
        a_request(sampling=Sampling(temperature=-1)),
        a_request(sampling=Sampling(max_tokens=4096)),
        a_request(prompt=ChatPrompt((ChatMessage(role="wizard", content="x"),))),
        a_request(deadline=Nanos(10 * SECOND)),
    ],
)
async def test_invalid_request_is_never_submitted(generations, request_: GenerateRequest):
    router = FakeRouter([5])

    with pytest.raises(RequestRejected):
        await collect(generations(router).generate(request_))

    assert router.submitted == []


async def test_passed_deadline_has_its_own_reason(generations):
    with pytest.raises(RequestRejected) as refused:
        await collect(generations(FakeRouter([5])).generate(a_request(deadline=Nanos(1))))

    assert (refused.value.reason, refused.value.field) == (Reason.DEADLINE_PASSED, "timeout_ms")


async def test_fill_context_uses_the_rest_of_the_context(generations):
    router = FakeRouter([5], cards=[a_model_card(max_model_len=100)])

    await collect(generations(router).generate(a_request(prompt=TokenPrompt(a_prompt(30)), fill_context=True)))

    assert router.submitted[0].sampling.max_tokens == 70


async def test_each_tenant_has_its_own_salt(generations):
    router = FakeRouter([5])
    generation = generations(router)

    for tenant in ("", "a", "b"):
        await collect(generation.generate(a_request(tenant=tenant)))

    assert [arrived.salt for arrived in router.submitted] == [b"", tenant_salt(SECRET, "a"), tenant_salt(SECRET, "b")]


async def test_cache_salt_separates_blocks_within_a_tenant(generations):
    router = FakeRouter([5])
    generation = generations(router)

    for tenant, cache_salt in (("", ""), ("", "a"), ("", "b"), ("t", "a"), ("t", "a")):
        await collect(generation.generate(a_request(tenant=tenant, cache_salt=cache_salt)))

    salts = [arrived.salt for arrived in router.submitted]
    assert [len(salt) for salt in salts] == [0, 32, 32, 32, 32]
    assert len(set(salts)) == 4
    assert salts[3] == salts[4]


async def test_fields_that_engines_may_lack_are_named_to_the_router(generations, codec):
    router = FakeRouter([5])
    generation = generations(router)
    sampling = Sampling(logit_bias=((3, 1.0),), prompt_logprobs=2)

    await collect(generation.generate(a_request(sampling=sampling, bad_words=("fox", "the quick"))))
    await collect(generation.generate(a_request()))

    asked, plain = router.submitted
    assert asked.needs == ("logit_bias", "bad_tokens", "prompt_logprobs")
    assert (asked.placement, plain.placement, plain.needs) == (Placement.AGGREGATED, Placement.AUTO, ())
    assert asked.sampling.bad_tokens == tuple(
        tuple(ids_of(codec, text)) for text in ("fox", " fox", "the quick", " the quick")
    )


async def test_max_tokens_zero_computes_the_prompt_alone(generations):
    router = FakeRouter([EOS])
    router.prompt_logprobs = [Logprobs(-1.0), Logprobs(-2.0)]
    generation = generations(router)
    request = a_request(prompt=TokenPrompt(a_prompt(3)), sampling=Sampling(max_tokens=0, prompt_logprobs=0))

    events = [event async for event in generation.generate(request)]

    assert router.submitted[0].sampling.max_tokens == 1
    assert events[1] == Delta(text="", token_ids=(), prompt_logprobs=(Logprobs(-1.0), Logprobs(-2.0)))
    assert isinstance(events[-1], Finished)
    assert (events[-1].finish, events[-1].usage.completion_tokens) == (Finish.LENGTH, 0)


@pytest.mark.parametrize("whole", [False, True])
async def test_prompt_logprobs_come_with_the_first_delta(generations, whole):
    router = FakeRouter([5, 6, 7])
    router.prompt_logprobs = [Logprobs(-1.0)]
    request = a_request(whole=whole, sampling=Sampling(prompt_logprobs=0))

    deltas = [event async for event in generations(router).generate(request) if isinstance(event, Delta)]

    assert [each.prompt_logprobs for each in deltas] == [(Logprobs(-1.0),)] + [()] * (len(deltas) - 1)


async def test_stop_string_and_special_tokens_are_shown_on_demand(generations, codec):
    answer = [*ids_of(codec, "the quick"), END, *ids_of(codec, " fox jumps")]
    router = FakeRouter(answer)
    request = a_request(stop=("fox",), sampling=Sampling(max_tokens=100, ignore_eos=True))

    hidden, _, _ = await collect(generations(router).generate(request))
    shown, _, _ = await collect(
        generations(router).generate(structs.replace(request, include_stop_string=True, show_special_tokens=True))
    )

    assert (hidden, shown) == ("the quick ", "the quick<|end|> fox")


async def test_prompt_is_truncated_to_its_last_tokens(generations):
    router = FakeRouter([5], cards=[a_model_card(max_model_len=100)])
    generation = generations(router)
    prompt = a_prompt(120)

    for kept, max_tokens in ((7, 16), (-1, 16), (-1, 0)):
        request = a_request(prompt=TokenPrompt(prompt), truncate_prompt=kept, sampling=Sampling(max_tokens=max_tokens))
        await collect(generation.generate(request))
    with pytest.raises(RequestRejected) as refused:
        await collect(generation.generate(a_request(prompt=TokenPrompt(prompt), truncate_prompt=0)))

    assert [arrived.tokens for arrived in router.submitted] == [prompt[-28:], prompt[-336:], prompt[-396:]]
    assert refused.value.field == "truncate_prompt"


async def test_prompt_of_a_vector_is_truncated_to_the_whole_context(generations):
    router = FakeRouter([5], cards=[a_model_card(max_model_len=100, pooling=PoolingModel(task=PoolingTask.EMBED))])
    request = a_request(
        prompt=TokenPrompt(prompt := a_prompt(120)), truncate_prompt=-1, pooling=Pooling(task=PoolingTask.EMBED)
    )

    await collect(generations(router).generate(request))

    assert [arrived.tokens for arrived in router.submitted] == [prompt[-400:]]


@pytest.mark.parametrize("ending", ["finished", "cancelled", "lost", "refused"])
async def test_metrics_and_tenant_count_the_same_tokens(generations, codec, ending):
    router = FakeRouter(ids_of(codec, "the quick brown fox jumps"))
    router.break_after = 3 if ending == "lost" else None
    router.refuse = RequestRejected(Reason.QUEUE_FULL, "full") if ending == "refused" else None
    tenants = Tenants({"t": TenantSettings()}, Stopped().now())
    generation = generations(router, counted=tenants)

    async with aclosing(generation.generate(a_request(tenant="t", sampling=Sampling(max_tokens=5)))) as events:
        with suppress(RequestRejected):
            deltas = 0
            async for event in events:
                deltas += isinstance(event, Delta)
                if ending == "cancelled" and deltas == 3:
                    break

    usage = tenants.usage()["t"]
    counted = {
        name: generation.metrics.registry.get_sample_value(name, {"model": MODEL})
        for name in ("fleet_prompt_tokens_total", "fleet_completion_tokens_total")
    }
    assert tuple(counted.values()) == (usage.prompt_tokens, usage.answer_tokens)
    assert usage.answer_tokens == {"finished": 5, "cancelled": 3, "lost": 3, "refused": 0}[ending]
    streamed = 0.0 if ending == "refused" else 1.0
    for name in ("fleet_request_seconds_count", "fleet_tpot_seconds_count", "fleet_ttft_seconds_count"):
        assert generation.metrics.registry.get_sample_value(name, {"model": MODEL}) == streamed, name


async def test_siblings_do_not_count_the_prompt_again(generations):
    tenants = Tenants({"t": TenantSettings()}, Stopped().now())
    generation = generations(FakeRouter([5]), counted=tenants)

    await collect(generation.generate(a_request(tenant="t")))
    _, _, sibling = await collect(generation.generate(a_request(tenant="t", sibling=True)))

    usage = tenants.usage()["t"]
    assert sibling.usage.prompt_tokens == sibling.usage.cached_tokens == 0
    assert (
        usage.prompt_tokens
        == generation.metrics.registry.get_sample_value("fleet_prompt_tokens_total", {"model": MODEL})
        > 0
    )


async def test_two_running_requests_cannot_share_an_id(generations):
    router = FakeRouter([5])
    router.hold_after = 0
    generation = generations(router)
    async with aclosing(generation.generate(a_request())) as events:
        await anext(events)

        with pytest.raises(RequestRejected) as refused:
            await collect(generation.generate(a_request()))

    assert refused.value.field == "request_id"
    router.release.set()
    await collect(generation.generate(a_request()))  # the id can be used again


class Slow:
    """A codec that tokenizes until a test lets it end."""

    def __init__(self, codec: TextCodec, threads_may_go: "asyncio.Event") -> None:
        self._codec = codec
        self._may_go = threads_may_go

    def __getattr__(self, name: str) -> object:
        return getattr(self._codec, name)

    def encode(self, text: str, special: bool = True) -> bytes:
        while not self._may_go.is_set():
            pass
        return self._codec.encode("x")


async def test_long_prompts_tokenize_in_threads_in_bounded_number(generations, codec):
    may_go = asyncio.Event()
    router = FakeRouter([5])
    generation = generations(router, {MODEL: Slow(codec, may_go)})
    text = "x" * (INLINE_CHARACTERS + 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(MAX_TASKS):
                tasks.create_task(collect(generation.generate(a_request(id=f"r{number}", prompt=TextPrompt(text)))))
            await turns()  # the event loop is not blocked
            with pytest.raises(RequestRejected) as refused:
                await collect(generation.generate(a_request(id="one-more", prompt=TextPrompt(text))))
            may_go.set()
    finally:
        may_go.set()

    assert refused.value.reason is Reason.QUEUE_FULL
    assert len(router.completed) == MAX_TASKS


class RenderingThread:
    """A codec that notes in which thread it renders a chat."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._codec, name)

    def render(self, *_: object) -> bytes:
        self.thread = threading.current_thread()
        return self._codec.encode("x")


EMPTY = ChatMessage(role="user", content="")


@pytest.mark.parametrize(
    ("messages", "inline"),
    [
        ((EMPTY,), True),
        ((structs.replace(EMPTY, parts=("",) * INLINE_CHARACTERS),), False),
        ((EMPTY,) * (INLINE_CHARACTERS + 1), False),
    ],
    ids=["short", "many parts", "many messages"],
)
async def test_chat_of_many_empty_pieces_is_rendered_in_a_thread(generations, codec, messages, inline):
    rendering = RenderingThread(codec)
    generation = generations(FakeRouter([5]), {MODEL: rendering})

    await collect(generation.generate(a_request(prompt=ChatPrompt(messages))))

    assert (rendering.thread is threading.current_thread()) is inline


class PairThreads(RenderingThread):
    """A codec that notes in which thread it tokenizes pairs."""

    def encode_pair(self, first: str, second: str) -> tuple[TokenBytes, int]:
        self.thread = threading.current_thread()
        return self._codec.encode(first + second), len(first)


@pytest.mark.parametrize(("count", "inline"), [(2, True), (2048, False)])
async def test_many_short_pairs_are_tokenized_in_a_thread(generations, codec, count, inline):
    pairs = PairThreads(codec)

    found = await generations(FakeRouter([5]), {MODEL: pairs}).pair_tokens(
        MODEL, [("what", f"{n}") for n in range(count)]
    )

    assert (pairs.thread is threading.current_thread()) is inline
    assert found == [(codec.encode(f"what{n}"), 4) for n in range(count)]


async def test_api_key_selects_tenant_and_salt(generations):
    router = FakeRouter(answer=[7])
    generation = generations(router, acme=TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),)))

    await collect(generation.generate(a_request(sampling=Sampling(max_tokens=1)), "Bearer key"))
    with pytest.raises(RequestRejected) as caught:
        await collect(generation.generate(a_request(), "Bearer other"))

    (arrived,) = router.submitted
    assert (arrived.tenant, arrived.salt) == ("acme", tenant_salt(SECRET, "acme"))
    assert caught.value.reason is Reason.UNAUTHENTICATED


async def test_tenant_is_charged_and_rejected_beyond_its_limit(generations):
    router = FakeRouter(answer=[7, 8, 9, 10])
    generation = generations(router, acme=TenantSettings(tokens_per_minute=13))
    asked = a_request(prompt=TokenPrompt(a_prompt(10)), tenant="acme", sampling=Sampling(max_tokens=3))

    events = [event async for event in generation.generate(asked)]
    with pytest.raises(RequestRejected) as caught:
        await collect(generation.generate(asked))

    assert isinstance(events[0], Admitted)
    assert events[0].allowance.tokens.remaining == 3
    assert caught.value.reason is Reason.RATE_LIMITED
    assert len(router.submitted) == 1


TOOLS = '[{"type":"function","function":{"name":"add","parameters":{}}}]'
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
HERMES = AnswerParsers(tool_calls="hermes")
IN_ENGINE = AnswerParsers(tool_calls="hermes", reasoning="qwen3", in_engine=True)
PARTS = (
    ParsedDelta(reasoning="hm", from_start=True),
    ParsedDelta(text="so", calls=(CallDelta(index=0, id="c0", name="add", arguments="{"),)),
    ParsedDelta(calls=(CallDelta(index=0, arguments="}"), CallDelta(index=1, name="add", arguments="{}"))),
)


@pytest.fixture
def tool_codec(tmp_path):
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    return load_codec(folder)


def a_tool_request(**fields: object) -> GenerateRequest:
    prompt = ChatPrompt((ChatMessage(role="user", content="x"),), tools=fields.pop("tools", TOOLS))
    return a_request(**{"prompt": prompt, "parsing": AnswerParsing(), "sampling": Sampling(max_tokens=99), **fields})


async def events_of(generation: Generation, request: GenerateRequest) -> tuple[list[Delta], Finished]:
    events = [event async for event in generation.generate(request)]
    return [event for event in events if isinstance(event, Delta)], events[-1]


@pytest.mark.parametrize("whole", [False, True])
async def test_parts_from_the_worker_become_deltas(whole, generations, tool_codec):
    router = FakeRouter([5, 6, END], cards=[a_model_card(parsers=IN_ENGINE)])
    router.parsed = PARTS

    deltas, finished = await events_of(
        generations(router, {MODEL: tool_codec}), a_tool_request(whole=whole, stop=("z",))
    )

    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "so"
    calls = [(call.index, call.id, call.arguments) for delta in deltas for call in delta.calls]
    assert calls == [*([(0, "c0", "{}")] if whole else [(0, "c0", "{"), (0, "", "}")]), (1, "call_r1_1", "{}")]
    assert (finished.finish, finished.usage.completion_tokens) == (Finish.TOOL_CALLS, 3)
    assert len(deltas) == 1 or not whole
    (arrived,) = router.submitted
    assert arrived.parsing == ParsingTask(tools=TOOLS, stop=("z",))
    assert arrived.sampling.form is None


async def test_stop_string_that_the_worker_found_ends_the_request(generations, tool_codec):
    router = FakeRouter([5, 6, 7, 8], cards=[a_model_card(parsers=IN_ENGINE)])
    router.parsed = [ParsedDelta(text="a", from_start=True), ParsedDelta(stopped=True)]

    _, finished = await events_of(generations(router, {MODEL: tool_codec}), a_tool_request(stop=("z",)))

    assert (finished.finish, finished.usage.completion_tokens) == (Finish.STOP, 2)
    assert router.cancelled == ["r1"]


@pytest.mark.parametrize("start_over_after", [None, 3])
async def test_router_parses_for_workers_that_do_not(start_over_after, generations, tool_codec):
    router = FakeRouter(cards=[a_model_card(parsers=HERMES)])
    router.answer = [*ids_of(tool_codec, 'so <tool_call>{"name": "add", "arguments": {}}</tool_call>'), END]
    router.start_over_after = start_over_after

    deltas, finished = await events_of(
        generations(router, {MODEL: tool_codec}), a_tool_request(whole=start_over_after is not None)
    )

    assert "".join(delta.text for delta in deltas).strip() == "so"
    assert [call for delta in deltas for call in delta.calls] == [
        CallDelta(index=0, id="call_r1_0", name="add", arguments="{}")
    ]
    assert finished.finish is Finish.TOOL_CALLS


@pytest.mark.parametrize(
    ("parsing", "tools", "is_demanded"),
    [
        (AnswerParsing(), TOOLS, False),
        (AnswerParsing(tool_choice=ToolChoice.REQUIRED), TOOLS, True),
        (AnswerParsing(tool_choice=ToolChoice.NAMED, function="add"), TOOLS, True),
        (AnswerParsing(parallel_calls=False), TOOLS, True),
        (AnswerParsing(), TOOLS.replace('"name"', '"strict":true,"name"'), True),
    ],
)
async def test_calls_that_a_grammar_enforces_are_a_structured_output(
    parsing, tools, is_demanded, generations, tool_codec
):
    router = FakeRouter([END], cards=[a_model_card(parsers=IN_ENGINE)])

    await events_of(generations(router, {MODEL: tool_codec}), a_tool_request(parsing=parsing, tools=tools))

    assert router.submitted[0].sampling.form == (ToolCallForm() if is_demanded else None)


@pytest.mark.parametrize("parsers", [None, AnswerParsers(reasoning="qwen3"), AnswerParsers(tool_calls="jamba")])
async def test_tools_without_a_known_parser_are_refused(parsers, generations, tool_codec):
    router = FakeRouter([END], cards=[a_model_card(parsers=parsers)])

    with pytest.raises(RequestRejected, match="tool_call_parser") as refused:
        await events_of(generations(router, {MODEL: tool_codec}), a_tool_request())

    assert refused.value.field == "chat.tools"
    assert router.submitted == []


async def test_stop_string_within_an_engine_parsed_answer_is_refused(generations, tool_codec):
    router = FakeRouter([END], cards=[a_model_card(parsers=IN_ENGINE)])
    request = a_tool_request(stop=("z",), include_stop_string=True)

    with pytest.raises(RequestRejected) as refused:
        await events_of(generations(router, {MODEL: tool_codec}), request)

    assert refused.value.field == "include_stop_string"


async def test_tools_without_parsing_stay_text(generations, tool_codec):
    router = FakeRouter(cards=[a_model_card(parsers=HERMES)])
    router.answer = [*ids_of(tool_codec, "<tool_call>{}</tool_call>"), END]

    deltas, finished = await events_of(generations(router, {MODEL: tool_codec}), a_tool_request(parsing=None))

    assert "".join(delta.text for delta in deltas).strip() == "<tool_call>{}</tool_call>"
    assert finished.finish is Finish.STOP


SEES = a_model_card(takes_images=True)


@pytest.fixture
def seeing(tmp_path):
    return load_codec(write_seeing_model(tmp_path))


def a_chat_with_images(*images: bytes, **fields) -> GenerateRequest:
    parts = ("the quick brown fox " * 20, *[None for _ in images], " jumps over " * 20)
    message = ChatMessage(role="user", content="".join(part for part in parts if part), parts=parts)
    return a_request(prompt=ChatPrompt((message,)), images=images, **fields)


async def test_images_are_the_work_of_one_worker_that_takes_them(generations, seeing):
    router = FakeRouter(cards=[SEES])
    generation = generations(router, {MODEL: seeing})

    await collect(generation.generate(a_chat_with_images(b"a")))

    (arrived,) = router.submitted
    assert (arrived.images, arrived.placement, arrived.needs) == ((b"a",), Placement.AGGREGATED, ("images",))


async def test_prompts_with_different_images_have_different_keys(generations, seeing):
    router = FakeRouter(cards=[SEES])
    generation = generations(router, {MODEL: seeing})

    for number, image in enumerate((b"a", b"b", b"a")):
        await collect(generation.generate(a_chat_with_images(image, id=f"r{number}")))

    one, other, again = (arrived.keys[BLOCK_TOKENS] for arrived in router.submitted)
    assert one == again
    assert one[0] == other[0]  # the text before the image
    assert one[-1] != other[-1]


@pytest.mark.parametrize(
    ("images", "on_loop"),
    [
        ((), set()),
        ((b"a", b"b"), {"image_digests", "_digests"}),
        ((b"a", b"b" * image_keys.INLINE_BYTES), {"image_digests"}),
    ],
)
async def test_large_images_are_hashed_outside_the_event_loop(generations, seeing, images, on_loop):
    router = FakeRouter(cards=[SEES])
    generation = generations(router, {MODEL: seeing})
    request = a_chat_with_images(*images) if images else a_request()

    with count_calls() as counted:
        await collect(generation.generate(request))

    assert {each.co_name for each in counted.by_function if "digests" in each.co_name} == on_loop
    assert router.submitted[0].images == images


@pytest.mark.parametrize("external", [False, True])
async def test_images_of_a_request_over_the_rate_limit_are_not_hashed(generations, seeing, external):
    tenants = Tenants({"t": TenantSettings(requests_per_minute=1)}, Stopped().now())
    generation = generations(FakeRouter(cards=[SEES]), {MODEL: seeing}, counted=tenants)
    request = a_chat_with_images(b"a", tenant="t")

    async def serve() -> None:
        await (generation.arrival(request) if external else collect(generation.generate(request)))

    with count_calls() as admitted:
        await serve()
    with count_calls() as rejected, pytest.raises(RequestRejected) as refused:
        await serve()

    assert refused.value.reason is Reason.RATE_LIMITED
    hashed = [any(each.co_name == "image_digests" for each in calls.by_function) for calls in (admitted, rejected)]
    assert hashed == [True, False]


async def test_tokens_of_images_count_as_prompt_for_client_and_tenant(generations, seeing):
    router = FakeRouter(cards=[SEES], image_tokens=30)
    tenants = Tenants({"acme": TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),))}, Stopped().now())
    generation = generations(router, {MODEL: seeing}, counted=tenants)

    _, _, finished = await collect(generation.generate(a_chat_with_images(b"a"), "Bearer key"))

    prompt_tokens = len(router.submitted[0].tokens) // TOKEN_BYTES + 30
    assert finished.usage.prompt_tokens == prompt_tokens
    assert tenants.usage()["acme"].prompt_tokens == prompt_tokens


@pytest.mark.parametrize(
    ("card", "fields", "field"),
    [
        (a_model_card(), {}, "chat.messages"),
        (SEES, {"sampling": Sampling(prompt_logprobs=1)}, "sampling.prompt_logprobs"),
        (SEES, {"truncate_prompt": 5}, "truncate_prompt"),
        (SEES, {"placement": Placement.DISAGGREGATED}, "placement"),
    ],
)
async def test_request_with_images_that_cannot_be_obeyed_is_refused(generations, seeing, card, fields, field):
    router = FakeRouter(cards=[card])
    generation = generations(router, {MODEL: seeing})

    with pytest.raises(RequestRejected) as refused:
        await collect(generation.generate(a_chat_with_images(b"a", **fields)))

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)
    assert router.submitted == []


async def test_tokens_of_a_prompt_with_images_are_not_counted(generations, seeing):
    generation = generations(FakeRouter(cards=[SEES]), {MODEL: seeing})

    with pytest.raises(RequestRejected) as refused:
        await generation.tokens_of(a_chat_with_images(b"a"))

    assert refused.value.field == "chat.messages"
