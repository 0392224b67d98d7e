"""Tests of kill -9 during writes: everything that was kept is served again, and nothing else."""

import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.messages import BlockOutcome
from tests.support.kvstore.ssd_disks import a_tier, get, keys_of, put

ROUNDS = 8
CAPACITY = 8 << 20
SEGMENT = 512 << 10
PER_CALL = 10
LATEST = 100
"""Number of the latest blocks, which cannot have been evicted: a segment has 40."""

WRITER = """
import sys, threading
from pathlib import Path
from tests.support.kvstore.ssd_disks import a_tier, get, keys_of, put

folder, life = Path(sys.argv[1]), sys.argv[2]
tier = a_tier(folder, capacity_bytes=int(sys.argv[3]), segment_bytes=int(sys.argv[4]))
lock = threading.Lock()

def write(thread):
    for call in range(1_000_000):
        of = f"{life}{thread}"
        keys = keys_of(10, of, first=10 * call)
        kept = put(tier, keys)
        get(tier, keys[:2])
        with lock:
            for index, is_kept in enumerate(kept):
                if is_kept:
                    sys.stdout.write(f"{of} {10 * call + index}\\n")
            sys.stdout.flush()

for thread in range(2):
    threading.Thread(target=write, args=(thread,)).start()
"""


def written_until_killed(folder: Path, life: str, lines: int) -> list[tuple[str, int]]:
    """Run a writer, kill it after it has reported that many kept blocks, and return its report."""
    command = [sys.executable, "-c", WRITER, str(folder), life, str(CAPACITY), str(SEGMENT)]
    said = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        while said.count(b"\n") < lines:
            assert select.select([writer.stdout], [], [], 60)[0], "the writer does not write"
            chunk = writer.stdout.read1(4096)
            assert chunk, "the writer has ended by itself"
            said += chunk
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.read()
    whole = said[: said.rfind(b"\n")].decode().splitlines()
    return [(of, int(number)) for of, number in (line.split() for line in whole)]


@pytest.mark.timeout(300)
def test_blocks_kept_before_a_kill_are_served_after_it(tmp_path):
    chance = random.Random(11)
    history: list[tuple[str, int]] = []
    served = expected = 0
    for number in range(ROUNDS):
        history += written_until_killed(tmp_path, f"r{number}t", lines=chance.randrange(20, 400))
        tier = a_tier(tmp_path, capacity_bytes=CAPACITY, segment_bytes=SEGMENT)
        keys = [keys_of(1, of, first=index)[0] for of, index in history]

        outcomes = get(tier, keys)  # fails on a wrong byte

        assert BlockOutcome.CORRUPT not in outcomes, "opening the tier cuts off a torn record"
        latest = outcomes[-LATEST:]
        served += latest.count(BlockOutcome.MOVED)
        expected += len(latest)
        there = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is BlockOutcome.MOVED}
        assert there == set(tier.held()) & set(keys)
        assert get(tier, tier.held()).count(BlockOutcome.MOVED) == len(tier.held()), "unreported blocks are right too"
        put(tier, keys_of(PER_CALL, f"between{number}"))
        tier.check()
        tier.close()

    assert served == expected, f"{served} of {expected} completed writes are served again"
