"""`fleet plan size`: proposals, prices and refusals."""

import json
import re

import pytest

from fleet.cli.console.exits import CONFIGURATION_REFUSED, DONE, FAILED
from fleet.cli.main import run
from fleet.planner.sizing import proposal
from fleet.planner.sizing.solver import SolverTimeout

LOAD = ["--model", "meta-llama/Llama-3.1-70B-Instruct", "--rate", "20", "--prompt", "3000", "--answer", "300"]
GOALS = ["--ttft", "1", "--tpot", "0.03"]


def size(capsys, *more, load=LOAD, goals=GOALS, status=DONE):
    assert run(["plan", "size", *load, *goals, *more, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_proposal_serves_the_rate_within_goals(capsys):
    answer = size(capsys)
    for phase in ("prefill", "decode"):
        assert sum(each["rate"] for each in answer["pools"] if each["role"] in {phase, "both"}) >= 20
    assert 0 < answer["ttft_seconds"] <= 1
    assert 0 < answer["tpot_seconds"] <= 0.03
    assert answer["gpus"] == sum(each["replicas"] * each["tp"] for each in answer["pools"])
    tokens = 20 * 3600 * 3300 / 1e6
    assert answer["dollars_per_million_tokens"] == pytest.approx(answer["dollars_per_hour"] / tokens)


def test_more_gpu_types_never_cost_more(capsys):
    alone = [size(capsys, "--gpus", name)["dollars_per_hour"] for name in ("h100", "b200", "mi300x")]
    assert size(capsys, "--gpus", "h100,b200,mi300x")["dollars_per_hour"] <= min(alone)


def test_looser_goals_never_cost_more(capsys):
    """A goal near the best possible one needs pools of many replicas, whose first ones serve hardly anything alone."""
    load = [*LOAD[:2], "--rate", "5", *LOAD[4:]]
    goals = [["--ttft", ttft, "--tpot", "0.05"] for ttft in ("0.2", "0.3", "0.5", "0.6", "1")]
    dollars = [size(capsys, load=load, goals=each)["dollars_per_hour"] for each in goals]
    assert dollars == sorted(dollars, reverse=True)


def test_timeout_of_the_solver_says_what_to_do(capsys, monkeypatch):
    def slow(*_):
        raise SolverTimeout("no solution within 5 s")

    monkeypatch.setattr(proposal, "solve", slow)

    assert run(["plan", "size", *LOAD, *GOALS]) == FAILED
    assert capsys.readouterr().err == "fleet plan size: no solution within 5 s; name fewer GPU types with --gpus\n"


def test_bursty_load_needs_more(capsys):
    tight = ["--ttft", "0.4", "--tpot", "0.03"]
    steady = size(capsys, "--gpus", "h100", goals=tight)
    bursty = size(capsys, "--gpus", "h100", "--dispersion", "10", goals=tight)
    assert bursty["dollars_per_hour"] > steady["dollars_per_hour"]


def test_hosted_price_gives_break_even_utilisation(capsys):
    answer = size(capsys, "--hosted-prompt", "0.5", "--hosted-answer", "1.5")
    hosted = 20 * 3600 * (3000 * 0.5 + 300 * 1.5) / 1e6
    assert answer["hosted_dollars_per_hour"] == pytest.approx(hosted)
    assert answer["break_even_utilisation"] == pytest.approx(answer["dollars_per_hour"] / hosted)


def test_unreachable_goal_is_named_with_the_best(capsys):
    assert run(["plan", "size", *LOAD, "--ttft", "0.01", "--tpot", "0.03"]) == FAILED
    said = capsys.readouterr().out
    assert said.startswith("GoalOutOfReach: goals.ttft_seconds: 0.01 s for 95% is out of reach; the best is 0.")


def test_gpu_limit_gives_the_rate_that_it_allows(capsys):
    answer = size(capsys, "--most-gpus", "8", status=FAILED)
    assert answer["gpus"] <= 8
    assert 0 < answer["rate"] < 20
    assert answer["conditions"][0]["type"] == "BudgetExhausted"


def test_own_price_book_changes_the_choice(capsys, tmp_path):
    book = tmp_path / "prices.toml"
    book.write_text("[regions.here]\nh100 = 0.1\nmi300x = 9.0\n\n[regions.there]\nh100 = 9.0\nmi300x = 0.1\n")
    here = size(capsys, "--prices", str(book))
    there = size(capsys, "--prices", str(book), "--region", "there")
    assert {each["gpu"] for each in here["pools"]} == {"h100"}
    assert {each["gpu"] for each in there["pools"]} == {"mi300x"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "h900"], "--gpus: 'h900' is not one of h100"),
        (["--gpus", "gb300"], "--gpus: gb300 has no list price; give its price in a price book with --prices"),
        (["--region", "moon"], "--region: 'moon' needs --prices, a price book with this region"),
        (["--gpus", "h100", "--region", "moon"], "--region: 'moon' needs --prices"),
        (["--hosted-answer", "0.8"], "--hosted-prompt: is needed with --hosted-answer; 0 if these tokens are free"),
        (["--hosted-prompt", "0.8"], "--hosted-answer: is needed with --hosted-prompt"),
        (["--prices", "/nowhere/prices.toml"], "--prices: /nowhere/prices.toml: No such file or directory"),
        (["--percentile", "1"], "--percentile: 1 is not between 0 and 1"),
        (["--cached", "3000"], "--cached: 3000 must be below --prompt, 3000"),
        (["--most-gpus", "0"], "--most-gpus: 0 must be at least 1"),
        (["--backend", "trtllm", "--gpus", "h100,mi300x"], "--gpus: --backend trtllm does not run on mi300x"),
        (["--backend", "x"], "--backend: 'x' is not one of vllm, sglang, trtllm"),
    ],
)
def test_bad_option_is_refused_by_name(capsys, more, said):
    assert run(["plan", "size", *LOAD, *GOALS, *more]) == CONFIGURATION_REFUSED
    assert said in capsys.readouterr().err


