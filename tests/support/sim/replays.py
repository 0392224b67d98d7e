"""Small scenario for tests of replays: the load of a short day on one pool of small replicas."""

import json
from pathlib import Path
from typing import Any

from fleet.sim.planning.replay import Replay
from fleet.sim.planning.scenario import ReplayScenario, read_replay
from tests.support.sim.model_configs import LLAMA_8B

REPLAY = """
model = "model.json"
[workload]
kind = "drawn"
requests = 900
rate = 3.0
arrivals = "day"
day_seconds = 300
prompt_tokens = 6000
output_tokens = 100
[[pools]]
name = "both"
role = "both"
gpu = "l40s"
gpus = 2
[clients]
kind = "open"
[router]
max_queue_seconds = 1000000.0  # whoever waits is late, and counts as such
[slo]
ttft_ms = 5000
tpot_ms = 150
[planner]
rule = "hpa"
warm_up_seconds = 30
[planner.pools.both]
most = 12
start_seconds = 8
"""


def write_replay(folder: Path, text: str = REPLAY) -> Path:
    """Write the scenario and its model, and return the scenario's file."""
    (folder / "model.json").write_text(json.dumps(LLAMA_8B))
    file = folder / "replay.toml"
    file.write_text(text)
    return file


def a_replay(folder: Path, changes: dict[str, Any] | None = None) -> Replay:
    scenario: ReplayScenario = read_replay(write_replay(folder), changes)
    return Replay(scenario, folder)
