"""Power model: computes the power that GPUs draw while engines run on them.

Rules:

1. A GPU with a loaded model draws `idle_watts` while nothing runs. During a step it draws more: `idle_watts` plus a
   share (`power_share`) of the difference between the board's power limit and `idle_watts`.
2. The share grows with the logarithm of the step's tokens: a step that decodes one sequence mostly waits for memory,
   while a full prompt chunk keeps all units of the GPU busy. `ALONE` and `DOUBLED` were fitted to the published figures
   of all GPUs (`PUBLISHED`).
3. The model covers only the board of the GPU. Hosts, switches and cooling add 10 to 50 % to this power.
"""

from math import log2

from msgspec import Struct

from fleet.core.roles import Role
from fleet.hardware.gpus import Gpu

ALONE = 0.28
"""The result of `power_share` for a step that decodes only one sequence."""

DOUBLED = 0.064
"""Increase of the result of `power_share` for every doubling of the tokens in a step."""

MOST = 0.90
"""Highest result of `power_share`. Source: an MI300X with prompts of 8,192 tokens draws 662 to 671 of 750 W (InferenceX,
issue 828, 2026-03)."""

ERROR = 0.30
"""Largest relative error of the model for the figures in `PUBLISHED`. A single GPU that runs a small model draws less
power than these figures: 137 to 300 W on an H200 while decoding (arXiv 2605.11999)."""


LOADED_TOKENS = 64
"""Tokens of a step of a replica that decodes under load, for `loaded_watts`: about that many requests run at a time."""


class PublishedPower(Struct, frozen=True, kw_only=True):
    """Holds a published figure of the power that one GPU draws."""

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
    """Return the power that a step adds to `idle_watts`, as a share of the difference between the power limit and `idle_watts`.

    `tokens` counts the prompt and answer tokens of the step.
    """
    return min(MOST, ALONE + DOUBLED * log2(max(1.0, tokens)))


def watts(gpu: Gpu, share: float) -> float:
    """Return the power of a GPU in watts, for a share as `power_share` returns it; a share of 0 gives the idle power."""
    return gpu.idle_watts + (gpu.watts - gpu.idle_watts) * share


def loaded_watts(gpu: Gpu, role: Role) -> float:
    """Return the power in watts of a GPU that serves as much as its goals allow.

    A replica for prefill runs full prompt chunks, and one for decode runs steps of `LOADED_TOKENS` tokens. A replica for both phases
    is assumed to spend half of its time on each. `ERROR` states the error of the power of a step.
    """
    decoding = power_share(LOADED_TOKENS)
    shares = {Role.PREFILL: MOST, Role.DECODE: decoding, Role.BOTH: (MOST + decoding) / 2}
    return watts(gpu, shares[role])
