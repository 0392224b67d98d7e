"""Fit of `fleet/hardware/latency/coefficients.json` to public measurements, with the errors on held-out measurements.

    pip download aiconfigurator-core==0.12.0 --no-deps -d /tmp
    python -m loadtests.hardware.fit /tmp/aiconfigurator_core-0.12.0-*.whl [--operators] [--aiter FOLDER] [--output FILE]

The fit uses four fifths of all curves (`fleet.hardware.latency.measurements`), and the committed file comes from this fit alone, so
`fleet hardware accuracy --data WHEEL` finds the same errors. Two more series of fits leave out one model at a time, and one GPU with
many measurements at a time: they give the errors for models and GPUs without measurements. All fits take five minutes of one core.
`--operators` also fits the wheel's tables of matrix products: it takes another minute, and makes a virtual environment with pyarrow to
read them. `--aiter` fits the MI300X's matrix products from a checkout of ROCm/aiter. Without these options, the file keeps its
efficiencies of matrix products.

A width (`WIDTHS`) is the standard deviation of a coefficient between groups, in logarithms. Attention, KV and bandwidth start from the
wheel's tables of single operators and stay near them, because the measurements reach only 15,000 tokens and say little about long
contexts.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.config import default_cache_dir
from fleet.hardware.aiconfigurator import Sample, read_sample
from fleet.hardware.latency.coefficients import (
    CLIENTS,
    EFFICIENCIES,
    FILE,
    LEVELS,
    NAMES,
    AccuracyRow,
    Coefficients,
    EstimateBasis,
    GroupFactors,
    OperatorEfficiency,
    Provenance,
    coefficients,
)
from fleet.hardware.latency.measurements import Accuracy, MeasuredPhase, Measurement, cells
from fleet.hardware.latency.prediction import can_be_placed, subject
from loadtests.hardware.campaign import Campaign, campaign
from loadtests.hardware.operators import aiter_operators, wheel_operators
from loadtests.hardware.regression import FittedCoefficients, Floats, Level, fit

OUTPUT = Path(__file__).parents[2] / "fleet" / "hardware" / "latency" / FILE

START = {
    "memory": 0.75,
    "compute": 0.5,
    "experts_memory": 0.7,
    "experts_compute": 0.4,
    "attention": 0.6,
    "kv": 0.8,
    "link": 0.5,
    "exchange_us": 8.0,
    "layer_us": 30.0,
    "moe_layer_us": 20.0,
    "step_us": 500.0,
    "sequence_us": 8.0,
    "waves": 10.0,
    "front": 0.02,
    "front_token": 5e-6,
    "late_slots": 0.02,
}

SHARED_WIDTHS = {
    "memory": 0.1,
    "compute": 0.3,
    "experts_memory": 0.15,
    "experts_compute": 0.2,
    "attention": 0.1,
    "kv": 0.1,
    "link": 0.3,
    "exchange_us": 0.7,
    "layer_us": 1.0,
    "moe_layer_us": 1.0,
    "step_us": 1.0,
    "sequence_us": 1.0,
    "waves": 0.4,
    "front": 1.0,
    "front_token": 0.5,
    "late_slots": 1.5,
}
"""Widths of the coefficients at the level `all`, a single group that contains all measurements."""

STIFFNESS = {
    "link": 0.5,
    "memory": 0.5,
    "kv": 0.3,
    "attention": 0.2,
    "compute": 0.7,
    "experts_memory": 0.6,
    "experts_compute": 0.4,
}
"""Factors that make the widths of some coefficients smaller, because these coefficients differ less between groups.

