"""Rows of ended requests."""

import json
import sys

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.recording.traces import read_trace
from fleet.sim.results.outcomes import Slo
from fleet.sim.results.request_rows import GROUP, request_row, row_writer
from fleet.sim.run import simulate
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan
from tests.unit.sim.results.test_outcomes import ended

SLO = Slo(ttft_ms=100.0, tpot_ms=20.0)


def test_row_has_results_of_request():
    row = request_row(ended(80, 10), SLO, None)
    assert (row.ttft_ms, row.tpot_ms, row.e2e_ms, row.good) == (80.0, 10.0, 180.0, True)
    assert not request_row(ended(80, 21), SLO, None).good


def test_e2e_target_counts_for_good():
    assert request_row(ended(80, 10), Slo(ttft_ms=100.0, tpot_ms=20.0, e2e_ms=180.0), None).good
    assert not request_row(ended(80, 10), Slo(ttft_ms=100.0, tpot_ms=20.0, e2e_ms=179.0), None).good


def test_written_rows_are_an_equivalent_trace(tmp_path):
    chain = tuple(range(1, 9))
    requests = [
        TraceRequest(
            number * 200_000_000, 128 + number, (*chain, *range(100 * number, 100 * number + number // BLOCK)), 4, 7
        )
        for number in range(1, 40)
    ]
    file = tmp_path / "rows.jsonl"
    with row_writer(file, file.name, SLO, BLOCK) as write:
        first = simulate(a_plan(), iter(requests), on_end=write).outcome
    trace = read_trace(file)
    assert trace.requests == requests
    assert simulate(a_plan(), iter(trace.requests)).outcome.digest == first.digest


def test_rows_without_blocks_omit_their_fields(tmp_path):
    file = tmp_path / "rows.jsonl"
    with row_writer(file, file.name, SLO, None) as write:
        write(ended(80, 10))
    (row,) = map(json.loads, file.read_text().splitlines())
    assert not row.keys() & {"hash_ids", "block_tokens", "tier_tokens"}


def test_parquet_has_same_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: the extra parquet")
    file = tmp_path / "rows.parquet"
    written = [request_row(ended(80 + number, 10), SLO, 512) for number in range(3)]
    with row_writer(file, file.name, SLO, 512) as write:
        for number in range(3):
            write(ended(80 + number, 10))
    table = parquet.read_table(file)
    assert table.to_pylist() == [json.loads(json.dumps({**_fields(row)})) for row in written]
    assert table.num_rows < GROUP


def _fields(row) -> dict:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def test_parquet_without_pyarrow_names_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        pytest.raises(ConfigurationRefused, match=r"--requests: Parquet needs pyarrow: .*\[parquet\]"),
        row_writer(tmp_path / "x", "x.parquet", SLO, None),
    ):
        pass
