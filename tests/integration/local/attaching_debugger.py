"""Debugger for the supervisor's tests: it attaches to a process, which stops it, and holds it until the debugger ends.

The kernel releases a traced process when its tracer ends.
"""

import ctypes
import os
import signal
import sys

PTRACE_ATTACH = 16


def main() -> None:
    pid = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace(PTRACE_ATTACH)")
    os.waitpid(pid, 0)
    print("attached", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
