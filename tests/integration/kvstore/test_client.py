"""Tests of store clients against a real node process, with and without failures."""

import gc
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore import block
from kvstore.client.store_client import StoreClient
from kvstore.clock import MILLISECOND, SECOND
from kvstore.errors import InvalidArgument, LayoutMismatch, StoreUnreachable
from kvstore.messages import DataPath, Match, SessionPinResult
from kvstore.namespace import KvNamespace
from kvstore.protocol import wire
from kvstore.transports.shared_memory import SharedMemoryTransport
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    ManualClock,
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_short_folder,
    a_store_client,
    empty_buffers,
)
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

LEASE_SECONDS = 10
CAPACITY_BLOCKS = 16


@pytest.fixture
def node():
    with a_node(capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES) as node:
        yield node


@pytest.fixture(scope="module")
def shared_node():
    """Share one node between tests that do not change it."""
    with a_node(capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES) as node:
        yield node


@pytest.fixture(params=[DataPath.SHM, DataPath.TCP])
def client(node, request):
    with a_store_client(node.address, a_namespace(), prefer=(request.param,)) as client:
        yield client


def another(client: StoreClient, node) -> StoreClient:
    return a_store_client(node.address, client.namespace, prefer=(client.path,))


def fetch(client: StoreClient, chain) -> list[np.ndarray | None]:
    """Return the blocks of the longest prefix, with None for each block that could not be read."""
    match = client.match(chain, lease_seconds=LEASE_SECONDS)
    into = empty_buffers(len(match))
    good = client.read(match, range(len(match)), into)
    client.release(match.lease_id)
    return [copy if ok else None for copy, ok in zip(into, good, strict=True)]


def equal(blocks, others) -> bool:
    return len(blocks) == len(others) and all(map(np.array_equal, blocks, others))


def test_blocks_of_one_client_are_read_by_another(client, node):
    chain, blocks = a_chain(5), [a_block(seed) for seed in range(5)]

    assert client.write(chain, blocks) == 5

    with another(client, node) as reader:
        assert equal(fetch(reader, [*chain, *a_chain(1, "more")]), blocks)
        counters = reader.counters()
    assert (counters.hits, counters.misses, counters.bytes_read) == (5, 1, 5 * BLOCK_BYTES)
    assert client.counters().bytes_written == 5 * BLOCK_BYTES


def test_preferred_path_is_used_else_tcp(node):
    with a_store_client(node.address, a_namespace()) as client:
        assert client.path is DataPath.SHM
    with (
        a_node(shm_socket="") as elsewhere,
        a_store_client(elsewhere.address, a_namespace()) as client,
    ):
        assert client.path is DataPath.TCP
        assert client.write(a_chain(1), [a_block(1)]) == 1


def test_unavailable_shared_memory_is_used_later(node):
    door, hidden = Path(node.endpoints.shm_socket), Path(node.folder) / "hidden"
    door.rename(hidden)
    with a_store_client(node.address, a_namespace()) as client:
        assert client.path is DataPath.TCP
        assert client.write(a_chain(2), a_block) == 2
        before = client.match(a_chain(2), lease_seconds=LEASE_SECONDS)
        hidden.rename(door)

        eventually(lambda: client.stats() and client.path is DataPath.SHM)

        into = empty_buffers(2)
        assert client.read(before, range(2), into) == [True, True]
        assert equal(into, [a_block(0), a_block(1)])
        assert client.write(a_chain(4, "new"), a_block) == 4
        node.kill()
        node.start()
        assert eventually(lambda: client.write(a_chain(1), a_block)) == 1
        assert client.path is DataPath.SHM


