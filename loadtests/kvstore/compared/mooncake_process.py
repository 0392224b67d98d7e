"""Mooncake as a compared system, over TCP: one master, one process that holds the memory, and this process as the client.

The script runs under the interpreter of Mooncake's environment.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from answering import answer, best_of, empty_caches, untouched
from mooncake.store import MooncakeDistributedStore
from numpy.typing import NDArray

Answer = dict[str, Any]
Bytes = NDArray[np.uint8]
Kept = dict[tuple[int, int], Bytes]

HOST = "127.0.0.1"
LOCAL_BUFFER_BYTES = 64 << 20
START_SECONDS = 30
MASTER = Path(sys.executable).parent / "mooncake_master"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def setup(segment_bytes: int, master: str) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        raise RuntimeError(f"setup answers {code}")
    return store


class MooncakeCluster:
    def __init__(self) -> None:
        port = free_port()
        self.master_address = f"{HOST}:{port}"
        command = [MASTER, "--rpc_address", HOST, "--rpc_port", str(port), "--metrics_host", HOST]
        command += ["--metrics_port", str(free_port())]
        self.master = subprocess.Popen(command, stdout=2, stderr=2, preexec_fn=end_with_parent)  # noqa: PLW1509 - no other thread runs yet
        self.wait_for(port)
        self.segment: subprocess.Popen[bytes] | None = None
        self.segment_bytes = 0
        self.client: MooncakeDistributedStore | None = None
        self.sources: Kept = {}
        self.rooms: Kept = {}

    @staticmethod
    def wait_for(port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection((HOST, port), 1).close()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def need(self, size: int, fresh: bool) -> None:
        """Provide at least `size` bytes of memory in the segment process; if `fresh`, memory that was never written to."""
        if self.segment is not None and not fresh and self.segment_bytes >= size:
            return
        if self.segment is not None:
            self.segment.stdin.close()
            self.segment.wait(START_SECONDS)
        self.segment_bytes = size
        self.segment = subprocess.Popen(
            [sys.executable, "-P", __file__, "segment", str(size), self.master_address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=2,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - it calls one function of the C library
        )
        while b"ready" not in (line := self.segment.stdout.readline()):
            if not line:
                raise RuntimeError("the process with the memory ended")
        if self.client is None:
            self.client = setup(0, self.master_address)

    def registered(self, kept: Kept, block_bytes: int, blocks: int) -> Bytes:
        if (block_bytes, blocks) not in kept:
            memory = np.random.default_rng(1).integers(0, 256, block_bytes * blocks, dtype=np.uint8)
            self.register(memory)
            kept[block_bytes, blocks] = memory
        return kept[block_bytes, blocks]

    def register(self, memory: Bytes) -> None:
        if (code := self.client.register_buffer(memory.ctypes.data, memory.nbytes)) != 0:
            raise RuntimeError(f"register_buffer answers {code}")

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.segment is not None:
            self.segment.stdin.close()
            self.segment.wait(START_SECONDS)
        self.master.kill()
        self.master.wait(START_SECONDS)


cluster: MooncakeCluster | None = None


def running(size: int, fresh: bool = False) -> MooncakeCluster:
    global cluster  # noqa: PLW0603 - one per process
    if cluster is None:
        cluster = MooncakeCluster()
    cluster.need(size, fresh)
    return cluster


def keys_of(count: int) -> list[str]:
    return [os.urandom(16).hex() for _ in range(count)]


def pointers(memory: Bytes, block_bytes: int, blocks: int) -> list[int]:
    return [memory.ctypes.data + index * block_bytes for index in range(blocks)]


def write(here: MooncakeCluster, keys: list[str], memory: Bytes, block_bytes: int) -> None:
    codes = here.client.batch_put_from(keys, pointers(memory, block_bytes, len(keys)), [block_bytes] * len(keys))
    if any(codes):
        raise RuntimeError(f"batch_put_from answers {set(codes)}")


def room_for(block_bytes: int, blocks: int) -> int:
    return 2 * block_bytes * blocks + (64 << 20)


def put(block_bytes: int, blocks: int, fresh: bool) -> Answer:
    here = running(room_for(block_bytes, blocks), fresh)
    memory, keys = here.registered(here.sources, block_bytes, blocks), keys_of(blocks)
    empty_caches()
    started = time.perf_counter()
    write(here, keys, memory, block_bytes)
    seconds = time.perf_counter() - started
    here.client.remove_all(True)
    return {"seconds": seconds}


def get(block_bytes: int, blocks: int, fresh: bool) -> Answer:
    here = running(room_for(block_bytes, blocks))
    keys = keys_of(blocks)
    write(here, keys, here.registered(here.sources, block_bytes, blocks), block_bytes)
    if fresh:
        memory = np.frombuffer(untouched(block_bytes * blocks), dtype=np.uint8)
        here.register(memory)
    else:
        memory = here.registered(here.rooms, block_bytes, blocks)
    places = pointers(memory, block_bytes, blocks)
    try:
        empty_caches()
        started = time.perf_counter()
        got = here.client.batch_get_into(keys, places, [block_bytes] * blocks)
        seconds = time.perf_counter() - started
    finally:
        if fresh:
            here.client.unregister_buffer(memory.ctypes.data)
    if set(got) != {block_bytes}:
        raise RuntimeError(f"batch_get_into answers {set(got)}")
    here.client.remove_all(True)
    return {"seconds": seconds}


def lookup(keys: int) -> Answer:
    here = running(room_for(4096, keys))
    names = keys_of(keys)
    write(here, names, here.registered(here.sources, 4096, keys), 4096)
    if set(found := here.client.batch_is_exist(names)) != {1}:
        raise RuntimeError(f"batch_is_exist answers {set(found)}")
    seconds = best_of(lambda: here.client.batch_is_exist(names))
    here.client.remove_all(True)
    return {"seconds": seconds}


def resident(pid: int) -> int:
    with Path(f"/proc/{pid}/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def memory(keys: int) -> Answer:
    """Return how many bytes of resident memory a new master needs per key. The stored objects have 64 bytes each."""
    global cluster  # noqa: PLW0603 - one per process
    if cluster is not None:
        cluster.close()
        cluster = None
    here = running(room_for(4096, keys))
    batch = 1000
    write(here, keys_of(batch), here.registered(here.sources, 64, batch), 64)
    block = here.registered(here.sources, 64, batch)
    before = resident(here.master.pid)
    for _ in range(0, keys, batch):
        write(here, keys_of(batch), block, 64)
    grown = resident(here.master.pid) - before
    here.client.remove_all(True)
    return {"bytes": grown / keys}


def restart(**_: object) -> Answer:
    return {"cannot": "a restarted master knows nothing of what was stored (no SSD, no HA configured)"}


def disk(**_: object) -> Answer:
    return {"cannot": "SSD offload is not driven through the Python client"}


COMMANDS = {"hello": dict, "put": put, "get": get, "lookup": lookup, "memory": memory, "restart": restart, "disk": disk}


def hold_memory(size: str, master: str) -> None:
    store = setup(int(size), master)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["segment"]:
        hold_memory(*sys.argv[2:])
    else:
        try:
            answer(COMMANDS)
        finally:
            if cluster is not None:
                cluster.close()
