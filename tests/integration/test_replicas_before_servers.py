"""Several router processes behind one port, before servers that tell nothing of their caches."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from http.client import HTTPConnection

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet_processes import serve
from tests.openai_servers import ASKED, MODEL, OpenAiServer
from tests.servers import a_free_port
from tests.waiting import until_answered

pytestmark = pytest.mark.integration

ROUTERS = 3
SERVERS = 4


def ask(address, method, path, body=None):
    """One answer, over a connection of its own, and so of whichever process."""
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text
    finally:
        connection.close()


async def known(address):
    """Of all workers together, as each process knows it: their number, blocks in their caches, requests there."""
    text = await asyncio.to_thread(ask, address, "GET", "/metrics")
    columns = {"cached_blocks": 1, "booked_requests": 2, "booked_elsewhere": 2}
    by_router = {}
    for family in text_string_to_metric_families(text):
        if column := columns.get(family.name.removeprefix("fleet_worker_")):
            for sample in family.samples:
                numbers = by_router.setdefault(sample.labels["router"], [0, 0, 0])
                numbers[0] += column == 1
                numbers[column] += sample.value
    return list(by_router.values())


async def have_met(address):
    """Whichever process is asked reaches all the others, and all know all workers."""
    return all([await known(address) == [[SERVERS, 0, 0]] * ROUTERS for _ in range(16)])


@asynccontextmanager
async def routers_before(tmp_path, servers, processes):
    """The address of so many processes, as soon as they say that they serve."""
    for server in servers:
        await server.start()
    workers = [{"worker_id": f"w{number}", "url": server.url, "model": MODEL} for number, server in enumerate(servers)]
    address = f"127.0.0.1:{a_free_port()}"
    settings = {"http_listen": address, "grpc_listen": f"127.0.0.1:{a_free_port()}", "openai_workers": workers}
    log = tmp_path / "router.log"
    with log.open("w") as output:
        options = (tmp_path / "router.json", "--processes", str(processes))
        process, endpoints = await asyncio.to_thread(
            lambda: serve("router", settings, *options, stdout=output, stderr=output)
        )
    try:
        assert endpoints, log.read_text()
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
        for server in servers:
            await server.stop()


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_router_takes_no_requests_before_its_servers_have_said_that_they_are_there(tmp_path, processes):
    server = OpenAiServer()
    server.health_seconds = 0.5
    async with routers_before(tmp_path, [server], processes) as address:
        for _ in range(4):
            await asyncio.to_thread(ask, address, "POST", "/v1/completions", json.dumps(ASKED))


async def test_a_server_that_does_not_say_whether_it_is_there_holds_no_router_up_for_long(tmp_path):
    server, silent = OpenAiServer(), OpenAiServer()
    silent.health_seconds = 1000.0
    async with routers_before(tmp_path, [server, silent], 1) as address:
        await asyncio.to_thread(ask, address, "POST", "/v1/completions", json.dumps(ASKED))


async def test_what_one_process_has_sent_to_a_server_all_believe_to_be_there(tmp_path):
    servers = [OpenAiServer() for _ in range(SERVERS)]
    async with routers_before(tmp_path, servers, ROUTERS) as address:
        await until_answered(lambda: have_met(address), 300)
        for number in range(5):
            prompt = f"{number} is a number. " * 400
            blocks = (number + 1) * (len(prompt) // 256)
            body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True})

            async def complete(body=body):
                await asyncio.to_thread(ask, address, "POST", "/v1/completions", body)

            async def told(blocks=blocks):
                """All processes believe all that was sent so far to be somewhere, and that nothing runs."""
                return await known(address) == [[SERVERS, blocks, 0]] * ROUTERS

            await complete()
            await until_answered(told)
            for _ in range(8):
                await complete()
                await until_answered(told)

            places = [sum(seen.json["prompt"] == prompt for seen in server.seen) for server in servers]
            assert sorted(places) == [0] * (SERVERS - 1) + [9]
