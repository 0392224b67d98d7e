"""Process groups: end a process and everything that it has started (Linux).

An engine is several processes: vLLM's worker process starts an engine core, which starts more. If the first one is
killed, the others continue and hold memory and ports. All of them are in one process group, whose leader is a direct
child of the supervisor, so the supervisor ends the group.

One kind of member is spared: the resource tracker of `multiprocessing`. It waits until every process that uses it has
ended, removes the shared memory that they left behind, and ends. Killing it would leak shared memory.

Only the standard library is imported, so that the orphan reaper stays small.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TRACKERS_WITHIN = 5.0  # seconds for resource trackers to unlink what is left
POLL = 0.02  # seconds between two checks of a group that is ending

_PR_SET_PDEATHSIG = 1


def kill_group(group: int) -> Iterator[float]:
    """Kill all members, wait for their resource trackers, and end when no member is left.

    It takes at most `TRACKERS_WITHIN` seconds, plus the kernel's time to end processes.

    Yields:
        Seconds to wait before the next check, so that each caller can wait in its own way.
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
    """End a group as `kill_group` does, without an event loop; blocks."""
    for pause in kill_group(group):
        time.sleep(pause)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; call it at the start of a child process.

    The kernel guarantees it (PR_SET_PDEATHSIG), however the parent ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before `prctl` took effect
        os.kill(os.getpid(), signal.SIGKILL)


def members(group: int) -> list[int]:
    """Return the living processes of a group; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # the process ended after the folder was listed
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
