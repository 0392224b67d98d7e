"""What is nested too deeply to be read is read without its depths."""

import msgspec
import pytest

from operators.nesting import DEEPEST, shallow


def nested(depth, opens=b'{"a":', closes=b"}", inside=b"1"):
    return opens * depth + inside + closes * depth


def depth_of(content):
    depth, value = 0, msgspec.json.decode(content)
    while isinstance(value, dict | list):
        depth, value = depth + 1, next(iter(value.values())) if isinstance(value, dict) else value[0]
    return depth, value


@pytest.mark.parametrize(("opens", "closes"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_what_lies_deeper_is_null_and_the_rest_is_as_it_was(opens, closes):
    for depth in (0, 1, DEEPEST):
        content = nested(depth, opens, closes)
        assert shallow(content) == content
    for depth in (DEEPEST + 1, 10_000):
        assert depth_of(shallow(nested(depth, opens, closes))) == (DEEPEST, None)


def test_what_stands_beside_it_stays():
    content = b'{"before": "[{", "deep": %b, "after": "\\"]}", "more": [1, {"b": 2}]}' % nested(5000)

    found = msgspec.json.decode(shallow(content))

    assert (found["before"], found["after"], found["more"]) == ("[{", '"]}', [1, {"b": 2}])


@pytest.mark.parametrize("content", [b"", b'"', b"]]]", b'{"a', nested(5000)[:-10], nested(5000)[:6000], b"[" * 5000])
def test_what_is_no_json_stays_none(content):
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(shallow(content))
