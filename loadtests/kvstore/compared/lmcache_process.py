"""LMCache as a compared system: measures its L1 and L2 caches without an engine, through `L1Manager` and `StorageManager`.

The script runs under the interpreter of LMCache's environment.

LMCache itself copies only to and from devices. So numpy copies the bytes between LMCache's memory objects and the benchmark's arrays.
"""

import gc
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from answering import answer, best_of, empty_caches, untouched
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchLockMode,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from numpy.typing import NDArray

Answer = dict[str, float]
Blocks = NDArray[np.uint8]

DISK_SECONDS = 120

pools: dict[tuple[int, int], L1Manager] = {}
sources: dict[tuple[int, int], Blocks] = {}


def keys_of(count: int) -> list[ObjectKey]:
    return [ObjectKey(os.urandom(32), "bench", 0) for _ in range(count)]


def layout(block_bytes: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([block_bytes])], [torch.uint8])


def new_pool(size: int) -> L1Manager:
    memory = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
    return L1Manager(L1ManagerConfig(memory_config=memory))


def pool(block_bytes: int, blocks: int) -> L1Manager:
    if (block_bytes, blocks) not in pools:
        pools[block_bytes, blocks] = new_pool(2 * block_bytes * blocks + (64 << 20))
    return pools[block_bytes, blocks]


def source(block_bytes: int, blocks: int) -> Blocks:
    if (block_bytes, blocks) not in sources:
        sources[block_bytes, blocks] = np.random.default_rng(1).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    return sources[block_bytes, blocks]


def write(manager: L1Manager, keys: list[ObjectKey], content: Blocks, block_bytes: int) -> None:
    objects = manager.reserve_write(keys, [False] * len(keys), layout(block_bytes))
    for key, block in zip(keys, content, strict=True):
        np.copyto(objects[key][1].tensor.numpy(), block)
    manager.finish_write(keys)


def put(block_bytes: int, blocks: int, fresh: bool) -> Answer:
    manager = new_pool(block_bytes * blocks + (64 << 20)) if fresh else pool(block_bytes, blocks)
    keys, content = keys_of(blocks), source(block_bytes, blocks)
    empty_caches()
    started = time.perf_counter()
    write(manager, keys, content, block_bytes)
    seconds = time.perf_counter() - started
    manager.delete(keys)
    if fresh:
        manager.close()
        gc.collect()
    return {"seconds": seconds}


def get(block_bytes: int, blocks: int, fresh: bool) -> Answer:
    manager, keys = pool(block_bytes, blocks), keys_of(blocks)
    write(manager, keys, source(block_bytes, blocks), block_bytes)
    if fresh:
        room = np.frombuffer(untouched(block_bytes * blocks), dtype=np.uint8).reshape(blocks, block_bytes)
    else:
        room = np.ones((blocks, block_bytes), dtype=np.uint8)
    empty_caches()
    started = time.perf_counter()
    objects = manager.reserve_read(keys)
    for key, block in zip(keys, room, strict=True):
        np.copyto(block, objects[key][1].tensor.numpy())
    manager.finish_read(keys)
    seconds = time.perf_counter() - started
    manager.delete(keys)
    return {"seconds": seconds}


def lookup(keys: int) -> Answer:
    manager, names = pool(4096, keys), keys_of(keys)
    manager.reserve_write(names, [False] * keys, layout(4096))
    manager.finish_write(names)

    def look() -> None:
        manager.reserve_read(names)
        manager.finish_read(names)

    seconds = best_of(look)
    manager.delete(names)
    return {"seconds": seconds}


def hashing(tokens: int, block_tokens: int) -> Answer:
    hasher = TokenHasher(chunk_size=block_tokens, hash_algorithm="blake3")
    ids = np.random.default_rng(1).integers(0, 150_000, tokens).tolist()
    return {"seconds": best_of(lambda: hasher.compute_chunk_hashes(ids))}


