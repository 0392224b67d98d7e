"""Previous version of Fleet: unpacks its source tree from the history of this repository, so that tests can run it.

`previous_version.toml` names the commit. The source tree is unpacked once into `build/previous`, and its native modules are
built there. Its processes run with the Python environment of the tests. As a command, this module unpacks the tree, and
ends with status 3 if the history lacks the commit. `.ci/run` calls the command, so that nobody overlooks that tests of
mixed versions are skipped.
"""

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMMIT: str = tomllib.loads((Path(__file__).parent / "previous_version.toml").read_text())["commit"]
TREE = ROOT / "build" / "previous" / f"{COMMIT}-{sys.implementation.cache_tag}"
BUILD_NATIVE = "from setuptools import setup; setup(script_args=['-q', 'build_ext', '--inplace'])"

NO_HISTORY = 3  # status of the command


class NoPreviousVersion(Exception):
    """Raised if the previous version cannot be unpacked; the message says why, and what to do."""


def previous_tree() -> Path:
    """Return the folder of the previous version's tree; unpack and build it first if necessary.

    Raises:
        NoPreviousVersion: This checkout has no history, or only a part of it that lacks the commit.
    """
    TREE.parent.mkdir(parents=True, exist_ok=True)
    with (TREE.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may call this function
        if not TREE.exists():
            unfinished = TREE.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            with tarfile.open(fileobj=io.BytesIO(_archive())) as archive:
                archive.extractall(unfinished, filter="data")
            subprocess.run([sys.executable, "-c", BUILD_NATIVE], cwd=unfinished, check=True, capture_output=True)
            unfinished.rename(TREE)
    return TREE


def environment_of(tree: Path) -> dict[str, str]:
    """Return environment variables with which Python imports the packages of a tree.

    The process must also be started in the folder of the tree.
    """
    return {**os.environ, "PYTHONPATH": str(tree)}


def _archive() -> bytes:
    command = ["git", "-C", str(ROOT), "archive", COMMIT]
    try:
        packed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise NoPreviousVersion("git is not installed, and unpacks the previous version from the history") from error
    if packed.returncode:
        raise NoPreviousVersion(
            f"the history of {ROOT} has no commit {COMMIT} (previous_version.toml): {packed.stderr.decode().strip()}; clone the"
            " repository with its history, or run `git fetch --unshallow`"
        )
    return packed.stdout


def main() -> int:
    try:
        print(previous_tree())
    except NoPreviousVersion as error:
        print(f"previous_version: {error}", file=sys.stderr)
        return NO_HISTORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
