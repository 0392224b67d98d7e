"""Directories of workers by their settings. Each technology is loaded where it is used: two of them are optional."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, assert_never

from fleet.core.discovery import Discovery, EtcdDiscovery, FileDiscovery, KubernetesDiscovery
from fleet.core.errors import ConfigurationRefused
from fleet.membership.ports import Directory
from workers.ports import Registry


class StatelessDirectory:
    """Of a directory that holds nothing open between two calls: its context does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is in it stays."""


class OpenDirectory(Directory, Registry, Protocol):
    """For workers a registry, for routers a directory; used within its context."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_directory(settings: Discovery, warm_blocks: Callable[[], int] | None = None) -> OpenDirectory:
    """To be entered before it is used; `warm_blocks` of a worker is told where somebody reads it, which is Kubernetes.

    Raises:
        ConfigurationRefused: A package is not installed, or what the settings name is not there.
    """
    match settings:
        case FileDiscovery():
            from fleet.membership.discovery.file import FileDirectory  # noqa: PLC0415 - each loads its own technology

            return FileDirectory(settings)
        case EtcdDiscovery():
            try:
                from fleet.membership.discovery.etcd import EtcdDirectory  # noqa: PLC0415 - optional
            except ImportError as error:
                raise _not_installed("aetcd", "etcd") from error
            return EtcdDirectory(settings)
        case KubernetesDiscovery():
            try:
                from fleet.membership.discovery.kubernetes import KubernetesDirectory  # noqa: PLC0415 - optional
            except ImportError as error:
                raise _not_installed("kubernetes", "kubernetes") from error
            return KubernetesDirectory(settings, warm_blocks=warm_blocks)
        case _:
            assert_never(settings)


def _not_installed(package: str, extra: str) -> ConfigurationRefused:
    return ConfigurationRefused(f"discovery: needs the package {package}: pip install 'fleet-serving[{extra}]'")
