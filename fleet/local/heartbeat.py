"""Heartbeats: sends heartbeats from a child's event loop to its supervisor, and samples the state of a child.

Heartbeats go through the readiness pipe. They are needed because a process that is stopped, or whose event loop is
stuck, keeps its sockets open, so its connections do not show that it hangs. With `socket.SO_REUSEPORT` it also keeps
getting its share of new connections.
`fleet.local.liveness` judges the heartbeats and the samples.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from fleet.core.clock import SECOND, Nanos
from fleet.local.liveness import HEARTBEAT_INTERVAL, ProcessSample


def send_heartbeats(descriptor: int) -> None:
    """Send a heartbeat every `HEARTBEAT_INTERVAL` while the event loop runs.

    Skip a heartbeat if the pipe is full because the supervisor does not read it, or if the supervisor has closed it.
    """
    os.set_blocking(descriptor, False)
    loop = asyncio.get_running_loop()

    def again() -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b".")
        loop.call_later(HEARTBEAT_INTERVAL / SECOND, again)

    again()


def sample_process(pid: int) -> ProcessSample | None:
    """Return the state of a process as the kernel reports it; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    # A kernel that does not count `ran` and `waited` has no file `schedstat`. Both are then 0, and time in which the process
    # waits for a core counts as silence, too.
    scheduled = "0 0 0"
    with suppress(OSError):
        scheduled = Path(f"/proc/{pid}/schedstat").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "?")[0]
    ran, waited, _ = map(int, scheduled.split())
    return ProcessSample(
        stopped=state == "T",
        traced=fields.get("TracerPid", "0") != "0",
        runnable=state == "R" and ran > 0,
        ran=Nanos(ran),
        waited=Nanos(waited),
    )
