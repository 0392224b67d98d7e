"""Stopping a command by a signal: the command cleans up."""

import importlib
import os
import signal
import sys

import pytest

from fleet import cli
from fleet.cli import main
from fleet.cli.console import command_line
from fleet.cli.console.exits import FAILED
from fleet.cli.console.files import whole_file
from fleet.cli.console.stopping import raise_interrupt_on


def test_sigterm_keeps_the_old_file_and_no_unfinished_one(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("before")

    def stopped():
        with raise_interrupt_on(), whole_file(file, "--json") as path:
            path.write_text("half")
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 10)  # never ends

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_afterwards_a_sigterm_means_what_it_meant_before():
    before = signal.getsignal(signal.SIGTERM)
    with raise_interrupt_on():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def _alarms(request):
    before = signal.signal(signal.SIGALRM, request.param)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def _heard():
    """Let SIGINT raise KeyboardInterrupt, because these tests may run in a background job, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_alarms", "_heard")
def test_interrupt_during_an_import_acts_after_it(tmp_path, monkeypatch):
    """Interrupt an import that lasts until the interrupt is tried again, which must not end the import either."""
    (tmp_path / "slowly_imported.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def stopped():
        with raise_interrupt_on():
            importlib.import_module("slowly_imported")
            signal.sigtimedwait([], 10)  # never ends

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert sys.modules.pop("slowly_imported").whole


@pytest.mark.usefixtures("_alarms", "_heard")
def test_interrupt_at_the_end_of_an_import_is_not_lost(tmp_path, monkeypatch):
    (tmp_path / "imported_last.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(KeyboardInterrupt), raise_interrupt_on():
        importlib.import_module("imported_last")

    assert sys.modules.pop("imported_last").whole


@pytest.mark.usefixtures("_alarms", "_heard")
def test_import_of_a_command_is_not_interrupted(tmp_path, monkeypatch):
    (tmp_path / "imported.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n")
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.setitem(command_line.SUMMARIES, "imported", "is told to stop while it is imported")

    assert main.run(["imported"]) == FAILED
    assert sys.modules.pop("fleet.cli.imported").whole


def test_ignored_signal_stays_ignored_in_background_jobs():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raise_interrupt_on():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
