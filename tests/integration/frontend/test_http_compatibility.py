"""Tests of what browsers, scrapers and careless clients expect of the HTTP port."""

import os
import shutil
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version

import httpx
import pytest

from fleet.core.errors import allowed_values
from fleet.frontend.openai.bodies import ChatBody
from tests.support.frontend.frontends import Frontends, open_frontends
from tests.support.frontend.http_clients import raw_http_client
from tests.support.router.fake_router import MODEL, a_model_card

pytestmark = pytest.mark.integration

ORIGIN = {"origin": "https://chat.example"}
PREFLIGHT = {
    **ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.fixture
async def http(frontends: Frontends):
    async with httpx.AsyncClient(base_url=frontends.url, timeout=60) as client:
        yield client


async def test_preflight_of_a_browser_is_answered(http):
    answer = await http.options("/v1/chat/completions", headers=PREFLIGHT)

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert (await http.options("/v1/nothing", headers=PREFLIGHT)).status_code == 404


async def test_answers_to_pages_may_be_read_by_them(frontends, http):
    frontends.will_answer("the fox")
    body = {"prompt": "x", "max_tokens": 2}

    whole = await http.post("/v1/completions", json=body, headers=ORIGIN)
    stream = await http.post("/v1/completions", json=body | {"stream": True}, headers=ORIGIN)
    refused = await http.post("/v1/completions", json={"prompt": ""}, headers=ORIGIN)
    plain = await http.post("/v1/completions", json=body)

    for answer in (whole, stream, refused):
        assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in plain.headers


async def test_only_listed_origins_may_read_answers(model_dir):
    async with (
        open_frontends(model_dir, cors_origins=("https://chat.example",)) as frontends,
        httpx.AsyncClient(base_url=frontends.url) as http,
    ):
        listed = await http.get("/v1/models", headers=ORIGIN)
        other = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        preflight = await http.options("/v1/models", headers=PREFLIGHT | {"origin": "https://evil.example"})

    assert (listed.headers["access-control-allow-origin"], listed.headers["vary"]) == (ORIGIN["origin"], "origin")
    assert not [name for name in (*other.headers, *preflight.headers) if name.startswith("access-control")]


@pytest.mark.parametrize("names", [b"x\r\nevil: 1", "é".encode(), b"a;b"])
async def test_odd_header_names_of_a_preflight_are_not_repeated(http, names):
    try:
        answer = await http.options("/v1/models", headers={**PREFLIGHT, "access-control-request-headers": names})
    except httpx.LocalProtocolError:
        return
    assert "access-control-allow-headers" not in answer.headers
    assert "evil" not in answer.headers


async def test_slash_at_the_end_of_a_path_is_ignored(frontends, http):
    frontends.will_answer("x")

    assert (await http.get("/v1/models/")).json()["data"][0]["id"] == "tiny"
    assert (await http.post("/v1/completions/", json={"prompt": "x", "max_tokens": 1})).status_code == 200
    assert (await http.get("/")).status_code == 404


async def test_requests_that_nobody_serves_are_counted_by_status(frontends, http):
    await http.get("/v1/nothing")
    await http.get("/v1/nothing/else")
    await http.get("/v1/completions")
    await http.post("/v1/completions", content=b"x", headers={"content-type": "text/plain"})

    counted = frontends.generation.metrics.registry.get_sample_value
    name = "fleet_http_unserved_requests_total"
    assert [counted(name, {"status": status}) for status in ("404", "405", "415")] == [2.0, 1.0, 1.0]


ANSWERS = [
    ("GET", "/v1/models", b"", 200),
    ("GET", "/v1/models/tiny", b"", 200),
    ("GET", "/v1/models/other", b"", 404),
    ("GET", "/version", b"", 200),
    ("POST", "/tokenize", b'{"prompt": "the fox"}', 200),
    ("POST", "/tokenize", b'{"prompt": 1}', 400),
    ("POST", "/detokenize", b'{"tokens": [5]}', 200),
    ("POST", "/v1/completions", b'{"prompt": "the fox", "max_tokens": 2}', 200),
    ("GET", "/v1/nothing", b"", 404),
    ("GET", "/v1/completions", b"", 405),
    ("OPTIONS", "/v1/completions", b"", 200),
    ("POST", "/v1/completions", None, 415),
    ("POST", "/v1/embeddings", None, 415),
    ("POST", "/v1/messages", None, 415),
    ("POST", "/v1/messages/count_tokens", b"{}", 400),
    ("POST", "/v1/completions", b"x" * 2000, 413),
    ("POST", "/v1/messages", b"x" * 2000, 413),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERS)
async def test_every_answer_has_its_date_and_the_id_of_its_request(model_dir, method, path, body, status):
    """Check the client's id, a new one for each request without, and one in place of an id that cannot be used."""
    headers = {"content-type": "text/plain" if body is None else "application/json"}
    ids = []
    async with (
        open_frontends(model_dir, max_body_bytes=1000) as frontends,
        httpx.AsyncClient(base_url=frontends.url, timeout=60) as http,
    ):
        frontends.will_answer("the fox")
        for sent in ({"x-request-id": "mine-1"}, {"x-request-id": "not usable"}, {}):
            answer = await http.request(method, path, content=body or b"", headers={**headers, **sent})
            assert answer.status_code == status
            assert parsedate_to_datetime(*answer.headers.get_list("date")) <= datetime.now(UTC)
            (found,) = answer.headers.get_list("x-request-id")
            assert answer.headers.get("request-id", found) == found
            assert ("request-id" in answer.headers) == path.startswith("/v1/messages")
            ids.append(found)
    assert ids[0] == "mine-1"
    assert len({*ids, "mine-1", "not usable"}) == 4


async def test_refusals_of_malformed_heads_have_an_id(frontends):
    for sent, mine in ((b"GET /a HTTP/1.1\r\nx-request-id: mine\r\n\r\n", True), (b"nonsense\r\n\r\n", False)):
        async with raw_http_client(frontends) as peer:
            await peer.send(sent)
            status, headers, _ = await peer.answer()
        assert status == 400
        assert (headers["x-request-id"] == "mine") == mine


async def test_models_have_the_same_creation_time_at_each_call(http, monkeypatch):
    first = (await http.get("/v1/models")).json()
    monkeypatch.setattr("fleet.frontend.openai.service.unix_seconds", lambda: 1)

    assert (await http.get("/v1/models")).json() == first
    assert (await http.get("/v1/models/tiny")).json() == first["data"][0]
    assert first["data"][0]["created"] > 1_700_000_000


async def test_model_is_found_by_its_percent_encoded_name(frontends, http):
    """Check the path that the OpenAI client makes of a name such as those of the hub."""
    frontends.router.cards = (*frontends.router.cards, a_model_card(name="org/ada", parent=MODEL, revision="r"))

    assert (await http.get("/v1/models/org%2Fada")).json()["id"] == "org/ada"
    assert (await http.get("/v1/models/org/ada")).json()["id"] == "org/ada"


async def test_error_about_an_unknown_model_lists_the_served_ones(frontends, http):
    frontends.router.cards = (*frontends.router.cards, a_model_card(name="org/ada", parent=MODEL, revision="r"))

    message = (await http.get("/v1/models/org%2Fnobody")).json()["error"]["message"]

    assert message == "model: 'org/nobody' is not served here; served: org/ada, tiny"


async def test_creation_time_of_a_model_is_that_of_its_files(model_dir, tmp_path):
    """Check that routers with the same files agree, whenever they have started."""
    folder = shutil.copytree(model_dir, tmp_path / "model")
    os.utime(folder / "config.json", (1_750_000_000, 1_750_000_000))
    adapter = a_model_card(name="ada", parent=MODEL, revision="r")
    async with open_frontends(folder) as frontends, httpx.AsyncClient(base_url=frontends.url) as http:
        frontends.router.cards = (*frontends.router.cards, adapter)
        listed = (await http.get("/v1/models")).json()["data"]

    assert [(each["id"], each["created"]) for each in listed] == [("tiny", 1_750_000_000), ("ada", 1_750_000_000)]


async def test_metrics_are_offered_as_openmetrics(http):
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"

    opened = await http.get("/metrics", headers={"accept": accepted})
    plain = await http.get("/metrics", headers={"accept": "text/plain"})

    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "# EOF" not in plain.text


async def test_metrics_have_no_creation_times(frontends, http):
    frontends.will_answer("x")
    await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})

    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        assert "_created" not in (await http.get("/metrics", headers={"accept": accept})).text


