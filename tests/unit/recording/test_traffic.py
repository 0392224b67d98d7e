"""Recordings of routers, read as traffic for the simulator."""

import gzip
from functools import partial

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.recording.format import RecordingHead, entry_line, head_line
from fleet.recording.trace_rows import RowSelection, TraceError
from fleet.recording.traces import open_trace
from fleet.router.settings.router import RouterSettings
from fleet.sim.kernel import Kernel
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan, a_pool, a_world

BEGAN = 5 * SECOND


def a_recording(path, requests, cancelled=()):
    """Write the recording of a simulated router that gets these requests at their arrival times."""
    lines = [
        head_line(RecordingHead(recording=1, fleet="1", began=BEGAN, began_unix=0, seed=1, settings=RouterSettings()))
    ]

    def record(now, event, commands):
        lines.append(entry_line(Nanos(BEGAN + now), event, (), commands))

    kernel = Kernel(1)
    world, _ = a_world(kernel, a_plan(a_pool(workers=1)), record)
    ids = []
    for request in requests:
        kernel.at(request.arrival, partial(lambda each: ids.append(world.send(each)), request))
    for number, at in cancelled:
        kernel.at(Nanos(at), lambda number=number: world.cancel(ids[number]))
    kernel.run()
    path.write_bytes(b"".join(lines))
    return path


def a_request(number, at, tokens=100, answer=20, session=0):
    return TraceRequest(
        Nanos(at), tokens, tuple(range(1000 * number, 1000 * number + tokens // BLOCK)), answer, session
    )


def test_recording_yields_its_recorded_traffic(tmp_path):
    requests = [
        a_request(1, 1 * SECOND, answer=900, session=7),  # ends after the requests that arrive later
        a_request(2, 2 * SECOND, tokens=64),
        a_request(1, 2 * SECOND + 5, session=3),
        a_request(4, 3 * SECOND, answer=1, session=7),
    ]

    file = open_trace(a_recording(tmp_path / "recording.jsonl", requests))

    assert (file.format, file.block_tokens) == ("recording", BLOCK)
    told = list(file.requests())
    assert [each.session for each in told] == [1, 0, 2, 1]
    assert [TraceRequest(*_but_session(each)) for each in told] == [
        TraceRequest(*_but_session(each)) for each in requests
    ]


def test_compressed_recording_with_empty_lines_is_equal(tmp_path):
    recording = a_recording(tmp_path / "recording.jsonl", [a_request(1, 0), a_request(2, SECOND)])
    told = list(open_trace(recording).requests())
    lines = recording.read_bytes().splitlines(keepends=True)
    spaced = b"".join([*lines[:1], b"\n", *lines[1:2], b"\r\n", *lines[2:]])
    compressed = tmp_path / "compressed"

    for content in (spaced, gzip.compress(recording.read_bytes()), gzip.compress(spaced)):
        compressed.write_bytes(content)
        assert list(open_trace(compressed).requests()) == told

    for content in (spaced + b"{}\n", gzip.compress(spaced + b"{}\n")):
        compressed.write_bytes(content)
        with pytest.raises(TraceError, match=f"compressed: line {len(lines) + 3}: "):
            list(open_trace(compressed).requests())
    compressed.write_bytes(gzip.compress(spaced)[:-20])
    with pytest.raises(TraceError, match="compressed: Compressed file ended"):
        list(open_trace(compressed).requests())


def test_cancelled_request_has_its_requested_or_answered_length(tmp_path):
    requests = [a_request(1, 0, answer=600), a_request(2, 10, answer=500)]
    recording = a_recording(tmp_path / "recording.jsonl", requests, cancelled=[(0, SECOND), (1, 1000)])
    first, second = open_trace(recording).requests()
    assert 1 <= first.output_tokens < 600
    assert second.output_tokens == 500


def test_selection_by_rows_is_refused_for_recordings(tmp_path):
    recording = a_recording(tmp_path / "recording.jsonl", [a_request(1, 0)])
    with pytest.raises(TraceError, match=r"recording\.jsonl: part and sample count rows"):
        open_trace(recording, cut=RowSelection(begin=0.5))


def test_malformed_line_is_refused_by_its_number(tmp_path):
    recording = a_recording(tmp_path / "recording.jsonl", [a_request(1, 0)])
    recording.write_bytes(recording.read_bytes() + b'{"now": 1}\n')
    with pytest.raises(TraceError, match=r"recording\.jsonl: line \d+: "):
        list(open_trace(recording).requests())


def _but_session(request):
    return request.arrival, request.prompt_tokens, request.chain, request.output_tokens
