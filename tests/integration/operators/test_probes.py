"""Tests of deployment probes: what counts as an answer, and how everything else is reported."""

import asyncio
import ssl
from contextlib import asynccontextmanager
from hashlib import sha256

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="the extra `kubernetes` is not installed")

from aiohttp import web

from fleet.core.errors import Reason, RequestRejected
from fleet.router.tenants import TenantSettings
from operators.probes.evidence import Probe, ProbeCompletion, ProbeFailure
from operators.probes.http_probes import HttpProbeSender, router_address, service_address
from tests.support.backends.openai_servers import MODEL as RELAYED
from tests.support.backends.openai_servers import OpenAiServer, ServerExchange, a_relay, five_tokens
from tests.support.builders import MODEL
from tests.support.certificates import Authority
from tests.support.frontend.frontends import open_frontends
from tests.support.waiting import until

pytestmark = pytest.mark.integration

KEY = "sk-of-the-operator"
TENANTS = {"probes": TenantSettings(api_key_sha256=(sha256(KEY.encode()).hexdigest(),))}
SECONDS = 60.0


def a_probe(worker="w1", *, pair=False, router_address="10.0.0.1", wants_vector=False):
    return Probe(
        namespace="ns",
        deployment="dd",
        service="dd-router",
        model=MODEL,
        worker=worker,
        pair=pair,
        wants_vector=wants_vector,
        router_address=router_address,
    )


def probes(url, keys=None, seconds=SECONDS, router=None, *, insecure=True):
    """Probe the listener through the Service, and at the router pod's address if it differs."""

    def service(namespace, name):
        assert (namespace, name) == ("ns", "dd-router")
        return url.removeprefix("http://")

    def router_address(host):
        assert host == "10.0.0.1"
        return (router or url).removeprefix("http://")

    return HttpProbeSender(keys or {}, seconds, insecure=insecure, service=service, router=router_address)


@asynccontextmanager
async def exchange(content, status=200, heard=None, certificate=None):
    """Run a server that gives everybody the same answer, over TLS if it has a certificate."""

    async def answer(request):
        if heard is not None:
            heard.append((request.headers, msgspec.json.decode(await request.read())))
        if content is None:
            await asyncio.Event().wait()
        headers = {"Location": "http://127.0.0.1:9/"} if status == 302 else {}
        return web.Response(status=status, body=content, content_type="application/json", headers=headers)

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    application.router.add_post("/pooling", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        tls = None
        if certificate:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(certificate["certificate"], certificate["key"])
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def a_completion(*phases, tokens=1):
    kv = [
        {
            "phase": phase,
            "worker_id": worker,
            "prompt_blocks": blocks,
            "origins": [{"source": source, "blocks": blocks}],
        }
        for phase, worker, source, blocks in phases
    ]
    content = {"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}, "fleet": {"kv": kv}}
    return msgspec.json.encode(content)


DEEP = b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
PREFILL = ("prefill", "p1", "computed", 9)


async def test_completion_by_the_requested_worker_is_an_answer(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.will_answer("A")
        found = [await probes(frontends.url).ask(a_probe()) for _ in range(2)]

        one, other = frontends.router.submitted
        assert found == [ProbeCompletion(), ProbeCompletion()]
        assert (one.pin, one.sampling.max_tokens) == ("w1", 1)
        assert one.tokens[:64] != other.tokens[:64], "no cache has the prompt"
        assert await probes(frontends.url).ask(a_probe("another")) == ProbeFailure(200, "another worker answered")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"data": [{"data": [0.5, 1]}], "fleet": {"workers": ["w1"]}}, ProbeCompletion()),
        ({"data": [{"data": [0.5]}], "fleet": {"workers": ["w2"]}}, ProbeFailure(200, "another worker answered")),
        ({"data": [{"data": [0.5]}]}, ProbeFailure(200, "another worker answered")),
        ({"data": [{"data": []}], "fleet": {"workers": ["w1"]}}, ProbeFailure(200, "the answer has no vector")),
        ({"choices": []}, ProbeFailure(200, "the answer is not a vector")),
    ],
)
async def test_vector_by_the_requested_worker_is_an_answer(answer, found):
    heard = []
    async with exchange(msgspec.json.encode(answer), heard=heard) as url:
        assert await probes(url).ask(a_probe(wants_vector=True)) == found

    [(_, sent)] = heard
    assert (sent["model"], sent["fleet"]["pin"]) == (MODEL, "w1")


