"""Tests of engines of several ranks on a real store node: each rank is a thread or process with real tensors, without vLLM."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.clock import SECOND, Nanos
from kvstore.layouts.shards import BlockShape
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from tests.support.kvstore.builders import (
    ManualClock,
    NodeProcess,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
)
from tests.support.waiting import eventually
from workers.engines.vllm.blocks import rank_writes as vllm_ranks
from workers.engines.vllm.blocks.block_memory import HostBlocks
from workers.engines.vllm.blocks.block_mover import BlockMover
from workers.engines.vllm.blocks.rank_writes import FollowerRank, LeaderRank, RankChannel, RankPosition
from workers.engines.vllm.store_planner import BlockLoad, BlockSave, StoreWork

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

LAYERS, BLOCKS, HEADS, TOKENS, ELEMENTS = 3, 40, 4, 32, 8
BLOCK_BYTES = LAYERS * HEADS * TOKENS * ELEMENTS * 2
NAMESPACE = a_namespace(
    layers=LAYERS, kv_heads=HEADS, block_tokens=TOKENS, head_dim=ELEMENTS, block_bytes=BLOCK_BYTES, dtype="bfloat16"
)


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with a_node(capacity_bytes=4 << 20) as node:
        yield node


@pytest.fixture
def client(node: NodeProcess) -> Iterator[StoreClient]:
    with a_store_client(node.address, NAMESPACE) as client:
        yield client


@pytest.fixture
def folder() -> Iterator[Path]:
    with a_short_folder() as folder:
        yield folder


def a_model(seed: int) -> list:
    """Return the KV of the whole model, one tensor per layer."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, ELEMENTS)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def a_part(model: list, ranks: int, rank: int) -> list:
    """Return one rank's part of it."""
    heads = BlockShape.of(NAMESPACE).shard_box(ranks, rank).heads
    return [layer[:, heads.first : heads.end].contiguous() for layer in model]


def a_step(step: int = 1, **fields) -> StoreWork:
    return StoreWork(
        **{"loads": [], "urgent": [], "deferred": [], "releases": [], "idle": True, "step": step, **fields}
    )


class RankedEngine:
    """All ranks of an engine, each with its own client; they act at the same time."""

    def __init__(self, address: str, folder: Path, ranks: int, model: list, way: str):
        self.ranks = ranks
        self.layers = [a_part(model, ranks, rank) for rank in range(ranks)]
        self.clients = [a_store_client(address, NAMESPACE, prefer=(way,)) for _ in range(ranks)]
        self._threads = ThreadPoolExecutor(ranks)
        self.movers: list[BlockMover] = self.at_once(lambda rank: self._mover(rank, folder))
        self.step = 0

    def _mover(self, rank: int, folder: Path) -> BlockMover:
        return BlockMover(
            self.clients[rank], HostBlocks(self.layers[rank]), an_end(self.clients[rank], rank, self.ranks, folder)
        )

    def at_once(self, act: Callable[[int], object]) -> list:
        return [each.result(30) for each in [self._threads.submit(act, rank) for rank in range(self.ranks)]]

    def save(self, *, urgent: list[BlockSave] = (), deferred: list[BlockSave] = ()) -> None:
        self.step += 1
        work = a_step(self.step, urgent=list(urgent), deferred=list(deferred))
        self.at_once(lambda rank: self.movers[rank].save(work))

    def load(self, load: BlockLoad) -> list[list[bool]]:
        """Return the results of all ranks for each block."""

        def run(rank: int) -> list[bool]:
            self.movers[rank].start(a_step(loads=[load]))
            ((_, whole),) = eventually(lambda: self.movers[rank].collect(idle=True))
            return whole

        return self.at_once(run)

    def close(self) -> None:
        self.at_once(lambda rank: self.movers[rank].close())
        for client in self.clients:
            client.close()
        self._threads.shutdown()


def an_end(client: StoreClient, rank: int, ranks: int, folder: Path) -> LeaderRank | FollowerRank | None:
    if ranks == 1:
        return None
    seat = RankPosition.of(NAMESPACE, rank=rank, ranks=ranks)
    if rank:
        return FollowerRank(client, seat, folder / "ranks", MonotonicClock())
    leader = LeaderRank(client, seat, folder / "ranks", MonotonicClock())
    leader.gather()
    return leader


@contextmanager
def an_engine(node: NodeProcess, ranks: int, model: list, way: str = "shm") -> Iterator[RankedEngine]:
    with a_short_folder() as folder:
        engine = RankedEngine(node.address, folder, ranks, model, way)
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture
def pair(node: NodeProcess) -> Iterator[RankedEngine]:
    with an_engine(node, 2, a_model(1)) as pair:
        yield pair


