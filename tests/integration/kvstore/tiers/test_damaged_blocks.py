"""Tests of blocks damaged in transfer from a shared server: they are misses, and no stored block is deleted."""

import logging
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.client import node_session as session
from kvstore.codecs.plain import PlainCodec
from kvstore.errors import TierFailed
from kvstore.messages import BlockKey, BlockOutcome, DataPath
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.peer.backend import open_peers
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.redis.backend import open_redis
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.remote import RemoteTier
from kvstore.tiers.s3.backend import open_s3
from kvstore.tiers.s3.settings import S3Settings
from tests.support.kvstore.builders import (
    a_block,
    a_chain,
    a_namespace,
    a_node,
    a_store_client,
    deadline_in,
    empty_buffers,
    put_blocks,
)
from tests.support.kvstore.remote_blocks import DIGEST
from tests.support.servers.damaging_proxy import a_damaging_http_proxy, a_damaging_proxy, with_a_flipped_bit
from tests.support.servers.processes import s3_credentials, shared_redis, shared_s3
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

COUNT = 64
BATCH = 8
NAMES = a_chain(COUNT, "wire")
KEYS = [BlockKey(DIGEST, name) for name in NAMES]
BLOCKS = [a_block(seed) for seed in range(COUNT)]
ROUNDS = 3

CHANCE = random.Random(15)


def with_random_bit_flipped(content: bytes) -> bytes:
    at = CHANCE.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << CHANCE.randrange(8)]) + content[at + 1 :]