Measurements can hardly separate the cost of prompts in dense layers from the cost in experts. Without these factors, the fitted matrix
products of one engine would be twice as fast as its GPU can compute.
"""

WIDTHS = {
    "backend": (0.3, 0.0),
    "gpu": (0.25, 0.0),
    "gpu_backend": (0.2, 0.0),
    "numbers": (0.2, 0.0),
    "gpu_numbers": (0.2, 0.0),
    "kind": (0.3, 0.0),
    "backend_kind": (0.15, 0.0),
    "model": (0.2, 0.0),
    "backend_model": (0.2, 0.0),
    "measured": (0.25, 0.3),
    "client": (0.0, 0.6),
    "gpu_client": (0.0, 0.3),
}
"""The widths of each level: the first for efficiencies, the second for the times that benchmark clients add."""

SCATTER = (0.15, 0.08)
"""Assumed standard deviations of TTFT and TPOT, in logarithms; residuals are divided by them."""

CROSSED_GPUS = ("h100", "h200", "b200", "b300")
"""GPUs that are left out in turn: those with more than a hundred aggregated measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.hardware.fit", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--operators", action="store_true", help="fit the tables of matrix products as well")
    parser.add_argument(
        "--aiter", type=Path, metavar="FOLDER", help="aiter/configs of a checkout: products on the MI300X"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    fitting = Fitting(read_sample(arguments.wheel))
    operators = {(each.gpu, each.number): each for each in coefficients().operators}
    if arguments.operators:
        found = wheel_operators(arguments.wheel, default_cache_dir() / "hardware")
        operators |= {(each.gpu, each.number): each for each in found}
    if arguments.aiter:
        operators |= {(each.gpu, each.number): each for each in aiter_operators(arguments.aiter)}
    made = fitting.run(arguments.wheel, tuple(operators.values()))
    arguments.output.write_text(layout(made), encoding="utf-8")


def layout(made: Coefficients) -> str:
    """Return JSON with one group of factors per line, so that changes are readable."""
    parts = []
    for name in Coefficients.__struct_fields__:
        content = getattr(made, name)
        if name in ("factors", "operators", "accuracy"):
            lines = ",\n".join(f"  {msgspec.json.encode(each).decode()}" for each in content)
            parts.append(f'"{name}": [\n{lines}\n ]')
        else:
            parts.append(f'"{name}": {msgspec.json.encode(content).decode()}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


class Fitting:
    """Fits the coefficients to all measurements or to a part of them, and computes the errors of the predictions."""

    def __init__(self, sample: Sample) -> None:
        phases = {each.phase for each in sample.measurements if can_be_placed(each, sample.models)}
        self._campaigns: list[Campaign] = [
            campaign(sample.measurements, sample.models, phase) for phase in MeasuredPhase if phase in phases
        ]
        self._measurements: list[Measurement] = [each for campaign in self._campaigns for each in campaign.measurements]
        subjects = [subject(each, sample.models) for each in self._measurements]
        self._levels = [
            Level(name=name, keys=[key(each) for each in subjects], widths=_widths(name))
            for name, key in LEVELS.items()
        ]

    def run(self, wheel: Path, operators: Sequence[OperatorEfficiency]) -> Coefficients:
        held_out = self._where(lambda each: each.held_out)
        best = self.committed()
        accuracy = list(self._rows(best, held_out, EstimateBasis.MODEL, "four of five curves", "the fifth curve"))
        crossed = self._crossed(lambda each: each.model, sorted({each.model for each in self._measurements}))
        accuracy += _report(crossed, self._measurements, EstimateBasis.GPU, "all other models", "each model in turn")
        crossed = self._crossed(lambda each: each.gpu, CROSSED_GPUS)
        accuracy += _report(crossed, self._measurements, EstimateBasis.ENGINE, "all other GPUs", "each GPU in turn")
        return Coefficients(
            provenance=Provenance(
                source=f"{wheel.name}: systems/silicon_sample.csv and systems/data/*/gemm, NVIDIA",
                sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
                licence="Apache-2.0; these are figures derived from it, none of it is copied",
                split="whole curves over concurrency, by SHA-256 of what they are: see fleet/hardware/latency/measurements.py",
                command="python -m loadtests.hardware.fit WHEEL --operators",
            ),
            start=tuple(START[name] for name in NAMES),
            factors=tuple(_factors(best)),
            operators=tuple(operators),
            accuracy=tuple(accuracy),
        )

    def committed(self) -> FittedCoefficients:
        """Return the fit to four fifths of all curves, whose result is committed to the repository."""
        return self._fit(~self._where(lambda each: each.held_out), "curves")

    def _where(self, holds: Callable[[Measurement], bool]) -> NDArray[np.bool_]:
        return np.array([holds(each) for each in self._measurements])

    def _fit(self, rows: NDArray[np.bool_], name: str) -> FittedCoefficients:
        fitted = fit({name: START[name] for name in NAMES}, self._levels, self._scaled, rows)
        print(f"{name}: {rows.sum()} measurements, loss {fitted.loss:.0f}", file=sys.stderr)
        return fitted

    def _residuals(self, logs: Floats) -> Floats:
        parts, start = [], 0
        for each in self._campaigns:
            end = start + len(each.measurements)
            parts.append(each.residuals(logs[start:end]))
            start = end
        return np.concatenate(parts)

    def _scaled(self, logs: Floats) -> Floats:
        return self._residuals(logs) / np.array(SCATTER)

    def _errors(self, fitted: FittedCoefficients) -> Floats:
        """Return the relative errors of the predicted TTFT and TPOT of all measurements, shape [measurements, 2]."""
        logs = np.tile(np.array(fitted.guess), (len(self._measurements), 1))
        for level in self._levels:
            for row, key in enumerate(level.keys):
                logs[row] += fitted.deviations.get((level.name, key), 0.0)
        return np.abs(np.exp(self._residuals(logs)) - 1)

    def _rows(
        self,
        fitted: FittedCoefficients,
        tested: NDArray[np.bool_],
        basis: EstimateBasis,
        fitted_on: str,
        tested_on: str,
    ) -> Iterable[AccuracyRow]:
        errors = np.where(tested[:, None], self._errors(fitted), np.nan)
        return _report(errors, self._measurements, basis, fitted_on, tested_on)

    def _crossed(self, group: Callable[[Measurement], str], names: Sequence[str]) -> Floats:
        """Leave out each group in turn, and return the errors of its measurements under a fit to all others.

        Measurements that are in none of the groups get NaN.
        """
        errors = np.full((len(self._measurements), 2), np.nan)
        for name in names:
            left_out = self._where(lambda each, name=name: group(each) == name)
            fitted = self._fit(~left_out, f"without {name}")
            errors[left_out] = self._errors(fitted)[left_out]
            medians = np.median(errors[left_out], axis=0)
            print(f"  {name}: medians {medians[0]:.3f} {medians[1]:.3f}", file=sys.stderr)
        return errors


def _report(
    errors: Floats, measurements: Sequence[Measurement], basis: EstimateBasis, fitted_on: str, tested_on: str
) -> list[AccuracyRow]:
    """Return error rows for all measurements, for each engine, for each GPU with engine, and for each model. Errors that are NaN do not count."""
    rows = []
    tested = ~np.isnan(errors[:, 0])
    for cell in cells(measurements):
        inside = tested & np.array([cell.holds(each) for each in measurements])
        if not inside.any():
            continue
        means, medians = errors[inside].mean(axis=0), np.median(errors[inside], axis=0)
        rows.append(
            AccuracyRow(
                basis=basis,
                system=cell.system,
                backend=cell.backend,
                phase=cell.phase,
                model=cell.model,
                accuracy=Accuracy(
                    rows=int(inside.sum()),
                    ttft_mape=_short(means[0]),
                    ttft_median=_short(medians[0]),
                    tpot_mape=_short(means[1]),
                    tpot_median=_short(medians[1]),
                ),
                fitted_on=fitted_on,
                tested_on=tested_on,
            )
        )
    return rows


def _factors(fitted: FittedCoefficients) -> Iterable[GroupFactors]:
    for (level, key), deviations in fitted.deviations.items():
        yield GroupFactors(
            level=level,
            key=str(key),
            rows=fitted.rows[level, key],
            of=tuple(_short(factor) for factor in np.exp(deviations)),
        )


def _widths(level: str) -> dict[str, float]:
    if level == "all":
        return SHARED_WIDTHS
    of_efficiencies, of_clients = WIDTHS[level]
    widths = {name: of_efficiencies * STIFFNESS.get(name, 1.0) for name in EFFICIENCIES}
    widths |= dict.fromkeys(CLIENTS, of_clients)
    return {name: width for name, width in widths.items() if width}


def _short(number: float) -> float:
    return float(f"{number:.5g}")


if __name__ == "__main__":
    main()
