"""Test of traces through a router to an external server."""

import asyncio

import httpx
import pytest

from tests.support.backends.openai_servers import MODEL, OpenAiServer
from tests.support.fleet_processes import start_service
from tests.support.servers.otlp_collector import an_otlp_collector
from tests.support.servers.processes import a_free_port
from tests.support.waiting import until_answered

pytestmark = pytest.mark.integration

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OTHER_REQUESTS = {
    "chat": ("/v1/responses", {"input": "say", "stream": True}),
    "score": ("/v1/rerank", {"query": "say", "documents": ["this"]}),
}
"""Paths and bodies whose spans have the same operation as their metrics and access records."""


async def test_server_gets_the_span_of_the_router_as_its_parent(tmp_path):
    server = OpenAiServer()
    await server.start()
    address = f"127.0.0.1:{a_free_port()}"
    with an_otlp_collector(tmp_path) as collector:
        settings = {
            "http_listen": address,
            "grpc_listen": f"127.0.0.1:{a_free_port()}",
            "openai_workers": [{"worker_id": "w0", "url": server.url, "model": MODEL}],
            "tracing": {"endpoint": collector.grpc, "export_seconds": 0.05},
        }
        log = (tmp_path / "router.log").open("w")
        process, endpoints = await asyncio.to_thread(
            start_service, "router", settings, tmp_path / "router.json", stdout=log, stderr=log
        )
        try:
            assert endpoints, (tmp_path / "router.log").read_text()
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
                body = {"model": MODEL, "prompt": "say"}

                async def serves() -> bool:
                    return (await client.post("/v1/completions", json=body)).status_code == 200

                await until_answered(serves)
                headers = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "a=1", "x-request-id": "mine-1"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                seen = server.seen[-1].headers
                for number, (path, fields) in enumerate(OTHER_REQUESTS.values()):
                    headers = {"traceparent": f"00-{number + 1:032x}-{CALLER}-01"}
                    await client.post(path, json={"model": MODEL, **fields}, headers=headers)
            assert answer.status_code == 200
            streams = {}
            for number, operation in enumerate(OTHER_REQUESTS):
                name = f"{operation} {MODEL}"
                found = await asyncio.to_thread(collector.wait_for, f"{number + 1:032x}", name)
                (span,) = [each for each in found if each.name == name]
                streams[operation] = span.attributes.get("gen_ai.request.stream", False)
            spans = await asyncio.to_thread(
                collector.wait_for, TRACE_ID, f"text_completion {MODEL}", "placement", "attempt aggregated"
            )
        finally:
            process.kill()
            await asyncio.to_thread(process.wait, 60)
            log.close()
            await server.stop()

    request, attempt = ([span for span in spans if span.name.startswith(name)] for name in ("text_", "attempt"))
    assert (request[0].parent_id, request[0].attributes["fleet.request.id"]) == (CALLER, "mine-1")
    assert request[0].error is None
    assert seen["traceparent"] == f"00-{TRACE_ID}-{attempt[0].span_id}-01"
    assert seen["tracestate"] == "a=1"
    assert streams == {"chat": True, "score": False}
