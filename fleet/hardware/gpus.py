"""What accelerators are: memory, speeds, links, price, power. The figures are in `gpus.toml`, each with its source."""

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
    """How a number is stored, or computed with."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT4 = "int4"  # weights only: engines widen them and compute in bf16

    @property
    def num_bytes(self) -> float:
        """Of one, without the scales that go with blocks of them (see `SCALES`)."""
        return {Number.BF16: 2.0, Number.FP8: 1.0, Number.FP4: 0.5, Number.INT4: 0.5}[self]


SCALES = {Number.BF16: 1.0, Number.FP8: 1.0, Number.FP4: 1.125, Number.INT4: 1.0625}
"""What stored weights take besides, as a factor: an 8-bit scale for 16 numbers (NVFP4), 16 bits for 32 pairs (INT4, group 32)."""


class GpuLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way for bytes out of one GPU; the way in is another one, as wide."""

    bandwidth: Positive
    """Bytes a second that one pair of ends can have."""

    latency_us: Annotated[float, Meta(ge=0)]
    """Of one transfer, before its first byte."""

    links: Annotated[int, Meta(ge=1)] = 1
    """That many go to different ends at once, where GPUs are wired pair by pair; 1 where a switch shares out one."""


class GpuPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dollars: Positive  # one GPU, one hour
    source: str
    date: str  # of the list, as in 2025-06


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator within its usual node."""

    id: str  # short name, as in settings
    name: str
    maker: str
    memory_gib: Positive
    bandwidth: Positive  # of its memory, bytes a second
    flops: dict[Number, Positive]  # dense operations a second, by what is computed with
    in_node: GpuLink
    between_nodes: GpuLink
    host: GpuLink
    gpus_per_node: Annotated[int, Meta(ge=1)]
    watts: Positive  # the board's limit
    idle_watts: Positive  # with a model loaded, and nothing running
    idle_source: str  # where that is from; says so where it is an assumption
    source: str
    price: GpuPrice | None = None

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def computes_in(self, stored: Number) -> Number:
        """What multiplies numbers stored like that: the narrowest it has that is as wide, else bf16."""
        if stored in self.flops:
            return stored
        return Number.FP8 if stored is Number.FP4 and Number.FP8 in self.flops and self.maker == "amd" else Number.BF16


@cache
def gpus() -> dict[str, Gpu]:
    """All that are known, by short name."""
    text = resources.files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    return {name: msgspec.convert({"id": name, **fields}, Gpu) for name, fields in tomllib.loads(text).items()}


def gpu(name: str, field: str = "gpu") -> Gpu:
    """The accelerator of that short name.

    Raises:
        ConfigurationRefused: Not known; says `field`, and which are.
    """
    known = gpus()
    if name not in known:
        raise ConfigurationRefused(f"{field}: {name!r} is not one of {', '.join(known)}")
    return known[name]
