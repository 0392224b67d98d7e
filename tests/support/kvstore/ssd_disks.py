"""SSD tiers for tests, with valid default settings, on disks that fail when a test demands it."""

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.clock import SECOND, Nanos
from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey, BlockOutcome, FetchResult
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.ssd.disk import Disk, DiskFile, DiskSpace, aligned, open_disk
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.tier import SsdTier
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, deadline_in, put_blocks

SEGMENT_BYTES = 256 << 10
PER_SEGMENT = 20  # records of BLOCK_BYTES, three pages each, between one header page and two footer pages
RECORD_BYTES = BLOCK_BYTES + PAGE_BYTES
DIGEST = b"namespace-digest"


class DiskFaults:
    """Holds the faults of all disks that were opened with this object; by default, there are none."""

    def __init__(self) -> None:
        self.reads = 0
        self.writes = 0
        self.heal()

    def heal(self) -> None:
        """Remove all faults."""
        self.read_error: Callable[[str, int], OSError | None] = lambda name, offset: None
        self.write_error: Callable[[str, int], OSError | None] = lambda name, offset: None
        self.create_error: OSError | None = None
        self.start_errors: dict[str, OSError] = {}  # by the operation that fails (`fail_start`)
        self.space: DiskSpace | None = None  # free bytes to report; None: the file system's own answer
        self.torn = False  # True: a failing write has written its first half
        self.before_read: Callable[[str, int], None] = lambda name, offset: None
        self.before_write: Callable[[str, int], None] = lambda name, offset: None
        # This function may change the bytes that were read.
        self.read_all: Callable[[Sequence[np.ndarray]], None] = lambda pieces: None

    def fail_reads(self, code: int = errno.EIO) -> None:
        self.read_error = lambda name, offset: OSError(code, "injected")

    def fail_writes(self, code: int = errno.EIO) -> None:
        self.write_error = lambda name, offset: OSError(code, "injected")

    def fail_start(self, operation: str, error: OSError) -> None:
        """Let an operation fail that a tier performs at its start: open, foreign_bytes, segments or space."""
        self.start_errors[operation] = error

    def check(self, operation: str) -> None:
        """Raise the error that `fail_start` set for this operation, if there is one."""
        if operation in self.start_errors:
            raise self.start_errors[operation]

    def disk(self, folder: str) -> Disk:
        self.check("open")
        return FaultyDisk(open_disk(folder, direct=True), self)


