"""Tests of block transfer between the memory of a real accelerator and a real store node, without an engine."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.client import store_client
from kvstore.client.store_client import StoreClient
from tests.support.kvstore.builders import a_chain, a_namespace, a_node, a_store_client
from tests.support.waiting import eventually
from workers.engines.vllm.blocks import block_memory
from workers.engines.vllm.blocks.block_memory import DeviceBlocks
from workers.engines.vllm.blocks.block_mover import BlockMover
from workers.engines.vllm.store_planner import BlockLoad, BlockSave, StoreWork

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator"),
]

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 4, 60, 8, 16, 128
BLOCK_BYTES = LAYERS * HEADS * TOKENS * ELEMENTS * 2
NAMESPACE = a_namespace(layers=LAYERS, block_bytes=BLOCK_BYTES, dtype="bfloat16")
SIDE = 16_384  # a product of such matrices takes an H100 some 12 ms


@pytest.fixture
def client() -> Iterator[StoreClient]:
    with a_node(capacity_bytes=64 << 20) as node, a_store_client(node.address, NAMESPACE) as client:
        yield client


def on_device(*, tokens_first: bool, seed: int = 1) -> list:
    """Return layers of the same values in one of the two memory orders of vLLM's attention kernels."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(LAYERS):
        layer = torch.randn((BLOCKS, HEADS, TOKENS, ELEMENTS), generator=generator).to(torch.bfloat16).cuda()
        layers.append(layer.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else layer)
    return layers


def keep_device_busy(products: int) -> None:
    """Launch products of large matrices, like an engine that has launched its steps; do not wait for them."""
    matrix = torch.ones((SIDE, SIDE), dtype=torch.bfloat16, device="cuda")
    result = torch.empty_like(matrix)
    for _ in range(products):
        torch.mm(matrix, matrix, out=result)


def a_step(**fields) -> StoreWork:
    return StoreWork(**{"loads": [], "urgent": [], "deferred": [], "releases": [], "idle": True, **fields})


def assert_held(client: StoreClient, names: list[bytes], expected: list) -> None:
    """Check the bytes that the store has under these names, given the layers' blocks of each."""
    found = client.match(names, lease_seconds=10)
    assert len(found) == len(names)
    target = [torch.zeros_like(layer) for layer in on_device(tokens_first=False)]
    blocks = DeviceBlocks(target)
    load = BlockLoad("r", found, 0, list(range(len(names))))
    assert blocks.load(client, load, blocks.fence()) == [True] * len(names)
    for loaded, before in zip(target, expected, strict=True):
        assert torch.equal(loaded[: len(names)], before)


@pytest.mark.parametrize("saved_tokens_first", [False, True])
@pytest.mark.parametrize("loaded_tokens_first", [False, True])
@pytest.mark.parametrize("gathered_blocks", [1, 7, 100])
def test_device_blocks_round_trip_in_any_order(
    client, saved_tokens_first, loaded_tokens_first, gathered_blocks, monkeypatch
):
    monkeypatch.setattr(block_memory, "GATHER_BYTES", gathered_blocks * BLOCK_BYTES)
    monkeypatch.setattr(store_client, "BATCH_BYTES", 0)  # batches of the least size
    names = a_chain(50)
    source = on_device(tokens_first=saved_tokens_first)
    target = [torch.zeros_like(layer) for layer in on_device(tokens_first=loaded_tokens_first)]
    block_ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()

    client.write(names, DeviceBlocks(source).source(block_ids[:50]))
    found = client.match(names, lease_seconds=10)
    blocks = DeviceBlocks(target)
    whole = blocks.load(client, BlockLoad("r", found, 2, block_ids[10:58]), blocks.fence())

    assert whole == [True] * 48
    for before, after in zip(source, target, strict=True):
        assert torch.equal(after[block_ids[10:58]], before[block_ids[2:50]])
        assert not after[block_ids[:10] + block_ids[58:]].any(), "nothing else was written"


def test_deferred_save_sees_its_step_and_not_the_next_one(client):
    layers = on_device(tokens_first=True)
    mover = BlockMover(client, DeviceBlocks(layers))
    expected = [layer[4:7] + 1 for layer in layers]
    torch.cuda.synchronize()

    keep_device_busy(30)
    for layer in layers:
        layer[4:7] += 1  # the step that computes the blocks is still running when they are saved
    mover.save(a_step(deferred=[BlockSave("r", a_chain(3), [4, 5, 6])]))
    engine_was_busy = not torch.cuda.current_stream().query()
    for layer in layers:
        layer[4:7] = 0  # the next step gives them to another request
    mover.close()

    assert engine_was_busy, "the save does not wait for the step"
    assert_held(client, a_chain(3), expected)


def test_load_comes_after_a_step_that_still_uses_its_blocks(client):
    names = a_chain(3)
    source = on_device(tokens_first=False, seed=2)
    client.write(names, DeviceBlocks(source).source([0, 1, 2]))
    layers = on_device(tokens_first=False)
    mover = BlockMover(client, DeviceBlocks(layers))
    torch.cuda.synchronize()

    keep_device_busy(30)
    for layer in layers:
        layer[8:11] = 0  # a step of the request that had the blocks before
    mover.start(a_step(loads=[BlockLoad("r", client.match(names, lease_seconds=10), 0, [8, 9, 10])]))
    ((_, whole),) = eventually(lambda: mover.collect(idle=True))

    assert torch.cuda.current_stream().query(), "the load is reported before its bytes are there"
    assert whole == [True] * 3
    for before, after in zip(source, layers, strict=True):
        assert torch.equal(after[8:11], before[:3])
    mover.close()


def test_load_ends_while_later_steps_run(client):
    names = a_chain(3)
    client.write(names, DeviceBlocks(on_device(tokens_first=False)).source([0, 1, 2]))
    mover = BlockMover(client, DeviceBlocks(on_device(tokens_first=False, seed=2)))
    load = BlockLoad("r", client.match(names, lease_seconds=10), 0, [8, 9, 10])
    mover.start(a_step(loads=[load]))  # the first use of kernels compiles them, which waits for the device
    eventually(lambda: mover.collect(idle=True))
    launched, read = threading.Event(), client.read
    client.read = lambda *arguments: read(*arguments) if launched.wait(60) else []

    mover.start(a_step(loads=[BlockLoad("r", client.match(names, lease_seconds=10), 0, [8, 9, 10])]))
    keep_device_busy(300)  # the steps that the engine launches next
    launched.set()
    ((_, whole),) = eventually(lambda: mover.collect(idle=True))

    assert not torch.cuda.current_stream().query(), "the load waits for what was launched after it"
    assert whole == [True] * 3
    mover.close()
