"""Router poller: asks routers regularly which workers they know, more often while a deployment is not Ready."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Never, Protocol

from msgspec import Struct

from fleet.net.kubernetes.views import CustomObject, Pod
from operators.keys import ReconcileKey, deployment_key
from operators.manifests.names import CONTROL
from operators.observed.observe import conditions_of
from operators.observed.registrations import ReportedWorkers, WorkerRegistration

MISSED_ANSWERS = 3
"""If a router does not answer this number of polls in a row, its last report is ignored."""

ROUNDS_BETWEEN_READY_POLLS = 6
"""The routers of Ready deployments are polled only once in this number of rounds. All other routers are polled in each round."""


class RouterReports(Protocol):
    """Port that asks a router which workers it knows."""

    async def workers(self, address: str, secret: bytes) -> tuple[WorkerRegistration, ...] | None:
        """Return the workers to which a router sends requests, or None if the router does not answer.

        Args:
            address: Address of the router's control port, as host:port.
            secret: The control secret by which the operator proves its right to ask; empty if routers demand no proof.
        """
        ...


class RouterAnswer(Struct, frozen=True):
    """Holds the last report of one router."""

    workers: tuple[WorkerRegistration, ...] | None = None
    """The workers in the last report, or None if the router has no valid report."""

    missed: int = 0
    """The number of polls in a row that the router has not answered since its last report."""


class RouterPoller:
    def __init__(
        self,
        routers: RouterReports,
        pods: Callable[[ReconcileKey], Iterable[Pod]],
        secret: Callable[[str, str], bytes],
        seconds: float,
        at_once: int,
        on_change: Callable[[ReconcileKey], None],
    ) -> None:
        """Create the poller.

        Args:
            routers: Asks one router for its workers.
            pods: Returns the router pods of a deployment.
            secret: Returns the control secret of a deployment; its arguments are the deployment's namespace and name.
            seconds: The pause between the end of a round and the next round.
            at_once: The maximum number of concurrent calls.
            on_change: Called with the key of a deployment when a router has begun or stopped to report, or when the names of the
                workers that it reports have changed.
        """
        self._routers = routers
        self._pods = pods
        self._secret = secret
        self._seconds = seconds
        self._asking = asyncio.Semaphore(at_once)
        self._on_change = on_change
        self._words: dict[ReconcileKey, dict[str, RouterAnswer]] = {}

    def of(self, key: ReconcileKey) -> ReportedWorkers | None:
        """Return the last reports by router, or None if no router of the deployment has a valid report."""
        return _reports(self._words.get(key, {})) or None

    async def run(self, deployments: Callable[[], Iterable[CustomObject]]) -> Never:
        """Poll the routers of all present deployments until cancelled."""
        rounds = 0
        while True:
            async with asyncio.TaskGroup() as tasks:
                for custom in deployments():
                    if rounds % ROUNDS_BETWEEN_READY_POLLS == 0 or not _is_ready(custom):
                        tasks.create_task(self._ask(custom))
            rounds += 1
            await asyncio.sleep(self._seconds)

    def forget(self, key: ReconcileKey) -> None:
        self._words.pop(key, None)

    async def _ask(self, custom: CustomObject) -> None:
        key = deployment_key(custom.metadata.namespace, custom.metadata.name)
        routers = {pod.metadata.name: address_of(pod) for pod in self._pods(key) if pod.status.pod_ip}
        before = self._words.get(key, {})
        secret = self._secret(key.namespace, key.name)
        async with asyncio.TaskGroup() as tasks:
            asked = {
                name: tasks.create_task(self._word(address, secret, before.get(name, RouterAnswer())))
                for name, address in routers.items()
            }
        after = self._words[key] = {name: task.result() for name, task in asked.items()}
        if _names(after) != _names(before):
            self._on_change(key)

    async def _word(self, address: str, secret: bytes, before: RouterAnswer) -> RouterAnswer:
        async with self._asking:
            workers = await self._routers.workers(address, secret)
        missed = 0 if workers is not None else before.missed + 1
        return RouterAnswer(workers if workers is not None or missed >= MISSED_ANSWERS else before.workers, missed)


def address_of(router: Pod) -> str:
    """Return the address of a router's control port."""
    host = router.status.pod_ip
    return f"[{host}]:{CONTROL}" if ":" in host else f"{host}:{CONTROL}"


def _is_ready(custom: CustomObject) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in conditions_of(custom))


def _reports(words: Mapping[str, RouterAnswer]) -> ReportedWorkers:
    return {router: word.workers for router, word in words.items() if word.workers is not None}


def _names(words: Mapping[str, RouterAnswer]) -> dict[str, frozenset[str]]:
    return {router: frozenset(each.pod for each in workers) for router, workers in _reports(words).items()}
