"""The Redis tier against a real server that is killed, frozen, full, locked, and full of what others planted there."""

import logging
import subprocess
import threading
import time
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
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, empty, keep, soon
from tests.support.kvstore.remote_blocks import BLOCKS, DIGEST, KEYS, a_stored_value, outcomes
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


# Servers that are away


def test_a_killed_server_is_a_failure_at_once_and_found_again_when_it_is_back():
    with a_redis_server() as server:
        tier = open_tier(server.url)
        keep(tier, KEYS, BLOCKS, soon(10))
        server.kill()

        for call in (
            lambda: outcomes(tier),
            lambda: keep(tier, KEYS, BLOCKS, soon(100)),
            lambda: tier.find(KEYS, soon(100)),
        ):
            with at_most(10), pytest.raises(TierFailed, match="unix://"):
                call()

        server.start()
        assert tier.find(KEYS, soon(10)) == 0, "it has forgotten"
        assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
        assert outcomes(tier) == [BlockOutcome.MOVED] * 4
        assert tier.status().failures == 3
        tier.close()


def test_connections_that_a_restart_has_cut_cost_no_call():
    with a_redis_server() as server:
        tier = open_tier(server.url)
        keep(tier, KEYS, BLOCKS, soon(10))
        server.kill()
        server.start()

        assert outcomes(tier) == [BlockOutcome.GONE] * 4
        assert tier.status().failures == 0
        tier.close()


CALLS = {
    "find": lambda tier: tier.find(KEYS, soon(0.2)),
    "put": lambda tier: keep(tier, KEYS, BLOCKS, soon(0.2)),
    "get": lambda tier: tier.get(KEYS, empty(), soon(0.2)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_frozen_server_costs_no_more_than_the_deadline(call):
    with a_redis_server() as server:
        tier = open_tier(server.url)
        keep(tier, KEYS, BLOCKS, soon(10))
        server.freeze()

        with at_most(10), pytest.raises(TierFailed):  # and not the libraries' own minutes
            call(tier)
        with at_most(10):
            tier.discard(KEYS)

        server.thaw()
        assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
        assert outcomes(tier) == [BlockOutcome.MOVED] * 4
        tier.close()


def test_a_server_that_is_frozen_from_the_start_costs_no_more_than_the_deadline():
    with a_redis_server() as server:
        tier = open_tier(f"redis://127.0.0.1:{server.port}")
        server.freeze()

        with at_most(10), pytest.raises(TierFailed):  # and not the libraries' own minutes
            tier.get(KEYS, empty(), soon(0.2))

        tier.close()


def test_a_server_that_is_not_there_yet_is_found_when_it_comes():
    with a_redis_server() as server:
        server.kill()
        tier = open_tier(server.url)
        with pytest.raises(TierFailed):
            tier.find(KEYS, soon(30))

        server.start()

        assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
        tier.close()


def test_a_server_killed_in_the_middle_of_much_work_never_gives_a_wrong_byte():
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
                    keep(tier, mine, [a_block(index, 1 << 18) for index in range(first, first + 8)], soon(2))
                    answers = tier.get(mine, into, soon(2))
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
    keep(tier, KEYS, BLOCKS, soon(10))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: outcomes(tier), range(40)))

    assert answers == [[BlockOutcome.MOVED] * 4] * 40
    tier.close()


# What lies under a key


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
def test_what_is_not_the_block_is_a_miss_counted_removed_and_written_anew(tier, server, planted, caplog):
    keep(tier, KEYS, BLOCKS, soon(10))
    with server.client() as client:
        client.set(place_of(KEYS[1]), planted)

    assert outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED, BlockOutcome.MOVED]

    assert tier.status().corrupt == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == ["block corrupt"]
    assert tier.find(KEYS, soon(10)) == 1
    assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
    assert outcomes(tier) == [BlockOutcome.MOVED] * 4


