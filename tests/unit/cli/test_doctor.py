"""`fleet doctor`: findings and fixes."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest

from fleet.cli import doctor
from fleet.cli.doctor import PROBES, DoctorVerdict, examine
from fleet.cli.main import run

NEEDS_AN_ENGINE_PROCESS = {"engine vllm", "nixl"}  # seconds each; the integration tests have them


def light_probes():
    return [probe for probe in PROBES if probe[0] not in NEEDS_AN_ENGINE_PROCESS]


def test_every_part_that_is_optional_has_a_line():
    names = {name for name, _ in PROBES}

    wanted = [
        "python",
        "C modules",
        "memory",
        "ports",
        "hugepages",
        "nixl",
        "cuda",
        "rocm",
        "rdma",
        "gds",
        "etcd",
        "redis",
        "ray",
        "parquet",
        "kubernetes",
        "s3",
        "codecs",
        "kv events",
        "tracing",
    ]
    assert names >= {*wanted, "shared memory"}
    assert names >= {f"engine {engine}" for engine in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "simulated")}


def test_unusable_parts_come_with_a_fix():
    findings = list(examine(light_probes()))

    assert [finding.name for finding in findings if not finding.usable and not finding.fix] == []
    assert [finding.name for finding in findings if not finding.detail] == []
    assert [finding.name for finding in findings if "cannot be examined" in finding.detail] == []


def test_extras_of_fleet_have_the_packages_that_it_probes():
    """Compare the probes with the extras, so that a line names what a user can install."""
    extras = {*importlib.metadata.metadata("fleet-serving").get_all("Provides-Extra")}
    findings = {finding.name: finding for finding in examine(light_probes())}

    for name in ("etcd", "redis", "s3", "codecs", "kv events", "ray", "parquet", "kubernetes", "tracing"):
        assert name.replace(" ", "-") in extras
        assert "makes no use of it" not in findings[name].detail


def test_missing_package_is_named_with_its_extra(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lz4" else real(name))

    verdict = dict(PROBES)["codecs"]()

    assert not verdict.usable
    assert "lz4 is not installed" in verdict.detail
    assert "cryptography " in verdict.detail
    assert verdict.fix == "pip install 'fleet-serving[codecs]'"


def test_missing_server_on_this_host_is_no_fault(monkeypatch):
    monkeypatch.setattr(doctor, "listens", lambda port: False)

    verdict = dict(PROBES)["etcd"]()

    assert verdict.usable
    assert "no server at 127.0.0.1:2379" in verdict.detail


def test_failed_probe_is_a_finding_and_others_go_on():
    def fall():
        raise ZeroDivisionError("nothing to divide by")

    fallen, fine = examine([("broken", fall), ("fine", lambda: DoctorVerdict(True, "yes"))])

    assert not fallen.usable
    assert "ZeroDivisionError: nothing to divide by" in fallen.detail
    assert fine.usable


def test_looking_loads_no_heavy_module():
    script = (
        "import sys; from fleet.cli.doctor import PROBES, examine\n"
        f"list(examine([probe for probe in PROBES if probe[0] not in {NEEDS_AN_ENGINE_PROCESS}]))\n"
        "print(*{'torch', 'vllm', 'ray', 'nixl'}.intersection(sys.modules))"
    )

    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert out == "\n"


def test_an_answer_that_does_not_come_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.2)

    verdict = doctor.probe_output(sys.executable, "-c", "import signal; signal.pause()")

    assert not verdict.usable
    assert "no answer within" in verdict.detail


def test_the_list_is_json_with_four_fields_each(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBES", [("a", lambda: DoctorVerdict(False, "is not here", "get it"))])

    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "a", "usable": False, "detail": "is not here", "fix": "get it"}
    ]


@pytest.mark.parametrize("usable", [True, False])
def test_the_table_names_each_part_and_what_to_do(monkeypatch, capsys, usable):
    monkeypatch.setattr(
        doctor, "PROBES", [("part", lambda: DoctorVerdict(usable, "detail", "" if usable else "get it"))]
    )

    run(["doctor"])

    out = capsys.readouterr().out
    assert out.startswith("yes" if usable else "no")
    assert ("-> get it" in out) is not usable
