"""Tests of the aggregation of demand: sums over routers, restarts, gaps, and requests that do not count as demand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand, SampledRequest, WorkerLoad
from fleet.core.duration_counts import EDGES, bucket_of
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role
from fleet.planner.aggregate import STALE_AFTER, DemandAggregator
from fleet.planner.messages import MOST_TEXT, PoolName

MODEL = ModelName("m")
POOLS = {PoolName("prefill"): Role.PREFILL, PoolName("decode"): Role.DECODE, PoolName("decode-big"): Role.DECODE}
START = Nanos(100 * SECOND)


def at(seconds):
    return Nanos(START + round(seconds * SECOND))


def an_aggregator(*sources):
    return DemandAggregator(MODEL, sources or ("a",), POOLS, START)


def a_report(incarnation="1", *, uptime=1000.0, workers=(), recent=(), model=MODEL, **counters):
    return DemandReport(
        router="router-0",
        incarnation=Incarnation(incarnation),
        at=Nanos(0),
        uptime=Nanos(round(uptime * SECOND)),
        models=(ModelDemand(model=model, **counters),),
        workers=workers,
        recent=recent,
    )


def a_worker(name, model):
    return WorkerLoad(
        worker_id=WorkerId(name), model=ModelName(model), role=Role.DECODE, running=0, waiting=0, kv_used=0.0
    )


def counts(*seconds):
    found = [0] * (len(EDGES) + 1)
    for each in seconds:
        found[bucket_of(each)] += 1
    return tuple(found)


def test_histogram_that_vanishes_is_a_gap():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(arrivals=5, ttft=counts(0.1, 0.2)), at(1))
    aggregator.window(at(2))
    aggregator.hear("a", a_report(arrivals=6), at(3))

    window = aggregator.window(at(4))

    assert (window.arrivals, window.ttft) == (0, ())
    assert window.stale == ("a: the counters of router-0 went back",)


def test_counters_before_the_first_report_are_no_demand():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(arrivals=500), at(1))
    aggregator.hear("a", a_report(arrivals=530, prompt_tokens=900), at(2))

    window = aggregator.window(at(10))

    assert (window.arrivals, window.prompt_tokens, window.rate, window.stale) == (
        30,
        900,
        3.0,
        ("a: has not reported for 8 s",),
    )


def test_overflow_of_several_routers_is_summed():
    aggregator = an_aggregator("a", "b")
    for source, dollars in (("a", 0.5), ("b", 0.25)):
        aggregator.hear(source, a_report(source, arrivals=7, overflowed=3, overflow_dollars=1.0), at(0))
        told = a_report(source, arrivals=9, refused=2, overflowed=5, overflow_dollars=1.0 + dollars)
        aggregator.hear(source, told, at(1))

    window = aggregator.window(at(2))

    assert (window.arrivals, window.refused, window.overflowed, window.overflow_dollars) == (4, 4, 4, 0.75)


def test_several_routers_are_summed():
    aggregator = an_aggregator("a", "b")
    for source, arrivals in (("a", 10), ("b", 4)):
        aggregator.hear(source, a_report(source, arrivals=0, ttft=counts()), at(0))
        told = a_report(source, arrivals=arrivals, ttft=counts(0.2), queued=2, oldest_seconds=float(arrivals))
        aggregator.hear(source, told, at(1))

    window = aggregator.window(at(1))

    assert (window.arrivals, window.queued, window.oldest_seconds) == (14, 4, 10.0)
    assert window.ttft == tuple(2 * each for each in counts(0.2))
    assert window.stale == ()


def test_restarted_router_counts_from_zero():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report("1", arrivals=100), at(0))
    aggregator.hear("a", a_report("1", arrivals=110), at(1))
    aggregator.hear("a", a_report("2", uptime=1.0, arrivals=7), at(3))
    assert aggregator.window(at(3)).arrivals == 17

    aggregator.hear("a", a_report("2", uptime=2.0, arrivals=9), at(4))
    assert aggregator.window(at(4)).arrivals == 2


def test_other_models_are_not_counted():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(model=ModelName("other"), arrivals=1), at(0))
    aggregator.hear("a", a_report(model=ModelName("other"), arrivals=100), at(1))

    assert aggregator.window(at(1)).arrivals == 0


def test_window_names_the_models_that_routers_serve_instead():
    aggregator = an_aggregator("a", "b")
    aggregator.hear("a", a_report("1", model=ModelName("big"), arrivals=1), at(0))
    aggregator.hear("b", a_report("2", model=ModelName("tiny"), workers=(a_worker("decode-0", "tiny"),)), at(0))

    assert aggregator.window(at(1)).unserved == "no router serves m; they serve big, tiny"


def test_router_without_the_model_does_not_count_beside_another():
    aggregator = an_aggregator("a", "b")
    aggregator.hear("a", a_report("1", model=ModelName("big"), arrivals=1), at(0))
    aggregator.hear("b", a_report("2", workers=(a_worker("decode-0", MODEL),)), at(0))

    assert aggregator.window(at(1)).unserved == ""


@pytest.mark.parametrize(("counters", "unserved"), [
    ({}, True),
    ({"arrivals": 3, "refused": 2, "invalid": 1}, True),
    ({"arrivals": 3, "refused": 2}, False),
    ({"arrivals": 3, "finished": 3}, False),
])  # fmt: skip
def test_requests_that_were_answered_show_that_a_model_is_served(counters, unserved):
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(**counters), at(0))

    assert aggregator.window(at(1)).unserved == ("no router serves m; they have no workers" if unserved else "")


def test_silent_source_is_stale_and_its_gap_no_burst():
    aggregator = an_aggregator()
    assert aggregator.window(at(0)).stale == ("a: has not reported yet",)
    aggregator.hear("a", a_report(arrivals=10), at(0))
    aggregator.failed("a", "nobody listens there")
    assert aggregator.window(at(60)).stale == ("a: has not reported for 60 s (nobody listens there)",)

    aggregator.hear("a", a_report(arrivals=5000), at(60))
    aggregator.hear("a", a_report(arrivals=5003), at(61))
    window = aggregator.window(at(61))
    assert (window.arrivals, window.stale) == (3, ("a: sent nothing for 60 s",))
    assert aggregator.window(at(62)).stale == ()


def test_counters_that_go_back_are_a_gap():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(arrivals=10), at(0))
    aggregator.hear("a", a_report(arrivals=4), at(1))

    window = aggregator.window(at(1))

    assert (window.arrivals, window.stale) == (0, ("a: the counters of router-0 went back",))


def test_one_process_by_two_sources_counts_once():
    aggregator = an_aggregator("a", "b")
    aggregator.hear("a", a_report(arrivals=10), at(0))
    aggregator.hear("b", a_report(arrivals=12), at(0.5))
    aggregator.hear("a", a_report(arrivals=11), at(0.6))
    aggregator.hear("b", a_report(arrivals=15), at(1))

    window = aggregator.window(at(1))

    assert (window.arrivals, window.stale) == (5, ())


def test_abandoned_requests_are_taken_off_later_arrivals():
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(), at(0))
    aggregator.hear("a", a_report(arrivals=10, prompt_tokens=100), at(1))
    first = aggregator.window(at(1))
    aggregator.hear("a", a_report(arrivals=12, abandoned=4, prompt_tokens=120, uncounted_tokens=40), at(2))
    second = aggregator.window(at(2))
    aggregator.hear("a", a_report(arrivals=17, abandoned=4, prompt_tokens=170, uncounted_tokens=40), at(3))
    third = aggregator.window(at(3))

    assert [each.arrivals for each in (first, second, third)] == [10, 0, 3]
    assert [each.prompt_tokens for each in (first, second, third)] == [100, 0, 30]
    assert second.abandoned == 4


def test_workers_belong_to_the_pool_of_their_name():
    loads = [
        WorkerLoad(
            worker_id=WorkerId(name), model=MODEL, role=role, running=1, waiting=2, kv_used=0.5, start_seconds=3.0
        )
        for name, role in (
            ("decode-0", Role.DECODE),
            ("decode-big-1", Role.DECODE),
            ("x", Role.PREFILL),
            ("y", Role.BOTH),
        )
    ]
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(workers=tuple(loads)), at(0))

    window = aggregator.window(at(1))

    assert [(each.worker, each.pool) for each in window.workers] == [
        ("decode-0", "decode"),
        ("decode-big-1", "decode-big"),
        ("x", "prefill"),
        ("y", "both"),
    ]
    assert aggregator.window(at(60)).workers == ()  # the router is silent, so its workers are unknown


def test_workers_of_numbered_pools_are_told_apart():
    pools = {PoolName("decode/1"): Role.DECODE, PoolName("decode/2"): Role.DECODE}
    aggregator = DemandAggregator(MODEL, ("a",), pools, START)

    found = [aggregator.pool_of(WorkerId(name), Role.DECODE) for name in ("decode.1-0", "decode.2-7", "decode-0")]

    assert found == ["decode/1", "decode/2", "decode"]


def test_sample_is_bounded_and_in_order():
    aggregator = an_aggregator()
    for number in range(1000):
        recent = SampledRequest(model=MODEL, arrived=at(1000 - number), prompt_tokens=number, answer_tokens=1)
        aggregator.hear("a", a_report(recent=(recent, structs.replace(recent, model=ModelName("x")))), at(number))

    sample = aggregator.sample()

    assert len(sample) == 512
    assert sample[0].prompt_tokens == 999
    assert list(sample) == sorted(sample, key=lambda each: each.arrived)


steps = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(0, 20),  # arrivals
        st.integers(0, 20),  # arrivals that are abandoned later
        st.booleans(),  # the process restarts
        st.booleans(),  # a window ends
    ),
    max_size=60,
)


@given(steps)
def test_windows_together_count_each_request_once(played):
    aggregator = an_aggregator("a", "b")
    totals = {"a": [0, 0], "b": [0, 0]}
    runs = {"a": 0, "b": 0}
    began = {"a": -1000.0, "b": -1000.0}
    open_requests = {"a": 0, "b": 0}
    demanded = seen = owed = 0
    for source in totals:
        aggregator.hear(source, a_report(f"{source}0", arrivals=0), at(0))
    for second, (source, arrivals, abandoned, restarts, ends) in enumerate(played, start=1):
        if restarts:
            runs[source] += 1
            totals[source], began[source], open_requests[source] = [0, 0], second - 0.5, 0
        gone = min(abandoned, open_requests[source] + arrivals)
        open_requests[source] += arrivals - gone
        totals[source][0] += arrivals
        totals[source][1] += gone
        demanded += arrivals - gone
        for each, (total, left) in totals.items():
            told = a_report(f"{each}{runs[each]}", uptime=second - began[each], arrivals=total, abandoned=left)
            aggregator.hear(each, told, at(second))
        if ends:
            window = aggregator.window(at(second))
            assert window.arrivals >= 0
            assert window.stale == ()
            seen += window.arrivals
    seen += aggregator.window(at(len(played) + 1)).arrivals
    owed = seen - demanded
    assert owed >= 0  # abandoned requests that were not yet subtracted from later arrivals
    aggregator.hear(
        "a", a_report(f"a{runs['a']}", arrivals=totals["a"][0] + owed, abandoned=totals["a"][1]), at(len(played) + 1)
    )
    assert aggregator.window(at(len(played) + 2)).arrivals == 0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_stale_is_exactly_what_was_silent_too_long(pauses):
    aggregator = an_aggregator()
    aggregator.hear("a", a_report(), START)
    now = START
    for pause in pauses:
        now = Nanos(now + pause * SECOND)
        assert bool(aggregator.stale(now)) == (pause * SECOND > STALE_AFTER)
        aggregator.hear("a", a_report(), now)


def test_long_reason_of_a_silent_source_is_shortened():
    aggregator = an_aggregator()
    aggregator.failed("a", "x" * 1_000_000)

    (text,) = aggregator.stale(at(1))
    assert text.startswith("a: has not reported yet (xx")
    assert len(text) <= MOST_TEXT + len("a: has not reported yet ()")


def test_expected_source_is_stale_until_it_reports():
    aggregator = DemandAggregator(MODEL, (), POOLS, START)
    assert (aggregator.sources, aggregator.stale(at(1))) == ((), ())
    aggregator.expect("a")
    assert aggregator.stale(at(1)) == ("a: has not reported yet",)
    aggregator.hear("a", a_report(), at(2))
    aggregator.expect("a")

    assert (aggregator.sources, aggregator.stale(at(3))) == (("a",), ())


def test_forgotten_source_leaves_what_it_counted():
    aggregator = an_aggregator("a", "b")
    for source in ("a", "b"):
        aggregator.hear(source, a_report(source), at(0))
    aggregator.hear("a", a_report("a", arrivals=7, queued=2), at(1))
    aggregator.failed("a", "it ended")
    aggregator.forget("a")
    aggregator.hear("b", a_report("b", arrivals=3), at(1))

    window = aggregator.window(at(2))
    assert (window.arrivals, window.queued, window.stale) == (10, 0, ())
    assert aggregator.window(at(3)).arrivals == 0
    assert aggregator.stale(at(1)) == ()


def test_prefix_of_workers_names_is_left_out():
    aggregator = DemandAggregator(MODEL, (), POOLS, START, workers_prefix="llama-70b-")

    for worker, pool in (("llama-70b-decode-big-77-x", "decode-big"), ("llama-70b-decode-77-x", "decode")):
        assert aggregator.pool_of(WorkerId(worker), Role.DECODE) == pool
    assert aggregator.pool_of(WorkerId("decode-big-0"), Role.DECODE) == "decode", "no pool of that name: its role"
