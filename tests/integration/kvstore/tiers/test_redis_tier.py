"""Tests of the Redis tier against a real server that is killed, frozen, full, locked, or filled with foreign values."""

import logging
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from kvstore.codecs.plain import PlainCodec
from kvstore.errors import StoreNotStarted, TierFailed
from kvstore.messages import BlockKey, BlockOutcome
from kvstore.system_clock import MonotonicClock
from kvstore.tiers import remote_records as records
from kvstore.tiers.redis.backend import open_redis
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.remote import RemoteTier
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, deadline_in, empty_buffers, put_blocks
from tests.support.kvstore.remote_blocks import BLOCKS, DIGEST, KEYS, a_stored_value, read_outcomes
from tests.support.servers.processes import a_free_port, a_redis_server, can_connect
from tests.support.servers.scripted import Script, a_scripted_server
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def shared():
    with a_redis_server() as server:
        yield server


@pytest.fixture
def server(shared):
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture
def tier(server):
    with_tier = open_tier(server.url)
    yield with_tier
    with_tier.close()


def open_tier(url: str, **settings) -> RemoteTier:
    return open_redis(RedisSettings(url=url, **settings), codecs=lambda digest: PlainCodec(), clock=MonotonicClock())


def place_of(key: BlockKey) -> str:
    return f"fleet:{key.digest.hex()}:{key.name.hex()}"


# Unreachable servers


def test_killed_server_fails_at_once_and_is_found_again():
    with a_redis_server() as server:
        tier = open_tier(server.url)
        put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
        server.kill()

        for call in (
            lambda: read_outcomes(tier),
            lambda: put_blocks(tier, KEYS, BLOCKS, deadline_in(100)),
            lambda: tier.find(KEYS, deadline_in(100)),
        ):
            with at_most(10), pytest.raises(TierFailed, match="unix://"):
                call()

        server.start()
        assert tier.find(KEYS, deadline_in(10)) == 0, "the server kept its data"
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        assert tier.status().failures == 3
        tier.close()


def test_restart_of_the_server_costs_no_call():
    with a_redis_server() as server:
        tier = open_tier(server.url)
        put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
        server.kill()
        server.start()

        assert read_outcomes(tier) == [BlockOutcome.GONE] * 4
        assert tier.status().failures == 0
        tier.close()


CALLS = {
    "find": lambda tier: tier.find(KEYS, deadline_in(0.2)),
    "put": lambda tier: put_blocks(tier, KEYS, BLOCKS, deadline_in(0.2)),
    "get": lambda tier: tier.get(KEYS, empty_buffers(), deadline_in(0.2)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_frozen_server_costs_only_the_deadline(call):
    with a_redis_server() as server:
        tier = open_tier(server.url)
        put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
        server.freeze()

        with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
            call(tier)
        with at_most(10):
            tier.discard(KEYS)

        server.thaw()
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        tier.close()


def test_server_frozen_from_the_start_costs_the_deadline():
    with a_redis_server() as server:
        tier = open_tier(f"redis://127.0.0.1:{server.port}")
        server.freeze()

        with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
            tier.get(KEYS, empty_buffers(), deadline_in(0.2))

        tier.close()


def test_late_server_is_found():
    with a_redis_server() as server:
        server.kill()
        tier = open_tier(server.url)
        with pytest.raises(TierFailed):
            tier.find(KEYS, deadline_in(30))

        server.start()

        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
        tier.close()


def test_server_killed_under_load_gives_no_wrong_byte():
    keys = [BlockKey(DIGEST, name) for name in a_chain(32, "busy")]
    with a_redis_server() as server:
        tier = open_tier(server.url, in_flight_bytes=1 << 16)
        stop = threading.Event()
        wrong = []

        def work(first: int) -> int:
            rounds = 0
            while not stop.is_set():
                mine = keys[first : first + 8]
                into = [np.zeros(1 << 18, np.uint8) for _ in mine]
                try:
                    put_blocks(
                        tier, mine, [a_block(index, 1 << 18) for index in range(first, first + 8)], deadline_in(2)
                    )
                    answers = tier.get(mine, into, deadline_in(2))
                except TierFailed:
                    continue
                for index, (answer, block) in enumerate(zip(answers, into, strict=True)):
                    good = np.array_equal(block, a_block(first + index, 1 << 18))
                    wrong.extend([first + index] if answer.outcome is BlockOutcome.MOVED and not good else [])
                rounds += 1
            return rounds

        with ThreadPoolExecutor(3) as threads:
            working = [threads.submit(work, first) for first in (0, 8, 16)]
            try:
                for _ in range(3):
                    reads = tier.status().hits
                    eventually(lambda reads=reads: tier.status().hits >= reads + 8, 30)
                    server.kill()
                    server.start()
            finally:
                stop.set()
            assert all(each.result(30) >= 0 for each in working)

        assert wrong == []
        assert tier.status().failures > 0
        tier.close()


def test_more_callers_than_connections_wait_for_their_turn(server):
    tier = open_tier(server.url, connections=1)
    put_blocks(tier, KEYS, BLOCKS, deadline_in(10))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: read_outcomes(tier), range(40)))

    assert answers == [[BlockOutcome.MOVED] * 4] * 40
    tier.close()


