"""Opening of elections: opens the election that the settings name, by which planners choose their leader.

The packages for etcd and Kubernetes are optional, so they are imported only if the settings need them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import assert_never

from fleet.core.clock import Clock
from fleet.core.errors import ConfigurationRefused, missing_package
from fleet.core.system_clock import utc_now
from fleet.planner.election.file import open_file_election
from fleet.planner.election.ports import AlwaysLeads, PlanElection
from fleet.planner.settings import (
    EtcdElectionSettings,
    EtcdTarget,
    FileElectionSettings,
    FolderTarget,
    KubernetesElectionSettings,
    PlannerMode,
    PlannerSettings,
)

PLANNER_LOCK = ".planner"
"""Name of the lock file in the folder of plans; the leading planner holds the lock on this file."""


@asynccontextmanager
async def open_election(settings: PlannerSettings, identity: str, clock: Clock) -> AsyncIterator[PlanElection]:
    """Open the candidate by which this planner takes part in an election; close it when the context ends.

    Raises:
        ConfigurationRefused: A package is not installed, a file cannot be used, or the API server or the namespace of
            the Kubernetes Lease is not known.
    """
    if settings.election is None:
        async with _by_target(settings, identity, clock) as candidate:
            yield candidate
    else:
        async with _by_settings(settings.election, identity, clock) as candidate:
            yield candidate


@asynccontextmanager
async def _by_target(settings: PlannerSettings, identity: str, clock: Clock) -> AsyncIterator[PlanElection]:
    """Open an election among the active planners that write plans to the same folder or etcd prefix.

    Without this election, the planners would overwrite each other's plans. For another target or mode, the planner
    always leads.
    """
    target = settings.target
    if settings.mode is PlannerMode.ACTIVE and isinstance(target, FolderTarget):
        with open_file_election(Path(target.folder) / PLANNER_LOCK, identity, may_come_later=True) as file:
            yield file
    elif settings.mode is PlannerMode.ACTIVE and isinstance(target, EtcdTarget):
        key = f"{target.prefix}leader"
        election = EtcdElectionSettings(endpoints=target.endpoints, key=key, credentials=target.credentials)
        async with _by_settings(election, identity, clock) as candidate:
            yield candidate
    else:
        yield AlwaysLeads()


@asynccontextmanager
async def _by_settings(
    settings: FileElectionSettings | EtcdElectionSettings | KubernetesElectionSettings, identity: str, clock: Clock
) -> AsyncIterator[PlanElection]:
    match settings:
        case FileElectionSettings():
            with open_file_election(Path(settings.path), identity) as file:
                yield file
        case EtcdElectionSettings():
            try:
                from fleet.planner.election.etcd import open_etcd_election  # noqa: PLC0415 - optional
            except ImportError as error:
                raise missing_package("election", "aetcd", "etcd") from error
            async with open_etcd_election(settings, identity, clock) as etcd:
                yield etcd
        case KubernetesElectionSettings():
            async with _kubernetes(settings, identity, clock) as lease:
                yield lease
        case _:
            assert_never(settings)


@asynccontextmanager
async def _kubernetes(settings: KubernetesElectionSettings, identity: str, clock: Clock) -> AsyncIterator[PlanElection]:
    try:
        from fleet.net.kubernetes.client import open_api_client  # noqa: PLC0415 - optional
        from fleet.net.kubernetes.leader import LeaseLeader, LeaseSettings  # noqa: PLC0415 - optional
        from fleet.net.kubernetes.own_pod import own_namespace  # noqa: PLC0415 - optional
        from fleet.net.kubernetes.ports import KubernetesError  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("election", "kubernetes", "kubernetes") from error
    namespace = settings.namespace or own_namespace()
    if not namespace:
        raise ConfigurationRefused("election.namespace: is needed outside of a pod")
    duration = settings.duration_seconds
    lease = LeaseSettings(
        name=settings.name,
        namespace=namespace,
        duration_seconds=duration,
        renew_within_seconds=duration * 2 / 3,
        retry_seconds=duration * 2 / 15,
    )
    api = open_api_client(settings.kubeconfig, f"fleet-planner/{identity}", "fleet-planner")
    try:
        cluster = await api.__aenter__()
    except KubernetesError as error:
        raise ConfigurationRefused(f"election.{error}") from error
    try:
        leader = LeaseLeader(cluster, lease, namespace, identity, clock, utc_now)
        try:
            yield leader
        finally:
            await leader.give_back()
    finally:
        await api.__aexit__(None, None, None)
