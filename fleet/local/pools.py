"""Local pools: scales the pools of a local cluster by the plans in a folder (`fleet.planner.connectors.folder`).

Rules:

1. If `fleet up` would refuse a topology with the planned pools, such as prefill without decode workers, no part of the
   plan is carried out. If only the settings of a new worker are refused, its pool does not grow, and the other pools
   follow the plan.
2. A pool that shrinks first loses workers that do not serve yet, and then workers whose cache is worth least. The worth
   of a cache is the time to compute again those of its blocks that no other worker has; the router reports it. If the
   router does not answer, the workers with the highest numbers in their names are removed. Removed workers drain: they
   take no new requests, finish the running ones, and end.
3. Draining workers keep their devices. New workers for which there is no room wait until draining workers have ended.
4. A worker whose start fails is started again as long as it is wanted. The rest of the cluster goes on meanwhile.
5. A plan is carried out even if the program that wrote it does not wait for it any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import grpc
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import WorkerId
from fleet.local.processes import ChildEndpoints, LocalProcesses
from fleet.local.runs import PLANS
from fleet.local.settings import Topology
from fleet.local.supervision import ChildState
from fleet.local.topology import LocalPlan, LocalPool, worker_number, worker_process
from fleet.net.control.access import ControlAccess
from fleet.net.grpc.options import SEPARATE_CHANNEL_OPTIONS
from fleet.planner.connectors.folder import REPORT, FolderRecords
from fleet.planner.connectors.virtual import Intent, PlanReport, PoolReport
from fleet.planner.messages import PoolGapReason, PoolName, worker_prefix
from fleet.planner.ports import ConnectorUnreachable
from fleet.v1 import control_pb2, control_pb2_grpc
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc

LOOK_EVERY = 0.2  # seconds between two reads of the plan
# Time limit for the drain of a removed worker, which then ends although requests run (on Kubernetes, `drain.timeoutSeconds`
# of a role is this limit).
DRAIN = Nanos(300 * SECOND)
# If a worker has not answered the call `Drain` this many seconds after the drain's time limit, the call counts as failed.
GRACE_SECONDS = 10.0


# Time limit in seconds for the router to report what the caches are worth (rule 2).
WORTH_SECONDS = 1.0

AskWorth = Callable[[], Awaitable[Mapping[WorkerId, float]]]
"""Function that returns the worth of each worker's cache: the seconds that computing its blocks again would take, as rule 2
says. Workers that the router does not know are left out."""


class LocalPools:
    """Scales the pools according to plans. The caller runs `follow`.

    Args:
        topology: The topology of the cluster.
        planned: The processes with which the cluster was started; this object scales the pools of `planned`.
        processes: Runs the child processes; workers are added to it and removed from it.
        folder: The runtime folder.
        say: Shows one line to a person.
        ask_worth: Asks the router what the caches of workers are worth. None: pools shrink as if the router did not answer.
    """

    def __init__(
        self,
        topology: Topology,
        planned: LocalPlan,
        processes: LocalProcesses,
        folder: Path,
        say: Callable[[str], None],
        ask_worth: "AskWorth | None" = None,
    ) -> None:
        self._topology = topology
        self._ask_worth = ask_worth
        self._worth: Mapping[WorkerId, float] = {}
        self._pools = {PoolName(pool.name): _PoolWorkers(pool) for pool in planned.pools}
        self._processes = processes
        self._say = say
        self._runtime = folder
        self.folder = folder / PLANS
        """Folder from which plans are read, and to which reports are written."""

        self.folder.mkdir()
        self._records = FolderRecords(self.folder)
        self._revision = 0
        self._limited: Mapping[PoolName, str] = {}
        self._reported: PlanReport | None = None

    async def follow(self) -> None:
        """Carry out plans until cancelled. If a plan cannot be carried out, show the problem once and try again."""
        trouble = ""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._records.obeyed())
            # on a full disk, for example, the lock file that shows that this process runs cannot be created
            except OSError as error:
                self._say(f"{self.folder}: {error.strerror}")
            while True:
                try:
                    if self._ask_worth is not None and self._will_shrink():
                        self._worth = await self._ask_worth()
                    self.step()
                    trouble = ""
                except (ConnectorUnreachable, OSError) as error:  # OSError: for example, the disk is full
                    if str(error) != trouble:
                        trouble = str(error)
                        self._say(trouble)
                await asyncio.sleep(LOOK_EVERY)

    def step(self) -> None:
        """Read the plan, carry out the part of it that is possible now, and write the report.

        Raises:
            ConnectorUnreachable: The plan cannot be read, or the report not written.
            OSError: The settings of a new worker cannot be written, or the plan folder cannot be made again.
        """
        self.folder.mkdir(exist_ok=True)  # a program that removes old files in /tmp may have removed the folder
        intent = self._records.intent()
        if intent.revision != self._revision:
            self._take_up(intent)
        for pool in self._pools.values():
            pool.forget_all_but(self._processes.names)
            self._shrink(pool)
        for name, pool in self._pools.items():
            try:
                self._grow(pool)
            # The settings of the new worker are refused. `fleet.local.topology.plan` checked them only for pools with workers at the start.
            except ConfigurationRefused as refused:
                self._limited = {**self._limited, name: str(refused)}
                pool.target = len(pool.staying)
        report = PlanReport(revision=self._revision, pools={name: self._said(name) for name in self._pools})
        if report != self._reported or not (self.folder / REPORT).exists():
            self._records.report(report)
            self._reported = report

    def _will_shrink(self) -> bool:
        intent = self._records.intent()
        return intent.revision != self._revision and any(
            name in intent.pools and intent.pools[name].replicas < pool.target for name, pool in self._pools.items()
        )

    def _take_up(self, intent: Intent) -> None:
        self._revision = intent.revision
        wanted = {
            name: intent.pools[name].replicas if name in intent.pools else pool.target
            for name, pool in self._pools.items()
        }
        sections = tuple(
            structs.replace(section, replicas=replicas)
            for section, replicas in zip(self._topology.pools, wanted.values(), strict=True)
        )
        try:
            structs.replace(self._topology, pools=sections)
        except ValueError as refused:
            self._limited = {name: str(refused) for name, pool in self._pools.items() if wanted[name] != pool.target}
            return
        self._limited = {}
        for name, pool in self._pools.items():
            pool.target = wanted[name]

    def _shrink(self, pool: "_PoolWorkers") -> None:
        child_states = self._processes.child_states()
        dispensable = sorted(
            pool.staying,
            key=lambda name: (
                child_states.get(name) is ChildState.READY,
                self._worth.get(name, 0.0),
                -worker_number(name),
            ),
        )
        for name in dispensable[: max(0, len(pool.staying) - pool.target)]:
            pool.staying.remove(name)
            pool.leaving.add(name)
            self._processes.remove(name, DRAIN)

    def _grow(self, pool: "_PoolWorkers") -> None:
        for _ in range(min(pool.target - len(pool.staying), self._room())):
            name = self._free_name(pool.kind)
            self._processes.add(worker_process(pool.kind, name, self._runtime))
            pool.staying.append(name)

    def _room(self) -> int:
        there = sum(len(pool.staying) + len(pool.leaving) for pool in self._pools.values())
        return self._topology.cluster.most_workers - there

    def _free_name(self, kind: LocalPool) -> WorkerId:
        number = 0
        while (name := f"{worker_prefix(PoolName(kind.name))}-{number}") in self._processes.names:
            number += 1
        return WorkerId(name)

    def _said(self, name: PoolName) -> PoolReport:
        pool = self._pools[name]
        child_states, failing = self._processes.child_states(), sorted(self._processes.failing() & set(pool.staying))
        why, message = None, ""
        if name in self._limited:
            why, message = PoolGapReason.LIMITED, self._limited[name]
        elif failing:
            why, message = (
                PoolGapReason.FAILING,
                f"{failing[0]} does not start; the output of fleet up has the end of its log",
            )
        elif len(pool.staying) < pool.target:
            most = self._topology.cluster.most_workers
            why, message = PoolGapReason.NO_ROOM, f"the machine has room for {most} workers (cluster.most_workers)"
        return PoolReport(
            asked=pool.target,
            ready=sum(child_states.get(each) is ChildState.READY for each in pool.staying),
            draining=len(pool.leaving),
            why=why,
            message=message,
        )


class _PoolWorkers:
    """The workers of one pool: the workers that stay, and the workers that drain."""

    def __init__(self, kind: LocalPool) -> None:
        self.kind = kind
        self.target = len(kind.workers)
        self.staying = list(kind.workers)
        self.leaving: set[WorkerId] = set()

    def forget_all_but(self, names: frozenset[str]) -> None:
        self.leaving &= names


async def router_cache_worth(address: str, access: ControlAccess) -> Mapping[WorkerId, float]:
    """Ask the router for the worth of each worker's cache in seconds (`AskWorth`).

    If the router does not answer, the result is empty.
    """
    try:
        async with access.aio_channel(address, separate=True) as channel:
            stub = control_pb2_grpc.ClusterStub(channel)
            answer = await stub.Status(control_pb2.StatusRequest(), timeout=WORTH_SECONDS)
    except grpc.aio.AioRpcError:
        return {}
    return {WorkerId(each.worker_id): each.cache_seconds for pool in answer.pools for each in pool.workers}


async def drain(endpoints: ChildEndpoints, within: Nanos) -> bool:
    """Call a worker's method `Drain`, so that it drains and then ends. Return False if the call failed."""
    asked = pb.DrainRequest(deadline_ms=within // MILLISECOND)
    try:
        async with grpc.aio.insecure_channel(endpoints["grpc"], options=SEPARATE_CHANNEL_OPTIONS) as channel:
            await pb_grpc.WorkerStub(channel).Drain(asked, timeout=within / SECOND + GRACE_SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return True
