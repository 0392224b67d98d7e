"""`fleet status`: pools, workers, load and caches of a running cluster."""

import argparse
import sys
from collections.abc import Iterator

import msgspec

from fleet.cli.exits import DONE, FAILED
from fleet.client import Client, ClusterStatus, FleetError
from fleet.config import Topology

MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_address(parser: argparse.ArgumentParser) -> None:
    """The option that says which cluster."""
    default = Topology().router.grpc_listen
    parser.add_argument(
        "--address", default=default, metavar="HOST:PORT", help=f"a router's gRPC address (default: {default})"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        with Client(arguments.address) as client:
            status = client.status()
    except FleetError as error:
        print(f"fleet: {arguments.address}: {error.message}", file=sys.stderr)
        return FAILED
    print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(_lines(status)))
    return DONE


def _lines(status: ClusterStatus) -> Iterator[str]:
    for pool in status.pools:
        yield f"{pool.model}  {pool.role}"
        for worker in pool.workers:
            yield (
                f"  {worker.worker_id:14} {worker.state:10} {worker.engine:18}"
                f" running {worker.running}  waiting {worker.waiting}  booked {worker.booked_requests}"
                f"  blocks used {worker.kv_blocks_used}/{worker.kv_blocks}  cached {worker.cached_blocks}"
            )
    router = status.router
    yield (
        f"router  requests {router.requests}  aggregated {router.aggregated}  disaggregated {router.disaggregated}"
        f"  refused {router.refused}  active {router.active}  queued {router.queued}  index {router.index_blocks} blocks"
    )
    if (store := status.store) is not None:
        yield (
            f"store   {store.store_id}  {store.blocks} blocks, {store.bytes / MIB:.1f} of {store.capacity_bytes / MIB:.0f} MiB"
            f"  hits {store.hits}  misses {store.misses}  corrupt {store.corrupt}"
        )
