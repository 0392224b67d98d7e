"""Metrics of latency predictions, and the latency profiles from which the router predicts."""

import json
from random import Random

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleet.app.agreement.comparison import serve
from fleet.app.agreement.production_world import keys_from_tokens
from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import WorkerId
from fleet.frontend.metrics.predictions import PredictionMetrics, profile_lookup
from fleet.router.latency_predictions import WorkerProfile
from fleet.router.messages import WorkerJoined, WorkerStepped
from fleet.router.observer import ObservedMachine
from fleet.router.settings.router import ProfileSettings
from fleet.sim.cluster.worker import MODEL
from tests.support.builders import a_description
from tests.support.sim.model_configs import LLAMA_8B
from tests.support.sim.worlds import LinearStepTimes
from tests.unit.app.agreement.test_comparison import requests, three


def test_predictions_are_compared_with_measured_times():
    plan, seen = three(), []
    expectations = PredictionMetrics(lambda _: WorkerProfile(steps=LinearStepTimes(), step_tokens=512))

    def observed(now, event, commands):
        expectations(now, event, commands)
        seen.append(generate_latest(registry).decode() if len(seen) == 400 else "")

    registry = CollectorRegistry()
    registry.register(expectations)
    machine = ObservedMachine(plan.router, Random(1), None, keys_from_tokens, observer=observed)
    expectations.machine = machine
    serve(plan, requests(80), machine)
    figures = dict(line.rsplit(" ", 1) for line in seen[400].splitlines() if not line.startswith("#"))
    for worker in ("both-0", "both-1", "both-2"):
        assert float(figures[f'fleet_predictions_total{{model="{MODEL}",of="ttft",role="both",worker="{worker}"}}']) > 5
        assert (
            float(figures[f'fleet_prediction_error{{model="{MODEL}",of="ttft",role="both",worker="{worker}"}}']) < 0.3
        )
        assert float(figures[f'fleet_prediction_error{{model="{MODEL}",of="itl",role="both",worker="{worker}"}}']) < 0.2
        assert figures[f'fleet_worker_drifts_total{{model="{MODEL}",of="itl",role="both",worker="{worker}"}}'] == "0.0"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def test_longest_matching_name_gives_a_worker_its_profile(model):
    profiles = {"d": {"model": model, "gpu": "h100"}, "d-b": {"model": model, "gpu": "b200", "step_tokens": 4096}}
    profile_of = profile_lookup(msgspec.convert(profiles, dict[str, ProfileSettings]))
    of = {name: profile_of(a_description(worker_id=WorkerId(name))) for name in ("d-1", "d-b-1", "p-1")}
    assert (of["d-1"].step_tokens, of["d-b-1"].step_tokens, of["p-1"]) == (8192, 4096, None)
    assert of["d-b-1"].steps.seconds(1000, 5e5, 0, 0) < of["d-1"].steps.seconds(1000, 5e5, 0, 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "abacus"}, "profiles.w: gpu: 'abacus' is not one of"),
        ({"model": "nowhere"}, "profiles.w: nowhere: No such file or directory"),
        ({"tp": 3}, "profiles.w: "),
    ],
)
def test_invalid_profile_is_refused_by_its_name(model, change, told):
    profile = ProfileSettings(**{"model": model, "gpu": "h100", **change})
    with pytest.raises(ConfigurationRefused) as refused:
        profile_lookup({"w": profile})
    assert str(refused.value).startswith(told)


def test_error_ends_the_predictions_only(caplog):
    def breaking(_):
        raise ZeroDivisionError

    expectations = PredictionMetrics(breaking)
    joined = WorkerJoined(description=a_description(), address="")
    expectations(Nanos(1), joined, [])
    expectations(Nanos(2), WorkerStepped(worker_id=WorkerId("w"), progress=()), [])
    assert [record.message for record in caplog.records] == ["predictions stopped"]
    assert all(not metric.samples for metric in expectations.collect())
