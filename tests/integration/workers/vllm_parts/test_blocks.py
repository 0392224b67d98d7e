"""Tests of block transfer between an engine's tensors and a real store node, without an engine."""

import threading
from collections.abc import Iterator

import pytest

from kvstore.client import store_client
from kvstore.client.store_client import StoreClient, batch_blocks
from kvstore.messages import Match
from tests.support.kvstore.builders import a_block, a_chain, a_namespace, a_node, a_store_client
from tests.support.waiting import eventually
from workers.engines.vllm.blocks.block_memory import DeviceBlocks, EngineBlocks, HostBlocks
from workers.engines.vllm.blocks.block_mover import BlockMover
from workers.engines.vllm.blocks.saves import LONGEST_WAIT_SECONDS, MIN_STAGED_BLOCKS, PAUSE_SECONDS
from workers.engines.vllm.store_planner import BlockLoad, BlockSave, StoreWork

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 3, 40, 2, 32, 8
NAMESPACE = a_namespace(layers=LAYERS, block_bytes=LAYERS * HEADS * TOKENS * ELEMENTS * 2, dtype="bfloat16")


@pytest.fixture
def client() -> Iterator[StoreClient]:
    with a_node(capacity_bytes=4 << 20) as node, a_store_client(node.address, NAMESPACE) as client:
        yield client


def heads_first(seed: int) -> list:
    """Return a tensor in the layout of the store."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn((BLOCKS, HEADS, TOKENS, ELEMENTS), generator=generator).to(torch.bfloat16) for _ in range(LAYERS)
    ]


def tokens_first(layers: list) -> list:
    """Return a tensor with the same values in another memory order."""
    return [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in layers]


def empty_like(layers: list) -> list:
    return [torch.zeros_like(layer) for layer in layers]


def load(blocks: EngineBlocks, client: StoreClient, load: BlockLoad) -> list[bool]:
    return blocks.load(client, load, blocks.fence())


def match(client: StoreClient, names: list[bytes]) -> Match:
    return client.match(names, lease_seconds=10)


@pytest.mark.parametrize("save_with", [HostBlocks, DeviceBlocks])
@pytest.mark.parametrize("load_with", [HostBlocks, DeviceBlocks])
@pytest.mark.parametrize("at_once", [32, None])
def test_blocks_round_trip_in_any_memory_order(client, save_with, load_with, at_once, monkeypatch):
    if at_once is not None:
        monkeypatch.setattr(store_client, "BATCH_BYTES", at_once * NAMESPACE.block_bytes)
    names = a_chain(35)
    assert (batch_blocks(NAMESPACE.block_bytes) < len(names)) == (at_once is not None), "more than one batch"
    source, target = heads_first(1), empty_like(heads_first(1))
    saved = source if save_with is HostBlocks else tokens_first(source)
    loaded = target if load_with is HostBlocks else tokens_first(target)

    client.write(names, save_with(saved).source(list(range(5, 40))))
    found = match(client, names)
    whole = load(load_with(loaded), client, BlockLoad("r", found, 2, list(range(33))))

    assert len(found) == 35
    assert whole == [True] * 33
    for before, after in zip(source, loaded, strict=True):
        assert torch.equal(after[:33], before[7:40])
        assert not after[33:].any(), "nothing else was written"


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [2, 3, 4, 5, 6, 7], [0, 1, 9, 10, 20, 21, 33], [0, 12, 24, 30, 33]])
def test_source_keeps_a_batch_of_blocks_valid_across_gaps(indices, monkeypatch):
    monkeypatch.setattr(store_client, "LEAST_BATCH", 4)
    monkeypatch.setattr(store_client, "BATCH_BYTES", 0)
    batch = batch_blocks(NAMESPACE.block_bytes)
    layers = heads_first(3)
    expected = HostBlocks(layers).source(list(range(34)))
    source = DeviceBlocks(layers).source(list(range(34)))

    held: list = []
    for index in indices:
        held = [*held, (index, source(index))][-batch:]
        for at, row in held:
            assert bytes(row) == b"".join(bytes(piece) for piece in expected(at)), (index, at)


def work(**fields) -> StoreWork:
    return StoreWork(**{"loads": [], "urgent": [], "deferred": [], "releases": [], "idle": True, **fields})


@pytest.fixture
def mover(client) -> Iterator[BlockMover]:
    mover = BlockMover(client, HostBlocks(heads_first(2)))
    yield mover
    mover.close()


def collect(mover: BlockMover) -> list:
    """Step until the loads are done, like an idle engine."""
    for _ in range(5000):
        if results := mover.collect(idle=True):
            return results
    raise AssertionError("the load does not end")


def test_urgent_blocks_are_there_when_the_call_returns(client, mover):
    mover.save(work(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))

    assert len(match(client, a_chain(3))) == 3


def test_deferred_blocks_keep_their_content_when_offered(client, mover):
    before = [layer[4:7].clone() for layer in heads_first(2)]
    mover.save(work(deferred=[BlockSave("r", a_chain(3), [4, 5, 6])]))
    for layer in mover.blocks.layers:
        layer[4:7] = 0  # the engine gives the blocks to another request
    mover.close()

    target = empty_like(heads_first(2))
    assert load(HostBlocks(target), client, BlockLoad("r", match(client, a_chain(3)), 0, [0, 1, 2])) == [True] * 3
    for kept, loaded in zip(before, target, strict=True):
        assert torch.equal(loaded[:3], kept)


def test_uncopyable_block_ends_its_save_not_the_engine(client, mover):
    copy_out = mover.blocks.copy_out
    mover.blocks.copy_out = lambda block_ids, rows: copy_out(block_ids, rows) if 5 not in block_ids else 1 / 0

    mover.save(work(deferred=[BlockSave("r", a_chain(3), [4, 5, 6]), BlockSave("q", a_chain(5)[3:], [7, 8])]))
    mover.close()

    assert (len(match(client, a_chain(3))), len(match(client, a_chain(5)[3:]))) == (0, 2)
    assert mover.saver.area.free == mover.saver.area.capacity


def test_blocks_beyond_the_staging_area_are_dropped_from_end(client, monkeypatch):
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.STAGING_BYTES", 0)
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.MIN_STAGED_BLOCKS", 2)
    mover = BlockMover(client, HostBlocks(heads_first(2)))

    mover.save(work(deferred=[BlockSave("r", a_chain(5), [1, 2, 3, 4, 5])]))
    mover.close()

    assert len(match(client, a_chain(5))) == 2


class Steps(threading.Event):
    """Replaces the executor's clock: an engine that steps during the first `busy` looks and then pauses."""

    def __init__(self, mover: BlockMover, busy: int):
        super().__init__()
        self.looks = 0
        self._mover = mover
        self._busy = busy

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        if self.looks <= self._busy:
            self._mover.start(work())
            self._mover.save(work())
        return self.is_set()


