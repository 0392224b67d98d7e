"""A command that is told to stop clears away what it has begun."""

import os
import signal

import pytest

from fleet.cli.stopping import as_interrupt
from fleet.sim.files import whole_file


def test_a_sigterm_leaves_no_unfinished_file_and_what_was_there_before(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("before")

    def stopped():
        with as_interrupt(), whole_file(file, "--json") as path:
            path.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 10)  # is never over

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_afterwards_a_sigterm_means_what_it_meant_before():
    before = signal.getsignal(signal.SIGTERM)
    with as_interrupt():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
