"""Scenarios: how stores and faults are read, and which scenarios are refused."""

import json
from pathlib import Path

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.hardware.gpus import GIB
from fleet.sim.cluster.faults import NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.planning.scenario import read_replay
from fleet.sim.run import RunPlan
from fleet.sim.run_plan import plan, run_scenario
from fleet.sim.scenario import read_scenario
from tests.support.sim.pipes import a_pipe

MODEL = Path(__file__).parents[3] / "loadtests" / "studies" / "models" / "llama-3.1-70b.json"
BLOCK_BYTES = 80 * 2 * 8 * 128 * 2 * 512  # 70B model: layers, K and V, heads, head size, bf16, tokens
NOW = Nanos(0)


def scenario(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "scenario.toml"
    file.write_text(f"model = '{MODEL}'\n{text}\n[[pools]]\ngpu = 'h100'\ngpus = 16\ntp = 4\n")
    return file


def planned(tmp_path: Path, text: str) -> RunPlan:
    return plan(read_scenario(scenario(tmp_path, text)), tmp_path)


def test_scenario_without_section_has_no_store(tmp_path):
    assert planned(tmp_path, "").store is None


def test_store_has_tiers_with_a_size(tmp_path):
    store = planned(tmp_path, "[store]\nmemory_gib = 100\nssd_gib = 1000\nremote_gib = 5000\npolicy = 's3fifo'").store
    assert [tier.name for tier in store.tiers] == ["cpu", "ssd", "remote"]
    assert [tier.blocks for tier in store.tiers] == [gib * GIB // BLOCK_BYTES for gib in (100, 1000, 5000)]
    assert [tier.shared for tier in store.tiers] == [False, False, True]
    assert [tier.admission for tier in store.tiers] == ["all", "reuse", "all"]
    assert {tier.policy for tier in store.tiers} == {"s3fifo"}
    assert store.block_bytes == BLOCK_BYTES


def test_store_without_room_for_a_block_is_refused(tmp_path):
    with pytest.raises(ConfigurationRefused, match=r"store.memory_gib: 0.01 GiB hold no block: one is 0.1562 GiB"):
        planned(tmp_path, "[store]\nmemory_gib = 0.01")


FAULTS = {
    "kind = 'worker'\nworker = 'both-h100-1'": WorkerLost(
        at=Nanos(3 * SECOND), worker=WorkerId("both-h100-1"), down=Nanos(10 * SECOND)
    ),
    "kind = 'worker'\nworker = 'both-h100-1'\nstart_seconds = 600": WorkerLost(
        at=Nanos(3 * SECOND), worker=WorkerId("both-h100-1"), down=Nanos(10 * SECOND), start=Nanos(600 * SECOND)
    ),
    "kind = 'node'\nnode = 'both-h100-node-1'": NodeLost(
        at=Nanos(3 * SECOND), node=StoreId("both-h100-node-1"), down=Nanos(60 * SECOND)
    ),
    "kind = 'slow'\nworker = 'both-h100-0'\nfactor = 2": WorkerSlow(
        at=Nanos(3 * SECOND), worker=WorkerId("both-h100-0"), factor=2.0, lasting=Nanos(60 * SECOND)
    ),
    "kind = 'cut'\nworker = 'both-h100-0'\nlasting_seconds = 2.5": NetworkCut(
        at=Nanos(3 * SECOND), worker=WorkerId("both-h100-0"), lasting=Nanos(5 * SECOND // 2)
    ),
    "kind = 'store'\nnode = 'both-h100-node-0'": StoreLost(
        at=Nanos(3 * SECOND), node=StoreId("both-h100-node-0"), down=Nanos(10 * SECOND)
    ),
    "kind = 'flip'\nworker = 'both-h100-3'\nrole = 'prefill'": RoleFlip(
        at=Nanos(3 * SECOND), worker=WorkerId("both-h100-3"), role=Role.PREFILL
    ),
}


@pytest.mark.parametrize("text", FAULTS)
def test_every_kind_of_fault_can_be_written(tmp_path, text):
    faults = planned(tmp_path, f"[store]\nmemory_gib = 100\n[[faults]]\nat_seconds = 3\n{text}").faults
    assert faults == (FAULTS[text],)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("kind = 'worker'\nworker = 'h100-9'", r"faults\[0\].worker: 'h100-9' is not one of both-h100-0, both-h100-1"),
        ("kind = 'node'\nnode = 'n'", r"faults\[0\].node: 'n' is not one of both-h100-node-0, both-h100-node-1"),
        ("kind = 'store'\nnode = 'both-h100-node-0'", r"faults\[0\].kind: there is no store to be lost"),
        ("kind = 'fire'\nworker = 'both-h100-0'", r"faults\[0\].*'fire'"),
        ("worker = 'both-h100-0'", r"faults\[0\].*kind"),
    ],
)
def test_impossible_fault_is_refused(tmp_path, text, cause):
    with pytest.raises(ConfigurationRefused, match=cause):
        planned(tmp_path, f"[[faults]]\nat_seconds = 3\n{text}")


def test_scenario_with_store_and_faults_runs(tmp_path):
    faults = "".join(f"[[faults]]\nat_seconds = {2 * number}\n{text}\n" for number, text in enumerate(FAULTS))
    text = (
        "verbatim_answers = true\n[workload]\nkind = 'drawn'\nrequests = 200\nrate = 8\nprefixes = 4\nprefix_tokens = 1024\n"
        f"[engine]\nstart_seconds = 5\n[store]\nmemory_gib = 64\nssd_gib = 256\nremote_gib = 512\n{faults}"
    )
    file = scenario(tmp_path, text)
    outcome = run_scenario(read_scenario(file), tmp_path).outcome
    assert outcome.requests == 200
    assert not outcome.refused


def test_scenario_of_a_replay_is_refused_by_its_section(tmp_path):
    file = scenario(tmp_path, "[planner]\nrule = 'hpa'")

    with pytest.raises(
        ConfigurationRefused, match=r"scenario.toml: planner: only `fleet plan replay` changes the pools"
    ):
        read_scenario(file)


@pytest.mark.parametrize(("read", "more"), [(read_scenario, {}), (read_replay, {"planner": {}})])
def test_scenario_can_come_from_a_pipe(read, more):
    with a_pipe(json.dumps({"model": str(MODEL), "pools": [{"gpu": "h100", "gpus": 16}], **more})) as file:
        assert read(file).model == str(MODEL)