def test_what_is_not_even_a_string_is_a_miss_and_replaced(tier, server):
    keep(tier, KEYS, BLOCKS, soon(10))
    with server.client() as client:
        client.delete(place_of(KEYS[1]))
        client.rpush(place_of(KEYS[1]), "a", "list")

    assert tier.find(KEYS, soon(10)) == 1
    assert outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED, BlockOutcome.MOVED]
    assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
    assert outcomes(tier) == [BlockOutcome.MOVED] * 4


def test_a_value_of_a_newer_format_is_a_miss_said_once_and_left_alone(tier, server, caplog):
    newer = b"FKVR\2" + a_stored_value()[5:]
    with server.client() as client:
        client.set(place_of(KEYS[1]), newer)
        client.set(place_of(KEYS[2]), newer)

        assert keep(tier, KEYS, BLOCKS, soon(10)) == [True, False, False, True]
        assert outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE, BlockOutcome.MOVED]
        assert tier.find(KEYS, soon(10)) == 1

        assert client.get(place_of(KEYS[1])) == newer
    assert tier.status().corrupt == 0
    assert len([record for record in caplog.records if "newer format" in record.message]) == 1


def test_a_planted_value_that_claims_to_be_huge_is_not_taken_in(tier, server):
    block = np.zeros(1 << 20, np.uint8)
    head = bytearray(records.pack(KEYS[0], 9, BLOCK_BYTES, block))
    with server.client() as client:
        client.set(place_of(KEYS[0]), bytes(head) + block.tobytes())

    assert outcomes(tier, KEYS[:1]) == [BlockOutcome.CORRUPT]


def test_two_writers_of_one_block_agree(server):
    tiers = [open_tier(server.url) for _ in range(2)]

    with ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(lambda tier: keep(tier, KEYS, BLOCKS, soon(10)), tiers))

    assert kept == [[True] * 4] * 2
    for tier in tiers:
        assert outcomes(tier) == [BlockOutcome.MOVED] * 4
        tier.close()


def test_a_hole_in_a_chain_ends_what_is_found_wherever_it_is(tier):
    keys = [BlockKey(DIGEST, name) for name in a_chain(700)]
    small = [np.full(8, index % 251, np.uint8) for index in range(700)]
    keep(tier, keys, small, soon(10))
    assert tier.find(keys, soon(10)) == 700

    for hole in (699, 512, 256, 255, 0):
        tier.discard(keys[hole : hole + 1])

        assert tier.find(keys, soon(10)) == hole


# Limits of the server


def test_a_full_server_refuses_blocks_which_is_no_failure():
    with a_redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = open_tier(server.url, in_flight_bytes=1 << 16)
        keys = [BlockKey(DIGEST, name) for name in a_chain(32, "full")]

        kept = keep(tier, keys, [a_block(index, 1 << 18) for index in range(32)], soon(10))

        assert True in kept
        assert False in kept
        status = tier.status()
        assert (status.refused, status.failures) == (kept.count(False), 0)
        into = [np.zeros(1 << 18, np.uint8) for _ in keys]
        answers = tier.get(keys, into, soon(10))
        assert [answer.outcome is BlockOutcome.MOVED for answer in answers] == kept
        tier.close()


def test_a_server_that_evicts_keeps_taking_blocks():
    with a_redis_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = open_tier(server.url)
        keys = [BlockKey(DIGEST, name) for name in a_chain(32, "evict")]

        assert keep(tier, keys, [a_block(index, 1 << 18) for index in range(32)], soon(10)) == [True] * 32

        answers = tier.get(keys, [np.zeros(1 << 18, np.uint8) for _ in keys], soon(10))
        lost = [key for key, answer in zip(keys, answers, strict=True) if answer.outcome is BlockOutcome.GONE]
        assert lost
        assert tier.gone() == lost
        tier.close()