class FaultyDisk:
    def __init__(self, inner: Disk, faults: DiskFaults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def folder(self) -> str:
        return self._inner.folder

    def segments(self) -> list[str]:
        self._faults.check("segments")
        return self._inner.segments()

    def foreign_bytes(self) -> int:
        self._faults.check("foreign_bytes")
        return self._inner.foreign_bytes()

    def space(self) -> DiskSpace:
        self._faults.check("space")
        return self._faults.space or self._inner.space()

    def open(self, name: str) -> DiskFile:
        return FaultyFile(self._inner.open(name), name, self._faults)

    def create(self, name: str, size_bytes: int) -> DiskFile:
        if self._faults.create_error is not None:
            raise self._faults.create_error
        return FaultyFile(self._inner.create(name, size_bytes), name, self._faults)

    def remove(self, name: str) -> None:
        self._inner.remove(name)

    def close(self) -> None:
        self._inner.close()


class FaultyFile:
    def __init__(self, inner: DiskFile, name: str, faults: DiskFaults) -> None:
        self._inner = inner
        self._name = name
        self._faults = faults

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read(self, into: Sequence[np.ndarray], offset: int) -> int:
        self._faults.before_read(self._name, offset)
        self._faults.reads += 1
        if (error := self._faults.read_error(self._name, offset)) is not None:
            for piece in into:
                piece[:] = 0xEE  # a failed read leaves undefined bytes
            raise error
        count = self._inner.read(into, offset)
        self._faults.read_all(into)
        return count

    def write(self, parts: Sequence[np.ndarray], offset: int) -> None:
        self._faults.before_write(self._name, offset)
        self._faults.writes += 1
        if (error := self._faults.write_error(self._name, offset)) is not None:
            if self._faults.torn:
                self._inner.write(_first_half(parts), offset)
            raise error
        self._inner.write(parts, offset)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class HoldPoint:
    """Function that blocks its callers until a test calls `open`; `wait` returns when a caller has arrived."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, name: str = "", offset: int = 0) -> None:
        self._reached.set()
        assert self._open.wait(30), "the hold point was not opened"

    def wait(self) -> None:
        assert self._reached.wait(30), "nothing reached the hold point"

    def open(self) -> None:
        self._open.set()


class ShiftedClock:
    """The real clock plus a time that the test sets."""

    def __init__(self) -> None:
        self._clock = MonotonicClock()
        self.ahead = 0

    def now(self) -> Nanos:
        return Nanos(self._clock.now() + self.ahead)

    def advance(self, seconds: float) -> None:
        self.ahead += round(seconds * SECOND)


def ssd_settings(*folders: Path, **fields: Any) -> SsdSettings:
    defaults: dict[str, Any] = {
        "directories": tuple(str(folder) for folder in folders),
        "capacity_bytes": 2 << 20,
        "segment_bytes": SEGMENT_BYTES,
    }
    return SsdSettings(**{**defaults, **fields})


def a_tier(
    *folders: Path,
    faults: DiskFaults | None = None,
    clock: Any = None,
    score: Any = None,
    admit_rewrite: Any = None,
    **fields: Any,
) -> SsdTier:
    """Open a tier that holds about 100 blocks, in five or six segments."""
    more = {} if admit_rewrite is None else {"admit_rewrite": admit_rewrite}
    return SsdTier.open(
        ssd_settings(*folders, **fields),
        codecs=lambda digest: PlainCodec(),
        clock=clock or MonotonicClock(),
        disks=faults.disk if faults is not None else None,
        score=score,
        **more,
    )


def keys_of(count: int, of: str = "a", first: int = 0) -> list[BlockKey]:
    return [BlockKey(DIGEST, name) for name in a_chain(first + count, of)[first:]]


def content_of(key: BlockKey, length: int = BLOCK_BYTES) -> np.ndarray:
    """Return the content of the block with this key, which all tests use."""
    return a_block(int.from_bytes(key.name, "big"), length)


def buffers(count: int, length: int) -> list[np.ndarray]:
    """Return buffers of which every other one is page-aligned, as in a node's pool."""
    stride = -(-length // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    memory = aligned(max(count, 1) * stride)
    return [memory[index * stride + index % 2 * 7 :][:length] for index in range(count)]


def put(
    tier: SsdTier, keys: Sequence[BlockKey], length: int = BLOCK_BYTES, deadline: Nanos | None = None
) -> list[bool]:
    blocks = buffers(len(keys), length)
    for key, block in zip(keys, blocks, strict=True):
        block[:] = content_of(key, length)
    return put_blocks(tier, keys, blocks, deadline or deadline_in())


def get(
    tier: SsdTier, keys: Sequence[BlockKey], length: int = BLOCK_BYTES, deadline: Nanos | None = None
) -> list[BlockOutcome]:
    """Read blocks and return the outcomes; compare the bytes of each hit."""
    into = buffers(len(keys), length)
    answers: list[FetchResult] = tier.get(keys, into, deadline or deadline_in())
    for key, block, answer in zip(keys, into, answers, strict=True):
        if answer.outcome is BlockOutcome.MOVED:
            assert np.array_equal(block, content_of(key, length)), f"wrong bytes for {key}"
    return [answer.outcome for answer in answers]


def readable_keys(tier: SsdTier, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the keys whose blocks can be read."""
    return [key for key, outcome in zip(keys, get(tier, keys), strict=True) if outcome is BlockOutcome.MOVED]


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def used_bytes(folder: Path) -> int:
    """Return the allocated bytes, like ``du``."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def record_at(folder: Path, key: BlockKey) -> tuple[Path, int]:
    """Return the file and the offset of a block's record; the record is found by its header."""
    for path in segment_files(folder):
        content = path.read_bytes()
        for page in range(0, len(content), PAGE_BYTES):
            if content[page : page + 4] == b"FRec" and content[page + 24 : page + 56] == key.digest + key.name:
                return path, page
    raise AssertionError(f"no record of {key} in {folder}")


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def _first_half(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    whole = np.concatenate(parts)
    half = len(whole) // 2 // PAGE_BYTES * PAGE_BYTES
    copy = aligned(max(half, PAGE_BYTES))
    copy[:half] = whole[:half]
    return [copy[:half]] if half else []
