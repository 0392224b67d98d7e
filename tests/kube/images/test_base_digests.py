"""Digests of base images: `make images PIN=1` with a registry for tests, and builds that use the pinned digests.

The registry demands tokens, is busy, or does not answer, as a test orders.
"""

import contextlib
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.dockerfiles import IMAGES, ROOT

BUILD = ROOT / "deploy" / "images" / "build.py"
BASES = {re.findall(r"^ARG BASE=(.+)$", path.read_text(), re.MULTILINE)[0] for path in IMAGES}
MANIFEST = b'{"schemaVersion": 2}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
RUNTIME = """#!/bin/sh
echo "$@" >> {log}
[ "$1 $2" = "image inspect" ] && echo '[{{"Size": 1}}]' || true
"""


class Registry(http.server.ThreadingHTTPServer):
    """Serves every image, with the faults that a test orders."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = []
        self.token = ""
        """If set, clients need this token."""

        self.refusals = []
        """Statuses of the answers to the next requests for manifests; 0: the registry does not answer."""

        self.headers = {"Docker-Content-Digest": DIGEST}
        self.released = threading.Event()
        """Set at the end of a test, so that no request waits any longer."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Log nothing."""

    def do_HEAD(self):
        self.server.seen.append(f"{self.command} {self.path}")
        if not self.path.startswith("/v2/"):
            self.answer(200, {}, json.dumps({"token": self.server.token}).encode())
        elif self.server.refusals and (status := self.server.refusals.pop(0)) != 200:
            if status:
                self.answer(status, {"Retry-After": "0"})
            else:
                self.server.released.wait(60)
        elif self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            name = self.path.removeprefix("/v2/").partition("/manifests")[0]
            told = f'Bearer realm="{self.server.url}/token",service="registry.test",scope="repository:{name}:pull"'
            self.answer(401, {"WWW-Authenticate": told})
        else:
            assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
            self.answer(200, self.server.headers, MANIFEST)

    def do_GET(self):
        self.do_HEAD()

    def answer(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):  # the client has given up
                self.wfile.write(content)


@pytest.fixture
def registry():
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def build(registry, tmp_path):
    """Return a function that runs build.py with the registry and a container runtime that only logs its commands."""
    runtime, log = tmp_path / "runtime", tmp_path / "log"
    runtime.write_text(RUNTIME.format(log=log))
    runtime.chmod(0o755)

    def run(*arguments, runtime=runtime, seconds=20.0):
        log.write_text("")
        command = [sys.executable, BUILD, *arguments, "--lock", tmp_path / "bases.lock", "--runtime", runtime]
        command += ["--mirror", registry.url, f"--seconds={seconds}"]
        environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
        return done, log.read_text().splitlines()

    return run


def locked(folder: Path) -> dict[str, str]:
    return dict(line.split() for line in (folder / "bases.lock").read_text().splitlines() if not line.startswith("#"))


def test_builds_take_digests_pinned_without_a_container_runtime(registry, build, tmp_path):
    done, _ = build("--pin", runtime="/absent/docker")

    assert done.returncode == 0, done.stderr
    assert locked(tmp_path) == dict.fromkeys(BASES, DIGEST)
    assert "HEAD /v2/library/python/manifests/3.11-slim-bookworm" in registry.seen
    assert "HEAD /v2/vllm/vllm-openai/manifests/v0.32.0" in registry.seen

    registry.seen.clear()
    done, commands = build()
    builds = [each for each in commands if each.startswith("build ")]
    assert done.returncode == 0, done.stderr
    assert len(builds) == len(IMAGES)
    assert all(re.search(rf" --build-arg=BASE=[\w/-]+@{DIGEST} ", each) for each in builds)
    assert not any(each.startswith("pull") for each in commands)
    assert registry.seen == []


def test_pin_replaces_old_digests_and_keeps_those_of_others(build, tmp_path):
    old = "sha256:" + 64 * "0"
    (tmp_path / "bases.lock").write_text(f"python:3.11-slim-bookworm {old}\nother:1 {old}\n")

    build("router", "--pin")

    assert locked(tmp_path) == {"python:3.11-slim-bookworm": DIGEST, "other:1": old}


def test_anonymous_token_is_fetched_when_the_registry_wants_one(registry, build, tmp_path):
    registry.token = "anonymous"

    done, _ = build("router", "--pin")

    assert done.returncode == 0, done.stderr
    assert registry.seen == [
        "HEAD /v2/library/python/manifests/3.11-slim-bookworm",
        "GET /token?scope=repository%3Alibrary%2Fpython%3Apull&service=registry.test",
        "HEAD /v2/library/python/manifests/3.11-slim-bookworm",
    ]


@pytest.mark.parametrize("refusals", [[429, 429], [503], [200]])
def test_busy_registry_gets_the_request_again(registry, build, tmp_path, refusals):
    registry.refusals = refusals

    done, _ = build("router", "--pin")

    assert done.returncode == 0, done.stderr
    assert locked(tmp_path) == {"python:3.11-slim-bookworm": DIGEST}


@pytest.mark.parametrize(
    ("refusals", "words"),
    [
        ([401] * 9, "the registry answers 401: it wants credentials"),
        ([403] * 9, "the registry answers 403: it wants credentials"),
        ([404] * 9, "the registry answers 404: it has no such image"),
        ([429] * 10_000, "no answer within the time limit (it answers 429)"),
        ([0] * 9, "no answer within the time limit (timed out)"),
    ],
    ids=lambda each: str(each[0]) if isinstance(each, list) else "",
)
def test_registry_without_digest_changes_no_lock_file(registry, build, tmp_path, refusals, words):
    registry.refusals = refusals
    (tmp_path / "bases.lock").write_text("before\t1\n")

    done, _ = build("router", "--pin", seconds=2.0)

    assert done.returncode == 1
    assert words in done.stderr, done.stderr
    assert done.stderr.startswith(f"build.py: {registry.url}/v2/library/python/manifests/3.11-slim-bookworm: ")
    assert (tmp_path / "bases.lock").read_text() == "before\t1\n"


def test_digest_is_computed_if_the_registry_omits_it(registry, build, tmp_path):
    registry.headers = {}

    build("router", "--pin")

    assert locked(tmp_path) == {"python:3.11-slim-bookworm": DIGEST}


def test_digest_of_another_form_is_refused(registry, build, tmp_path):
    registry.headers = {"Docker-Content-Digest": "md5:1"}

    done, _ = build("router", "--pin")

    assert (done.returncode, "'md5:1' is not a digest" in done.stderr) == (1, True)
    assert not (tmp_path / "bases.lock").exists()