async def test_rejection_by_the_router_is_reported_in_its_words(model_dir):
    async with open_frontends(model_dir) as frontends:
        frontends.router.refuse = RequestRejected(Reason.NO_WORKER, "pin: w1 is draining;\n try later")

        found = await probes(frontends.url).ask(a_probe())

    assert found == ProbeFailure(503, "no_worker: pin: w1 is draining; try later")


async def test_key_is_sent_only_to_its_own_deployment(model_dir):
    async with open_frontends(model_dir, TENANTS) as frontends:
        frontends.will_answer("A")

        async def asked(**keys):
            return await probes(frontends.url, keys).ask(a_probe())

        assert await asked(**{"ns/dd": KEY}) == ProbeCompletion()
        assert await asked(**{"ns/other": KEY}) == ProbeFailure(401, "its routers want an API key", wants_key=True)
        assert await asked(**{"ns/dd": "sk-wrong"}) == ProbeFailure(
            401, "its routers do not take the key", wants_key=True
        )

    refusal = {"error": {"code": "internal", "message": f"Bearer {KEY} is bad"}}
    async with exchange(b"{}", 401) as service, exchange(msgspec.json.encode(refusal), 500) as router:
        found = await probes(service, {"ns/dd": KEY}, router=router).ask(a_probe())
        assert found == ProbeFailure(500, "internal: Bearer (key) is bad")


async def test_key_needs_a_setting_that_allows_a_plain_connection(model_dir):
    heard = []
    async with open_frontends(model_dir, TENANTS) as frontends, exchange(b"{}", 401, heard) as router:
        found = await probes(frontends.url, {"ns/dd": KEY}, router=router, insecure=False).ask(a_probe())

    assert (found.status, found.wants_key, found.key_withheld) == (401, True, True)
    assert "in the clear" in found.text
    assert heard == []


@pytest.mark.parametrize("tls", [False, True])
async def test_probe_speaks_tls_exactly_to_routers_with_tls(tmp_path, tls):
    content = a_completion(("aggregated", "w1", "computed", 1))
    async with exchange(content, certificate=Authority(tmp_path, "some").issue("router")) as url:
        found = await probes(url).ask(msgspec.structs.replace(a_probe(), tls=tls))

    assert isinstance(found, ProbeCompletion if tls else ProbeFailure)


async def test_key_is_withheld_from_routers_with_unverified_tls(tmp_path):
    heard = []
    async with exchange(b"{}", 401, heard, Authority(tmp_path, "some").issue("router")) as url:
        probe = msgspec.structs.replace(a_probe(), tls=True)
        found = await probes(url, {"ns/dd": KEY}, insecure=False).ask(probe)

    assert found.key_withheld
    assert "does not verify the certificate" in found.text
    assert [headers.get("authorization") for headers, _ in heard] == [None]


async def test_redirected_service_never_sees_the_key(model_dir):
    elsewhere = []
    async with open_frontends(model_dir, TENANTS) as frontends, exchange(b"{}", 401, elsewhere) as service:
        frontends.will_answer("A")
        bound = probes(service, {"ns/dd": KEY}, router=frontends.url)

        assert await bound.ask(a_probe()) == ProbeCompletion()
        assert await bound.ask(a_probe(router_address="")) == ProbeFailure(
            0, "its routers want an API key, and none of them has an address"
        )

    assert len(elsewhere) == 2
    assert not any("authorization" in {name.lower() for name in headers} for headers, _ in elsewhere)
    assert KEY not in str(elsewhere)


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        (RequestRejected(Reason.QUEUE_FULL, "it would wait about 31 s"), ProbeFailure(429, "queue_full", busy=True)),
        (RequestRejected(Reason.RATE_LIMITED, "60 requests a minute"), ProbeFailure(429, "rate_limited", busy=True)),
        (RequestRejected(Reason.NO_WORKER, "nobody serves it"), ProbeFailure(503, "no_worker: nobody serves it")),
        (RequestRejected(Reason.DEADLINE_PASSED, "too late"), ProbeFailure(504, "deadline_passed: too late")),
    ],
)
async def test_full_router_differs_from_a_failing_one(model_dir, refused, found):
    async with open_frontends(model_dir) as frontends:
        frontends.router.refuse = refused

        assert await probes(frontends.url).ask(a_probe()) == found


