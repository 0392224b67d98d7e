"""Native (C) modules: which ones are missing, whether a rebuild helps, and the router's warning."""

import logging
import sys

import pytest

from fleet.app.native_modules import ROUTER_MODULES, missing_modules, warn_of_missing_modules
from fleet.cli import doctor

A_MODULE = "fleet.router.native._costs"


@pytest.fixture
def without_c_modules(monkeypatch):
    for name in ROUTER_MODULES:
        monkeypatch.setitem(sys.modules, name, None)


def refusing_module(folder, monkeypatch, line):
    (folder / "refusing.py").write_text(line)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "refusing", raising=False)
    return "refusing"


def test_module_that_was_not_built_can_be_rebuilt(without_c_modules):
    (missing,) = missing_modules([A_MODULE])

    assert str(missing) == f"{A_MODULE} (not built)"
    assert missing.rebuild_helps


def test_file_that_does_not_load_can_be_rebuilt(tmp_path, monkeypatch):
    (tmp_path / "damaged.abi3.so").write_bytes(b"for another machine")
    monkeypatch.syspath_prepend(tmp_path)

    (missing,) = missing_modules(["damaged"])

    assert "damaged.abi3.so" in missing.cause
    assert missing.rebuild_helps


def test_rebuild_does_not_help_an_unfit_processor(tmp_path, monkeypatch):
    name = refusing_module(tmp_path, monkeypatch, "raise ImportError('this processor has no SHA instructions')\n")

    (missing,) = missing_modules([name])

    assert missing.cause == "this processor has no SHA instructions"
    assert not missing.rebuild_helps


def test_missing_modules_give_one_warning_with_cost(without_c_modules, caplog):
    warn_of_missing_modules()

    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert record.getMessage() == "C modules missing, requests cost more CPU time"
    assert "57 %" in record.cost
    assert "C compiler" in record.remedy
    assert all(name in record.missing for name in ROUTER_MODULES)


def test_unfit_processor_gives_no_warning(tmp_path, monkeypatch, caplog):
    name = refusing_module(tmp_path, monkeypatch, "raise ImportError('not for this processor')\n")
    monkeypatch.setattr("fleet.app.native_modules.ROUTER_MODULES", (name,))

    warn_of_missing_modules()

    assert caplog.records == []


def test_doctor_says_what_missing_modules_cost(without_c_modules):
    probe = dict(doctor.PROBES)["C modules"]

    verdict = probe()

    assert not verdict.usable
    assert f"{A_MODULE} (not built)" in verdict.detail
    assert "57 % more CPU" in verdict.detail
    assert "C compiler" in verdict.fix
