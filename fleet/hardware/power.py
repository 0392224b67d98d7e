"""Power model: the power that GPUs draw while engines run on them, in closed form, with its error.

Rules:

1. A GPU draws `idle_watts` while nothing runs (a model is loaded, and the clocks are up). During a step it draws more: a share
   (`power_share`) of the range between `idle_watts` and the board's limit.
2. The share grows with the logarithm of the step's tokens: decoding one sequence waits for memory, while a full chunk of a prompt
   keeps all units busy. `ALONE` and `DOUBLED` fit published figures (`PUBLISHED`) of all GPUs together.
3. The power is that of the GPU's board. Hosts, switches and cooling add a tenth to a half.
"""

from math import log2

from msgspec import Struct

from fleet.hardware.gpus import Gpu

ALONE = 0.28
"""Share of the range between `idle_watts` and the board's limit while one sequence is decoded."""

DOUBLED = 0.064
"""Increase of the share for every doubling of the step's tokens."""

MOST = 0.90
"""Highest share: an MI300X with prompts of 8,192 tokens draws 662 to 671 of 750 W (InferenceX, issue 828, 2026-03)."""

ERROR = 0.30
"""Relative error of the model; all figures of `PUBLISHED` lie within it. Small models on one GPU draw less than any of these: 137
to 300 W on an H200 while decoding (arXiv 2605.11999)."""


class PublishedPower(Struct, frozen=True, kw_only=True):
    """A published figure of the power of one GPU."""

    gpu: str
    tokens: float  # approximate number of tokens of a step
    watts: float  # power of one GPU during steps
    source: str


PUBLISHED = (
    PublishedPower(
        gpu="h100",
        tokens=1,
        watts=300,
        source="ML.ENERGY Benchmark 3.0, as vLLM Semantic Router's power model cites it",
    ),
    PublishedPower(gpu="h100", tokens=128, watts=600, source="the same"),
    PublishedPower(
        gpu="h100", tokens=64, watts=480, source="Llama-3.3-70B in fp8, tp 4, vLLM 0.6.6: gist lhl/bf81a9c7, 2025-01"
    ),
    PublishedPower(gpu="h100", tokens=128, watts=520, source="the same"),
    PublishedPower(
        gpu="h100", tokens=4, watts=317, source="InferenceX, pull request 2323, 2026-07: 8k + 1k tokens, 4 at once"
    ),
    PublishedPower(gpu="h200", tokens=4, watts=298, source="the same"),
    PublishedPower(gpu="a100", tokens=48, watts=272, source="InternLM, issue 248, 2023-08: 48 at once, three GPUs"),
    PublishedPower(
        gpu="mi300x",
        tokens=16,
        watts=400,
        source="InferenceX, issue 828, 2026-03: 356 W on average, 79 % of the time at work",
    ),
)


def power_share(tokens: float) -> float:
    """Return the share of its range that a GPU draws during a step with `tokens` tokens, prompts and answers together."""
    return min(MOST, ALONE + DOUBLED * log2(max(1.0, tokens)))


def watts(gpu: Gpu, share: float) -> float:
    """Return the power in watts at a share of the range; a share of 0 is the idle power."""
    return gpu.idle_watts + (gpu.watts - gpu.idle_watts) * share
