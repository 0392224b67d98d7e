"""Images in vLLM: decodes them, and makes vLLM's prompt from an attempt with images.

Rules:

1. vLLM's image processor of the model replaces each placeholder of the prompt by the tokens of its image. This happens before
   the request starts, so an image that cannot be used fails no running request.
2. vLLM identifies an image by the SHA-256 of the request's salt and the file (`multi_modal_uuids`). Its prefix cache puts this
   digest into the hashes of all blocks with the image, so different images never share a block.
3. Blocks with images stay in the engine: the connector does not save them to the store, and the translator of KV events skips
   them. Therefore one worker computes the whole request.
4. The images of at most `PREPARED_AT_ONCE` requests are in memory as pixels, each request with at most `MAX_REQUEST_PIXELS`.
   Further requests wait. The work for a cancelled request ends before its next image.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from fleet.core.validation import MAX_REQUEST_PIXELS
from fleet.core.work import Start
from workers.engines.vllm.requests import prompt_ids

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import SamplingParams
    from vllm.inputs import MultiModalInput
    from vllm.multimodal.media import MediaWithBytes
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

MODALITY = "image"

# Maximum number of requests whose images are prepared at a time (rule 4). vLLM's image processor has one thread, so the images
# of one request are decoded while those of another one are processed.
PREPARED_AT_ONCE = 2


class ImageRefused(ValueError):
    """Raised if the images of a request cannot be used; the message says why. vLLM has not got the request."""


class PreparationCancelled(Exception):
    """Raised if a request was cancelled before its prompt was complete. vLLM has not got the request."""


def takes_images(llm: "AsyncLLM") -> bool:
    """Return whether the engine takes images: the model takes them, and vLLM has the tokenizer that its image processors need."""
    if not llm.model_config.supports_multimodal_inputs or llm.tokenizer is None:
        return False
    return _most_images(llm) > 0


class ImagePrompts:
    """Makes vLLM's prompts from attempts with images."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._turns = asyncio.Semaphore(PREPARED_AT_ONCE)

    async def prompt_of(self, start: Start, is_cancelled: Callable[[], bool]) -> "MultiModalInput":
        """Return vLLM's prompt for an attempt with images, in which the tokens of the images replace their placeholders.

        Args:
            start: The attempt.
            is_cancelled: Function that returns whether the attempt has been cancelled. It is also called in a thread.

        Raises:
            ImageRefused: An image cannot be decoded, the model cannot take it, there are too many images or pixels, or the prompt
                does not have one placeholder for each image.
            PreparationCancelled: The attempt has been cancelled.
        """
        if len(start.images) > (most := _most_images(self._llm)):
            raise ImageRefused(f"there are {len(start.images)} images, and the model takes {most} at most")
        async with self._turns:
            images = await asyncio.to_thread(_decode, start.images, is_cancelled)
            identities = await asyncio.to_thread(_identities, start.salt, start.images)
            if is_cancelled():
                raise PreparationCancelled
            return await self._render(start, images, identities)

    async def _render(
        self, start: Start, images: "list[MediaWithBytes[Image]]", identities: Sequence[str]
    ) -> "MultiModalInput":
        ids = prompt_ids(start)
        # Tokens of the answer must not count as placeholders, so vLLM gets them separately.
        answer = ids[start.num_tokens - start.generated_tokens :]
        prompt = {
            "prompt_token_ids": ids[: len(ids) - len(answer)],
            "multi_modal_data": {MODALITY: images},
            "multi_modal_uuids": {MODALITY: identities},
        }
        if start.salt:
            prompt["cache_salt"] = start.salt.hex()
        try:
            # vLLM's image cache is not used, because it consists of two halves: one in this process, and one in the
            # engine's process. After a request that fails or is cancelled in this process, the halves would differ.
            (rendered,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except (ValueError, TypeError, LookupError, AssertionError) as error:  # vLLM raises these for unusual images
            log.warning("images refused by the model", exc_info=True, extra={"request": start.request_id})
            raise ImageRefused(f"the model cannot take these images: {str(error) or type(error).__name__}") from error
        if len(rendered["mm_placeholders"].get(MODALITY, ())) != len(images):
            raise ImageRefused(f"the prompt has not one place for each of the {len(images)} images")
        rendered["prompt_token_ids"] = [*rendered["prompt_token_ids"], *answer]
        return rendered


def fit_answer(start: Start, prompt: "MultiModalInput", params: "SamplingParams", max_model_len: int) -> int:
    """Return by how many tokens the images make the prompt longer, and let the answer end where the context is full.

    Raises:
        ImageRefused: The prompt leaves no room for an answer.
    """
    length = len(prompt["prompt_token_ids"])
    if length >= max_model_len:
        raise ImageRefused(
            f"the prompt is too long: it has {length} tokens with its images, and this model's maximum context length is"
            f" {max_model_len} tokens"
        )
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, max_model_len - length)
    return length - len(prompt_ids(start))


def _most_images(llm: "AsyncLLM") -> int:
    limits: Mapping[str, int] = llm.renderer.get_mm_processor().info.allowed_mm_limits
    return limits.get(MODALITY, 0)


def _identities(salt: bytes, contents: Sequence[bytes]) -> list[str]:
    """Return the digests of images by which vLLM identifies them (rule 2). 32 MiB take about 20 ms, so call it in a thread."""
    identities = []
    for content in contents:
        digest = sha256(salt)
        digest.update(content)  # a second update, because joining the salt and the image would copy the image
        identities.append(digest.hexdigest())
    return identities


def _decode(contents: Sequence[bytes], is_cancelled: Callable[[], bool]) -> "list[MediaWithBytes[Image]]":
    """Decode images as vLLM's own server does, and refuse more than `MAX_REQUEST_PIXELS` pixels together."""
    from vllm.multimodal.media import ImageMediaIO  # noqa: PLC0415 - vLLM is loaded already

    reader = ImageMediaIO()
    images = []
    pixels = 0
    for number, content in enumerate(contents, 1):
        if is_cancelled():
            raise PreparationCancelled
        try:
            image = reader.load_bytes(content)
        except MemoryError:
            raise
        except Exception as error:  # supervisor: Pillow may raise any exception; only this request is refused
            raise ImageRefused(f"image {number} of the prompt cannot be decoded: {error}") from error
        # An image may have more pixels than its header states, and the router has read only the header.
        pixels += image.media.width * image.media.height
        if pixels > MAX_REQUEST_PIXELS:
            raise ImageRefused(f"the images have more than {MAX_REQUEST_PIXELS:,} pixels together")
        images.append(image)
    return images
