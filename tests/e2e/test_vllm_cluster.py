"""Test of `fleet up` with real vLLM engines on the CPU."""

import json
import os
import re
import signal
from importlib.util import find_spec

import httpx
import psutil
import pytest

from fleet.client import Client, Finish, Pattern, Placement, Source
from tests.support.fleet_processes import alive, fleet_up, run_fleet
from tests.support.shared_memory import abandoned_segments, remaining_of
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300  # 25 to 60 on two idle cores
PROMPT = list(range(100, 700))  # 18 full blocks and a part
LONG_ANSWER = 800  # tokens; a router that is killed after the first ones has not sent the others
ASK = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True, "timeout_seconds": 120.0}


def group_of(leader):
    return [process.pid for process in psutil.process_iter() if getpgid(process.pid) == leader]


def getpgid(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_tokens_match_aggregated_engine_on_both_kv_paths():
    before = abandoned_segments()

    done = run_fleet("up", "--check", timeout=800)

    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["path"] for verdict in verdicts] == ["store", "direct"]
    for verdict in verdicts:
        assert verdict["ok"] is True
        assert verdict["prompts"] >= 20
        assert verdict["identical"] == verdict["prompts"]
        assert verdict["blocks_moved"] > 0
        assert verdict["bytes_moved"] > 0
    eventually(lambda: abandoned_segments() <= before)


@pytest.mark.long
def test_killed_decode_worker_returns_and_leaves_nothing(tmp_path):
    with fleet_up(tmp_path, engine="vllm", ready_seconds=READY_SECONDS) as up, Client(up.grpc) as client:
        first = client.complete(PROMPT, placement=Placement.DISAGGREGATED, **ASK)
        for placement in (Placement.AGGREGATED, Placement.DISAGGREGATED):
            kept = client.complete(PROMPT, placement=placement, form=Pattern("[0-9]{3}-[a-f]{2}"), max_tokens=32)
            assert re.fullmatch("[0-9]{3}-[a-f]{2}", kept.text), kept.text
            assert kept.finish is Finish.STOP
        killed = up.endpoints["pids"]["decode-0"]
        family = group_of(killed)
        assert len(family) >= 2  # the worker, and vLLM's engine core with the model
        segments = up.segments()

        os.kill(killed, signal.SIGKILL)
        eventually(lambda: alive(family) == [], 30)
        eventually(lambda: roles(client) == {"prefill", "decode"}, READY_SECONDS)
        again = client.complete(PROMPT, placement=Placement.DISAGGREGATED, **ASK)

        assert again.token_ids == first.token_ids
        decode = again.kv[-1]
        assert any(origin.source is Source.STORE and origin.bytes for origin in decode.report.origins)
        everybody, segments = up.pids(), segments | up.segments()
        assert up.end() == 0

    assert alive(everybody) == []
    eventually(lambda: not remaining_of(segments))


def roles(client):
    return {pool.role for pool in client.status().pools if any(worker.state == "serving" for worker in pool.workers)}


@pytest.mark.long
def test_stream_goes_on_after_the_death_of_its_router(tmp_path):
    """Supervision starts another router at the same address, which rebuilds the answer from the client's tokens."""
    prompt, ask = PROMPT[:100], ASK | {"max_tokens": LONG_ANSWER}
    with (
        fleet_up(tmp_path, engine="vllm", ready_seconds=READY_SECONDS) as up,
        Client(up.grpc, resume_seconds=90) as client,
    ):
        expected = client.complete(prompt, **ask)
        with client.generate(prompt, **ask) as stream:
            tokens = 0
            for delta in stream:
                before, tokens = tokens, tokens + len(delta.token_ids)
                if before < 16 <= tokens:
                    os.kill(up.endpoints["pids"]["router"], signal.SIGKILL)
            result = stream.result
        assert '\nfleet_resumed_requests_total{model="tiny"} 1.0\n' in httpx.get(f"{up.endpoints['http']}/metrics").text
        assert up.end() == 0

    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.usage.completion_tokens == LONG_ANSWER
