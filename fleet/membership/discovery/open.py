"""Opens the directory of workers that the settings name. The packages for a kind of directory are imported only if it is used."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, assert_never

from fleet.core.discovery import Discovery, EtcdDiscovery, FileDiscovery, KubernetesDiscovery
from fleet.core.errors import missing_package
from fleet.membership.ports import Directory, Registry


class OpenDirectory(Directory, Registry, Protocol):
    """A directory that routers read and at which workers register; use it as an async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_directory(settings: Discovery, warm_blocks: Callable[[], int] | None = None) -> OpenDirectory:
    """Return the directory that the settings describe; use it as an async context manager.

    Args:
        settings: One kind of discovery, and how to reach it.
        warm_blocks: Returns the number of warm blocks of a worker; only Kubernetes publishes it. None: not published.

    Raises:
        ConfigurationRefused: A package for this kind of directory is not installed, the folder (file) does not exist, or a
            file of the credentials (etcd) cannot be read.
    """
    match settings:
        case FileDiscovery():
            from fleet.membership.discovery.file import FileDirectory  # noqa: PLC0415 - imported only if used

            return FileDirectory(settings)
        case EtcdDiscovery():
            try:
                from fleet.membership.discovery.etcd import EtcdDirectory  # noqa: PLC0415 - optional
            except ImportError as error:
                raise missing_package("discovery", "aetcd", "etcd") from error
            return EtcdDirectory(settings)
        case KubernetesDiscovery():
            try:
                from fleet.membership.discovery.kubernetes import KubernetesDirectory  # noqa: PLC0415 - optional
            except ImportError as error:
                raise missing_package("discovery", "kubernetes", "kubernetes") from error
            return KubernetesDirectory(settings, warm_blocks=warm_blocks)
        case _:
            assert_never(settings)
