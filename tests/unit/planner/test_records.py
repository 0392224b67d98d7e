"""Tests of the records of plans: the last state of a plan counts, files are rotated, and a damaged line costs only itself."""

import errno
import fcntl
import os

import pytest
from msgspec import structs

from fleet.planner.decisions import DecisionReason
from fleet.planner.messages import PlanId
from fleet.planner.records import KEPT_RECORDS, PlanHistory, PlanRecord, PlanState
from fleet.planner.settings import PlannerMode


def a_record(number=1, state=PlanState.UNDER_WAY):
    return PlanRecord(
        id=PlanId(f"plan-{number}"),
        at_ms=number,
        planner="p",
        mode=PlannerMode.ACTIVE,
        state=state,
        reason=DecisionReason.LOAD_UP,
        message="more",
        before={},
        replicas={},
    )


def test_last_state_of_a_plan_counts(tmp_path):
    history = PlanHistory(tmp_path / "plans.jsonl")
    history.keep(a_record())
    settled = structs.replace(a_record(), state=PlanState.SETTLED)
    history.keep(settled)

    assert history.find(PlanId("plan-1")) == settled
    assert PlanHistory(tmp_path / "plans.jsonl").latest(5) == (settled,)


def test_records_beyond_memory_are_found_in_the_file(tmp_path):
    history = PlanHistory(tmp_path / "plans.jsonl")
    for number in range(KEPT_RECORDS + 10):
        history.keep(a_record(number))

    assert len(history.latest(1000)) == KEPT_RECORDS
    assert history.find(PlanId("plan-0")) == a_record(0)
    assert history.find(PlanId("plan-9999")) is None


def test_file_is_rotated_and_bounded(tmp_path):
    path = tmp_path / "plans.jsonl"
    history = PlanHistory(path, most_bytes=2000)
    for number in range(200):
        history.keep(a_record(number))

    assert sorted(each.name for each in tmp_path.iterdir()) == ["plans.jsonl", "plans.jsonl.1"]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 5000
    assert history.find(PlanId("plan-199")) is not None


def test_file_that_another_planner_rotates_is_left(tmp_path):
    path = tmp_path / "plans.jsonl"
    history = PlanHistory(path, most_bytes=1)
    history.keep(a_record(1))

    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        history.keep(a_record(2))
        assert [each.name for each in tmp_path.iterdir()] == ["plans.jsonl"]
        assert len(path.read_bytes().splitlines()) == 2

    history.keep(a_record(3))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plans.jsonl", "plans.jsonl.1"]


def test_file_is_rotated_on_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def refuse(_descriptor, _operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    history = PlanHistory(tmp_path / "plans.jsonl", most_bytes=1)
    history.keep(a_record(1))
    history.keep(a_record(2))

    assert [each.id for each in PlanHistory(tmp_path / "plans.jsonl").latest(5)] == ["plan-2", "plan-1"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plans.jsonl", "plans.jsonl.1"]
    assert not caplog.records


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "plans.jsonl"
    PlanHistory(path).keep(a_record())
    with path.open("ab") as file:
        file.write(b'{"id": "plan-2", "at_ms"\n\xff\xfe\n[]\n{"id": "\xff"}\n')
        file.write(b'{"id": "plan-2", "x": ' + b"[" * 100_000 + b"\n")
    PlanHistory(path).keep(a_record(3))

    assert [each.id for each in PlanHistory(path).latest(5)] == ["plan-3", "plan-1"]


def test_record_after_a_full_disk_is_whole(tmp_path, caplog, monkeypatch):
    history = PlanHistory(tmp_path / "plans.jsonl")
    history.keep(a_record(1))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:20]))
        history.keep(a_record(2))
        history.keep(a_record(3))
    history.keep(a_record(4))

    assert [each.id for each in PlanHistory(tmp_path / "plans.jsonl").latest(5)] == ["plan-4", "plan-1"]
    (record,) = caplog.records
    assert record.cause == "No space left on device"


def test_unwritable_file_costs_no_plan(tmp_path):
    history = PlanHistory(tmp_path / "missing" / "plans.jsonl")
    history.keep(a_record())
    history.keep(a_record(2))

    assert [each.id for each in history.latest(5)] == ["plan-2", "plan-1"]


@pytest.mark.timeout(20)
def test_pipe_as_file_is_neither_read_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plans.jsonl")
    history = PlanHistory(tmp_path / "plans.jsonl")
    history.keep(a_record())

    assert history.latest(5) == (a_record(),)
    assert history.find(PlanId("plan-2")) is None
