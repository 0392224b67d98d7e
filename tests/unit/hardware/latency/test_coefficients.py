"""Coefficients of this version: their basis, their errors, and plausibility."""

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number, gpus
from fleet.hardware.latency.coefficients import (
    EFFICIENCIES,
    LEVELS,
    NAMES,
    EstimateBasis,
    GroupFactors,
    coefficients,
    compose,
    estimate,
    kind_of,
    scaled,
    shape_of,
    subject_of,
)
from fleet.hardware.latency.measurements import MeasuredPhase
from fleet.hardware.latency.step_model import pairs
from fleet.hardware.models import Precision, read_model
from fleet.hardware.sharding import ShardingDegrees, shard_model
from tests.support.sim.model_configs import DEEPSEEK_V3, GPT_OSS, LLAMA_70B, MIXTRAL, a_model

KNOWN = coefficients()
FP8 = Precision(weights=Number.FP8, experts=Number.FP8, kv=Number.FP8)
SHARES = ("memory", "compute", "experts_memory", "experts_compute", "attention", "kv", "link")


def on(name, config=LLAMA_70B, backend="vllm", **cuts):
    return estimate(
        shard_model(read_model(config, precision=FP8), gpus()[name], ShardingDegrees(**(cuts or {"tp": 8}))), backend
    )


def overall(basis):
    [row] = [
        row
        for row in KNOWN.accuracy
        if (row.basis, row.system, row.backend, row.phase, row.model)
        == (basis, "all", "all", MeasuredPhase.AGGREGATED, "all")
    ]
    return row.accuracy


def test_held_out_measurements_have_stated_errors():
    assert overall(EstimateBasis.MODEL).rows > 400
    assert overall(EstimateBasis.MODEL).ttft_median <= 0.25
    assert overall(EstimateBasis.MODEL).tpot_median <= 0.10


def test_measurements_are_either_fitted_or_held_out():
    """Compare the numbers of rows with the wheel: it has 3,232 measurements that are distinct, complete and possible (docs/hardware.md)."""
    fitted = KNOWN.groups()["all", ""].rows
    tested = [
        row.accuracy.rows
        for row in KNOWN.accuracy
        if (row.basis, row.system, row.backend, row.model) == (EstimateBasis.MODEL, "all", "all", "all")
    ]

    assert fitted + sum(tested) == 3232


def test_errors_grow_with_distance_from_measurements():
    assert overall(EstimateBasis.MODEL).tpot_median < overall(EstimateBasis.GPU).tpot_median
    assert overall(EstimateBasis.MODEL).tpot_median < overall(EstimateBasis.ENGINE).tpot_median


def test_coefficients_name_their_source():
    assert "silicon_sample.csv" in KNOWN.provenance.source
    assert len(KNOWN.provenance.sha256) == 64
    assert "Apache-2.0" in KNOWN.provenance.licence


def test_every_group_has_all_coefficients_and_known_level():
    assert len(KNOWN.start) == len(NAMES)
    for factors in KNOWN.factors:
        assert len(factors.of) == len(NAMES)
        assert factors.level in LEVELS
        assert factors.rows > 0


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", list(gpus()))
@pytest.mark.parametrize(
    "config", [LLAMA_70B, MIXTRAL, DEEPSEEK_V3, GPT_OSS], ids=["llama", "mixtral", "deepseek", "gpt-oss"]
)
def test_no_engine_is_far_beyond_its_hardware(config, name, backend):
    efficiency, _ = compose(KNOWN.start, KNOWN.groups(), subject_of(a_model(config), name, backend))

    for share in SHARES:
        assert 0.02 < getattr(efficiency, share) < 1.6, share
    assert all(getattr(efficiency, each) >= 0 for each in EFFICIENCIES)


def test_estimate_names_its_basis():
    assert on("h100").basis is EstimateBasis.MODEL
    assert on("h100", MIXTRAL, tp=2).basis is EstimateBasis.GPU
    assert on("mi300x").basis is EstimateBasis.ENGINE
    assert on("mi300x").tpot_error > on("a100").tpot_error > on("h100").tpot_error


PUBLISHED = {  # tokens per second of Llama-3.1-70B in fp8 on eight MI300X, by prompt tokens, with answers of 2,048 (AMD's ROCm performance page)
    128: 13_212,
    2048: 7_252,
}


@pytest.mark.parametrize(("prompt", "published"), PUBLISHED.items())
def test_mi300x_products_bring_estimates_near_published_figures(prompt, published):
    concurrency, answer = 512, 2048
    step = on("mi300x").step
    between = step.seconds(0, 0, concurrency, concurrency * (prompt + answer / 2))
    prefill = step.seconds(prompt, pairs(prompt, 0), 0, 0) * concurrency

    predicted = concurrency * answer / (between * answer + prefill)

    assert predicted == pytest.approx(published, rel=0.35)


def test_products_of_other_maker_do_not_scale_attention():
    placement = shard_model(read_model(LLAMA_70B, precision=FP8), gpus()["mi300x"], ShardingDegrees(tp=8))
    efficiency, _ = compose(KNOWN.start, KNOWN.groups(), subject_of(placement.model, "mi300x", "vllm"))

    here = scaled(efficiency, placement, KNOWN)

    assert here.compute < efficiency.compute
    assert here.memory < efficiency.memory
    assert (here.attention, here.kv) == (efficiency.attention, efficiency.kv)


def test_factors_of_all_matching_levels_multiply():
    subject = subject_of(a_model(), "h100", "vllm")
    ones = [1.0] * len(NAMES)
    levels = [("backend", "vllm", 2.0), ("gpu", "h100", 3.0), ("gpu", "b200", 5.0), ("model", subject.shape, 7.0)]
    groups = {
        (level, key): GroupFactors(level=level, key=key, rows=1, of=(factor, *ones[1:]))
        for level, key, factor in levels
    }

    efficiency, client = compose((0.01, *ones[1:]), groups, subject)

    assert efficiency.memory == pytest.approx(0.01 * 2 * 3 * 7)
    assert efficiency.compute == client.front == 1.0


def test_models_are_recognised_by_shape():
    assert shape_of(read_model(LLAMA_70B, "a fine-tune")) == shape_of(a_model())
    assert kind_of(a_model(DEEPSEEK_V3)) == "latent-moe"


def test_unmeasured_engine_is_refused():
    with pytest.raises(ConfigurationRefused, match=r"backend: 'llama\.cpp' is not one of sglang, trtllm, vllm"):
        on("h100", backend="llama.cpp")


def test_engine_that_does_not_run_on_the_gpu_is_refused():
    with pytest.raises(ConfigurationRefused, match=r"^backend: trtllm does not run on mi300x, a GPU of amd"):
        on("mi300x", backend="trtllm")


def test_faster_memory_decodes_faster():
    times = [on(name).step.seconds(0, 0, 16, 32_000) for name in ("b200", "h200", "a100", "l40s")]

    assert times == sorted(times)


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "mi300x", "a100"])
def test_step_times_are_plausible(name):
    """Check step times of Llama-3.1-70B in fp8 on eight GPUs: 4 to 20 ms for a token, 40 to 900 ms for 4,096 prompt tokens."""
    step = on(name).step

    assert 0.004 < step.seconds(0, 0, 8, 16_000) < 0.020
    assert 0.040 < step.seconds(4096, pairs(4096, 0), 0, 0) < 0.900
