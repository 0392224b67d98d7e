"""Builder of measurements with valid defaults."""

from typing import Any

from fleet.hardware.latency.measurements import MeasuredPhase, MeasuredRole, Measurement
from fleet.hardware.models import Precision
from fleet.hardware.sharding import ShardingDegrees


def a_measurement(**changes: Any) -> Measurement:
    side = MeasuredRole(parallelism=ShardingDegrees(tp=8))
    fields: dict[str, Any] = {
        "gpu": "h100",
        "backend": "vllm",
        "version": "0.20",
        "model": "llama-3.1-70b",
        "precision": Precision(),
        "client": "inferencex",
        "concurrency": 16,
        "prompt_tokens": 1024,
        "answer_tokens": 1024,
        "prefill": side,
        "decode": side,
        "phase": MeasuredPhase.AGGREGATED,
        "ttft_ms": 100.0,
        "tpot_ms": 10.0,
    }
    return Measurement(**(fields | changes))
