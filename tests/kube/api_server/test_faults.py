"""Faults of the API server for tests: the effect of each fault on a client. Other servers have no faults."""

import threading

import httpx
import pytest

from tests.support.kube.api.running import an_api_server
from tests.support.kube.clients import Api
from tests.support.waiting import eventually

PATH = "/api/v1/namespaces/default/configmaps"


@pytest.fixture(scope="module")
def shared():
    with an_api_server() as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    for number in shared.faults():
        shared.remove_fault(int(number))


@pytest.fixture
def api(server):
    with Api(server.url) as api:
        yield api
        for each in api.get(PATH).expect(200)["items"]:
            api.delete(f"{PATH}/{each['metadata']['name']}")


def a_config(name: str = "a", **text: str):
    return {"metadata": {"name": name}, "data": text}


def now(api) -> str:
    return api.get(PATH).expect(200)["metadata"]["resourceVersion"]


def test_answer_429_has_the_retry_time(server, api):
    server.order_fault("status", verb="create", resource="configmaps", code=429, retry_after_seconds=1)

    answer = api.post(PATH, a_config())

    status = answer.refused(429, "TooManyRequests")
    assert answer.headers["Retry-After"] == "1"
    assert status["details"]["retryAfterSeconds"] == 1
    api.post(PATH, a_config()).expect(201)


def test_forbid_fault_refuses_every_sender(server, api):
    server.order_fault("forbid", times=2)

    listed = api.get(PATH).refused(403, "Forbidden")
    created = api.post(PATH, a_config()).refused(403, "Forbidden")

    words = 'cannot list resource "configmaps" in API group "" in the namespace "default"'
    assert listed["message"].startswith("configmaps is forbidden: User ")
    assert listed["message"].endswith(words)
    assert words.replace("list", "create") in created["message"]
    api.post(PATH, a_config()).expect(201)


def test_internal_error_occurs_as_often_as_ordered(server, api):
    server.order_fault("status", verb="get", name="a", code=500, skip=1, times=2)
    api.post(PATH, a_config()).expect(201)

    assert [api.get(f"{PATH}/a").code for _ in range(5)] == [200, 500, 500, 200, 200]


def test_conflict_storm_ends_after_the_ordered_conflicts(server, api):
    made = api.post(PATH, a_config()).expect(201)
    server.order_fault("status", verb="update", code=409, times=3)

    codes = [api.put(f"{PATH}/a", made | {"data": {"key": "value"}}).code for _ in range(4)]

    assert codes == [409, 409, 409, 200]


def test_a_watch_expires_after_some_events(server, api):
    start = now(api)
    server.order_fault("expire", resource="configmaps", events=1)
    api.post(PATH, a_config("a")).expect(201)
    api.post(PATH, a_config("b")).expect(201)

    events = list(api.watch(PATH, resourceVersion=start, timeoutSeconds=5))

    assert [kind for kind, _ in events] == ["ADDED", "ERROR"]
    assert (events[1][1]["code"], events[1][1]["reason"]) == (410, "Expired")


def test_a_watch_from_before_a_compaction_is_too_old(server, api):
    start = now(api)
    api.post(PATH, a_config()).expect(201)
    server.compact()

    [(kind, status)] = api.watch(PATH, resourceVersion=start, timeoutSeconds=5)

    assert (kind, status["code"]) == ("ERROR", 410)


def test_a_list_that_goes_on_after_a_compaction_is_410(server, api):
    for name in "abc":
        api.post(PATH, a_config(name)).expect(201)
    token = api.get(PATH, limit=1).expect(200)["metadata"]["continue"]
    server.compact()

    api.get(PATH, limit=1, **{"continue": token}).refused(410, "Expired")


def test_a_watch_is_cut_in_the_middle_of_an_event(server, api):
    server.order_fault("cut", verb="watch", events=1)
    start = now(api)
    api.post(PATH, a_config("a")).expect(201)
    api.post(PATH, a_config("b")).expect(201)

    events = api.watch(PATH, resourceVersion=start, timeoutSeconds=5)

    assert next(events)[0] == "ADDED"
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, ValueError)):
        next(events)


def test_an_answer_is_lost_though_the_write_was_done(server, api):
    server.order_fault("drop", verb="create")

    with pytest.raises(httpx.HTTPError):
        api.post(PATH, a_config())

    api.post(PATH, a_config()).refused(409, "AlreadyExists")


def test_an_answer_that_is_cut_in_half_is_an_error_of_the_client(server, api):
    api.post(PATH, a_config()).expect(201)
    server.order_fault("cut", verb="list")

    with pytest.raises(httpx.HTTPError):
        api.get(PATH)


def test_held_writes_of_a_former_leader_arrive_late(server, api):
    api.post(PATH, a_config()).expect(201)
    held = server.order_fault("hold", user="first", times=-1)
    answers = []

    def first() -> None:
        with Api(server.url, agent="first/1") as mine:
            answers.append(mine.patch(f"{PATH}/a", "merge", {"data": {"leader": "first"}}).code)

    leading = threading.Thread(target=first, daemon=True)
    leading.start()
    eventually(lambda: server.faults()[str(held)]["struck"] == 1)
    api.patch(f"{PATH}/a", "merge", {"data": {"leader": "second"}}).expect(200)

    server.remove_fault(held)
    leading.join(60)

    assert answers == [200]
    assert api.get(f"{PATH}/a").expect(200)["data"] == {"leader": "first"}


def test_fault_needs_all_its_conditions(server, api):
    server.order_fault("status", verb="get", resource="configmaps", namespace="default", name="b", times=-1)
    api.post(PATH, a_config("a")).expect(201)
    api.post(PATH, a_config("b")).expect(201)

    assert api.get(f"{PATH}/a").code == 200
    assert api.get(f"{PATH}/b").code == 500
    assert api.get(PATH).code == 200


def test_request_log_has_verb_object_code_and_agent(server, api):
    server.forget_requests()
    api.post(PATH, a_config()).expect(201)
    api.get(f"{PATH}/missing")

    log = [(each["verb"], each["resource"], each["name"], each["code"]) for each in server.requests()]

    assert log == [("create", "configmaps", "", 201), ("get", "configmaps", "missing", 404)]
    assert server.requests()[0]["agent"] == "fleet-tests/1"
