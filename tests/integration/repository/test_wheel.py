"""The built wheel: its tag, what it contains, and a first token from it outside the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
PACKAGES = ("fleet", "kvstore", "workers", "operators")
BUILD_SECONDS = 400.0  # about 20 on an idle machine
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for folder in ("deploy/samples", "loadtests/studies"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    (file,) = made.glob("*.whl")
    return file


def test_one_wheel_serves_python_3_11_and_later(wheel):
    assert "-cp311-abi3-linux_" in wheel.name

    modules = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(modules) == 5
    assert all(name.endswith(".abi3.so") for name in modules)


def test_wheel_has_all_studies_and_samples(wheel):
    names = {name.partition(".data/data/share/fleet/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    studies, samples = ROOT / "loadtests" / "studies", ROOT / "deploy" / "samples"
    files = {f"studies/{each.relative_to(studies)}" for each in studies.rglob("*") if each.is_file()}
    wanted = {each for each in files if not each.endswith((".py", ".pyc"))} | {
        f"samples/{each.name}" for each in samples.glob("*.yaml")
    }

    assert wanted == names - {""}
    assert "studies/conversation.toml" in wanted


def test_installed_wheel_reaches_a_first_token_in_two_commands(wheel, tmp_path):
    target = tmp_path / "installed"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=BUILD_SECONDS
    )
    environment = {**os.environ, "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    fleet = [sys.executable, "-m", "fleet.cli.main"]
    where = [sys.executable, "-c", "import fleet, kvstore, workers, operators; print(fleet.__file__)"]

    def run(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    assert run(*where).stdout.startswith(str(target))
    ready, log = tmp_path / "ready.json", tmp_path / "up.log"
    ports = ("--port", "0", "--grpc-port", "0", "--ready-file", str(ready))
    with log.open("w") as output:
        up = subprocess.Popen(
            [*fleet, "up", "--engine", "simulated", *ports], cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: ready.exists() or up.poll() is not None, 120)
        grpc = next(line.split()[1] for line in log.read_text().splitlines() if line.startswith("grpc "))
        answer = run(*fleet, "generate", "What is a generator?", "--max-tokens", "4", "--address", grpc)
    finally:
        up.terminate()
        up.wait(60)
    assert answer.returncode == 0, answer.stderr
    assert "4 tokens" in answer.stdout + answer.stderr
