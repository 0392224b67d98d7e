"""What engines make of accelerators, as fitted from public measurements, and how far to trust it.

`coefficients.json` is made by `loadtests/hardware/fit.py`; it says itself what it was fitted to, under which licence, and how far
it was from measurements that it was not fitted to. Rules:

1. A coefficient is where the fit began, times one factor for each level of grouping that its subject belongs to: its engine,
   its GPU, how its numbers are stored, its kind of model, and finally this very model on this GPU and engine (`LEVELS`). What was
   never measured has the factor 1, so an estimate always exists, and rests on whatever comes nearest.
2. How near that is, is its `EstimateBasis`. Each basis has an error of its own, measured by leaving out of the fit curves, whole
   models, and whole GPUs.
3. On a GPU that was not measured at all, shares of compute and bandwidth are scaled by what matrix products reach there in
   comparison with those that were (`OperatorEfficiency`), where that is known.
4. Models are recognised by their shape, so fine-tunes of one base are one model.
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
"""Of all coefficients, in the order of `GroupFactors.of`."""

INFERENCEX = "inferencex"
OTHER_MAKERS_ERRORS = (0.5, 0.35)
"""To the first token and per token, where only another maker's GPUs were measured. Per token: the median over five published
figures of the MI300X, none of them fitted to (docs/hardware.md); to the first token: a guess."""

LEAST_ROWS = 10  # of a set of measurements, for its error to mean something


class CoefficientSubject(Struct, frozen=True, kw_only=True):
    """What a coefficient may depend on."""

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
"""Groupings from the widest to the narrowest, and a subject's group in each."""


class EstimateBasis(StrEnum):
    """Whose measurements an estimate rests on, and so which measurements its error was found with."""

    MODEL = "model"  # this one, at other lengths, concurrencies or cuts
    GPU = "gpu"  # other models on this GPU and engine
    ENGINE = "engine"  # this engine on other GPUs


class GroupFactors(Struct, frozen=True, kw_only=True):
    """Of one group."""

    level: str
    key: str
    rows: int  # measurements that they rest on
    of: tuple[float, ...]


class OperatorEfficiency(Struct, frozen=True, kw_only=True):
    """What single matrix products reach on a GPU: shares of its data sheet, by what they compute with."""

    gpu: str
    number: Number
    rows: int  # shapes that were measured
    compute: float
    memory: float
    launch_us: float
    median_error: float  # on shapes that were not used to fit
    source: str


class AccuracyRow(Struct, frozen=True, kw_only=True):
    """Errors on measurements that were not used to fit."""

    basis: EstimateBasis
    system: str  # "all": every GPU
    backend: str  # "all": every engine
    phase: MeasuredPhase
    model: str = "all"  # "all": every model; else as `fleet.hardware.aiconfigurator` calls it
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
    start: tuple[float, ...]  # where the fit began, in the order of NAMES
    factors: tuple[GroupFactors, ...]
    operators: tuple[OperatorEfficiency, ...]
    accuracy: tuple[AccuracyRow, ...]

    def groups(self) -> dict[tuple[str, str], GroupFactors]:
        return {(each.level, each.key): each for each in self.factors}


class StepModelEstimate(Struct, frozen=True, kw_only=True):
    """A step model, and what it rests on."""

    step: StepModel
    client: BenchmarkClient  # what clients measure on top of steps
    basis: EstimateBasis
    rows: int  # measurements of the nearest group
    ttft_error: float  # median, relative, on measurements of that basis that were not used to fit
    tpot_error: float


@cache
def coefficients() -> Coefficients:
    """Those that come with this version."""
    content = resources.files(__package__).joinpath(FILE).read_bytes()
    return msgspec.json.decode(content, type=Coefficients)


def shape_of(model: ModelSizes) -> str:
    """What tells one model from others, whatever it is called."""
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
    """The step model of a placement under an engine.

    Args:
        placement: What runs where.
        backend: vllm, sglang or trtllm.
        known: Instead of the coefficients that come with this version.

    Raises:
        ConfigurationRefused: No engine of that name was measured.
    """
    known = coefficients() if known is None else known
    groups = known.groups()
    gpu = placement.gpu.id
    subject = subject_of(placement.model, gpu, backend)
    if ("backend", backend) not in groups:
        backends = sorted(key for level, key in groups if level == "backend")
        raise ConfigurationRefused(f"backend: {backend!r} is not one of {', '.join(backends)}")
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
    """The coefficients of a subject."""
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
    """An efficiency of other GPUs, for this one: in proportion to what matrix products reach on both.

    Attention and reading KV follow products on GPUs of one maker, who share kernels. Of another maker's they say nothing: these stay as they are.
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
    """Shares of compute and bandwidth over the measured GPUs' in the same numbers; 1 where not known."""
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
    """Medians of the nearest set of measurements that says how good that basis is."""
    for system, engine in ((gpu, backend), ("all", backend), ("all", "all")):
        for row in rows:
            found = (row.basis, row.phase, row.system, row.backend) == (basis, MeasuredPhase.AGGREGATED, system, engine)
            if found and row.model == "all" and row.accuracy.rows >= LEAST_ROWS:
                return row.accuracy.ttft_median, row.accuracy.tpot_median
    return 1.0, 1.0
