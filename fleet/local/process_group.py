"""Ending a process and everything that it has started (Linux).

An engine is several processes: vLLM's worker process starts an engine core, which starts more. When the first of them is
killed the others go on, and hold memory and ports. All are in one process group, whose leader is a direct child of the
supervisor, so the group is what gets ended.

One kind of member is spared: `multiprocessing`'s resource tracker. It waits until every process that uses it is gone, then
removes the shared memory that they left behind, then ends by itself. Killing it is what leaks shared memory.

Only the standard library is imported, because the guardian (fleet.local.orphan_reaper) has to be small.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TRACKERS_WITHIN = 5.0  # seconds for resource trackers to unlink what is left
POLL = 0.02  # seconds between two looks at a group that is ending

_PR_SET_PDEATHSIG = 1


def kill_group(group: int) -> Iterator[float]:
    """Kill all members, let their resource trackers finish, and end when nobody is left.

    Takes at most `TRACKERS_WITHIN` seconds, plus what the kernel needs to end processes.

    Yields:
        Seconds to wait before the next look, so that each caller can wait in its own way.
    """
    looks = 0
    while there := members(group):
        late = looks * POLL > TRACKERS_WITHIN
        for pid in there:
            if late or not _is_tracker(pid):
                _kill(pid)
        looks += 1
        yield POLL


def end_group(group: int) -> None:
    """`kill_group` for callers without an event loop; blocks."""
    for pause in kill_group(group):
        time.sleep(pause)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, its parent, dies; for the start of a child process.

    The guarantee is the kernel's (PR_SET_PDEATHSIG), so it holds however the parent ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def members(group: int) -> list[int]:
    """Living processes of a group; zombies are dead, whoever forgets to reap them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # ended since the listing
        state, _parent, its_group = stat[stat.rindex(")") + 2 :].split()[:3]
        if int(its_group) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
