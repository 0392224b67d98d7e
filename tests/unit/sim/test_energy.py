"""Energy and cost in placement and sweeps: cheap workers are preferred, and no request is late because of this."""

import json

import numpy as np
import pytest
from msgspec import structs

from fleet.cli.main import run
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import WorkerId
from fleet.core.roles import Phase
from fleet.router.placement.policies.built_in import policy
from fleet.router.placement.policies.operating_price import PriceScorer
from fleet.router.policy import BLOCK_TOKENS, ENGINE_BLOCKS, QUANTITIES, Candidates, PlacementRequest
from fleet.sim.experiments.objectives import SweepObjective, ranked, spent
from fleet.sim.experiments.sweep import SweepRow
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.scenarios import SCENARIO
from tests.support.sim.worlds import a_plan, a_pool, a_run

PRICED = {
    "scorers": [
        {"name": "fleet"},
        {"name": "price", "parameters": {"prompt": {"thirsty": 4.0, "": 1.0}, "answer": {"thirsty": 40.0, "": 10.0}}},
    ]
}


def mixed(**router):
    """Return a plan with two pools of two workers; workers of one pool draw four times the power of the others."""
    pools = [
        structs.replace(a_pool(), name="thirsty", busy_watts=1400.0, idle_watts=70.0),
        structs.replace(a_pool(), name="frugal", busy_watts=350.0, idle_watts=70.0),
    ]
    return a_plan(*pools, **router)


@pytest.mark.parametrize("rate", [4.0, 40.0])
def test_price_scorer_spends_less_with_same_attainment(rate):
    plain = a_run(mixed(), rate=rate).outcome
    priced = a_run(structs.replace(mixed(), policy=policy("composed", PRICED)), rate=rate).outcome
    assert priced.energy_kwh < 0.9 * plain.energy_kwh
    assert priced.attainment >= plain.attainment - 0.02


def test_dear_workers_serve_requests_that_would_wait():
    priced = a_run(structs.replace(mixed(), policy=policy("composed", PRICED)), rate=120.0, requests=600).outcome
    work = {pool.name: pool.computed_tokens for pool in priced.pools}
    assert work["thirsty"] > 0.15 * work["frugal"]
    assert priced.attainment > 0.9


def test_invalid_price_is_refused():
    for prompt in ({}, {"": 0.0}, {"": "much"}):
        with pytest.raises(ConfigurationRefused, match="composed"):
            policy("composed", {"scorers": [{"name": "price", "parameters": {"prompt": prompt, "answer": {"": 1.0}}}]})


def test_longest_matching_name_sets_price():
    price = PriceScorer(prompt={"": 2.0, "a": 1.0, "ab": 8.0}, answer={"": 5.0, "a": 3.0}, answer_tokens=10)
    columns = np.zeros((QUANTITIES, 3))
    columns[BLOCK_TOKENS] = 16
    columns[ENGINE_BLOCKS] = (0, 2, 0)
    candidates = Candidates([WorkerId("ab-1"), WorkerId("a-2"), WorkerId("c")], columns)
    request = PlacementRequest(prompt_tokens=100, answer_tokens=4000)
    alone = [100 * 8.0, 68 * 1.0, 100 * 2.0]
    assert price.costs(request, candidates, Phase.PREFILL).tolist() == [each / 16 for each in alone]
    whole = [each + 10 * answer for each, answer in zip(alone, (3.0, 3.0, 5.0), strict=True)]
    assert price.costs(request, candidates, Phase.AGGREGATED).tolist() == [each / 16 for each in whole]


def a_row(scenario, attainment, cost, energy, seed=1):
    outcome = structs.replace(OUTCOME, requests=1000, attainment=attainment, cost=cost, energy_kwh=energy)
    return SweepRow(scenario=scenario, changes={}, seed=seed, outcome=outcome)


OUTCOME = a_run(a_plan(), requests=3).outcome


def test_late_requests_raise_cost_of_good_ones():
    row = a_row("a", 0.5, cost=10.0, energy=1.0)
    assert spent(row.outcome, SweepObjective.COST) == pytest.approx(20.0)
    assert spent(row.outcome, SweepObjective.ENERGY) == pytest.approx(7.2)


def test_ranking_puts_kept_slo_first_and_averages_seeds():
    rows = [
        a_row("cheap and late", 0.6, 1.0, 1.0),
        a_row("dear", 0.99, 9.0, 1.0),
        a_row("good", 0.99, 4.0, 2.0),
        a_row("good", 0.83, 4.0, 2.0, seed=2),
        a_row("nobody", 0.0, 1.0, 1.0),
    ]
    by_cost = ranked(rows, SweepObjective.COST, 0.9)
    assert [each.scenario for each in by_cost] == ["good", "dear", "cheap and late", "nobody"]
    assert [each.keeps for each in by_cost] == [True, True, False, False]
    assert (by_cost[0].seeds, by_cost[0].attainment, by_cost[3].figure) == (2, 0.91, None)
    assert [each.scenario for each in ranked(rows, SweepObjective.ENERGY, 0.9)][:2] == ["dear", "good"]


def test_sweep_command_ranks_by_cost(tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO)
    over = ["--over", "pools.0.gpus=2,4", "--over", "pools.0.gpu=h100,b200", "--processes", "1"]
    assert run(["sim", "sweep", str(scenario), *over, "--best", "energy", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    figures = [each["figure"] for each in answer["ranked"] if each["keeps"]]
    assert figures == sorted(figures)
    assert len(figures) == len(answer["rows"]) == 4
    assert answer["ranked"][0]["changes"]["pools.0.gpus"] == 2
    assert run(["sim", "sweep", str(scenario), *over, "--best", "cost"]) == 0
    assert "1. scenario pools.0.gpus=2" in capsys.readouterr().out
    assert run(["sim", "sweep", str(scenario), *over, "--best", "cost", "--attainment", "2"]) == 3
