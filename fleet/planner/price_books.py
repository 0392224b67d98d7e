"""Price book files: reads the TOML file of a price book, and gives pools its prices."""

from collections.abc import Sequence
from pathlib import Path

from fleet.config import load, read_file
from fleet.core.errors import ConfigurationRefused
from fleet.planner.decisions import PlannedPool
from fleet.planner.sizing.prices import PriceBook, priced


def read_price_book(file: Path) -> PriceBook:
    """Read a price book.

    Raises:
        ConfigurationRefused: The file cannot be read, or is no price book; the message begins with the file.
    """
    content = read_file(file)
    if "regions" not in content:
        raise ConfigurationRefused(
            f"{file}: regions: is missing; a price book has a table for each region, such as [regions.us-east], with a line"
            " for each GPU, such as h100 = 2.49"
        )
    return load(file, PriceBook, content=content)


def priced_from_file(pools: Sequence[PlannedPool], prices: str, region: str) -> tuple[PlannedPool, ...]:
    """Return the pools with the prices from a price book, as `fleet.planner.sizing.prices.priced` does.

    Args:
        pools: The pools.
        prices: The setting `prices`: the file, or nothing. Without a file, the pools stay unchanged.
        region: The setting `region`.

    Raises:
        ConfigurationRefused: The price book cannot be read, or it lacks the region or the price of a GPU. Or there is a
            region, but no price book. The message begins with the setting.
    """
    if not prices:
        if region:
            raise ConfigurationRefused(f"region: {region!r} needs `prices`, the file of a price book with this region")
        return tuple(pools)
    try:
        book = read_price_book(Path(prices))
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"prices: {error}") from error
    if region and region not in book.regions:
        raise ConfigurationRefused(f"region: {region!r} is not a region of {prices}; use {', '.join(book.regions)}")
    try:
        return priced(pools, book, region)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"prices: {prices}: {error}") from error