def test_default_gpus_are_those_on_which_the_backend_runs(capsys, tmp_path):
    book = tmp_path / "prices.toml"
    book.write_text("[regions.both]\nh100 = 3.0\nmi300x = 0.1\n[regions.amd]\nmi300x = 0.1\n")
    prices = ["--backend", "trtllm", "--prices", str(book)]
    assert {each["gpu"] for each in size(capsys, *prices)["pools"]} == {"h100"}
    assert run(["plan", "size", *LOAD, *GOALS, *prices, "--region", "amd"]) == CONFIGURATION_REFUSED
    assert "--region: amd: --backend trtllm does not run on mi300x" in capsys.readouterr().err


def test_unknown_model_is_refused_with_what_may_be_named(capsys):
    assert run(["plan", "size", *LOAD, *GOALS, "--model", "/nowhere/model"]) == CONFIGURATION_REFUSED
    assert "--model: /nowhere/model is no file or folder, and no repository" in capsys.readouterr().err


def test_model_that_cannot_be_read_is_refused_by_option(capsys, tmp_path):
    (tmp_path / "config.json").write_text("no JSON")
    (tmp_path / "empty").mkdir()
    for model, said in (
        (f"/{'x' * 5000}", "File name too long"),
        (tmp_path / "empty", "No such file or directory"),
        (tmp_path, "is not JSON"),
    ):
        assert run(["plan", "size", *LOAD, *GOALS, "--model", str(model)]) == CONFIGURATION_REFUSED
        error = capsys.readouterr().err
        assert error.startswith("fleet: --model: /")
        assert said in error


