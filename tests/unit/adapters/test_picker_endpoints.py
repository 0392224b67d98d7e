"""Endpoints as gateways know them, and the length of answers that pass."""

import pytest

from fleet.adapters.answer_counter import AnswerCounter
from fleet.adapters.picker_endpoints import endpoint_at
from fleet.router.picker_settings import EndpointPickerSettings

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("address", "port", "endpoint"),
    [
        ("10.0.0.1:50060", 0, "10.0.0.1:50060"),
        ("10.0.0.1:50060", 8000, "10.0.0.1:8000"),
        ("10.0.0.1", 8000, "10.0.0.1:8000"),
        ("http://10.0.0.1/v1", 0, "10.0.0.1:80"),
        ("https://10.0.0.1", 0, "10.0.0.1:443"),
        ("[fd00::2]:1", 0, "[fd00::2]:1"),
        ("[FD00:0::2]:1", 0, "[fd00::2]:1"),
        ("10.0.0.1", 0, ""),
        ("worker-1:50060", 0, ""),
        ("unix:/run/w", 8000, ""),
        ("10.0.0.1:99999", 0, ""),
        ("[fd00:", 0, ""),
        ("", 0, ""),
    ],
)
def test_workers_without_an_address_for_gateways_have_no_endpoint(address, port, endpoint):
    assert endpoint_at(address, port) == endpoint


@pytest.mark.parametrize(
    ("given", "own"),
    [("", ""), ("10.1.1.1:8000", "10.1.1.1:8000"), ("fd00::1:8000", "[fd00::1]:8000"), ("[::1]:80", "[::1]:80")],
)
def test_a_routers_own_endpoint_is_what_pods_are_told_of_themselves(given, own):
    assert EndpointPickerSettings(router_endpoint=given).own_endpoint == own


@pytest.mark.parametrize("given", ["router:8000", "10.1.1.1", ":8000", "10.1.1.1:0", "10.1.1.1:x", "10.1.1.1:8000/x"])
def test_a_routers_own_endpoint_that_gateways_cannot_take_is_refused(given):
    with pytest.raises(ValueError, match="must be ip:port"):
        EndpointPickerSettings(router_endpoint=given)


@pytest.mark.parametrize(
    ("events", "pieces", "tokens"),
    [
        (True, [EVENT * 3, b"data: [DONE]\n\n"], 3),
        (True, [EVENT[:3], EVENT[3:6], EVENT[6:] + EVENT, EVENT], 3),
        (False, [b'{"usage": {"completion_', b'tokens": 12', b"3}}"], 123),
        (False, [b"<html>"], 0),
        (False, [b'{"completion_tokens": 99999999999999999999}'], 0),
    ],
)
def test_tokens_are_counted_as_they_pass(events, pieces, tokens):
    counter = AnswerCounter()
    counter.events = events
    assert sum(counter.count(piece) for piece in pieces) == tokens == counter.tokens
