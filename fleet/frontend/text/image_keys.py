"""Block keys of prompts with images: the keys cover the images, so two prompts share no block from their first different image on.

The keys are computed from the router's tokens, with one placeholder for each image. An engine replaces each placeholder
by several tokens. So only the blocks before the first image have the keys that workers report.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

import numpy as np

from fleet.core.requests import TOKEN_BYTES, TokenBytes
from fleet.router.kv_index.prefix_index import keys_of
from kvstore.block import chain

# Images with at most this many bytes together are hashed on the event loop, which takes about 50 µs. More bytes are hashed in a
# thread.
INLINE_BYTES = 64 << 10


async def image_digests(images: Sequence[bytes]) -> Sequence[bytes]:
    """Return the SHA-256 of each image. Large images are hashed in a thread: 32 MiB would block the event loop for about 20 ms."""
    if sum(map(len, images)) <= INLINE_BYTES:
        return _digests(images)
    return await asyncio.to_thread(_digests, images)


def _digests(images: Sequence[bytes]) -> Sequence[bytes]:
    return [sha256(image).digest() for image in images]


def image_keys(
    tokens: TokenBytes, block_tokens: int, salt: bytes, images: Sequence[bytes], placeholders: Collection[int]
) -> tuple[int, ...]:
    """Return the block keys of a prompt with images.

    Args:
        tokens: The prompt, with a placeholder for each image.
        block_tokens: Number of tokens of a block.
        salt: Salt of the block hashes.
        images: Digests of the image files (`image_digests`), in the order of their placeholders.
        placeholders: The token ids of the model that may stand for an image. If the prompt does not have exactly one
            placeholder for each image, the first block counts as the place of all images.
    """
    ids = np.frombuffer(tokens, "<u4")
    (places,) = np.nonzero(np.isin(ids, list(placeholders)))
    if len(places) != len(images):
        places = np.zeros(len(images), dtype=np.intp)
    return keys_of(chain(tokens, block_tokens, salt=salt, extras=_extras(places.tolist(), block_tokens, images)))


def _extras(places: Sequence[int], block_tokens: int, images: Sequence[bytes]) -> Mapping[int, bytes]:
    """Return the extra bytes that go into the hash of each block with an image (rule 4 of `kvstore.block`)."""
    extras: dict[int, bytes] = {}
    for place, image in zip(places, images, strict=True):
        block, offset = divmod(place, block_tokens)
        extras[block] = extras.get(block, b"") + offset.to_bytes(TOKEN_BYTES, "little", signed=True) + image
    return extras
