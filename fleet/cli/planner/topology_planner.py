"""Planner of a topology: computes the settings that `fleet up` gives its planner, without a cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.config import load
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName
from fleet.local.planner import planner_settings
from fleet.local.settings import SIMULATED, Topology
from fleet.local.topology import pool_names
from fleet.planner.settings import PlannerSettings


def topology_planner(
    file: Path, raw: Mapping[str, Any], model: ModelName, *, simulated: bool = True
) -> PlannerSettings | None:
    """Return the settings of the planner of a topology; None if the topology has none.

    Args:
        file: The topology.
        raw: The content of the file.
        model: Name of the model.
        simulated: If the file names no engine, take the simulated one, because `fleet up` has an option for the engine.

    Raises:
        ConfigurationRefused: The file cannot be used; the message begins with the file.
    """
    cluster = raw.get("cluster")
    is_named = isinstance(cluster, dict) and "engine" in cluster
    changes = {"cluster.engine": SIMULATED} if simulated and not is_named else None
    topology = load(file, Topology, changes, content=raw)
    if topology.planner is None:
        return None
    # A rule uses neither the folder nor the port.
    folder, control = Path("/"), "unix:/control"
    try:
        return planner_settings(
            topology, topology.planner, pool_names(topology), folder=folder, model=model, control=control
        )
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{file}: {error}") from error