def held(client: StoreClient, names: list[bytes]) -> int:
    return len(client.match(names, lease_seconds=0))


def assert_loaded(node: NodeProcess, client: StoreClient, names: list[bytes], model: list, first: int) -> None:
    """Check that an engine of one rank reads blocks of `model`, from block `first` on."""
    with an_engine(node, 1, [torch.zeros_like(layer) for layer in model]) as reader:
        whole = reader.load(BlockLoad("r", client.match(names, lease_seconds=10), 0, list(range(len(names)))))
        assert whole == [[True] * len(names)]
        for before, after in zip(model, reader.layers[0], strict=True):
            assert torch.equal(after[: len(names)], before[first : first + len(names)])


@pytest.mark.parametrize(
    ("kind", "writing", "reading"),
    [
        *[
            ("urgent", writing, reading)
            for writing, reading in [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8), (8, 2)]
        ],
        *[("deferred", writing, reading) for writing, reading in [(2, 1), (8, 2)]],
    ],
)
def test_engines_with_different_ranks_read_each_others_blocks(node, client, kind, writing, reading, monkeypatch):
    monkeypatch.setattr(vllm_ranks, "ORDER_BLOCKS", 10)
    model, names = a_model(1), a_chain(35)  # more than one command and one batch
    empty = [torch.zeros_like(layer) for layer in model]

    with an_engine(node, writing, model) as writer, an_engine(node, reading, empty) as reader:
        writer.save(**{kind: [BlockSave("r", names, list(range(5, 40)))]})
        found = eventually(lambda: len(match := client.match(names, lease_seconds=10)) == 35 and match)
        whole = reader.load(BlockLoad("r", found, 2, list(range(33))))
        moved = sum(each.counters().bytes_read for each in reader.clients)

    assert whole == [[True] * 33] * reading
    for rank in range(reading):
        for before, after in zip(a_part(model, reading, rank), reader.layers[rank], strict=True):
            assert torch.equal(after[:33], before[7:40])
            assert not after[33:].any(), "nothing else was written"
    assert moved == 33 * BLOCK_BYTES * max(1, reading // HEADS)
    stats = client.stats()
    assert (stats.written, stats.bytes_written) == (35, 35 * BLOCK_BYTES), "one object per block"
    assert stats.reservations == 0


def test_over_tcp_ranks_read_their_shares_and_write_none(pair, node, client):
    names, empty = a_chain(35), [torch.zeros_like(layer) for layer in a_model(1)]
    pair.save(urgent=[BlockSave("r", names, list(range(35)))])
    found = client.match(names, lease_seconds=10)
    pair.clients[0].connection.session.transport.mapping.bytes[found.slots[33].offset] ^= 0x10

    with an_engine(node, 2, empty, "tcp") as reader:
        assert not reader.clients[0].writes_shards
        assert reader.load(BlockLoad("r", found, 1, list(range(34)))) == [[True] * 32 + [False, True]] * 2
        reader.save(urgent=[BlockSave("q", a_chain(2, "b"), [4, 5])])

    for rank in range(2):
        for before, after in zip(a_part(a_model(1), 2, rank), reader.layers[rank], strict=True):
            assert torch.equal(after[:32], before[1:33])
            assert not after[32].any(), "a bad block is not copied"
    assert held(client, a_chain(2, "b")) == 0
    assert client.stats().reservations == 0


def test_urgent_blocks_are_there_when_the_first_rank_goes_on(pair, client):
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6]), BlockSave("q", a_chain(9)[5:], [8, 9, 10, 11])])

    assert (held(client, a_chain(3)), held(client, a_chain(9)[5:])) == (3, 4)
    assert pair.clients[0].counters().bytes_written == 7 * BLOCK_BYTES
    assert pair.clients[1].counters().bytes_written == 0, "only one rank publishes"


def test_only_missing_blocks_are_written_and_nobody_waits(pair, node, client):
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    pair.save(
        urgent=[BlockSave("r", a_chain(5), [4, 5, 6, 20, 21])], deferred=[BlockSave("r", a_chain(5), [4, 5, 6, 20, 21])]
    )
    pair.save(deferred=[BlockSave("r", a_chain(6), [4, 5, 6, 20, 21, 30])])

    eventually(lambda: held(client, a_chain(6)) == 6)
    assert client.stats().written == 6
    assert_loaded(node, client, a_chain(6)[3:5], a_model(1), 20)
    for mover in pair.movers:
        eventually(lambda mover=mover: mover.saver.area.free == mover.saver.area.capacity)


