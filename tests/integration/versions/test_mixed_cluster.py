"""Tests of clusters in which processes of this version and of the previous one work together, under load by real clients."""

import pytest

from fleet.client import Client
from tests.support.kvstore.builders import a_short_folder
from tests.support.versions.mixed_cluster import Clients, MixedCluster
from tests.support.versions.previous_version import ROOT, NoPreviousVersion, previous_tree
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

WORKERS = ("w0", "w1")
SESSIONS = 100  # sessions that one router binds before the other one is asked
EACH = 6  # answers of each kind that every combination of versions must give before the next process is replaced


@pytest.fixture(scope="module")
def previous():
    try:
        return previous_tree()
    except NoPreviousVersion as error:
        pytest.skip(f"no previous version to run: {error}")


@pytest.fixture
def cluster(model_dir):
    with a_short_folder() as folder:
        running = MixedCluster(folder, model_dir)
        try:
            yield running
        finally:
            running.close()


def protocols_of(cluster, router):
    """Return the protocol version that a router of this version uses with each worker."""
    with Client(cluster.routers[router]) as client:
        status = client.status()
        assert not status.incompatible
        return {worker.worker_id: worker.protocol for pool in status.pools for worker in pool.workers}


@pytest.mark.parametrize("upgrades", [True, False], ids=["upgrade", "rollback"])
def test_rolling_change_of_version_fails_no_request(cluster, previous, upgrades):
    """The order of the steps makes every pair of neighbours be of different versions for a while."""
    before, after = (previous, ROOT) if upgrades else (ROOT, previous)
    cluster.start_store(before)
    for name in cluster.routers:
        cluster.start_router(before, name)
    cluster.start_worker(before, "p0", "prefill")
    cluster.start_worker(before, "d0", "decode")
    cluster.wait_for_workers("p0", "d0")
    with Clients(list(cluster.routers.values())) as clients:

        def serves(*workers):
            cluster.wait_for_workers(*workers)
            clients.wait_for(EACH, lambda: clients.answered)
            clients.wait_for(EACH, lambda: clients.handed_over)

        serves("p0", "d0")

        cluster.stop("store")
        cluster.start_store(after)
        serves("p0", "d0")  # workers and routers with a store of the other version

        cluster.start_worker(after, "d1", "decode")
        cluster.wait_for_workers("p0", "d0", "d1")
        cluster.stop("d0")
        serves("p0", "d1")  # a pair of both versions, and a worker with routers of the other version

        cluster.stop("a")
        cluster.start_router(after, "a")
        serves("p0", "d1")  # peer routers of both versions, and a router with a worker of the other version
        if upgrades:
            assert protocols_of(cluster, "a") == {"p0": 1, "d1": 2}

        cluster.start_worker(after, "p1", "prefill")
        cluster.wait_for_workers("p0", "p1", "d1")
        cluster.stop("p0")
        serves("p1", "d1")

        cluster.stop("b")
        cluster.start_router(after, "b")
        serves("p1", "d1")
        clients.stop()
    assert not clients.errors
    if upgrades:
        assert protocols_of(cluster, "b") == {"p1": 2, "d1": 2}


def worker_of(number):
    """Return the worker to which the test binds a session."""
    return WORKERS[number % len(WORKERS)]


def ask(client, number, pin=""):
    """Send a request of a session, with a prompt that no worker has in its cache."""
    prompt = [3 + number, *range(3, 10)]
    return client.complete(prompt, max_tokens=2, session=f"s{number}", pin=pin, ignore_eos=True, timeout_seconds=60)


def bound_worker(client, request_id):
    """Return the worker that the router preferred for a request because of its session; None if it knew no binding."""
    (placed,) = client.explain(request_id)
    return next((each.worker_id for each in placed.candidates if each.parts.get("session")), None)


@pytest.mark.parametrize("first", ["previous", "this"])
def test_session_bound_by_a_router_of_other_version_is_kept(cluster, previous, first):
    versions = {"a": previous, "b": ROOT} if first == "previous" else {"a": ROOT, "b": previous}
    cluster.start_store(ROOT)
    for name, tree in versions.items():
        cluster.start_router(tree, name)
    for name in WORKERS:
        cluster.start_worker(ROOT, name, "both")
    cluster.wait_for_workers(*WORKERS)
    with Client(cluster.routers["a"]) as binding, Client(cluster.routers["b"]) as using:
        for number in range(SESSIONS):
            ask(binding, number, pin=worker_of(number))
        latest_first = reversed(range(SESSIONS))

        def knows_the_next() -> bool:
            # A further request of the same session would find the binding that this one makes.
            number = next(latest_first, None)
            assert number is not None, "the other router knows none of the sessions"
            return bound_worker(using, ask(using, number).request_id) == worker_of(number)

        eventually(knows_the_next)
        for number in range(10):  # these were told before the latest one
            answer = ask(using, number)
            assert bound_worker(using, answer.request_id) == worker_of(number)
            assert [phase.worker_id for phase in answer.kv] == [worker_of(number)]
