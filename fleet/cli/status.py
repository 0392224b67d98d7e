"""`fleet status`: shows pools, workers, load and caches of a running cluster."""

import argparse
import asyncio
import sys
from collections.abc import Iterator

import msgspec

from fleet.cli.console.address import add_control, control_client, describe_control_error
from fleet.cli.console.colours import CLEARED, Colour, coloured
from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.local.pools import unfinished
from fleet.cli.local.rates import RecentRates
from fleet.client import ClusterStatus, FleetError, WorkerStatus
from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import process_age
from fleet.local.runs import run_at
from fleet.planner.connectors.open import connector_of
from fleet.planner.messages import PlanWriter
from fleet.planner.ports import ConnectorError
from fleet.planner.settings import FolderTarget

MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    add_control(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="go on until Ctrl-C, once a second, with rates and percentiles of the last minute",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.watch and arguments.json:
        raise ConfigurationRefused("--watch: shows tables, so it cannot go with --json")
    if arguments.watch:
        return _watch(arguments)
    failing = list(_failing(arguments.address))
    try:
        with control_client(arguments) as client:
            status = client.status()
    except FleetError as error:
        for line in (describe_control_error(error, arguments), *failing):
            print(f"fleet: {line}", file=sys.stderr)
        return FAILED
    lines = [*_place(arguments.address), *_lines(status)]
    print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(lines))
    for line in (*failing, *asyncio.run(_scaling(arguments.address))):
        print(f"fleet: {line}", file=sys.stderr)
    return DONE


def _watch(arguments: argparse.Namespace) -> int:
    """Show the state again after each demand report, until Ctrl-C."""
    rates = RecentRates()
    try:
        with control_client(arguments) as client:
            for report in client.watch_demand():
                rates.hear(report)
                uptime = f"router {report.router}  up {uptime_words(report.uptime / SECOND)}"
                shown = [*_place(arguments.address), uptime, *_lines(client.status()), *rates.lines()]
                shown += [f"fleet: {line}" for line in _failing(arguments.address)]
                print(f"{CLEARED if sys.stdout.isatty() else ''}{chr(10).join(shown)}\n", flush=True)
        print("fleet: the router ended the watch", file=sys.stderr)
    except KeyboardInterrupt:
        return DONE
    except FleetError as error:
        print(f"fleet: {describe_control_error(error, arguments)}", file=sys.stderr)
    return FAILED


def _place(address: str) -> Iterator[str]:
    """Yield a line with the URLs and the uptime of a cluster on this machine. Yield nothing for other clusters."""
    run_ = run_at(address)
    if run_ is None or (addresses := run_.addresses()) is None or (supervisor := run_.supervisor()) is None:
        return
    scheme = "https" if addresses.tls.certificate else "http"
    ways = {
        "grpc": addresses.grpc_listen,
        "kserve": addresses.kserve_listen,
        "health": addresses.health_listen and f"http://{addresses.health_listen}/health",
        "control": addresses.control_listen,
    }
    others = "".join(f"  {name} {way}" for name, way in ways.items() if way)
    yield f"http {scheme}://{addresses.http_listen}/v1{others}  up {uptime_words(process_age(supervisor.pid))}"


def uptime_words(seconds: float) -> str:
    """Return a duration in words, with its two largest units, such as `3 h 20 min`."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{days} d", f"{hours} h", f"{minutes} min", f"{rest} s"]
    first = next((index for index, number in enumerate((days, hours, minutes)) if number), 3)
    return " ".join(parts[first : first + 2])


def _failing(address: str) -> Iterator[str]:
    """Yield a line if the supervisor of a local cluster hangs, and a line for each process that has died lately.

    A process counts as such while `fleet.local.runs.ProcessReport.failing` is true.
    """
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
    """Return a line for each pool of a local cluster that has not reached its size.

    For other clusters, return nothing; `fleet scale` shows their pools.
    """
    run_ = run_at(address)
    if run_ is None:
        return []
    try:
        async with connector_of(FolderTarget(folder=str(run_.plans)), PlanWriter.PERSON) as connector:
            return list(unfinished(await connector.observe(), f" --plans {run_.plans}"))
    except ConnectorError:  # the run has just ended, or is not ready yet
        return []


def _state(state: str) -> str:
    return coloured(f"{state:10}", Colour.GREEN if state == "serving" else Colour.YELLOW)


def _version(worker: WorkerStatus, newest: int) -> str:
    """Return a text with a worker's protocol version if it is older than `newest`, the newest version among the workers.

    If it is not older, or if the router states none (0), return an empty text.
    """
    if worker.protocol in (0, newest):
        return ""
    return f"  protocol {worker.protocol}, older than {newest}" + (f" ({worker.product})" if worker.product else "")


def _lines(status: ClusterStatus) -> Iterator[str]:
    newest = max((worker.protocol for pool in status.pools for worker in pool.workers), default=0)
    for pool in status.pools:
        yield f"{pool.model}  {pool.role}"
        for worker in pool.workers:
            yield (
                f"  {worker.worker_id:14} {_state(worker.state)} {worker.engine:18}"
                f" running {worker.running}  waiting {worker.waiting}  booked {worker.booked_requests}"
                f"  blocks used {worker.kv_blocks_used}/{worker.kv_blocks}  cached {worker.cached_blocks}"
                f" (worth {worker.cache_seconds:.2f} s){_version(worker, newest)}"
            )
    router = status.router
    yield (
        f"router  requests {router.requests}  aggregated {router.aggregated}  disaggregated {router.disaggregated}"
        f"  refused {router.refused}  active {router.active}  queued {router.queued}  index {router.index_blocks} blocks"
    )
    for peer in status.incompatible:
        yield coloured(f"incompatible {peer.link}  {peer.name}: {peer.cause}", Colour.RED)
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
