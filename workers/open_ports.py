"""Open ports of a worker: those at which engines talk to each other without credentials."""

from collections.abc import Iterator

from fleet.core.roles import KvPath
from kvstore.security.open_ports import NOTHING_PROVEN, UCX_PORTS, OpenPort
from workers.settings import WorkerSettings

REMEDY = "let only hosts of the engines reach these ports, by a network of their own"


def open_worker_ports(settings: WorkerSettings) -> Iterator[OpenPort]:
    """Yield the ports without proof of a worker, or of one of the other ranks of its engine."""
    group = settings.group
    if group is not None and not group.rank:
        setting = "group.listen" if group.listen else "group.leader"
        yield OpenPort(setting, group.listen or group.leader, NOTHING_PROVEN, REMEDY)
    if KvPath.DIRECT not in settings.kv_paths:
        return
    if settings.engine == "simulated":
        yield OpenPort("simulated.direct_listen", settings.simulated.direct_listen, NOTHING_PROVEN, REMEDY)
    elif settings.engine == "vllm":
        yield OpenPort("kv_paths", UCX_PORTS, NOTHING_PROVEN, REMEDY)
        # The side channel of NIXL listens on the host of the worker.
        setting = "advertise" if settings.advertise else "listen"
        yield OpenPort(setting, settings.advertise or settings.listen, NOTHING_PROVEN, REMEDY)