@pytest.fixture
def written(mover) -> list[list[bytes]]:
    """Return the names of every write that the executor requests."""
    writes, write = [], mover.client.write

    def spy(names, sources, **fields):
        writes.append(list(names))
        return write(names, sources, **fields)

    mover.client.write = spy
    return writes


@pytest.mark.parametrize(("busy", "looks"), [(0, 1), (4, 5), (1000, round(LONGEST_WAIT_SECONDS / PAUSE_SECONDS))])
def test_deferred_blocks_are_written_in_an_engine_pause(client, mover, busy, looks):
    mover.saver.closing = steps = Steps(mover, busy)

    mover.save(work(deferred=[BlockSave("r", a_chain(3), [4, 5, 6])]))

    eventually(lambda: len(match(client, a_chain(3))) == 3)
    assert steps.looks == looks


def test_full_staging_area_does_not_wait_for_a_pause(client, monkeypatch):
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.STAGING_BYTES", 0)
    mover = BlockMover(client, HostBlocks(heads_first(2)))
    mover.saver.closing = steps = Steps(mover, 1000)

    mover.save(
        work(deferred=[BlockSave("r", a_chain(MIN_STAGED_BLOCKS // 2 + 1), list(range(MIN_STAGED_BLOCKS // 2 + 1)))])
    )

    eventually(lambda: len(match(client, a_chain(MIN_STAGED_BLOCKS // 2 + 1))) == MIN_STAGED_BLOCKS // 2 + 1)
    assert steps.looks == 1
    mover.close()


def test_blocks_staged_step_by_step_are_written_together(client, mover, written):
    chain, other = a_chain(3), a_chain(5)[3:]
    mover.saver.closing = Steps(mover, 1)
    go_on, wait = threading.Event(), mover.saver.closing.wait
    mover.saver.closing.wait = lambda timeout: go_on.wait(60) and wait(timeout)

    mover.save(work(deferred=[BlockSave("r", chain[:1], [4]), BlockSave("q", other[:1], [10])]))
    mover.save(work(deferred=[BlockSave("r", chain[1:], [5, 6]), BlockSave("q", other[1:], [11])]))
    go_on.set()

    eventually(lambda: len(written) == 2)
    assert written == [chain, other]
    eventually(lambda: len(match(client, chain)) == 3)
    target = empty_like(heads_first(2))
    assert load(HostBlocks(target), client, BlockLoad("r", match(client, chain), 0, [0, 1, 2])) == [True] * 3
    for before, after in zip(heads_first(2), target, strict=True):
        assert torch.equal(after[:3], before[4:7]), "each under its own name"


def test_load_releases_its_lease_and_names_good_blocks(client, mover):
    client.write(a_chain(2), [a_block(1, NAMESPACE.block_bytes), a_block(2, NAMESPACE.block_bytes)])
    load = BlockLoad("r", match(client, a_chain(2)), 0, [8, 9])

    mover.start(work(loads=[load]))

    assert collect(mover) == [(load, [True, True])]
    assert client.stats().pinned == 0


def test_failing_load_still_ends(client, mover):
    load = BlockLoad("r", match(client, a_chain(2)), 0, [8, 9])  # nothing matched, which is a bug of the scheduler side

    mover.start(work(loads=[load]))

    assert collect(mover) == [(load, [False, False])]


def test_a_step_that_computes_does_not_wait_for_loads(client, mover):
    blocked, go_on = threading.Event(), threading.Event()

    def slow(*_) -> list[bool]:
        blocked.set()
        assert go_on.wait(60)
        return [True]

    mover.blocks.load = slow
    load = BlockLoad("r", match(client, a_chain(1)), 0, [8])
    mover.start(work(loads=[load]))
    assert blocked.wait(60)

    assert mover.collect(idle=False) == []
    go_on.set()
    assert collect(mover) == [(load, [True])]
