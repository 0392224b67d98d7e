"""Connectors by their settings. The packages of each one are imported only if it is used, because two of them are optional."""

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
"""The entry points of connectors that live in other packages, which this one must not import."""


@asynccontextmanager
async def connector_of(target: Target, writer: PlanWriter) -> AsyncIterator[PlanConnector]:
    """Open the connector of a target for the length of the context.

    Raises:
        ConfigurationRefused: A package is not installed, or something that the settings name does not exist.
    """
    match target:
        case FolderTarget(folder=folder):
            yield VirtualConnector(FolderRecords(Path(folder)), writer, utc_now)
        case EtcdTarget():
            try:
                from fleet.planner.connectors.etcd import etcd_records  # noqa: PLC0415 - optional
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
