"""Settings of the SSD tier."""

from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated

from msgspec import Meta

from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.settings import TierSettings

MIB = 1 << 20
GIB = 1 << 30

FOLDER_BYTES = 128 << 10
"""Kept free of segments in each directory: for the directory itself, the lock file and the probe."""

MIN_SEGMENTS = 2
"""In each directory: one that is written to, and one that blocks are read from while the other is emptied."""


class Sync(StrEnum):
    """When the device is told to make written bytes survive a power cut. A killed process loses nothing in any case."""

    NEVER = "never"
    SEGMENT = "segment"
    WRITE = "write"


class SegmentEviction(StrEnum):
    """Which segment goes first when the space is used up; see `kvstore.tiers.ssd.segments.eviction`."""

    REUSE = "reuse"
    LEAST_RECENT = "least_recent"
    OLDEST = "oldest"


class SsdSettings(TierSettings, frozen=True, kw_only=True, tag="ssd"):
    """What the SSD tier is told. Refused as a whole when a field is wrong (`ValueError` names it)."""

    directories: tuple[str, ...]
    """Where segments lie, one directory an SSD; blocks are spread over them. Made if missing. Each belongs to one
    process at a time; files of others in it are left alone, and count towards the cap."""

    capacity_bytes: Annotated[int, Meta(ge=MIB)] = 8 * GIB
    """The most that all directories together ever occupy on disk, as ``du`` tells it, in equal parts."""

    segment_bytes: Annotated[int, Meta(ge=64 << 10, le=2 * GIB)] = 128 * MIB
    """Size of one file, taken from the file system as a whole. Space is won back by segments: small ones lose fewer
    blocks at a time, large ones need fewer open files. At least four times the largest block is sensible."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Operations on disk at a time. More than this wins nothing on the SSDs seen so far; each has a few MiB of buffers."""

    batch_bytes: Annotated[int, Meta(ge=64 << 10, le=64 * MIB)] = 4 * MIB
    """The most that one system call reads or writes, unless a single block is larger."""

    max_calls: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Calls that may be in the tier at once; one more is answered with misses, so that nothing piles up on a disk that
    hangs."""

    direct: bool = True
    """Go around the page cache (O_DIRECT) where the file system can. Blocks that are read often are in the node's pool;
    a second copy in the page cache would take memory from others."""

    sync: Sync = Sync.NEVER
    """``never``: what is kept is a cache, every block carries its checksum, and a power cut costs blocks that are
    computed again. ``segment`` syncs a segment that is full, ``write`` every write."""

    eviction: SegmentEviction = SegmentEviction.REUSE
    """Which segment goes first. ``reuse`` weighs how often blocks of a segment were read against how long ago."""

    rescue_hits: Annotated[int, Meta(ge=0, le=255)] = 2
    """Blocks read this often since they were written are copied out of a segment that goes, as far as the write budget
    admits it. 0: none."""

    rescue_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.25
    """The most of a segment that is copied out of it; what is copied is in memory for a moment."""

    def __post_init__(self) -> None:
        if not self.directories:
            raise ValueError("directories: at least one is needed")
        for index, directory in enumerate(self.directories):
            if not PurePosixPath(directory).is_absolute():
                raise ValueError(f"directories[{index}]: {directory!r} is not an absolute path")
        if len(set(self.directories)) != len(self.directories):
            raise ValueError("directories: one is named twice")
        if self.segment_bytes % PAGE_BYTES:
            raise ValueError(f"segment_bytes: {self.segment_bytes} is not a multiple of {PAGE_BYTES}")
        if self.share_bytes < (needed := FOLDER_BYTES + MIN_SEGMENTS * footprint(self.segment_bytes)):
            raise ValueError(
                f"capacity_bytes: {self.share_bytes} a directory does not hold {MIN_SEGMENTS} segments of "
                f"{self.segment_bytes}; use at least {needed * len(self.directories)}, or smaller segments"
            )

    @property
    def share_bytes(self) -> int:
        """Cap of each directory."""
        return self.capacity_bytes // len(self.directories)


def footprint(file_bytes: int) -> int:
    """The most that a file of that size occupies, the file system's own blocks for it included.

    ext4 keeps a tree of extents, 340 to a block of 4 KiB; a segment that is written in scattered pieces would need one
    for each two records. 1/128 covers records of two pages, the smallest there are.
    """
    return file_bytes + max(file_bytes // 128, 32 << 10)
