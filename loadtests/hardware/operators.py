"""Efficiency of single matrix products, as a share of the GPU's data sheet, fitted to public tables of their durations.

Some of these GPUs have no other measurements.

The model of a product of m×k by k×n is a launch time, plus the root of the sum of squares of the times for reading its operands and
for multiplying. If a table has several kernels for a shape, only the fastest counts. A fifth of the weights' shapes (n, k) is held
out of the fit.

There are two sources: the parquet tables in the `aiconfigurator-core` wheel (NVIDIA GPUs, Apache-2.0; read in an environment with
pyarrow), and the CSV files in `aiter/configs` of AMD's repository ROCm/aiter (MI300X, fp8 block-scaled; MIT).
"""

import csv
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fleet.hardware.gpus import Number, gpu
from fleet.hardware.latency.coefficients import OperatorEfficiency
from loadtests.environments import SystemDistribution, python_of
from loadtests.hardware.regression import Floats, Level, fit

PYARROW = SystemDistribution(name="pyarrow", version="26.0.1", steps=((("pyarrow==26.0.1", "numpy==2.4.6"),),))

READER = Path(__file__).with_name("gemm_tables.py")

SYSTEMS = {
    "a100_sxm": "a100",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "l40s": "l40s",
}

NUMBERS = {"bfloat16": Number.BF16, "fp8": Number.FP8, "fp8_block": Number.FP8, "nvfp4": Number.FP4}
OPERAND_BYTES = {Number.BF16: 2.0, Number.FP8: 1.0, Number.FP4: 0.5625, Number.INT4: 0.53125}

MI300X_UNITS = 304  # compute units of an MI300X, which identify it in aiter's tables
LEAST_SIDE = 1024  # least side of a weight matrix; products with smaller ones are left out, because models have none
MOST_TOKENS = 16384

START = {"launch_us": 4.0, "memory": 0.8, "compute": 0.6}
WIDTHS = {"launch_us": 1.0, "memory": 0.3, "compute": 0.5}
SCATTER = 0.1

Product = tuple[int, int, int]  # sizes m, n and k of a product of an m×k and a k×n matrix


def wheel_operators(wheel: Path, cache: Path) -> list[OperatorEfficiency]:
    """Return the efficiencies of each known GPU and data type that the wheel has a table for."""
    python = python_of(PYARROW, cache)
    found: dict[tuple[str, Number], dict[Product, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(python), str(READER), str(wheel), folder], check=True)
        for path in sorted(Path(folder).glob("*.npz")):
            system, number = path.stem.split("-")
            if system not in SYSTEMS or number not in NUMBERS:
                continue
            table = np.load(path)
            products = zip(table["m"].tolist(), table["n"].tolist(), table["k"].tolist(), strict=True)
            _keep_fastest(
                found.setdefault((SYSTEMS[system], NUMBERS[number]), {}),
                zip(products, (table["ms"] / 1e3).tolist(), strict=True),
            )
    return [operators(name, number, seconds, wheel.name) for (name, number), seconds in sorted(found.items())]


def aiter_operators(folder: Path) -> list[OperatorEfficiency]:
    """Return the efficiency of the MI300X from the tables in `aiter/configs`; an empty list if the folder has no table."""
    fastest: dict[Product, float] = {}
    for path in sorted(folder.rglob("*blockscale*_tuned_gemm*.csv")):
        with path.open(newline="") as file:
            _keep_fastest(fastest, _aiter_rows(csv.DictReader(file)))
    return [operators("mi300x", Number.FP8, fastest, "ROCm/aiter, aiter/configs, MIT")] if fastest else []


def operators(name: str, number: Number, seconds: Mapping[Product, float], source: str) -> OperatorEfficiency:
    """Fit the products of one GPU in one data type.

    Args:
        name: Name of the GPU.
        number: Data type of both operands.
        seconds: Measured time of each product.
        source: Source of the measurements.
    """
    device = gpu(name)
    shapes = [shape for shape in seconds if shape[0] <= MOST_TOKENS and min(shape[1], shape[2]) >= LEAST_SIDE]
    m, n, k = np.array(shapes, dtype=np.float64).T
    measured = np.array([seconds[shape] for shape in shapes])
    width = OPERAND_BYTES[number]
    read = (n * k * width + m * k * width + m * n * 2.0) / device.bandwidth
    multiply = 2.0 * m * n * k / device.flops[device.computes_in(number)]

    def residuals(logs: Floats) -> Floats:
        launch, memory, compute = np.exp(logs).T
        predicted = launch * 1e-6 + ((read / memory) ** 2 + (multiply / compute) ** 2) ** 0.5
        return (np.log(predicted / measured) / SCATTER)[:, None]

    held_out = (n * 31 + k * 17) // 256 % 5 == 0
    level = Level(name="all", keys=[0] * len(shapes), widths=WIDTHS)
    fitted = fit(START, [level], residuals, ~held_out)
    values = fitted.values({"all": 0})
    logs = np.tile(np.log([values[each] for each in START]), (len(shapes), 1))
    errors = np.abs(np.expm1(residuals(logs)[:, 0] * SCATTER))
    return OperatorEfficiency(
        gpu=name,
        number=number,
        rows=len(shapes),
        compute=_short(values["compute"]),
        memory=_short(values["memory"]),
        launch_us=_short(values["launch_us"]),
        median_error=_short(float(np.median(errors[held_out]))),
        source=source,
    )


def _aiter_rows(rows: Iterable[Mapping[str, str]]) -> Iterable[tuple[Product, float]]:
    for row in rows:
        if row.get("gfx", "gfx942") == "gfx942" and int(row["cu_num"]) == MI300X_UNITS and float(row["us"]) > 0:
            yield (int(row["M"]), int(row["N"]), int(row["K"])), float(row["us"]) * 1e-6


def _keep_fastest(fastest: dict[Product, float], rows: Iterable[tuple[Product, float]]) -> None:
    for shape, seconds in rows:
        fastest[shape] = min(seconds, fastest.get(shape, seconds))


def _short(number: float) -> float:
    return float(f"{number:.4g}")
