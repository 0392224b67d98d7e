"""Cluster of one node on this machine for tests: the API server for tests, and a kubelet that runs pods as processes."""

import asyncio
import contextlib
import os
import random
import signal
import ssl
import threading
from collections.abc import Coroutine, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.kube.api.running import RunningApiServer
from tests.support.kube.kubelet import controllers
from tests.support.kube.kubelet.network import Network
from tests.support.kube.kubelet.objects import Object, Objects, Refused
from tests.support.kube.kubelet.pods import Kubelet
from tests.support.waiting import pace, thread_stacks

NODE = "node-1"
START_SECONDS = 60
STOP_SECONDS = 60
CLOSE_SECONDS = 0.1  # time in which connections close
AGAIN_SECONDS = 0.05
GONE_OR_CHANGED = (404, 409)


class ToyCluster:
    """Runs a cluster of one node in a separate thread, so that tests may block."""

    def __init__(self, server: RunningApiServer, folder: Path, claims: Mapping[str, Path], gpus: int) -> None:
        self._server = server
        self._folder = folder
        self._claims = claims
        self._gpus = gpus
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="toy-cluster", daemon=True)
        self._turns: dict[tuple[str, int], count[int]] = {}

    def start(self) -> None:
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._failure is not None:
            raise self._failure
        assert self._started.is_set(), "the cluster did not start"

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process has already ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_SECONDS)
        assert not self._thread.is_alive(), f"the cluster does not stop:\n{thread_stacks()}"
        if self._failure is not None:
            raise self._failure

    def way_to(self, service: str, port: int, namespace: str = "default") -> str:
        """Return a host:port on this machine from which connections are forwarded to a port of a Service."""
        return self._ask(self._way_to(service, port, namespace))

    def processes(self) -> list[int]:
        """Return the process ids of all containers."""
        return self._ask(self._processes())

    def log(self, pod: str) -> str:
        return "\n".join(path.read_text() for path in sorted((self._folder / "logs").glob(f"{pod}*.log")))

    def kill_pod(self, name: str) -> None:
        """Kill the processes of a pod's containers, as if they had crashed; the kubelet then starts the containers again."""
        for pid in self._ask(self._processes(name)):
            os.kill(pid, signal.SIGKILL)

    def _ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_SECONDS)

    async def _way_to(self, service: str, port: int, namespace: str) -> str:
        found = self._objects.get("services", namespace, service)
        assert found is not None, f"there is no Service {namespace}/{service}"
        return (await self._network.lead((found["spec"]["clusterIP"], port)))[1]

    async def _processes(self, name: str = "") -> list[int]:
        return self._kubelet.processes(name)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
            self._loop.run_until_complete(pace(CLOSE_SECONDS, "aiohttp does not tell when connections are closed"))
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._failure = error
        finally:
            self._started.set()
            self._loop.close()

    async def _run(self) -> None:
        tls = ssl.create_default_context(cafile=self._server.authority) if self._server.authority else None
        host, _, port = self._server.url.rpartition("//")[2].rpartition(":")
        self._objects = Objects(self._server.url, tls)
        async with Network() as self._network, asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._objects.run())
            await self._objects.ready()
            node = _node(self._gpus)
            await self._objects.create("nodes", node)
            await self._objects.patch_status("nodes", node, node["status"])
            self._kubelet = Kubelet(
                self._objects,
                self._network,
                self._folder,
                NODE,
                (host, int(port)),
                self._server.authority,
                self._claims,
            )
            self._kubelet.write_hosts()
            self._started.set()
            running = tasks.create_task(self._run_pods())
            await self._stop.wait()
            running.cancel()
            await asyncio.wait({running})
            following.cancel()

    async def _run_pods(self) -> None:
        async with asyncio.TaskGroup() as pods:
            await self._settle(pods)

    async def _settle(self, pods: asyncio.TaskGroup) -> None:
        chance = random.Random(0)
        while True:
            self._objects.changed.clear()
            self._kubelet.write_hosts()
            try:
                await controllers.settle(self._objects, chance)
            except Refused as refused:
                if refused.code not in GONE_OR_CHANGED:
                    raise
                with contextlib.suppress(TimeoutError):  # wait until the watch reports the newer object
                    async with asyncio.timeout(AGAIN_SECONDS):
                        await self._objects.changed.wait()
                continue
            self._kubelet.settle(pods)
            await self._serve()
            await self._objects.changed.wait()

    async def _serve(self) -> None:
        """Run a proxy for every port of every Service with an address; end the proxies of ports that no longer exist."""
        wanted = {
            (service["spec"]["clusterIP"], port["port"]): (service, port.get("name", ""))
            for service in self._objects.all("services")
            if service["spec"].get("clusterIP") not in {None, "", "None"}
            for port in service["spec"].get("ports") or ()
        }
        for gone in self._network.served() - wanted.keys():
            await self._network.withdraw(*gone)
        for place, (service, name) in wanted.items():
            metadata = service["metadata"]
            await self._network.serve(
                *place,
                lambda place=place, metadata=metadata, name=name: self._choose(
                    place, metadata["namespace"], metadata["name"], name
                ),
            )

    def _choose(self, place: tuple[str, int], namespace: str, service: str, port: str) -> tuple[str, int] | None:
        """Return the address of a ready pod of a Service, each one in turn; None if no pod is ready."""
        ready = [
            (endpoint["addresses"][0], each["port"])
            for piece in self._objects.all("endpointslices")
            if piece["metadata"]["namespace"] == namespace
            and piece["metadata"].get("labels", {}).get("kubernetes.io/service-name") == service
            for each in piece.get("ports") or ()
            if each.get("name", "") == port
            for endpoint in piece.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready")
        ]
        return ready[next(self._turns.setdefault(place, count())) % len(ready)] if ready else None


@contextlib.contextmanager
def a_cluster(
    server: RunningApiServer, folder: Path, *, claims: Mapping[str, Path] | None = None, gpus: int = 0
) -> Iterator[ToyCluster]:
    """Run a cluster while the context is open.

    Args:
        server: An API server with its controllers, because objects without an owner have to be removed.
        folder: The folder for logs, volumes, and the files that pods write.
        claims: Folders of this machine that pods get as volumes, by the name of the PersistentVolumeClaim, which is
            the same in every namespace.
        gpus: The number of NVIDIA GPUs of the only node.
    """
    folder.mkdir(exist_ok=True)
    cluster = ToyCluster(server, folder, claims or {}, gpus)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def _node(gpus: int) -> Object:
    capacity = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]},
    }