def test_attempts_for_shared_memory_back_off(node, monkeypatch):
    clock, attempts = ManualClock(), []

    def refuse(*_: object) -> None:
        attempts.append((clock.now() - SECOND) // MILLISECOND)
        raise StoreUnreachable("no turn")

    Path(node.endpoints.shm_socket).rename(Path(node.folder) / "hidden")
    monkeypatch.setattr("kvstore.client.node_connection.with_shared_memory", refuse)
    with a_store_client(node.address, a_namespace(), clock=clock) as client:
        for _ in range(80):
            assert client.stats()
            eventually(lambda: not client.connection.seeking.locked())
            clock.move(10 * MILLISECOND)

    assert attempts == [0, 100, 300, 700], "0.1 s, then twice as long each time"


def test_calls_go_on_without_a_thread_for_shared_memory(node, monkeypatch):
    door, hidden = Path(node.endpoints.shm_socket), Path(node.folder) / "hidden"
    door.rename(hidden)
    with a_store_client(node.address, a_namespace()) as client:
        with monkeypatch.context() as crowded:
            crowded.setattr(threading.Thread, "start", no_thread)
            assert client.stats()
        hidden.rename(door)

        eventually(lambda: client.stats() and client.path is DataPath.SHM)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_path_at_all_is_unreachable():
    with a_node(data_listen="") as node, pytest.raises(StoreUnreachable, match="no bytes can be moved"):
        a_store_client(node.address, a_namespace(), prefer=("tcp",))


def test_held_blocks_are_neither_requested_nor_rewritten(client):
    chain = a_chain(4)
    client.write(chain[:2], [a_block(0), a_block(1)])
    asked = []

    def source(index: int) -> np.ndarray:
        asked.append(index)
        return a_block(index)

    assert client.write(chain, source) == 2
    assert asked == [2, 3]
    assert equal(fetch(client, chain), [a_block(seed) for seed in range(4)])


def test_pieces_are_gathered_and_scattered(client):
    layers = [a_block(1).reshape(4, -1), a_block(2).reshape(4, -1)]
    client.write(a_chain(2), lambda index: list(layers[index]))
    match = client.match(a_chain(2), lease_seconds=LEASE_SECONDS)
    copies = [[np.zeros(BLOCK_BYTES // 4, np.uint8) for _ in range(4)] for _ in range(2)]

    assert client.read(match, [1, 0], [copies[1], copies[0]]) == [True, True]

    assert all(np.array_equal(np.stack(copies[i]), layers[i]) for i in range(2))


def test_a_match_can_be_read_and_released_in_another_process(client, node):
    client.write(a_chain(3), [a_block(seed) for seed in range(3)])
    match = client.match(a_chain(3), lease_seconds=LEASE_SECONDS)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()

    process = spawn.Process(target=read_elsewhere, args=(node.address, client.path, pickle.dumps(match), theirs))
    process.start()
    assert ours.poll(60)
    copies = ours.recv()
    process.join(60)

    assert [bytes(a_block(seed)) for seed in range(3)] == copies
    assert client.stats().pinned == 0


def read_elsewhere(address: str, path: DataPath, pickled: bytes, answer: Connection) -> None:
    match: Match = pickle.loads(pickled)  # noqa: S301 - the test itself pickled it
    with a_store_client(address, a_namespace(), prefer=(path,)) as client:
        copies = [bytearray(BLOCK_BYTES) for _ in range(len(match))]
        good = client.read(match, range(len(match)), copies)
        client.release(match.lease_id)
        answer.send([bytes(copy) if ok else None for copy, ok in zip(copies, good, strict=True)])


def test_two_tenants_never_read_each_others_blocks(client):
    tokens = os.urandom(4 * 32 * 3)
    mine = block.chain(tokens, 32, salt=block.tenant_salt(b"secret", "one"))
    client.write(mine, [a_block(seed) for seed in range(3)])

    assert len(fetch(client, mine)) == 3
    assert fetch(client, block.chain(tokens, 32, salt=block.tenant_salt(b"secret", "two"))) == []
    assert fetch(client, block.chain(tokens, 32)) == []


def test_expired_lease_of_a_reused_slot_is_a_miss(client):
    old = a_chain(CAPACITY_BLOCKS, "old")
    client.write(old, [a_block(seed) for seed in range(CAPACITY_BLOCKS)])
    match = client.match(old, lease_seconds=0.05)
    eventually(lambda: client.stats().leases == 0)  # the lease has to end by itself
    new = [a_block(100 + seed) for seed in range(CAPACITY_BLOCKS)]
    assert client.write(a_chain(CAPACITY_BLOCKS, "new"), new) == CAPACITY_BLOCKS

    good = client.read(match, range(len(match)), empty_buffers(len(match)))

    assert good == [False] * CAPACITY_BLOCKS
    counters = client.counters()
    assert (counters.lost, counters.corrupt) == (CAPACITY_BLOCKS, 0)
    assert client.stats().corrupt == 0


def test_expired_lease_is_a_miss_after_block_size_changed(client, node):
    client.write(a_chain(CAPACITY_BLOCKS), a_block)
    match = client.match(a_chain(CAPACITY_BLOCKS), lease_seconds=0.05)
    eventually(lambda: client.stats().leases == 0)  # the lease has to end by itself
    whole = a_namespace(model="big", block_bytes=CAPACITY_BLOCKS * BLOCK_BYTES)
    with a_store_client(node.address, whole) as big:
        assert big.write(a_chain(1), [a_block(99, whole.block_bytes)]) == 1

    good = client.read(match, range(len(match)), empty_buffers(len(match)))

    assert good == [False] * CAPACITY_BLOCKS
    assert (client.counters().lost, client.counters().corrupt) == (CAPACITY_BLOCKS, 0)


def test_releases_beyond_the_request_limit_are_split(client, monkeypatch):
    monkeypatch.setattr(wire, "MAX_LEASES", 2)  # in this process, not in the node
    client.write(a_chain(1), [a_block(1)])
    matches = [client.match(a_chain(1), lease_seconds=LEASE_SECONDS) for _ in range(5)]
    assert client.stats().leases == 5

    client.release(*(match.lease_id for match in matches))

    assert client.stats().leases == 0


def test_a_lease_keeps_its_blocks_while_others_write(client):
    chain, blocks = a_chain(4), [a_block(seed) for seed in range(4)]
    client.write(chain, blocks)
    match = client.match(chain, lease_seconds=LEASE_SECONDS)
    for flood in range(5):
        client.write(a_chain(CAPACITY_BLOCKS, f"f{flood}"), a_block)

    into = empty_buffers(4)

    assert client.read(match, range(4), into) == [True] * 4
    assert equal(into, blocks)


def test_full_store_drops_and_counts_excess_blocks(client):
    chain = a_chain(CAPACITY_BLOCKS)
    client.write(chain, a_block)
    match = client.match(chain, lease_seconds=LEASE_SECONDS)

    assert client.write(a_chain(3, "b"), a_block) == 0
    assert client.counters().dropped == 3
    client.release(match.lease_id)
    assert client.write(a_chain(3, "b"), a_block) == 3


def test_chain_that_does_not_fit_loses_its_tail_counted_once(client):
    chain = a_chain(CAPACITY_BLOCKS + 4)

    assert client.write(chain, a_block) == CAPACITY_BLOCKS

    assert client.counters().dropped == 4
    assert client.stats().evicted == 0, "a chain evicts none of its own blocks"
    assert equal(fetch(client, chain), [a_block(seed) for seed in range(CAPACITY_BLOCKS)])


def test_tail_of_a_chain_is_evicted_first(client):
    chain = a_chain(CAPACITY_BLOCKS)
    client.write(chain, a_block)

    client.write(a_chain(3, "new"), a_block)

    assert len(client.match(chain, lease_seconds=0)) == CAPACITY_BLOCKS - 3


def test_node_death_during_a_write_loses_the_chain(client, node):
    def source(index: int) -> np.ndarray:
        if index == 5:
            node.kill()
        return a_block(index)

    written = client.write(a_chain(12), source)

    counters = client.counters()
    assert written == 0
    assert (counters.bytes_written, counters.dropped) == (0, 12)


def test_failing_source_frees_its_slots_at_once(client, node):
    chain = a_chain(CAPACITY_BLOCKS)

    def source(index: int) -> np.ndarray:
        if index == 3:
            raise MemoryError("the engine's own")
        return a_block(index)

    with pytest.raises(MemoryError, match="the engine's own"):
        client.write(chain, source)

    assert client.stats().reservations == 0
    assert client.counters().dropped == CAPACITY_BLOCKS
    assert len(client.match(chain, lease_seconds=0)) == 0
    with another(client, node) as other:
        assert other.write(chain, a_block) == CAPACITY_BLOCKS, "the whole chain fits"


def test_two_writers_of_one_chain_write_each_block_once(client, node):
    start = threading.Barrier(2)

    def write(writer: StoreClient) -> int:
        start.wait(60)
        return writer.write(a_chain(8), a_block)

    with another(client, node) as other, ThreadPoolExecutor(2) as threads:
        written = list(threads.map(write, [client, other]))

    assert sum(written) == 8
    assert client.stats().written == 8
    assert equal(fetch(client, a_chain(8)), [a_block(seed) for seed in range(8)])


def test_corrupt_byte_is_never_returned_and_block_is_dropped(client, node):
    chain = a_chain(3)
    client.write(chain, a_block)
    flip_a_byte(node, client.namespace, client.match(chain, lease_seconds=0).slots[1].offset + 77)

    copies = fetch(client, chain)

    assert copies[1] is None
    assert np.array_equal(copies[0], a_block(0))
    assert np.array_equal(copies[2], a_block(2))
    assert client.counters().corrupt == 1
    assert client.stats().corrupt == 1
    assert len(fetch(client, chain)) == 1, "the chain has a hole now"
    assert client.write(chain, a_block) == 1
    assert equal(fetch(client, chain), [a_block(seed) for seed in range(3)])


def flip_a_byte(node, namespace: KvNamespace, offset: int) -> None:
    with a_store_client(node.address, namespace, prefer=("shm",)) as vandal:
        transport = vandal.connection.session.transport
        assert isinstance(transport, SharedMemoryTransport)
        transport.mapping.bytes[offset] ^= 0x40


def test_false_corruption_report_costs_nothing(client):
    client.write(a_chain(1), [a_block(1)])
    match = client.match(a_chain(1), lease_seconds=0)

    client.condemn(match, [0])

    assert client.stats().corrupt == 0
    assert equal(fetch(client, a_chain(1)), [a_block(1)])


def test_killed_writer_holds_space_only_until_the_deadline():
    with a_node(capacity_bytes=4 * BLOCK_BYTES, reservation_seconds=0.5) as node:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        writer = spawn.Process(target=reserve_and_wait, args=(node.address, theirs))
        writer.start()
        assert ours.poll(60)
        assert ours.recv() == 4
        writer.kill()
        writer.join(60)

        with a_store_client(node.address, a_namespace()) as client:
            assert client.write(a_chain(4, "mine"), a_block) in (0, 4)
            eventually(lambda: client.write(a_chain(4, "mine"), a_block) or len(fetch(client, a_chain(4, "mine"))) == 4)
            assert client.stats().expired == 1
            assert fetch(client, a_chain(4, "lost")) == []


def reserve_and_wait(address: str, told: Connection) -> None:
    client = a_store_client(address, a_namespace())
    _, reservation = client.request_slots(a_chain(4, "lost"), b"")
    told.send(len(reservation))
    threading.Event().wait()


def test_a_killed_node_means_misses_and_its_successor_is_found(client, node):
    chain = a_chain(4)
    client.write(chain, a_block)
    match = client.match(chain, lease_seconds=LEASE_SECONDS)
    node.kill()

    for _ in range(50):
        with at_most(4):
            assert len(client.match(chain, lease_seconds=LEASE_SECONDS)) == 0
            assert client.write(a_chain(1, "b"), [a_block(9)]) == 0
            into = empty_buffers(4)
            for ok, copy, seed in zip(client.read(match, range(4), into), into, range(4), strict=True):
                assert not ok or np.array_equal(copy, a_block(seed))
            client.release(match.lease_id)

    node.start()
    eventually(lambda: client.write(chain, lambda index: a_block(10 + index)) == 4)
    assert equal(fetch(client, chain), [a_block(10 + seed) for seed in range(4)])
    assert client.read(match, range(4), empty_buffers(4)) == [False] * 4, (
        "the reservation belongs to another incarnation"
    )
    client.release(match.lease_id)
    counters = client.counters()
    assert counters.failures > 0
    assert counters.dropped >= 50


def test_restart_between_two_calls_goes_unnoticed(client, node):
    client.write(a_chain(2), a_block)
    node.kill()
    node.start()

    assert eventually(lambda: client.write(a_chain(2), lambda index: a_block(20 + index))) == 2
    assert equal(fetch(client, a_chain(2)), [a_block(20), a_block(21)])


def test_client_that_missed_a_restart_spares_the_old_pool(client, node):
    client.write(a_chain(1, "before"), [a_block(1)])
    node.kill()
    node.start()
    with another(client, node) as quicker:  # another client opens the namespace there before ours calls
        eventually(lambda: client.write(a_chain(3), a_block) == 3)

        assert equal(fetch(quicker, a_chain(3)), [a_block(seed) for seed in range(3)])
        assert quicker.counters().corrupt == 0


def test_a_reader_learns_of_a_restart_from_the_match_it_is_given(client, node):
    with another(client, node) as reader:
        node.kill()
        node.start()
        eventually(lambda: client.write(a_chain(2), a_block))
        match = client.match(a_chain(2), lease_seconds=LEASE_SECONDS)

        into = empty_buffers(2)
        good = eventually(lambda: all(reader.read(match, range(2), into)))

        assert good
        assert equal(into, [a_block(0), a_block(1)])


def test_a_match_of_an_unknown_node_is_a_miss(client):
    client.write(a_chain(1), [a_block(1)])
    match = client.match(a_chain(1), lease_seconds=LEASE_SECONDS)
    foreign = Match(incarnation="another", lease_id=match.lease_id, names=match.names, slots=match.slots)

    assert client.read(foreign, [0], empty_buffers(1)) == [False]
    assert client.read(match, [0], empty_buffers(1)) == [True]


def test_hung_node_costs_its_deadline_once(node):
    with a_store_client(node.address, a_namespace(), call_timeout_seconds=0.3) as client:
        eventually(lambda: client.write(a_chain(1), [a_block(1)]))
        node.freeze()
        started = time.monotonic()
        with at_most(20):
            assert len(client.match(a_chain(1), lease_seconds=1)) == 0
        assert time.monotonic() - started > 0.25

        with at_most(20):
            for _ in range(100):
                assert len(client.match(a_chain(1), lease_seconds=1)) == 0
                assert client.write(a_chain(1, "b"), [a_block(1)]) == 0

        node.thaw()
        assert eventually(lambda: len(client.match(a_chain(1), lease_seconds=1))) == 1


def test_connecting_without_a_node_fails_in_time():
    with a_short_folder() as folder, at_most(20), pytest.raises(StoreUnreachable):
        a_store_client(f"unix:{folder}/nobody", a_namespace(), timeout_seconds=0.3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("block_tokens", 64), ("kv_heads", 4), ("layout", "NHD"), ("format_version", 2)],
)
def test_layout_mismatch_is_rejected_before_any_byte_moves(shared_node, field, value):
    with a_store_client(shared_node.address, a_namespace()) as client:
        client.write(a_chain(1), [a_block(1)])
        with pytest.raises(LayoutMismatch, match=field) as refused:
            a_store_client(shared_node.address, a_namespace(**{field: value}))

    assert refused.value.field == field


def test_impossible_namespace_is_rejected_by_field(shared_node):
    with pytest.raises(InvalidArgument) as refused:
        a_store_client(shared_node.address, a_namespace(block_bytes=CAPACITY_BLOCKS * BLOCK_BYTES + 1))

    assert refused.value.field == "namespace.block_bytes"


@pytest.mark.parametrize(
    ("call", "field", "request_of"),
    [
        ("Match", "hashes", lambda i, d: pb.MatchRequest(digest=d, hashes=b"x" * 15, incarnation=i)),
        ("Match", "hashes", lambda i, d: pb.MatchRequest(digest=d, incarnation=i)),
        ("Match", "digest", lambda i, d: pb.MatchRequest(digest=b"x", hashes=b"x" * 16, incarnation=i)),
        ("Match", "lease_ms", lambda i, d: pb.MatchRequest(digest=d, hashes=b"x" * 16, lease_ms=10**9, incarnation=i)),
        ("Reserve", "lease_ms", lambda i, d: pb.ReserveRequest(digest=d, hashes=b"x" * 16, incarnation=i)),
        ("Publish", "indices", lambda i, d: pb.PublishRequest(indices=[0, 0], crc32c=[1, 2])),
        ("Publish", "crc32c", lambda i, d: pb.PublishRequest(indices=[0, 1], crc32c=[1])),
        ("Publish", "owner", lambda i, d: pb.PublishRequest(owner="node")),
        ("Match", "tenant", lambda i, d: pb.MatchRequest(digest=d, hashes=b"x" * 16, tenant=b"x", incarnation=i)),
        (
            "Reserve",
            "tenant",
            lambda i, d: pb.ReserveRequest(digest=d, hashes=b"x" * 16, lease_ms=1, tenant=b"x" * 31, incarnation=i),
        ),
        (
            "Reserve",
            "owner",
            lambda i, d: pb.ReserveRequest(digest=d, hashes=b"x" * 16, lease_ms=1, owner="node", incarnation=i),
        ),
        ("Hold", "session", lambda i, d: pb.HoldRequest(digest=d, hashes=b"x" * 16, hold_ms=1, incarnation=i)),
        ("Hold", "hold_ms", lambda i, d: pb.HoldRequest(digest=d, hashes=b"x" * 16, session="s", incarnation=i)),
        ("ReleaseHold", "session", lambda i, d: pb.ReleaseHoldRequest(digest=d)),
        ("Release", "lease_ids", lambda i, d: pb.ReleaseRequest(lease_ids=range(wire.MAX_LEASES + 1))),
        ("Condemn", "generations", lambda i, d: pb.CondemnRequest(digest=d, hashes=b"x" * 16)),
        ("Hello", "namespace.model", lambda i, d: pb.HelloRequest()),
    ],
)
def test_a_bad_request_is_rejected_by_field(shared_node, call, field, request_of):
    namespace = a_namespace()
    with grpc.insecure_channel(shared_node.address) as channel:
        stub = pb_grpc.BlockStoreStub(channel)
        stub.Hello(pb.HelloRequest(namespace=wire.namespace_message(namespace), digest=namespace.digest), timeout=60)

        with pytest.raises(grpc.RpcError) as refused:
            getattr(stub, call)(request_of(shared_node.endpoints.incarnation, namespace.digest), timeout=60)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"{field}: ")
    assert (wire.FIELD_KEY, field) in refused.value.trailing_metadata()


def test_exception_of_the_caller_is_not_hidden(client):
    with pytest.raises(InvalidArgument):
        client.match([b"too short"], lease_seconds=1)
    with pytest.raises(AssertionError):
        client.write(a_chain(1), [a_block(1)[:-1]])


def test_closing_a_client_ends_its_calls_without_an_error(client):
    client.close()

    assert len(client.match(a_chain(1), lease_seconds=1)) == 0
    assert client.write(a_chain(1), [a_block(1)]) == 0
    client.release(5)


def test_call_whose_connection_is_closed_meanwhile_gives_none(client):
    stub = client.connection.stub

    def act(_session, seconds):
        client.close()
        return stub.Stats(pb.StatsRequest(), timeout=seconds)

    assert client.connection.call(act) is None


def test_handshake_on_a_channel_closed_meanwhile_gives_none(client):
    """The node refuses the incarnation, so a handshake follows, on a channel that is closed by then."""
    stub = client.connection.stub
    stale = pb.MatchRequest(digest=client.namespace.digest, hashes=a_chain(1)[0], incarnation="an ended one")

    def act(_session, seconds):
        try:
            return stub.Match(stale, timeout=seconds)
        finally:
            client.close()

    assert client.connection.call(act) is None


def test_threads_on_an_overflowing_store_get_no_wrong_bytes(client, node):
    least, over = time.monotonic() + 1.5, time.monotonic() + 60
    chains = [a_chain(6, f"c{number}") for number in range(8)]
    found = []

    def content(number: int, index: int) -> np.ndarray:
        return a_block(1000 * number + index)

    def work(seed: int) -> None:
        with another(client, node) as mine:
            turn = seed
            while (now := time.monotonic()) < least or (len(found) <= 100 and now < over):
                turn += 3
                number = turn % len(chains)
                mine.write(chains[number], lambda index, number=number: content(number, index))
                for index, copy in enumerate(fetch(mine, chains[number])):
                    assert copy is None or np.array_equal(copy, content(number, index))
                    found.append(index)
            assert mine.counters().corrupt == 0

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))

    assert len(found) > 100
    assert client.stats().evicted > 0
    eventually(lambda: client.stats().pinned == 0)


