"""Tests of the S3 tier against a server that is killed, frozen, strict, or filled with foreign values."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.errors import StoreNotStarted, TierFailed
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.remote import RemoteTier
from kvstore.tiers.s3.backend import open_s3, tier_with
from kvstore.tiers.s3.clients import S3Clients
from kvstore.tiers.s3.settings import S3Settings
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, deadline_in, empty_buffers, put_blocks
from tests.support.kvstore.remote_blocks import BLOCKS, DIGEST, KEYS, a_stored_value, read_outcomes
from tests.support.servers.processes import an_s3_server, s3_credentials
from tests.support.servers.scripted import Script, a_scripted_server
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def credentials():
    with s3_credentials():
        yield


@pytest.fixture(scope="module")
def shared():
    with an_s3_server() as server:
        yield server


@pytest.fixture
def bucket(shared, request):
    name = f"b{abs(hash(request.node.nodeid))}"
    shared.client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def tier(shared, bucket):
    tier = open_tier(shared, bucket)
    yield tier
    tier.close()


def open_tier(server, bucket: str, **settings) -> RemoteTier:
    chosen = S3Settings(bucket=bucket, **{"endpoint_url": server.url, "region": "us-east-1", **settings})
    return open_s3(chosen, codecs=lambda digest: PlainCodec(), clock=MonotonicClock())


def open_with_endpoint(bucket: str, port: int) -> RemoteTier:
    """Open the tier without the bucket check, which these servers could not answer."""
    settings = S3Settings(bucket=bucket, endpoint_url=f"http://127.0.0.1:{port}", region="us-east-1")
    return tier_with(settings, S3Clients(settings), codecs=lambda digest: PlainCodec(), clock=MonotonicClock())


def place_of(key: BlockKey) -> str:
    return f"fleet/{key.digest.hex()}/{key.name.hex()}"


# Unreachable servers


def test_killed_server_is_a_failure_and_is_found_again():
    with an_s3_server() as server:
        server.client.create_bucket(Bucket="blocks")
        tier = open_tier(server, "blocks", known_seconds=0, missing_seconds=0)
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4
        server.kill()

        for call in (
            lambda: read_outcomes(tier),
            lambda: put_blocks(tier, KEYS, BLOCKS, deadline_in()),
            lambda: tier.find(KEYS, deadline_in()),
        ):
            with at_most(10), pytest.raises(TierFailed, match="http://"):
                call()

        server.start()
        server.client.create_bucket(Bucket="blocks")
        assert tier.find(KEYS, deadline_in()) == 0, "the server kept its data"
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        assert tier.status().failures == 3
        tier.close()


CALLS = {
    "find": lambda tier: tier.find(KEYS, deadline_in(0.4)),
    "put": lambda tier: put_blocks(tier, KEYS, BLOCKS, deadline_in(0.4)),
    "get": lambda tier: tier.get(KEYS, empty_buffers(), deadline_in(0.4)),
}


def test_frozen_server_costs_only_the_deadline():
    with an_s3_server() as server:
        server.client.create_bucket(Bucket="blocks")
        tier = open_tier(server, "blocks", known_seconds=0, parallel=2)
        put_blocks(tier, KEYS, BLOCKS, deadline_in())
        server.freeze()

        for call in CALLS.values():
            with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
                call(tier)
        with at_most(10):
            tier.discard(KEYS)

        server.thaw()

        def all_kept() -> bool:  # removals left in the server's sockets may still arrive in between
            return (
                put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4
                and read_outcomes(tier) == [BlockOutcome.MOVED] * 4
            )

        eventually(all_kept)
        tier.close()


def test_closing_the_tier_ends_running_calls():
    with an_s3_server() as server:
        server.client.create_bucket(Bucket="blocks")
        tier = open_tier(server, "blocks", parallel=1)
        server.freeze()
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(tier.get, KEYS, empty_buffers(), deadline_in(2))
            eventually(lambda: tier.backend.threads.waiting.qsize() == len(KEYS) - 1)

            tier.close()

            with pytest.raises(TierFailed):
                call.result(60)


def test_late_object_store_is_used(caplog):
    with an_s3_server() as server:
        server.kill()
        tier = open_tier(server, "blocks", start_seconds=1)
        assert [record.message for record in caplog.records] == ["object store unreachable"]
        with pytest.raises(TierFailed):
            tier.find(KEYS, deadline_in(30))

        server.start()
        server.client.create_bucket(Bucket="blocks")

        assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4
        tier.close()


def test_impossible_settings_are_rejected_at_start_by_name(shared, monkeypatch, tmp_path):
    with pytest.raises(StoreNotStarted, match="bucket: 'missing' does not exist"):
        open_tier(shared, "missing")
    with pytest.raises(StoreNotStarted, match="bucket"):
        open_tier(shared, "Not A Bucket")
    with pytest.raises(StoreNotStarted, match="profile"):
        open_tier(shared, "missing", profile="nobody")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreNotStarted, match="no credentials"):
        open_tier(shared, "missing")


# Values under a key


PLANTED = {
    "empty": b"",
    "garbage": b"garbage",
    "zeros as long as a value": bytes(64 + BLOCK_BYTES),
    "a head": a_stored_value()[:64],
    "half a value": a_stored_value()[: 64 + BLOCK_BYTES // 2],
    "a byte long": a_stored_value() + b"x",
    "another block": a_stored_value(KEYS[2], BLOCKS[2]),
    "another namespace": a_stored_value(BlockKey(b"another-digest..", KEYS[1].name)),
    "a flipped bit": a_stored_value()[:80] + bytes([a_stored_value()[80] ^ 1]) + a_stored_value()[81:],
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_foreign_value_is_a_counted_miss_and_replaced(tier, shared, bucket, planted, caplog):
    put_blocks(tier, KEYS, BLOCKS, deadline_in())
    shared.client.put_object(Bucket=bucket, Key=place_of(KEYS[1]), Body=planted)

    assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED, BlockOutcome.MOVED]

    assert tier.status().corrupt == 1
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["block corrupt"]
    with pytest.raises(shared.client.exceptions.NoSuchKey):
        shared.client.get_object(Bucket=bucket, Key=place_of(KEYS[1]))
    assert tier.find(KEYS, deadline_in()) == 1
    assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4
    assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4


def test_newer_format_is_a_miss_logged_once_and_kept(tier, shared, bucket, caplog):
    newer = b"FKVR\2" + a_stored_value()[5:]
    for key in KEYS[1:3]:
        shared.client.put_object(Bucket=bucket, Key=place_of(key), Body=newer)

    put_blocks(tier, KEYS, BLOCKS, deadline_in())
    for _ in range(2):
        assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE, BlockOutcome.MOVED]
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True, False, False, True]

    assert shared.client.get_object(Bucket=bucket, Key=place_of(KEYS[1]))["Body"].read() == newer
    assert tier.status().corrupt == 0
    assert len([record for record in caplog.records if "newer format" in record.message]) == 1


def test_two_writers_of_one_block_write_it_once(shared, bucket):
    tiers = [open_tier(shared, bucket) for _ in range(2)]

    for tier in tiers:
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in()) == [True] * 4

    assert [tier.status().bytes_written > 0 for tier in tiers] == [True, False]
    with ThreadPoolExecutor(2) as threads:
        more = [BlockKey(DIGEST, name) for name in a_chain(4, "more")]
        assert list(threads.map(lambda tier: put_blocks(tier, more, BLOCKS, deadline_in()), tiers)) == [[True] * 4] * 2
    for tier in tiers:
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        tier.close()


def test_recently_seen_block_is_not_asked_about_again(shared, bucket):
    writer, reader = open_tier(shared, bucket), open_tier(shared, bucket, missing_seconds=0)
    put_blocks(writer, KEYS[:2], BLOCKS[:2], deadline_in())
    assert reader.find(KEYS, deadline_in()) == 2
    for key in KEYS[:2]:
        shared.client.delete_object(Bucket=bucket, Key=place_of(key))

    assert reader.find(KEYS, deadline_in()) == 2, "the answer is remembered for a while"
    assert read_outcomes(reader) == [BlockOutcome.GONE] * 4
    assert reader.find(KEYS, deadline_in()) == 0
    assert reader.gone() == KEYS
    writer.close()
    reader.close()


def test_large_blocks_come_back_and_connections_are_used_again(shared, bucket):
    tier = open_tier(shared, bucket, parallel=2)
    keys = [BlockKey(DIGEST, name) for name in a_chain(6, "large")]
    blocks = [a_block(seed, (3 << 20) + seed) for seed in range(6)]

    assert put_blocks(tier, keys, blocks, deadline_in(60)) == [True] * 6
    into = [np.zeros(block.nbytes, np.uint8) for block in blocks]
    answers = tier.get(keys, into, deadline_in(60))

    assert [answer.outcome for answer in answers] == [BlockOutcome.MOVED] * 6
    assert all(map(np.array_equal, into, blocks))
    connections = psutil.Process().net_connections("tcp")
    ours = [
        each for each in connections if each.raddr and each.raddr.port == shared.port and each.status == "ESTABLISHED"
    ]
    assert len(ours) <= 3, "two of the tier, one of this test"
    tier.close()


# Invalid servers


def an_answer(status: str, body: bytes, length: int | str | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


SCRIPTS = {
    "garbage": Script((b"SSH-2.0-OpenSSH_9.2\r\n",)),
    "nothing": Script((), hold=True),
    "an end": Script((b"",)),
    "half a value": Script((an_answer("200 OK", a_stored_value(KEYS[0], BLOCKS[0])[:4000], 64 + BLOCK_BYTES),)),
    "half a value, and silence": Script(
        (an_answer("200 OK", a_stored_value(KEYS[0], BLOCKS[0])[:4000], 64 + BLOCK_BYTES),), hold=True
    ),
    "an error that is no XML": Script((an_answer("500 Oops", b"<<<"),)),
    "slow down": Script((an_answer("503 Slow Down", b""),)),
    "no access": Script((an_answer("403 Forbidden", b""),)),
    "no number for a length": Script((an_answer("200 OK", a_stored_value(), "abc"),)),
    "less than nothing": Script((an_answer("200 OK", b"", -5),)),
    "a time that is none": Script((b"HTTP/1.1 200 OK\r\nLast-Modified: never\r\nContent-Length: 0\r\n\r\n",)),
    "half a head": Script((b"HTTP/1.1 200 OK\r\nContent-Le",), hold=True),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_nonsense_is_a_failure_within_the_deadline(script):
    with a_scripted_server(script) as port:
        tier = open_with_endpoint("blocks", port)

        with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
            tier.get(KEYS[:1], empty_buffers(1), deadline_in(0.6))

        tier.close()


def test_slowly_dripping_value_costs_only_the_deadline():
    with a_scripted_server(Script((an_answer("200 OK", b"", 64 + BLOCK_BYTES),), drip=a_stored_value()[:100])) as port:
        tier = open_with_endpoint("blocks", port)
        tier.backend.clients.within(0.5)  # creating a client takes long

        with at_most(1.5), pytest.raises(TierFailed):
            tier.get(KEYS[:1], empty_buffers(1), deadline_in(0.5))

        tier.close()


def test_slowly_dripping_doubted_object_costs_the_deadline():
    with a_scripted_server(Script((an_answer("206 Partial Content", b"", 64),), drip=a_stored_value()[:64])) as port:
        tier = open_with_endpoint("blocks", port)
        tier.backend.clients.within(0.5)
        tier.backend.sightings.suspect(KEYS[0])

        with at_most(1.5), pytest.raises(TierFailed):
            put_blocks(tier, KEYS[:1], BLOCKS[:1], deadline_in(0.5))

        tier.close()


ASKS = """
import psutil, sys, threading
from tests.integration.kvstore.tiers.test_s3_tier import KEYS, open_with_endpoint
from tests.support.kvstore.builders import deadline_in
from tests.support.waiting import eventually
tier = open_with_endpoint("blocks", int(sys.argv[1]))
tier.backend.clients.within(10)  # which takes long to make
threading.Thread(target=tier.holds, args=(KEYS[:1], deadline_in(8)), daemon=True).start()
eventually(lambda: any(each.status == "ESTABLISHED" for each in psutil.Process().net_connections("tcp")))
tier.close()
"""


def test_slowly_dripping_head_does_not_stop_process_exit():
    with a_scripted_server(Script((b"HTTP/1.1 200 OK\r\nX-Long: ",), drip=b"a" * 500)) as port, at_most(15):
        subprocess.run([sys.executable, "-c", ASKS, str(port)], check=True, cwd=ROOT)


def test_value_without_a_length_is_a_failure_and_stays():
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    with a_scripted_server(Script((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk,))) as port:
        tier = open_with_endpoint("blocks", port)

        with pytest.raises(TierFailed, match="no content length"):
            read_outcomes(tier, KEYS[:1], 5)

        assert (tier.gone(), tier.status().corrupt) == ([], 0)
        tier.close()


def test_answer_without_a_block_is_corrupt():
    with a_scripted_server(Script((an_answer("200 OK", b"<html>welcome</html>"),))) as port:
        tier = open_with_endpoint("blocks", port)

        assert read_outcomes(tier, KEYS[:1], 5) == [BlockOutcome.CORRUPT]
        tier.close()


# Settings


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("bucket", {"bucket": ""}),
        ("prefix", {"bucket": "blocks", "prefix": "/a"}),
        ("endpoint_url", {"bucket": "blocks", "endpoint_url": "host:9000"}),
        ("endpoint_url", {"bucket": "blocks", "endpoint_url": "http://host:port"}),
        ("endpoint_url", {"bucket": "blocks", "endpoint_url": "http://user:secret@host"}),
        ("addressing", {"bucket": "blocks", "addressing": "best"}),
        ("parallel", {"bucket": "blocks", "parallel": 0}),
    ],
)
def test_invalid_settings_are_rejected_without_secrets(field, settings):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(settings, S3Settings)

    assert field in str(refused.value)
    assert "secret" not in str(refused.value)
