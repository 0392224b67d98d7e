"""Relayed requests that are rejected while their answer arrives."""

import pytest

from fleet.core.clock import Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId
from fleet.frontend.metrics.relay import RelayedRequests
from fleet.frontend.openai.relay import RelayedRequest
from fleet.net.http.exchange import Exchange, HttpHead, HttpRequest

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
    """Answer of which one event has arrived in this turn."""

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
