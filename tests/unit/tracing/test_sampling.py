"""Tests of sampling: the ratio holds, all processes decide alike, and failed and slow requests are kept."""

import random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.requests import Finish
from fleet.net.status_codes import REASON_STATUSES
from fleet.tracing.sampling import REFUSED_SHARE, KeepReason, export_share, is_sampled, keep_at_end
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import SpanIds

SETTINGS = TracingSettings(slow_first_token_seconds=2, slow_seconds=20)


def kept(outcome: Finish | Reason, first: float | None, whole: float, settings: TracingSettings = SETTINGS):
    first_token = None if first is None else Nanos(round(first * SECOND))
    return keep_at_end(settings, outcome, first_token, Nanos(round(whole * SECOND)))


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_share_of_traces_is_sampled(ratio):
    ids = SpanIds(7)
    sampled = sum(is_sampled(ids.trace_id(), ratio) for _ in range(20_000))
    assert abs(sampled - 20_000 * ratio) <= 4 * (20_000 * ratio * (1 - ratio)) ** 0.5


def test_decision_is_that_of_opentelemetry():
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    sampler, draw = TraceIdRatioBased(0.3), random.Random(1)
    for _ in range(1000):
        trace_id = draw.randbytes(16)
        theirs = sampler.should_sample(None, int.from_bytes(trace_id), "span").decision is Decision.RECORD_AND_SAMPLE
        assert is_sampled(trace_id, 0.3) is theirs


def test_failed_requests_are_kept_and_cancelled_ones_are_not():
    assert kept(Reason.WORKER_LOST, 0.1, 1) is KeepReason.ERROR
    assert kept(Reason.CANCELLED, 0.1, 1) is None
    assert kept(Reason.WORKER_LOST, 0.1, 1, TracingSettings(keep_errors=False)) is None


def test_answers_4xx_are_kept_only_if_the_cluster_has_failed():
    refused = {reason for reason in Reason if kept(reason, None, 1) is None}
    assert {reason for reason in Reason if REASON_STATUSES[reason].http < 500} - refused == {Reason.KV_MISMATCH}
    assert {reason for reason in refused if REASON_STATUSES[reason].http >= 500} == {Reason.DRAINING}
    assert kept(Reason.QUEUE_FULL, None, 3) is KeepReason.SLOW


def test_refusal_of_an_answer_that_has_begun_is_a_failure():
    assert kept(Reason.DRAINING, None, 1) is None
    assert kept(Reason.DRAINING, 0.1, 1) is KeepReason.ERROR


def share(outcome: Finish | Reason, first: float | None, whole: float) -> float:
    first_token = None if first is None else Nanos(round(first * SECOND))
    return export_share(SETTINGS, outcome, first_token, Nanos(round(whole * SECOND)))


def test_deadlines_of_clients_get_the_share_of_refusals():
    assert kept(Reason.DEADLINE_PASSED, None, 0.001) is KeepReason.ERROR
    assert share(Reason.DEADLINE_PASSED, None, 0.001) == share(Reason.RATE_LIMITED, None, 0.001) == REFUSED_SHARE
    assert share(Reason.DEADLINE_PASSED, None, 2.1) == 1.0
    assert share(Reason.DEADLINE_PASSED, 0.1, 0.2) == 1.0
    assert share(Reason.WORKER_LOST, None, 0.001) == 1.0


def test_slow_requests_are_kept():
    assert kept(Finish.STOP, 1.9, 19.9) is None
    assert kept(Finish.STOP, 2.1, 3) is KeepReason.SLOW
    assert kept(Finish.STOP, 0.1, 20.1) is KeepReason.SLOW
    assert kept(Reason.CANCELLED, None, 2.1) is KeepReason.SLOW
    never = TracingSettings(slow_first_token_seconds=0, slow_seconds=0)
    assert kept(Finish.STOP, 100, 1000, never) is None
