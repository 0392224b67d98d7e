import logging
from bisect import bisect_left
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleet.core.errors import Reason
from fleet.core.requests import Finish, KvPhase, Source, Usage
from fleet.core.roles import Phase
from fleet.core.telemetry import LATENCY_BUCKETS, LogLineFormatter, RouterProcessMetrics
from tests.support.builders import a_kv_report

USAGE = Usage(prompt_tokens=64, completion_tokens=3, cached_tokens=32)


def lines(metrics: RouterProcessMetrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def test_a_request_is_counted_by_how_it_ended_and_where_it_ran():
    metrics = RouterProcessMetrics(CollectorRegistry())
    kv = (
        KvPhase(phase=Phase.PREFILL, worker_id="p", report=a_kv_report(64)),
        KvPhase(phase=Phase.DECODE, worker_id="d", report=a_kv_report(64, cached_blocks=1, source=Source.STORE)),
    )

    metrics.ended(Finish.STOP, kv, USAGE, 0.5)
    metrics.ended(Reason.QUEUE_FULL, (), None, None)

    told = lines(metrics)
    assert 'fleet_requests_total{outcome="stop",placement="disaggregated"} 1.0' in told
    assert 'fleet_requests_total{outcome="queue_full",placement="unknown"} 1.0' in told
    assert 'fleet_kv_blocks_total{phase="prefill",source="computed"} 2.0' in told
    assert 'fleet_kv_blocks_total{phase="decode",source="store"} 1.0' in told
    assert 'fleet_kv_bytes_total{phase="decode",source="store"} 1024.0' in told
    assert 'fleet_kv_blocks_total{phase="decode",source="direct"} 0.0' in told
    assert "fleet_cached_tokens_total 32.0" in told
    assert "fleet_request_seconds_count 1.0" in told


def test_latency_buckets_span_1_ms_to_100_s():
    assert (LATENCY_BUCKETS[0], LATENCY_BUCKETS[-1]) == (0.001, 100.0)
    assert list(LATENCY_BUCKETS) == sorted(LATENCY_BUCKETS)


@pytest.mark.parametrize("seconds", [0.154, 0.0031, 7.7])
def test_median_of_equal_times_reads_within_an_eighth(seconds):
    """Interpolate within the bucket, as Prometheus does."""
    place = bisect_left(LATENCY_BUCKETS, seconds)
    below, above = LATENCY_BUCKETS[place - 1 : place + 1]

    assert (below + above) / 2 == pytest.approx(seconds, rel=1 / 8)
    assert all(high / low <= 1.281 for low, high in pairwise(LATENCY_BUCKETS))


def test_no_series_tells_when_a_metric_was_created():
    metrics = RouterProcessMetrics(CollectorRegistry())
    metrics.ended(Finish.STOP, (), USAGE, 0.5)
    metrics.unserved(404)

    assert [line for line in lines(metrics) if "_created" in line] == []
    assert 'fleet_http_unserved_requests_total{status="404"} 1.0' in lines(metrics)


def test_a_log_entry_is_one_line_with_its_extras():
    # Not makeLogRecord, because libraries (vLLM) replace the factory that it uses.
    record = logging.LogRecord("fleet.x", logging.WARNING, __file__, 1, "worker %s", ("lost\nfake",), None)
    record.worker, record.code = "w1", 7

    line = LogLineFormatter().format(record)

    assert line.endswith("WARNING fleet.x worker lost\\nfake worker=w1 code=7")
    assert "\n" not in line
