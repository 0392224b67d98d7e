"""First token of a new user: installs the wheel into an empty environment outside the repository, on each supported Python.

Usage: ``python -m loadtests.newcomer [--pythons python3.11,…] [--json FILE]``

For each Python, an empty environment gets the wheel with its dependencies from the package index. Then two commands run:
``fleet up --engine simulated`` and ``fleet generate``. This program exits with 1 if a Python fails or is not on this machine;
`--pythons` names the Pythons to try.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.local.process_group import end_group

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
INSTALL_SECONDS = 900.0
START_SECONDS = 120.0
PAUSE_SECONDS = 0.2


class FirstToken(Struct, frozen=True, kw_only=True):
    """Result on one Python: the durations, or the reason of the failure."""

    python: str
    version: str = ""  # empty if the Python is missing
    install_seconds: float = 0.0
    first_token_seconds: float = 0.0  # time from the start of the first command to the end of the second one
    why: str = ""  # reason why there was no token; empty: there was one


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=",".join(PYTHONS), metavar="COMMAND,…", help="Pythons, by command")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    given = parser.parse_args(arguments)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        wheel = _wheel(Path(folder))
        for number, python in enumerate(given.pythons.split(",")):
            result = _first_token(python, wheel, Path(folder) / str(number))
            results.append(result)
            said = (
                result.why
                or f"{result.install_seconds:.0f} s to install, {result.first_token_seconds:.1f} s to a token"
            )
            print(f"{python:20} {result.version:10} {said}", flush=True)
    if given.json:
        Path(given.json).write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if any(result.why for result in results) else 0


def _wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _first_token(python: str, wheel: Path, folder: Path) -> FirstToken:
    folder.mkdir()
    # Only these variables are kept, so that the commands cannot find the repository or the caller's Python environment.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "PYENV_"))}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")

    def run(command: Sequence[str], seconds: float) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=seconds
        )
        return done.stdout + done.stderr

    version = ""
    try:
        version = run([python, "--version"], 60).split()[-1]
        began = time.monotonic()
        run([python, "-m", "venv", "environment"], INSTALL_SECONDS)
        run(["environment/bin/pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)], INSTALL_SECONDS)
        installed = time.monotonic()
        _two_commands(folder, environment, run)
    except FileNotFoundError:
        return FirstToken(python=python, why="is not on this machine")
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or ""
        if not version:
            return FirstToken(python=python, why="is not on this machine")
        why = f"{error}: {(output if isinstance(output, str) else output.decode())[-500:]}"
        return FirstToken(python=python, version=version, why=why)
    return FirstToken(
        python=python,
        version=version,
        install_seconds=installed - began,
        first_token_seconds=time.monotonic() - installed,
    )


def _two_commands(folder: Path, environment: dict[str, str], run: Callable[[Sequence[str], float], str]) -> None:
    """Start a cluster by `fleet up`, and let `fleet generate` ask it for four tokens.

    Raises:
        subprocess.SubprocessError: One of the commands failed.
    """
    fleet, ready = f"{folder}/environment/bin/fleet", folder / "ready.json"
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [fleet, "up", "--engine", "simulated", "--port", "0", "--grpc-port", "0", "--ready-file", str(ready)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        limit = time.monotonic() + START_SECONDS
        while not ready.exists():
            if up.poll() is not None or time.monotonic() > limit:
                raise subprocess.SubprocessError(f"fleet up: {(folder / 'up.log').read_text()[-500:]}")
            time.sleep(PAUSE_SECONDS)
        address = msgspec.json.decode(ready.read_bytes())["grpc"]
        said = run(
            [fleet, "generate", "What is a generator?", "--max-tokens", "4", "--address", address], START_SECONDS
        )
        if "4 tokens" not in said:
            raise subprocess.SubprocessError(f"fleet generate: {said[-500:]}")
    finally:
        if up.poll() is None:
            up.terminate()
            with suppress(subprocess.TimeoutExpired):
                up.wait(60)
        end_group(up.pid)


if __name__ == "__main__":
    sys.exit(main())
