"""`fleet logs`: the last lines of each log, merged by time, in bounded memory."""

import json
import os
import random
import sys
import tracemalloc
from pathlib import Path

import pytest

from fleet.cli.local import logs, running
from fleet.cli.main import run
from fleet.local.runs import LocalRun, note_supervisor


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return the folder with the logs of a cluster, which `fleet logs` finds."""
    (tmp_path / "router.json").write_text(json.dumps({"grpc_listen": "127.0.0.1:1"}))
    note_supervisor(tmp_path)
    monkeypatch.setattr(running, "local_runs", lambda: [LocalRun(tmp_path)])
    return tmp_path


def shown(capsys, *arguments):
    capsys.readouterr()
    assert run(["logs", *arguments]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


@pytest.mark.parametrize("seed", range(6))
def test_last_lines_are_shown_whatever_the_lines_are(cluster, capsys, monkeypatch, seed):
    """Write random lines, with carriage returns, empty lines and an end without newline, and read them in small pieces."""
    rng = random.Random(seed)
    lines = ["".join(rng.choices("aé €", k=rng.randrange(1 + 4 * seed))) for _ in range(40)]
    ends = [rng.choice(("\n", "\n", "\r")) if line else "\n" for line in lines[:-1]]
    text = "".join(map("".join, zip(lines, [*ends, rng.choice(("", "\n"))], strict=True)))
    (cluster / "router.log").write_bytes(text.encode())
    longest = max(len(line.encode()) for line in text.split("\n"))
    monkeypatch.setattr(logs, "MOST_BYTES", longest + 1 + rng.randrange(3))  # longer lines would be split
    expected = text.splitlines()

    for number in range(len(expected) + 2):
        assert shown(capsys, "router", "-n", str(number)) == expected[max(0, len(expected) - number) :]


def test_lines_of_several_logs_are_merged_by_time(cluster, capsys):
    (cluster / "a.log").write_text("2026-01-01 10:00:00,100 one\nTraceback\n2026-01-01 10:00:00,300 three\n")
    (cluster / "b.log").write_text('{"time":"2026-01-01 10:00:00,200","message":"two"}\n')

    assert shown(capsys) == [
        "a | 2026-01-01 10:00:00,100 one",
        "a | Traceback",
        'b | {"time":"2026-01-01 10:00:00,200","message":"two"}',
        "a | 2026-01-01 10:00:00,300 three",
    ]


def test_only_the_end_of_a_log_with_long_lines_is_read(cluster, capsys):
    long = "x" * (logs.LONGEST_LINE * 3)
    (cluster / "router.log").write_text(f"{long}\n{long}\nlast\n")

    assert shown(capsys, "router", "-n", "2") == ["last"]


def test_long_logs_are_shown_in_little_memory(cluster, monkeypatch):
    line = "2026-01-01 10:00:00,100 INFO fleet.test constant message with a few variables in it\n"
    for name in ("router", "decode-0"):
        (cluster / f"{name}.log").write_text(line * 40_000)
        assert (cluster / f"{name}.log").stat().st_size > 3 << 20

    with Path(os.devnull).open("w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        tracemalloc.start()
        try:
            assert run(["logs", "-n", "40000"]) == 0
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert peak < 1 << 20


def test_new_lines_are_followed_when_they_are_complete(tmp_path):
    log = tmp_path / "router.log"
    places = {}

    def new(written):
        with log.open("a") as file:
            file.write(written)
        return [line for _, line in logs.new_lines({"router": log}, places)]

    assert new("one\ntw") == ["one"]
    assert new("") == []
    assert new("o\nthree\n") == ["two", "three"]
    assert places == {"router": log.stat().st_size}


def test_followed_line_without_end_is_shown_in_pieces(tmp_path):
    log = tmp_path / "router.log"
    log.write_text("x" * (2 * logs.MOST_BYTES + 5))

    lengths = [len(line) for _, line in logs.new_lines({"router": log}, {})]

    assert lengths == [logs.MOST_BYTES, logs.MOST_BYTES]
