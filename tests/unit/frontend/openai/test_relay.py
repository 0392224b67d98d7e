"""Relayed requests that are rejected while their answer arrives, or that fail while they are submitted."""

import asyncio

import pytest

from fleet.core.clock import Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.frontend.metrics.relay import RelayedRequests, RelayMetrics
from fleet.frontend.openai import relay as openai_relay
from fleet.frontend.openai.prompt_keys import PromptReader
from fleet.frontend.openai.relay import RelayedRequest
from fleet.frontend.openai.relayed_paths import RelayedPaths
from fleet.net.http.exchange import Exchange, HttpHead, HttpRequest
from fleet.router.tenants import Tenants
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import turns

EVENT = b"9\r\ndata: a\n\n\r\n"
REQUEST = HttpRequest(
    HttpHead(method="POST", path="/v1/completions", headers={}, keep_alive=True, chunked_answer=True), b"{}"
)


class Line:
    """Connection to the client."""

    is_expired = False

    def __init__(self):
        self.written = b""
        self.kept_alive = None

    def relay(self, _source):
        return self

    def write(self, pieces):
        self.written += b"".join(pieces)

    def finished(self, *, keep_alive):
        self.kept_alive = keep_alive


class Flow:
    """Answer with one event that has arrived in this turn and was not sent yet."""

    def __init__(self, line, *, at_event_boundary):
        self._line = line
        self._at_boundary = at_event_boundary

    def flush(self):
        self._line.written += EVENT

    def at_event_boundary(self):
        return self._at_boundary

    def send_last_event(self, event):
        pass


class Relay:
    takes_keys = False

    def first_byte(self, relayed):
        pass

    def ended(self, relayed, refused):
        pass


@pytest.mark.parametrize("at_event_boundary", [True, False])
def test_error_event_follows_the_bytes_of_the_same_turn(at_event_boundary):
    line = Line()
    counts = RelayedRequests("m", "chat")
    relayed = RelayedRequest(Relay(), Exchange(line, REQUEST), RequestId("r"), Nanos(0), "", counts)
    relayed.begin(None, Flow(line, at_event_boundary=at_event_boundary))

    relayed.refuse(RequestRejected(Reason.DRAINING, "this router is going away"))

    assert line.written.startswith(EVENT)
    assert (b"going away" in line.written.removeprefix(EVENT)) == at_event_boundary
    assert line.kept_alive is False


class BrokenRouter:
    """A router that accepts a request, and then raises an error."""

    def __init__(self):
        self.running = set()

    def open(self, arrived, _listener):
        self.running.add(arrived.request_id)
        raise RuntimeError("a bug")

    def close(self, request_id, _listener):
        self.running.discard(request_id)


class Workers:
    def expect(self, relayed):
        pass

    def forget(self, relayed):
        pass


class Threads:
    """Threads that do each task at once, within the call."""

    def run(self, work, _size):
        done = asyncio.get_running_loop().create_future()
        done.set_result(work())
        return done


@pytest.mark.parametrize("inline_bytes", [0, 1000])
async def test_request_that_fails_after_its_submission_is_closed(inline_bytes):
    line, clock, model, router = Line(), ManualClock(), ModelName("m"), BrokenRouter()
    reader = PromptReader(model, [16], None, clock, None)
    reader.inline_bytes = inline_bytes
    relay = openai_relay.Relay(
        router,
        Workers(),
        {model: reader},
        Tenants({}, clock.now()),
        RelayMetrics(lambda: ()),
        clock,
        Threads(),
        id_prefix="t",
        only=True,
        paths=RelayedPaths.of(()),
        is_running=lambda _request_id: False,
        named_ids=set(),
    )

    relay.serve(Exchange(line, HttpRequest(REQUEST.head, b'{"prompt": "say"}')))
    await turns()

    assert line.written.startswith(b"HTTP/1.1 500 ")
    assert not router.running