def test_deferred_blocks_keep_their_content_when_offered(pair, node, client):
    pair.save(deferred=[BlockSave("r", a_chain(3), [4, 5, 6])])
    for layers in pair.layers:
        for layer in layers:
            layer[4:7] = 0  # the engine gives the blocks to another request

    eventually(lambda: held(client, a_chain(3)) == 3)
    assert_loaded(node, client, a_chain(3), a_model(1), 4)


def test_failed_rank_publishes_nothing_and_blocks_no_other(pair, node, client):
    broken = pair.movers[1].saver.engine_blocks
    source, broken.source = broken.source, lambda _: lambda _: 1 / 0
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])

    assert held(client, a_chain(3)) == 0
    assert client.stats().reservations == 0, "their slots are free again"

    broken.source = source
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    assert held(client, a_chain(3)) == 3
    assert_loaded(node, client, a_chain(3), a_model(1), 4)


def test_blocks_unstaged_by_one_rank_are_not_stored(node, client, monkeypatch):
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.STAGING_BYTES", 0)
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.MIN_STAGED_BLOCKS", 4)
    with an_engine(node, 2, a_model(1)) as pair:
        area = pair.movers[1].saver.area
        taken = area.take([0, 1])

        pair.save(deferred=[BlockSave("r", a_chain(5), [1, 2, 3, 4, 5])])

        eventually(lambda: held(client, a_chain(5)) == 2)
        eventually(lambda: client.stats().reservations == 0)
        assert held(client, a_chain(5)) == 2
        eventually(lambda: area.free == 2)
        area.give_back(taken)
        pair.save(deferred=[BlockSave("r", a_chain(5)[2:], [3, 4, 5])])
        eventually(lambda: held(client, a_chain(5)) == 5)
        assert_loaded(node, client, a_chain(5), a_model(1), 1)


def test_rank_that_stages_after_the_others_keeps_no_room(pair, client, monkeypatch):
    monkeypatch.setattr("workers.engines.vllm.blocks.saves.LAG_SECONDS", 0.05)
    work = a_step(1, deferred=[BlockSave("r", a_chain(3), [4, 5, 6])])
    keeper = pair.movers[1].saver
    pair.movers[0].save(work)
    eventually(lambda: keeper.finished == {(1, 0)} and client.stats().reservations == 0)

    pair.movers[1].save(work)

    assert (keeper.area.free, keeper.staged, keeper.finished) == (keeper.area.capacity, {}, set())
    assert held(client, a_chain(3)) == 0


def test_rank_with_a_broken_thread_is_not_waited_for(pair, client, monkeypatch, caplog):
    keeper = pair.movers[1].saver
    monkeypatch.setattr(keeper, "end_saves", lambda saves: 1 / 0)

    pair.save(deferred=[BlockSave("r", a_chain(3), [4, 5, 6])])

    eventually(lambda: keeper.lost)
    pair.save(urgent=[BlockSave("q", a_chain(2, "b"), [4, 5])])
    assert pair.movers[0].ranks.lost
    assert held(client, a_chain(2, "b")) == 0
    assert client.stats().reservations == 0
    assert "first rank lost, blocks are not saved any more" not in [record.message for record in caplog.records]


def test_first_rank_lost_between_steps_is_logged_once(pair, caplog):
    pair.movers[0].close()
    eventually(lambda: "fleet-kv-write" not in {thread.name for thread in threading.enumerate()})
    assert caplog.records == [], "a stopped engine ends like this"

    for step in (1, 2):
        pair.movers[1].save(
            a_step(step, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])], deferred=[BlockSave("q", a_chain(1), [1])])
        )

    assert [record.message for record in caplog.records] == ["first rank lost, blocks are not saved any more"]


