"""Host id: tells whether two processes can probably share memory."""

import hashlib
import os
import platform
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return an id that is equal in two processes that can probably share memory: same running kernel and same user.

    Containers on one host have equal ids, but may be unable to reach each other's sockets. A client that finds equal
    ids tries to connect to the socket, and uses another data path if this fails.
    """
    try:
        kernel = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # the system is not Linux
        kernel = platform.node()
    return hashlib.sha256(f"{kernel}:{os.getuid()}".encode()).hexdigest()[:32]
