"""Fit of hardware coefficients: what it recovers, what it leaves unchanged, and that a second fit gives the same result."""

from itertools import product as product_of

import msgspec
import numpy as np
import pytest

from fleet.hardware.aiconfigurator import Sample
from fleet.hardware.gpus import Number, gpu
from fleet.hardware.latency.coefficients import NAMES, Coefficients, Provenance
from fleet.hardware.latency.measurements import MeasuredPhase, MeasuredRole
from fleet.hardware.latency.prediction import predict
from fleet.hardware.sharding import ShardingDegrees
from loadtests.hardware.campaign import campaign
from loadtests.hardware.fit import START, Fitting
from loadtests.hardware.operators import aiter_operators, operators
from loadtests.hardware.regression import Level, fit
from tests.support.sim.model_configs import a_model
from tests.unit.hardware.latency.measured import a_measurement

SIZES = np.tile([1.0, 2.0, 4.0, 8.0, 16.0], 40)
ENGINES = ["fast" if row % 2 else "slow" for row in range(len(SIZES))]
ALL = Level(name="all", keys=[""] * len(SIZES), widths={"base": 2.0, "slope": 2.0})
BY_ENGINE = Level(name="engine", keys=ENGINES, widths={"slope": 0.5})
EVERY_ROW = np.ones(len(SIZES), dtype=bool)


def residuals_from(measured, scatter=0.02):
    def residuals(logs):
        base, slope = np.exp(logs).T
        return (np.log((base + slope * SIZES) / measured) / scatter)[:, None]

    return residuals


def measured_with(fast, slow, noise=0.0):
    slopes = np.where(np.array(ENGINES) == "fast", fast, slow)
    return (3.0 + slopes * SIZES) * np.exp(noise * np.random.default_rng(7).standard_normal(len(SIZES)))


def fitted(measured, rows=EVERY_ROW):
    return fit({"base": 1.0, "slope": 1.0}, [ALL, BY_ENGINE], residuals_from(measured), rows)


def test_fit_recovers_coefficients_of_every_group():
    found = fitted(measured_with(fast=1.5, slow=2.5, noise=0.02))

    assert found.values({"all": "", "engine": "fast"})["slope"] == pytest.approx(1.5, rel=0.02)
    assert found.values({"all": "", "engine": "slow"})["slope"] == pytest.approx(2.5, rel=0.02)
    assert found.values({"all": "", "engine": "slow"})["base"] == pytest.approx(3.0, rel=0.05)


def test_unknown_group_has_common_coefficients():
    found = fitted(measured_with(fast=1.5, slow=2.5))

    common = found.values({"all": "", "engine": "unheard of"})["slope"]
    assert common == found.values({"all": ""})["slope"]
    assert 1.5 < common < 2.5


def test_held_out_rows_change_nothing():
    measured = measured_with(fast=1.5, slow=2.5)
    rows = np.arange(len(SIZES)) % 3 > 0
    spoilt = np.where(rows, measured, measured * 50)

    assert fitted(measured, rows).values({"all": ""}) == fitted(spoilt, rows).values({"all": ""})


def test_outliers_weigh_little():
    measured = measured_with(fast=1.5, slow=2.5, noise=0.02)
    measured[::20] *= 10

    assert fitted(measured).values({"all": "", "engine": "fast"})["slope"] == pytest.approx(1.5, rel=0.05)


def test_same_rows_give_same_coefficients():
    measured = measured_with(fast=1.5, slow=2.5, noise=0.02)

    assert fitted(measured).values({"all": ""}) == fitted(measured).values({"all": ""})


@pytest.mark.parametrize("phase", list(MeasuredPhase))
def test_arrays_predict_like_single_measurements(phase):
    """Compare the predictions of the fit, for all measurements at once, with those of the command, one by one."""
    sides = {
        "prefill": MeasuredRole(parallelism=ShardingDegrees(tp=4), workers=2),
        "decode": MeasuredRole(parallelism=ShardingDegrees(tp=8)),
    }
    measurements = [
        a_measurement(phase=phase, concurrency=concurrency, prompt_tokens=prompt_tokens, **sides)
        for concurrency in (1, 16, 512)
        for prompt_tokens in (512, 30_000)
    ]
    models = {"llama-3.1-70b": a_model()}
    start = tuple(START[name] for name in NAMES)
    nothing = Provenance(source="", sha256="", licence="", split="", command="")
    known = Coefficients(provenance=nothing, start=start, factors=(), operators=(), accuracy=())

    together = campaign(measurements, models, phase).predict(np.tile(np.log(start), (len(measurements), 1)))

    one_by_one = np.array([predict(each, models, known) for each in measurements])
    assert together.ttft * 1e3 == pytest.approx(one_by_one[:, 0], rel=1e-9)
    assert together.tpot * 1e3 == pytest.approx(one_by_one[:, 1], rel=1e-9)