# Values under a key


@pytest.mark.parametrize(
    "planted",
    [
        b"",
        b"garbage",
        bytes(64),
        bytes(64 + BLOCK_BYTES),
        a_stored_value()[:63],
        a_stored_value()[:64],
        a_stored_value()[: 64 + BLOCK_BYTES // 2],
        a_stored_value()[:-1],
        a_stored_value() + b"x",
        a_stored_value(KEYS[2], BLOCKS[2]),
        a_stored_value(BlockKey(b"another-digest..", KEYS[1].name)),
        a_stored_value()[:80] + bytes([a_stored_value()[80] ^ 1]) + a_stored_value()[81:],
        b"FKVR\1\1" + a_stored_value()[6:],
    ],
    ids=["empty", "garbage", "zeros", "zeros as long as a value", "half a head", "a head", "half a value",
         "a byte short", "a byte long", "another block", "another namespace", "a flipped bit", "a changed head"],
)  # fmt: skip
def test_foreign_value_is_a_counted_miss_and_replaced(tier, server, planted, caplog):
    put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
    with server.client() as client:
        client.set(place_of(KEYS[1]), planted)

    assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED, BlockOutcome.MOVED]

    assert tier.status().corrupt == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == ["block corrupt"]
    assert tier.find(KEYS, deadline_in(10)) == 1
    assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
    assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4


def test_value_of_another_redis_type_is_replaced(tier, server):
    put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
    with server.client() as client:
        client.delete(place_of(KEYS[1]))
        client.rpush(place_of(KEYS[1]), "a", "list")

    assert tier.find(KEYS, deadline_in(10)) == 1
    assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED, BlockOutcome.MOVED]
    assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
    assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4


def test_newer_format_is_a_miss_logged_once_and_kept(tier, server, caplog):
    newer = b"FKVR\2" + a_stored_value()[5:]
    with server.client() as client:
        client.set(place_of(KEYS[1]), newer)
        client.set(place_of(KEYS[2]), newer)

        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True, False, False, True]
        assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE, BlockOutcome.MOVED]
        assert tier.find(KEYS, deadline_in(10)) == 1

        assert client.get(place_of(KEYS[1])) == newer
    assert tier.status().corrupt == 0
    assert len([record for record in caplog.records if "newer format" in record.message]) == 1


def test_planted_huge_value_is_not_read(tier, server):
    block = np.zeros(1 << 20, np.uint8)
    head = bytearray(records.pack(KEYS[0], 9, BLOCK_BYTES, block))
    with server.client() as client:
        client.set(place_of(KEYS[0]), bytes(head) + block.tobytes())

    assert read_outcomes(tier, KEYS[:1]) == [BlockOutcome.CORRUPT]


