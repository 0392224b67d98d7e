"""Injection: begins one fault of processes, links or the disk of a fault cluster, and ends the fault."""

import asyncio
import resource
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import psutil

from tests.faults.cluster import FaultCluster
from tests.faults.matrix import LIMITS, ON_DISK, Component, MatrixFault
from tests.faults.relay import Relay, Spoiling
from tests.support.waiting import pace, until

LASTING_SECONDS = 5.0  # longer than the router's heartbeat timeout
DELAY_SECONDS = 0.15
DISK_DELAY_MICROSECONDS = 400_000
ATTACH_SECONDS = 10.0
MEMORY_LEFT_BYTES = 1 << 20
FILES_LEFT = 0

End = Callable[[], Awaitable[None]]


async def inject(cluster: FaultCluster, component: Component, fault: MatrixFault, victims: Sequence[str]) -> End:
    """Begin a fault, and return the coroutine function that ends it.

    Args:
        cluster: The cluster.
        component: The component that gets the fault.
        fault: The fault.
        victims: For a worker component: the workers that get the fault.
    """
    if fault in (MatrixFault.CUT, MatrixFault.DELAY):
        return _on_links(_links(cluster, component, victims), fault)
    if fault in (MatrixFault.CORRUPT_FRAME, MatrixFault.DUPLICATED_EVENTS, MatrixFault.REORDERED_EVENTS):
        return _spoil([cluster.links[name] for name in victims], fault)
    if fault in ON_DISK:
        return await _on_disk(cluster, fault)
    if component is Component.REDIS:
        return _on_redis(cluster, fault)
    pids = _pids(cluster, component, victims)
    if fault in LIMITS:
        return _limit(pids, fault)
    return await _signal(cluster, component, pids, fault)


def _pids(cluster: FaultCluster, component: Component, victims: Sequence[str]) -> list[int]:
    if component is Component.ROUTER:
        return [cluster.router.pid]
    if component is Component.STORE:
        return [cluster.node.pid]
    return [cluster.workers[name].pid for name in victims]


async def _signal(cluster: FaultCluster, component: Component, pids: Sequence[int], fault: MatrixFault) -> End:
    """Kill or stop processes. At the end of the fault, do what a supervisor does: restart killed processes, and kill stopped ones."""

    async def start_again() -> None:
        if component is Component.ROUTER:
            await cluster.start_router()
        elif component is Component.STORE:
            await asyncio.to_thread(cluster.node.start)

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                psutil.Process(pid).send_signal(number)

    async def kill_and_wait() -> None:
        send(signal.SIGKILL)
        await cluster.reap()

    if fault is MatrixFault.KILL:
        await kill_and_wait()
        restarted = asyncio.ensure_future(start_again())

        async def ended() -> None:
            await restarted

        return ended
    send(signal.SIGSTOP)
    if fault is MatrixFault.STOP_6S:
        thawed = asyncio.ensure_future(_after(6.0, lambda: send(signal.SIGCONT)))

        async def thaw() -> None:
            await thawed

        return thaw
    if component is Component.ROUTER:  # a stopped router ends only by the liveness probe of its supervisor

        async def probe() -> None:
            await pace(LASTING_SECONDS, "the time until the liveness probe of its supervisor fails")
            await kill_and_wait()
            await start_again()

        probed = asyncio.ensure_future(probe())

        async def replaced() -> None:
            await probed

        return replaced

    async def end() -> None:
        await kill_and_wait()
        await start_again()

    return end


async def _after(seconds: float, then: Callable[[], None]) -> None:
    await pace(seconds, "the fault lasts for so long")
    then()


def _links(cluster: FaultCluster, component: Component, victims: Sequence[str]) -> list[Relay]:
    if component is Component.STORE:
        return [cluster.store_link]
    if component is Component.REGISTRY:
        return [cluster.registry_link]
    return [cluster.links[name] for name in victims]


def _on_links(links: Sequence[Relay], fault: MatrixFault) -> End:
    for link in links:
        if fault is MatrixFault.CUT:
            link.cut()
        else:
            link.delay_seconds = DELAY_SECONDS

    def heal() -> None:
        for link in links:
            link.heal()

    healed = asyncio.ensure_future(_after(LASTING_SECONDS, heal))

    async def end() -> None:
        await healed

    return end


def _spoil(links: Sequence[Relay], fault: MatrixFault) -> End:
    spoilings = {
        MatrixFault.CORRUPT_FRAME: Spoiling.CORRUPT,
        MatrixFault.DUPLICATED_EVENTS: Spoiling.DUPLICATE,
        MatrixFault.REORDERED_EVENTS: Spoiling.REORDER,
    }
    for link in links:
        link.spoiled = 0
        link.spoiling = spoilings[fault]

    async def end() -> None:
        for link in links:
            link.heal()
        assert any(link.spoiled for link in links), "no frame was changed"

    return end


async def _on_disk(cluster: FaultCluster, fault: MatrixFault) -> End:
    """Delay or fail the disk's system calls in the store node."""
    change = f"delay_enter={DISK_DELAY_MICROSECONDS}" if fault is MatrixFault.SLOW_DISK else "error=ENOSPC"
    calls = "preadv,pwritev" if fault is MatrixFault.SLOW_DISK else "pwritev"
    command = ["strace", "-qq", "-f", "-o", "/dev/null", "-p", str(cluster.node.pid), "-e", f"trace={calls}"]
    tracer = subprocess.Popen([*command, "-e", f"inject={calls}:{change}"], stderr=subprocess.PIPE)

    def is_attached() -> bool:
        assert tracer.poll() is None, "strace cannot attach to the store node"
        return _tracer_of(cluster.node.pid) == tracer.pid

    await until(is_attached, ATTACH_SECONDS)

    async def end() -> None:
        await pace(LASTING_SECONDS, "the fault lasts for so long")
        tracer.send_signal(signal.SIGINT)
        await asyncio.to_thread(tracer.wait, ATTACH_SECONDS)

    return end


def _tracer_of(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123 - one line of a small file
        return next(int(line.split()[1]) for line in status if line.startswith("TracerPid"))


def _on_redis(cluster: FaultCluster, fault: MatrixFault) -> End:
    redis = cluster.redis
    assert redis is not None
    if fault is MatrixFault.KILL:
        redis.kill()
    else:
        redis.freeze()

    async def end() -> None:
        if fault is MatrixFault.STOP_6S:
            await pace(6.0, "Redis is stopped for so long")
            redis.thaw()
            return
        redis.kill()
        await asyncio.to_thread(redis.start)

    return end


def _limit(pids: Sequence[int], fault: MatrixFault) -> End:
    """Let processes open hardly any more files, or allocate hardly any more memory, until the fault ends."""
    which = resource.RLIMIT_NOFILE if fault is MatrixFault.NO_FILES else resource.RLIMIT_AS
    before: dict[int, tuple[int, int]] = {}
    for pid in pids:
        process = psutil.Process(pid)
        now = (
            process.num_fds() + FILES_LEFT
            if fault is MatrixFault.NO_FILES
            else process.memory_info().vms + MEMORY_LEFT_BYTES
        )
        before[pid] = soft, hard = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (now, hard))
        assert soft != now, "the limit was there before"

    async def end() -> None:
        await pace(LASTING_SECONDS, "the limits hold for so long")
        for pid, limit in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, which, limit)

    return end
