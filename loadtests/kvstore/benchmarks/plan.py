"""Plan of a benchmark run: sizes and counts of its work."""

from pathlib import Path

from msgspec import Struct

KIB = 1 << 10
MIB = 1 << 20


class BenchmarkPlan(Struct, frozen=True, kw_only=True):
    rounds: int = 5
    block_sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
    moved_bytes: int = 128 * MIB  # bytes that a put or a get in memory moves in one round
    disk_bytes: int = 512 * MIB  # bytes that are written to disk, or read from it, in one round
    disk_sizes: tuple[int, ...] = (256 * KIB, MIB, 4 * MIB)  # block sizes on disk
    crossing_bytes: int = 256 * MIB  # bytes that move between two processes in one round
    keys: int = 1_000_000  # number of block hashes whose memory is measured
    disk_threads: int = 4
    folder: Path = Path("/tmp")  # folder on the measured disk
    traces: Path | None = None  # folder of the public traces; None: the beginnings of traces in tests/data

    def blocks(self, block_bytes: int) -> int:
        return max(1, self.moved_bytes // block_bytes)


def quick(folder: Path, traces: Path | None) -> BenchmarkPlan:
    """Return a plan of a few minutes instead of half an hour, which shows that everything runs; its figures must not be quoted."""
    return BenchmarkPlan(
        rounds=3,
        block_sizes=(64 * KIB, MIB),
        disk_sizes=(MIB,),
        moved_bytes=32 * MIB,
        disk_bytes=64 * MIB,
        crossing_bytes=64 * MIB,
        keys=100_000,
        folder=folder,
        traces=traces,
    )
