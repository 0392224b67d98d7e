"""Answer counter: it estimates how many tokens the answers have that a gateway passes on."""

import pytest

from fleet.gateway.call import AnswerCounter

EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("events", "pieces", "tokens"),
    [
        (True, [EVENT * 3, b"data: [DONE]\n\n"], 3),
        (True, [EVENT[:3], EVENT[3:6], EVENT[6:] + EVENT, EVENT], 3),
        (False, [b'{"usage": {"completion_', b'tokens": 12', b"3}}"], 123),
        (False, [b'{"usage": {"input_tokens": 900, "output_', b'tokens": 12', b"3}}"], 123),
        (True, [b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'] * 2, 2),
        (False, [b"<html>"], 0),
        (False, [b'{"completion_tokens": 99999999999999999999}'], 0),
    ],
)
def test_tokens_are_counted_as_they_pass(events, pieces, tokens):
    counter = AnswerCounter()
    counter.events = events
    assert sum(counter.count(piece) for piece in pieces) == tokens == counter.tokens
