"""Open ports of a worker: the ports at which engines talk to each other without credentials."""

from collections.abc import Iterator

from fleet.core.roles import KvPath
from kvstore.security.open_ports import NO_CREDENTIALS, UCX_PORTS, OpenPort, is_open_to_others
from workers.settings import WorkerSettings

REMEDY = "let only hosts of the engines reach these ports, by a network of their own"


def open_worker_ports(settings: WorkerSettings) -> Iterator[OpenPort]:
    """Yield the ports of this process (a worker, or another rank of its engine) at which callers need no credentials."""
    group = settings.group
    if group is not None and not group.rank:
        setting = "group.listen" if group.listen else "group.leader"
        yield OpenPort(setting, group.listen or group.leader, NO_CREDENTIALS, REMEDY)
    if KvPath.DIRECT not in settings.kv_paths:
        return
    if settings.engine == "simulated":
        yield OpenPort("simulated.direct_listen", settings.simulated.direct_listen, NO_CREDENTIALS, REMEDY)
    elif settings.engine == "vllm":
        yield OpenPort("kv_paths", UCX_PORTS, NO_CREDENTIALS, REMEDY)
        if is_open_to_others(settings.advertise or settings.listen):
            channel = f"the side channel of NIXL at {settings.engine_host}, a free port"
            yield OpenPort("kv_paths", channel, NO_CREDENTIALS, REMEDY)
