import logging
from bisect import bisect_left
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleet.core.errors import Reason
from fleet.core.requests import Finish, KvPhase, Source, Usage
from fleet.core.roles import Phase
from fleet.core.telemetry import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    LATENCY_BUCKETS,
    METRICS,
    SCORE,
    LogLineFormatter,
    ModelRequests,
    RouterProcessMetrics,
)
from kvstore.metric_definitions import GaugeDefinition, HistogramDefinition
from tests.support.builders import a_kv_report

USAGE = Usage(prompt_tokens=64, completion_tokens=3, cached_tokens=32)


def lines(metrics: RouterProcessMetrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def counts_of(metrics: RouterProcessMetrics) -> ModelRequests:
    return metrics.begin("m", CHAT)


def test_a_request_is_counted_by_how_it_ended_and_where_it_ran():
    metrics = RouterProcessMetrics(CollectorRegistry())
    kv = (
        KvPhase(phase=Phase.PREFILL, worker_id="p", report=a_kv_report(64)),
        KvPhase(phase=Phase.DECODE, worker_id="d", report=a_kv_report(64, cached_blocks=1, source=Source.STORE)),
    )

    counts_of(metrics).ended(Finish.STOP, kv, USAGE, 0.5, answered=True)
    metrics.begin("m", COMPLETION).ended(Reason.QUEUE_FULL, (), None, 0.1, answered=False)

    told = lines(metrics)
    assert 'fleet_requests_total{model="m",outcome="stop",placement="disaggregated"} 1.0' in told
    assert 'fleet_requests_total{model="m",outcome="queue_full",placement="unknown"} 1.0' in told
    assert 'fleet_kv_blocks_total{model="m",phase="prefill",source="computed"} 2.0' in told
    assert 'fleet_kv_blocks_total{model="m",phase="decode",source="store"} 1.0' in told
    assert 'fleet_kv_bytes_total{model="m",phase="decode",source="store"} 1024.0' in told
    assert 'fleet_kv_blocks_total{model="m",phase="decode",source="direct"} 0.0' in told
    assert 'fleet_cached_tokens_total{model="m"} 32.0' in told
    assert 'fleet_request_seconds_count{model="m"} 1.0' in told


def test_times_have_the_names_of_opentelemetry_too():
    metrics = RouterProcessMetrics(CollectorRegistry())
    counts = counts_of(metrics)
    for seconds in (0.3, 7.0, 450.0):
        counts.first_token.observe(seconds)
        counts.ended(Finish.STOP, (), USAGE, seconds, answered=True)
    counts.gaps(0.04, 0.1)
    counts.ended(Reason.QUEUE_FULL, (), None, 0.02, answered=False)

    told = lines(metrics)
    labels = 'gen_ai_operation_name="chat",gen_ai_provider_name="fleet",gen_ai_request_model="m"'
    duration, ttft = "gen_ai_server_request_duration_seconds", "gen_ai_server_time_to_first_token_seconds"
    for bound, count in (("0.16", 0), ("0.32", 1), ("5.12", 1), ("10.24", 2), ("655.36", 3), ("+Inf", 3)):
        assert f'{duration}_bucket{{error_type="",{labels},le="{bound}"}} {count}.0' in told
    assert f'{duration}_bucket{{error_type="queue_full",{labels},le="0.02"}} 1.0' in told
    assert f'{duration}_sum{{error_type="",{labels}}} 457.3' in told
    for bound, count in (("0.25", 0), ("0.5", 1), ("7.5", 2), ("300.0", 2), ("600.0", 3)):
        assert f'{ttft}_bucket{{{labels},le="{bound}"}} {count}.0' in told
    assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1.0" in told


@pytest.mark.parametrize("operation", [EMBEDDINGS, SCORE])
def test_requests_without_tokens_have_no_times_of_tokens(operation):
    metrics = RouterProcessMetrics(CollectorRegistry())
    metrics.begin("m", operation).ended(Finish.STOP, (), USAGE, 0.5, answered=True)

    series = [line for line in lines(metrics) if f'gen_ai_operation_name="{operation}"' in line]

    assert series
    assert all(line.startswith("gen_ai_server_request_duration_seconds") for line in series)


def test_both_names_count_the_same_durations():
    metrics = RouterProcessMetrics(CollectorRegistry())
    for power in range(-40, 90):
        counts_of(metrics).first_token.observe(1.1**power)

    families = {family.name: family for family in metrics.registry.collect()}
    for name in ("fleet_ttft_seconds", "gen_ai_server_time_to_first_token_seconds"):
        for sample in families[name].samples:
            if sample.name.endswith("_bucket"):
                assert sample.value == sum(1.1**power <= float(sample.labels["le"]) for power in range(-40, 90))


@pytest.mark.parametrize("definition", [each for each in METRICS if isinstance(each, HistogramDefinition)])
def test_histograms_of_requests_reach_600_s(definition):
    assert definition.bounds[-1] >= 600
    assert list(definition.bounds) == sorted(set(definition.bounds))


@pytest.mark.parametrize("seconds", [0.154, 0.0031, 7.7])
def test_median_of_equal_times_reads_within_an_eighth(seconds):
    """Compare a time with the middle of its bucket, which Prometheus shows as the median of equal times."""
    place = bisect_left(LATENCY_BUCKETS, seconds)
    below, above = LATENCY_BUCKETS[place - 1 : place + 1]

    assert (below + above) / 2 == pytest.approx(seconds, rel=1 / 8)
    assert all(high / low <= 1.281 for low, high in pairwise(LATENCY_BUCKETS))


def test_no_series_tells_when_a_metric_was_created():
    metrics = RouterProcessMetrics(CollectorRegistry())
    counts_of(metrics).ended(Finish.STOP, (), USAGE, 0.5, answered=True)
    metrics.unserved(404)

    assert [line for line in lines(metrics) if "_created" in line] == []
    assert 'fleet_http_unserved_requests_total{status="404"} 1.0' in lines(metrics)


def test_a_log_entry_is_one_line_with_its_extras():
    # `makeLogRecord` is not used, because vLLM replaces the factory of log records that it calls.
    record = logging.LogRecord("fleet.x", logging.WARNING, __file__, 1, "worker %s", ("lost\nfake",), None)
    record.worker, record.code = "w1", 7

    line = LogLineFormatter().format(record)

    assert line.endswith("WARNING fleet.x worker lost\\nfake worker=w1 code=7")
    assert "\n" not in line


def test_control_characters_of_names_are_escaped_in_the_log():
    record = logging.LogRecord("fleet.x", logging.WARNING, __file__, 1, "worker joined", (), None)
    record.worker = "é\0\x1b[31m\r\x85\u202e"

    line = LogLineFormatter().format(record)

    assert line.endswith(r"worker joined worker=é\x00\x1b[31m\r\x85\u202e")


def test_definitions_by_field_are_named_after_their_fields():
    found = GaugeDefinition.by_field("fleet_cache_", ("tier",), (("hits", "Hits", "hits"), ("blocks", "Blocks", "")))

    assert found == {
        "hits": GaugeDefinition("fleet_cache_hits", "Hits", ("tier",), "hits"),
        "blocks": GaugeDefinition("fleet_cache_blocks", "Blocks", ("tier",)),
    }
