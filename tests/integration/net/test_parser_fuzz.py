"""Run the parser fuzzer for some seconds; run it longer by hand (`tests.support.frontend.fuzz_parsers`)."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("atheris") is None, reason="atheris is not installed: it has wheels for some Pythons only"
    ),
]

SECONDS = 8


def test_parsers_only_answer_or_reject(tmp_path):
    command = [sys.executable, "-m", "tests.support.frontend.fuzz_parsers", str(SECONDS), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)

    assert done.returncode == 0, done.stderr[-8000:]
    assert "Done " in done.stderr, done.stderr[-8000:]
