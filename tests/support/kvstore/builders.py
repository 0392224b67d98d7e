"""Builders of blocks, namespaces and store machines with valid defaults, and a store node in its own process."""

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.block import BlockHash
from kvstore.buffers import crc32c
from kvstore.client.store_client import StoreClient
from kvstore.clock import SECOND, Nanos, nanos
from kvstore.eviction.lru import LruEviction
from kvstore.messages import BlockKey, LeaseId, Slot, StoreEndpoints
from kvstore.namespace import KvNamespace
from kvstore.pool.extents import PAGE_BYTES
from kvstore.pool.machine import BlockMachine
from kvstore.ports import BackingTier
from kvstore.service.server import serve
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock

# The fork server loads this module once, so a node starts in 0.03 s instead of 0.5 s.
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload([__name__])

LEASE = Nanos(10 * SECOND)
BLOCK_BYTES = 2 * PAGE_BYTES


def a_namespace(**fields: Any) -> KvNamespace:
    defaults = {
        "model": "tiny",
        "revision": "r1",
        "dtype": "float32",
        "block_tokens": 32,
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "block_bytes": BLOCK_BYTES,
    }
    return KvNamespace(**{**defaults, **fields})


def a_chain(length: int, of: str = "a") -> list[BlockHash]:
    """Return block names; the same arguments give the same names."""
    return [f"{of:>8.8}{index:08}".encode() for index in range(length)]


def a_block(seed: int, length: int = BLOCK_BYTES) -> np.ndarray:
    """Return random bytes that depend only on `seed` and `length`."""
    return np.frombuffer(random.Random(seed).randbytes(length), dtype=np.uint8).copy()


def put_blocks(
    tier: BackingTier, keys: Sequence[BlockKey], blocks: Sequence[np.ndarray], deadline: Nanos
) -> list[bool]:
    """Store blocks in a tier with checksums that are computed now; return by block whether the tier stored it."""
    return tier.put(keys, blocks, deadline, [crc32c([block]) for block in blocks])


class ManualClock:
    """Implements `Clock`; its time changes only when a test moves it."""

    def __init__(self, now: int = SECOND):
        self._now = now

    def now(self) -> Nanos:
        return Nanos(self._now)

    def move(self, span: int) -> None:
        self._now += span


class MachineDriver:
    """Drives a block machine with one namespace; its methods fill in what most tests do not care about."""

    def __init__(self, blocks: int = 8, **limits: Any):
        self.namespace = a_namespace()
        self.digest = self.namespace.digest
        self.machine = BlockMachine(blocks * BLOCK_BYTES, LruEviction(), epoch=1, **limits)
        self.machine.open(self.namespace, Nanos(0))

    def hold(self, chain: list[BlockHash], now: int = 0, tenant: bytes = b"") -> int:
        """Reserve and publish the blocks of a chain; return how many of them were new."""
        reservation = self.reserve(chain, now, tenant=tenant)
        checksums = {reserved.index: 7 for reserved in reservation.reserved}
        return self.machine.publish(reservation.reservation_id, checksums, owner="w", now=Nanos(now))

    def reserve(self, chain: list[BlockHash], now: int = 0, owner: str = "w", tenant: bytes = b""):
        return self.machine.reserve(self.digest, chain, owner=owner, lease=LEASE, now=Nanos(now), tenant=tenant)

    def match(self, chain: list[BlockHash], now: int = 0, lease: int = LEASE, tenant: bytes = b""):
        return self.machine.match(self.digest, chain, lease=Nanos(lease), now=Nanos(now), tenant=tenant)

    def look(self, chain: list[BlockHash], now: int = 0) -> int:
        """Return how many leading blocks of the chain can be read."""
        return len(self.match(chain, now, lease=0).slots)

    def release(self, lease_id: LeaseId, now: int = 0) -> None:
        self.machine.release([lease_id], Nanos(now))

    def slot(self, name: BlockHash) -> Slot:
        slot = self.machine.find(self.digest, name)
        assert slot is not None
        return slot


def node_settings(folder: Path, **fields: Any) -> StoreSettings:
    """Return the settings of a node that listens on sockets in this folder and on local ports."""
    return StoreSettings(
        **{
            "store_id": "s",
            "listen": (f"unix:{folder}/c", "127.0.0.1:0"),
            "shm_socket": f"{folder}/m",
            "data_listen": "127.0.0.1:0",
            "capacity_bytes": 1 << 20,
            **fields,
        }
    )


class NodeProcess:
    """Runs a store node in its own process, which a test can kill, freeze and restart at the same addresses."""

    def __init__(self, folder: Path, **settings: Any):
        self.folder = folder
        self.settings = msgspec.convert(
            {
                "store_id": "store-1",
                "listen": [f"unix:{folder}/c"],
                "shm_socket": f"{folder}/m",
                "data_listen": "127.0.0.1:0",
                "capacity_bytes": 1 << 20,
                **settings,
            },
            StoreSettings,
        )
        self.address = self.settings.listen[0]
        self.start()

    def start(self) -> None:
        ready, theirs = _forkserver.Pipe(duplex=False)
        self.process = _forkserver.Process(target=_run_node, args=(self.settings, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert ready.poll(60), "the node did not start"
        self.endpoints: StoreEndpoints = ready.recv()
        ready.close()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.join(60)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the node as a supervisor does, and wait for its end."""
        if self.process.is_alive():
            self.thaw()
            self.process.terminate()
            self.process.join(60)
            assert not self.process.is_alive(), "the node did not stop"


@contextmanager
def a_node(**settings: Any) -> Iterator[NodeProcess]:
    with a_short_folder() as folder:
        node = NodeProcess(folder, **settings)
        try:
            yield node
        finally:
            node.stop()


@contextmanager
def a_short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for Unix sockets (107 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def a_store_client(address: str, namespace: KvNamespace, **options: Any) -> StoreClient:
    """Connect a client. Its timeouts are long, so that a busy machine does not look like a hung node; `options` can change them."""
    return StoreClient.connect(address, namespace, **{"timeout_seconds": 30, "call_timeout_seconds": 30, **options})


def deadline_in(seconds: float = 60) -> Nanos:
    """Return a deadline for a store call, `seconds` from now. The default is so long that no call reaches it."""
    return Nanos(MonotonicClock().now() + nanos(seconds))


def empty_buffers(count: int = 4) -> list[np.ndarray]:
    """Return buffers to read blocks into."""
    return [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(count)]


def file_names_in(folder: Path | str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def _run_node(settings: StoreSettings, ready: Connection) -> None:
    async def run() -> None:
        serving = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serve(settings, ready.send)

    asyncio.run(run())
