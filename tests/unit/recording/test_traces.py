"""Traces: all formats are read, and invalid rows are refused."""

import gzip
import json
import os

import pytest

from fleet.core.clock import SECOND
from fleet.recording import trace_rows
from fleet.recording.trace_rows import RowSelection, TraceError
from fleet.recording.traces import open_trace, read_trace
from kvstore.eviction.trace_replay import distinct_blocks, ideal
from tests.support.sim.traces import AGENTIC, agentic, conversation


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


def test_mooncake_trace_is_read():
    trace = conversation()

    assert (trace.format, trace.block_tokens, len(trace.requests)) == ("mooncake", 512, 1500)
    first = trace.requests[0]
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0, 6758, 500)
    assert first.chain == tuple(range(14))
    assert distinct_blocks(trace.requests) == 30_634


def test_agentic_trace_is_read():
    trace = agentic()

    assert (trace.format, trace.block_tokens) == ("agentic", 512)
    assert {request.session for request in trace.requests} == set(range(1, 21))
    assert ideal(trace.requests, block_tokens=512).hit_rate == pytest.approx(0.953, abs=0.001)
    assert [request.arrival for request in trace.requests] == sorted(request.arrival for request in trace.requests)
    for request in trace.requests:
        assert len(request.chain) == -(-(request.prompt_tokens // 64) // 8)


def test_plain_and_compressed_files_are_equal(tmp_path):
    plain = written(tmp_path, a_row(), a_row(timestamp=3.5))
    compressed = tmp_path / "no-suffix"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_trace(plain) == read_trace(compressed)


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "compressed"])
@pytest.mark.parametrize("cut", [RowSelection(), RowSelection(begin=0.5)], ids=["whole", "half"])
def test_empty_lines_count_as_lines_and_not_as_rows(tmp_path, packed, cut):
    one, two = written(tmp_path, a_row(), a_row(timestamp=3.5)).read_bytes().splitlines(keepends=True)
    file = tmp_path / "trace"
    file.write_bytes(packed(b"\n" + one + b"\r\n \t\n" + two + b"\n"))
    assert open_trace(file, cut=cut).count() == (2 if cut.is_whole else 1)
    file.write_bytes(packed(b"\n" + one + b"\r\n \t\n" + two + b"\n{}\n"))
    with pytest.raises(TraceError, match="trace:7: "):
        list(open_trace(file, cut=cut).requests())


def test_ids_are_grouped_into_blocks_and_a_partial_one(tmp_path):
    path = written(tmp_path, a_session(a_request(0, 64 * 17, 0, [1, 17]), a_request(2, 64 * 20, 16, [50, 4])))

    first, second = read_trace(path).requests

    assert len(first.chain) == len(second.chain) == 3
    assert first.chain[:2] == second.chain[:2]
    assert first.chain[2] != second.chain[2]


def test_sub_agents_start_at_their_time_in_the_session(tmp_path):
    sub = {"t": 10, "type": "subagent", "requests": [a_request(1, 64, 0, [90, 1]), a_request(5, 64, 1)]}
    path = written(tmp_path, a_session(a_request(0, 64, 0, [1, 1]), sub, a_request(12, 64, 1)))

    requests = read_trace(path).requests

    assert [request.arrival // SECOND for request in requests] == [0, 11, 12, 15]
    assert requests[0].chain == requests[2].chain != requests[1].chain == requests[3].chain


def test_sessions_share_no_blocks_and_run_in_limited_number(tmp_path):
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
        (["{"], "trace.jsonl:1: is not a JSON object"),
        (["[1]"], "trace.jsonl:1: Expected `object`, got `array`"),
        (['{"a": 1}'], "trace.jsonl:1: has neither hash_ids"),
        ([a_row(), a_row(input_length="many")], "trace.jsonl:2: input_length: Expected `int`, got `str`"),
        ([a_row(hash_ids=[1, -2])], r"trace.jsonl:1: hash_ids\[1\]: Expected `int` >= 0"),
        ([a_row(), "", {"timestamp": 1}], "trace.jsonl:3: .*missing required field `input_length`"),
        ([a_row(timestamp=5), a_row(timestamp=4)], "trace.jsonl:2: timestamp: 4 is before the row above"),
        ([a_row(hash_ids=[1, 2, 3])], "trace.jsonl:1: hash_ids: 3 blocks are more than 1000 tokens fill"),
        ([a_row(hash_ids=[1, 1])], "trace.jsonl:1: hash_ids: an id occurs twice"),
        ([a_row(timestamp=1e300)], "trace.jsonl:1: timestamp: Expected `float` <="),
        ([a_session()], "trace.jsonl:1: requests: Expected `array` of length >= 1"),
        ([a_session(a_request(0, 64, 0, [1, 1]), block_size=60)], "trace.jsonl:1: block_size: 60 does not divide 512"),
        ([a_session(a_request(0, 64, 3, [1, 1]))], r"trace.jsonl:1: requests\[0\].hash_delta.keep: 3 of 0 ids"),
        ([a_session(a_request(0, 64, 0, [1, 1 << 39]))], r"requests\[0\].hash_delta: more ids than 64 tokens fill"),
        ([a_session({"t": 0, "in": 5})], r"trace.jsonl:1: requests\[0\].hash_delta: is missing"),
    ],
)
def test_malformed_row_is_refused_by_line_and_field(tmp_path, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, *rows))


