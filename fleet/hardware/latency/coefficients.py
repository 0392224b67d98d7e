"""Coefficients: estimates the efficiency of an engine on a GPU from values that were fitted to public measurements.

`loadtests/hardware/fit.py` writes the file `coefficients.json`. This file also contains the source and the licence of
the measurements, and the errors on measurements that were held out of the fit. Rules:

1. A coefficient is a start value, multiplied by one factor for each group to which the estimated case belongs
   (`CoefficientSubject`). The widest group contains all measurements; narrow groups contain one model on one GPU and
   engine (`LEVELS`). A group without measurements has the factor 1. So an estimate exists for every GPU and model with a
   measured engine, and uses the nearest measurements.
2. The `EstimateBasis` says how near these measurements are. Each basis has its own error, which was measured by leaving
   curves (all measurements of one configuration), whole models or whole GPUs out of the fit.
3. For a GPU on which the engine was not measured, the shares of the GPU's compute and bandwidth that the engine uses are
   scaled. The factor is the efficiency of single matrix products on this GPU, relative to the measured GPUs
   (`OperatorEfficiency`). If this efficiency is unknown, the factor is 1.
4. Models are recognised by their sizes, so all fine-tuned variants of a base model count as one model.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from importlib import resources
from math import exp, log

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number, gpus
from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.measurements import Accuracy, MeasuredPhase
from fleet.hardware.latency.step_model import Efficiency, StepModel, step_model, work
from fleet.hardware.models import ModelSizes
from fleet.hardware.sharding import ShardedModel

FILE = "coefficients.json"
EFFICIENCIES = Efficiency.__struct_fields__
CLIENTS = ("waves", "front", "front_token", "late_slots")
NAMES = (*EFFICIENCIES, *CLIENTS)
"""Names of all coefficients, in the order of `GroupFactors.of`."""

INFERENCEX = "inferencex"
OTHER_MAKERS_ERRORS = (0.5, 0.35)
"""Relative errors of TTFT and TPOT for a GPU if only GPUs of other makers were measured. The error of TPOT is the
median over five published figures of the MI300X that were not used for the fit (docs/hardware.md). The error of TTFT is
a guess."""

LEAST_ROWS = 10  # an error of `AccuracyRow` is used only if it was computed from at least this many measurements


class CoefficientSubject(Struct, frozen=True, kw_only=True):
    """Describes a case to be estimated, by the properties on which coefficients depend."""

    gpu: str
    backend: str
    shape: str
    kind: str
    weights: str
    experts: str
    client: str = INFERENCEX
    phase: MeasuredPhase = MeasuredPhase.AGGREGATED


LEVELS: dict[str, Callable[[CoefficientSubject], str]] = {
    "all": lambda _: "",
    "backend": lambda of: of.backend,
    "gpu": lambda of: of.gpu,
    "gpu_backend": lambda of: f"{of.gpu} {of.backend}",
    "numbers": lambda of: f"{of.weights} {of.experts}",
    "gpu_numbers": lambda of: f"{of.gpu} {of.weights} {of.experts}",
    "kind": lambda of: of.kind,
    "backend_kind": lambda of: f"{of.backend} {of.kind}",
    "model": lambda of: of.shape,
    "backend_model": lambda of: f"{of.backend} {of.shape}",
    "measured": lambda of: f"{of.gpu} {of.backend} {of.shape} {of.weights} {of.experts}",
    "client": lambda of: f"{of.client} {of.backend} {of.phase}",
    "gpu_client": lambda of: f"{of.client} {of.gpu} {of.backend} {of.phase}",
}
"""Levels of grouping, roughly from the widest to the narrowest, each with a function that returns the group of a subject."""


class EstimateBasis(StrEnum):
    """Says how similar the measured cases are to the case that was estimated from them."""

    MODEL = "model"  # measurements of this model on this GPU and engine, at other lengths, concurrencies or shardings
    GPU = "gpu"  # measurements of other models on this GPU and engine
    ENGINE = "engine"  # measurements of this engine on other GPUs


class GroupFactors(Struct, frozen=True, kw_only=True):
    """Holds the factors of all coefficients for one group of measurements (rule 1)."""

    level: str
    key: str
    rows: int  # number of measurements in the group
    of: tuple[float, ...]


class OperatorEfficiency(Struct, frozen=True, kw_only=True):
    """Holds the efficiency of single matrix products on a GPU in one data type, as shares of data-sheet speeds."""

    gpu: str
    number: Number
    rows: int  # number of measured matrix shapes
    compute: float
    memory: float
    launch_us: float
    median_error: float  # median relative error of the predicted times, for shapes that were not used for the fit
    source: str


class AccuracyRow(Struct, frozen=True, kw_only=True):
    """Holds the errors of predictions for one set of measurements that were held out of the fit."""

    basis: EstimateBasis
    system: str  # name of the GPU; "all": every GPU
    backend: str  # name of the engine; "all": every engine
    phase: MeasuredPhase
    model: str = "all"  # name of the model as in `fleet.hardware.aiconfigurator`; "all": every model
    accuracy: Accuracy
    fitted_on: str
    tested_on: str


class Provenance(Struct, frozen=True, kw_only=True):
    source: str
    sha256: str
    licence: str
    split: str
    command: str


class Coefficients(Struct, frozen=True, kw_only=True):
    provenance: Provenance
    start: tuple[float, ...]  # start values of the fit, in the order of `NAMES`
    factors: tuple[GroupFactors, ...]
    operators: tuple[OperatorEfficiency, ...]
    accuracy: tuple[AccuracyRow, ...]

    def groups(self) -> dict[tuple[str, str], GroupFactors]:
        return {(each.level, each.key): each for each in self.factors}


class StepModelEstimate(Struct, frozen=True, kw_only=True):
    """Holds an estimated step model, with its errors and the kind of measurements from which it was estimated."""

    step: StepModel
    client: BenchmarkClient  # estimated properties of the benchmark InferenceX, such as its times outside the engine
    basis: EstimateBasis
    rows: int  # number of measurements that are as similar as `basis` says
    # Median relative error on held-out measurements of this basis, or from `OTHER_MAKERS_ERRORS`; 1 if too few were held
    # out.
    ttft_error: float
    tpot_error: float


@cache
def coefficients() -> Coefficients:
    """Return the coefficients that this version of Fleet contains."""
    content = resources.files(__package__).joinpath(FILE).read_bytes()
    return msgspec.json.decode(content, type=Coefficients)


def shape_of(model: ModelSizes) -> str:
    """Return a text of the sizes by which a model is recognised, independent of its name (rule 4)."""
    return f"{model.layers}x{model.hidden}/{model.heads}/{model.vocabulary}/{model.experts}"


def kind_of(model: ModelSizes) -> str:
    return f"{model.attention}{'-moe' if model.moe_layers else ''}{'-linear' if model.linear_layers else ''}"


def subject_of(
    model: ModelSizes,
    gpu: str,
    backend: str,
    *,
    client: str = INFERENCEX,
    phase: MeasuredPhase = MeasuredPhase.AGGREGATED,
) -> CoefficientSubject:
    return CoefficientSubject(
        gpu=gpu,
        backend=backend,
        shape=shape_of(model),
        kind=kind_of(model),
        weights=model.precision.weights,
        experts=model.precision.experts,
        client=client,
        phase=phase,
    )


def estimate(placement: ShardedModel, backend: str, known: Coefficients | None = None) -> StepModelEstimate:
    """Return the estimated step model of a sharded model, for an engine (`vllm`, `sglang` or `trtllm`).

    Raises:
        ConfigurationRefused: No engine with this name was measured, or the engine does not run on the GPU.
    """
    known = coefficients() if known is None else known
    groups = known.groups()
    gpu = placement.gpu.id
    subject = subject_of(placement.model, gpu, backend)
    if ("backend", backend) not in groups:
        backends = sorted(key for level, key in groups if level == "backend")
        raise ConfigurationRefused(f"backend: {backend!r} is not one of {', '.join(backends)}")
    if not placement.gpu.runs(backend):
        raise ConfigurationRefused(
            f"backend: {backend} does not run on {gpu}, a GPU of {placement.gpu.maker}; choose another engine or GPU"
        )
    basis, nearest = _basis(groups, subject)
    efficiency, client = compose(known.start, groups, subject)
    if basis is EstimateBasis.ENGINE:
        efficiency = scaled(efficiency, placement, known)
    ttft_error, tpot_error = _errors(known.accuracy, basis, gpu, backend)
    if basis is EstimateBasis.ENGINE and placement.gpu.maker not in _measured_makers(groups):
        ttft_error, tpot_error = OTHER_MAKERS_ERRORS
    return StepModelEstimate(
        step=step_model(work(placement), efficiency),
        client=client,
        basis=basis,
        rows=nearest.rows,
        ttft_error=ttft_error,
        tpot_error=tpot_error,
    )


def compose(
    start: Sequence[float], groups: dict[tuple[str, str], GroupFactors], subject: CoefficientSubject
) -> tuple[Efficiency, BenchmarkClient]:
    """Return the coefficients of a subject: the start values times the factors of its groups (rule 1)."""
    values = list(start)
    for level, key in LEVELS.items():
        if (found := groups.get((level, key(subject)))) is not None:
            values = [value * factor for value, factor in zip(values, found.of, strict=True)]
    named = dict(zip(NAMES, values, strict=True))
    return (
        Efficiency(**{name: named[name] for name in EFFICIENCIES}),
        BenchmarkClient(**{name: named[name] for name in CLIENTS}),
    )


def scaled(efficiency: Efficiency, placement: ShardedModel, known: Coefficients) -> Efficiency:
    """Scale an efficiency that was measured on other GPUs to the GPU of a sharded model (rule 3).

    The efficiencies of attention and of reading KV are scaled only if GPUs of the same maker were measured. The reason
    is that all GPUs of one maker have the same kernels for attention.
    """
    gpu, precision = placement.gpu.id, placement.model.precision
    groups = known.groups()
    measured = {key for level, key in groups if level == "gpu"}
    compute, memory = _relative(known.operators, gpu, measured, placement.gpu.computes_in(precision.weights))
    routed, routed_memory = _relative(known.operators, gpu, measured, placement.gpu.computes_in(precision.experts))
    made = msgspec.structs.replace(
        efficiency,
        compute=efficiency.compute * compute,
        memory=efficiency.memory * memory,
        experts_compute=efficiency.experts_compute * routed,
        experts_memory=efficiency.experts_memory * routed_memory,
    )
    if placement.gpu.maker not in _measured_makers(groups):
        return made
    return msgspec.structs.replace(made, attention=efficiency.attention * compute, kv=efficiency.kv * memory)


def _relative(
    operators: Sequence[OperatorEfficiency], gpu: str, measured: set[str], number: Number
) -> tuple[float, float]:
    """Return the efficiencies of compute and bandwidth on a GPU, relative to the measured GPUs.

    Return 1 for both if matrix products in this data type were not measured on this GPU, or on none of the measured GPUs.
    """
    here = [each for each in operators if each.gpu == gpu and each.number is number]
    there = [each for each in operators if each.gpu in measured and each.number is number]
    if not here or not there:
        return 1.0, 1.0
    return (
        _mean([each.compute for each in here]) / _mean([each.compute for each in there]),
        _mean([each.memory for each in here]) / _mean([each.memory for each in there]),
    )


def _mean(shares: Sequence[float]) -> float:
    return exp(sum(map(log, shares)) / len(shares))


def _measured_makers(groups: dict[tuple[str, str], GroupFactors]) -> set[str]:
    return {gpus()[key].maker for level, key in groups if level == "gpu"}


def _basis(
    groups: dict[tuple[str, str], GroupFactors], subject: CoefficientSubject
) -> tuple[EstimateBasis, GroupFactors]:
    for basis, level in (
        (EstimateBasis.MODEL, "measured"),
        (EstimateBasis.GPU, "gpu_backend"),
        (EstimateBasis.ENGINE, "backend"),
    ):
        if (found := groups.get((level, LEVELS[level](subject)))) is not None:
            return basis, found
    raise AssertionError(subject)


def _errors(rows: Sequence[AccuracyRow], basis: EstimateBasis, gpu: str, backend: str) -> tuple[float, float]:
    """Return the median relative errors of TTFT and TPOT for a basis, from the nearest set of held-out measurements.

    Return 1 for both if no set has enough measurements (`LEAST_ROWS`).
    """
    for system, engine in ((gpu, backend), ("all", backend), ("all", "all")):
        for row in rows:
            found = (row.basis, row.phase, row.system, row.backend) == (basis, MeasuredPhase.AGGREGATED, system, engine)
            if found and row.model == "all" and row.accuracy.rows >= LEAST_ROWS:
                return row.accuracy.ttft_median, row.accuracy.tpot_median
    return 1.0, 1.0
