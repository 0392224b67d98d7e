"""Tests of the KV store benchmark: compared systems in their own processes, and the command."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from fleet.cli.store import bench as kv_bench
from fleet.core.errors import ConfigurationRefused
from loadtests.environments import SystemDistribution, SystemUnavailable, python_of
from loadtests.kvstore.compared import process as processes
from loadtests.kvstore.compared.process import ComparedSystemProcess
from tests.support.fleet_processes import alive, run_load_test
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

PEER = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(Path(processes.__file__).parent)!r})
from answering import answer

def child():
    return {{"pid": subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid}}

def fail():
    raise RuntimeError("no room")

def talk():
    print("noise on standard output")
    os.write(1, b"and from native code")
    return {{"seconds": 2}}

answer({{
    "hello": dict, "talk": talk, "add": lambda a, b: {{"sum": a + b}}, "child": child, "fail": fail,
    "die": lambda: os._exit(3), "hang": signal.pause,
}})
"""


@pytest.fixture
def peer(tmp_path):
    script = tmp_path / "peer_process.py"
    script.write_text(PEER)
    peer = ComparedSystemProcess("Peer", lambda: Path(sys.executable), script, tmp_path / "log")
    yield peer
    peer.end()


def test_noisy_output_of_a_peer_is_ignored(peer):
    assert peer.ask("add", a=2, b=3) == {"sum": 5}
    assert peer.ask("talk") == {"seconds": 2}


def test_unsupported_operation_of_a_peer_gives_a_reason(peer):
    with pytest.raises(SystemUnavailable, match="Peer: RuntimeError: no room"):
        peer.ask("fail")
    with pytest.raises(SystemUnavailable, match="has no such function"):
        peer.ask("unknown")
    assert peer.ask("add", a=1, b=1) == {"sum": 2}


def test_dead_peer_is_not_waited_for_again(peer):
    with pytest.raises(SystemUnavailable, match="does not answer"):
        peer.ask("die")

    with at_most(10), pytest.raises(SystemUnavailable, match="does not answer"):
        peer.ask("add", a=1, b=1)


def test_hung_peer_is_killed_with_its_children(peer, monkeypatch):
    child = peer.ask("child")["pid"]
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(processes, "END_SECONDS", 0.3)

    with pytest.raises(SystemUnavailable, match="does not answer"):
        peer.ask("hang")

    eventually(lambda: alive([child]) == [])


def test_uninstallable_peer_is_absent_with_the_reason(tmp_path):
    impossible = SystemDistribution(name="Nobody", version="1", steps=(((str(tmp_path / "missing.whl"),),),))

    with pytest.raises(SystemUnavailable, match=r"Nobody 1 could not be installed: .*missing\.whl"):
        python_of(impossible, tmp_path)


def test_the_command_writes_a_list_of_lines(tmp_path):
    report = tmp_path / "lines.json"
    chosen = ("--quick", "--no-peers", "--only", "lookup", "--only", "keys of 8k tokens, block 256")

    done = run_load_test("kvstore.bench", *chosen, "--json", str(report), folder=tmp_path, timeout=100)

    assert done.returncode == 0, done.stderr
    lines = json.loads(report.read_text())
    assert [line["name"] for line in lines] == [
        "lookup of 512 keys, in the node",
        "lookup of 512 keys, by a client",
        "keys of 8k tokens, block 256, sha256-128",
        "keys of 8k tokens, block 256, xxh3-128",
    ]
    for line in lines:
        assert {"name", "unit", "fleet", "limit", "ratio_to_limit", "peers", "rounds", "spread"} <= line.keys()
        assert line["fleet"] > 0
        assert line["rounds"] == 3
    assert "machine: " in done.stdout


def test_the_command_of_fleet_takes_the_same_options():
    parser = argparse.ArgumentParser()
    kv_bench.configure(parser)

    arguments = parser.parse_args(["--quick", "--json", "FILE", "--no-peers"])

    assert (arguments.quick, arguments.json, arguments.peers) == (True, Path("FILE"), False)


def test_command_requires_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_bench, "CHECKOUT", tmp_path)

    with pytest.raises(ConfigurationRefused, match="call it from a checkout"):
        kv_bench.configure(argparse.ArgumentParser())
