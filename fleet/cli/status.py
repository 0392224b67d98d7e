"""`fleet status`: shows pools, workers, load and caches of a running cluster."""

import argparse
import asyncio
import sys
from collections.abc import Iterator

import msgspec

from fleet.cli.console.address import add_control, control_client, describe_control_error
from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.local.pools import unfinished
from fleet.client import ClusterStatus, FleetError
from fleet.local.runs import run_at
from fleet.planner.connectors.open import connector_of
from fleet.planner.messages import PlanWriter
from fleet.planner.ports import ConnectorError
from fleet.planner.settings import FolderTarget

MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    add_control(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    failing = list(_failing(arguments.address))
    try:
        with control_client(arguments) as client:
            status = client.status()
    except FleetError as error:
        for line in (describe_control_error(error, arguments), *failing):
            print(f"fleet: {line}", file=sys.stderr)
        return FAILED
    print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(_lines(status)))
    for line in (*failing, *asyncio.run(_scaling(arguments.address))):
        print(f"fleet: {line}", file=sys.stderr)
    return DONE


def _failing(address: str) -> Iterator[str]:
    """Return a line for a hung supervisor and for each process that keeps dying, if the address is that of a local cluster."""
    if (run_ := run_at(address)) is None or run_.killed:
        return
    if silence := run_.silence:
        yield silence
    for name, part in run_.parts().items():
        if part.failing:
            times = "once" if part.deaths == 1 else f"{part.deaths} times in a row"
            now = "it is to be started again" if part.pause_seconds is not None else f"it is {part.condition} again"
            yield f"{name} is failing: it died {times}, and the last time it {part.last_end}; {now}"


async def _scaling(address: str) -> list[str]:
    """Return a line for each pool of a local cluster that has not reached its size; `fleet scale` shows others."""
    run_ = run_at(address)
    if run_ is None:
        return []
    try:
        async with connector_of(FolderTarget(folder=str(run_.plans)), PlanWriter.PERSON) as connector:
            return list(unfinished(await connector.observe(), f" --plans {run_.plans}"))
    except ConnectorError:  # the run has just ended, or is not ready yet
        return []


def _lines(status: ClusterStatus) -> Iterator[str]:
    for pool in status.pools:
        yield f"{pool.model}  {pool.role}"
        for worker in pool.workers:
            yield (
                f"  {worker.worker_id:14} {worker.state:10} {worker.engine:18}"
                f" running {worker.running}  waiting {worker.waiting}  booked {worker.booked_requests}"
                f"  blocks used {worker.kv_blocks_used}/{worker.kv_blocks}  cached {worker.cached_blocks}"
                f" (worth {worker.cache_seconds:.2f} s)"
            )
    router = status.router
    yield (
        f"router  requests {router.requests}  aggregated {router.aggregated}  disaggregated {router.disaggregated}"
        f"  refused {router.refused}  active {router.active}  queued {router.queued}  index {router.index_blocks} blocks"
    )
    for hosted in status.overflow:
        yield (
            f"overflow  {hosted.model}  to {hosted.url}  running {hosted.running}  served {hosted.served}  not taken {hosted.not_taken}"
            f"  failed {hosted.failed}  spent ${hosted.spent_dollars:.4f} of ${hosted.limit_dollars:g} in the last hour"
            + (f"  closed: {hosted.trouble}" if hosted.trouble else "")
        )
    if (store := status.store) is not None:
        yield (
            f"store   {store.store_id}  {store.blocks} blocks, {store.bytes / MIB:.1f} of {store.capacity_bytes / MIB:.0f} MiB"
            f"  hits {store.hits}  misses {store.misses}  corrupt {store.corrupt}"
        )
