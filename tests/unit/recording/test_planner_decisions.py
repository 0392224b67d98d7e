"""Recording of a planner: in a replay, the rule makes the same decisions; a damaged recording is refused with the line's number."""

import argparse
import tomllib
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from fleet.cli.planner import decide
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Role
from fleet.planner.decisions import PlanDecision, PlanGoals
from fleet.planner.machine import PlannerMachine
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.settings import FolderTarget, LoadRuleSettings, PlannerSettings, RouterDemandSettings
from fleet.planner.sizing.capacity import StepCapacity
from fleet.recording.planner_decisions import MOST_LINE, PlannerRecorder, decide_again, read_recording
from tests.support.sim.pipes import a_pipe
from tests.unit.planner.engines import engine
from tests.unit.planner.world import World, pool

POOLS = (pool("decode", Role.DECODE, least=1), pool("prefill", Role.PREFILL, least=1))
GOALS = PlanGoals(ttft_seconds=1.0, tpot_seconds=0.03)
SETTINGS = PlannerSettings(
    model="m",
    goals=GOALS,
    pools=POOLS,
    rule=LoadRuleSettings(requests_per_replica=1),
    source=RouterDemandSettings(addresses=("unix:/x",)),
    target=FolderTarget(folder="x"),
)


def a_rule(goals=GOALS):
    return PlannerMachine(PlannerRuleSettings(), POOLS, goals, StepCapacity({each.name: engine() for each in POOLS}))


class RecordedRule:
    """A rule whose decisions are recorded."""

    def __init__(self, rule, recorder):
        self.interval = rule.interval
        self._rule, self._recorder = rule, recorder

    def decide(self, now, demand, seen) -> PlanDecision:
        decision = self._rule.decide(now, demand, seen)
        self._recorder.decided(now, demand, seen, decision)
        return decision


def recorded(path, most_bytes=1 << 30, duration=1800):
    recorder = PlannerRecorder(path, most_bytes, SETTINGS)
    world = World(RecordedRule(a_rule(), recorder), POOLS, {"prefill": 1, "decode": 1})
    world.run(duration, lambda at: 20.0 if at < duration / 2 else 90.0)
    recorder.close()
    return world


def test_rule_decides_the_same_again(tmp_path):
    world = recorded(tmp_path / "r")
    assert world.wanted["decode"] > 1

    lines = read_recording(tmp_path / "r")
    head = next(lines)
    found = decide_again(a_rule(), lines)

    assert head.settings == SETTINGS
    assert (found.decisions, found.different, found.first) == (len(world.decisions), 0, None)


def test_other_settings_get_the_prices_of_their_book(tmp_path):
    recorded(tmp_path / "r", duration=60)
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(structs.replace(SETTINGS, prices=str(tmp_path / "no-book.toml"))))

    with pytest.raises(ConfigurationRefused, match=r"no-book\.toml"):
        decide.run(argparse.Namespace(recording=tmp_path / "r", config=other, json=False))


TOPOLOGY = """
[[pools]]
role = "prefill"
[[pools]]
role = "decode"
[planner]
goals = { ttft_seconds = 1.0, tpot_seconds = 0.03 }
"""


def test_topology_with_a_planner_decides_again(tmp_path, capsys):
    recorded(tmp_path / "r", duration=60)
    other = tmp_path / "cluster.toml"
    other.write_text(TOPOLOGY)

    assert decide.run(argparse.Namespace(recording=tmp_path / "r", config=other, json=True)) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["decisions"] > 0

    with a_pipe(msgspec.json.encode(tomllib.loads(TOPOLOGY)).decode()) as piped:
        assert decide.run(argparse.Namespace(recording=tmp_path / "r", config=piped, json=True)) == 0

    other.write_text(TOPOLOGY + "[planner.pools.encode]\nmost = 2\n")
    with pytest.raises(ConfigurationRefused, match=r"cluster\.toml: planner\.pools\.encode: is not a pool"):
        decide.run(argparse.Namespace(recording=tmp_path / "r", config=other, json=True))


def test_pool_that_was_not_recorded_is_refused_by_name(tmp_path):
    recorded(tmp_path / "r", duration=60)
    other = tmp_path / "other.json"
    pools = (POOLS[0], structs.replace(POOLS[1], name="b"))
    other.write_bytes(msgspec.json.encode(structs.replace(SETTINGS, pools=pools)))

    with pytest.raises(
        ConfigurationRefused, match=r"pools: 'b' is not a pool of the recording, which has decode, prefill"
    ):
        decide.run(argparse.Namespace(recording=tmp_path / "r", config=other, json=False))