def test_two_writers_of_one_block_agree(server):
    tiers = [open_tier(server.url) for _ in range(2)]

    with ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(lambda tier: put_blocks(tier, KEYS, BLOCKS, deadline_in(10)), tiers))

    assert kept == [[True] * 4] * 2
    for tier in tiers:
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        tier.close()


def test_find_stops_at_the_first_missing_block(tier):
    keys = [BlockKey(DIGEST, name) for name in a_chain(700)]
    small = [np.full(8, index % 251, np.uint8) for index in range(700)]
    put_blocks(tier, keys, small, deadline_in(10))
    assert tier.find(keys, deadline_in(10)) == 700

    for hole in (699, 512, 256, 255, 0):
        tier.discard(keys[hole : hole + 1])

        assert tier.find(keys, deadline_in(10)) == hole


# Limits of the server


def test_rejection_by_a_full_server_is_no_failure():
    with a_redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = open_tier(server.url, in_flight_bytes=1 << 16)
        keys = [BlockKey(DIGEST, name) for name in a_chain(32, "full")]

        kept = put_blocks(tier, keys, [a_block(index, 1 << 18) for index in range(32)], deadline_in(10))

        assert True in kept
        assert False in kept
        status = tier.status()
        assert (status.refused, status.failures) == (kept.count(False), 0)
        into = [np.zeros(1 << 18, np.uint8) for _ in keys]
        answers = tier.get(keys, into, deadline_in(10))
        assert [answer.outcome is BlockOutcome.MOVED for answer in answers] == kept
        tier.close()


def test_evicting_server_keeps_storing_blocks():
    with a_redis_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = open_tier(server.url)
        keys = [BlockKey(DIGEST, name) for name in a_chain(32, "evict")]

        assert put_blocks(tier, keys, [a_block(index, 1 << 18) for index in range(32)], deadline_in(10)) == [True] * 32

        answers = tier.get(keys, [np.zeros(1 << 18, np.uint8) for _ in keys], deadline_in(10))
        lost = [key for key, answer in zip(keys, answers, strict=True) if answer.outcome is BlockOutcome.GONE]
        assert lost
        assert tier.gone() == lost
        tier.close()


def test_read_only_replica_is_a_named_failure():
    with a_redis_server() as server:
        with server.client() as client:
            client.replicaof("127.0.0.1", server.port)  # a replica of itself: read-only at once and never in sync
        tier = open_tier(server.url)

        with pytest.raises(TierFailed, match=r"READONLY|MASTERDOWN|LOADING"):
            put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
        tier.close()


def test_blocks_expire_after_their_ttl(server):
    tier = open_tier(server.url, ttl_seconds=100)
    put_blocks(tier, KEYS, BLOCKS, deadline_in(10))

    with server.client() as client:
        assert all(90 < client.ttl(place_of(key)) <= 100 for key in KEYS)
    tier.close()


# Connections to the server


def test_tcp_with_a_password_and_a_database():
    with a_redis_server("--requirepass", "open sesame") as server:
        url = f"redis://:open%20sesame@127.0.0.1:{server.port}/3"
        tier = open_tier(url)
        assert put_blocks(tier, KEYS, BLOCKS, deadline_in(10)) == [True] * 4
        assert read_outcomes(tier) == [BlockOutcome.MOVED] * 4
        with server.client(password="open sesame", db=3) as client:
            assert client.dbsize() == 4
        tier.close()


def test_password_file_is_read_at_each_connection(tmp_path):
    secret = tmp_path / "password"
    secret.write_text("first\n")
    with a_redis_server("--requirepass", "second") as server:
        tier = open_tier(f"redis://127.0.0.1:{server.port}", password_file=str(secret))
        with pytest.raises(TierFailed, match="AuthenticationError"):
            tier.find(KEYS, deadline_in(10))

        secret.write_text("second\n")

        assert tier.find(KEYS, deadline_in(10)) == 0
        tier.close()
    with pytest.raises(StoreNotStarted, match="password_file: /nowhere"):
        open_tier("redis://127.0.0.1", password_file="/nowhere")


