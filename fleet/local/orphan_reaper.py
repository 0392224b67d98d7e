"""Orphan reaper: ends what a killed supervisor has left running.

    python -m fleet.local.orphan_reaper FOLDER

The supervisor writes lines to the reaper's standard input: ``+GROUP`` when it has started a process group, ``-GROUP``
when the group has ended. The end of the input means that the supervisor has ended. Then the reaper ends the remaining
groups and removes the runtime folder. After an orderly end nothing is left to do.

The kernel kills direct children with their parent (`die_with_parent`). The reaper ends what these had started.
"""

import signal
import sys
from pathlib import Path

from fleet.core.file_locks import ALIVE_FILE, remove_locked_folder, share_lock_file
from fleet.local.process_group import end_group


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends only with its input
    (folder,) = sys.argv[1:]
    groups: list[int] = []
    alive = Path(folder) / ALIVE_FILE
    with share_lock_file(alive):  # so the run counts as alive until the reaper ends
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
