"""Tests of what `make` does before and after an install that finds no room. Python and `df` are stand-ins; nothing is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
READ = ("Makefile", "constraints.txt", "constraints-kube.txt", "constraints-sbom.txt", "pyproject.toml")


@pytest.fixture
def project(tmp_path):
    for name in READ:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "proto").mkdir()
    (tmp_path / ".venv" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir()
    (tmp_path / "stand-ins").mkdir()
    a_program(tmp_path / ".venv" / "bin" / "python", f'echo "$*" >> {tmp_path}/asked; [ ! -e {tmp_path}/full ]')
    return tmp_path


def a_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def free(project, megabytes):
    a_program(project / "stand-ins" / "df", f"echo Avail; echo {megabytes}")


def make_install(project, engine, temporary=None):
    environment = {
        **os.environ,
        "PATH": f"{project}/stand-ins:{os.environ['PATH']}",
        "TMPDIR": temporary or str(project),
    }
    for inherited in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(inherited, None)
    command = ["make", "-C", str(project), f"ENGINE={engine}", "install"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def installs(project):
    asked = project / "asked"
    return [line for line in asked.read_text().splitlines() if " install " in line] if asked.exists() else []


def test_missing_room_is_reported_before_anything_starts(project):
    free(project, 1000)
    needed = 1750 - 1  # the files of .venv are there already
    refused = make_install(project, "simulated")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0] == (
        f"make: no room for Fleet and the development tools: {needed} MB are needed in {project}, 1000 MB are free; make room there"
    )
    assert installs(project) == []

    free(project, 2000)
    refused = make_install(project, "vllm")
    told = next(line for line in refused.stderr.splitlines() if line.startswith("make: no room"))
    assert f"{4850 + 700 - 1} MB are needed" in told
    assert told.endswith("2000 MB are free; make room there; or ENGINE=simulated: without vLLM 1750 MB do")
    assert len(installs(project)) == 1, "the install of vLLM was started"


def test_installed_parts_need_no_room_again(project):
    free(project, 1745)
    assert make_install(project, "simulated").returncode == 2
    with (project / ".venv" / "lib" / "large").open("wb") as there:
        os.posix_fallocate(there.fileno(), 0, 8 << 20)

    assert make_install(project, "simulated").returncode == 0


def test_room_is_checked_where_a_venv_link_points(project, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("large")
    shutil.move(project / ".venv", elsewhere / "venv")
    (project / ".venv").symlink_to(elsewhere / "venv")
    free(project, 100)

    told = make_install(project, "simulated").stderr.splitlines()[0]

    needed = 1750 - 1  # the files are seen through the link
    assert f"{needed} MB are needed in {elsewhere / 'venv'}, 100 MB are free" in told


def test_unreadable_file_system_does_not_stop_make(project):
    free(project, 9000)
    a_program(project / "stand-ins" / "du", "echo '1\t.venv'; exit 1")  # of an unreadable folder
    assert make_install(project, "simulated", temporary=f"{project}/removed").returncode == 0


def test_interrupted_install_is_repeated_and_cleaned(project):
    free(project, 9000)
    packages = project / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("half-1.dist-info", "whole-1.dist-info"):
        (packages / name).mkdir()
        (packages / name / "METADATA").write_text("Name: x")
    (packages / "whole-1.dist-info" / "RECORD").write_text("x")
    (project / "full").touch()
    a_program(
        project / ".venv" / "bin" / "python",
        f'echo "$*" >> {project}/asked; case "$*" in *" install "*) [ ! -e {project}/full ];; esac',
    )
    assert make_install(project, "simulated").returncode == 2
    (project / "full").unlink()

    assert make_install(project, "simulated").returncode == 0
    assert len(installs(project)) == 2
    assert sorted(each.name for each in packages.iterdir()) == ["whole-1.dist-info"]

    assert make_install(project, "simulated").returncode == 0
    assert len(installs(project)) == 2, "nothing is left to do"
