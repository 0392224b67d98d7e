"""Child process for the supervisor's tests: ``serve | stubborn | exit STATUS LINE | family FILE | loading FILE | shared FILE | beat |
compute | slow SECONDS | phases FOLDER``.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

from fleet.local.heartbeat import send_heartbeats
from fleet.local.process_group import die_with_parent

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def main() -> None:
    how, *rest = sys.argv[1:-4]
    _, ready_fd, _, parent = sys.argv[-4:]
    die_with_parent(int(parent))
    os.set_inheritable(int(ready_fd), False)
    kept = None
    match how:
        case "exit":
            print(rest[1], file=sys.stderr)
            sys.exit(int(rest[0]))
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "family" | "loading":
            relatives = [subprocess.Popen([sys.executable, "-c", STUBBORN]) for _ in range(2)]
            Path(rest[0]).write_text("\n".join(str(each.pid) for each in relatives))
        case "shared":
            kept = shared_memory.SharedMemory(create=True, size=4096)
            Path(rest[0]).write_text(kept.name)
        case "phases":
            tell_phases(int(ready_fd), Path(rest[0]))
    if how == "slow":
        time.sleep(float(rest[0]))
    if how in ("beat", "compute", "slow"):
        asyncio.run(stay_alive(int(ready_fd), computes=how == "compute"))
    if how != "loading":
        say_ready(int(ready_fd))
        os.close(int(ready_fd))
    while True:
        signal.pause()


def tell_phases(ready_fd: int, folder: Path) -> None:
    """Enter each phase of a start when the test has made a file with its name."""
    for phase in ("loading", "warming up", "serving"):
        while not (folder / phase).exists():
            time.sleep(0.02)
        if phase != "serving":
            os.write(ready_fd, f"# {phase}\n".encode())


def say_ready(ready_fd: int) -> None:
    os.write(ready_fd, json.dumps({"grpc": f"pid-{os.getpid()}"}).encode() + b"\n")


async def stay_alive(ready_fd: int, *, computes: bool) -> None:
    """Send heartbeats until SIGUSR1 blocks the event loop; with `computes`, use a part of a core meanwhile."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: time.sleep(3600))
    say_ready(ready_fd)
    send_heartbeats(ready_fd)
    while computes:
        sum(range(200_000))
        await asyncio.sleep(0.05)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
