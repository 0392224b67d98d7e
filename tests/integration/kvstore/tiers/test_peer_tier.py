"""Tests of the peer tier against real nodes that are killed, frozen or empty, and against servers that only look like nodes."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import numpy as np
import pytest

from kvstore.block import BlockHash
from kvstore.buffers import crc32c
from kvstore.errors import NamespaceUnknown, TierFailed
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.peer.backend import open_peers, ranking
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.remote import RemoteTier
from kvstore.transports.tcp_frames import CHALLENGE, MAGIC, REPLY, DataPlaneStatus
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_store_client,
    deadline_in,
    empty_buffers,
    put_blocks,
)
from tests.support.servers.processes import a_free_port
from tests.support.servers.scripted import Script, a_scripted_server
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

NAMESPACE = a_namespace()
KEYS = [BlockKey(NAMESPACE.digest, name) for name in a_chain(8)]
BLOCKS = [a_block(seed) for seed in range(8)]


@pytest.fixture
def node():
    with a_node() as node:
        yield node


def namespaces(digest: bytes):
    if digest != NAMESPACE.digest:
        raise NamespaceUnknown(digest)
    return NAMESPACE


def connect(address, namespace, timeout_seconds):
    return a_store_client(address, namespace, timeout_seconds=timeout_seconds, call_timeout_seconds=5, prefer=("tcp",))


@contextlib.contextmanager
def a_tier(*peers: str, **settings) -> Iterator[RemoteTier]:
    tier = open_peers(
        PeerSettings(peers=peers, connect_seconds=5, **settings), connect, namespaces=namespaces, clock=MonotonicClock()
    )
    try:
        yield tier
    finally:
        tier.close()


def fill(address: str, keys=KEYS) -> None:
    with a_store_client(address, NAMESPACE, timeout_seconds=10) as client:
        client.write([key.name for key in keys], [BLOCKS[KEYS.index(key)] for key in keys])
        assert len(client.match([key.name for key in keys], lease_seconds=0)) == len(keys)


def pinned(address: str) -> int:
    with a_store_client(address, NAMESPACE, timeout_seconds=10) as client:
        return client.stats().pinned


def outcomes(tier: RemoteTier, keys=KEYS, seconds: float = 10) -> list[bool]:
    """Read blocks and return the outcomes; compare the bytes of each hit."""
    into = empty_buffers(len(keys))
    answers = tier.get(keys, into, deadline_in(seconds))
    for key, answer, block in zip(keys, answers, into, strict=True):
        assert answer.outcome is not BlockOutcome.MOVED or np.array_equal(block, BLOCKS[KEYS.index(key)])
    return [answer.outcome is BlockOutcome.MOVED for answer in answers]


# Reads


def test_peer_blocks_are_found_and_fetched_without_leases(node):
    import google_crc32c

    fill(node.address, KEYS[:5])
    with a_tier(node.address) as tier:
        assert tier.find(KEYS, deadline_in(10)) == 5
        into = empty_buffers(8)
        answers = tier.get(KEYS, into, deadline_in(10))

        assert [answer.outcome is BlockOutcome.MOVED for answer in answers] == [True] * 5 + [False] * 3
        assert [answer.crc32c for answer in answers[:5]] == [google_crc32c.value(bytes(block)) for block in into[:5]]
        assert all(map(np.array_equal, into[:5], BLOCKS))
        assert pinned(node.address) == 0
        status = tier.status()
        assert (status.hits, status.misses, status.bytes_read) == (5, 3, 5 * BLOCK_BYTES)
        assert (status.failures, status.corrupt) == (0, 0)
        assert tier.gone() == KEYS[5:]


def test_a_part_of_a_chain_is_fetched_where_it_is_asked_for(node):
    fill(node.address)
    with a_tier(node.address) as tier:
        assert tier.find(KEYS[3:], deadline_in(10)) == 5
        assert outcomes(tier, KEYS[3:6]) == [True] * 3


def test_missing_blocks_cost_only_themselves(node):
    fill(node.address, [KEYS[0], KEYS[2], KEYS[3], KEYS[5]])
    with a_tier(node.address) as tier:
        assert tier.find(KEYS, deadline_in(10)) == 1
        assert outcomes(tier, KEYS[:6]) == [True, False, True, True, False, True]


def test_block_on_no_peer_is_a_miss(node):
    with a_tier(node.address) as tier:
        assert tier.find(KEYS, deadline_in(10)) == 0
        assert outcomes(tier) == [False] * 8
        assert tier.find([], deadline_in(10)) == 0
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [False] * 8
        assert tier.status().failures == 0


def test_another_namespace_or_block_length_is_a_miss(node):
    fill(node.address)
    strange = [BlockKey(b"another-digest..", KEYS[0].name)]
    with a_tier(node.address) as tier:
        assert tier.find(strange, deadline_in(10)) == 0
        assert outcomes(tier, [KEYS[0]]) == [True]
        (answer,) = tier.get(strange, empty_buffers(1), deadline_in(10))
        assert answer.outcome is BlockOutcome.GONE
        (answer,) = tier.get(KEYS[:1], [np.zeros(BLOCK_BYTES + 1, np.uint8)], deadline_in(10))
        assert answer.outcome is BlockOutcome.GONE


def test_blocks_are_fetched_from_any_holder_and_remembered():
    with a_node() as one, a_node() as two:
        ranked = ranking([one.address, two.address], KEYS[0])
        fill(ranked[1])
        with a_tier(one.address, two.address, look_ups=1) as narrow:
            assert narrow.find(KEYS, deadline_in(10)) == 0, "one look-up ends at the owner"
        with a_tier(one.address, two.address) as tier:
            assert tier.find(KEYS, deadline_in(10)) == 8
            assert outcomes(tier, KEYS[4:]) == [True] * 4, "the remembered holder has the blocks"


def test_a_chain_whose_parts_lie_on_two_peers_is_put_together():
    with a_node() as one, a_node() as two:
        first, second = ranking([one.address, two.address], KEYS[0])
        fill(first, KEYS[:4])
        fill(second, KEYS[2:])
        with a_tier(one.address, two.address) as tier:
            assert outcomes(tier) == [True] * 8


def test_bad_block_is_not_asked_for_again_for_a_while(node):
    fill(node.address)
    with a_tier(node.address) as tier:
        tier.discard([KEYS[2]])

        assert tier.find(KEYS, deadline_in(10)) == 2
        assert outcomes(tier) == [True, True, False, True, True, True, True, True]


# Writes


def test_pushed_blocks_go_to_the_owner_of_their_chain():
    with a_node() as one, a_node() as two:
        owner = ranking([one.address, two.address], KEYS[0])[0]
        with a_tier(one.address, two.address, push=True) as tier:
            assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 8
            assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 8
            assert tier.status().bytes_written == 8 * BLOCK_BYTES
            assert outcomes(tier) == [True] * 8
        with a_store_client(owner, NAMESPACE) as client:
            assert len(client.match([key.name for key in KEYS], lease_seconds=0)) == 8


def test_block_with_a_wrong_checksum_is_counted_not_pushed(node):
    with a_tier(node.address, push=True) as tier:
        sums = [crc32c([block]) for block in BLOCKS]
        sums[2] ^= 1

        kept = tier.put(KEYS, BLOCKS, deadline_in(10), sums)

        assert kept == [True, True, False, True, True, True, True, True]
        assert tier.status().corrupt == 1
        assert outcomes(tier) == kept


def test_owner_of_a_chain_does_not_push_or_ask_itself():
    with a_node() as us, a_node() as them:
        peers = [us.address, them.address]
        mine = next(key for key in keys_like(64) if ranking(peers, key)[0] == us.address)
        theirs = next(key for key in keys_like(64) if ranking(peers, key)[0] != us.address)
        with a_store_client(us.address, NAMESPACE) as client:
            client.write([mine.name], BLOCKS[:1])
        with a_tier(*peers, own_address=us.address, push=True) as tier:
            assert put_blocks(tier, [mine], BLOCKS[:1], deadline_in(10)) == [False]
            assert put_blocks(tier, [theirs], BLOCKS[:1], deadline_in(10)) == [True]
            assert tier.find([mine], deadline_in(10)) == 0


def keys_like(count: int) -> list[BlockKey]:
    return [BlockKey(NAMESPACE.digest, name) for name in a_chain(count, "own")]


def test_full_peer_stores_what_fits():
    with a_node(capacity_bytes=4 * BLOCK_BYTES) as node, a_tier(node.address, push=True) as tier:
        kept = put_blocks(tier, KEYS, BLOCKS, deadline_in(10))

        assert kept == [True] * 4 + [False] * 4
        assert tier.status().refused == 4
        assert outcomes(tier) == kept


# Unreachable peers


def test_absent_peer_fails_at_once_and_is_used_when_it_comes(caplog):
    with a_node() as node:
        fill(node.address)
        node.kill()
        with a_tier(node.address) as tier:
            for _ in range(3):
                with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
                    tier.find(KEYS, deadline_in(10))
            assert [record.message for record in caplog.records].count("peer unreachable") == 1

            node.start()
            fill(node.address)

            def found() -> bool:
                with contextlib.suppress(TierFailed):
                    return tier.find(KEYS, deadline_in(10)) == 8
                return False

            eventually(found)
            assert outcomes(tier) == [True] * 8


def test_one_dead_peer_of_two_does_not_fail_the_tier():
    with a_node() as one, a_node() as two:
        fill(one.address)
        fill(two.address)
        two.kill()
        with a_tier(one.address, two.address) as tier:
            for keys in (KEYS, keys_like(8)):
                assert tier.find(keys, deadline_in(10)) == (8 if keys is KEYS else 0)
            assert outcomes(tier) == [True] * 8


def test_a_restarted_peer_is_empty_and_used_again(node):
    fill(node.address)
    with a_tier(node.address) as tier:
        assert outcomes(tier) == [True] * 8
        node.kill()
        with pytest.raises(TierFailed):
            outcomes(tier)
        node.start()
        fill(node.address, KEYS[:2])

        def arrived() -> bool:
            with contextlib.suppress(TierFailed):
                return outcomes(tier) == [True] * 2 + [False] * 6
            return False

        eventually(arrived)


def test_frozen_peer_costs_only_the_deadline(node):
    fill(node.address)
    with a_tier(node.address, push=True) as tier:
        assert outcomes(tier) == [True] * 8
        node.freeze()
        calls = (
            lambda: tier.find(KEYS, deadline_in(0.3)),
            lambda: outcomes(tier, seconds=0.3),
            lambda: put_blocks(tier, KEYS, BLOCKS, deadline_in(0.3)),
        )
        for call in calls:
            with at_most(20), pytest.raises(TierFailed):
                call()
        node.thaw()

        def arrived() -> bool:
            with contextlib.suppress(TierFailed):
                return outcomes(tier) == [True] * 8
            return False

        eventually(arrived)


def test_peer_frozen_before_the_handshake_costs_the_deadline(node):
    node.freeze()
    with a_tier(node.address) as tier, at_most(20), pytest.raises(TierFailed):
        tier.find(KEYS, deadline_in(0.3))
    node.thaw()


def test_peer_killed_during_reads_gives_no_wrong_byte(node):
    fill(node.address)
    with a_tier(node.address) as tier:
        stop = threading.Event()

        def read() -> int:
            count = 0
            while not stop.is_set():
                with contextlib.suppress(TierFailed):
                    count += sum(outcomes(tier, seconds=1))
            return count

        with ThreadPoolExecutor(3) as threads:
            reading = [threads.submit(read) for _ in range(3)]
            for _ in range(2):
                before = tier.status().hits
                eventually(lambda before=before: tier.status().hits > before + 50)
                node.kill()
                node.start()
                fill(node.address)
            stop.set()
            assert all(each.result(30) > 0 for each in reading)


# Servers that only look like peers


@pytest.mark.parametrize(
    "script",
    [
        Script((b"SSH-2.0-OpenSSH_9.2\r\n",)),
        Script((), hold=True),
        Script((b"",)),
        Script((os.urandom(4096),), hold=True),
    ],
    ids=["garbage", "nothing", "an end", "noise"],
)
def test_nonsense_from_a_peer_is_a_failure_within_the_deadline(script):
    with a_scripted_server(script) as port, a_tier(f"127.0.0.1:{port}") as tier:
        with at_most(20), pytest.raises(TierFailed):
            tier.find(KEYS, deadline_in(0.5))
        with at_most(20), pytest.raises(TierFailed):
            outcomes(tier, seconds=0.5)


class LyingNode(pb_grpc.BlockStoreServicer):
    """Control plane that reports blocks which its data plane does not deliver."""

    def __init__(self, data_address: str, slots: int = 1):
        self.data_address = data_address
        self.slots = slots

    def Hello(self, request, context):  # noqa: N802 - named by the protocol
        return pb.HelloResponse(
            store_id="liar", incarnation="i", tcp_address=self.data_address, max_lease_ms=1000, max_reservation_ms=1000
        )

    def Match(self, request, context):  # noqa: N802 - named by the protocol
        return pb.MatchResponse(lease_id=1, slots=bytes(20 * self.slots))

    def Release(self, request, context):  # noqa: N802 - named by the protocol
        return pb.ReleaseResponse()


@contextlib.contextmanager
def a_lying_node(data_address: str, slots: int = 1) -> Iterator[str]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        pb_grpc.add_BlockStoreServicer_to_server(LyingNode(data_address, slots), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


def replies(kind: str) -> Script:
    """Return scripted replies of a data plane: a valid opening and an invalid block."""
    opened = CHALLENGE.pack(MAGIC, DataPlaneStatus.DONE, bytes(16))
    there = bytes([DataPlaneStatus.DONE])
    block = REPLY.pack(MAGIC, 1) + there + BLOCKS[0].tobytes() + there
    return {
        "garbage": Script((opened, b"HTTP/1.1 400 Bad Request\r\n\r\n")),
        "half a block": Script((opened, block[: BLOCK_BYTES // 2])),
        "half a block, and silence": Script((opened, block[: BLOCK_BYTES // 2]), hold=True),
        "nothing": Script((opened,), hold=True),
        "an end": Script((opened,)),
        "another block": Script((opened, block), hold=True),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["garbage", "half a block", "half a block, and silence", "nothing", "an end", "another block"]
)
def test_stalled_data_plane_is_a_failure_within_the_deadline(kind):
    with (
        a_scripted_server(replies(kind)) as port,
        a_lying_node(f"127.0.0.1:{port}") as address,
        a_tier(address) as tier,
    ):
        assert tier.find(KEYS[:1], deadline_in(30)) == 1

        with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
            outcomes(tier, KEYS[:1], seconds=0.5)


def test_peer_that_reports_too_many_hits_is_a_failure():
    with (
        a_scripted_server(replies("nothing")) as port,
        a_lying_node(f"127.0.0.1:{port}", 3) as address,
        a_tier(address) as tier,
    ):
        for call in (lambda: tier.find(KEYS[:2], deadline_in(2)), lambda: outcomes(tier, KEYS[:2], 2)):
            with pytest.raises(TierFailed, match="found 3 blocks, but 2 were asked for"):
                call()


def test_peer_with_another_layout_is_a_named_failure(node, caplog):
    other = a_namespace(block_tokens=64)
    with a_store_client(node.address, other) as client:
        client.write(a_chain(1), BLOCKS[:1])
    with a_tier(node.address) as tier, caplog.at_level(logging.WARNING):
        with pytest.raises(TierFailed, match="block_tokens"):
            tier.find(KEYS, deadline_in(30))
        assert "peer unreachable" in [record.message for record in caplog.records]


# Settings


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("peers", {"peers": []}),
        ("peers", {"peers": ["a:1"], "own_address": "a:1"}),
        ("peers", {"peers": ["a:1", "a:1"]}),
        (r"peers\[1\]", {"peers": ["a:1", "b"]}),
        ("own_address", {"peers": ["a:1"], "own_address": "b:1"}),
        ("look_ups", {"peers": ["a:1"], "look_ups": 0}),
    ],
)
def test_invalid_settings_are_rejected_by_name(field, settings):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(settings, PeerSettings)


def test_closed_tier_raises():
    with a_tier(f"127.0.0.1:{a_free_port()}") as tier:
        tier.close()
        for call in (
            lambda: tier.find(KEYS, deadline_in(1)),
            lambda: put_blocks(tier, KEYS, BLOCKS, deadline_in(1)),
            lambda: outcomes(tier),
        ):
            with pytest.raises(TierFailed, match="closed"):
                call()
        tier.discard(KEYS)


def test_few_chains_change_owner_when_a_peer_leaves():
    peers = [f"host-{index}:1" for index in range(8)]
    chains = [BlockKey(NAMESPACE.digest, BlockHash(name)) for name in a_chain(800, "rank")]
    owners = [ranking(peers, key)[0] for key in chains]

    assert all(60 < owners.count(peer) < 150 for peer in peers)
    fewer = [ranking(peers[:-1], key)[0] for key in chains]
    assert all(was == now for was, now in zip(owners, fewer, strict=True) if was != peers[-1])
