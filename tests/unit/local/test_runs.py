"""Local runs: their supervisor records, and the addresses at which they are found."""

import subprocess
import sys

import msgspec
import psutil
import pytest
from msgspec import structs

from fleet.local.runs import LocalRun, note_supervisor


@pytest.fixture
def run(tmp_path):
    note_supervisor(tmp_path)
    return LocalRun(tmp_path)


def test_supervisor_is_found_after_the_wall_clock_was_set(run, monkeypatch):
    """Move the boot time by a second, as happens when the wall clock is set, because the kernel computes it from the wall clock."""
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 1.0)

    assert run.supervisor() is not None


def test_later_process_with_the_same_id_is_no_supervisor(run):
    record = run.supervisor()

    assert not structs.replace(record, started_after_boot=record.started_after_boot - 0.01).alive


def test_ended_process_is_no_supervisor(tmp_path):
    note = f"from pathlib import Path; from fleet.local.runs import note_supervisor; note_supervisor(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", note], check=True)

    assert (tmp_path / "supervisor.json").exists()
    assert LocalRun(tmp_path).supervisor() is None


@pytest.mark.parametrize(
    ("listen", "address", "same"),
    [
        ("127.0.0.1:50051", "localhost:50051", True),
        ("0.0.0.0:50051", "127.0.0.1:50051", True),
        ("127.0.0.1:50051", "127.0.0.1:50052", False),
        ("10.0.0.5:50051", "10.0.0.5:50051", True),
        ("10.0.0.5:50051", "127.0.0.1:50051", False),
        ("0.0.0.0:50051", "127.0.0.2:50051", True),
        ("0.0.0.0:50051", "127.0.0.2:50052", False),
        ("127.0.0.1:50051", "127.0.0.2:50051", False),
        ("0.0.0.0:50051", "192.0.2.1:50051", False),  # belongs to no machine (RFC 5737)
        ("", "127.0.0.1:", False),
    ],
)
def test_run_is_found_only_at_addresses_of_its_router(tmp_path, listen, address, same):
    (tmp_path / "router.json").write_bytes(msgspec.json.encode({"grpc_listen": listen}))

    assert LocalRun(tmp_path).answers_at(address) is same
