"""Sizes of pools: makes lines of text about pools, which `fleet scale` and `fleet status` show."""

from collections.abc import Iterator

from fleet.planner.messages import Observation, PoolObservation


def table(seen: Observation) -> Iterator[str]:
    width = max((len(each.name) for each in seen.pools), default=0)
    return (pool_line(each, width) for each in seen.pools)


def pool_line(pool: PoolObservation, width: int = 0) -> str:
    parts = [f"{pool.name:{width}}  wanted {pool.wanted}  ready {pool.ready}"]
    if pool.draining:
        parts.append(f"draining {pool.draining}")
    if pool.why is not None:
        parts.append(pool.why.replace("_", " ") + (f": {pool.message}" if pool.message else ""))
    return "  ".join(parts)


def unfinished(seen: Observation, place: str) -> Iterator[str]:
    """Yield a line for each pool that has not reached its wanted size.

    The line names the command that waits for the wanted size. If the size before the last change is known, the line also
    names the command that restores it.

    Args:
        seen: The observed pools.
        place: The command-line options that say where the pools are, with a leading space.
    """
    for pool in seen.pools:
        if not pool.unfinished:
            continue
        line = f"{pool.name}: not finished: {pool.wanted} wanted, {pool.ready} there"
        line += f", {pool.draining} draining" if pool.draining else ""
        line += f"; the change goes on by itself: fleet scale {pool.name}={pool.wanted}{place} waits for it"
        if pool.before is not None and pool.before != pool.wanted:
            line += f", fleet scale {pool.name}={pool.before}{place} goes back"
        yield line