async def test_foreign_429_proves_nothing(model_dir):
    for content in (b"slow down", b'{"error": {"code": "internal", "message": "x"}}'):
        async with exchange(content, 429) as url:
            assert not (await probes(url).ask(a_probe())).busy


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ([PREFILL, ("decode", "w1", "direct", 9)], ProbeCompletion(True)),
        ([PREFILL, ("decode", "w1", "store", 9)], ProbeCompletion(True)),
        ([PREFILL, ("decode", "w1", "computed", 9)], ProbeCompletion(False)),
        ([PREFILL, ("decode", "w1", "computed", 1)], ProbeCompletion(None)),
        ([("decode", "w1", "computed", 9)], ProbeFailure(200, "no prefill worker computed the prompt")),
        ([("aggregated", "w1", "computed", 9)], ProbeFailure(200, "another worker answered")),
    ],
)
async def test_pair_has_answered_when_both_pools_took_part(phases, found):
    heard = []
    async with exchange(a_completion(*phases), heard=heard) as url:
        assert await probes(url).ask(a_probe(pair=True)) == found

    [(_, asked)] = heard
    assert asked["fleet"] == {"pin": "w1", "placement": "disaggregated", "timeout_ms": 0.9 * SECONDS * 1000}
    assert (asked["max_tokens"], asked["ignore_eos"]) == (2, True), "the first token is the prefill worker's"


@pytest.mark.parametrize(
    ("content", "status", "found"),
    [
        (b"<html>hunter2</html>", 502, ProbeFailure(502, "the answer is not a router's error")),
        (
            b'{"error": {"code": "hunter2", "message": "hunter2"}}',
            500,
            ProbeFailure(500, "the answer is not a router's error"),
        ),
        (b"hunter2", 200, ProbeFailure(200, "the answer is not a completion")),
        (b"[" * 100_000, 200, ProbeFailure(200, "the answer is not a completion")),
        (DEEP, 200, ProbeFailure(200, "the answer is not a completion")),
        (DEEP, 500, ProbeFailure(500, "the answer is not a router's error")),
        (
            b'{"error": {"code": "internal", "message": "\\u001b[31mred\\u0000 \\u202eder"}}',
            500,
            ProbeFailure(500, "internal: [31mred der"),
        ),
        (a_completion(tokens=0), 200, ProbeFailure(200, "the completion has no token")),
        (a_completion(), 200, ProbeFailure(200, "another worker answered")),
        (a_completion(), 302, ProbeFailure(302, "the answer is not a router's error")),
        (None, 200, ProbeFailure(0, "no answer within 0.2 s")),
    ],
    ids=range(11),
)
async def test_other_answers_fail_the_probe_and_are_not_quoted(content, status, found):
    async with exchange(content, status) as url:
        assert await probes(url, seconds=0.2 if content is None else SECONDS).ask(a_probe()) == found


async def test_probe_without_a_listener_says_so():
    found = await probes("http://127.0.0.1:9").ask(a_probe())

    assert found == ProbeFailure(0, "no answer: ClientConnectorError")


def test_service_name_is_no_public_domain():
    assert service_address("dev", "llama-router") == "llama-router.dev.svc:8000"
    assert [router_address(host) for host in ("10.0.0.1", "fd00::1")] == ["10.0.0.1:8000", "[fd00::1]:8000"]


async def test_full_router_rejects_a_probe_but_serves_another_tenant():
    """Use a real router, which shows that a probe needs no priority."""
    go, server = asyncio.Event(), OpenAiServer()

    async def when_let(exchange: ServerExchange) -> None:
        await go.wait()
        await five_tokens(exchange)

    server.play = when_let
    await server.start()
    clients = "sk-of-clients"
    tenants = TENANTS | {"clients": TenantSettings(api_key_sha256=(sha256(clients.encode()).hexdigest(),))}
    limits = {"tenants": tenants, "oversubscribe": 1.0, "max_queued": 3, "max_queue_seconds": 1e6}
    async with a_relay(server, tenants=tenants, limits=limits, max_running=1) as world, asyncio.TaskGroup() as tasks:

        async def sent(key):
            probe = msgspec.structs.replace(a_probe("w0"), model=RELAYED)
            return await probes(world.url, {"ns/dd": key}, seconds=4 * SECONDS).ask(probe)

        waiting = [tasks.create_task(sent(clients)) for _ in range(4)]
        await until(lambda: world.router.status().queued == 3)
        assert await sent(clients) == ProbeFailure(429, "queue_full", busy=True)

        own = tasks.create_task(sent(KEY))
        await until(lambda: any(each.done() for each in waiting))
        go.set()

    assert [each.result() for each in waiting].count(ProbeFailure(429, "queue_full", busy=True)) == 1, "it made room"
    assert own.result() == ProbeFailure(200, "another worker answered"), "an external backend reports no more"
    await server.stop()
