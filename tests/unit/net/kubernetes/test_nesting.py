"""Deeply nested JSON: it is read without the levels that are too deep."""

import json

import msgspec
import pytest

from fleet.net.kubernetes.nesting import DEEPEST, prune, shallow
from fleet.net.kubernetes.views import CustomObject
from operators.api.serving_request import ServingRequestSpec
from operators.controller.serving_request import proposed
from operators.proposals import propose

FEASIBLE = {
    "model": {"name": "llama", "uri": "meta-llama/Llama-3.3-70B-Instruct"},
    "hardware": {"gpu": "h100", "count": 32},
    "workload": {"promptTokens": 2048, "answerTokens": 256, "requestsPerMinute": 600},
}


def nested(depth, opens=b'{"a":', closes=b"}", inside=b"1"):
    return opens * depth + inside + closes * depth


def depth_of(content):
    depth, value = 0, msgspec.json.decode(content)
    while isinstance(value, dict | list):
        depth, value = depth + 1, next(iter(value.values())) if isinstance(value, dict) else value[0]
    return depth, value


@pytest.mark.parametrize(("opens", "closes"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_deeper_levels_become_null(opens, closes):
    for depth in (0, 1, DEEPEST):
        content = nested(depth, opens, closes)
        assert shallow(content) == content
    for depth in (DEEPEST + 1, 10_000):
        assert depth_of(shallow(nested(depth, opens, closes))) == (DEEPEST, None)


def test_fields_beside_a_deep_one_stay():
    content = b'{"before": "[{", "deep": %b, "after": "\\"]}", "more": [1, {"b": 2}]}' % nested(5000)

    found = msgspec.json.decode(shallow(content))

    assert (found["before"], found["after"], found["more"]) == ("[{", '"]}', [1, {"b": 2}])


@pytest.mark.parametrize("content", [b"", b'"', b"]]]", b'{"a', nested(5000)[:-10], nested(5000)[:6000], b"[" * 5000])
def test_invalid_json_stays_invalid(content):
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(shallow(content))


def in_turns(levels):
    """Return `levels` nested values, objects and lists in turn."""
    found = "leaf"
    for level in reversed(range(levels)):
        found = [found] if level % 2 else {"a": found, "b": 1}
    return found


@pytest.mark.parametrize("levels", [1, DEEPEST, DEEPEST + 1, 900])
def test_decoded_objects_are_cut_at_the_same_depth(levels):
    found = in_turns(levels)
    prune(found)

    assert msgspec.json.decode(shallow(msgspec.json.encode(in_turns(levels)))) == found


@pytest.mark.parametrize("levels", [120, 500, 900, 2000])
def test_request_of_any_depth_gets_an_answer(levels):
    request = msgspec.json.encode({"metadata": {"name": "a"}, "spec": FEASIBLE | {"podTemplate": None}})
    request = request.replace(b"null", nested(levels))
    try:
        found = msgspec.json.decode(request, type=CustomObject)
    except RecursionError:  # `fleet.net.kubernetes.client` does the same
        found = msgspec.json.decode(shallow(request), type=CustomObject)
    made = proposed("a", propose(msgspec.convert(found.spec, ServingRequestSpec)))

    assert json.dumps(made).count('"a": {') > DEEPEST / 2
