"""Tests of the dependency audit, against an advisory service of the test's own, and of the rule against code in data."""

import json
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.dependency_audit import CANARY, pinned
from tests.support.source_rules import complaints

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
KNOWN = {CANARY: "PYSEC-2014-8"}


class AdvisoryService:
    """OSV's query API: knows the vulnerabilities of `known`, by `name==version`."""

    def __init__(self):
        self.known, self.status, self.asked = dict(KNOWN), 200, []
        service = self

        class Query(BaseHTTPRequestHandler):
            def do_POST(self):
                query = json.loads(self.rfile.read(int(self.headers["content-length"])))
                pin = f"{query['package']['name']}=={query['version']}"
                service.asked.append(pin)
                found = service.known.get(pin)
                body = json.dumps(
                    {"vulns": [{"id": found, "details": "a flaw", "affected": []}]} if found else {}
                ).encode()
                self.send_response(service.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Query)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/query"


@pytest.fixture
def service():
    service = AdvisoryService()
    thread = threading.Thread(target=service.server.serve_forever, daemon=True)
    thread.start()
    yield service
    service.server.shutdown()
    thread.join(timeout=30)
    service.server.server_close()


def audited(url):
    command = [sys.executable, "-m", "tests.support.dependency_audit", "--osv-url", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_audit_asks_about_every_pinned_version(service):
    done = audited(service.url)

    assert done.returncode == 0, done.stdout + done.stderr
    pins = pinned(ROOT)
    assert sorted(set(service.asked) - {CANARY}) == pins
    assert {"vllm==0.32.0", "torch==2.13.0"} <= set(pins), "extras and the Makefile name versions too"
    assert f"{len(pins)} pinned packages audited: 0 vulnerabilities" in done.stdout


def test_requirements_name_only_public_versions():
    """Local versions, such as `+cpu`, are for indexes of their own; what needs one says so itself, as vLLM for CPUs does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    local = [each for each in named if any(Version(one.version).local for one in Requirement(each).specifier)]

    assert len(named) > 30
    assert local == []


def test_vulnerable_version_fails_the_audit(service):
    pin = next(pin for pin in pinned(ROOT) if pin.startswith("aiohttp=="))
    service.known[pin] = "PYSEC-2026-1"

    done = audited(service.url)

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{pin.replace('==', ' ')}: PYSEC-2026-1; fixed in no version yet" in done.stdout


@pytest.mark.parametrize("fault", ["knows_nothing", "fails", "is_away"])
def test_audit_without_an_answer_does_not_pass(service, fault):
    if fault == "knows_nothing":
        service.known.clear()
    elif fault == "fails":
        service.status = 500
    url = "http://127.0.0.1:9/v1/query" if fault == "is_away" else service.url

    done = audited(url)

    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("NOT AUDITED: ")


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import numpy as np\nnp.load('x')",
        "from yaml import unsafe_load",
        "import yaml\nyaml.load(b'')",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "def f(socket):\n    return socket.recv_pyobj()",
        "from multiprocessing.connection import Listener",
    ],
)
def test_source_rules_refuse_code_in_data(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    file = Path("fleet/planted.py")
    file.parent.mkdir()
    file.write_text(f"{line}\n")

    assert any("makes code of what it reads" in told for told in complaints([file]))
    file.write_text("import yaml\nyaml.safe_load(b'')\n\n\ndef evaluate(machine):\n    return machine.eval_count\n")
    assert not list(complaints([file]))