def test_a_read_only_replica_is_a_failure_that_says_so():
    with a_redis_server() as server:
        with server.client() as client:
            client.replicaof("127.0.0.1", server.port)  # of itself: never in step, read-only at once
        tier = open_tier(server.url)

        with pytest.raises(TierFailed, match=r"READONLY|MASTERDOWN|LOADING"):
            keep(tier, KEYS, BLOCKS, soon(10))
        tier.close()


def test_blocks_live_as_long_as_they_are_told_to(server):
    tier = open_tier(server.url, ttl_seconds=100)
    keep(tier, KEYS, BLOCKS, soon(10))

    with server.client() as client:
        assert all(90 < client.ttl(place_of(key)) <= 100 for key in KEYS)
    tier.close()


# Ways to the server


def test_tcp_with_a_password_and_a_database():
    with a_redis_server("--requirepass", "open sesame") as server:
        url = f"redis://:open%20sesame@127.0.0.1:{server.port}/3"
        tier = open_tier(url)
        assert keep(tier, KEYS, BLOCKS, soon(10)) == [True] * 4
        assert outcomes(tier) == [BlockOutcome.MOVED] * 4
        with server.client(password="open sesame", db=3) as client:
            assert client.dbsize() == 4
        tier.close()


def test_the_password_may_lie_in_a_file_and_is_read_at_each_connection(tmp_path):
    secret = tmp_path / "password"
    secret.write_text("first\n")
    with a_redis_server("--requirepass", "second") as server:
        tier = open_tier(f"redis://127.0.0.1:{server.port}", password_file=str(secret))
        with pytest.raises(TierFailed, match="AuthenticationError"):
            tier.find(KEYS, soon(10))

        secret.write_text("second\n")

        assert tier.find(KEYS, soon(10)) == 0
        tier.close()
    with pytest.raises(StoreNotStarted, match="password_file: /nowhere"):
        open_tier("redis://127.0.0.1", password_file="/nowhere")


def test_over_tls_blocks_go_there_and_back_and_an_unknown_certificate_is_refused(tmp_path):
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
        assert keep(tier, KEYS, blocks, soon(10)) == [True] * 4
        into = [np.zeros(1 << 20, np.uint8) for _ in KEYS]
        assert [answer.outcome for answer in tier.get(KEYS, into, soon(10))] == [BlockOutcome.MOVED] * 4
        assert all(map(np.array_equal, into, blocks))
        tier.close()

        stranger = open_tier(f"rediss://127.0.0.1:{port}")  # does not trust that certificate
        with pytest.raises(TierFailed, match="certificate"):
            stranger.find(KEYS, soon(10))
        stranger.close()


# Servers that are none


HANDSHAKE = (b"+OK\r\n", b"+OK\r\n")  # to the two commands in which a client tells its name

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
def test_a_server_that_talks_nonsense_is_a_failure_within_the_deadline(script):
    with a_scripted_server(script) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        with at_most(10), pytest.raises(TierFailed):  # and not the libraries' own minutes
            tier.get(KEYS, empty(), soon(0.3))

        tier.close()


def test_blocks_that_came_before_the_cut_count():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    with a_scripted_server(Script((*HANDSHAKE, good + b"$8256\r\nFKVR"))) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        assert outcomes(tier) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE, BlockOutcome.GONE]

        assert tier.status().failures == 1
        assert tier.gone() == [], "nobody said that the others are not there"
        tier.close()


