"""Process samples: what a supervisor reads about a child process."""

import os
import signal
import subprocess
import sys

import pytest

from fleet.local.heartbeat import sample_process
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def seen(process):
    look = sample_process(process.pid)
    assert look is not None
    return look


def test_a_process_that_runs_is_seen_to_run(child):
    before = seen(child)
    eventually(lambda: seen(child).ran > before.ran)
    assert not seen(child).stopped
    assert not seen(child).traced


def test_a_process_that_is_stopped_is_seen_to_be_stopped(child):
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: seen(child).stopped)
    os.kill(child.pid, signal.SIGCONT)
    eventually(lambda: not seen(child).stopped)


def test_ended_process_has_no_sample(child):
    child.kill()
    child.wait()
    assert sample_process(child.pid) is None