def test_tls_round_trip_works_and_unknown_certificate_fails(tmp_path):
    certificate, private = tmp_path / "cert", tmp_path / "key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", private, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    port = a_free_port()
    tls = ("--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(private))
    with a_redis_server(*tls, "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no", "--port", "0"):
        assert can_connect(("127.0.0.1", port))
        tier = open_tier(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
        blocks = [a_block(seed, 1 << 20) for seed in range(4)]
        assert put_blocks(tier, KEYS, blocks, deadline_in(10)) == [True] * 4
        into = [np.zeros(1 << 20, np.uint8) for _ in KEYS]
        assert [answer.outcome for answer in tier.get(KEYS, into, deadline_in(10))] == [BlockOutcome.MOVED] * 4
        assert all(map(np.array_equal, into, blocks))
        tier.close()

        stranger = open_tier(f"rediss://127.0.0.1:{port}")  # does not trust that certificate
        with pytest.raises(TierFailed, match="certificate"):
            stranger.find(KEYS, deadline_in(10))
        stranger.close()


# Invalid servers


HANDSHAKE = (b"+OK\r\n", b"+OK\r\n")  # replies to the two commands that name the client

SCRIPTS = {
    "garbage from the start": Script((b"SSH-2.0-OpenSSH_9.2\r\n",)),
    "nothing from the start": Script((), hold=True),
    "garbage": Script((*HANDSHAKE, b"SSH-2.0-OpenSSH_9.2\r\n")),
    "nothing": Script(HANDSHAKE, hold=True),
    "an end": Script(HANDSHAKE),
    "a handshake byte by byte": Script((), drip=b"+" * 100),
    "a value byte by byte": Script(HANDSHAKE, drip=b"$8256\r\n" + bytes(100)),
    "a number that is none, from the start": Script((b":abc\r\n",)),
    "another place": Script((*HANDSHAKE, b"-MOVED 3999 127.0.0.1:6381\r\n" * 4)),
    "not yet": Script((*HANDSHAKE, b"-LOADING Redis is loading the dataset in memory\r\n" * 4)),
    "half a value": Script((*HANDSHAKE, b"$8256\r\n" + a_stored_value(KEYS[0], BLOCKS[0])[:4000])),
    "half a value, and silence": Script(
        (*HANDSHAKE, b"$8256\r\n" + a_stored_value(KEYS[0], BLOCKS[0])[:4000]), hold=True
    ),
    "a line without an end": Script((*HANDSHAKE, b"+" + b"x" * 100_000), hold=True),
    "a number that is none": Script((*HANDSHAKE, b"$abc\r\n"), hold=True),
    "replies of another kind": Script((*HANDSHAKE, b":1\r\n" * 10), hold=True),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_nonsense_is_a_failure_within_the_deadline(script):
    with a_scripted_server(script) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        with at_most(10), pytest.raises(TierFailed):  # instead of the libraries' minutes
            tier.get(KEYS, empty_buffers(), deadline_in(0.3))

        tier.close()


def test_blocks_received_before_a_cut_count():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    with a_scripted_server(Script((*HANDSHAKE, good + b"$8256\r\nFKVR"))) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        assert read_outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE, BlockOutcome.GONE]

        assert tier.status().failures == 1
        assert tier.gone() == [], "the other blocks were not reported as gone"
        tier.close()


def test_half_a_value_after_a_reply_costs_the_next_call_nothing():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    with a_scripted_server(Script((*HANDSHAKE, good + b"$8256\r\nFKVR"), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        for _ in range(3):
            assert read_outcomes(tier, KEYS[:1], seconds=5) == [BlockOutcome.MOVED]

        assert tier.status().failures == 0
        tier.close()


def test_oversized_head_is_rejected_without_waiting():
    with a_scripted_server(Script((*HANDSHAKE, b"$8256\r\nFKVR"), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        with pytest.raises(TierFailed, match="sent 8256 bytes; at most 64 were asked for"):
            tier.holds(KEYS, deadline_in(5))

        tier.close()


def test_value_too_large_for_the_deadline_is_removed():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    huge = b"$%d\r\n%b" % (1 << 29, a_stored_value()[:64])
    with a_scripted_server(Script((*HANDSHAKE, good + huge), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        assert read_outcomes(tier, seconds=0.3) == [
            BlockOutcome.MOVED,
            BlockOutcome.CORRUPT,
            BlockOutcome.GONE,
            BlockOutcome.GONE,
        ]

        assert tier.gone() == [KEYS[1]]
        tier.close()


def test_cluster_with_unserved_slots_is_a_named_failure():
    others = ("--cluster-port", str(a_free_port()))  # otherwise the port plus 10,000, which may not exist
    with a_redis_server("--cluster-enabled", "yes", *others) as server:
        tier = open_tier(server.url)

        for call in (lambda: read_outcomes(tier), lambda: tier.holds(KEYS, deadline_in(10))):
            with pytest.raises(TierFailed, match="CLUSTERDOWN"):
                call()
        tier.close()


def test_read_only_user_can_read_and_write_fails_with_a_cause(server):
    with server.client() as client:
        client.acl_setuser("reader", enabled=True, passwords=["+p"], keys=["fleet:*"], commands=["+get", "+getrange"])
    writer, reader = open_tier(server.url), open_tier(f"redis://reader:p@127.0.0.1:{server.port}")
    put_blocks(writer, KEYS[:2], BLOCKS[:2], deadline_in(10))

    assert read_outcomes(reader) == [BlockOutcome.MOVED, BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE]
    assert put_blocks(reader, KEYS[:2], BLOCKS[:2], deadline_in(10)) == [True] * 2, "the blocks are present"
    with pytest.raises(TierFailed, match="NOPERM"):
        put_blocks(reader, KEYS[2:], BLOCKS[2:], deadline_in(10))
    writer.close()
    reader.close()


def test_block_lost_by_the_server_is_not_reported_as_held(tier, server):
    put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
    with server.client() as client:
        client.delete(place_of(KEYS[0]), place_of(KEYS[2]))

    assert tier.holds(KEYS, deadline_in(10)) == [False, True, False, True]


# Settings


@pytest.mark.parametrize("options", ["db=two", "ssl_ca_certs=/ca.pem"])
def test_unsupported_option_is_rejected_without_secrets(options):
    with pytest.raises(StoreNotStarted, match=r"^url: ") as refused:
        open_tier(f"redis://:secret@host?{options}")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("url", {"url": "localhost:6379"}),
        ("url", {"url": "http://host"}),
        ("url", {"url": "redis://"}),
        ("url", {"url": "redis://host:port"}),
        ("url", {"url": "redis://[::1"}),
        ("url", {"url": "unix://"}),
        ("url", {"url": "redis://host?socket_timeout=0"}),
        ("url", {"url": "redis://host/database"}),
        ("password_file", {"url": "redis://:secret@host", "password_file": "f"}),
        ("key_prefix", {"url": "redis://host", "key_prefix": "a b"}),
        ("connections", {"url": "redis://host", "connections": 0}),
    ],
)
def test_invalid_settings_are_rejected_without_secrets(field, settings):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(settings, RedisSettings)

    assert field in str(refused.value)
    assert "secret" not in str(refused.value)


def test_secrets_are_neither_in_repr_nor_in_errors():
    settings = RedisSettings(url=f"redis://user:secret@127.0.0.1:{a_free_port()}/1")
    tier = open_redis(settings, codecs=lambda digest: PlainCodec(), clock=MonotonicClock())

    with pytest.raises(TierFailed) as failed:
        tier.find(KEYS, deadline_in(1))

    assert "secret" not in repr(settings) + str(failed.value)
    assert f"127.0.0.1:{settings.place.rpartition(':')[2]}" in str(failed.value)
    tier.close()


def test_closed_tier_closes_its_connections(server):
    with server.client() as client:
        others = len(client.client_list())
        tier = open_tier(server.url)
        put_blocks(tier, KEYS, BLOCKS, deadline_in(10))
        assert len(client.client_list()) == others + 1

        tier.close()

        eventually(lambda: len(client.client_list()) <= others)