def test_half_a_value_behind_a_reply_costs_the_next_call_nothing():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    with a_scripted_server(Script((*HANDSHAKE, good + b"$8256\r\nFKVR"), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        for _ in range(3):
            assert outcomes(tier, KEYS[:1], seconds=5) == [BlockOutcome.MOVED]

        assert tier.status().failures == 0
        tier.close()


def test_more_bytes_than_a_head_are_refused_and_not_waited_for():
    with a_scripted_server(Script((*HANDSHAKE, b"$8256\r\nFKVR"), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        with pytest.raises(TierFailed, match="sent 8256 bytes; at most 64 were asked for"):
            tier.holds(KEYS, soon(5))

        tier.close()


def test_a_value_that_is_too_large_to_be_taken_in_time_costs_itself_only_and_is_removed():
    good = b"$%d\r\n%b\r\n" % (64 + BLOCK_BYTES, a_stored_value(KEYS[0], BLOCKS[0]))
    huge = b"$%d\r\n%b" % (1 << 29, a_stored_value()[:64])
    with a_scripted_server(Script((*HANDSHAKE, good + huge), hold=True)) as port:
        tier = open_tier(f"redis://127.0.0.1:{port}")

        assert outcomes(tier, seconds=0.3) == [
            BlockOutcome.MOVED,
            BlockOutcome.CORRUPT,
            BlockOutcome.GONE,
            BlockOutcome.GONE,
        ]

        assert tier.gone() == [KEYS[1]]
        tier.close()


def test_a_cluster_whose_slots_nobody_serves_is_a_failure_that_says_so():
    others = ("--cluster-port", str(a_free_port()))  # else its own and 10,000, which may be none
    with a_redis_server("--cluster-enabled", "yes", *others) as server:
        tier = open_tier(server.url)

        for call in (lambda: outcomes(tier), lambda: tier.holds(KEYS, soon(10))):
            with pytest.raises(TierFailed, match="CLUSTERDOWN"):
                call()
        tier.close()


def test_a_user_who_may_only_read_reads_and_a_write_is_a_failure_that_says_so(server):
    with server.client() as client:
        client.acl_setuser("reader", enabled=True, passwords=["+p"], keys=["fleet:*"], commands=["+get", "+getrange"])
    writer, reader = open_tier(server.url), open_tier(f"redis://reader:p@127.0.0.1:{server.port}")
    keep(writer, KEYS[:2], BLOCKS[:2], soon(10))

    assert outcomes(reader) == [BlockOutcome.MOVED, BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.GONE]
    assert keep(reader, KEYS[:2], BLOCKS[:2], soon(10)) == [True] * 2, "they are there"
    with pytest.raises(TierFailed, match="NOPERM"):
        keep(reader, KEYS[2:], BLOCKS[2:], soon(10))
    writer.close()
    reader.close()


def test_what_the_server_lost_by_itself_it_is_not_said_to_have(tier, server):
    keep(tier, KEYS, BLOCKS, soon(10))
    with server.client() as client:
        client.delete(place_of(KEYS[0]), place_of(KEYS[2]))

    assert tier.holds(KEYS, soon(10)) == [False, True, False, True]


# Settings


@pytest.mark.parametrize("options", ["db=two", "ssl_ca_certs=/ca.pem"])
def test_an_option_that_is_not_for_this_server_is_refused_by_name_without_telling_secrets(options):
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
def test_wrong_settings_are_refused_by_name_without_telling_secrets(field, settings):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(settings, RedisSettings)

    assert field in str(refused.value)
    assert "secret" not in str(refused.value)


def test_secrets_are_neither_in_repr_nor_in_errors():
    settings = RedisSettings(url=f"redis://user:secret@127.0.0.1:{a_free_port()}/1")
    tier = open_redis(settings, codecs=lambda digest: PlainCodec(), clock=MonotonicClock())

    with pytest.raises(TierFailed) as failed:
        tier.find(KEYS, soon(1))

    assert "secret" not in repr(settings) + str(failed.value)
    assert f"127.0.0.1:{settings.place.rpartition(':')[2]}" in str(failed.value)
    tier.close()


def test_a_closed_tier_lets_its_connections_go(server):
    with server.client() as client:
        others = len(client.client_list())
        tier = open_tier(server.url)
        keep(tier, KEYS, BLOCKS, soon(10))
        assert len(client.client_list()) == others + 1

        tier.close()

        deadline = time.monotonic() + 60
        while len(client.client_list()) > others:
            assert time.monotonic() < deadline
