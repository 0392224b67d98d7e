"""Tests of errors at the start of a service: they name the settings field or the limit, and show no traceback."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.kvstore.builders import a_short_folder

pytestmark = pytest.mark.integration

FLEET = Path(sys.executable).with_name("fleet")


def failed_start(folder, settings: dict, *, part: str = "router", open_files: int | None = None) -> str:
    """Start a service that must fail at once; return the last line that it writes."""
    config = folder / "settings.json"
    config.write_text(json.dumps(settings))
    limit = f"ulimit -n {open_files}; " if open_files else ""
    command = ["/bin/sh", "-c", f'{limit}exec "$@"', "sh", FLEET, "serve", part, "--config", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture
def folder():
    with a_short_folder() as folder:
        yield folder


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def router_settings(folder, **changed) -> dict:
    ports = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "control_listen": f"unix:{folder}/c.sock"}
    return ports | changed


@pytest.mark.parametrize("field", ["http_listen", "health_listen", "grpc_listen", "kserve_listen", "control_listen"])
def test_port_in_use_is_named_by_its_setting(folder, taken, field):
    changed: dict = {field: taken}
    if field == "control_listen":
        changed["control_credentials"] = {"insecure": True}

    assert f"{field}: cannot listen on {taken}: " in failed_start(folder, router_settings(folder, **changed))


@pytest.mark.parametrize(
    ("setting", "name", "known"),
    [
        ("tool_call_parser", "hermess", "hermes, qwen3_coder"),
        ("reasoning_parser", "qwen33", "deepseek_r1, deepseek_v3"),
    ],
)
def test_misspelt_parser_of_a_simulated_worker_is_refused(folder, setting, name, known):
    settings = {"worker_id": "w", "model": "tiny", "engine": "simulated", setting: name}

    line = failed_start(folder, settings, part="worker")

    assert f"{setting}: {name!r} is none of the parsers that the router has: {known}, " in line


@pytest.mark.parametrize("limit", [12, 20])
def test_low_limit_of_open_files_is_refused_clearly(folder, limit):
    line = failed_start(folder, router_settings(folder), open_files=limit)

    assert f"the limit of open files is {limit}, too low for any service" in line


SECTIONS = ("control_credentials", "worker_credentials", "replicas_credentials", "store_credentials")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"secret_file": "short"}, "secret_file: .* holds 5 bytes: a secret has 16 or more"),
        ({"key": "other.key"}, "key: .* is not the private key of"),
        ({"authority": "short"}, "authority: .* holds no certificates"),
    ],
    ids=["short secret", "key of another", "no authority"],
)
def test_unusable_credentials_are_named_by_their_setting(folder, section, fields, why):
    authority = Authority(folder, "authority")
    (folder / "short").write_text("short")
    (folder / "other.key").write_bytes(Path(authority.issue("other")["key"]).read_bytes())
    usable = {} if "secret_file" in fields else {**authority.issue("own"), "authority": authority.file}
    credentials = usable | {field: str(folder / name) for field, name in fields.items()}

    changed = {section: credentials, "store": "127.0.0.1:1", "replicas_listen": "127.0.0.1:0"}
    line = failed_start(folder, router_settings(folder, **changed))

    assert re.search(f"{section}.{why}", line)
