"""Cleans up after a supervisor that was killed.

    python -m fleet.local.orphan_reaper FOLDER

The supervisor writes lines to its standard input: ``+GROUP`` when it has started a process group, ``-GROUP`` when it has seen
the group end. The end of the input means that the supervisor is gone: the groups that are left are ended, and the runtime
folder is removed. After an orderly end nothing is left to do.

The kernel kills direct children with their parent (`die_with_parent`); this process is for what those had started, which the
kernel would let live.
"""

import signal
import sys
from pathlib import Path

from fleet.core.file_locks import ALIVE_FILE, remove_locked_folder, share_lock_file
from fleet.local.process_group import end_group


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its input, and only then
    (folder,) = sys.argv[1:]
    groups: list[int] = []
    alive = Path(folder) / ALIVE_FILE
    with share_lock_file(alive):  # the run is not dead before this is
        for line in sys.stdin:
            change, group = line[0], int(line[1:])
            if change == "+":
                groups.append(group)
            else:
                groups.remove(group)
        for group in groups:
            end_group(group)
        remove_locked_folder(alive)


if __name__ == "__main__":
    main()
