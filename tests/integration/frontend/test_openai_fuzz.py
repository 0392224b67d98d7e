"""Fuzz tests of the HTTP port: every input gets a documented answer or a closed connection."""

import asyncio
import json
import socket
import threading
import urllib.request
from contextlib import contextmanager

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fleet.frontend.openai.openapi import openapi_document
from tests.support.backends.openai_servers import OpenAiServer, a_relay
from tests.support.frontend.frontends import open_frontends

pytestmark = pytest.mark.integration

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@contextmanager
def serving(model_dir):
    """Run frontends on an event loop in a thread; yield the HTTP addresses, one with models and one in front of an external backend."""
    started: list[str] = []
    external = OpenAiServer()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        await external.start()
        async with open_frontends(model_dir) as frontends, a_relay(external, seconds=3600) as relay:
            frontends.will_answer("An answer.")
            started.extend((frontends.http.address, relay.http.address))
            loops.append(asyncio.get_running_loop())
            ready.set()
            await stop.wait()
        await external.stop()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(120)
    yield started
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def addresses(model_dir):
    with serving(model_dir) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def address(addresses):
    return addresses[0]


API = schemathesis.openapi.from_dict(json.loads(openapi_document()))
BY_BOTH = ("POST /v1/embeddings", "POST /v1/completions")
"""Operations that own workers and external servers have."""

OPERATIONS = {operation.label: operation for operation in (found.ok() for found in API.get_all_operations())}


KINDS = [
    (name, mode)
    for name, operation in OPERATIONS.items()
    for mode in GenerationMode
    if operation.body or mode is GenerationMode.POSITIVE  # otherwise nothing can be wrong
]


@pytest.mark.parametrize(("name", "mode"), KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_documented_and_invalid_requests_get_documented_answers(addresses, name, mode, data):
    case = data.draw(OPERATIONS[name].as_strategy(generation_mode=mode))
    address = data.draw(st.sampled_from(addresses)) if name in BY_BOTH else addresses[0]
    answer = case.call(base_url=f"http://{address}", timeout=60)
    unmet = answer.status_code == 503 and answer.json()["error"].get("cause") == "no_label"  # as the document allows
    case.validate_response(answer, checks=[each for each in CHECKS if not (unmet and each is not_a_server_error)])


def test_every_port_serves_the_document(addresses):
    assert OPERATIONS.keys() >= {*BY_BOTH, "POST /v1/rerank", "POST /v1/score"}
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/openapi.json", timeout=60) as answer:
            assert json.load(answer)["paths"].keys() == API.raw_schema["paths"].keys()


def raw_answer(address: str, sent: bytes) -> bytes:
    """Return everything until the server closes or is done."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        got = b""
        while piece := connection.recv(65536):
            got += piece
        return got


FRAGMENTS = st.sampled_from(
    [
        b"POST /v1/completions HTTP/1.1\r\n",
        b"GET /v1/models HTTP/1.1\r\n",
        b"HTTP/1.1",
        b"host: x\r\n",
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"expect: 100-continue\r\n",
        b"content-type: application/json\r\n",
        b"connection: upgrade\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b'{"prompt": "a", "max_tokens": 1}',
        b"[" * 2000,
        b'{"a":' * 500,
        b"\x00\xff\xfe",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(FRAGMENTS, st.binary(max_size=40)), max_size=10).map(b"".join))
def test_random_bytes_get_an_http_error_or_a_closed_connection(address, sent):
    got = raw_answer(address, sent)
    assert got == b"" or got.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in got
    assert raw_answer(address, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200")
