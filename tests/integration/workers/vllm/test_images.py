"""Tests of images in a real vLLM engine: answers are those of transformers, and different images share no block."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from fleet.core.errors import Reason
from fleet.core.requests import IMAGES, Source
from fleet.core.work import Progress, Rejected, Start
from fleet.frontend.text.codec import load_codec
from tests.support.builders import token_bytes, token_ids
from tests.support.workers.engine_driver import EngineDriver, an_attempt, blocks_from
from tests.support.workers.vision_model import (
    IMAGE_TOKENS,
    LONGEST,
    MARKERS,
    an_image,
    answer_of_transformers,
    build_vision_model,
)
from tests.support.workers.vllm_engines import VllmEngines, hosted, vllm_worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

BLOCK = 32
RED, BLUE, GREEN = (an_image(color) for color in ("red", "blue", "green"))
# More than a block of text, then an image, then more than a block of text.
TEXT = "<s>" + "The lazy dog sleeps in the garden behind the house. " * 6 + "<image>" + "What does it show? " * 12
LONGER = IMAGE_TOKENS + MARKERS - 1  # tokens by which an image makes the prompt longer than its placeholder


class VisionEngine(NamedTuple):
    hosted: VllmEngines
    model: Path

    def do(self, start: Start) -> tuple[tuple[int, ...], Progress | Rejected]:
        driver: EngineDriver = self.hosted.engines[0]

        async def serve() -> tuple[tuple[int, ...], Progress | Rejected]:
            driver.submit(start)
            end = await driver.end_of(start)
            return driver.tokens[start.request_id], end

        return self.hosted.run(serve())

    def attempt(self, text: str, *images: bytes, tokens: int = 8, **fields) -> Start:
        prompt = load_codec(self.model).encode(text, False)
        return an_attempt(prompt, tokens, images=images, **fields)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionEngine]:
    model = build_vision_model(tmp_path_factory.mktemp("vision") / "model")
    with hosted(structs.replace(vllm_worker(model), max_model_len=LONGEST)) as engines:
        yield VisionEngine(engines, model)


def test_engine_of_a_vision_model_says_that_it_takes_images(engine):
    assert IMAGES in engine.hosted.engines[0].engine.facts.sampling_fields


@pytest.mark.parametrize("images", [(RED,), (BLUE,), (RED, BLUE), (BLUE, RED)])
def test_answer_is_that_of_transformers(engine, images):
    text = "<s><|user|>Compare" + " and <image>" * len(images) + "<|end|><|assistant|>"

    tokens, _ = engine.do(engine.attempt(text, *images))

    assert list(tokens) == answer_of_transformers(engine.model, text, images, 8)


def test_different_images_share_the_blocks_before_them_only(engine):
    start = engine.attempt(TEXT, GREEN)
    prompt_tokens = start.num_tokens + LONGER
    first, first_end = engine.do(start)
    again, again_end = engine.do(engine.attempt(TEXT, GREEN))
    other, other_end = engine.do(engine.attempt(TEXT, RED))

    before = TEXT[: TEXT.index("<image>")]
    common = (engine.attempt(before).num_tokens + 1) // BLOCK
    assert common >= 1
    assert again == first != other
    for end in (first_end, again_end, other_end):
        assert end.kv.image_tokens == LONGER
        assert end.kv.prompt_blocks == -(-prompt_tokens // BLOCK)
    assert blocks_from(again_end.kv, Source.ENGINE) == (prompt_tokens - 1) // BLOCK > common
    assert blocks_from(other_end.kv, Source.ENGINE) == common


def test_router_is_told_of_no_block_with_an_image(engine):
    driver = engine.hosted.engines[0]

    async def cached_after(start: Start) -> set[bytes]:
        before = set(driver.cached)
        await driver.do(start)
        await driver.idle()
        return driver.cached - before

    text = "Some other words that nobody has sent before, which are more than a block. " * 3 + "<image> and the end. "

    told = engine.hosted.run(cached_after(engine.attempt(text, BLUE)))
    after = engine.hosted.run(cached_after(engine.attempt(text.replace("<image>", ""))))

    assert len(told) <= engine.attempt(text[: text.index("<image>")]).num_tokens // BLOCK
    assert after.isdisjoint(told)


def test_continued_answer_is_that_of_an_undisturbed_one(engine):
    whole = engine.attempt(TEXT, BLUE, tokens=8)
    tokens, _ = engine.do(whole)
    begun = structs.replace(
        engine.attempt(TEXT, BLUE, tokens=5),
        tokens=whole.tokens + token_bytes(tokens[:3]),
        generated_tokens=3,
    )

    rest, end = engine.do(begun)

    assert rest == tokens[3:]
    assert end.kv.image_tokens == LONGER


def test_token_of_the_answer_is_no_place_of_an_image(engine):
    placeholder = token_ids(engine.attempt("<image>").tokens)[0]
    begun = engine.attempt("<s>See <image> here", BLUE)
    begun = structs.replace(begun, tokens=begun.tokens + token_bytes([placeholder]), generated_tokens=1)

    _, end = engine.do(begun)

    assert isinstance(end, Progress)
    assert end.kv.image_tokens == LONGER


def test_answer_ends_where_the_context_is_full(engine):
    prompt = token_bytes([0, *[400] * 460, *token_ids(engine.attempt("<image>").tokens)])
    start = engine.attempt("", RED, tokens=LONGEST - 461 - 1)  # what the router believes to fit
    room = LONGEST - 462 - LONGER

    tokens, end = engine.do(structs.replace(start, tokens=prompt))

    assert len(tokens) == room
    assert end.finish == "length"


@pytest.mark.parametrize(
    ("text", "images", "message"),
    [
        ("<s>no place", (RED,), "images"),
        ("<s><image>", (RED, BLUE), "images"),
        ("<s><image>", (RED[:60],), "image 1 of the prompt cannot be decoded"),
        ("<s><image> and <image>", (RED, b"no image"), "image 2 of the prompt cannot be decoded"),
        ("<s>" + "<image>" * 30, (RED,) * 30, "tokens with its images"),
    ],
)
def test_image_that_cannot_be_used_is_refused_and_harms_nobody(engine, text, images, message):
    neighbour = engine.attempt(TEXT, RED, tokens=30)
    driver = engine.hosted.engines[0]
    start = engine.attempt(text, *images, tokens=1)

    async def both() -> tuple[Rejected, Progress]:
        driver.submit(neighbour, start)
        return await asyncio.gather(driver.end_of(start), driver.end_of(neighbour))

    refused, served = engine.hosted.run(both())

    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.field) == (Reason.INVALID_ARGUMENT, "chat.messages")
    assert message in refused.message
    assert served.finish == "length"
