"""Accelerators: memory, speeds, links, prices and power. The figures are in `gpus.toml`, each with its source."""

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
    """Data type in which numbers are stored or multiplied."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT4 = "int4"  # used only for weights, which engines convert to bf16 and then multiply

    @property
    def num_bytes(self) -> float:
        """Bytes of one number, without the scales of blocks (see `SCALES`)."""
        return {Number.BF16: 2.0, Number.FP8: 1.0, Number.FP4: 0.5, Number.INT4: 0.5}[self]


SCALES = {Number.BF16: 1.0, Number.FP8: 1.0, Number.FP4: 1.125, Number.INT4: 1.0625}
"""Factor for the scales of stored weights: an 8-bit scale for 16 numbers (NVFP4), 16 bits for 32 pairs (INT4, group 32)."""


class GpuLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link out of one GPU; the link in the other direction is separate and as fast."""

    bandwidth: Positive
    """Bytes per second between one pair of GPUs."""

    latency_us: Annotated[float, Meta(ge=0)]
    """Time in microseconds between the start of a transfer and its first byte."""

    links: Annotated[int, Meta(ge=1)] = 1
    """Number of links to different GPUs that work at once, if GPUs are wired in pairs; 1 if one link leads to a switch."""


class GpuPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dollars: Positive  # dollars for one GPU and one hour
    source: str
    date: str  # month of the price list, such as 2025-06


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data of one accelerator in its usual node."""

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
    idle_watts: Positive  # power with a loaded model, while nothing runs
    idle_source: str  # source of `idle_watts`, or a remark that it is an assumption
    source: str
    price: GpuPrice | None = None

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def computes_in(self, stored: Number) -> Number:
        """Return the data type in which this GPU multiplies numbers of a stored type: the narrowest that is wide enough, or bf16."""
        if stored in self.flops:
            return stored
        return Number.FP8 if stored is Number.FP4 and Number.FP8 in self.flops and self.maker == "amd" else Number.BF16


@cache
def gpus() -> dict[str, Gpu]:
    """Return all known accelerators by short name."""
    text = resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    return {name: msgspec.convert({"id": name, **fields}, Gpu) for name, fields in tomllib.loads(text).items()}


def gpu(name: str, field: str = "gpu") -> Gpu:
    """Return the accelerator with a short name.

    Raises:
        ConfigurationRefused: It is unknown; the message names `field` and the known ones.
    """
    known = gpus()
    if name not in known:
        raise ConfigurationRefused(f"{field}: {name!r} is not one of {', '.join(known)}")
    return known[name]
