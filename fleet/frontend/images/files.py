"""Images in chats: reads the images of ``image_url`` parts, and checks them before a worker gets them.

Rules:

1. An image is a data URL in base64, or an http or https URL. `fleet.frontend.images.fetcher` fetches images at such
   URLs, if the settings allow it, after the client's tenant is known.
2. The type and the size of an image are read from its header, whatever the URL says. The pixels are decoded by the worker,
   which compares their number with the limits again: formats such as GIF can state a larger size behind the header.
3. Images in data URLs are read with the body of the request, before the limits of its tenant are checked. They are read
   in the event loop, or in a thread if the body has more than 64 KiB. So the work must be bounded: the number of
   images is checked before each of them is read. And from a header, only a few fields at fixed places are read, or at
   most `MAX_SEGMENTS` segments of a JPEG.

Formats: PNG (ISO/IEC 15948, 11.2.2), GIF (GIF89a, 18), JPEG (ITU-T T.81, annex B) and WebP (RFC 9649, 2.5 to 2.7).
"""

import base64
import binascii
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fleet.core.errors import RequestRejected, invalid
from fleet.core.requests import RemoteImage
from fleet.core.validation import MAX_IMAGES, MAX_PIXELS, MAX_REQUEST_PIXELS

# Maximum width and height of an image in pixels; a larger image is refused. `MAX_PIXELS` alone would allow very long, narrow images,
# and image processors of models scale an image by its longer side.
MAX_SIDE = 16_384

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

# Maximum number of segments of a JPEG that are read to find its size; if none of them states the size, the image is refused. A color
# profile takes a segment for each 64 KiB.
MAX_SEGMENTS = 256

_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR"
_FILL = 0xFF  # This byte may precede a marker any number of times; each such byte counts as a segment.
_SCAN, _END = 0xDA, 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, without DHT, JPG and DAC

_DATA_URL = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
_REMOTE_URL = re.compile(r"https?://", re.IGNORECASE)
_MAX_HEAD = 256  # maximum number of characters of a data URL before its data; a URL with more is refused


class ImageFile(NamedTuple):
    """An image of a request: the file that the client sent, or the URL from which it has to be fetched."""

    field: str  # path of the image's URL in the client's request, for error messages
    content: bytes  # the bytes of the file; empty if it has to be fetched
    pixels: int  # width times height, as the header states them; 0 if it has to be fetched
    url: str = ""  # the http or https URL to fetch; empty: the client sent the image


def add_image(url: str, field: str, images: list[ImageFile]) -> None:
    """Append the image of a URL to the images of a request. An image at an http or https URL is not fetched here.

    Args:
        url: URL of the image.
        field: Path of the URL in the client's request, for errors.
        images: The images of the request so far.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the URL is neither a data URL in base64 nor an http or https URL, its data are no image
            within the limits, or the request has too many images or pixels.
    """
    if len(images) == MAX_IMAGES:
        raise invalid(field, f"is one image too many; {MAX_IMAGES} are allowed in a request")
    head = _DATA_URL.match(url, 0, _MAX_HEAD)
    if head is None:
        if _REMOTE_URL.match(url) is None:
            raise invalid(field, "must be a data URL in base64, as data:image/png;base64,…, or an http or https URL")
        images.append(ImageFile(field, b"", 0, url))
        return
    try:
        content = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid(field, "has data that are not base64") from None
    pixels = checked_pixels(content, field)
    if pixels + sum([each.pixels for each in images]) > MAX_REQUEST_PIXELS:
        raise _too_many_pixels(field)
    images.append(ImageFile(field, content, pixels))


def remote_images(images: Sequence[ImageFile]) -> tuple[RemoteImage, ...]:
    """Return the images of a request that have to be fetched."""
    return tuple([RemoteImage(place, each.url, each.field) for place, each in enumerate(images) if each.url])


def check_images(contents: Sequence[bytes], fields: Mapping[int, str]) -> None:
    """Check the images of a request after some of them were fetched.

    Args:
        contents: The content of all images. Those that the client sent were checked before, but their pixels count here too.
        fields: The field of each fetched image, by its place in `contents`.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the content of a fetched image is no image, or there are too many pixels.
    """
    sizes = [image_size(content) for place, content in enumerate(contents) if place not in fields]
    pixels = sum([width * height for width, height in filter(None, sizes)])
    for place, field in fields.items():
        pixels += checked_pixels(contents[place], field)
        if pixels > MAX_REQUEST_PIXELS:
            raise _too_many_pixels(field)


def image_part(url: str, field: str, images: list[ImageFile]) -> dict[str, Any]:
    """Convert an image of another API to a part of a chat message, and append the image to `images`.

    Raises:
        RequestRejected: `add_image` refuses the image; `field` is the path in the other API.
    """
    add_image(url, field, images)
    return {"type": "image_url", "image_url": {"url": url}}


def _too_many_pixels(field: str) -> RequestRejected:
    return invalid(field, f"makes more than {MAX_REQUEST_PIXELS:,} pixels in all images together; send them smaller")


def checked_pixels(content: bytes, field: str) -> int:
    """Return the number of pixels of an image. Refuse content that is no image, and an image that is too large."""
    size = image_size(content)
    if size is None:
        raise invalid(field, f"is no image; {', '.join(FORMATS)} are taken")
    width, height = size
    if width * height > MAX_PIXELS or max(size) > MAX_SIDE:
        raise invalid(
            field, f"has more than {MAX_PIXELS:,} pixels, or a side of more than {MAX_SIDE:,}; send it smaller"
        )
    return width * height


def image_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height of an image in pixels; None if the content is no PNG, JPEG, WebP or GIF whose header states a size above 0."""
    try:
        size = _stated_size(content)
    except (struct.error, IndexError):  # the file ends within its header
        return None
    return size if size is not None and min(size) > 0 else None


def _stated_size(content: bytes) -> tuple[int, int] | None:
    if content.startswith(_PNG):
        width, height = struct.unpack_from(">II", content, 16)
    elif content.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", content, 6)
    elif content.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(content)
    elif content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _webp_size(content)
    else:
        return None
    return width, height


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    place = 2
    for _ in range(MAX_SEGMENTS):
        if content[place] != _FILL:
            return None
        marker = content[place + 1]
        if marker == _FILL:
            place += 1
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", content, place + 5)
            return width, height
        elif marker in (_SCAN, _END):
            return None
        else:
            (length,) = struct.unpack_from(">H", content, place + 2)
            place += 2 + length
    return None


def _webp_size(content: bytes) -> tuple[int, int] | None:
    match content[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(content[place : place + 3], "little") + 1 for place in (24, 27))
            return (width, height) if len(content) >= 30 else None
        case b"VP8L" if content[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", content, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if content[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", content, 26)
            return width & 0x3FFF, height & 0x3FFF
        case _:
            return None