def test_closed_clients_leave_nothing_open(client, node):
    def use() -> None:
        with another(client, node) as guest:
            guest.write(a_chain(2), a_block)
            assert len(fetch(guest, a_chain(2))) == 2
        del guest
        gc.collect()

    use()
    before = files_of(node.process.pid), files_of(os.getpid())
    for _ in range(10):
        use()

    eventually(lambda: files_of(node.process.pid) <= before[0])
    eventually(lambda: files_of(os.getpid()) <= before[1])


def files_of(process_id: int) -> int:
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))


def test_waiting_session_keeps_its_blocks(node, client):
    chain = a_chain(3, "session")
    client.write(chain, a_block)

    assert client.hold("session", chain, seconds=60) == SessionPinResult(blocks=3)
    client.write(a_chain(CAPACITY_BLOCKS, "flood"), a_block)
    assert fetch(client, chain)[2] is not None
    assert client.stats().held_bytes == 3 * BLOCK_BYTES

    client.release_hold("session")
    client.release_hold("session")  # a second call does nothing
    client.write(a_chain(CAPACITY_BLOCKS, "another"), a_block)
    assert len(client.match(chain, lease_seconds=0)) == 0
    assert client.hold("session", [], seconds=1) == SessionPinResult(blocks=0)


def test_pins_have_a_pool_share_and_a_deadline():
    with (
        a_node(capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES, max_held_share=0.25, max_hold_seconds=0.5) as node,
        a_store_client(node.address, a_namespace()) as client,
    ):
        chain = a_chain(6)
        client.write(chain, a_block)

        assert client.hold("session", chain, seconds=3600) == SessionPinResult(blocks=4, refused=2)

        eventually(lambda: client.stats().held_bytes == 0)


