"""`fleet kv`: its output."""

import json

import pytest

from fleet.cli.main import run
from tests.support.sim.traces import AGENTIC, CONVERSATION


def test_a_replay_answers_in_one_object(capsys):
    assert run(["kv", "replay", str(CONVERSATION), "--policy", "lru", "--capacity-blocks", "3063", "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["requests"] == 1500
    assert answer["hit_rate"] == pytest.approx(0.064, abs=0.0005)
    assert answer["ideal"] == pytest.approx(0.27, abs=0.0005)
    assert answer["bytes_written"] % (512 * 131_072) == 0
    assert answer["bytes_written"] > 0
    assert answer["seconds"] >= 0


def test_several_capacities_have_a_row_each(capsys):
    run(["kv", "replay", str(AGENTIC), "--policy", "belady", "--capacity-blocks", "1%,1173,100%", "--json"])

    answer = json.loads(capsys.readouterr().out)
    assert [row["capacity_blocks"] for row in answer["sizes"]] == [234, 1173, 23_460]
    rates = [row["hit_rate"] for row in answer["sizes"]]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(answer["ideal"])
    assert answer["hit_rate"] == rates[0]


def test_for_people_there_is_a_table(capsys):
    run(["kv", "replay", str(CONVERSATION), "--capacity-blocks", "5%"])

    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "1500 requests, 30634 distinct blocks, ideal hit rate 0.2699"
    assert row.split()[0] == "1531"


def test_admission_lowers_what_is_written(capsys):
    written = {}
    for admission in ("all", "second-sighting"):
        run(["kv", "replay", str(CONVERSATION), "--capacity-blocks", "10%", "--admission", admission, "--json"])
        written[admission] = json.loads(capsys.readouterr().out)["bytes_written"]

    assert 0 < written["second-sighting"] < written["all"] / 4


@pytest.mark.parametrize(
    "argv",
    [
        ["kv"],
        ["kv", "fly"],
        ["kv", "replay"],
        ["kv", "replay", "trace"],
        ["kv", "replay", "trace", "--capacity-blocks", "0"],
        ["kv", "replay", "trace", "--capacity-blocks", "many"],
        ["kv", "replay", "trace", "--capacity-blocks", "5,,6"],
        ["kv", "replay", "trace", "--capacity-blocks", "101%"],
        ["kv", "replay", "trace", "--capacity-blocks", "nan%"],
        ["kv", "replay", "trace", "--capacity-blocks", "5", "--policy", "mru"],
        ["kv", "replay", "trace", "--capacity-blocks", "5", "--live-sessions", "0"],
    ],
)
def test_a_misused_command_line_exits_2_with_one_line(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(argv)

    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_bad_row_exits_3_with_its_line_and_field(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["x"]}\n')

    assert run(["kv", "replay", str(path), "--capacity-blocks", "5"]) == 3

    captured = capsys.readouterr()
    assert captured.err == f"fleet: {path}:1: hash_ids[0]: Expected `int`, got `str`\n"
    assert captured.out == ""


def test_cost_of_pauses_is_shown_on_request(capsys):
    run(["kv", "replay", str(AGENTIC), "--capacity-blocks", "10%", "--pauses", "hold", "--json"])
    pauses = json.loads(capsys.readouterr().out)["pauses"]
    assert 0 < pauses["mean_seconds"] < pauses["recompute_mean_seconds"]

    run(["kv", "replay", str(AGENTIC), "--capacity-blocks", "10%", "--pauses", "nothing"])
    assert "resumes: mean" in capsys.readouterr().out.splitlines()[-2]


def test_held_sessions_compute_less_beside_other_traffic(capsys):
    computed = {}
    for policy in ("nothing", "hold"):
        options = ["--below-blocks", "0", "--held-share", "0.25", "--beside", str(CONVERSATION), "--json"]
        run(["kv", "replay", str(AGENTIC), "--capacity-blocks", "4000", "--pauses", policy, *options])
        pauses = json.loads(capsys.readouterr().out)["pauses"]
        computed[policy] = pauses["computed_blocks"]
        assert pauses["resumes"] == 257
        assert pauses["most_held_blocks"] <= 1000

    assert computed["hold"] < 0.8 * computed["nothing"]


@pytest.mark.parametrize(("option", "value"), [("--held-share", "2"), ("--held-share", "x"), ("--below-blocks", "-1")])
def test_a_share_or_number_that_is_none_is_refused(capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        run(["kv", "replay", str(AGENTIC), "--capacity-blocks", "10", option, value])

    assert ended.value.code == 2
    assert repr(value) in capsys.readouterr().err
