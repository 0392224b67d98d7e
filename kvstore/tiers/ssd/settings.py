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
"""Space in each directory that segments leave free: for the directory itself, the lock file and the probe file."""

MIN_SEGMENTS = 2
"""Minimum number of segments for which each directory must have room: while one segment is written, blocks are read
from the other."""


class Sync(StrEnum):
    """When written bytes are synced to the device (`SsdSettings.sync`).

    Bytes that are not synced survive the death of the process, but not a power cut.
    """

    NEVER = "never"
    SEGMENT = "segment"
    WRITE = "write"


class SegmentEviction(StrEnum):
    """Which segment is evicted first; `kvstore.tiers.ssd.segments.eviction` has the scores."""

    REUSE = "reuse"
    LEAST_RECENT = "least_recent"
    OLDEST = "oldest"


class SsdSettings(TierSettings, frozen=True, kw_only=True, tag="ssd"):
    """Settings of the SSD tier. A wrong field raises a `ValueError` that names it."""

    directories: tuple[str, ...]
    """One directory for each SSD; blocks are spread over them. Missing directories are made. The file ``lock`` in a
    directory ensures that only one process uses it. Do not delete a directory while a node uses it, because a second
    node could then use a new directory of the same name. Files named ``segment-`` and six digits belong to the tier.
    Other files, folders and links are left alone, and count towards `capacity_bytes`."""

    capacity_bytes: Annotated[int, Meta(ge=MIB)] = 8 * GIB
    """Maximum disk space of all directories together, as ``du`` reports it, divided equally among them."""

    segment_bytes: Annotated[int, Meta(ge=64 << 10, le=2 * GIB)] = 128 * MIB
    """Size of one segment file, whose space is allocated at once. Eviction frees whole segments: with small segments,
    fewer blocks are lost at a time. Large segments need fewer open files. A segment should have at least four times the
    size of the largest block."""

    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Maximum number of disk operations at a time. More operations gained nothing on the SSDs measured so far. Each
    operation has a few MiB of buffers."""

    batch_bytes: Annotated[int, Meta(ge=64 << 10, le=64 * MIB)] = 4 * MIB
    """Maximum number of bytes that one system call reads or writes, unless a single block is larger."""

    max_calls: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Maximum number of calls of the tier that run at a time. Further calls of `get` and `put` end at once without
    reading or writing a block, so that calls do not pile up on a hanging disk."""

    direct: bool = True
    """Bypass the page cache (O_DIRECT) if the file system supports it. Often used blocks are in the node's pool already;
    a second copy in the page cache would only use memory."""

    sync: Sync = Sync.NEVER
    """When written bytes are synced to the device. ``segment`` syncs a segment when it is full, ``write`` syncs every
    write. With ``never``, a power cut can lose or damage blocks; checksums detect the damage, and the blocks are
    computed again."""

    eviction: SegmentEviction = SegmentEviction.REUSE
    """Which segment is evicted first: with ``reuse``, a segment whose blocks were read seldom and long ago; with
    ``least_recent``, the least recently used segment; with ``oldest``, the segment that was written first."""

    rescue_hits: Annotated[int, Meta(ge=0, le=255)] = 2
    """Blocks with at least this many reads are copied out of a segment before its eviction, if the write budget allows it.
    0: no block is copied."""

    rescue_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.25
    """Largest share of a segment's bytes that is copied out of it. The copied blocks are in memory until they are
    written to the next segment."""

    def __post_init__(self) -> None:
        if not self.directories:
            raise ValueError("directories: at least one is needed")
        for index, directory in enumerate(self.directories):
            if not PurePosixPath(directory).is_absolute():
                raise ValueError(f"directories[{index}]: {directory!r} is not an absolute path")
        if len(set(self.directories)) != len(self.directories):
            raise ValueError("directories: a directory is listed twice")
        if self.segment_bytes % PAGE_BYTES:
            raise ValueError(f"segment_bytes: {self.segment_bytes} is not a multiple of {PAGE_BYTES}")
        if self.share_bytes < (needed := FOLDER_BYTES + MIN_SEGMENTS * footprint(self.segment_bytes)):
            raise ValueError(
                f"capacity_bytes: {self.share_bytes} bytes per directory do not hold {MIN_SEGMENTS} segments of "
                f"{self.segment_bytes} bytes; use at least {needed * len(self.directories)}, or smaller segments"
            )

    @property
    def share_bytes(self) -> int:
        """Maximum disk space of each directory in bytes."""
        return self.capacity_bytes // len(self.directories)


def footprint(file_bytes: int) -> int:
    """Return the maximum space that a file of that size occupies, including the file system's own blocks for it.

    ext4 lists the extents of a file in blocks of 4 KiB, each of which has room for 340 extents. A segment that is
    written in a random order may need one extent for every two records. 1/128 of the file's size is enough for this,
    even if all records have the smallest size of two pages.
    """
    return file_bytes + max(file_bytes // 128, 32 << 10)
