"""Probes of deployments: what counts as an answer, and what is told of everything else."""

import asyncio
from contextlib import asynccontextmanager
from hashlib import sha256

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="the extra `kubernetes` is not installed")

from aiohttp import web

from fleet.adapters.served_probes import ServedProbes, door_address
from fleet.errors import Reason, Refused
from fleet.router.tenants import TenantSettings
from operators.probing import Answer, Failure, Probe
from tests.builders import MODEL
from tests.fronts import open_fronts

pytestmark = pytest.mark.integration

KEY = "sk-of-the-operator"
TENANTS = {"probes": TenantSettings(api_key_sha256=(sha256(KEY.encode()).hexdigest(),))}
SECONDS = 5.0


def a_probe(worker="w1", *, pair=False):
    return Probe(namespace="ns", deployment="dd", service="dd-router", model=MODEL, worker=worker, pair=pair)


def probes(url, keys=None, seconds=SECONDS):
    """To whatever listens there."""
    address = url.removeprefix("http://")

    def dialled(namespace, service):
        assert (namespace, service) == ("ns", "dd-router")
        return address

    return ServedProbes(keys or {}, seconds, dialled)


@asynccontextmanager
async def answering(content, status=200, heard=None):
    """A server that says the same to everybody."""

    async def answer(request):
        if heard is not None:
            heard.append((request.headers, msgspec.json.decode(await request.read())))
        if content is None:
            await asyncio.sleep(60)
        headers = {"Location": "http://127.0.0.1:9/"} if status == 302 else {}
        return web.Response(status=status, body=content, content_type="application/json", headers=headers)

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
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


async def test_a_routers_completion_by_the_worker_that_was_asked_for_is_an_answer(model_dir):
    async with open_fronts(model_dir) as fronts:
        fronts.will_answer("A")
        found = [await probes(fronts.url).ask(a_probe()) for _ in range(2)]

        one, other = fronts.router.submitted
        assert found == [Answer(), Answer()]
        assert (one.pin, one.sampling.max_tokens) == ("w1", 1)
        assert one.tokens[:64] != other.tokens[:64], "no cache has it"
        assert await probes(fronts.url).ask(a_probe("another")) == Failure(200, "another worker answered")


async def test_what_a_router_refuses_is_told_in_its_words(model_dir):
    async with open_fronts(model_dir) as fronts:
        fronts.router.refuse = Refused(Reason.NO_WORKER, "pin: w1 is draining;\n try later")

        found = await probes(fronts.url).ask(a_probe())

    assert found == Failure(503, "no_worker: pin: w1 is draining; try later")


async def test_a_key_is_sent_to_the_deployment_that_it_is_for_and_told_to_nobody(model_dir):
    async with open_fronts(model_dir, TENANTS) as fronts:
        fronts.will_answer("A")

        async def asked(**keys):
            return await probes(fronts.url, keys).ask(a_probe())

        assert await asked(**{"ns/dd": KEY}) == Answer()
        assert await asked(**{"ns/other": KEY}) == Failure(401, "its routers want an API key", wants_key=True)
        assert await asked(**{"ns/dd": "sk-wrong"}) == Failure(401, "its routers do not take the key", wants_key=True)

    refusal = {"error": {"code": "internal", "message": f"Bearer {KEY} is bad"}}
    async with answering(msgspec.json.encode(refusal), 500) as url:
        assert await probes(url, {"ns/dd": KEY}).ask(a_probe()) == Failure(500, "internal: Bearer (key) is bad")


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ([PREFILL, ("decode", "w1", "direct", 9)], Answer(True)),
        ([PREFILL, ("decode", "w1", "store", 9)], Answer(True)),
        ([PREFILL, ("decode", "w1", "computed", 9)], Answer(False)),
        ([PREFILL, ("decode", "w1", "computed", 1)], Answer(None)),
        ([("decode", "w1", "computed", 9)], Failure(200, "no prefill worker computed the prompt")),
        ([("aggregated", "w1", "computed", 9)], Failure(200, "another worker answered")),
    ],
)
async def test_a_pair_has_answered_when_both_pools_took_part(phases, found):
    heard = []
    async with answering(a_completion(*phases), heard=heard) as url:
        assert await probes(url).ask(a_probe(pair=True)) == found

    [(_, asked)] = heard
    assert asked["fleet"] == {"pin": "w1", "placement": "disaggregated"}
    assert (asked["max_tokens"], asked["ignore_eos"]) == (2, True), "the first token is the prefill worker's"


@pytest.mark.parametrize(
    ("content", "status", "found"),
    [
        (b"<html>hunter2</html>", 502, Failure(502, "not in words of a router")),
        (b'{"error": {"code": "hunter2", "message": "hunter2"}}', 500, Failure(500, "not in words of a router")),
        (b"hunter2", 200, Failure(200, "what was answered is no completion")),
        (b"[" * 100_000, 200, Failure(200, "what was answered is no completion")),
        (DEEP, 200, Failure(200, "what was answered is no completion")),
        (DEEP, 500, Failure(500, "not in words of a router")),
        (
            b'{"error": {"code": "internal", "message": "\\u001b[31mred\\u0000 \\u202eder"}}',
            500,
            Failure(500, "internal: [31mred der"),
        ),
        (a_completion(tokens=0), 200, Failure(200, "the completion has no token")),
        (a_completion(), 200, Failure(200, "another worker answered")),
        (a_completion(), 302, Failure(302, "not in words of a router")),
        (None, 200, Failure(0, "no answer within 0.2 s")),
    ],
    ids=range(11),
)
async def test_what_else_is_answered_is_no_answer_and_is_not_repeated(content, status, found):
    async with answering(content, status) as url:
        assert await probes(url, seconds=0.2 if content is None else SECONDS).ask(a_probe()) == found


async def test_where_nobody_listens_that_is_told():
    found = await probes("http://127.0.0.1:9").ask(a_probe())

    assert found == Failure(0, "no answer: ClientConnectorError")


def test_a_service_has_a_name_that_no_public_domain_has():
    assert door_address("dev", "llama-router") == "llama-router.dev.svc:8000"
