"""GPUs: describes the memory, speeds, links, price and power of each known accelerator.

The file `gpus.toml` contains the figures with their sources.
"""

import tomllib
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fleet.core.errors import ConfigurationRefused

Positive = Annotated[float, Meta(gt=0)]

GIB = 1 << 30


class Number(StrEnum):
    """Data types in which numbers are stored or multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT4 = "int4"  # only for stored weights; engines convert them to bf16 to multiply

    @property
    def num_bytes(self) -> float:
        """Bytes of one number, without its share of a scale (`SCALES`)."""
        return {Number.BF16: 2.0, Number.FP8: 1.0, Number.FP4: 0.5, Number.INT4: 0.5}[self]


SCALES = {Number.BF16: 1.0, Number.FP8: 1.0, Number.FP4: 1.125, Number.INT4: 1.0625}
"""Factor by which scales increase the bytes of quantised weights. FP4 (NVFP4) has an 8-bit scale for 16 numbers; INT4 is
counted with a 16-bit scale for 64 numbers (32 bytes)."""


class GpuLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a link by which a GPU sends data; the link in the other direction is separate and equally fast."""

    bandwidth: Positive
    """Bytes per second of one link in one direction."""

    latency_us: Annotated[float, Meta(ge=0)]
    """Time in microseconds between the start of a transfer and its first byte."""

    links: Annotated[int, Meta(ge=1)] = 1
    """Number of links that one GPU can use at the same time. It is more than 1 if each pair of GPUs has a link of its own, and 1
    if a single link connects the GPU to a switch."""


class GpuPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dollars: Positive  # dollars for one GPU and one hour
    source: str
    date: str  # month of the price list, such as 2025-06


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one type of accelerator, and the node (server) in which it usually comes."""

    id: str  # short name, as it is used in settings
    name: str
    maker: str
    memory_gib: Positive
    bandwidth: Positive  # bandwidth of the memory in bytes per second
    flops: dict[Number, Positive]  # dense operations per second, by data type
    in_node: GpuLink
    between_nodes: GpuLink
    host: GpuLink
    gpus_per_node: Annotated[int, Meta(ge=1)]
    watts: Positive  # power limit of the board
    idle_watts: Positive  # power when a model is loaded and nothing runs
    idle_source: str  # source of `idle_watts`, or a remark that it is an assumption
    source: str
    price: GpuPrice | None = None

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def runs(self, backend: str) -> bool:
        """Return whether an engine (`vllm`, `sglang` or `trtllm`) runs on this GPU. TensorRT-LLM needs a GPU of NVIDIA."""
        return backend != "trtllm" or self.maker == "nvidia"

    def computes_in(self, stored: Number) -> Number:
        """Return the data type in which this GPU multiplies numbers that are stored in the type `stored`.

        A GPU that cannot multiply in this type converts the numbers to bf16. AMD's GPUs convert fp4 to fp8 instead, if they have fp8.
        """
        if stored in self.flops:
            return stored
        return Number.FP8 if stored is Number.FP4 and Number.FP8 in self.flops and self.maker == "amd" else Number.BF16


@cache
def gpus() -> dict[str, Gpu]:
    """Return all known accelerators by their short names."""
    text = resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    return {name: msgspec.convert({"id": name, **fields}, Gpu) for name, fields in tomllib.loads(text).items()}


def gpu(name: str, field: str = "gpu") -> Gpu:
    """Return the accelerator with a short name.

    Raises:
        ConfigurationRefused: The name is unknown; the message names `field` and the known accelerators.
    """
    known = gpus()
    if name not in known:
        raise ConfigurationRefused(f"{field}: {name!r} is not one of {', '.join(known)}")
    return known[name]