async def test_wrong_enumeration_value_is_told_the_right_ones(http):
    refused = await http.post("/v1/completions", json={"prompt": "x", "fleet": {"placement": "everywhere"}})

    error = refused.json()["error"]
    assert error["param"] == "fleet.placement"
    assert error["message"].endswith("use auto, aggregated or disaggregated")
    assert allowed_values(ChatBody, ".fleet.kv_path") == ["store", "direct"]


async def test_unknown_fields_are_refused_where_the_settings_say_so(model_dir):
    async with (
        open_frontends(model_dir, unknown_fields="refuse") as frontends,
        httpx.AsyncClient(base_url=frontends.url) as http,
    ):
        frontends.will_answer("x")
        refused = await http.post("/v1/completions", json={"prompt": "x", "somthing": 1})
        served = await http.post("/v1/completions", json={"prompt": "x", "user": "u", "max_tokens": 1})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "somthing")
    assert served.status_code == 200


async def test_routes_of_vllm_tell_version_and_readiness(frontends, http):
    known = await http.get("/version")
    alive = [await http.get("/ping"), await http.post("/ping")]
    frontends.router.cards = ()
    unready = await http.get("/ping")

    assert known.json() == {"version": version("fleet-serving")}
    assert [(answer.status_code, answer.content) for answer in alive] == [(200, b"")] * 2
    assert unready.status_code == 503
