"""What routers say of their workers, asked for again and again: more often while something is not as it should be."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Never

from msgspec import Struct

from fleet.net.kubernetes.ports import RouterReports
from fleet.net.kubernetes.views import CustomObject, Pod
from operators.keys import ReconcileKey, deployment_key
from operators.manifests.names import CONTROL
from operators.observed.observe import conditions_of
from operators.observed.registrations import ReportedWorkers, WorkerRegistration

MISSED_ANSWERS = 3
"""Of a router, until what it said before is not believed any more."""

ROUNDS_BETWEEN_READY_POLLS = 6
"""Rounds after which those are asked that are as they should be."""


class RouterAnswer(Struct, frozen=True):
    """What a router said, and how often it has not answered since."""

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
        """`pods` are a deployment's routers; `secret` is its control secret, by namespace and name; `seconds` pass between two rounds; `heard` is told whose workers are others than before."""
        self._routers = routers
        self._pods = pods
        self._secret = secret
        self._seconds = seconds
        self._asking = asyncio.Semaphore(at_once)
        self._heard = heard
        self._words: dict[ReconcileKey, dict[str, RouterAnswer]] = {}

    def of(self, key: ReconcileKey) -> ReportedWorkers | None:
        """By router; none that has not said anything, or not for a while. None where that goes for all."""
        return _told(self._words.get(key, {})) or None

    async def run(self, deployments: Callable[[], Iterable[CustomObject]]) -> Never:
        """Ask the routers of all there are at the moment; until cancelled."""
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
    """Where it is asked."""
    host = router.status.pod_ip
    return f"[{host}]:{CONTROL}" if ":" in host else f"{host}:{CONTROL}"


def _is_ready(custom: CustomObject) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in conditions_of(custom))


def _told(words: Mapping[str, RouterAnswer]) -> ReportedWorkers:
    return {router: word.workers for router, word in words.items() if word.workers is not None}


def _names(words: Mapping[str, RouterAnswer]) -> dict[str, frozenset[str]]:
    return {router: frozenset(each.pod for each in workers) for router, workers in _told(words).items()}