def test_late_rank_is_not_waited_for_and_spoils_nothing(pair, node, client, monkeypatch):
    monkeypatch.setattr(vllm_ranks, "LEAD", Nanos(SECOND // 10))
    late, write_shard = threading.Event(), pair.clients[1].write_shard

    def slow(*arguments):
        assert late.wait(60)
        return write_shard(*arguments)

    monkeypatch.setattr(pair.clients[1], "write_shard", slow)
    saving = threading.Thread(
        target=pair.movers[1].save,
        args=[a_step(1, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])],
        daemon=True,
    )
    saving.start()
    pair.movers[0].save(a_step(1, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))
    assert held(client, a_chain(3)) == 0
    client.write(a_chain(3, "b"), [bytes(BLOCK_BYTES)] * 3)  # uses the slots that are free again

    late.set()
    saving.join(60)

    assert held(client, a_chain(3)) == 0
    into = [bytearray(BLOCK_BYTES) for _ in range(3)]
    found = client.match(a_chain(3, "b"), lease_seconds=10)
    assert client.read(found, range(3), into) == [True] * 3, "the rank did not notice that its slots were reused"
    assert into == [bytes(BLOCK_BYTES)] * 3
    pair.step = 1
    pair.movers[0].ranks.answering[0].succeeded()  # the pause is over
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    assert_loaded(node, client, a_chain(3), a_model(1), 4)


def test_silent_rank_is_waited_for_once_then_after_a_pause(pair, node, client, monkeypatch, caplog):
    monkeypatch.setattr(vllm_ranks, "LEAD", Nanos(SECOND // 20))
    leader, clock = pair.movers[0].ranks, ManualClock()
    leader.clock, leader.at_once = clock, 1  # one command per block

    for step in (1, 2):
        pair.movers[0].save(
            a_step(step, urgent=[BlockSave("r", a_chain(3), [4, 5, 6]), BlockSave("q", a_chain(2, "q"), [7, 8])])
        )

    assert [(record.message, record.rank) for record in caplog.records] == [
        ("engine rank does not answer, blocks are not kept", 1)
    ]
    assert client.stats().reservations == 0
    monkeypatch.setattr(vllm_ranks, "LEAD", Nanos(20 * SECOND))
    pair.step = 2
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    assert held(client, a_chain(3)) == 0, "the pause is not over"
    clock.move(SECOND)
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    assert_loaded(node, client, a_chain(3), a_model(1), 4)


def test_silent_first_rank_is_waited_for_once_per_step(pair, client, monkeypatch, caplog):
    monkeypatch.setattr(vllm_ranks, "FOLLOW", Nanos(SECOND // 20))
    saves = [BlockSave("r", a_chain(3), [4, 5, 6]), BlockSave("q", a_chain(2, "q"), [7, 8])]

    pair.movers[1].save(a_step(1, urgent=saves))

    assert [record.message for record in caplog.records] == ["first rank orders nothing, blocks are not kept"]
    pair.movers[0].ranks.at_once = 2  # several commands, one of which finds no rank for a while
    monkeypatch.setattr(vllm_ranks, "FOLLOW", Nanos(20 * SECOND))
    pair.step = 1
    pair.save(urgent=saves)
    assert (held(client, a_chain(3)), held(client, a_chain(2, "q"))) == (3, 2)


def test_rejected_reservation_ends_the_save_on_all_ranks(pair, client, monkeypatch, caplog):
    monkeypatch.setattr(vllm_ranks, "FOLLOW", Nanos(20 * SECOND))

    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6], tenant=b"no salt")])

    said = [record.message for record in caplog.records]
    assert said == ["kv block write failed"], "no rank waited in vain"
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    assert held(client, a_chain(3)) == 3


def test_full_store_keeps_what_fits_and_nobody_waits(monkeypatch, caplog):
    monkeypatch.setattr(vllm_ranks, "FOLLOW", Nanos(20 * SECOND))
    with (
        a_node(capacity_bytes=5 * -(-BLOCK_BYTES // PAGE_BYTES) * PAGE_BYTES) as node,
        a_store_client(node.address, NAMESPACE) as client,
        an_engine(node, 2, a_model(1)) as pair,
    ):
        pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
        pinned = client.match(a_chain(3), lease_seconds=10)
        pair.save(urgent=[BlockSave("q", a_chain(4, "q"), [7, 8, 9, 10])])
        full = client.match(a_chain(4, "q"), lease_seconds=10)
        pair.save(urgent=[BlockSave("s", a_chain(2, "s"), [11, 12])])

        assert (len(pinned), len(full), held(client, a_chain(2, "s"))) == (3, 2, 0)
        assert client.stats().reservations == 0
        assert_loaded(node, client, a_chain(2, "q"), a_model(1), 7)
    assert caplog.records == []


def test_many_saves_can_end_at_once(pair):
    over = [(step, 0) for step in range(1, 20_001)]
    keeper = pair.movers[1].saver

    pair.movers[0].ranks.write(RankChannel.DEFERRED, [], [], lambda _: None, tenant=b"", ended=over)

    eventually(lambda: keeper.finished == set(over))
    pair.movers[1].save(a_step(20_000))
    assert keeper.finished == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_uncopyable_block_ends_its_save_not_the_engine(pair, node, client, rank):
    broken = pair.movers[rank].saver.engine_blocks
    copy_out = broken.copy_out

    def failing(block_ids, rows):
        return copy_out(block_ids, rows) if 6 not in block_ids else 1 / 0

    broken.copy_out = failing
    pair.save(deferred=[BlockSave("r", a_chain(3), [4, 5, 6]), BlockSave("q", a_chain(2, "q"), [7, 8])])

    eventually(lambda: held(client, a_chain(2, "q")) == 2)
    eventually(lambda: client.stats().reservations == 0)
    assert held(client, a_chain(3)) == 0
    assert_loaded(node, client, a_chain(2, "q"), a_model(1), 7)
    for mover in pair.movers:
        eventually(lambda mover=mover: mover.saver.area.free == mover.saver.area.capacity)


def test_bad_byte_in_one_ranks_share_is_seen_by_all(pair, node, client):
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    found = client.match(a_chain(3), lease_seconds=10)
    with a_store_client(node.address, NAMESPACE, prefer=("shm",)) as vandal:
        # The last byte of the block belongs to the second rank.
        vandal.connection.session.transport.mapping.bytes[found.slots[1].offset + BLOCK_BYTES - 1] ^= 0x10

    assert pair.load(BlockLoad("r", found, 0, [20, 21, 22])) == [[True, False, True]] * 2
    assert held(client, a_chain(3)) == 1, "the block is gone"
    assert client.stats().corrupt == 1


def test_lease_of_a_load_outlives_the_first_finished_rank(pair, client):
    pair.save(urgent=[BlockSave("r", a_chain(3), [4, 5, 6])])
    found = client.match(a_chain(3), lease_seconds=10)

    pair.load(BlockLoad("r", found, 0, [20, 21, 22]))

    assert client.stats().leases == 1
    pair.at_once(lambda rank: pair.movers[rank].start(a_step(2, releases=[found.lease_id])))
    eventually(lambda: client.stats().leases == 0)


def a_rank_that_dies(address: str, folder: Path, rank: int, ready: Connection) -> None:
    """Join an engine of two ranks, and kill this process after one block of a save of three."""
    client = a_store_client(address, NAMESPACE)
    mover = BlockMover(client, HostBlocks(a_part(a_model(1), 2, rank)), an_end(client, rank, 2, folder))
    source = mover.saver.engine_blocks.source

    def dying(block_ids):
        of = source(block_ids)

        def one(index: int):
            if index:
                os.kill(os.getpid(), signal.SIGKILL)
            return of(index)

        return one

    mover.saver.engine_blocks.source = dying
    ready.send(rank)
    mover.save(a_step(1, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))


@contextmanager
def beside_one_that_dies(node: NodeProcess, folder: Path, dying: int) -> Iterator[tuple[BlockMover, StoreClient]]:
    """Run the other rank of the engine."""
    spawn = multiprocessing.get_context("spawn")
    ready, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=a_rank_that_dies, args=(node.address, folder, dying, theirs), daemon=True)
    process.start()
    with a_store_client(node.address, NAMESPACE) as client:
        mover = BlockMover(client, HostBlocks(a_part(a_model(1), 2, 1 - dying)), an_end(client, 1 - dying, 2, folder))
        try:
            assert ready.poll(30)
            yield mover, client
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
        finally:
            mover.close()
            process.kill()


def test_rank_killed_while_writing_leaves_nothing(node, client, folder):
    with beside_one_that_dies(node, folder, dying=1) as (first, _):
        first.save(a_step(1, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))

        assert held(client, a_chain(3)) == 0
        assert client.stats().reservations == 0
        # vLLM ends the engine, which continues until then.
        first.save(a_step(2, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))
        assert held(client, a_chain(3)) == 0


def test_reservation_of_a_killed_first_rank_ends_by_itself(folder, monkeypatch, caplog):
    monkeypatch.setattr(vllm_ranks, "FOLLOW", Nanos(20 * SECOND))  # the first rank is killed, and never merely late
    with (
        a_node(capacity_bytes=4 << 20, reservation_seconds=1) as node,
        a_store_client(node.address, NAMESPACE) as client,
    ):
        with beside_one_that_dies(node, folder, dying=0) as (other, _):
            other.save(
                a_step(1, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])], deferred=[BlockSave("q", a_chain(1), [1])])
            )
            steps = count(2)

            def told() -> bool:  # the end is seen after the system has ended the process
                other.save(a_step(next(steps), urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))
                return bool(caplog.records)

            eventually(told)
            for step in islice(steps, 2):
                other.save(a_step(step, urgent=[BlockSave("r", a_chain(3), [4, 5, 6])]))

        assert [record.message for record in caplog.records] == ["first rank lost, blocks are not saved any more"]
        assert held(client, a_chain(3)) == 0
        eventually(lambda: client.stats().reservations == 0)
        assert client.write(a_chain(3), [bytes(BLOCK_BYTES)] * 3) == 3
