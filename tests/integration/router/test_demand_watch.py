"""Tests of `WatchDemand` on the control port of a real router with simulated workers."""

from urllib.request import urlopen

import grpc
import pytest
from msgspec import structs

from fleet.client import Client
from fleet.core.clock import Nanos
from fleet.core.duration_counts import percentile
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.planner.sources.metrics import parse_page
from fleet.planner.sources.wire import BadDemandReport, decode_report
from fleet.v1 import control_pb2 as pb
from fleet.v1 import control_pb2_grpc
from tests.support.fleet_processes import fleet_up
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with fleet_up(tmp_path_factory.mktemp("up")) as up:
        yield up


def watch(cluster, **fields):
    channel = grpc.insecure_channel(cluster.endpoints["control"], options=CHANNEL_OPTIONS)
    return channel, control_pb2_grpc.ClusterStub(channel).WatchDemand(pb.WatchDemandRequest(**fields), timeout=200)


@pytest.fixture
def reports(cluster):
    channel, messages = watch(cluster)
    with channel:
        yield (decode_report(message, Nanos(0)) for message in messages)


def test_reports_count_what_clients_asked_for(cluster, reports):
    before = next(reports)
    with Client(cluster.grpc) as client:
        for _ in range(3):
            client.complete(list(range(100, 300)), max_tokens=8, ignore_eos=True)

    after = next(each for each in reports if each.models and each.models[0].finished == 3)

    (demand,) = after.models
    assert (demand.arrivals, demand.prompt_tokens, demand.answer_tokens, demand.refused) == (3, 600, 24, 0)
    assert demand.cached_tokens > 0
    assert 0.0 < percentile(demand.ttft, 1.0) < 30.0
    assert (sum(demand.tpot), sum(demand.queue_wait)) == (3, 3)
    assert after.incarnation == before.incarnation
    assert after.uptime > before.uptime
    assert sorted((each.worker_id, str(each.role)) for each in after.workers) == [
        ("decode-0", "decode"),
        ("prefill-0", "prefill"),
    ]
    assert all(0.0 < each.start_seconds < 120.0 for each in after.workers)


def test_sample_brings_each_request_once(cluster, reports):
    next(reports)
    with Client(cluster.grpc) as client:
        client.complete(list(range(1000, 1100)), max_tokens=5, ignore_eos=True)

    lists = ([each for each in report.recent if each.prompt_tokens == 100] for report in reports)
    first = next(each for each in lists if each)  # the stream may still hold reports from before the request

    (asked,) = [*first, *next(lists), *next(lists)]
    assert (asked.answer_tokens, len(asked.block_keys)) == (5, 100 // asked.block_tokens)


def test_page_of_metrics_says_the_same(cluster, reports):
    with Client(cluster.grpc) as client:
        client.complete(list(range(2000, 2100)), max_tokens=5, ignore_eos=True)

    def page_between_equal_reports():
        """Read the page; return it with the reports made just before and just after it if they count the same."""
        before = next(reports)
        with urlopen(f"http://{cluster.endpoints['health'].removeprefix('http://')}/metrics", timeout=60) as page:
            (read,) = parse_page(page.read().decode(), Nanos(0))
        for after in reports:
            if after.uptime > read.uptime:
                break
            before = after
        same = before.uptime <= read.uptime and counts(before) == counts(after)
        return (read, after) if same else None

    read, watched = eventually(page_between_equal_reports)

    assert read.incarnation == watched.incarnation
    assert counts(read) == counts(watched)
    assert sum(each.finished for each in read.models) > 0
    assert {each.worker_id for each in read.workers} == {each.worker_id for each in watched.workers}


def counts(report):
    """Return what a report says of the models, except for ages, which change with every reading."""
    return [structs.replace(each, oldest_seconds=0.0) for each in report.models]


def test_other_page_is_refused():
    with pytest.raises(BadDemandReport, match="fleet_demand_uptime_seconds"):
        parse_page("# HELP x y\n# TYPE x gauge\nx 1.0\n", Nanos(0))


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan"), -1.0])
def test_impossible_durations_are_refused_by_field(seconds):
    old = pb.DemandReport(router_id="r", incarnation="i", uptime_seconds=seconds)
    early = pb.DemandReport(router_id="r", incarnation="i", recent=[pb.SampledRequest(age_seconds=seconds)])

    for message, field in ((old, "uptime_seconds: "), (early, "recent.age_seconds: ")):
        with pytest.raises(BadDemandReport, match=field):
            decode_report(message, Nanos(0))


@pytest.mark.parametrize("field", ["prompt_tokens", "answer_tokens", "block_tokens"])
def test_sampled_request_longer_than_any_context_is_refused(field):
    endless = pb.SampledRequest(**{field: 1 << 31})
    message = pb.DemandReport(router_id="r", incarnation="i", recent=[endless])

    with pytest.raises(BadDemandReport, match=f"recent.{field}: 2147483648 is above"):
        decode_report(message, Nanos(0))


def test_surplus_watcher_is_refused(cluster):
    opened = [watch(cluster) for _ in range(17)]
    try:
        refused = [each for each in map(first_error, (messages for _, messages in opened)) if each is not None]
    finally:
        for channel, _ in opened:
            channel.close()
    # A watcher of an earlier test may still count.
    assert {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "16 callers watch" in refused[0].details()


def first_error(messages):
    try:
        next(messages)
    except grpc.RpcError as error:
        return error
    return None
