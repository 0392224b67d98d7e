"""Format of segment files: encoded structures are decoded to the same values, and all other bytes are rejected."""

import random
from array import array

import google_crc32c
import numpy as np
import pytest

from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.ssd.segments.record_format import (
    ENTRY,
    HEAD,
    RECORD,
    TRAILER,
    NewerSegmentFormat,
    RecordHeader,
    SegmentFooter,
    SegmentHead,
    footer_pages,
    is_discarded,
    read_record_header,
    read_segment_head,
    read_table,
    read_trailer,
    record_header,
    record_signs,
    segment_head,
    table,
    trailer,
)

NONCE = bytes(range(8))
KEY = bytes(range(32))


def a_page(structure: bytes = b"") -> np.ndarray:
    return np.frombuffer(structure.ljust(PAGE_BYTES, b"\0"), np.uint8).copy()


def a_record(**fields) -> RecordHeader:
    values = {"key": KEY, "page": 7, "length": 8192, "codec_id": 3, "sequence": 1 << 40, "crc32c": 0xDEADBEEF}
    return RecordHeader(**{**values, **fields})


def a_head() -> SegmentHead:
    return SegmentHead(nonce=NONCE, sequence=9, file_bytes=1 << 30)


def a_footer() -> SegmentFooter:
    return SegmentFooter(
        nonce=NONCE, sequence=9, last_sequence=99, entries=500, next_page=40, table_pages=5, table_crc32c=0xFEEDFACE
    )


def test_each_structure_is_decoded_unchanged():
    assert read_segment_head(a_page(segment_head(a_head()))) == a_head()
    assert read_record_header(a_page(record_header(a_record(), NONCE)), NONCE, 7) == a_record()
    assert read_trailer(a_page(trailer(a_footer()))) == a_footer()


def test_table_is_decoded_unchanged():
    chance = random.Random(1)
    keys = [chance.randbytes(32) for _ in range(300)]
    pages, lengths = array("I", range(300)), array("I", range(1000, 1300))

    rows = table(keys, pages, lengths)

    assert len(rows) == (footer_pages(300) - 1) * PAGE_BYTES
    assert read_table(np.frombuffer(rows, np.uint8), 300) == (keys, pages, lengths)


@pytest.mark.parametrize(
    ("structure", "read"),
    [
        (segment_head(a_head()), read_segment_head),
        (record_header(a_record(), NONCE), lambda page: read_record_header(page, NONCE, 7)),
        (trailer(a_footer()), read_trailer),
    ],
    ids=["head", "header", "trailer"],
)
def test_flipped_bit_makes_a_structure_invalid(structure, read):
    for bit in range(8 * len(structure)):
        page = a_page(structure)
        page[bit // 8] ^= 1 << bit % 8
        assert read(page) is None


@pytest.mark.parametrize(
    "page", [a_page(), a_page(b"\xff" * PAGE_BYTES), a_page(random.Random(2).randbytes(PAGE_BYTES))]
)
def test_other_page_is_no_structure(page):
    assert read_segment_head(page) is None
    assert read_record_header(page, NONCE, 7) is None
    assert read_record_header(page, bytes(8), 0) is None
    assert read_trailer(page) is None
    assert not is_discarded(page)


def test_record_with_another_nonce_or_page_is_invalid():
    page = a_page(record_header(a_record(), NONCE))

    assert read_record_header(page, bytes(8), 7) is None
    assert read_record_header(page, NONCE, 8) is None


def test_another_version_is_reported_as_newer_format():
    body = HEAD.pack(b"FleetSeg", 2, NONCE, 9, 1 << 30)
    with pytest.raises(NewerSegmentFormat):
        read_segment_head(a_page(body + google_crc32c.value(body).to_bytes(4, "little")))


def test_record_signs_match_the_header():
    header = record_header(a_record(), NONCE)
    begin, nonce_at = record_signs()

    assert header.startswith(begin)
    assert header[nonce_at] == NONCE


def test_segment_format_has_not_changed():
    """Compare encoded structures with fixed bytes: if they change, `record_format.FORMAT_VERSION` has to change, too."""
    assert (HEAD.size, RECORD.size, ENTRY.size, TRAILER.size) == (40, 68, 40, 56)
    assert segment_head(a_head()).hex() == (
        "466c6565745365670100000000000000000102030405060709000000000000000000004000000000b48ea0d7"
    )
    assert record_header(a_record(), NONCE).hex() == (
        "465265630100030000010203040506070000000000010000000102030405060708090a0b"
        "0c0d0e0f101112131415161718191a1b1c1d1e1f0700000000200000efbeaddea94591e8"
    )
    assert trailer(a_footer()).hex() == (
        "466c656574456e6401000000000000000001020304050607090000000000"
        "00006300000000000000f40100002800000005000000cefaedfeeb18e539"
    )