def test_truncated_file_is_refused(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(AGENTIC.read_bytes()[:20_000])

    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz: "):
        read_trace(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="nowhere: No such file"):
        read_trace(tmp_path / "nowhere")


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,1396,109
2023-11-16 18:15:51.2224670,879,0
"""


def written_text(tmp_path, text: str):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_azure_rows_are_read_and_share_no_blocks(tmp_path):
    trace = read_trace(written_text(tmp_path, AZURE.replace("\n", "\r\n")))

    assert (trace.format, trace.block_tokens) == ("azure", 512)
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.requests] == [(374, 44), (1396, 109), (879, 0)]
    assert [each.arrival / SECOND for each in trace.requests] == [0, 4.314579, 4.541877]
    assert [len(each.chain) for each in trace.requests] == [1, 3, 2]
    assert distinct_blocks(trace.requests) == 6


def test_block_size_applies_to_formats_without_blocks(tmp_path):
    file = open_trace(written_text(tmp_path, AZURE), block_tokens=16)
    assert file.block_tokens == 16
    assert [len(each.chain) for each in file.requests()] == [24, 88, 55]


def test_azure_times_may_have_a_time_zone(tmp_path):
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,1,1\n"
    first, second = read_trace(written_text(tmp_path, rows)).requests
    assert (first.arrival, second.arrival) == (0, 990_070_000)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "time,prompt,answer\n1,2,3\n",
            "trace.csv:1: is not a JSON object, and not the header of a CSV trace, which names the columns TIMESTAMP, Context",
        ),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,374\n", "trace.csv:1: GeneratedTokens: there is no such column"),
        (
            AZURE + "2023-11-16 18:15:52,ten,5\n",
            "trace.csv:5: ContextTokens: 'ten' is not a number of tokens from 1 to",
        ),
        (AZURE + "2023-11-16 18:15:52,0,5\n", "trace.csv:5: ContextTokens: '0' is not a number of tokens"),
        (AZURE + "2023-11-16 18:15:52,5,-5\n", "trace.csv:5: GeneratedTokens: '-5' is not a number"),
        (AZURE + "2023-11-16 18:15:52,5," + "9" * 30 + "\n", "trace.csv:5: GeneratedTokens: '9999"),
        (AZURE + "yesterday,5,5\n", "trace.csv:5: TIMESTAMP: 'yesterday' is not a time"),
        (AZURE + "2023-11-16 18:15:52,5\n", "trace.csv:5: has 2 fields, not 3"),
        (
            AZURE + "2023-11-16 18:15:40,5,5\n",
            "trace.csv:5: TIMESTAMP: 2023-11-16 18:15:40 is before the row above",
        ),
    ],
)
def test_malformed_azure_row_is_refused_by_line_and_field(tmp_path, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(written_text(tmp_path, rows))


def test_unordered_rows_are_sorted_on_request(tmp_path):
    path = written(tmp_path, a_row(timestamp=5, hash_ids=[2]), a_row(timestamp=4, hash_ids=[1]))
    assert [each.chain for each in open_trace(path, sort=True).requests()] == [(1,), (2,)]
    path = written_text(tmp_path, AZURE + "2023-11-16 18:15:45.6805900,5,5\n")
    assert [each.arrival / SECOND for each in open_trace(path, sort=True).requests()] == [0, 1, 5.314579, 5.541877]


def a_record(**fields):
    return {"request_id": "1", "arrival": 0, "prompt_tokens": 600, "output_tokens": 5, "end": 9, **fields}


def test_records_are_sorted_by_arrival(tmp_path):
    rows = [
        a_record(arrival=7, session=3, max_tokens=9),
        a_record(arrival=5, refused="queue_full", output_tokens=0, max_tokens=8),
        a_record(arrival=6),
    ]
    trace = read_trace(written(tmp_path, *rows))

    assert trace.format == "records"
    assert [(each.arrival, each.output_tokens, each.session) for each in trace.requests] == [
        (5, 8, 0),
        (6, 5, 0),
        (7, 9, 3),
    ]
    assert distinct_blocks(trace.requests) == 6, "their blocks are unknown"


def test_records_with_blocks_share_their_blocks(tmp_path):
    named = {"block_tokens": 256, "hash_ids": [1, 2, 3]}
    trace = read_trace(written(tmp_path, a_record(**named), a_record(**named), a_record()))
    assert trace.block_tokens == 256
    assert distinct_blocks(trace.requests) == 3 + 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([a_record(prompt_tokens=0)], "trace.jsonl:1: prompt_tokens: Expected `int` >= 1"),
        ([a_record(), {"arrival": 1}], "trace.jsonl:2: .*missing required field `prompt_tokens`"),
        ([a_record(arrival=-1)], "trace.jsonl:1: arrival: Expected `int` >= 0"),
        (
            [a_record(block_tokens=256, hash_ids=[1]), a_record(block_tokens=16, hash_ids=[1])],
            "trace.jsonl:2: block_tokens: 16 is not 256, as in the first row",
        ),
        (
            [a_record(block_tokens=256, hash_ids=[1, 2, 3, 4])],
            "trace.jsonl:1: hash_ids: 4 blocks are more than 600 tokens",
        ),
        ([a_record(block_tokens=256, hash_ids=[1 << 63])], r"trace.jsonl:1: hash_ids\[0\]: "),
    ],
)
def test_malformed_record_is_refused_by_line_and_field(tmp_path, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, *rows))


def test_turn_waits_for_the_recorded_answers(tmp_path):
    def turn(t, took):
        return {**a_request(t, 64, 0, [int(10 * t) + 1, 1]), "api_time": took}

    quick = {"t": 10, "type": "subagent", "requests": [turn(1, 2), turn(5, 1)]}  # ends at 16 s
    slow = {"t": 10.5, "type": "subagent", "requests": [turn(2, 30)]}  # ends at 42.5 s
    path = written(tmp_path, a_session(turn(0, 4), quick, slow, turn(18, 1), turn(50, 1)))

    (session,) = open_trace(path).sessions()

    assert [each.request.arrival / SECOND for each in session.turns] == [0, 11, 12.5, 15, 18, 50]
    assert [each.after for each in session.turns] == [(), (0,), (0,), (1,), (0, 3), (4, 2)]
    assert [each.gap / SECOND for each in session.turns] == [0, 7, 8.5, 2, 2, 7.5]


def test_gap_is_the_pause_between_answer_and_next_turn():
    sessions = list(open_trace(AGENTIC).sessions())
    assert sum(len(session.turns) for session in sessions) == len(agentic().requests)
    assert [turn.after for turn in sessions[0].turns][:3] == [(), (0,), (1,)]
    assert [round(turn.gap / SECOND, 1) for turn in sessions[0].turns][:3] == [0.0, 11.7, 7.8]


def test_rows_are_read_one_by_one(tmp_path):
    path = written(tmp_path, *[a_row(timestamp=number) for number in range(3)], a_row(timestamp=0))
    requests = open_trace(path).requests()
    assert [next(requests).arrival // 1_000_000 for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: timestamp"):
        next(requests)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"hash_ids":"\xff"}\n', ":1: is not a JSON object: "),
        (b'{"a":' * 100_000, ":1: is not a JSON object: "),
        (AZURE.encode() + b"2023-11-16 18:15:52,1000000000000,5\n", ":5: ContextTokens: "),
        (b'{"arrival":0,"prompt_tokens":1099511627776}\n', ":1: prompt_tokens: "),
        (b'{"arrival":0,"prompt_tokens":9}\n{"prompt_tokens":9}\n', ":2: Object missing required field `arrival`"),
    ],
)
def test_hostile_row_is_refused_by_its_line(tmp_path, content, said):
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        read_trace(file)


def test_too_long_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_rows, "LONGEST_LINE", 1000)
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(TraceError, match="trace:1: is longer than 1000 bytes"):
        read_trace(file)


def test_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(TraceError, match="is not a regular file"):
        read_trace(tmp_path / "trace")
