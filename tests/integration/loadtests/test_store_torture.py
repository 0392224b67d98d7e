"""Short run of the torture test, which otherwise takes ten minutes: real processes, killed and stopped at random."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.kvstore.nodes import ROOT, environment

pytestmark = pytest.mark.integration


@pytest.mark.long
@pytest.mark.timeout(300)
def test_short_torture_finds_no_wrong_byte_hang_or_leak(tmp_path: Path):
    with_redis = ["--redis"] if shutil.which("redis-server") or shutil.which("valkey-server") else []
    command = [
        sys.executable,
        "-m",
        "loadtests.kvstore.torture",
        "--seconds",
        "20",
        "--kill-every",
        "1",
        "--kills",
        "3",
        "--ssd",
        *with_redis,
        "--json",
    ]

    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=270, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in ("wrong_bytes", "leaks", "hangs", "errors")} == {
        "wrong_bytes": 0,
        "leaks": 0,
        "hangs": 0,
        "errors": 0,
    }, done.stderr
    assert found["operations"] > 100
    assert found["kills"] >= 3
