"""Tests of requests that the vLLM engine prepares before vLLM gets them, on a fake of vLLM's `AsyncLLM`."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from fleet.core.errors import Reason
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import IMAGES, AnswerParsers, Finish
from fleet.core.work import ParsingTask, Progress, Rejected, Start
from kvstore.block import SALT_BYTES
from tests.support.builders import token_bytes
from tests.support.waiting import stays, until
from tests.support.workers.engine_driver import an_attempt
from workers.engines.vllm.engine import INLINE_CHARACTERS, VllmEngine
from workers.engines.vllm.images import PREPARED_AT_ONCE, ImagePrompts, ImageRefused, PreparationCancelled
from workers.engines.vllm.step_counter import StepCounter, step_file
from workers.ports import EngineFacts
from workers.settings import WorkerSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

FACTS = EngineFacts(
    name="fake 1",
    model=ModelName("tiny"),
    block_tokens=16,
    max_model_len=256,
    kv_blocks=64,
    max_running=8,
    fingerprint="",
    kv_paths=(),
    sampling_fields=(IMAGES,),
    parsers=AnswerParsers(in_engine=True),
)


class FakeLlm:
    """The parts of vLLM's `AsyncLLM` that the engine uses. Rendering and generation wait until the test lets them end."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: 1000, hf_text_config=SimpleNamespace(type_vocab_size=0)
        )
        self.tokenizer = object()
        self.output_processor = SimpleNamespace(process_outputs=lambda *_: None, request_states={})
        self.engine_core = SimpleNamespace()
        self.renderer = self
        self.rendered = asyncio.Event()
        self.fault: Exception | None = None
        self.rendering = 0
        self.uuids: list[str] = []
        self.generating = 0

    def get_mm_processor(self) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(allowed_mm_limits={"image": 8}))

    async def render_cmpl_async(self, prompts: list[dict], *, skip_mm_cache: bool) -> list[dict]:
        self.rendering += 1
        self.uuids += prompts[0]["multi_modal_uuids"]["image"]
        await self.rendered.wait()
        if self.fault is not None:
            raise self.fault
        ids = prompts[0]["prompt_token_ids"]
        return [{"prompt_token_ids": ids, "mm_placeholders": {"image": prompts[0]["multi_modal_data"]["image"]}}]

    async def generate(self, *_: object, **__: object) -> AsyncIterator[None]:
        self.generating += 1
        await asyncio.Event().wait()
        yield

    async def abort(self, request_id: str) -> None:
        """Do nothing; the engine aborts requests that vLLM does not have."""


class SlowParsers:
    """The parsers of a model whose answers are not parsed after all. Opening waits until the test lets it end."""

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.may_open = threading.Event()

    def open(self, *_: object) -> None:
        self.opening.set()
        assert self.may_open.wait(60)


@asynccontextmanager
async def an_engine(scratch: Path, parsers: SlowParsers | None = None) -> AsyncIterator[tuple[FakeLlm, VllmEngine]]:
    llm = FakeLlm()
    StepCounter(step_file(scratch, 0))
    settings = WorkerSettings(worker_id=WorkerId("w"), model=FACTS.model)
    async with asyncio.TaskGroup() as tasks:
        engine = VllmEngine(llm, FACTS, settings, 1, scratch, tasks, parsers=parsers)
        yield llm, engine
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()


def a_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (7, 5), "red").save(file, "PNG")
    return file.getvalue()


def with_images(*images: bytes, **fields) -> Start:
    return an_attempt(token_bytes([1, 2, 3]), images=images or (a_png(),), **fields)


async def next_output(engine: VllmEngine) -> Progress | Rejected:
    """Return the first output of the engine's next step."""
    async with asyncio.timeout(60):
        return (await anext(engine.outputs()))[0]


async def test_engine_works_only_once_vllm_has_the_request(tmp_path):
    async with an_engine(tmp_path) as (llm, engine):
        engine.submit(with_images())
        await until(lambda: llm.rendering)
        assert [each.working for each in engine.pulses()] == [False]

        llm.rendered.set()
        await until(lambda: llm.generating)
        assert [each.working for each in engine.pulses()] == [True]


