"""Planner of a local cluster: makes the settings of the planner process from the topology.

The planner writes its plans to a folder; `fleet.local.pools` starts and ends workers as these plans say.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from fleet.config import build_settings
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.local.runs import PLANS
from fleet.local.settings import SIMULATED, LocalPlannerSection, PoolSection, Topology
from fleet.planner.decisions import PlannedPool, check_gpu_limit
from fleet.planner.messages import PoolName
from fleet.planner.price_books import priced_from_file
from fleet.planner.settings import (
    FolderTarget,
    GpuEngineSettings,
    LinearEngineSettings,
    PlannerSettings,
    RouterDemandSettings,
)
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials

PLANNER = "planner"
PLANNER_SOCKET = "planner.sock"
READY_WITHIN = Nanos(60 * SECOND)


def planner_settings(
    topology: Topology, section: LocalPlannerSection, names: list[str], *, folder: Path, model: ModelName, control: str
) -> PlannerSettings:
    """Return the settings of the planner's process.

    Args:
        topology: The topology of the cluster.
        section: The topology's section about the planner.
        names: Names of the pools, in the order of the topology.
        folder: The runtime folder.
        model: Name under which the model is served.
        control: The router's control address.

    Raises:
        ConfigurationRefused: The section names a pool that does not exist, its values contradict each other, or its price
            book cannot be used.
    """
    for field, tables in (("pools", section.pools), ("engines", section.engines)):
        for name in tables:
            if name not in names:
                raise ConfigurationRefused(
                    f"planner.{field}.{name}: is not a pool of this cluster; there are {', '.join(names)}"
                )
    pools = dict(zip(names, topology.pools, strict=True))
    engines: Mapping[PoolName, LinearEngineSettings | GpuEngineSettings] = section.engines
    if topology.cluster.engine == SIMULATED:
        simulated = {PoolName(name): _linear(topology, pool) for name, pool in pools.items()}
        engines = simulated | section.engines
    planned = [_pool(topology, section, name, pool) for name, pool in pools.items()]
    try:
        check_gpu_limit(planned, section.budget)
        return build_settings(
            PlannerSettings,
            model=model,
            mode=section.mode,
            goals=section.goals,
            budget=section.budget,
            pools=priced_from_file(planned, section.prices, section.region),
            engines=dict(engines),
            rule=section.rule,
            source=RouterDemandSettings(
                addresses=(control,),
                credentials=Credentials() if unix_path(control) else topology.router.control_credentials,
            ),
            target=FolderTarget(folder=str(folder / PLANS)),
            listen=f"unix:{folder / PLANNER_SOCKET}",
            metrics_listen=section.metrics_listen,
            metrics_access=section.metrics_access,
            metrics_tls=topology.metrics_tls,
            history=section.history or str(folder / "plans.jsonl"),
            record=section.record,
            rehearsal=section.rehearsal
            if section.rehearsal.max_queue_seconds is not None
            else structs.replace(section.rehearsal, max_queue_seconds=topology.router.max_queue_seconds),
            score_seconds=section.score_seconds,
        )
    except (ConfigurationRefused, ValueError) as error:
        named = re.sub(r"^pools\[([0-9]+)\]", lambda place: f"pools.{names[int(place[1])]}", str(error))
        raise ConfigurationRefused(f"planner.{named}") from error


def _pool(topology: Topology, section: LocalPlannerSection, name: str, pool: PoolSection) -> PlannedPool:
    bounds = section.pools.get(PoolName(name))
    most = topology.cluster.most_workers
    if bounds is None:
        return PlannedPool(name=PoolName(name), role=pool.role, least=1, most=most)
    return PlannedPool(
        name=PoolName(name),
        role=pool.role,
        gpu=bounds.gpu,
        gpus=bounds.gpus,
        least=bounds.least,
        most=most if bounds.most is None else bounds.most,
        dollars_per_hour=bounds.dollars_per_hour,
        watts=bounds.watts,
        start_seconds=bounds.start_seconds,
        drain_seconds=bounds.drain_seconds,
    )


def _linear(topology: Topology, pool: PoolSection) -> LinearEngineSettings:
    engine = pool.simulated
    return LinearEngineSettings(
        latency=engine.latency,
        speedup=engine.speedup,
        max_running=pool.max_running,
        kv_tokens=engine.kv_blocks * topology.cluster.block_tokens,
        step_tokens=engine.max_batched_tokens,
        bytes_per_token=float(engine.bytes_per_token),
    )
