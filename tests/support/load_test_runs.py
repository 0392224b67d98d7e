"""Runs load tests as their users do: by their commands, in processes of their own."""

import subprocess
import sys
from pathlib import Path

from loadtests.kvstore.nodes import ROOT, environment


def run_load_test(
    module: str, *arguments: str, folder: Path = ROOT, seconds: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run `python -m loadtests.MODULE` in a folder until it ends, and return its status and output."""
    return subprocess.run(
        [sys.executable, "-m", f"loadtests.{module}", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
