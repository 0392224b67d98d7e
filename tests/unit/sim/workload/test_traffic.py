"""Traffic: requests that are selected from a trace, scaled in rate, or generated at random."""

import json
from itertools import pairwise
from statistics import fmean, pstdev

import msgspec
import pytest

from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import RecordedWorkload, request_count, requests_of, sessions_of
from tests.support.sim.traces import AGENTIC, CONVERSATION, agentic, conversation

DATA = CONVERSATION.parent
PHASE = {"seconds": 60, "rate": 1.0}


def recorded(**fields) -> RecordedWorkload:
    return msgspec.convert({"kind": "trace", "file": CONVERSATION.name, **fields}, RecordedWorkload)


def requests(workload, seed: int = 1, block_tokens: int = 512):
    return list(requests_of(workload, DATA, block_tokens=block_tokens, seed=seed))


def drawn(**fields):
    return requests(DrawnWorkload(**{"requests": 4000, "rate": 2.0, **fields}))


def arrivals(of) -> list[float]:
    return [each.arrival / SECOND for each in of]


def test_halves_of_trace_make_the_trace():
    first, second = requests(recorded(part=[0, 0.5])), requests(recorded(part=[0.5, 1]))
    whole = conversation().requests
    assert [each.chain for each in first + second] == [each.chain for each in whole]
    assert first == whole[:750]
    assert second[0].arrival == 0
    assert second[-1].arrival == whole[-1].arrival - whole[750].arrival


def test_part_contains_whole_sessions():
    halves = [
        list(requests_of(recorded(file=AGENTIC.name, part=part), DATA, block_tokens=512, seed=1))
        for part in ([0, 0.5], [0.5, 1])
    ]
    assert [len({each.session for each in half}) for half in halves] == [10, 10]
    assert sum(map(len, halves)) == len(agentic().requests)


def test_sample_depends_only_on_seed():
    some, again, others = (
        requests(recorded(sample=0.2)),
        requests(recorded(sample=0.2)),
        requests(recorded(sample=0.2), 2),
    )
    assert some == again != others
    assert len(some) == pytest.approx(300, abs=50)
    later = requests(recorded(sample=0.2, part=[0.5, 1]))
    assert [each.chain for each in later] == [each.chain for each in some[-len(later) :]]


def test_window_counts_from_its_beginning():
    window = requests(recorded(from_seconds=60, to_seconds=120, speed=2))
    whole = [each for each in conversation().requests if 60 * SECOND <= each.arrival < 120 * SECOND]
    assert [each.chain for each in window] == [each.chain for each in whole]
    assert [each.arrival for each in window] == [round((each.arrival - 60 * SECOND) / 2) for each in whole]


def test_request_count_respects_selection():
    assert len(requests(recorded(requests=10, from_seconds=60))) == 10
    assert request_count(recorded(part=[0, 0.5]), DATA, seed=1) == 750
    assert request_count(recorded(requests=10), DATA, seed=1) == 10
    assert request_count(recorded(file=AGENTIC.name), DATA, seed=1) is None
    assert request_count(DrawnWorkload(requests=7), DATA, seed=1) == 7


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"part": [0.5, 0.5]}, "part: nothing lies between 0.5 and 0.5"),
        ({"part": [0.7, 0.5]}, "part: nothing lies between"),
        ({"part": [0, 1.5]}, "part"),
        ({"from_seconds": 9, "to_seconds": 9}, "to_seconds: 9 is not after from_seconds, 9"),
        ({"sample": 0}, "sample"),
        ({"arrivals": "bursts", "kind": "drawn", "burst_seconds": 60}, "burst_seconds: 60 is not less than"),
        ({"arrivals": "phases", "kind": "drawn"}, "phases: they are needed"),
        ({"arrivals": "poisson", "kind": "drawn", "phases": [PHASE]}, "phases: .* belong to no other arrivals"),
        ({"arrivals": "phases", "kind": "drawn", "phases": [PHASE], "turns": 3}, "phases: .* no conversations"),
    ],
)
def test_impossible_selection_names_its_field(fields, said):
    kind = DrawnWorkload if fields.get("kind") == "drawn" else RecordedWorkload
    told = fields if kind is DrawnWorkload else {"file": "x", **fields}
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(told, kind)


def test_empty_selection_is_refused():
    with pytest.raises(ConfigurationRefused, match="workload: nothing is left of the trace"):
        requests(recorded(from_seconds=1e8))


