"""Replays of recordings: they find the same commands, report the first difference, or refuse an invalid file."""

import json
from base64 import b64encode
from contextlib import suppress
from random import Random

import pytest

from fleet.app.agreement.comparison import serve
from fleet.app.agreement.production_world import keys_from_tokens
from fleet.cli.main import run
from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.recording.flight_recorder import FlightRecorder
from fleet.recording.format import FORMAT, RecordingHead
from fleet.recording.reader import Recording, RecordingError
from fleet.router.latency_predictions import PredictionKind, WorkerProfile
from fleet.router.observer import ObservedMachine
from fleet.sim.replay import RecordingReplay
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.scenarios import SCENARIO
from tests.support.sim.worlds import LinearStepTimes
from tests.unit.app.agreement.test_comparison import lost, pairs, requests

PLAN = pairs(lost("decode-1", 1.4))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the lines of the recording of a router in virtual time, some of whose workers die."""
    path = tmp_path_factory.mktemp("r") / "flight"
    head = RecordingHead(
        recording=FORMAT, fleet="0", began=Nanos(-(10**10)), began_unix=1, seed=PLAN.seed, settings=PLAN.router
    )
    with FlightRecorder(path, 1 << 24, head, keys_from_tokens) as recorder:
        machine = ObservedMachine(PLAN.router, Random(PLAN.seed), None, recorder.hash, observer=recorder)
        ended = serve(PLAN, requests(30), machine)
    assert len(ended) == 30
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def replay(tmp_path):
    """Return a function that replays lines, and returns the result."""

    def replayed(lines):
        path = tmp_path / "flight"
        path.write_bytes(b"".join(lines))
        return RecordingReplay(path).run()

    return replayed


def changed(lines, number, change):
    """Return the lines with one changed; lines are numbered from 1."""
    line = json.loads(lines[number - 1])
    change(line)
    return [*lines[: number - 1], json.dumps(line).encode() + b"\n", *lines[number:]]


def first(lines, found):
    """Return the number of the first line after the head for which `found` is true."""
    return next(number for number, line in enumerate(lines, 1) if number > 1 and found(json.loads(line)))


def test_recording_replays_to_same_commands(lines, replay):
    replayed = replay(lines)
    assert replayed.agree
    assert (replayed.events, replayed.requests) == (len(lines) - 2, 30)
    assert replayed.commands > 100
    assert replayed.notes == ["it ends because the router ended"]
    continued = first(lines, lambda line: line.get("name") == "WorkerLeft")
    assert len(json.loads(lines[continued - 1])["keys"]) > 1, "nobody was continued with keys of its own"


def test_replay_compares_profile_with_workers(lines, tmp_path):
    path = tmp_path / "flight"
    path.write_bytes(b"".join(lines))
    replayed = RecordingReplay(path, lambda _: WorkerProfile(steps=LinearStepTimes(), step_tokens=512)).run()
    told = {(each.worker_id, each.kind): each for each in replayed.expected}
    assert told["prefill-0", PredictionKind.TTFT].predictions > 5
    assert told["prefill-0", PredictionKind.TTFT].error < 0.3
    assert told["decode-0", PredictionKind.ITL].error < 0.2
    assert replayed.drifts == []


def test_expect_option_reports_prediction_errors(lines, tmp_path, capsys):
    path, scenario = tmp_path / "flight", tmp_path / "scenario.toml"
    path.write_bytes(b"".join(lines))
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    scenario.write_text(SCENARIO.replace('role = "both"', 'name = "decode"\nrole = "both"'))
    assert run(["sim", "replay", str(path), "--expect", str(scenario)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("decode-")
    assert "by the profile alone" in told[3]
    assert not [line for line in told if line.startswith("prefill-")]
    assert run(["sim", "replay", str(path), "--expect", str(tmp_path / "absent.toml")]) == 3


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Arrived", lambda line: line["event"]["sampling"].update(max_tokens=7)),
        ("Arrived", lambda line: line.update(prompt_tokens=line["prompt_tokens"] + 1)),
        ("Stepped", lambda line: line["event"]["progress"][0].__setitem__(0, "unknown#1")),
        ("Stepped", lambda line: line["commands"].pop()),
        ("WorkerLeft", lambda line: line["event"].update(worker_id="decode-0")),
        ("Arrived", lambda line: line.pop("commands")),
    ],
)
def test_first_different_event_is_shown(lines, replay, name, change):
    def meant(line):
        return line.get("name") == name and line.get("commands")

    number = first(lines, meant)
    replayed = replay(changed(lines, number, change))
    assert not replayed.agree
    difference = replayed.difference
    assert (difference.line, difference.event) == (number, name)
    assert difference.recorded != difference.replayed


def test_missing_event_is_noticed_later(lines, replay):
    number = first(
        lines, lambda line: line.get("name") == "KvChanged" and line["event"]["events"][0]["type"] == "KvStored"
    )
    replayed = replay([*lines[: number - 1], *lines[number:]])
    assert not replayed.agree
    assert replayed.difference.line >= number
    assert any(" place " in line for line in replayed.difference.decisions)


def test_broken_machine_is_a_difference(lines, replay):
    number = first(lines, lambda line: line.get("name") == "Arrived")
    replayed = replay([*lines[:number], lines[number - 1], *lines[number:]])
    assert replayed.difference.line == number + 1
    assert replayed.difference.replayed is None
    assert replayed.difference.why.startswith("AssertionError")


def test_truncated_recording_replays_to_its_end(lines, replay):
    whole = b"".join(lines)
    for size in range(len(lines[0]) + 1, len(whole), len(whole) // 6):
        replayed = replay([whole[:size]])
        assert replayed.agree
        assert replayed.events == whole[:size].count(b"\n") - 1
        assert "cut off" in replayed.notes[0] or "no end" in replayed.notes[0]


def said(number, wrong):
    return rf"flight: line {number}: {wrong}"


@pytest.mark.parametrize(
    ("number", "change", "wrong"),
    [
        (1, lambda line: line.update(recording=99), "recording: is of format 99"),
        (1, lambda line: line.update(seed="x"), r"seed: Expected `int`"),
        (1, lambda line: line["settings"].update(max_queued=-1), r"settings\.max_queued: Expected `int` >= 0"),
        (1, lambda line: line["settings"].update(policy="absent"), r"settings: router\.policy: 'absent' is not one of"),
        (3, lambda line: line.update(now=-(10**11)), r"now: -100000000000 is before"),
        (3, lambda line: line.update(now=0.5), r"now: Expected `int`"),
        (3, lambda line: line.update(name="Sneezed"), r"name: 'Sneezed' is not an event of a router"),
        (3, lambda line: line.update(event={}), r"event: Object missing required field `worker_id`"),
        (3, lambda line: line.update(keys=["?"]), r"keys: are not base64"),
        (3, lambda line: line.update(keys=[b64encode(b"odd").decode()]), r"keys: are not base64 of 8 bytes each"),
        (3, lambda line: line.update(commands=[["sing"]]), r"commands\[0\]\[0\]: Invalid value 'sing'"),
        (2, lambda line: line["event"]["description"].update(role="cook"), r"event\.description\.role: Invalid enum"),
    ],
)
def test_invalid_recording_names_line_and_field(lines, replay, number, change, wrong):
    with pytest.raises(ConfigurationRefused, match=said(number, wrong)):
        replay(changed(lines, number, change))


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "is empty"),
        (b'{"recording":1', "is empty, or cut off within its first line"),
        (b"hello\n", "line 1: JSON is malformed"),
        (b'{"timestamp":1}\n', "line 1: Object missing required field `recording`"),
        (b"\x1f\x8a\x08\n", "line 1: JSON is malformed"),
        (b"\x1f\x8b\x08\n", "Compressed file ended before the end-of-stream marker was reached"),
    ],
)
def test_other_file_is_refused(replay, content, wrong):
    with pytest.raises(RecordingError, match=wrong):
        replay([content])


def test_damaged_recording_is_read_or_refused(lines, tmp_path):
    luck = Random(5)
    path = tmp_path / "flight"
    whole = b"".join(lines[:40])
    for _ in range(200):
        at = luck.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([luck.randrange(256)]) + whole[at + 1 :])
        with suppress(RecordingError):
            list(Recording(path).entries())


def test_exit_status_says_if_replay_agrees(lines, tmp_path, capsys):
    path = tmp_path / "flight"
    path.write_bytes(b"".join(lines))
    assert run(["sim", "replay", str(path), "--json", "-", "--decisions", str(tmp_path / "log")]) == 0
    assert json.loads(capsys.readouterr().out)["agree"] is True
    assert " place 1 on " in (tmp_path / "log").read_text()

    said = tmp_path / "said"
    assert (
        run(["sim", "replay", str(path), "--json", str(said), "--decisions", f"{tmp_path}/../{tmp_path.name}/said"])
        == 3
    )
    assert "is the file of --json as well" in capsys.readouterr().err
    assert not said.exists()

    number = first(lines, lambda line: line.get("name") == "Arrived")
    path.write_bytes(b"".join(changed(lines, number, lambda line: line["event"]["sampling"].update(max_tokens=7))))
    assert run(["sim", "replay", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"line {number}, " in told
    assert "the machine says something else" in told
    assert "it says now" in told

    path.write_bytes(b"hello\n")
    assert run(["sim", "replay", str(path)]) == 3
    assert "flight: line 1: " in capsys.readouterr().err
    assert run(["sim", "replay", str(tmp_path / "absent")]) == 3
