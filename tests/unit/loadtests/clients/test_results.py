"""Tests of the results of client programs."""

import shutil
import sys
from pathlib import Path

import pytest

from loadtests.clients import __main__ as command
from loadtests.clients.__main__ import DONE, FAILED, MISUSED, main
from loadtests.clients.programs import registry
from loadtests.clients.results import PROGRAM, CallOutcome, CallResult, missing_here, summed


def result(call: str, outcome: CallOutcome, why: str = "", field: str = "") -> CallResult:
    return CallResult(call=call, outcome=outcome, why=why, field=field)


OURS = [
    result("a", CallOutcome.PASSED),
    result("b", CallOutcome.REFUSED, "suffix: is not supported", field="suffix"),
    result("c", CallOutcome.FAILED, "404"),
    result("d", CallOutcome.FAILED, "500"),
]


def test_calls_are_summed_with_the_reasons_of_those_not_served():
    told = summed("openai", "1", OURS)

    assert (told.passed, told.refused, told.failed) == (1, 1, 2)
    assert told.why == {"b": "suffix: is not supported", "c": "404", "d": "500"}


def test_only_failed_calls_that_the_other_serves_are_missing():
    theirs = [result(call, CallOutcome.PASSED) for call in "abc"] + [result("d", CallOutcome.FAILED)]

    assert missing_here(OURS, {"b": "suffix"}, theirs) == {"c": "404"}


def test_every_failed_call_is_missing_where_no_other_runs():
    assert missing_here(OURS, {"b": "suffix"}) == {"c": "404", "d": "500"}


def test_failed_call_that_the_other_never_made_is_missing():
    theirs = [result("c", CallOutcome.FAILED), result(PROGRAM, CallOutcome.FAILED, "no end")]

    assert missing_here(OURS, {"b": "suffix"}, theirs) == {"d": "500"}


def test_program_that_breaks_off_at_both_servers_is_missing():
    broken = [result(PROGRAM, CallOutcome.FAILED, "no openai 3.52.0")]

    assert missing_here(broken, {}, broken) == {PROGRAM: "no openai 3.52.0"}


@pytest.mark.parametrize("refusals", [{}, {"b": "echo"}, {"a": "suffix"}])
def test_refusal_that_is_not_known_is_missing(refusals):
    theirs = [result("b", CallOutcome.PASSED), result("c", CallOutcome.FAILED), result("d", CallOutcome.FAILED)]

    assert missing_here(OURS, refusals, theirs) == {"b": "suffix: is not supported"}


@pytest.mark.parametrize(("outcome", "status"), [(CallOutcome.PASSED, DONE), (CallOutcome.FAILED, FAILED)])
def test_failed_call_of_the_openai_client_fails_the_command(monkeypatch, outcome, status):
    monkeypatch.setattr(command, "model_folder", lambda folder: folder)
    monkeypatch.setattr(command, "run_program", lambda *_: [result("chat", outcome)])

    assert main(["--engine", "simulated", "--clients", "openai", "--url", "http://127.0.0.1:1/v1"]) == status


LINES = """
from reporting import report_calls

print("noise")
report_calls({"x": lambda: True, "y": lambda: False, "z": lambda: {}["suffix"]}, lambda error: error.args[0])
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (LINES, [("x", "passed", ""), ("y", "failed", ""), ("z", "refused", "suffix")]),
        ("raise SystemExit('broken')", [("program", "failed", "")]),
        ("print('nothing')", [("program", "failed", "")]),
    ],
)
def test_lines_of_a_program_are_its_calls(tmp_path, monkeypatch, script, expected):
    (tmp_path / "calls.py").write_text(script)
    shutil.copy(registry.FOLDER / "reporting.py", tmp_path)
    monkeypatch.setattr(registry, "FOLDER", tmp_path)

    results = registry.run_script(Path(sys.executable), "calls.py", "http://x/v1", "m", tmp_path, tmp_path / "scratch")

    assert [(each.call, each.outcome, each.field) for each in results] == expected


HANGS_LATER = """
import signal
from reporting import report_calls

report_calls({"x": lambda: True}, str)
print("{", end="", flush=True)
signal.pause()
"""


def test_calls_before_the_time_limit_of_a_program_are_kept(tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(HANGS_LATER)
    shutil.copy(registry.FOLDER / "reporting.py", tmp_path)
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    monkeypatch.setattr(registry, "SECONDS", 3.0)

    results = registry.run_script(Path(sys.executable), "calls.py", "http://x/v1", "m", tmp_path, tmp_path / "scratch")

    assert [(each.call, each.outcome) for each in results] == [
        ("x", CallOutcome.PASSED),
        (PROGRAM, CallOutcome.FAILED),
    ]
    assert results[-1].why == "no end within 3 s"


HANGS_AT_FIRST = """\
#!/bin/sh
cd "$(dirname "$0")"
mkdir started 2>/dev/null && exec sleep 600
exit 1
"""
SHORT_LIMIT = """
import sys
from pathlib import Path

import reporting
import {module}

sys.executable = str(Path(__file__).with_name("python"))
reporting.COMMAND_SECONDS = 1.0
{module}.main(*sys.argv[1:])
"""


@pytest.mark.parametrize("name", ["vllm-bench", "guidellm", "aiperf", "lm-eval"])
def test_calls_after_one_that_hangs_are_made_and_reported(tmp_path, monkeypatch, name):
    script = registry.PROGRAMS[name].script
    (tmp_path / "calls.py").write_text(SHORT_LIMIT.format(module=script.removesuffix(".py")))
    for each in (script, "reporting.py"):
        shutil.copy(registry.FOLDER / each, tmp_path)
    for command_name in ("python", "vllm", "guidellm", "aiperf"):
        (tmp_path / command_name).write_text(HANGS_AT_FIRST)
        (tmp_path / command_name).chmod(0o755)
    monkeypatch.setattr(registry, "FOLDER", tmp_path)

    results = registry.run_script(Path(sys.executable), "calls.py", "http://x/v1", "m", tmp_path, tmp_path / "scratch")

    assert len(results) > 1
    assert PROGRAM not in [each.call for each in results], results[-1].why
    assert {each.outcome for each in results} == {CallOutcome.FAILED}
    assert results[0].why == "CallFailed: no end within 1 s"


@pytest.mark.parametrize("clients", ["grpc-reflection", "openai,tritonclient"])
def test_program_without_http_is_refused_with_a_url(capsys, clients):
    assert main(["--url", "http://127.0.0.1:1/v1", "--clients", clients]) == MISUSED

    assert f"{clients.split(',')[-1]}: calls no HTTP API; leave out --url" in capsys.readouterr().err


def test_unknown_client_is_refused_with_the_known_ones(capsys):
    assert main(["--clients", "openai,nobody"]) == MISUSED

    assert "nobody: not one of openai, anthropic, " in capsys.readouterr().err


def test_page_of_clients_has_each_program_with_its_version():
    page = (registry.FOLDER.parents[2] / "docs" / "howto" / "clients.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]

    for name, program in registry.PROGRAMS.items():
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1] and row.count("|") == 6]
        assert row.split("|")[2].strip() == program.distribution.version
