"""Measurements for tests: valid by default."""

from typing import Any

from fleet.hardware.measurements import Measurement, Phase, Side
from fleet.hardware.models import Precision
from fleet.hardware.placement import Parallelism


def a_measurement(**changes: Any) -> Measurement:
    side = Side(parallelism=Parallelism(tp=8))
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
        "phase": Phase.AGGREGATED,
        "ttft_ms": 100.0,
        "tpot_ms": 10.0,
    }
    return Measurement(**(fields | changes))
