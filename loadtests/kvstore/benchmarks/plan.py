"""How much a run of the benchmark does."""

from pathlib import Path

from msgspec import Struct

KIB = 1 << 10
MIB = 1 << 20


class BenchmarkPlan(Struct, frozen=True, kw_only=True):
    rounds: int = 5
    block_sizes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
    moved_bytes: int = 128 * MIB  # a round, to and from memory
    disk_bytes: int = 512 * MIB  # a round
    disk_sizes: tuple[int, ...] = (256 * KIB, MIB, 4 * MIB)  # of blocks there
    crossing_bytes: int = 256 * MIB  # from process to process
    keys: int = 1_000_000  # whose memory is measured
    disk_threads: int = 4
    folder: Path = Path("/tmp")  # on the disk that is measured
    traces: Path | None = None  # folder of the public traces; None: the cut that is in the tests

    def blocks(self, block_bytes: int) -> int:
        return max(1, self.moved_bytes // block_bytes)


def quick(folder: Path, traces: Path | None) -> BenchmarkPlan:
    """A few minutes instead of half an hour, for seeing that everything runs; too short for figures to quote."""
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