async def test_images_of_two_requests_are_prepared_at_once(tmp_path):
    async with an_engine(tmp_path) as (llm, engine):
        for _ in range(PREPARED_AT_ONCE + 1):
            engine.submit(with_images())
        await until(lambda: llm.rendering == PREPARED_AT_ONCE)
        await stays(lambda: llm.rendering == PREPARED_AT_ONCE, 0.3, "the third request waits")

        llm.rendered.set()
        await until(lambda: llm.generating == PREPARED_AT_ONCE + 1)


async def test_waiting_request_that_is_cancelled_is_not_prepared(tmp_path):
    async with an_engine(tmp_path) as (llm, engine):
        for _ in range(PREPARED_AT_ONCE):
            engine.submit(with_images())
        cancelled = with_images()
        engine.submit(cancelled)
        await until(lambda: llm.rendering == PREPARED_AT_ONCE)

        engine.cancel(cancelled.request_id)
        llm.rendered.set()

        assert await next_output(engine) == Progress(request_id=cancelled.request_id, finish=Finish.CANCELLED)
        assert llm.rendering == PREPARED_AT_ONCE


async def test_request_cancelled_while_its_parser_opens_is_ended(tmp_path):
    parsers = SlowParsers()
    async with an_engine(tmp_path, parsers) as (llm, engine):
        long_tools = ParsingTask(tools="x" * (INLINE_CHARACTERS + 1))
        cancelled = an_attempt(token_bytes([1, 2, 3]), parsing=long_tools)
        engine.submit(cancelled)
        await until(parsers.opening.is_set)

        engine.cancel(cancelled.request_id)
        parsers.may_open.set()

        assert await next_output(engine) == Progress(request_id=cancelled.request_id, finish=Finish.CANCELLED)
        await until(lambda: not engine.load().running)
        assert not llm.generating


async def test_cancelled_request_is_not_decoded_to_its_end():
    answers = iter([False, True])

    with pytest.raises(PreparationCancelled):
        await ImagePrompts(FakeLlm()).prompt_of(with_images(a_png(), b"no image"), lambda: next(answers))


@pytest.mark.parametrize(
    ("images", "fault", "reason", "message"),
    [
        ([b"no image"] * 9, None, Reason.INVALID_ARGUMENT, "the model takes 8 at most"),
        ([b"no image"], None, Reason.INVALID_ARGUMENT, "cannot be decoded"),
        ([], ValueError("too slim"), Reason.INVALID_ARGUMENT, "too slim"),
        ([], KeyError("side"), Reason.INVALID_ARGUMENT, "side"),
        ([], AssertionError("no place"), Reason.INVALID_ARGUMENT, "no place"),
        ([], MemoryError(), Reason.INTERNAL, "could not prepare"),
        ([], RuntimeError("CUDA out of memory"), Reason.INTERNAL, "could not prepare"),
    ],
)
async def test_fault_of_the_worker_is_not_the_clients(tmp_path, images, fault, reason, message):
    async with an_engine(tmp_path) as (llm, engine):
        llm.fault = fault
        llm.rendered.set()

        engine.submit(with_images(*images))
        refused = await next_output(engine)

        assert isinstance(refused, Rejected)
        assert refused.reason is reason
        assert message in refused.message
        assert not engine.load().running


async def test_pixels_beyond_those_of_headers_are_refused(monkeypatch):
    monkeypatch.setattr("workers.engines.vllm.images.MAX_REQUEST_PIXELS", 2 * 7 * 5 - 1)

    with pytest.raises(ImageRefused, match="pixels together"):
        await ImagePrompts(FakeLlm()).prompt_of(with_images(a_png(), a_png()), lambda: False)


async def test_images_are_hashed_with_their_salt_in_a_thread(tmp_path, monkeypatch):
    threads = []

    def noted(salt: bytes):
        threads.append(threading.current_thread())
        return sha256(salt)

    monkeypatch.setattr("workers.engines.vllm.images.sha256", noted)
    async with an_engine(tmp_path) as (llm, engine):
        engine.submit(with_images(salt=b"1" * SALT_BYTES))
        await until(lambda: llm.rendering)

        assert llm.uuids == [sha256(b"1" * SALT_BYTES + a_png()).hexdigest()]
    assert threading.main_thread() not in threads


async def test_tenants_have_different_names_for_the_same_image(tmp_path):
    async with an_engine(tmp_path) as (llm, engine):
        engine.submit(with_images(salt=b"1" * SALT_BYTES))
        engine.submit(with_images(salt=b"2" * SALT_BYTES))
        await until(lambda: llm.rendering == 2)

        assert len(set(llm.uuids)) == 2