DAMAGES = {
    "the same bit of each answer": with_a_flipped_bit,
    "a bit of each answer": with_random_bit_flipped,
    "the first bit of each answer": lambda content: bytes([content[0] ^ 128]) + content[1:],
    "half of each answer": lambda content: content[: len(content) // 2],
    "nothing of each answer": lambda content: b"",
    "a page of somebody else's": lambda content: b"<html>welcome</html>",
}


def clock() -> MonotonicClock:
    return MonotonicClock()


@contextmanager
def an_s3_tier(bucket: str, port: int) -> Iterator[RemoteTier]:
    settings = S3Settings(
        bucket=bucket,
        endpoint_url=f"http://127.0.0.1:{port}",
        region="us-east-1",
        addressing="path",
        known_seconds=0,
        missing_seconds=0,
    )
    with s3_credentials():
        tier = open_s3(settings, codecs=lambda digest: PlainCodec(), clock=clock())
    yield tier
    tier.close()


@contextmanager
def a_redis_tier(prefix: str, port: int) -> Iterator[RemoteTier]:
    settings = RedisSettings(url=f"redis://127.0.0.1:{port}", key_prefix=prefix)
    tier = open_redis(settings, codecs=lambda digest: PlainCodec(), clock=clock())
    yield tier
    tier.close()


def read(tier: RemoteTier, keys: Sequence[BlockKey] = KEYS) -> int:
    """Read in batches and return how many correct blocks came; a failed batch counts none."""
    come = 0
    for start in range(0, len(keys), BATCH):
        chosen, into = keys[start : start + BATCH], empty_buffers(len(keys[start : start + BATCH]))
        try:
            answers = tier.get(chosen, into, deadline_in())
        except TierFailed:
            continue
        for key, answer, block in zip(chosen, answers, into, strict=True):
            if answer.outcome is BlockOutcome.MOVED:
                come += 1
                assert np.array_equal(block, BLOCKS[KEYS.index(key)]), "wrong bytes"
    return come


def found_blocks(tier: RemoteTier) -> int:
    try:
        return tier.find(KEYS, deadline_in())
    except TierFailed:
        return 0


def is_fenced(tier: RemoteTier) -> bool:
    try:
        tier.get(KEYS[:1], empty_buffers(1), deadline_in())
    except TierFailed as error:
        return "fenced" in str(error)
    return False


@pytest.fixture
def bucket() -> str:
    server = shared_s3()
    bucket = f"wire-{uuid.uuid4().hex}"
    server.client.create_bucket(Bucket=bucket)
    with an_s3_tier(bucket, server.port) as tier:
        assert all(put_blocks(tier, KEYS, BLOCKS, deadline_in()))
    return bucket


def objects(bucket: str) -> int:
    return shared_s3().client.list_objects_v2(Bucket=bucket).get("KeyCount", 0)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_in_transfer_from_s3_deletes_no_object(bucket, damage: Callable[[bytes], bytes], caplog):
    with (
        a_damaging_http_proxy(("127.0.0.1", shared_s3().port), damage) as proxy,
        an_s3_tier(bucket, proxy.port) as tier,
    ):
        assert [read(tier) for _ in range(ROUNDS)] == [0] * ROUNDS

        assert objects(bucket) == COUNT
        status = tier.status()
        assert status.damaged >= 4
        assert is_fenced(tier)
        assert status.fenced == 1
        messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "tier fenced, answers damaged in transit" in messages


def test_s3_circuit_closes_when_answers_are_sound_again(bucket):
    with (
        a_damaging_http_proxy(("127.0.0.1", shared_s3().port), with_a_flipped_bit) as proxy,
        an_s3_tier(bucket, proxy.port) as tier,
    ):
        read(tier)
        assert tier.status().fenced == 1
        proxy.forwards_unchanged = True

        eventually(lambda: found_blocks(tier) == COUNT)
        eventually(lambda: read(tier) == COUNT)

        assert tier.status().fenced == 0
        assert objects(bucket) == COUNT


def test_object_damaged_at_rest_is_deleted(bucket):
    server = shared_s3()
    place = f"fleet/{DIGEST.hex()}/{NAMES[5].hex()}"
    content = server.client.get_object(Bucket=bucket, Key=place)["Body"].read()
    server.client.put_object(Bucket=bucket, Key=place, Body=with_a_flipped_bit(content))
    with an_s3_tier(bucket, server.port) as tier:
        assert read(tier) == COUNT - 1

        assert objects(bucket) == COUNT - 1
        assert (tier.status().corrupt, tier.status().damaged, tier.status().fenced) == (1, 0, 0)


def test_object_damaged_at_rest_stays_while_answers_are_damaged(bucket):
    """Damage each reading differently, so that the readings agree on nothing, not even on an object that is really damaged."""
    server = shared_s3()
    place = f"fleet/{DIGEST.hex()}/{NAMES[0].hex()}"
    server.client.put_object(Bucket=bucket, Key=place, Body=bytes(8256))
    with (
        a_damaging_http_proxy(("127.0.0.1", server.port), with_random_bit_flipped) as proxy,
        an_s3_tier(bucket, proxy.port) as tier,
    ):
        assert read(tier, KEYS[:1]) == 0
        assert objects(bucket) == COUNT


REDIS_DAMAGES = {"the same bit of each piece": with_a_flipped_bit, "a bit of each piece": with_random_bit_flipped}


@pytest.mark.parametrize("damage", REDIS_DAMAGES.values(), ids=REDIS_DAMAGES)
def test_damage_in_transfer_from_redis_deletes_no_value(damage):
    server = shared_redis()
    prefix = f"wire-{uuid.uuid4().hex}"
    with a_redis_tier(prefix, server.port) as tier:
        assert all(put_blocks(tier, KEYS, BLOCKS, deadline_in()))
    with (
        a_damaging_proxy(("127.0.0.1", server.port), damage=damage) as proxy,
        a_redis_tier(prefix, proxy.port) as tier,
        server.client() as client,
    ):
        read(tier)
        eventually(lambda: read(tier) == 0 and is_fenced(tier))

        assert tier.status().damaged > 0
        assert tier.status().fenced == 1
        assert len(list(client.scan_iter(f"{prefix}:*", count=1000))) == COUNT

        proxy.forwards_unchanged = True
        eventually(lambda: found_blocks(tier) == COUNT)
        eventually(lambda: read(tier) == COUNT)
        assert tier.status().fenced == 0


def test_value_damaged_at_rest_is_deleted():
    server = shared_redis()
    prefix = f"wire-{uuid.uuid4().hex}"
    with a_redis_tier(prefix, server.port) as tier, server.client() as client:
        assert all(put_blocks(tier, KEYS, BLOCKS, deadline_in()))
        name = f"{prefix}:{DIGEST.hex()}:{NAMES[5].hex()}"
        client.set(name, with_a_flipped_bit(client.get(name)))
        wrong = f"{prefix}:{DIGEST.hex()}:{NAMES[6].hex()}"
        client.delete(wrong)
        client.rpush(wrong, "a", "list")

        assert read(tier) == COUNT - 2

        assert not client.exists(name, wrong)
        assert (tier.status().corrupt, tier.status().damaged, tier.status().fenced) == (2, 0, 0)


def test_unreadable_block_is_not_taken_for_damage(caplog):
    server = shared_redis()
    prefix = f"wire-{uuid.uuid4().hex}"
    with (
        a_damaging_proxy(("127.0.0.1", server.port)) as proxy,
        a_redis_tier(prefix, proxy.port) as tier,
        server.client() as client,
    ):
        proxy.forwards_unchanged = True
        assert all(put_blocks(tier, KEYS, BLOCKS, deadline_in()))
        name = f"{prefix}:{DIGEST.hex()}:{NAMES[5].hex()}"
        client.set(name, with_a_flipped_bit(client.get(name)))
        proxy.refuses_connections = True  # the second readings need connections of their own

        assert [read(tier, KEYS[5:6]) for _ in range(8)] == [0] * 8

        assert client.exists(name)
        assert (tier.status().damaged, tier.status().fenced) == (0, 0)
        messages = [record.message for record in caplog.records]
        assert "corrupt block kept, second reading failed" in messages
        assert "block damaged in transit, kept" not in messages

        proxy.refuses_connections = False
        assert read(tier, KEYS[5:6]) == 0
        assert not client.exists(name)
        assert (tier.status().damaged, tier.status().fenced) == (0, 0)


def test_damage_in_transfer_from_a_peer_drops_no_block(monkeypatch):
    namespace = a_namespace()
    keys = [BlockKey(namespace.digest, name) for name in NAMES]
    with a_node(capacity_bytes=4 << 20) as node:
        with a_store_client(node.address, namespace) as client:
            assert client.write(NAMES, BLOCKS) == COUNT
        host, _, port = node.endpoints.data_address.rpartition(":")
        with a_damaging_proxy((host, int(port)), damage=with_a_flipped_bit) as proxy:
            monkeypatch.setattr(session, "reachable", lambda *_: f"127.0.0.1:{proxy.port}")

            def connect(address, namespace, timeout_seconds):
                return a_store_client(address, namespace, prefer=(DataPath.TCP,), timeout_seconds=timeout_seconds)

            settings = PeerSettings(peers=(node.address,), connect_seconds=10)
            tier = open_peers(settings, connect, namespaces=lambda digest: namespace, clock=clock())

            def get() -> int:
                into = empty_buffers(COUNT)
                try:
                    answers = tier.get(keys, into, deadline_in())
                except TierFailed:
                    return 0
                moved = [answer.outcome is BlockOutcome.MOVED for answer in answers]
                assert all(np.array_equal(into[i], BLOCKS[i]) for i, is_there in enumerate(moved) if is_there)
                return sum(moved)

            for _ in range(ROUNDS):
                assert get() < COUNT
            eventually(lambda: get() < COUNT and tier.status().fenced == 1)
            with pytest.raises(TierFailed, match="fenced"):
                tier.get(keys, empty_buffers(COUNT), deadline_in())
            assert tier.status().damaged > 0
            with a_store_client(node.address, namespace, prefer=(DataPath.SHM,)) as client:
                assert len(client.match(NAMES, lease_seconds=0)) == COUNT

            proxy.forwards_unchanged = True
            eventually(lambda: get() == COUNT)
            assert tier.status().fenced == 0
            tier.close()
