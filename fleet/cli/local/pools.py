"""How pools stand, in lines for people: of `fleet scale` and `fleet status`."""

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
    """Of each pool that has not come to what a plan wants: how it stands, and how to wait for it or go back.

    Args:
        seen: What there is.
        place: The options that say where that is, with a blank before them.
    """
    for pool in seen.pools:
        if not pool.unfinished:
            continue
        line = f"{pool.name}: not finished: {pool.wanted} wanted, {pool.ready} there"
        line += f", {pool.draining} on the way out" if pool.draining else ""
        line += f"; it goes on by itself: fleet scale {pool.name}={pool.wanted}{place} waits for it"
        if pool.before is not None and pool.before != pool.wanted:
            line += f", fleet scale {pool.name}={pool.before}{place} goes back"
        yield line
