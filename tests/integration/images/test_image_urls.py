"""Images at URLs in requests of the three APIs, from the client's socket to the router's stream."""

import asyncio
import base64
from contextlib import asynccontextmanager
from hashlib import sha256

import httpx
import pytest

from fleet.core.errors import RequestRejected
from fleet.core.requests import RemoteImage
from fleet.core.system_clock import SystemClock, unix_nanoseconds
from fleet.frontend.images.fetcher import ImageFetcher
from fleet.frontend.openai.requests import MAX_REPEATED_IMAGE_BYTES
from fleet.router.settings.images import ImageSettings
from fleet.router.tenants import TenantSettings
from fleet.tracing.request_traces import RequestTraces
from kvstore.tracing.settings import TracingSettings
from kvstore.tracing.spans import EndedSpans, SpanIds, SpanRecord
from tests.support.builders import MODEL, a_request
from tests.support.counted_calls import CountedCalls, count_calls
from tests.support.frontend.frontends import Frontends, open_frontends
from tests.support.frontend.text_model import EOS, write_seeing_model
from tests.support.router.fake_router import a_model_card
from tests.support.servers.images import an_image, an_image_server
from tests.support.waiting import until

pytestmark = pytest.mark.integration

RED, BLUE = an_image("red"), an_image("blue")


@pytest.fixture
async def server():
    async with an_image_server() as running:
        yield running


@asynccontextmanager
async def fetching_frontends(folder, server, tenants=None, *, fetch=True, tracing=None, **settings):
    """Open frontends in front of a model that takes images; `settings` are those of the fetcher."""
    given = {"hosts": (f"127.0.0.1:{server.port}",), "networks": ("127.0.0.0/8",), "timeout_seconds": 60.0} | settings
    fetcher = ImageFetcher(ImageSettings(fetch_urls=True, **given)) if fetch else None
    async with open_frontends(write_seeing_model(folder), tenants, image_loader=fetcher, tracing=tracing) as frontends:
        frontends.router.cards = (a_model_card(takes_images=True),)
        frontends.will_answer("the quick brown fox", then=[EOS])
        yield frontends
        if fetcher is not None:
            assert fetcher.held_bytes == 0


def a_chat(*urls: str, **fields) -> dict:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *images]}],
        "max_tokens": 20,
        **fields,
    }


def a_response(url: str) -> dict:
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": url}]
    return {"model": MODEL, "instructions": "Be brief.", "input": [{"role": "user", "content": parts}]}


def a_message(url: str) -> dict:
    source = {"type": "url", "url": url}
    blocks = [{"type": "text", "text": "?"}, {"type": "image", "source": source}]
    return {"model": MODEL, "system": "Be brief.", "max_tokens": 20, "messages": [{"role": "user", "content": blocks}]}


APIS = [
    ("/v1/chat/completions", a_chat, "messages[0].content[1].image_url.url"),
    ("/v1/responses", a_response, "input[0].content[1].image_url"),
    ("/v1/messages", a_message, "messages[0].content[1].source.url"),
]


async def post(frontends: Frontends, body: dict, path: str = "/v1/chat/completions", **options) -> httpx.Response:
    async with httpx.AsyncClient(base_url=frontends.url, timeout=60) as client:
        return await client.post(path, json=body, **options)


def outcomes(frontends: Frontends) -> dict[str, float]:
    """Return how many requests ended in which way."""
    return {
        sample.labels["outcome"]: sample.value
        for metric in frontends.registry.collect()
        for sample in metric.samples
        if sample.name == "fleet_requests_total" and sample.value
    }


@pytest.mark.parametrize(("path", "body", "_"), APIS)
async def test_image_at_a_url_reaches_the_worker(tmp_path, server, path, body, _):
    async with fetching_frontends(tmp_path, server) as frontends:
        answer = await post(frontends, body(server.url("/red.png")), path)

        assert answer.status_code == 200, answer.text
        assert [arrived.images for arrived in frontends.router.submitted] == [(RED,)]


@pytest.mark.parametrize(("path", "body", "field"), APIS)
async def test_image_that_cannot_be_fetched_is_named_by_its_field(tmp_path, server, path, body, field):
    async with fetching_frontends(tmp_path, server) as frontends:
        answer = await post(frontends, body(server.url("/none")), path)

        assert answer.status_code == 400
        assert f"{field}: cannot be fetched: the server answers with status 404" in answer.json()["error"]["message"]
        assert frontends.router.submitted == []
        assert outcomes(frontends) == {"invalid_argument": 1}


@pytest.mark.parametrize(("path", "body", "field"), APIS)
async def test_image_at_a_url_is_refused_unless_a_setting_allows_it(tmp_path, server, path, body, field):
    async with fetching_frontends(tmp_path, server, fetch=False) as frontends:
        answer = await post(frontends, body(server.url("/red.png")), path)

        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
        assert "images.fetch_urls" in answer.json()["error"]["message"]
    assert server.seen == []


