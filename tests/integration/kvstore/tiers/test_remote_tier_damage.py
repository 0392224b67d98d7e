"""Tests of remote tiers whose servers' answers are cut, damaged, repeated or invented: a wrong answer is never believed."""

import random
import uuid

import numpy as np
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.errors import TierFailed
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.redis.backend import open_redis
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.remote import RemoteTier
from kvstore.tiers.s3.backend import tier_with
from kvstore.tiers.s3.clients import S3Clients
from kvstore.tiers.s3.settings import S3Settings
from tests.support.kvstore.builders import a_block, a_chain, deadline_in, put_blocks
from tests.support.kvstore.remote_blocks import DIGEST
from tests.support.servers.damaging_proxy import a_damaging_proxy
from tests.support.servers.processes import s3_credentials, shared_redis, shared_s3
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

KEYS = [BlockKey(DIGEST, name) for name in a_chain(8, "attacked")]
LENGTHS = [100, 4096, 20_000, 64, 1, 300, 5000, 9000]
BLOCKS = [a_block(seed, length) for seed, length in enumerate(LENGTHS)]
CALL_SECONDS = 0.5

RESP = (
    b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$-7\r\n", b"*1\r\n$1\r\na\r\n", b"$99999999999999999999\r\n", b"$1_0\r\n", b"$abc\r\n", b"\r\n",
    b"$64\r\nFKVR" + bytes(60) + b"\r\n", b"$536870912\r\nFKVR", b"%1\r\n", b"-\r\n", b"-MOVED 1 127.0.0.1:1\r\n", b"-ASK 1 127.0.0.1:1\r\n",
    b"-LOADING Redis is loading\r\n", b"-READONLY a replica\r\n", b"-OOM command not allowed\r\n", b"-WRONGTYPE other\r\n", b"-NOAUTH first\r\n",
)  # fmt: skip
HTTP = (
    b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nLast-Modified: never\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\n<<<",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 206 Part\r\nContent-Length: 4\r\n\r\nFKVR", b"\r\n\r\n", bytes(99),
    b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 503 Slow Down\r\n\r\n",
)  # fmt: skip


def attack(tier: RemoteTier, chance: random.Random, rounds: int) -> None:
    """Call the tier; calls may fail but must not return anything wrong."""
    for _ in range(rounds):
        first = chance.randrange(len(KEYS))
        chosen = slice(first, first + chance.randint(1, 5))
        keys, blocks = KEYS[chosen], BLOCKS[chosen]
        until = deadline_in(CALL_SECONDS)
        try:
            with at_most(CALL_SECONDS + 2):  # a removal may follow
                match chance.randrange(6):
                    case 0:
                        assert 0 <= tier.find(keys, until) <= len(keys)
                    case 1:
                        assert len(tier.holds(keys, until)) == len(keys)
                    case 2 | 3:
                        assert len(put_blocks(tier, keys, blocks, until)) == len(keys)
                    case _:
                        into = [np.zeros(block.nbytes, np.uint8) for block in blocks]
                        answers = tier.get(keys, into, until)
                        for answer, arrived, block in zip(answers, into, blocks, strict=True):
                            assert answer.outcome is not BlockOutcome.MOVED or np.array_equal(arrived, block)
        except TierFailed:
            continue


def works(tier: RemoteTier) -> bool:
    try:
        kept = put_blocks(tier, KEYS, BLOCKS, deadline_in())
        into = [np.zeros(block.nbytes, np.uint8) for block in BLOCKS]
        answers = tier.get(KEYS, into, deadline_in())
    except TierFailed:
        return False
    moved = [answer.outcome is BlockOutcome.MOVED for answer in answers]
    assert all(
        np.array_equal(*pair) for pair, is_there in zip(zip(into, BLOCKS, strict=True), moved, strict=True) if is_there
    )
    return all(kept) and all(moved)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_redis_answers_are_rejected_then_it_recovers(seed):
    server = shared_redis()
    with a_damaging_proxy(("127.0.0.1", server.port), RESP, seed) as proxy:
        settings = RedisSettings(
            url=f"redis://127.0.0.1:{proxy.port}", key_prefix=f"attack-{uuid.uuid4().hex}", in_flight_bytes=1 << 16
        )
        tier = open_redis(settings, codecs=lambda digest: PlainCodec(), clock=MonotonicClock())

        attack(tier, random.Random(seed), 25)
        assert proxy.damages > 0
        proxy.forwards_unchanged = True

        eventually(lambda: works(tier))
        tier.close()


@pytest.mark.parametrize("seed", range(2))
def test_damaged_s3_answers_are_rejected_then_it_recovers(seed):
    server = shared_s3()
    bucket = f"attack-{uuid.uuid4().hex}"
    server.client.create_bucket(Bucket=bucket)
    with s3_credentials(), a_damaging_proxy(("127.0.0.1", server.port), HTTP, seed) as proxy:
        settings = S3Settings(
            bucket=bucket,
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            region="us-east-1",
            known_seconds=0,
            missing_seconds=0,
        )
        clients = S3Clients(settings)
        for seconds in (CALL_SECONDS, CALL_SECONDS / 2, CALL_SECONDS / 4):
            clients.within(seconds)  # creating a client takes long
        tier = tier_with(settings, clients, codecs=lambda digest: PlainCodec(), clock=MonotonicClock())

        attack(tier, random.Random(seed), 12)
        assert proxy.damages > 0
        proxy.forwards_unchanged = True

        eventually(lambda: works(tier), 30)
        tier.close()
