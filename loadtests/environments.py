"""Virtual environments of compared systems and client programs, made on demand and kept in a cache folder."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

INSTALL_SECONDS = 900


class SystemUnavailable(Exception):
    """A compared system or another server cannot be installed or started; the message gives the reason."""


class SystemDistribution(Struct, frozen=True, kw_only=True):
    """Packages of a compared system or client program. Each step lists alternative arguments of one `pip install`; the first that works is used."""

    name: str
    version: str
    steps: tuple[tuple[tuple[str, ...], ...], ...]
    constraints: Path | None = None  # pip constraints file with the versions of all packages; None: none
    system: str = ""  # command that installs the needed packages of the operating system; empty: none


def python_of(distribution: SystemDistribution, cache: Path) -> Path:
    """Return the Python of a system's environment. If the environment is missing or was made from other packages, make it in some minutes.

    Raises:
        SystemUnavailable: The environment cannot be made; the message says what failed.
    """
    folder = cache / f"{distribution.name.lower()}-{distribution.version}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    versions = distribution.constraints.read_bytes() if distribution.constraints is not None else b""
    recipe = hashlib.sha256(json.dumps(distribution.steps).encode() + versions).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == recipe:
        return python
    stamp.unlink(missing_ok=True)  # first, so that an interrupted installation has no stamp
    print(f"installing {distribution.name} {distribution.version} into {folder}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], distribution)
    for step in distribution.steps:
        _install(python, step, distribution)
    stamp.write_text(recipe)
    return python


def _install(python: Path, alternatives: Sequence[Sequence[str]], distribution: SystemDistribution) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if distribution.constraints is not None:
        pip += ["--constraint", str(distribution.constraints)]
    for arguments in alternatives[:-1]:
        try:
            _run([*pip, *arguments], distribution)
        except SystemUnavailable:
            continue
        return
    _run([*pip, *alternatives[-1]], distribution)


def _run(command: Sequence[str], distribution: SystemDistribution) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemUnavailable(
            f"{distribution.name} {distribution.version} could not be installed: {error}"
        ) from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise SystemUnavailable(f"{distribution.name} {distribution.version} could not be installed: {last[0]}")
