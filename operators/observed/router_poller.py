"""Router poller: asks routers which workers they know, more often while a deployment is not Ready."""

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
"""After this number of missing answers, a router's last report does not count any more."""

ROUNDS_BETWEEN_READY_POLLS = 6
"""Ready deployments are polled once in this number of rounds."""


class RouterReports(Protocol):
    """Port that asks the routers of deployments about their workers."""

    async def workers(self, address: str, secret: bytes) -> tuple[WorkerRegistration, ...] | None:
        """Return the workers to which the router at a host:port sends requests; None if it does not answer.

        Args:
            address: The router's control port.
            secret: The proof that the operator may ask; empty: no proof.
        """
        ...


class RouterAnswer(Struct, frozen=True):
    """A router's last report, and the number of missing answers since."""

    workers: tuple[WorkerRegistration, ...] | None = None
    missed: int = 0


class RouterPoller:
    def __init__(
        self,
        routers: RouterReports,
        pods: Callable[[ReconcileKey], Iterable[Pod]],
        secret: Callable[[str, str], bytes],
        seconds: float,
        at_once: int,
        heard: Callable[[ReconcileKey], None],
    ) -> None:
        """Create the poller.

        Args:
            routers: Asks a router.
            pods: Returns a deployment's router pods.
            secret: Returns a deployment's control secret, by namespace and name.
            seconds: The time between two rounds.
            at_once: The most concurrent calls.
            heard: Called with deployments whose workers have changed.
        """
        self._routers = routers
        self._pods = pods
        self._secret = secret
        self._seconds = seconds
        self._asking = asyncio.Semaphore(at_once)
        self._heard = heard
        self._words: dict[ReconcileKey, dict[str, RouterAnswer]] = {}

    def of(self, key: ReconcileKey) -> ReportedWorkers | None:
        """Return the reports by router, without routers that have not answered for a while; None if no router has."""
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
            self._heard(key)

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
