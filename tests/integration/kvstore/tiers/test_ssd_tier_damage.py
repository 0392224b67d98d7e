"""Tests of random damage to segment files: every answer is right or a miss."""

import random
from pathlib import Path

import pytest

from kvstore.messages import BlockOutcome
from kvstore.pool.extents import PAGE_BYTES
from tests.support.kvstore.ssd_disks import (
    PER_SEGMENT,
    SEGMENT_BYTES,
    a_tier,
    get,
    keys_of,
    overwrite,
    put,
    segment_files,
)

ROUNDS = 60


def flipped_bits(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 40)):
        if content:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def flipped_bits_in_metadata(path: Path, chance: random.Random) -> None:
    """Flip bits in heads, headers and footers, which random places rarely hit."""
    content = bytearray(path.read_bytes())
    pages = [p for p in range(0, len(content), PAGE_BYTES) if content[p : p + 4] in (b"FRec", b"Flee", b"Gone")]
    for page in chance.sample(pages, min(len(pages), 5)):
        content[page + chance.randrange(90)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def overwritten_pages(path: Path, chance: random.Random) -> None:
    size = path.stat().st_size
    if size > PAGE_BYTES:
        overwrite(path, chance.randrange(size), chance.randbytes(chance.randrange(1, 3 * PAGE_BYTES)))
        with path.open("r+b") as file:
            file.truncate(size)


def zeroed_pages(path: Path, chance: random.Random) -> None:
    pages = path.stat().st_size // PAGE_BYTES
    for _ in range(min(3, pages)):
        overwrite(path, chance.randrange(pages) * PAGE_BYTES, bytes(PAGE_BYTES))


def moved_pages(path: Path, chance: random.Random) -> None:
    """Move pages like a disk that writes or reads in the wrong place."""
    content = path.read_bytes()
    pages = len(content) // PAGE_BYTES
    for _ in range(min(6, pages)):
        origin = chance.randrange(pages) * PAGE_BYTES
        overwrite(path, chance.randrange(pages) * PAGE_BYTES, content[origin : origin + PAGE_BYTES])


def cut_short(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size + 1))


def swapped_with_another(path: Path, chance: random.Random) -> None:
    other = chance.choice(segment_files(path.parent))
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def written_over(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(SEGMENT_BYTES))


DAMAGES = [
    flipped_bits,
    flipped_bits_in_metadata,
    overwritten_pages,
    zeroed_pages,
    moved_pages,
    cut_short,
    swapped_with_another,
    written_over,
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("while_open", [True, False], ids=["while open", "between two openings"])
def test_damage_never_becomes_a_wrong_byte(tmp_path, seed, while_open):
    chance = random.Random(seed)
    names = [key for number in range(4) for key in keys_of(PER_SEGMENT, f"n{number}")]
    damaged = right = corrupt = 0
    tier = a_tier(tmp_path)
    for _ in range(ROUNDS):
        put(tier, chance.sample(names, 20))
        if not while_open:
            tier.close()
        for _ in range(chance.randrange(3)):
            if files := [path for path in segment_files(tmp_path) if path.stat().st_size]:
                chance.choice(DAMAGES)(chance.choice(files), chance)
                damaged += 1
        if not while_open:
            tier = a_tier(tmp_path)
        outcomes = get(tier, names)  # fails on a wrong byte
        right += outcomes.count(BlockOutcome.MOVED)
        corrupt += tier.status().corrupt if not while_open else 0
        tier.check()
    corrupt = tier.status().corrupt if while_open else corrupt
    tier.close()

    assert damaged > 30
    assert right > 10 * ROUNDS, "the undamaged blocks are served"
    assert corrupt > 0


def test_a_single_flipped_bit_anywhere_in_a_record_is_found(tmp_path):
    chance = random.Random(7)
    tier = a_tier(tmp_path)
    (key,) = keys_of(1)
    found = 0
    for _ in range(200):
        put(tier, [key])
        place = tier.state.index.find(key.digest + key.name)
        inside_header = chance.random() < 0.3
        at = chance.randrange(72) if inside_header else PAGE_BYTES + chance.randrange(place.length)
        path = tmp_path / place.segment.name
        offset = place.page * PAGE_BYTES + at
        content = path.read_bytes()
        overwrite(path, offset, bytes([content[offset] ^ 1 << chance.randrange(8)]))
        found += get(tier, [key]) == [BlockOutcome.CORRUPT]

    assert found == tier.status().corrupt == 200
    tier.close()
