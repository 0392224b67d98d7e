"""Tests of the benchmark of parsing answers."""

import json

from loadtests.router import parsing_cost


def test_each_kind_of_answer_has_a_median_within_its_quartiles(tmp_path, capsys):
    assert parsing_cost.main(["--rounds", "2", "--json", str(tmp_path / "costs.json")]) == 0

    written = json.loads((tmp_path / "costs.json").read_bytes())
    assert [cost["answer"] for cost in written["costs"]] == list(parsing_cost.CASES)
    for cost in written["costs"]:
        low, high = cost["quartiles_us"]
        assert low <= cost["median_us"] <= high
    printed = capsys.readouterr().out
    assert all(name in printed for name in parsing_cost.CASES)


def test_answers_that_cost_more_than_allowed_are_named(capsys):
    assert parsing_cost.main(["--rounds", "1", "--most-us", "-100"]) == 1

    assert "above -100.0 us a token: parsed by the engine, text" in capsys.readouterr().err
