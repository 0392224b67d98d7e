"""The page about extensions: it lists every group of entry points, and its sample package works when it is installed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "howto" / "plugins.md").read_text()
GROUP = re.compile(r'"((?:fleet|workers|kvstore)\.[a-z_]+)"')
FLEET = (sys.executable, "-m", "fleet.cli.main")


def test_page_lists_every_group_of_entry_points():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].keys()
    code = [file.read_text() for package in ("fleet", "workers") for file in (ROOT / package).rglob("*.py")]
    read = {group for text in code if "entry_points" in text for group in GROUP.findall(text)}

    listed = {
        group for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for group in re.findall(r"`(.*?)`", row)
    }
    assert declared <= listed
    assert {"fleet.policies", "fleet.filters", "fleet.scorers", "fleet.pickers"} <= read
    assert read <= listed


@pytest.fixture
def installed(tmp_path):
    """Write the sample package as its installation does; yield the environment in which Fleet finds it."""
    module, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    project, *_ = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    points = tomllib.loads(project)["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in points.items()
    ]
    metadata = tmp_path / "my_tools-0.1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "my_tools.py").write_text(module)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-tools\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_sample_command_runs_and_is_in_the_help(installed):
    hello = subprocess.run(
        [*FLEET, "hello", "--name", "you"], env=installed, capture_output=True, text=True, check=True
    )
    listed = subprocess.run([*FLEET, "--help"], env=installed, capture_output=True, text=True, check=True)

    assert hello.stdout == "Hello, you!\n"
    assert "command of the package my-tools" in listed.stdout


def test_sample_service_announces_itself_and_serves(installed, tmp_path):
    (tmp_path / "clock.json").write_text('{"listen": "127.0.0.1:0"}')
    command = [*FLEET, "serve", "clock", "--config", str(tmp_path / "clock.json")]
    process = subprocess.Popen(command, env=installed, stdout=subprocess.PIPE, text=True)
    try:
        host, _, port = json.loads(process.stdout.readline())["clock"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=50) as asked:
            assert re.match(rb"20\d\d-", asked.recv(100))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=50)
    assert process.returncode == 0