async def test_fetched_and_sent_images_are_blocks_of_one_kind(tmp_path, server):
    """Compare the block keys of a fetched image with those of the same image in the request."""
    data = "data:image/png;base64," + base64.b64encode(RED).decode()
    async with fetching_frontends(tmp_path, server) as frontends:
        for urls in ((server.url("/red.png"), data), (data, server.url("/red.png")), (data, server.url("/blue"))):
            assert (await post(frontends, a_chat(*urls))).status_code == 200

        one, same, other = frontends.router.submitted
        assert one.images == same.images == (RED, RED)
        assert other.images == (RED, BLUE)
        assert one.keys == same.keys


async def test_several_answers_fetch_their_image_once(tmp_path, server):
    async with fetching_frontends(tmp_path, server) as frontends:
        answer = await post(frontends, a_chat(server.url("/red.png"), n=3))

        assert len(answer.json()["choices"]) == 3
        assert [arrived.images for arrived in frontends.router.submitted] == [(RED,)] * 3
    assert len(server.seen) == 1


async def test_image_too_large_for_several_answers_is_refused(tmp_path, server):
    url = server.url(f"/stated?bytes={MAX_REPEATED_IMAGE_BYTES // 4}")
    async with fetching_frontends(tmp_path, server) as frontends:
        assert (await post(frontends, a_chat(url, n=3))).status_code == 200
        answer = await post(frontends, a_chat(url, n=4))

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
        assert len(frontends.router.submitted) == 3


async def test_nothing_is_fetched_for_an_unknown_client_or_model(tmp_path, server):
    tenants = {"acme": TenantSettings(api_key_sha256=("a" * 64,))}
    async with fetching_frontends(tmp_path, server, tenants) as frontends:
        for fields in ({}, {"n": 2}):
            answer = await post(frontends, a_chat(server.url("/red.png"), **fields), headers={"x-api-key": "wrong"})
            assert answer.status_code == 401
    async with fetching_frontends(tmp_path, server) as frontends:
        frontends.router.cards = (a_model_card(),)
        answer = await post(frontends, a_chat(server.url("/red.png")))
        assert "takes no images" in answer.json()["error"]["message"]
        answer = await post(frontends, a_chat(server.url("/red.png"), temperature=9))
        assert answer.json()["error"]["param"] == "temperature"

    assert server.seen == []


async def test_tenant_is_charged_only_after_its_images_are_there(tmp_path, server):
    async with fetching_frontends(tmp_path, server) as frontends:
        asked = asyncio.create_task(post(frontends, a_chat(server.url("/silent"))))
        await until(lambda: server.silent)

        assert frontends.router.submitted == []
        assert all(usage.prompt_tokens == 0 for usage in frontends.tenants.usage().values())
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: server.left == 1)
        await until(lambda: frontends.generation.running == 0)


@pytest.mark.parametrize("answers", [1, 2])
async def test_nothing_is_fetched_for_a_tenant_over_its_limit(tmp_path, server, answers):
    """Charge each answer once, and refuse the next request before its image is fetched."""
    tenants = {"acme": TenantSettings(requests_per_minute=answers)}
    fields = {"n": answers, "fleet": {"tenant": "acme"}}
    async with fetching_frontends(tmp_path, server, tenants) as frontends:
        assert (await post(frontends, a_chat(server.url("/red.png"), **fields))).status_code == 200
        answer = await post(frontends, a_chat(server.url("/blue"), **fields))

        assert answer.status_code == 429
        assert "has used up its" in answer.json()["error"]["message"]
        assert frontends.tenants.usage()["acme"].requests == answers
    assert len(server.seen) == 1


async def test_nothing_is_fetched_for_more_answers_than_the_limit(tmp_path, server):
    tenants = {"acme": TenantSettings(requests_per_minute=2)}
    async with fetching_frontends(tmp_path, server, tenants) as frontends:
        answer = await post(frontends, a_chat(server.url("/red.png"), n=3, fleet={"tenant": "acme"}))

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert server.seen == []


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
async def test_images_are_fetched_for_as_many_requests_as_are_left(tmp_path, server, fields):
    tenants = {"acme": TenantSettings(requests_per_minute=2)}
    fields = {"fleet": {"tenant": "acme"}, **fields}
    async with fetching_frontends(tmp_path, server, tenants) as frontends:
        body = a_chat(server.url("/silent"), **fields)
        waiting = [asyncio.create_task(post(frontends, body)) for _ in range(2)]
        await until(lambda: server.silent == 2)
        answer = await post(frontends, body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert "2 of this tenant's requests are being prepared" in answer.json()["error"]["message"]
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: server.left == 2)

        assert (await post(frontends, a_chat(server.url("/red.png"), **fields))).status_code == 200
    assert len(server.seen) == 3


