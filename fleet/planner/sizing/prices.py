"""Price book: dollars per hour of a GPU by region, and what a request costs at a hosted endpoint. Pure.

The default book has one region, `list`, with the list prices of `fleet.hardware.gpus`, whose sources and dates are given there. Your own
book is a TOML file with a table for each region:

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
"""Region of the default book."""

HourlyPrice = Annotated[float, Meta(gt=0, le=1e6)]
TokenPrice = Annotated[float, Meta(ge=0, le=1e6)]
SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


class PriceBook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of GPUs."""

    regions: Mapping[str, Mapping[str, HourlyPrice]]
    """Dollars for one hour of one GPU, by region and short name of the GPU."""

    def __post_init__(self) -> None:
        if not self.regions:
            raise ValueError("regions: the price book has none")
        known = gpus()
        for region, prices in self.regions.items():
            for name in prices:
                if name not in known:
                    raise ValueError(f"regions.{region}.{name}: is not one of {', '.join(known)}")

    def dollars(self, gpu: str, region: str) -> float:
        """Return the price of a GPU.

        Raises:
            ConfigurationRefused: The book has no such region, or no price there.
        """
        if region not in self.regions:
            raise ConfigurationRefused(f"region: {region!r} is not one of {', '.join(self.regions)}")
        if gpu not in self.regions[region]:
            raise ConfigurationRefused(f"regions.{region}.{gpu}: the price book has no price for this GPU")
        return self.regions[region][gpu]


def priced(pools: Sequence[PlannedPool], book: PriceBook, region: str) -> tuple[PlannedPool, ...]:
    """Return the pools with the prices of a book; a pool that has its own price, or no GPU, keeps what it has.

    Raises:
        ConfigurationRefused: The book has no such region, or no price for a GPU.
    """
    region = region or next(iter(book.regions))
    return tuple(
        structs.replace(each, dollars_per_hour=book.dollars(each.gpu, region))
        if each.gpu and not each.dollars_per_hour
        else each
        for each in pools
    )


def list_prices() -> PriceBook:
    """Return the default book."""
    return PriceBook(
        regions={LIST: {name: each.price.dollars for name, each in gpus().items() if each.price is not None}}
    )


class HostedPrice(Struct, frozen=True, kw_only=True):
    """Price of a hosted endpoint, in dollars per million tokens."""

    prompt: TokenPrice
    answer: TokenPrice

    def dollars(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Return the price of one request."""
        return (self.prompt * prompt_tokens + self.answer * answer_tokens) / MILLION


def break_even(dollars_per_hour: float, rate: float, dollars_per_request: float) -> float | None:
    """Return the share of a rate below which the hosted endpoint is cheaper than GPUs that cost the same at any load.

    Above 1 the hosted endpoint is cheaper even at the full rate. None if it costs nothing.
    """
    hosted = dollars_per_request * rate * SECONDS_PER_HOUR
    return dollars_per_hour / hosted if hosted else None
