"""Process groups: end a process together with all processes that it has started (Linux).

An engine is several processes: vLLM's worker process starts an engine core, which starts more processes. If the worker
process is killed, the other processes continue to run, with their memory and ports. All of them are in one process group, whose
leader is a direct child of the supervisor. So the supervisor can end the whole group.

One kind of process is killed only after `TRACKERS_WITHIN`: the resource tracker of `multiprocessing`. It waits until
every process that uses it has ended, removes the shared memory that they left behind, and ends. Killing it earlier would
leak shared memory.

Only the standard library is imported, so that the orphan reaper stays small.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Seconds in which resource trackers have to remove leftover shared memory; they are killed after that.
TRACKERS_WITHIN = 5.0
POLL = 0.02  # seconds between two checks of a group that is ending

_PR_SET_PDEATHSIG = 1


def kill_group(group: int) -> Iterator[float]:
    """Kill all processes of a group, and return when none is left. Resource trackers first get `TRACKERS_WITHIN` to end.

    This takes at most `TRACKERS_WITHIN` seconds, plus the kernel's time to end processes.

    Yields:
        Number of seconds that the caller has to wait before it continues the generator.
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
    """End a process group as `kill_group` does, and block until it has ended. This is for callers without an event loop."""
    for pause in kill_group(group):
        time.sleep(pause)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; call it at the start of a child process.

    The kernel does this (PR_SET_PDEATHSIG) even if the parent is killed. If `parent` has ended already, this process is
    killed at once.

    Raises:
        OSError: The kernel refuses the call.
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
