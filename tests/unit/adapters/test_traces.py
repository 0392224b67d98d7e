"""Reading recorded traffic, and refusing what is none."""

import gzip
import json

import pytest

from fleet.adapters.traces import TraceRefused, read_trace
from fleet.clock import SECOND
from kvstore.replay import distinct_blocks, ideal
from tests.traces import AGENTIC, agentic, conversation


def a_row(**fields):
    return {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2], **fields}


def a_session(*requests, block_size=64):
    return {"id": "s", "block_size": block_size, "requests": list(requests)}


def a_request(t, tokens, keep, *add):
    return {"t": t, "type": "n", "in": tokens, "out": 7, "hash_delta": {"keep": keep, "add": add}}


def written(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_a_conversation_is_read_as_it_was_recorded():
    trace = conversation()

    assert (trace.format, trace.block_tokens, len(trace.requests)) == ("mooncake", 512, 1500)
    first = trace.requests[0]
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0, 6758, 500)
    assert first.chain == tuple(range(14))
    assert distinct_blocks(trace.requests) == 30_634


def test_agents_are_read_as_they_were_recorded():
    trace = agentic()

    assert (trace.format, trace.block_tokens) == ("agentic", 512)
    assert {request.session for request in trace.requests} == set(range(1, 21))
    assert ideal(trace.requests, block_tokens=512).hit_rate == pytest.approx(0.953, abs=0.001)
    assert [request.arrival for request in trace.requests] == sorted(request.arrival for request in trace.requests)
    for request in trace.requests:
        assert len(request.chain) == -(-(request.prompt_tokens // 64) // 8)


def test_plain_and_compressed_files_are_the_same(tmp_path):
    plain = written(tmp_path, a_row(), a_row(timestamp=3.5))
    compressed = tmp_path / "no-suffix"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_trace(plain) == read_trace(compressed)


def test_ids_of_sixty_four_tokens_are_gathered_into_blocks_and_a_rest(tmp_path):
    path = written(tmp_path, a_session(a_request(0, 64 * 17, 0, [1, 17]), a_request(2, 64 * 20, 16, [50, 4])))

    first, second = read_trace(path).requests

    assert len(first.chain) == len(second.chain) == 3
    assert first.chain[:2] == second.chain[:2]
    assert first.chain[2] != second.chain[2]


def test_sub_agents_run_at_their_place_in_the_session(tmp_path):
    sub = {"t": 10, "type": "subagent", "requests": [a_request(1, 64, 0, [90, 1]), a_request(5, 64, 1)]}
    path = written(tmp_path, a_session(a_request(0, 64, 0, [1, 1]), sub, a_request(12, 64, 1)))

    requests = read_trace(path).requests

    assert [request.arrival // SECOND for request in requests] == [0, 11, 12, 15]
    assert requests[0].chain == requests[2].chain != requests[1].chain == requests[3].chain


def test_sessions_share_nothing_and_only_so_many_run_at_a_time(tmp_path):
    session = a_session(a_request(5, 64, 0, [1, 1]), a_request(9, 64, 1))
    path = written(tmp_path, session, session, session)

    requests = read_trace(path, live_sessions=2).requests

    assert [(request.session, request.arrival // SECOND) for request in requests] == [
        (1, 0),
        (2, 0),
        (1, 4),
        (2, 4),
        (3, 4),
        (3, 8),
    ]
    assert distinct_blocks(requests) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "trace.jsonl: is empty"),
        (["{"], "trace.jsonl:1: is no JSON object"),
        (["[1]"], "trace.jsonl:1: Expected `object`, got `array`"),
        (['{"a": 1}'], "trace.jsonl:1: has neither hash_ids"),
        ([a_row(), a_row(input_length="many")], "trace.jsonl:2: input_length: Expected `int`, got `str`"),
        ([a_row(hash_ids=[1, -2])], r"trace.jsonl:1: hash_ids\[1\]: Expected `int` >= 0"),
        ([a_row(), "", {"timestamp": 1}], "trace.jsonl:3: .*missing required field `input_length`"),
        ([a_row(timestamp=5), a_row(timestamp=4)], "trace.jsonl:2: timestamp: 4 is before that of the row above"),
        ([a_row(hash_ids=[1, 2, 3])], "trace.jsonl:1: hash_ids: 3 blocks are more than 1000 tokens fill"),
        ([a_row(hash_ids=[1, 1])], "trace.jsonl:1: hash_ids: an id is there twice"),
        ([a_row(timestamp=1e300)], "trace.jsonl:1: timestamp: Expected `float` <="),
        ([a_session()], "trace.jsonl:1: requests: Expected `array` of length >= 1"),
        ([a_session(a_request(0, 64, 0, [1, 1]), block_size=60)], "trace.jsonl:1: block_size: 60 does not divide 512"),
        ([a_session(a_request(0, 64, 3, [1, 1]))], r"trace.jsonl:1: requests\[0\].hash_delta.keep: 3 of 0 ids"),
        ([a_session(a_request(0, 64, 0, [1, 1 << 39]))], r"requests\[0\].hash_delta: more ids than 64 tokens fill"),
        ([a_session({"t": 0, "in": 5})], r"trace.jsonl:1: requests\[0\].hash_delta: is missing"),
    ],
)
def test_a_wrong_row_is_refused_by_line_and_field(tmp_path, rows, message):
    with pytest.raises(TraceRefused, match=message):
        read_trace(written(tmp_path, *rows))


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(AGENTIC.read_bytes()[:20_000])

    with pytest.raises(TraceRefused, match=r"cut\.jsonl\.gz: "):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceRefused, match="nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
