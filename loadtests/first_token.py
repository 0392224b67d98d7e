"""Test of a first installation: from an empty virtual environment to the first token, without any service.

    python -m loadtests.first_token [--json]

The checkout is installed into an empty environment by `pip install`, only with its declared dependencies. Then, with an empty home
folder, one command starts a whole cluster with the simulated engine and sends a request. The program ends with status 1 if the first
token takes longer than a minute.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
NOT_SOURCE = (".*", "build", "tests", "loadtests", "__pycache__", "*.egg-info", "*.so")
MOST_SECONDS = 60.0
INSTALL_SECONDS = 1800.0
PROMPT = "Hello"


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.first_token", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-token-") as name:
        folder = Path(name)
        began = time.monotonic()
        fleet = _installed(folder)
        installed = time.monotonic()
        first_token = _first_token(fleet, folder)
    found = {"install_seconds": round(installed - began, 1), "first_token_seconds": round(first_token, 2)}
    if arguments.json:
        print(json.dumps(found))
    else:
        print(
            f"installed in {found['install_seconds']} s; first token {found['first_token_seconds']} s after the command"
        )
    return 0 if first_token <= MOST_SECONDS else 1


def _installed(folder: Path) -> Path:
    """Install the checkout and return the command `fleet` of the new environment."""
    environment, source = folder / "venv", folder / "source"
    shutil.copytree(CHECKOUT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))  # a build leaves files behind
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(environment)], [*pip, str(source)]):
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_SECONDS, env=_environment(), stdout=sys.stderr)
    return environment / "bin" / "fleet"


def _first_token(fleet: Path, folder: Path) -> float:
    """Return the seconds from the command to the first character of an answer."""
    home = folder / "home"
    home.mkdir()
    ports = ("--http-port", "0", "--grpc-port", "0")
    began = time.monotonic()
    cluster = subprocess.Popen(
        [str(fleet), "up", "--engine", "simulated", *ports, "--demo", PROMPT],
        cwd=home,
        env=_environment() | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        for line in cluster.stdout:
            if line == f"> {PROMPT}\n":
                break
        if not cluster.stdout.read(1):
            raise RuntimeError("the cluster ended without an answer; what it said is above")
        return time.monotonic() - began
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(60)


def _environment() -> dict[str, str]:
    """Return the environment without variables that would give access to this installation."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return kept | {"PATH": os.defpath}


if __name__ == "__main__":
    sys.exit(main())
