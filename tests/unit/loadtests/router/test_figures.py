"""Figures of the router benchmark, computed from the measurements of rounds."""

import msgspec
import pytest

from loadtests.router.figures import (
    MeasuredRound,
    cpu_us_per_request,
    cpu_us_per_token,
    hit_rate,
    imbalance,
    missing,
    row,
    table,
)


def a_round(**fields) -> MeasuredRound:
    return MeasuredRound(
        **{
            "requests": 1000,
            "failures": 0,
            "tokens": 1000,
            "seconds": 0.5,
            "router_cpu_seconds": 0.02,
            "client_cpu_seconds": 0.01,
            "worker_cpu_seconds": 0.01,
            "ttft_seconds": 0.0001,
            "resident_bytes": 64 << 20,
            "served": (500, 500),
            "computed": (0, 0),
            **fields,
        }
    )


def test_cpu_time_is_given_per_request_and_token():
    measured = a_round(requests=64, tokens=64 * 256, router_cpu_seconds=0.08192)

    assert cpu_us_per_request(measured) == pytest.approx(1280)
    assert cpu_us_per_token(measured) == pytest.approx(5)


def test_target_without_router_has_no_cpu_time():
    assert cpu_us_per_request(a_round(router_cpu_seconds=None)) is None


def test_round_without_answers_does_not_divide_by_zero():
    assert cpu_us_per_request(a_round(requests=0)) is None
    assert imbalance((0, 0)) is None
    assert imbalance(()) is None
    assert hit_rate(a_round()) is None


def test_imbalance_is_busiest_divided_by_mean():
    assert imbalance((10, 10, 10, 10)) == 1
    assert imbalance((30, 10, 10, 10)) == 2
    assert imbalance((5, 0, 0, 0)) == 4


def test_row_has_medians_and_spread_of_rounds():
    rounds = [a_round(router_cpu_seconds=seconds) for seconds in (0.02, 0.09, 0.03)]

    found = row("prompt-128", "fleet", rounds, None, "1.0")

    assert found.cpu_us_per_request == 30
    assert found.spread["cpu_us_per_request"] == (20, 90)
    assert (found.rounds, found.version, found.imbalance) == (3, "1.0", 1)
    assert found.router_busy == 0.06


def test_hits_are_counted_over_all_workers():
    found = row("prefix-sharing", "fleet", [a_round(blocks=400, hits=300, computed=(75, 25))], None, "")

    assert found.hit_rate == 0.75
    assert found.work_imbalance == 1.5


def test_added_latency_compares_with_same_round():
    rounds = [a_round(ttft_seconds=seconds) for seconds in (150e-6, 250e-6, 350e-6)]
    direct = [a_round(ttft_seconds=seconds, router_cpu_seconds=None) for seconds in (50e-6, 180e-6, 120e-6)]

    assert row("ttft-1", "fleet", rounds, direct, "").ttft_added_us_p50 == 100
    assert row("ttft-1", "direct", direct, direct, "").ttft_added_us_p50 is None
    assert row("prompt-128", "fleet", rounds, None, "").ttft_added_us_p50 is None


def test_memory_is_that_of_last_round():
    rounds = [a_round(resident_bytes=size << 20) for size in (50, 70, 60)]

    found = row("memory", "fleet", rounds, None, "")

    assert (found.rss_mb, found.rss_mb_by_round) == (60, (50, 70, 60))


def test_absent_target_has_row_with_reason():
    found = missing("prompt-128", "smg", "could not be installed", "1.13.0")

    assert found.cpu_us_per_request is None
    assert "smg absent: could not be installed" in table([found])


def test_failed_requests_are_counted():
    assert "7 FAILED" in table([row("prompt-128", "smg", [a_round(failures=7)], None, "")])


def test_row_is_json_with_agreed_names():
    names = {"scenario", "target", "cpu_us_per_request", "cpu_us_per_token", "ttft_added_us_p50", "rss_mb"}
    names |= {"hit_rate", "imbalance", "rounds", "spread", "version", "machine"}

    assert names <= msgspec.to_builtins(row("prompt-128", "relay", [a_round()], None, "")).keys()


def test_added_gap_needs_paced_workers():
    rounds = [a_round(gap_seconds_p99=0.0052), a_round(gap_seconds_p99=0.0056)]
    alone = [a_round(router_cpu_seconds=None, gap_seconds_p99=0.0051), a_round(gap_seconds_p99=0.0051)]

    told = row("streams", "fleet", rounds, None, "", paced=alone)

    assert told.itl_added_us_p99 == pytest.approx(300)
    assert told.spread["itl_added_us_p99"] == (pytest.approx(100), pytest.approx(500))
    assert row("streams", "direct", alone, None, "", paced=alone).itl_added_us_p99 is None
    assert row("prompts", "fleet", rounds, None, "").itl_added_us_p99 is None


def test_cpu_time_of_1000_tokens_is_in_seconds():
    told = row("streams", "fleet", [a_round(requests=64, tokens=16_384, router_cpu_seconds=0.08192)], None, "")

    assert told.cpu_s_per_1k_tokens == pytest.approx(0.005)
