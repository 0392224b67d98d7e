"""`fleet up` with real vLLM engines on the CPU."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from fleet.client import Client, Placement, Source
from kvstore.client import StoreClient
from tests.servers import a_redis
from tests.shared_memory import abandoned_segments
from tests.vllm_hosting import tiny_namespace

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

FLEET = [sys.executable, "-m", "fleet.cli.main"]
READY_SECONDS = 300  # 25 to 60 on two cores that do nothing else
PROMPT = list(range(100, 700))  # 18 full blocks and a bit
ASK = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, "timeout_seconds": 120.0}


@contextmanager
def fleet_up(folder, *options):
    ready = folder / "ready.json"
    command = [*FLEET, "up", "--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready), *options]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, READY_SECONDS)
        assert ready.exists(), (folder / "up.log").read_text()
        yield process, json.loads(ready.read_text())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def group_of(leader):
    return [process.pid for process in psutil.process_iter() if getpgid(process.pid) == leader]


def getpgid(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_tokens_are_those_of_one_aggregated_engine_and_blocks_move_both_ways():
    before = abandoned_segments()

    done = subprocess.run([*FLEET, "up", "--check"], capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["path"] for verdict in verdicts] == ["store", "direct"]
    for verdict in verdicts:
        assert verdict["ok"] is True
        assert verdict["prompts"] >= 20
        assert verdict["identical"] == verdict["prompts"]
        assert verdict["blocks_moved"] > 0
        assert verdict["bytes_moved"] > 0
    wait_until(lambda: abandoned_segments() <= before, 30)


def test_a_killed_decode_worker_comes_back_and_nothing_of_it_stays(tmp_path):
    before = abandoned_segments()
    with fleet_up(tmp_path) as (supervisor, endpoints), Client(endpoints["grpc"]) as client:
        first = client.complete(PROMPT, placement=Placement.DISAGGREGATED, **ASK)
        killed = endpoints["pids"]["decode-0"]
        family = group_of(killed)
        assert len(family) >= 3  # the worker, vLLM's engine core, and its worker

        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: alive(family) == [], 30)
        wait_until(lambda: roles(client) == {"prefill", "decode"}, READY_SECONDS)
        again = client.complete(PROMPT, placement=Placement.DISAGGREGATED, **ASK)

        assert again.token_ids == first.token_ids
        decode = again.kv[-1]
        assert any(origin.source is Source.STORE and origin.bytes for origin in decode.report.origins)
        everybody = [process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)]
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(60) == 0

    assert alive(everybody) == []
    wait_until(lambda: abandoned_segments() <= before, 30)


def roles(client):
    return {pool.role for pool in client.status().pools if any(worker.state == "serving" for worker in pool.workers)}


BLOCKS = 64
LONG = BLOCKS * 32 + 2  # tokens
TIERED = """
[store]
capacity_mib = 128

[[store.tiers]]
kind = "ssd"
directories = ["{ssd}"]
capacity_bytes = 268435456
segment_bytes = 16777216
keep = "all"

[[store.tiers]]
kind = "redis"
url = "{redis}"
keep = "all"

[[pools]]
role = "both"

[pools.vllm]
kv_cache_gib = 0.02  # 163 blocks: two other prompts push one out
"""


class Tiered:
    """A cluster of one worker, and a store node whose tiers can be looked at."""

    def __init__(self, supervisor, client):
        self.client = client
        self._supervisor = psutil.Process(supervisor.pid)
        settings = json.loads(Path(self._settings("both-0")).read_text())
        self._namespace = tiny_namespace(Path(settings["model_dir"]))
        self._address = settings["store"]
        self._chance = random.Random(1)

    def ask(self, prompt):
        """The answer's tokens, and how many blocks of the prompt came from the store."""
        result = self.client.complete(prompt, **ASK)
        (phase,) = result.kv
        return result.token_ids, sum(o.blocks for o in phase.report.origins if o.source is Source.STORE)

    def fresh(self, length):
        return [self._chance.randrange(300, 4000) for _ in range(length)]

    def push_out(self):
        """Out of the engine's own cache."""
        for _ in range(3):
            self.ask(self.fresh(LONG))

    def stats(self):
        """Of the node, which may be starting; and of each tier by name."""
        with StoreClient.connect(self._address, self._namespace, timeout_seconds=30) as node:
            stats = node.stats()
        return stats, {tier.name: tier for tier in stats.tiers}

    def until_kept(self, blocks):
        """Until so many blocks have gone down to both tiers since the node has started."""
        size = blocks * self._namespace.block_bytes
        wait_until(lambda: all(tier.bytes_written >= size for tier in self.stats()[1].values()), 60)

    def kill_the_node(self):
        """And return when the engine works with the one that the supervisor starts in its place."""
        self._process("kvstore").kill()

        def is_found():
            self.ask(self.fresh(70))
            stats, _ = self.stats()
            return stats.written and stats.misses

        wait_until(is_found, 60)

    def _process(self, name):
        for child in self._supervisor.children():
            if any(part.endswith(f"/{name}.json") for part in child.cmdline()):
                return child
        raise AssertionError(f"no {name} is running")

    def _settings(self, name):
        return next(part for part in self._process(name).cmdline() if part.endswith(f"/{name}.json"))


def test_a_prompt_is_served_from_memory_then_from_the_disk_after_a_crash_then_by_a_new_node_from_redis(tmp_path):
    before = abandoned_segments()
    ssd, topology = tmp_path / "ssd", tmp_path / "cluster.toml"
    with a_redis() as redis:
        topology.write_text(TIERED.format(ssd=ssd, redis=redis.url))
        with (
            fleet_up(tmp_path, "--config", str(topology)) as (supervisor, endpoints),
            Client(endpoints["grpc"]) as client,
        ):
            cluster = Tiered(supervisor, client)
            prompt = cluster.fresh(LONG)
            tokens, stored = cluster.ask(prompt)
            assert stored == 0
            cluster.until_kept(BLOCKS)

            cluster.push_out()
            assert cluster.ask(prompt) == (tokens, BLOCKS)
            _, tiers = cluster.stats()
            assert (tiers["ssd"].hits, tiers["redis"].hits) == (0, 0), "they were in memory"

            cluster.push_out()
            cluster.kill_the_node()
            assert cluster.ask(prompt) == (tokens, BLOCKS)
            _, tiers = cluster.stats()
            assert tiers["ssd"].hits >= BLOCKS
            assert tiers["redis"].hits == 0

            cluster.push_out()
            ssd.rename(tmp_path / "another host's")  # the next node begins with an empty disk
            cluster.kill_the_node()
            assert cluster.ask(prompt) == (tokens, BLOCKS)
            _, tiers = cluster.stats()
            assert tiers["ssd"].hits == 0
            assert tiers["redis"].hits >= BLOCKS
    wait_until(lambda: abandoned_segments() <= before, 30)
