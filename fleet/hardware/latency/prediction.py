"""Prediction: computes the TTFT and TPOT that a benchmark would measure for a model, GPUs, an engine and a load.

The caller states the model, the GPUs, the engine and the load as a `Measurement`, whose measured latencies are not
used.
"""

from collections.abc import Mapping

import msgspec

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import gpu
from fleet.hardware.latency.closed_loop import ClientMeasurement, closed_loop, closed_loop_disaggregated
from fleet.hardware.latency.coefficients import Coefficients, CoefficientSubject, compose, subject_of
from fleet.hardware.latency.measurements import MeasuredPhase, MeasuredRole, Measurement
from fleet.hardware.latency.step_model import step_model, work
from fleet.hardware.models import ModelSizes
from fleet.hardware.sharding import ShardedModel, shard_model
from fleet.hardware.transfers import REACHED, kv_bytes_per_link, link_between

BUDGET_TOKENS = 8192.0
"""Maximum number of prompt tokens in one step. It is the default of vLLM's server on data-centre GPUs, of SGLang and of
TensorRT-LLM."""

MEAN_LENGTHS = {"inferencex": 0.9, "authors": 1.0}
"""For each benchmark, the mean length of its prompts and answers, divided by the stated length. InferenceX draws
lengths evenly from 0.8 to 1 of the stated length; the benchmark of aiconfigurator's authors uses the stated length.
"""

MEMORY_SHARE = 0.95
"""Maximum share of a GPU's memory that benchmarks gave to engines. A measurement that needs more memory cannot have run
in the stated configuration."""


def can_be_placed(measured: Measurement, models: Mapping[str, ModelSizes]) -> bool:
    """Return whether the stated configuration of a measurement is possible: the model can be split in this way, and fits."""
    model = msgspec.structs.replace(models[measured.model], precision=measured.precision)
    try:
        for side in (measured.prefill, measured.decode):
            shard_model(model, gpu(measured.gpu), side.parallelism, share=MEMORY_SHARE)
    except ConfigurationRefused:
        return False
    return True


def cut(measured: Measurement, models: Mapping[str, ModelSizes], side: MeasuredRole) -> ShardedModel:
    """Return the sharded model of a measurement's prefill or decode workers, without checking that it fits."""
    model = msgspec.structs.replace(models[measured.model], precision=measured.precision)
    return ShardedModel(model=model, gpu=gpu(measured.gpu), parallelism=side.parallelism)


def predict(measured: Measurement, models: Mapping[str, ModelSizes], known: Coefficients) -> tuple[float, float]:
    """Return the predicted TTFT and TPOT in milliseconds for the configuration and the load of a measurement."""
    prefill, decode = (cut(measured, models, side) for side in (measured.prefill, measured.decode))
    efficiency, client = compose(known.start, known.groups(), subject(measured, models))
    client = msgspec.structs.replace(client, mean_length=MEAN_LENGTHS[measured.client])
    groups = decode.parallelism.dp
    step = step_model(work(decode), efficiency)
    capacity = decode.kv_capacity_tokens(MEMORY_SHARE) / groups
    seen: ClientMeasurement
    if measured.phase is MeasuredPhase.AGGREGATED:
        seen = closed_loop(
            step,
            client,
            concurrency=max(1.0, measured.concurrency / groups),
            prompt_tokens=measured.prompt_tokens,
            answer_tokens=measured.answer_tokens,
            capacity_tokens=capacity,
            budget_tokens=BUDGET_TOKENS,
        )
    else:
        seen = closed_loop_disaggregated(
            step_model(work(prefill), efficiency),
            step,
            client,
            concurrency=measured.concurrency,
            prefill_groups=measured.prefill.workers * prefill.parallelism.dp,
            decode_groups=measured.decode.workers * groups,
            prompt_tokens=measured.prompt_tokens,
            answer_tokens=measured.answer_tokens,
            capacity_tokens=capacity,
            budget_tokens=BUDGET_TOKENS,
            transfer=transfer_seconds(prefill, decode, measured.prompt_tokens),
        )
    return seen.ttft * 1e3, seen.tpot * 1e3


def subject(measured: Measurement, models: Mapping[str, ModelSizes]) -> CoefficientSubject:
    """Return the properties of a measurement that select its coefficients."""
    model = msgspec.structs.replace(models[measured.model], precision=measured.precision)
    return subject_of(model, measured.gpu, measured.backend, client=measured.client, phase=measured.phase)


def transfer_seconds(source: ShardedModel, target: ShardedModel, tokens: int) -> float:
    """Return the seconds to move the KV of `tokens` prompt tokens from one replica to another.

    The replicas are assumed to be on different nodes, except if a node has more than 8 GPUs, such as GB200 NVL72.
    """
    link = link_between(source.gpu, same_node=source.gpu.gpus_per_node > 8)
    return link.latency_us * 1e-6 + kv_bytes_per_link(source, target, tokens) / (link.bandwidth * REACHED)
