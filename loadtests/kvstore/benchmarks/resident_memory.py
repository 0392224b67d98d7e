"""Memory of many block hashes, measured in a process that does nothing else.

python -m loadtests.kvstore.benchmarks.resident_memory {fleet,dict} KEYS      prints bytes per key
"""

import gc
import hashlib
import subprocess
import sys
from pathlib import Path

from loadtests.kvstore.nodes import ROOT, environment

MEASURE_SECONDS = 600
BATCH = 512


def measured(what: str, keys: int) -> float:
    """Return the bytes per key, measured in a new process."""
    command = [sys.executable, "-m", "loadtests.kvstore.benchmarks.resident_memory", what, str(keys)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=MEASURE_SECONDS, check=True
    )
    return float(done.stdout)


def _names(start: int, count: int) -> list[bytes]:
    return [
        hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16).digest() for index in range(start, start + count)
    ]


def _fill_a_dict(keys: int) -> object:
    """Fill a dict from block hash to location, the smallest index that is possible in Python."""
    return {name: start + index for start in range(0, keys, BATCH) for index, name in enumerate(_names(start, BATCH))}


def _fill_a_machine(keys: int) -> object:
    """Fill a node's machine, without the bytes of the blocks."""
    from kvstore.clock import Nanos  # noqa: PLC0415 - measuring the dict must not load these
    from kvstore.eviction.lru import LruEviction  # noqa: PLC0415
    from kvstore.pool.extents import PAGE_BYTES  # noqa: PLC0415
    from kvstore.pool.machine import BlockMachine  # noqa: PLC0415
    from loadtests.kvstore.benchmarks.memory import named  # noqa: PLC0415

    namespace = named(PAGE_BYTES)
    machine = BlockMachine(keys * PAGE_BYTES, LruEviction(), epoch=1)
    now = Nanos(0)
    machine.open(namespace, now)
    for start in range(0, keys, BATCH):
        names = _names(start, min(BATCH, keys - start))
        reservation = machine.reserve(namespace.digest, names, owner="bench", lease=Nanos(1), now=now)
        checksums = {reserved.index: 7 for reserved in reservation.reserved}
        machine.publish(reservation.reservation_id, checksums, owner="bench", now=now)
        machine.commands()
        machine.changes()
    return machine


def _bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def main() -> None:
    what, keys = sys.argv[1], int(sys.argv[2])
    fill = {"dict": _fill_a_dict, "fleet": _fill_a_machine}[what]
    fill(BATCH)  # a small run first, so that memory that only the first use allocates is not counted
    gc.collect()
    before = _bytes()
    held = fill(keys)
    gc.collect()
    print((_bytes() - before) / keys)
    del held


if __name__ == "__main__":
    main()