SPLIT = [
    a_measurement(
        gpu=gpu_, prompt_tokens=prompt_tokens, concurrency=concurrency, ttft_ms=60.0 + each, tpot_ms=9.0 + each
    )
    for each, (gpu_, prompt_tokens, concurrency) in enumerate(product_of(("h100",), range(500, 1500, 100), (1, 16)))
]


def the_fit_of(measurements):
    sample = Sample(
        rows=len(measurements), measurements=tuple(measurements), models={"llama-3.1-70b": a_model()}, left_out=0
    )
    return Fitting(sample).committed()


def spoilt(measurement):
    return msgspec.structs.replace(measurement, ttft_ms=measurement.ttft_ms * 7, tpot_ms=measurement.tpot_ms / 3)


def test_held_out_curves_do_not_affect_committed_fit():
    held_out = sum(each.held_out for each in SPLIT)
    assert 0 < held_out < len(SPLIT) / 2
    assert held_out == sum(spoilt(each).held_out for each in SPLIT)

    found = the_fit_of(SPLIT)
    beside = the_fit_of([spoilt(each) if each.held_out else each for each in SPLIT])
    within = the_fit_of([each if each.held_out else spoilt(each) for each in SPLIT])

    assert found.rows["all", ""] == len(SPLIT) - held_out
    assert all((beside.deviations[level] == found.deviations[level]).all() for level in found.deviations)
    assert any((within.deviations[level] != found.deviations[level]).any() for level in found.deviations)


def test_fit_recovers_matrix_product_efficiency():
    found = operators("h100", Number.BF16, products(launch=5e-6, memory=0.8, compute=0.7), "made up")

    assert found.compute == pytest.approx(0.7, rel=0.03)
    assert found.memory == pytest.approx(0.8, rel=0.05)
    assert found.launch_us == pytest.approx(5, rel=0.1)
    assert found.median_error < 0.01


def test_mi300x_tables_are_recognised(tmp_path):
    lines = ["gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName"]
    for m, n, k in SHAPES:
        seconds = product("mi300x", Number.FP8, m, n, k, launch=5e-6, memory=0.7, compute=0.4)
        lines.append(f"gfx942,304,{m},{n},{k},1,0,{seconds * 1e6},best")
        lines.append(f"gfx942,304,{m},{n},{k},2,0,{seconds * 3e6},worse")
        lines.append(f"gfx942,80,{m},{n},{k},1,0,{seconds * 1e5},MI308X")
        lines.append(f"gfx950,256,{m},{n},{k},1,0,{seconds * 1e5},MI355X")
    (tmp_path / "model_configs").mkdir()
    (tmp_path / "model_configs" / "a8w8_blockscale_tuned_gemm_some.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "bf16_tuned_gemm.csv").write_text("other,columns\n")

    [found] = aiter_operators(tmp_path)

    assert (found.gpu, found.number, found.rows) == ("mi300x", Number.FP8, len(SHAPES))
    assert found.compute == pytest.approx(0.4, rel=0.05)
    assert aiter_operators(tmp_path / "nothing") == []


SHAPES = [
    (m, n, k)
    for m in (1, 16, 256, 2048, 8192)
    for n in (1024, 2048, 4096, 7168, 16384)
    for k in (1024, 2048, 4096, 7168)
]


def products(**reached):
    return {shape: product("h100", Number.BF16, *shape, **reached) for shape in SHAPES}


def product(name, number, m, n, k, *, launch, memory, compute):
    device, width = gpu(name), number.num_bytes
    read = (n * k * width + m * k * width + m * n * 2) / device.bandwidth / memory
    multiply = 2 * m * n * k / device.flops[number] / compute
    return launch + (read**2 + multiply**2) ** 0.5
