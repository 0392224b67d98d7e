"""Settings of worker profiles, from which latencies are predicted (`fleet.router.latency_predictions`)."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Degree = Annotated[int, Meta(ge=1, le=1 << 20)]


class ProfileSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware, model and engine of a kind of workers."""

    model: Annotated[str, Meta(min_length=1)]
    """Folder with a Hugging Face config.json, or that file."""

    gpu: Annotated[str, Meta(min_length=1)]
    """Short name, as listed by `fleet hardware list`."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """The engine whose measured efficiencies are used."""

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    ep: Degree = 1
    """Parallelism in GPUs: tensor, pipeline, attention data, and expert parallelism."""

    step_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] = 8192
    """The most prompt tokens of one step."""
