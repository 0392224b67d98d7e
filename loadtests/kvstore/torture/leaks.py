"""Leaks: functions by which the torture test finds what processes have left behind.

The test looks for leaks after all clients have ended, and after leases and connections had time to end. There is no leak if:

1. No pin, lease or reservation is open in the node, and all its space can be written again.
2. The node and the clients that were not killed have no more open files than at their start.
3. No child process is left, and a stopped node has removed its sockets.
4. No process maps memory with a name in /dev/shm, which a killed process would leave there, and the folder of the SSD tier never
   exceeds its limit. (These two are sampled during the run.)
"""

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

from kvstore.client.store_client import StoreClient
from kvstore.messages import Stats
from kvstore.namespace import KvNamespace
from kvstore.pool.extents import PAGE_BYTES
from loadtests.kvstore.nodes import StoreNode

NODE_FILES = 8  # tolerated additional files, which gRPC keeps after connections
BATCH = 256  # blocks that are written at a time

FILLING = KvNamespace(
    model="filling",
    revision="r1",
    dtype="float32",
    block_tokens=32,
    layers=1,
    kv_heads=1,
    head_dim=8,
    block_bytes=PAGE_BYTES,
)
"""Namespace with blocks of one page, which fill a pool completely."""


def named_memory(pids: Iterable[int]) -> set[str]:
    """Return the names in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {line.rpartition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}
    return found


def in_node(node: StoreNode, files_at_first: int, settle_seconds: float) -> list[str]:
    """Return the leaks in a node without clients.

    Args:
        node: A running node.
        files_at_first: Number of open files of the node after its start.
        settle_seconds: Time in which leases, reservations and stalled connections end.
    """
    found: list[str] = []
    with StoreClient.connect(node.address, FILLING, timeout_seconds=10, call_timeout_seconds=10) as client:
        deadline = time.monotonic() + settle_seconds
        while (stats := client.stats()) is not None and _open_in(stats) and time.monotonic() < deadline:
            time.sleep(0.1)
        if stats is None:
            return ["the node does not answer"]
        found += [f"{each} {settle_seconds:.0f} s after the last client left" for each in _open_in(stats)]
        found += _lost_space(client, stats.capacity_bytes)
    deadline = time.monotonic() + settle_seconds
    while node.open_files() > files_at_first + NODE_FILES and time.monotonic() < deadline:
        time.sleep(0.1)
    if (files := node.open_files()) > files_at_first + NODE_FILES:
        found.append(f"the node has {files} open files, {files_at_first} when it started")
    return found


def after_the_node(folder: Path) -> list[str]:
    """Return a text for each socket that a stopped node has left in its folder."""
    return [f"{path.name} was left by the node" for path in folder.iterdir() if path.is_socket()]


def occupied_bytes(folder: Path) -> int:
    """Return the disk space of all files below a folder, without files that are deleted during the call."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def children() -> list[str]:
    """Return a text for each process below this one that still lives."""
    return [f"process {child.pid} ({child.name()}) still lives" for child in psutil.Process().children(recursive=True)]


def _open_in(stats: Stats) -> list[str]:
    """Return a text for each kind of thing that the node still holds: pinned blocks, leases and reservations."""
    held = {"pinned blocks": stats.pinned, "leases": stats.leases, "reservations": stats.reservations}
    return [f"{count} {what}" for what, count in held.items() if count]


def _lost_space(client: StoreClient, capacity_bytes: int) -> list[str]:
    """Fill the whole pool with new blocks. If some do not fit, return a text that says how many."""
    room = capacity_bytes // PAGE_BYTES
    block = np.zeros(PAGE_BYTES, dtype=np.uint8)
    names = [hashlib.blake2b(f"space {index}".encode(), digest_size=16).digest() for index in range(room)]
    batches = [names[start : start + BATCH] for start in range(0, room, BATCH)]
    written = sum(client.write(batch, lambda _: block) for batch in batches)
    matched = sum(len(client.match(batch, lease_seconds=0)) for batch in batches)
    if written < room or matched < room:
        return [f"of room for {room} blocks, {written} could be written, {matched} of them are there"]
    return []
