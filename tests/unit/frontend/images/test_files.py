"""Images in request bodies: only images in data URLs within the size limits are accepted, and errors name the field."""

import base64
import io
import struct
import sys
import zlib
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fleet.core.clock import Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.core.validation import MAX_IMAGES, MAX_PIXELS
from fleet.frontend.images.files import MAX_SEGMENTS, MAX_SIDE, ImageFile, add_image, image_size
from fleet.frontend.openai.requests import MAX_REPEATED_IMAGE_BYTES, read_chat
from fleet.frontend.openai.translated.messages import read_messages
from fleet.frontend.openai.translated.responses import read_responses


def a_file(kind: str = "PNG", size: tuple[int, int] = (7, 5)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


def a_png_of(width: int, height: int) -> bytes:
    """Return the head of a PNG that claims this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def a_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read_image(url: str) -> tuple[bytes, int]:
    """Return the content of the only image of a request, and its number of pixels."""
    images = []
    add_image(url, "f", images)
    (image,) = images
    return image.content, image.pixels


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_image_in_a_data_url_is_read_whatever_type_it_claims(kind):
    file = a_file(kind)

    assert read_image(a_url(file, "image/x-icon;charset=utf-8")) == (file, 7 * 5)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.org/cat.png", "must be a data URL"),
        ("file:///etc/passwd", "must be a data URL"),
        ("data:image/png,abc", "must be a data URL"),
        ("", "must be a data URL"),
        ("data:" + "x" * 300 + ";base64,AAAA", "must be a data URL"),
        ("data:image/png;base64,!!!!", "not base64"),
        ("data:image/png;base64,é", "not base64"),
        ("data:image/png;base64,", "is no image"),
        (a_url(b"GIF89a"), "is no image"),
        (a_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "is no image"),
        (a_url(a_file("BMP")), "is no image"),
        (a_url(a_file("TIFF")), "is no image"),
        (a_url(a_png_of(10_000, 10_000)), "pixels"),
        (a_url(a_png_of(60_000, 60_000)), "pixels"),
        (a_url(a_png_of(MAX_SIDE + 1, 1)), "a side of more than"),
    ],
)
def test_what_is_no_small_image_is_refused_by_field(url, message):
    with pytest.raises(RequestRejected, match=message) as refused:
        add_image(url, "messages[0].content[1].image_url", [])

    assert (refused.value.reason, refused.value.field) == (
        Reason.INVALID_ARGUMENT,
        "messages[0].content[1].image_url",
    )


@given(st.binary(max_size=200), st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]), st.integers(0, 200))
def test_damaged_image_is_read_or_refused_and_nothing_else(noise, kind, place):
    file = a_file(kind)

    with suppress(RequestRejected):
        read_image(a_url(file[:place] + noise + file[place + len(noise) :]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {"icc_profile": bytes(3000)}),
        ("GIF", {}),
        ("JPEG", {"progressive": True, "icc_profile": bytes(200_000), "exif": b"Exif\0\0" + bytes(900)}),
        ("JPEG", {"quality": 20, "comment": b"x" * 60_000}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"quality": 10}),
        ("WEBP", {"lossless": True, "icc_profile": bytes(3000)}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (300, 17), (1, 4097), (16_383, 2)])
def test_size_is_that_of_the_decoded_image(kind, options, size):
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind, **options)

    assert image_size(file.getvalue()) == size


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xda" + bytes(99),
        b"\xff\xd8\xff\xe0\x00\x04ab" + b"\xff\xd9",
        b"GIF89a\0\0\1\0",
        b"RIFF\0\0\0\0WEBP",
        b"RIFF\0\0\0\0WEBPVP8X" + bytes(9),
        b"RIFF\0\0\0\0WEBPVP8L" + bytes(30),
        b"RIFF\0\0\0\0WEBPALPH" + bytes(30),
        b"\x89PNG\r\n\x1a\n\0\0\0\x0dIDAT\0\0\0\1\0\0\0\1",
    ],
)
def test_header_without_a_size_is_that_of_no_image(content):
    assert image_size(content) is None


# Contents for which a reader of the whole header would need seconds.
@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xd8" + b"\xff" * 6_000_000,
        b"\xff\xd8" + b"\xff\xe1\x00\x02" * 1_500_000,
        a_png_of(7, 5)[:33] + b"\0\0\0\0tEXt\0\0\0\0" * 500_000,
    ],
    ids=["fill bytes", "empty segments", "empty chunks"],
)
def test_hostile_header_is_read_in_few_steps(content):
    lines = 0

    def count(*_: object) -> object:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        image_size(content)
    finally:
        sys.settrace(before)

    assert lines < 20 * MAX_SEGMENTS


def test_image_too_many_is_refused_before_it_is_read():
    images = [ImageFile("f", b"", 1)] * MAX_IMAGES

    with pytest.raises(RequestRejected, match=f"{MAX_IMAGES} are allowed") as refused:
        add_image("this is no URL", "messages[0].content[64].image_url", images)

    assert refused.value.field == "messages[0].content[64].image_url"


def chat_with(count: int) -> None:
    parts = [{"type": "image_url", "image_url": a_url(a_file())}] * count
    read_chat(msgspec.json.encode({"messages": [{"role": "user", "content": parts}]}), RequestId("r"), Nanos(0))


def messages_with(count: int) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(a_file()).decode()}
    turn = {"role": "user", "content": [{"type": "image", "source": source}] * (count // 2)}
    read_messages(
        msgspec.json.encode({"model": "m", "messages": [turn, turn], "max_tokens": 1}), RequestId("r"), Nanos(0)
    )


def responses_with(count: int) -> None:
    parts = [{"type": "input_image", "image_url": a_url(a_file())}] * (count // 2)
    read_responses(
        msgspec.json.encode({"model": "m", "input": [{"role": "user", "content": parts}] * 2}), RequestId("r"), Nanos(0)
    )


@pytest.mark.parametrize("read", [chat_with, messages_with, responses_with])
def test_images_of_all_messages_count_together(read):
    read(MAX_IMAGES)

    with pytest.raises(RequestRejected, match=f"{MAX_IMAGES} are allowed"):
        read(MAX_IMAGES + 2)


def test_pixels_of_all_images_are_limited_together():
    images = [ImageFile("f", b"", MAX_PIXELS)]
    add_image(a_url(a_png_of(5_000, 9_999)), "f", images)

    with pytest.raises(RequestRejected, match="all images together"):
        add_image(a_url(a_png_of(5_001, 1)), "messages[1].content[0].image_url", images)

    assert len(images) == 2


@pytest.mark.parametrize(("fields", "field"), [({"n": 3}, "n"), ({"n": 1, "best_of": 3}, "best_of")])
def test_images_of_all_answers_are_limited_together(fields, field):
    file = a_file() + bytes(MAX_REPEATED_IMAGE_BYTES // 3)
    parts = [{"type": "image_url", "image_url": a_url(file)}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    read_chat(msgspec.json.encode(chat | {"n": 2}), RequestId("r"), Nanos(0))

    with pytest.raises(RequestRejected, match="3 answers about these images") as refused:
        read_chat(msgspec.json.encode(chat | fields), RequestId("r"), Nanos(0))

    assert refused.value.field == field