def test_unknown_gpu_in_price_book_is_refused_by_path(capsys, tmp_path):
    book = tmp_path / "prices.toml"
    book.write_text("[regions.here]\nh900 = 0.1\n")
    assert run(["plan", "size", *LOAD, *GOALS, "--prices", str(book)]) == CONFIGURATION_REFUSED
    assert "regions.here.h900: is not one of h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (
            "h100 = 2.0\n",
            [],
            "regions: is missing; a price book has a table for each region, such as [regions.us-east]",
        ),
        ('[regions.a]\nh100 = 1\n[regions."b.c"]\nh100 = "x"\n', [], "regions.b.c.h100: Expected `float`, got `str`"),
        ("[regions.a]\nh100 = 1\n", ["--gpus", "l40s"], "regions.a.l40s: the price book has no price for this GPU"),
        ("[regions.a]\nh100 = 1\n", ["--region", "b"], "--region: 'b' is not a region of "),
    ],
)
def test_error_of_a_price_book_names_its_place(capsys, tmp_path, content, more, said):
    book = tmp_path / "prices.toml"
    book.write_text(content)
    assert run(["plan", "size", *LOAD, *GOALS, "--prices", str(book), *more]) == CONFIGURATION_REFUSED
    error = capsys.readouterr().err
    assert said in error
    assert str(book) in error


def test_tiny_rate_gets_the_smallest_pools(capsys):
    load = [*LOAD[:2], "--rate", "1e-6", *LOAD[4:]]
    answer = size(capsys, load=load)
    assert answer["pools"]
    assert all(each["replicas"] == 1 for each in answer["pools"])
    assert answer["rate"] == pytest.approx(1e-6)


def test_too_few_dollars_exhaust_the_budget(capsys):
    answer = size(capsys, "--most-dollars", "1", status=FAILED)
    assert [each["type"] for each in answer["conditions"]] == ["BudgetExhausted"]


def test_goals_that_look_like_milliseconds_are_warned_of(capsys):
    assert run(["plan", "size", *LOAD, "--ttft", "2000", "--tpot", "50"]) == DONE
    assert capsys.readouterr().err.splitlines() == [
        "fleet: --ttft: 2000 is taken as seconds; for milliseconds, give 2",
        "fleet: --tpot: 50 is taken as seconds; for milliseconds, give 0.05",
    ]


def test_model_that_no_node_holds_is_out_of_reach(capsys):
    load = ["--model", "deepseek-ai/DeepSeek-V3", "--rate", "1", "--prompt", "1000", "--answer", "100"]
    answer = size(capsys, "--gpus", "l40s", load=load, status=FAILED)
    assert answer["conditions"][0]["field"] == "gpus"
    assert not answer["pools"]


def test_energy_is_saved_where_it_is_asked_for(capsys):
    cheapest = size(capsys)
    frugal = size(capsys, "--minimise", "energy")

    assert frugal["watts"] < cheapest["watts"]
    assert frugal["dollars_per_hour"] > cheapest["dollars_per_hour"]
    for answer in (cheapest, frugal):
        assert answer["watts"] == pytest.approx(sum(each["watts"] for each in answer["pools"]))
        assert answer["joules_per_answer_token"] == pytest.approx(answer["watts"] / (20 * 300))
        assert answer["joules_per_token"] == pytest.approx(answer["watts"] / (20 * 3300))


def test_energy_is_shown_with_its_error(capsys):
    assert run(["plan", "size", *LOAD, *GOALS, "--gpus", "h100"]) == DONE
    assert " kW under load (± 30%, boards alone), " in capsys.readouterr().out


def test_energy_of_a_small_load_is_shown_in_plain_digits(capsys):
    load = [*LOAD, "--rate", "0.001"]
    assert run(["plan", "size", *load, *GOALS, "--gpus", "h100"]) == DONE
    assert re.search(r", [0-9,]+ J a token, [0-9,]+ J an answer token\n", capsys.readouterr().out)


def test_json_before_the_action_counts(capsys):
    assert run(["plan", "--json", "size", *LOAD, *GOALS]) == DONE
    assert json.loads(capsys.readouterr().out)["pools"]


def test_rate_near_zero_is_refused(capsys):
    with pytest.raises(SystemExit):
        run(["plan", "size", *LOAD, *GOALS, "--rate", "1e-320"])
    assert "--rate: '1e-320' is not a number from 1e-06" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prices", "--model"])
def test_output_that_would_replace_an_input_is_refused(capsys, tmp_path, option):
    given = tmp_path / "input.json"
    given.write_text("{}")

    status = run(["plan", "size", *LOAD, *GOALS, option, str(given), "--json", str(given)])

    assert status == CONFIGURATION_REFUSED
    assert "--json" in capsys.readouterr().err
    assert given.read_text() == "{}"
