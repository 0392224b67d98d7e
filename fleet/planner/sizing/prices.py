"""Prices: computes the cost of GPUs by a price book, and the cost of requests at a hosted endpoint. Pure.

A price book has the dollars per hour of each GPU type in each region. The default price book has one region, `list`,
with the list prices in `fleet.hardware.gpus`, which also names their sources and dates. Your own price book is a TOML
file with a table for each region:

    [regions.us-east]
    h100 = 2.49
    mi300x = 2.10
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct, structs

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import gpus
from fleet.planner.decisions import PlannedPool

LIST = "list"
"""Name of the only region in the default price book."""

HourlyPrice = Annotated[float, Meta(gt=0, le=1e6)]
TokenPrice = Annotated[float, Meta(ge=0, le=1e6)]
SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


class PriceBook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the prices of GPUs by region."""

    regions: Mapping[str, Mapping[str, HourlyPrice]]
    """Dollars for one hour of one GPU, by region and by the short name of the GPU type."""

    def __post_init__(self) -> None:
        if not self.regions:
            raise ValueError("regions: the price book has none")
        known = gpus()
        for region, prices in self.regions.items():
            for name in prices:
                if name not in known:
                    raise ValueError(f"regions.{region}.{name}: is not one of {', '.join(known)}")

    def dollars(self, gpu: str, region: str) -> float:
        """Return the price of a GPU type in a region, in dollars per hour.

        Raises:
            ConfigurationRefused: The price book has no such region, or no price for this GPU in it.
        """
        if region not in self.regions:
            raise ConfigurationRefused(f"region: {region!r} is not one of {', '.join(self.regions)}")
        if gpu not in self.regions[region]:
            raise ConfigurationRefused(f"regions.{region}.{gpu}: the price book has no price for this GPU")
        return self.regions[region][gpu]


def priced(pools: Sequence[PlannedPool], book: PriceBook, region: str) -> tuple[PlannedPool, ...]:
    """Return the pools with the prices of their GPUs from a price book.

    A pool without a GPU, or with a price in its settings, stays unchanged. If `region` is empty, the first region of
    the price book is used.

    Raises:
        ConfigurationRefused: The price book has no such region, or no price for a GPU.
    """
    region = region or next(iter(book.regions))
    return tuple(
        structs.replace(each, dollars_per_hour=book.dollars(each.gpu, region))
        if each.gpu and not each.dollars_per_hour
        else each
        for each in pools
    )


def list_prices() -> PriceBook:
    """Return the default price book: the list prices in `fleet.hardware.gpus`, in the region `LIST`."""
    return PriceBook(
        regions={LIST: {name: each.price.dollars for name, each in gpus().items() if each.price is not None}}
    )


class HostedPrice(Struct, frozen=True, kw_only=True):
    """Holds the prices of a hosted endpoint, in dollars per million tokens."""

    prompt: TokenPrice
    answer: TokenPrice

    def dollars(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Return the price of one request in dollars."""
        return (self.prompt * prompt_tokens + self.answer * answer_tokens) / MILLION


def break_even(dollars_per_hour: float, rate: float, dollars_per_request: float) -> float | None:
    """Return the load below which a hosted endpoint is cheaper than own GPUs, as a share of the rate `rate`.

    `rate` is the highest rate of the GPUs in requests per second; the GPUs cost the same at any load. A result above 1
    means that the hosted endpoint is cheaper even at this rate. None means that the hosted endpoint costs nothing.
    """
    hosted = dollars_per_request * rate * SECONDS_PER_HOUR
    return dollars_per_hour / hosted if hosted else None
