"""Tests of the lines in which `fleet explain --plan` shows a plan: the score, and why there is none."""

import pytest
from msgspec import structs

from fleet.cli.console.command_line import command_parser
from fleet.cli.console.exits import CONFIGURATION_REFUSED
from fleet.cli.main import run
from fleet.cli.planner.show import record_lines
from fleet.planner.decisions import DecisionReason
from fleet.planner.messages import PlanId, PoolName
from fleet.planner.records import PlanRecord, PlanScore, PlanState
from fleet.planner.settings import PlannerMode

BOTH = PoolName("both")
NOW = 1_800_000_000_000


def a_record(**fields):
    record = PlanRecord(
        id=PlanId("plan-1-1"),
        at_ms=NOW - 300_000,
        planner="me",
        mode=PlannerMode.ACTIVE,
        state=PlanState.SETTLED,
        reason=DecisionReason.LOAD_UP,
        message="said so",
        before={BOTH: 2},
        replicas={BOTH: 3},
    )
    return structs.replace(record, **fields)


def a_score(**fields):
    score = PlanScore(ttft_seconds=0.4, tpot_seconds=None, attainment=1.0, gpu_hours=1.0, dollars=3.0, ttft_error=0.5)
    return structs.replace(score, **fields)


@pytest.mark.parametrize(("fields", "said"), [
    ({"state": PlanState.UNDER_WAY}, "no score yet: it is measured after the end of the plan"),
    ({"ended_ms": NOW, "score_due_ms": NOW + 5000}, "no score yet: latencies and costs are measured until 2027-01-15T08:00:05"),
    ({"ended_ms": NOW - 290_000, "score_due_ms": NOW - 200_000}, "no score: the planner ended, or too many later plans"),
    ({"ended_ms": NOW, "state": PlanState.HELD_BACK}, "no score: only plans that settled"),
])  # fmt: skip
def test_plan_without_a_score_says_why(fields, said):
    *_, last = record_lines(a_record(**fields), NOW)

    assert last.startswith(said)


@pytest.mark.parametrize(
    ("mode", "pools"), [(PlannerMode.ACTIVE, "planned pools"), (PlannerMode.SHADOW, "present pools, because")]
)
def test_score_names_the_prediction_it_is_compared_with(mode, pools):
    lines = "\n".join(record_lines(a_record(mode=mode, ended_ms=NOW, score=a_score()), NOW))

    assert f"compared with the prediction for the {pools}" in lines
    assert "TTFT was 0.4000 s, 50% off the prediction" in lines
    assert "TPOT was not measured: no answer of several tokens ended" in lines


@pytest.mark.parametrize("options", [["watch", "{}"], ["{}", "watch"]])
@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--json", "json", True),
        ("--planner=unix:/x", "planner", "unix:/x"),
        ("--planner-key=k", "planner_key", "k"),
        ("--deployment=a/b", "deployment", "a/b"),
    ],
)
def test_options_hold_before_and_after_watch(options, option, field, value):
    parser, _ = command_parser(lambda name: name == "plan")

    given = vars(parser.parse_args(["plan", *(each.format(option) for each in options)]))

    defaults = {"json": False, "planner": None, "planner_key": "", "planner_authority": "", "deployment": ""}
    assert {name: given[name] for name in defaults} == defaults | {field: value}


@pytest.mark.parametrize("option", ["--planner-secret-file", "--planner-authority"])
def test_file_that_cannot_be_read_is_refused_by_its_option(capsys, option):
    assert run(["plan", "--planner", "unix:/nowhere", option, "/nowhere/file"]) == CONFIGURATION_REFUSED

    assert capsys.readouterr().err.startswith(f"fleet: {option}: /nowhere/file")


@pytest.mark.parametrize("given", [["\udcff"], ["--plan", "\udcff"]])
def test_identifier_that_is_not_utf8_is_refused(capsys, given):
    with pytest.raises(SystemExit):
        run(["explain", *given])
    assert "is not UTF-8" in capsys.readouterr().err