class Exports:
    """The exporter's queue; the spans are made at once."""

    def __init__(self) -> None:
        self.exported = self.failed = self.overflowed = self.waiting = 0
        self.spans: list[SpanRecord] = []

    def put(self, ended: EndedSpans, share: float = 1.0) -> bool:
        self.spans += ended()
        return True


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
async def test_failed_fetch_is_in_the_clients_trace(tmp_path, server, fields, monkeypatch):
    exports, clock = Exports(), SystemClock()
    tracing = RequestTraces(TracingSettings(), exports, clock, unix_nanoseconds, SpanIds(1), lambda *_: None)
    headers = {"traceparent": f"00-{'1' * 32}-{'a' * 16}-01", "x-api-key": "key"}
    tenants = {"acme": TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),))}
    async with fetching_frontends(tmp_path, server, tenants, tracing=tracing) as frontends:

        async def failure(path: str, tenant: str = "acme", *, leaves: bool = False) -> str:
            """Return the error in the span of a request for the image at a path."""
            body = a_chat(server.url(path), fleet={"tenant": tenant}, **fields)
            asked = asyncio.create_task(post(frontends, body, headers=headers))
            if leaves:
                await until(lambda: server.silent)
                asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: exports.spans, 10)
            span = exports.spans.pop()
            assert (span.trace_id, span.parent_id) == (b"\x11" * 16, b"\xaa" * 8)
            assert exports.spans == []
            return span.attributes["error.type"]

        assert await failure("/none") == "invalid_argument"
        assert await failure("/red.png", "another") == "invalid_argument"
        assert await failure("/silent", leaves=True) == "cancelled"
        monkeypatch.setattr("fleet.frontend.images.fetcher.checked_pixels", None)  # a fault of Fleet's own code
        assert await failure("/red.png") == "internal"


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
async def test_client_that_leaves_cancels_the_fetch(tmp_path, server, fields):
    async with fetching_frontends(tmp_path, server) as frontends:
        asked = asyncio.create_task(post(frontends, a_chat(server.url("/silent"), **fields)))
        await until(lambda: server.silent)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

        await until(lambda: server.left == 1)
        await until(lambda: outcomes(frontends) == {"cancelled": 1})
        assert frontends.router.submitted == []


async def test_deadline_of_the_request_limits_the_fetch(tmp_path, server):
    async with fetching_frontends(tmp_path, server) as frontends:
        answer = await post(frontends, a_chat(server.url("/silent"), fleet={"timeout_ms": 300}))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
    assert "could not be fetched within" in answer.json()["error"]["message"]


async def test_stream_holds_the_memory_of_its_images_to_the_end(tmp_path, server):
    fetcher = ImageFetcher(
        ImageSettings(fetch_urls=True, hosts=(f"127.0.0.1:{server.port}",), networks=("127.0.0.0/8",))
    )
    async with open_frontends(write_seeing_model(tmp_path), image_loader=fetcher) as frontends:
        frontends.router.cards = (a_model_card(takes_images=True),)
        frontends.will_answer("the quick brown fox", then=[EOS])
        frontends.router.hold_after = 1
        asked = asyncio.create_task(post(frontends, a_chat(server.url("/red.png"), stream=True)))
        await until(lambda: frontends.router.steps_taken)
        assert fetcher.held_bytes == len(RED)

        frontends.router.release.set()
        assert (await asked).text.endswith("data: [DONE]\n\n")
        await until(lambda: fetcher.held_bytes == 0)


async def test_tokens_of_a_chat_with_an_image_url_are_not_counted(tmp_path, server):
    async with fetching_frontends(tmp_path, server) as frontends:
        answer = await post(frontends, a_message(server.url("/red.png")), "/v1/messages/count_tokens")

        assert "whose tokens only a worker can count" in answer.json()["error"]["message"]
    assert server.seen == []


async def test_gateway_gets_an_error_for_an_image_url(tmp_path, server):
    request = a_request(images=(b"",), remote_images=(RemoteImage(0, server.url("/red.png"), "f"),))
    async with fetching_frontends(tmp_path, server) as frontends:
        with pytest.raises(RequestRejected, match="not fetched for other programs"):
            await frontends.generation.arrival(request)
    assert server.seen == []


async def calls_of(frontends: Frontends, body: dict) -> CountedCalls:
    """Return the calls of a request in the frontend.

    Ends of earlier connections and timers run too, at any time: for each function, return the least number of several
    runs, the first of which warm up.
    """
    runs = []
    for _ in range(20):
        with count_calls() as counted:
            assert (await post(frontends, body)).status_code == 200
        runs.append(counted.by_function)
    least = CountedCalls()
    least.by_function = {each: n for each in runs[0] if (n := min(run.get(each, 0) for run in runs))}
    return least


async def test_chat_without_an_image_url_runs_no_code_for_it(tmp_path, server):
    data = "data:image/png;base64," + base64.b64encode(RED).decode()
    for urls in ((), (data, data)):
        async with fetching_frontends(tmp_path, server, fetch=False) as frontends:
            without = await calls_of(frontends, a_chat(*urls))
        async with fetching_frontends(tmp_path, server) as frontends:
            counted = await calls_of(frontends, a_chat(*urls))

        assert counted.by_function == without.by_function
        assert "frontend/images/fetcher.py" not in counted.files
        assert {"remote_images", "_fetched", "with_images"}.isdisjoint(each.co_name for each in counted.by_function)