def resident() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def memory(keys: int) -> Answer:
    """Return the resident bytes per key. The objects are reserved but never written to, so the content takes no memory."""
    manager = new_pool(keys * 4096 + (64 << 20))
    names = keys_of(keys)
    gc.collect()
    before = resident()
    manager.reserve_write(names, [False] * keys, layout(4096))
    manager.finish_write(names)
    gc.collect()
    grown = resident() - before
    manager.delete(names)
    manager.close()
    return {"bytes": grown / keys}


def open_store(folder: str, size: int, threads: int) -> StorageManager:
    config = StorageManagerConfig(
        l1_manager_config=L1ManagerConfig(
            memory_config=L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
        ),
        eviction_config=EvictionConfig("noop"),
        l2_adapter_config=L2AdaptersConfig(
            adapters=[FSNativeL2AdapterConfig(base_path=folder, num_workers=threads, use_odirect=True)]
        ),
    )
    return StorageManager(config)


def files_in(folder: str) -> int:
    return sum(len([name for name in names if name.endswith(".data")]) for _, _, names in os.walk(folder))


def drain(store: StorageManager, keys: list[ObjectKey], block_bytes: int, folder: str, content: Blocks) -> float:
    """Write blocks to L1, and return the seconds until all of them are files of L2."""
    objects = store.reserve_write(keys, layout(block_bytes))
    for key, block in zip(keys, content, strict=True):
        np.copyto(objects[key].tensor.numpy(), block)
    present = files_in(folder)
    started = time.perf_counter()
    store.finish_write(keys)
    deadline = started + DISK_SECONDS
    while files_in(folder) < present + len(keys):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{files_in(folder) - present} of {len(keys)} blocks are on disk after {DISK_SECONDS} s")
        time.sleep(0.002)
    return time.perf_counter() - started


def load(store: StorageManager, keys: list[ObjectKey], block_bytes: int) -> float:
    """Load all blocks from L2 to L1; return the seconds."""
    started = time.perf_counter()
    row = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=layout(block_bytes))
    handle = store.submit_prefetch_task(PrefetchTaskSpec(key_groups=[row], lock_mode=PrefetchLockMode.NO_LOCK))
    if not store.wait_prefetch_status(handle, DISK_SECONDS):
        raise TimeoutError(f"blocks did not arrive within {DISK_SECONDS} s")
    result = store.query_prefetch_status(handle)
    seconds = time.perf_counter() - started
    arrived = sum(each.popcount() for each in result.hit_cells)
    if arrived != len(keys):
        raise RuntimeError(f"{arrived} of {len(keys)} blocks arrived")
    return seconds


def disk(folder: str, block_bytes: int, blocks: int, threads: int) -> Answer:
    """Return the seconds to write blocks to L2, and to load the same blocks from L2 again."""
    Path(folder).mkdir(exist_ok=True)
    store = open_store(folder, block_bytes * blocks + (64 << 20), threads)
    try:
        keys = keys_of(blocks)
        written = drain(store, keys, block_bytes, folder, source(block_bytes, blocks))
        store.delete_l1_keys(keys)
        return {"write_seconds": written, "read_seconds": load(store, keys, block_bytes)}
    finally:
        store.close()
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)


def restart(folder: str, block_bytes: int, threads: int) -> Answer:
    """Return the seconds from opening a store on existing files to the first block in memory."""
    Path(folder).mkdir(exist_ok=True)
    blocks = 64
    try:
        store = open_store(folder, block_bytes * blocks + (64 << 20), threads)
        keys = keys_of(blocks)
        drain(store, keys, block_bytes, folder, source(block_bytes, blocks))
        store.close()
        del store
        gc.collect()
        started = time.perf_counter()
        again = open_store(folder, block_bytes * blocks + (64 << 20), threads)
        load(again, keys[:1], block_bytes)
        seconds = time.perf_counter() - started
        again.close()
        return {"seconds": seconds}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


COMMANDS = {
    "hello": dict,
    "put": put,
    "get": get,
    "lookup": lookup,
    "hashing": hashing,
    "memory": memory,
    "disk": disk,
    "restart": restart,
}

if __name__ == "__main__":
    answer(COMMANDS)
