"""What an operator says of workers, so that what they do can be predicted (`fleet.router.latency_predictions`)."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Degree = Annotated[int, Meta(ge=1, le=1 << 20)]


class ProfileSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware, model and engine of workers that are alike."""

    model: Annotated[str, Meta(min_length=1)]
    """Folder with a Hugging Face config.json, or that file."""

    gpu: Annotated[str, Meta(min_length=1)]
    """Short name: `fleet hardware list`."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Whose measured efficiencies count."""

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    ep: Degree = 1
    """Parallelism, in GPUs: tensor, pipeline, attention data, expert."""

    step_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] = 8192
    """Prompt tokens of one step, at most."""