def test_rule_with_other_goals_decides_otherwise(tmp_path):
    recorded(tmp_path / "r")
    lines = read_recording(tmp_path / "r")
    next(lines)

    found = decide_again(a_rule(PlanGoals(ttft_seconds=0.1, tpot_seconds=0.01)), lines)

    assert found.different > 0
    assert found.first <= found.decisions
    assert found.recorded.replicas != found.decided.replicas or found.recorded.reason != found.decided.reason


def test_recording_keeps_its_beginning_within_its_bound(tmp_path):
    recorded(tmp_path / "r", most_bytes=20_000, duration=600)

    lines = list(read_recording(tmp_path / "r"))

    assert (tmp_path / "r").stat().st_size <= 20_000
    assert 3 < len(lines) < 120


def test_earlier_recording_is_kept_once(tmp_path):
    for _ in range(3):
        recorded(tmp_path / "r", duration=60)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["r", "r.1"]


def test_second_recorder_leaves_the_file_to_the_first_one(tmp_path, caplog):
    path = tmp_path / "r"
    first = PlannerRecorder(path, 1 << 20, SETTINGS)
    before = path.read_bytes()

    second = PlannerRecorder(path, 1 << 20, SETTINGS)
    second.close()

    assert [each.name for each in tmp_path.iterdir()] == ["r"]
    assert path.read_bytes() == before
    assert "planner records nothing" in caplog.text
    first.close()
    PlannerRecorder(path, 1 << 20, SETTINGS).close()
    assert (tmp_path / "r.1").read_bytes() == before


def test_second_recorder_begins_when_the_first_has_ended(tmp_path):
    path = tmp_path / "r"
    first = PlannerRecorder(path, 1 << 20, SETTINGS)
    before = path.read_bytes()
    second = PlannerRecorder(path, 1 << 20, SETTINGS)
    world = World(RecordedRule(a_rule(), second), POOLS, {"prefill": 1, "decode": 1})

    world.run(60, lambda _: 20.0)
    assert path.read_bytes() == before
    first.close()
    earlier = len(world.decisions)
    world.run(60, lambda _: 20.0)
    second.close()
    world.run(60, lambda _: 20.0)

    head, *lines = read_recording(path)
    assert head.settings == SETTINGS
    decisions = [msgspec.json.encode(each.decision) for each in lines]
    assert decisions == [msgspec.json.encode(each) for each in world.decisions[earlier : earlier + len(lines)]]
    assert len(lines) > 5
    assert (tmp_path / "r.1").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[1:], "line 1: is not that of a recording"),
        (lambda lines: [lines[0], b"{}", *lines[1:]], "line 2: "),
        (lambda lines: [lines[0].replace(b'"format":1', b'"format":7'), *lines[1:]], "line 1: is not that"),
        (lambda lines: [b""], "is empty"),
        (lambda lines: [lines[0], b'{"x":' + b"[" * 100_000, *lines[1:]], "line 2: "),
        (lambda lines: [lines[0], b" " * MOST_LINE], "has a line of more than 16 MiB"),
    ],
)
def test_damaged_recording_is_refused_by_its_line(tmp_path, damage, said):
    path = tmp_path / "r"
    recorded(path, duration=60)
    path.write_bytes(b"\n".join(damage(path.read_bytes().split(b"\n"))))

    with pytest.raises(ConfigurationRefused, match=said):
        list(read_recording(path))


def test_endless_device_is_no_recording():
    with pytest.raises(ConfigurationRefused, match="/dev/zero: is no recording"):
        next(read_recording(Path("/dev/zero")))


def test_numbers_too_large_to_compute_with_are_refused(tmp_path):
    recorded(tmp_path / "r", duration=60)
    lines = read_recording(tmp_path / "r")
    next(lines)
    endless = (structs.replace(each, now=10**400) for each in lines)

    with pytest.raises(ConfigurationRefused, match="decision 1: cannot be repeated"):
        decide_again(a_rule(), endless)


@pytest.mark.parametrize("name", ["", "none/file"])
def test_unusable_file_is_refused_by_field(tmp_path, name):
    with pytest.raises(ConfigurationRefused, match="record: "):
        PlannerRecorder(tmp_path / name, 1000, SETTINGS)


def test_device_as_a_file_is_refused():
    with pytest.raises(ConfigurationRefused, match="is not a regular file"):
        PlannerRecorder(Path("/dev/full"), 1 << 20, SETTINGS)
