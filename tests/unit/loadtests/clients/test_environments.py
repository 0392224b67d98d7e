"""Tests of the environments of client programs; pip is replaced, and there is no server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadtests.clients.__main__ import DONE, main
from loadtests.clients.programs import registry
from loadtests.environments import python_of

VERSION = re.compile(r"([\w.-]+)==([\w.!]+)")


@pytest.fixture
def ran(monkeypatch):
    """Replace `subprocess.run`, and return the list of commands that it was called with; `pip list` prints two packages."""
    commands = []

    def run(command, **given):
        commands.append((command, given))
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return subprocess.CompletedProcess(command, 0, "other==2\ntorch==2.13.0+cpu\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_no_program_runs_in_the_environment_of_fleet(tmp_path, monkeypatch, ran):
    monkeypatch.setenv("PYTHONPATH", "/checkout")
    pythons = set()
    for name, program in registry.PROGRAMS.items():
        ran.clear()
        registry.run_program(name, "address", "tiny", tmp_path, tmp_path / "cache", tmp_path / "scratch")
        (making, _), *_, (command, given) = ran
        assert making[:-1] == [sys.executable, "-m", "venv", "--clear"]
        assert command[:2] == [f"{making[-1]}/bin/python", str(registry.FOLDER / program.script)]
        assert "PYTHONPATH" not in given["env"]
        pythons.add(command[0])

    assert len(pythons) == len(registry.PROGRAMS)
    assert all(Path(python).is_relative_to(tmp_path / "cache") for python in pythons)


@pytest.mark.parametrize("name", registry.PROGRAMS)
def test_every_program_pins_its_packages(name):
    program = registry.PROGRAMS[name]
    distribution = program.distribution

    lines = [line for line in distribution.constraints.read_text().splitlines() if not line.startswith("#")]

    versions = {canonicalize_name(match[1]): match[2] for line in lines if (match := VERSION.fullmatch(line))}
    assert len(versions) == len(lines), "a line is no exact version"
    wanted = [Requirement(each) for step in distribution.steps for each in step[-1] if not each.startswith("-")]
    assert all(versions[canonicalize_name(each.name)] in each.specifier for each in wanted)
    assert distribution.version in [str(each.specifier).removeprefix("==") for each in wanted]
    assert (registry.FOLDER / program.script).is_file()


def test_programs_that_install_quickly_come_first():
    slow = [program.slow for program in registry.PROGRAMS.values()]

    assert slow == sorted(slow)


def test_every_install_obeys_the_constraints_of_its_program(tmp_path, ran):
    for name, program in registry.PROGRAMS.items():
        ran.clear()
        python_of(program.distribution, tmp_path)
        installs = [command for command, _ in ran if "install" in command]
        assert len(installs) == len(program.distribution.steps)
        for command in installs:
            assert command[command.index("--constraint") + 1] == str(registry.FOLDER / "constraints" / f"{name}.txt")


def test_changed_constraints_make_a_new_environment(tmp_path, ran):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("litellm==1.110.2\n")
    distribution = structs.replace(registry.PROGRAMS["litellm"].distribution, constraints=constraints)
    python_of(distribution, tmp_path)
    ran.clear()

    python_of(distribution, tmp_path)
    assert ran == []

    constraints.write_text("litellm==1.110.2\nidna==3.20\n")
    python_of(distribution, tmp_path)
    assert ran[0][0][1:3] == ["-m", "venv"]


def test_environment_without_its_interpreter_is_made_again(tmp_path, ran):
    distribution = registry.PROGRAMS["litellm"].distribution
    python_of(distribution, tmp_path).unlink()
    ran.clear()

    assert python_of(distribution, tmp_path).exists()


def test_environment_that_was_not_completed_is_made_again(tmp_path, ran, monkeypatch):
    distribution = registry.PROGRAMS["litellm"].distribution
    other = structs.replace(distribution, steps=((("other==1",),),))
    python_of(distribution, tmp_path)

    def fail(*arguments, **given):
        raise SystemExit

    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(SystemExit):
        python_of(other, tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    ran.clear()

    python_of(distribution, tmp_path)
    assert ran[0][0][1:3] == ["-m", "venv"]


def test_output_of_a_program_that_is_no_result_is_a_failure(tmp_path, monkeypatch):
    done = subprocess.CompletedProcess([], 0, '{"some": "progress"}\n', "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **given: done)

    (result,) = registry.run_script(Path("python"), "x.py", "http://host", "tiny", tmp_path, tmp_path)

    assert result.outcome == "failed"
    assert "its output is no result" in result.why


def test_lock_writes_what_pip_finds_without_constraints(tmp_path, monkeypatch, capsys, ran):
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    file = tmp_path / "constraints" / "guidellm.txt"
    file.parent.mkdir()
    file.write_text("other==1\n")

    assert main(["--lock", "--clients", "guidellm", "--cache", str(tmp_path / "cache")]) == DONE

    assert file.read_text().splitlines()[1:] == ["other==2", "torch==2.13.0"]
    assert capsys.readouterr().out == f"{file}\n"
    assert not any("--constraint" in command for command, _ in ran)
    assert list((tmp_path / "cache").iterdir()) == []
