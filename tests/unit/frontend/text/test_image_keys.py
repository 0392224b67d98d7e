"""Block keys of prompts with images: they depend on the content and the position of each image."""

from hashlib import sha256

from fleet.frontend.text.image_keys import image_keys
from fleet.router.kv_index.prefix_index import keys_of
from kvstore.block import chain
from tests.support.builders import token_bytes

BLOCK = 4
PLACE = 99
PROMPT = token_bytes([1, 2, 3, 4, 5, 6, PLACE, 8, 9, 10, PLACE, 12, 13, 14, 15, 16, 17])
TEXT_KEYS = keys_of(chain(PROMPT, BLOCK))


def keys(*images: bytes, prompt: bytes = PROMPT, salt: bytes = b"") -> tuple[int, ...]:
    return image_keys(prompt, BLOCK, salt, [sha256(image).digest() for image in images], (PLACE, 98))


def test_blocks_before_the_first_image_have_the_keys_of_text():
    assert keys(b"a", b"b")[0] == TEXT_KEYS[0]
    assert set(keys(b"a", b"b")[1:]).isdisjoint(TEXT_KEYS)


def test_key_follows_the_documented_rule():
    first, second = ((2).to_bytes(4, "little") + sha256(image).digest() for image in (b"a", b"b"))

    assert keys(b"a", b"b") == keys_of(chain(PROMPT, BLOCK, extras={1: first, 2: second}))


def test_different_images_share_no_block_from_the_difference_on():
    one, other, swapped = keys(b"a", b"b"), keys(b"a", b"c"), keys(b"b", b"a")

    assert one[:2] == other[:2]
    assert set(one[2:]).isdisjoint(other[2:])
    assert set(one[1:]).isdisjoint(swapped[1:])


def test_images_without_a_known_place_count_for_every_block():
    unknown = token_bytes([1, 2, 3, 4, 5, 6, 7, 8, 9])

    assert set(keys(b"a", prompt=unknown)).isdisjoint(keys(b"b", prompt=unknown))
    assert set(keys(b"a", prompt=unknown)).isdisjoint(keys_of(chain(unknown, BLOCK)))
    assert set(keys(b"a")).isdisjoint(keys(b"b"))  # the same image at two positions


def test_salt_separates_prompts_with_images():
    assert set(keys(b"a", b"b", salt=b"s" * 32)).isdisjoint(keys(b"a", b"b"))
