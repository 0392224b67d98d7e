"""Opening of connectors: opens the plan connector that the settings name.

The modules of the etcd and Kubernetes connectors are imported only if they are used, because their packages are
optional.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import assert_never

from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import utc_now
from fleet.planner.connectors.folder import FolderRecords
from fleet.planner.connectors.virtual import VirtualConnector
from fleet.planner.messages import PlanWriter
from fleet.planner.ports import PlanConnector
from fleet.planner.settings import EtcdTarget, FolderTarget, KubernetesTarget, Target

CONNECTORS = "fleet.plan_connectors"
"""Group of entry points by which connectors in other packages are found. Such connectors are not imported directly,
because `fleet` must not import from `operators`."""


@asynccontextmanager
async def connector_of(target: Target, writer: PlanWriter) -> AsyncIterator[PlanConnector]:
    """Open the connector of a target, and close it when the context ends.

    Raises:
        ConfigurationRefused: A package or the entry point of the connector is not installed, or a file that the settings
            name cannot be used.
    """
    match target:
        case FolderTarget(folder=folder):
            yield VirtualConnector(FolderRecords(Path(folder)), writer, utc_now)
        case EtcdTarget():
            try:
                from fleet.planner.connectors.etcd import etcd_records  # noqa: PLC0415 - optional dependency
            except ImportError as error:
                raise _not_installed("aetcd", "etcd") from error
            async with etcd_records(target) as records:
                yield VirtualConnector(records, writer, utc_now)
        case KubernetesTarget():
            found = tuple(entry_points(group=CONNECTORS, name="kubernetes"))
            if not found:
                raise ConfigurationRefused(
                    f"connector: no entry point `kubernetes` in {CONNECTORS}: install Fleet again"
                )
            try:
                kubernetes_connector = found[0].load()
            except ImportError as error:
                raise _not_installed("kubernetes", "kubernetes") from error
            async with kubernetes_connector(target, writer) as connector:
                yield connector
        case _:
            assert_never(target)


def _not_installed(package: str, extra: str) -> ConfigurationRefused:
    return ConfigurationRefused(f"connector: needs the package {package}: pip install 'fleet-serving[{extra}]'")