def test_tenant_over_its_quota_loses_its_own_blocks():
    mine, yours = b"m" * 32, b"y" * 32
    quotas = {"tenant_quota_bytes": 4 * BLOCK_BYTES, "tenant_quotas": {yours.hex(): 2 * BLOCK_BYTES}}
    with (
        a_node(capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES, **quotas) as node,
        a_store_client(node.address, a_namespace()) as client,
    ):
        client.write(a_chain(2, "nobody"), a_block)
        assert client.write(a_chain(3, "mine"), a_block, tenant=mine) == 3
        assert client.write(a_chain(3, "yours"), a_block, tenant=yours) == 2
        assert client.counters().dropped == 1

        assert client.write(a_chain(2, "new"), a_block, tenant=mine) == 2

        held = [len(client.match(a_chain(3, of), lease_seconds=0)) for of in ("nobody", "mine", "yours", "new")]
        assert held == [2, 2, 2, 2]
        client.match(a_chain(3, "mine"), lease_seconds=1, tenant=mine)
        rows = {row.quota_bytes // BLOCK_BYTES: row for row in client.stats().tenants}
        assert (rows[4].bytes, rows[4].hits, rows[4].misses, rows[4].evicted) == (4 * BLOCK_BYTES, 2, 1, 1)
        assert (rows[2].bytes, rows[2].refused) == (2 * BLOCK_BYTES, 1)


def test_absent_node_pins_nothing(node, client):
    node.kill()

    assert client.hold("session", a_chain(1), seconds=1) is None
    client.release_hold("session")
