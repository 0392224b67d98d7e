"""Benchmark of the SSD tier against direct I/O with the same number of threads on the same file system."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvstore.buffers import ByteArray, crc32c
from kvstore.clock import Nanos, nanos
from kvstore.codecs.plain import PlainCodec
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tiers.ssd.tier import SsdTier
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.benchmarks.memory import chains, content, label, named, speed, untouched
from loadtests.kvstore.benchmarks.plan import BenchmarkPlan
from loadtests.kvstore.compared.systems import GIGABYTE, ComparedSystems
from loadtests.kvstore.comparison import BenchmarkLine, Contestant, LineDirection

CALL_SECONDS = 120.0
SEGMENTS = 16  # capacity of the tier, in segments; a round fills four, so a later round removes whole segments
CLOCK = MonotonicClock()
LOOP = "O_DIRECT loop"


@contextmanager
def lines(plan: BenchmarkPlan, peers: ComparedSystems) -> Iterator[list[BenchmarkLine]]:
    """Yield lines for writes and reads; the files are removed when the context ends."""
    with ExitStack() as held:
        found = []
        for block_bytes in plan.disk_sizes:
            ends = _DiskContestants(plan, block_bytes)
            held.callback(ends.close)
            loops: dict[str, Contestant] = {"write": ends.loop_write, "read": ends.loop_read}
            contestants: dict[str, Contestant] = {"write": ends.tier_write, "read": ends.tier_read}
            others = {
                "write": peers.disk_write(block_bytes, ends.blocks, plan.disk_threads),
                "read": peers.disk_read(block_bytes, ends.blocks, plan.disk_threads),
            }
            for kind in ("write", "read"):
                fio = ends.fio(kind)
                found.append(
                    BenchmarkLine(
                        name=f"SSD {kind} {label(block_bytes)}",
                        unit="GB/s",
                        better=LineDirection.MORE,
                        limit=fio or loops[kind],
                        limit_is=f"{'fio' if fio else LOOP}, {plan.disk_threads} threads",
                        fleet=contestants[kind],
                        peers=others[kind] | ({LOOP: loops[kind]} if fio else {}),
                    )
                )
        yield found


def open_tier(folder: Path, capacity_bytes: int, segment_bytes: int, threads: int) -> SsdTier:
    settings = SsdSettings(
        directories=(str(folder),), capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, threads=threads
    )
    return SsdTier.open(settings, codecs=lambda _: PlainCodec(), clock=CLOCK)


def soon() -> Nanos:
    return Nanos(CLOCK.now() + nanos(CALL_SECONDS))


class _DiskContestants:
    """The contestants for one block size: the SSD tier, a loop of direct I/O, and fio if it is installed."""

    def __init__(self, plan: BenchmarkPlan, block_bytes: int):
        self._block_bytes = block_bytes
        self.blocks = plan.disk_bytes // block_bytes
        self._total = self.blocks * block_bytes
        self._threads = plan.disk_threads
        self._folder = plan.folder
        self._digest = named(block_bytes).digest
        self._chains = chains(self.blocks)
        self._held: list[BlockKey] = []
        self._kept: tuple[SsdTier, ByteArray, ByteArray] | None = None

    def tier_write(self) -> float:
        tier, source, _ = self._open()
        keys = [BlockKey(self._digest, name) for name in next(self._chains)]
        # The checksums are computed before the measured time, because a node gets them from the writer of the blocks.
        sums = [crc32c([block]) for block in source]

        def put() -> None:
            kept = tier.put(keys, list(source), soon(), sums)
            assert all(kept), f"{kept.count(False)} of {len(kept)} blocks were not kept: {tier.status()}"

        figure = speed(self._total, put)
        self._held = keys
        return figure

    def tier_read(self) -> float:
        tier, _, room = self._open()
        if not self._held:
            self.tier_write()

        def get() -> None:
            arrived = tier.get(self._held, list(room), soon())
            assert all(each.outcome is BlockOutcome.MOVED for each in arrived), "a block is not there"

        return speed(self._total, get)

    def loop_write(self) -> float:
        _, source, _ = self._open()
        file = self._file(fresh=True)
        try:
            return speed(self._total, lambda: self._in_threads(lambda index: _write(file, source[index], index)))
        finally:
            os.close(file)

    def loop_read(self) -> float:
        _, _, room = self._open()
        if not self._path.exists():
            self.loop_write()
        file = self._file(fresh=False)
        try:
            return speed(self._total, lambda: self._in_threads(lambda index: _read(file, room[index], index)))
        finally:
            os.close(file)

    def fio(self, kind: str) -> Contestant | None:
        program = shutil.which("fio")
        if program is None:
            return None

        def run() -> float:
            command = [program, "--name=bench", f"--rw={kind}", f"--bs={self._block_bytes}", "--direct=1"]
            command += ["--ioengine=psync", "--thread", f"--numjobs={self._threads}", "--output-format=json"]
            command += [f"--size={self._total // self._threads}", f"--directory={self._folder}", "--group_reporting"]
            command += ["--fallocate=native", *(["--unlink=1"] if kind == "write" else [])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
            if done.returncode:
                raise SystemUnavailable(f"fio: {done.stderr.strip()[:200]}")
            (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            return float(job[kind]["bw_bytes"]) / GIGABYTE

        return run

    def close(self) -> None:
        if self._kept is not None:
            self._kept[0].close()
        shutil.rmtree(self._folder / f"ssd-{self._block_bytes}", ignore_errors=True)
        self._path.unlink(missing_ok=True)
        for path in self._folder.glob("bench.*"):  # files that fio has left
            path.unlink()

    @property
    def _path(self) -> Path:
        return self._folder / f"raw-{self._block_bytes}"

    def _open(self) -> tuple[SsdTier, ByteArray, ByteArray]:
        if self._kept is None:
            source, room = (untouched(self._block_bytes, self.blocks) for _ in range(2))
            source[:] = content(self._block_bytes, self.blocks)
            room[:] = 1
            segment = max(self._total // 4, 8 * self._block_bytes)
            folder = self._folder / f"ssd-{self._block_bytes}"
            self._kept = open_tier(folder, segment * SEGMENTS, segment, self._threads), source, room
        return self._kept

    def _file(self, *, fresh: bool) -> int:
        if fresh:
            self._path.unlink(missing_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        if fresh:
            os.posix_fallocate(file, 0, self._total)
        return file

    def _in_threads(self, act: Callable[[int], None]) -> None:
        def work(first: int) -> None:
            for index in range(first, self.blocks, self._threads):
                act(index)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _write(file: int, block: ByteArray, index: int) -> None:
    written = os.pwritev(file, [block.data], index * block.nbytes)
    assert written == block.nbytes, f"{written} of {block.nbytes} bytes were written"


def _read(file: int, room: ByteArray, index: int) -> None:
    count = os.preadv(file, [room.data], index * room.nbytes)
    assert count == room.nbytes, f"{count} of {room.nbytes} bytes were read"
