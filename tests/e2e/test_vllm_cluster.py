"""`fleet up` with real vLLM engines on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

import psutil
import pytest

from fleet.client import Client, Finish, Pattern, Placement, Source
from tests.shared_memory import abandoned_segments

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
def fleet_up(folder):
    ready = folder / "ready.json"
    command = [*FLEET, "up", "--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready)]
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
        for placement in (Placement.AGGREGATED, Placement.DISAGGREGATED):
            kept = client.complete(PROMPT, placement=placement, form=Pattern("[0-9]{3}-[a-f]{2}"), max_tokens=32)
            assert re.fullmatch("[0-9]{3}-[a-f]{2}", kept.text), kept.text
            assert kept.finish is Finish.STOP
        killed = endpoints["pids"]["decode-0"]
        family = group_of(killed)
        assert len(family) >= 2  # the worker, and vLLM's engine core with the model

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
