"""Load curve: which loads are run, and which runs are reused."""

import json
import multiprocessing
import threading

import psutil
import pytest
from msgspec import structs

from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments.load_curve import ENOUGH, FURTHER, MOST_FURTHER, LoadPoint, load_curve, load_runs
from fleet.sim.results.history import History
from fleet.sim.results.outcomes import Slo
from fleet.sim.run_plan import run_scenario
from fleet.sim.scenario import Scenario, SimulatedPoolSection
from fleet.sim.workload.drawn import DrawnWorkload, LoadPhase
from tests.support.sim.model_configs import LLAMA_70B
from tests.support.waiting import eventually


@pytest.fixture
def scenario(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return Scenario(
        model="config.json",
        pools=(SimulatedPoolSection(gpu="h100", gpus=4, tp=4),),
        workload=DrawnWorkload(requests=60, rate=1.0, prompt_tokens=2000, output_tokens=20),
        slo=Slo(ttft_ms=800, tpot_ms=100),
    )


def test_curve_continues_until_it_falls(scenario, tmp_path):
    points = load_curve(scenario, tmp_path, (1.0, 0.5))

    loads = [point.load for point in points]
    assert loads == [0.5, *(FURTHER**power for power in range(len(points) - 1))]
    assert 3 <= len(points) <= 2 + MOST_FURTHER
    assert all(point.outcome.attainment >= ENOUGH for point in points[:-1])
    assert [point.rate for point in points] == pytest.approx([load * points[1].rate for load in loads], rel=0.01)
    assert points[0].outcome.attainment >= points[-1].outcome.attainment


def test_load_multiplies_the_rates_of_phases(scenario, tmp_path):
    phases = (LoadPhase(seconds=40, rate=0.5), LoadPhase(seconds=20, rate=2.0))
    scenario = structs.replace(scenario, workload=DrawnWorkload(arrivals="phases", phases=phases, prompt_tokens=2000))

    points = load_curve(scenario, tmp_path, (1.0, 2.0))[:2]

    assert points[1].rate == pytest.approx(2 * points[0].rate, rel=0.01)
    assert points[1].outcome.requests == points[0].outcome.requests > 20


def test_known_point_is_not_run_again(scenario, tmp_path):
    history = History(scenario.slo)
    outcome = run_scenario(scenario, tmp_path, on_end=history.add).outcome
    known = LoadPoint(load=1.0, rate=history.rate, users=0, outcome=outcome)

    [point] = [each for each in load_curve(scenario, tmp_path, (1.0,), known=known) if each.load == 1.0]

    assert point is known
    [anew] = [each for each in load_curve(scenario, tmp_path, (1.0,)) if each.load == 1.0]
    assert anew.rate == known.rate
    assert anew.outcome.digest == outcome.digest


def test_longer_run_is_not_reused_as_point(scenario, tmp_path):
    history = History(scenario.slo)
    outcome = run_scenario(scenario, tmp_path, on_end=history.add).outcome
    longer = LoadPoint(load=1.0, rate=1.0, users=0, outcome=structs.replace(outcome, requests=1_000_000))

    assert longer not in load_curve(scenario, tmp_path, (1.0,), known=longer)


@pytest.fixture
def endless(scenario):
    """Return the scenario with so many requests that it takes minutes."""
    return structs.replace(scenario, workload=structs.replace(scenario.workload, requests=3_000_000))


def the_child(others):
    """Wait until a new child process of the caller computes, and return this process."""

    def look():
        ours = [child for child in multiprocessing.active_children() if child not in others]
        return ours[0] if ours and sum(psutil.Process(ours[0].pid).cpu_times()[:2]) > 1.0 else None

    return eventually(look, otherwise=lambda: "nothing runs beside the caller")


def test_unused_runs_end_with_the_block(endless, tmp_path):
    others = multiprocessing.active_children()

    with load_runs(endless, tmp_path, 2) as run:
        run.expect((1.0, 2.0))
        child = the_child(others)

    assert not child.is_alive()


def test_killed_process_is_a_configuration_error(endless, tmp_path):
    killer = threading.Thread(target=lambda others: the_child(others).kill(), args=(multiprocessing.active_children(),))

    def asked():
        with load_runs(endless, tmp_path, 2) as run:
            run.expect((1.0,))
            killer.start()
            run.at(1.0)

    with pytest.raises(ConfigurationRefused, match="--processes"):
        asked()
    killer.join()