def test_invalid_row_is_refused_when_reached(tmp_path):
    row = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}
    rows = [row] * 5 + [{**row, "input_length": "ten"}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    read = requests_of(recorded(file="trace.jsonl"), tmp_path, block_tokens=512, seed=1)
    assert [next(read).chain for _ in range(5)] == [(1,)] * 5
    with pytest.raises(ConfigurationRefused, match=r"workload\.file: .*trace\.jsonl:6: input_length: Expected `int`"):
        next(read)


def test_trace_without_sessions_is_refused_for_sessions():
    with pytest.raises(ConfigurationRefused, match=r"clients\.kind: .* \(mooncake\) has no sessions"):
        sessions_of(recorded(), DATA, block_tokens=512, seed=1)


def test_conversations_need_session_clients():
    with pytest.raises(ConfigurationRefused, match=r"workload\.turns: .*clients\.kind"):
        requests(DrawnWorkload(turns=3))


def test_sessions_are_limited_to_request_count():
    sessions = list(sessions_of(recorded(file=AGENTIC.name, requests=100, speed=2), DATA, block_tokens=512, seed=1))
    assert sum(len(session.turns) for session in sessions) == 100
    whole = list(sessions_of(recorded(file=AGENTIC.name), DATA, block_tokens=512, seed=1))
    assert sum(len(session.turns) for session in whole) == len(agentic().requests)
    assert sessions[0].turns[1].gap == round(whole[0].turns[1].gap / 2)


@pytest.mark.parametrize("arrivals_", ["poisson", "even", "gamma", "day", "bursts"])
def test_rate_holds_for_all_arrival_kinds(arrivals_):
    of = arrivals(drawn(arrivals=arrivals_, day_seconds=100.0, requests=8000))
    assert len(of) / of[-1] == pytest.approx(2.0, rel=0.06)


def test_gaps_have_stated_variation():
    for variation in (0.3, 3.0):
        gaps = [after - before for before, after in pairwise(arrivals(drawn(arrivals="gamma", variation=variation)))]
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.15)


def test_bursts_have_stated_rate():
    of = arrivals(drawn(arrivals="bursts", requests=12_000, burst_seconds=10, burst_every_seconds=50, burst_factor=6))
    inside = sum(each % 50 < 10 for each in of)
    assert (inside / 10) / ((len(of) - inside) / 40) == pytest.approx(6.0, rel=0.1)


def test_phases_have_stated_rates_and_lengths():
    phases = [
        {"seconds": 1000, "rate": 2.0},
        {"seconds": 500, "rate": 0},
        {"seconds": 1000, "rate": 4.0, "prompt_tokens": 100, "output_tokens": 900},
    ]
    workload = msgspec.convert(
        {"kind": "drawn", "arrivals": "phases", "phases": phases, "prompt_tokens": 1000, "output_tokens": 10},
        DrawnWorkload,
    )
    of = requests(workload)
    first = [each for each in of if each.arrival < 1000 * SECOND]
    last = [each for each in of if each.arrival >= 1500 * SECOND]
    assert len(first) + len(last) == len(of)
    assert (len(first), len(last)) == (pytest.approx(2000, rel=0.08), pytest.approx(4000, rel=0.08))
    lengths = [
        (fmean(each.prompt_tokens for each in part), fmean(each.output_tokens for each in part))
        for part in (first, last)
    ]
    assert lengths == [
        (pytest.approx(1000, rel=0.05), pytest.approx(10, rel=0.05)),
        (pytest.approx(100, rel=0.05), pytest.approx(900, rel=0.05)),
    ]
    assert request_count(workload, DATA, seed=1) is None


def test_sessions_arrive_at_the_rates_of_phases():
    phases = ({"seconds": 100, "rate": 0}, {"seconds": 1000, "rate": 2.0, "prompt_tokens": 100})
    told = {"kind": "drawn", "arrivals": "phases", "phases": phases, "rate": 1000.0}
    workload = msgspec.convert(told, DrawnWorkload)

    sessions = list(sessions_of(workload, DATA, block_tokens=16, seed=1))

    (turns,) = {len(session.turns) for session in sessions}
    assert turns == 1
    of = requests(workload, block_tokens=16)
    assert [session.begins for session in sessions] == [each.arrival for each in of]
    assert [session.turns[0].request.chain for session in sessions] == [each.chain for each in of]


def test_turn_continues_previous_prompt():
    workload = DrawnWorkload(
        requests=200, turns=8, rate=4.0, prompt_tokens=300, prefixes=2, prefix_tokens=64, think_seconds=5.0
    )
    sessions = list(sessions_of(workload, DATA, block_tokens=16, seed=1))
    assert sum(len(session.turns) for session in sessions) == 200
    assert fmean([len(session.turns) for session in sessions]) == pytest.approx(8, abs=1.5)
    assert len({session.turns[0].request.chain[:4] for session in sessions}) == 2
    for session in sessions:
        for number, (before, after) in enumerate(pairwise(session.turns)):
            full = before.request.prompt_tokens // 16
            assert after.after == (number,)
            assert after.request.prompt_tokens > before.request.prompt_tokens + before.request.output_tokens
            assert after.request.chain[:full] == before.request.chain[:full]
            assert not set(after.request.chain[full:]) & set(before.request.chain), (
                "a block that is not full has no name"
            )
            assert len(after.request.chain) == -(-after.request.prompt_tokens // 16)
    gaps = [turn.gap / SECOND for session in sessions for turn in session.turns[1:]]
    assert fmean(gaps) == pytest.approx(5.0, rel=0.2)
    begins = [session.begins / SECOND for session in sessions]
    assert begins == sorted(begins)
    assert len(begins) / begins[-1] == pytest.approx(4.0 / 8, rel=0.5)


def test_invalid_row_of_sorted_trace_is_refused(tmp_path):
    (tmp_path / "rows").write_text('{"arrival":0,"prompt_tokens":9}\n{"arrival":0}\n')
    with pytest.raises(ConfigurationRefused, match="rows:2: Object missing required field `prompt_tokens`"):
        requests_of(RecordedWorkload(file="rows"), tmp_path, block_tokens=512, seed=1)
