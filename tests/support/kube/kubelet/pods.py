"""Kubelet: runs the pods that are bound to its node as real processes, and writes their status.

Rules:

1. A container's command runs on this machine as it is written; `fleet` is the command of this checkout. Images have no
effect. All processes run as the user of the tests. Resource requests and limits do not restrict a process.
2. When a pod has to end, its `preStop` hook runs, then its processes get SIGTERM, and SIGKILL when the grace period is
   over. After that, the object of the pod is removed.
3. A container that has ended is started again after a pause, if its pod's restart policy is `Always`.
"""

import asyncio
import base64
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kube.kubelet.network import Network
from tests.support.kube.kubelet.objects import Object, Objects, ends
from tests.support.kube.kubelet.probes import succeeds
from tests.support.kube.kubelet.sandbox import REPOSITORY, Sandbox
from tests.support.waiting import pace

FLEET = (sys.executable, "-m", "fleet.cli.main")
RESTART_SECONDS = 0.5
LONGEST_PERIOD_SECONDS = 0.5
"""Maximum period of a probe in seconds. A probe with a longer `periodSeconds` runs with this period, to make tests faster."""

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
API_PORT = 6443


class Kubelet:
    """Runs the pods of one node; the caller calls `settle` after every change."""

    def __init__(
        self,
        objects: Objects,
        network: Network,
        folder: Path,
        node: str,
        api: tuple[str, int],
        authority: str | None,
        claims: Mapping[str, Path],
    ) -> None:
        self.objects = objects
        self.network = network
        self.folder = folder
        self.node = node
        self.api = api
        self.authority = authority
        self.claims = claims
        self.hosts = folder / "hosts"
        self.nameservers = folder / "resolv.conf"
        self.nameservers.write_text("")  # there is no name server, so lookups fail at once
        self._pods: dict[str, _Pod] = {}  # by uid

    def settle(self, tasks: asyncio.TaskGroup) -> None:
        """Start new pods, and stop pods that are being deleted or no longer exist."""
        for pod in self.objects.all("pods"):
            uid = pod["metadata"]["uid"]
            if pod["spec"].get("nodeName") == self.node and uid not in self._pods:
                running = self._pods[uid] = _Pod(self, pod)
                running.task = tasks.create_task(running.run())
            if ends(pod) and uid in self._pods:
                self._pods[uid].ending.set()
        for pod in self._pods.values():
            pod.renew_secrets()
        there = {pod["metadata"]["uid"] for pod in self.objects.all("pods")}
        for uid, pod in list(self._pods.items()):
            if uid not in there:
                pod.ending.set()
                if pod.task is not None and pod.task.done():
                    del self._pods[uid]

    def processes(self, name: str = "") -> list[int]:
        """Return the ids of the container processes of one pod; without a name, those of all pods."""
        return [pid for pod in self._pods.values() if name in {"", pod.name[1]} for pid in pod.processes()]

    def write_hosts(self) -> None:
        """Write the hosts file, which replaces DNS: it has the names of Services and of the pods of headless Services.

        The file is changed in place and not replaced, because pods have it mounted.
        """
        lines = ["127.0.0.1 localhost"]
        for service in self.objects.all("services"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            address = service["spec"].get("clusterIP")
            if address and address != "None":
                lines.append(f"{address} {_names(name, namespace)}")
        for each in self.objects.all("endpointslices"):
            name, namespace = each["metadata"]["labels"]["kubernetes.io/service-name"], each["metadata"]["namespace"]
            service = self.objects.get("services", namespace, name)
            if service is None or service["spec"].get("clusterIP") != "None":
                continue
            for endpoint in each.get("endpoints") or ():
                address, host = endpoint["addresses"][0], endpoint.get("hostname")
                if (endpoint.get("conditions") or {}).get("ready"):
                    lines.append(f"{address} {_names(name, namespace)}")
                if host:
                    lines.append(f"{address} {_names(f'{host}.{name}', namespace)}")
        text = "\n".join(lines) + "\n"
        if not self.hosts.exists() or self.hosts.read_text() != text:
            self.hosts.write_text(text)


def _names(name: str, namespace: str) -> str:
    return f"{name}.{namespace}.svc.cluster.local {name}.{namespace}.svc {name}.{namespace} {name}"


class _Pod:
    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self._kubelet = kubelet
        self._pod = pod
        self.ending = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._containers: list[_Container] = []

    @property
    def name(self) -> tuple[str, str]:
        return self._pod["metadata"]["namespace"], self._pod["metadata"]["name"]

    def processes(self) -> list[int]:
        return [
            each.process.pid
            for each in self._containers
            if each.process is not None and each.process.returncode is None
        ]

    def renew_secrets(self) -> None:
        """Replace the files of changed Secrets in the volumes atomically; a real kubelet does so after a while."""
        folder = self._kubelet.folder / "pods" / self._pod["metadata"]["uid"] / "volumes"
        for volume in self._pod["spec"].get("volumes") or ():
            if "secret" not in volume or not (folder / volume["name"]).exists():
                continue
            found = self._kubelet.objects.get("secrets", self.name[0], volume["secret"]["secretName"]) or {}
            for key, text in (found.get("data") or {}).items():
                file, content = folder / volume["name"] / key, base64.b64decode(text)
                if not file.exists() or file.read_bytes() != content:
                    fresh = file.with_name(f"..{key}")
                    fresh.write_bytes(content)
                    fresh.replace(file)

    async def run(self) -> None:
        kubelet, spec = self._kubelet, self._pod["spec"]
        folder = kubelet.folder / "pods" / self._pod["metadata"]["uid"]
        sandbox, api = None, None
        try:
            mounts = await self._until_there()
            if mounts is not None:
                sandbox = await Sandbox.open(folder / "sandbox", kubelet.network, mounts)
                api, _ = await kubelet.network.lead(kubelet.api, pid=sandbox.pid, port=API_PORT)
                await self._live(sandbox, spec)
        finally:
            for container in self._containers:
                await container.end()
            if api is not None:
                await api.close()
            if sandbox is not None:
                await sandbox.close()
        if self.ending.is_set():
            await kubelet.objects.delete("pods", self._pod, at_once=True)

    async def _live(self, sandbox: Sandbox, spec: Object) -> None:
        restarts = spec.get("restartPolicy", "Always") == "Always"
        logs = self._kubelet.folder / "logs"
        logs.mkdir(exist_ok=True)
        self._address = sandbox.address
        for each in spec.get("initContainers") or ():
            first = _Container(self, sandbox, each, logs, restarts=False)
            self._containers = [first]
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(first.run())
                await self._or_ending(running)
                running.cancel()
            if self.ending.is_set() or first.status != 0:
                return
        self._containers = [_Container(self, sandbox, each, logs, restarts=restarts) for each in spec["containers"]]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each.run()) for each in self._containers]
            await self.report()
            await self._or_ending(*running)
            if self.ending.is_set():
                await self.report()
                grace = self._pod["spec"].get("terminationGracePeriodSeconds", 30)
                async with asyncio.TaskGroup() as stopping:
                    for each in self._containers:
                        stopping.create_task(each.stop(grace))
            for each in running:
                each.cancel()
        if not self.ending.is_set():  # all containers have already ended
            await self.report()
            await self.ending.wait()

    async def _or_ending(self, *running: asyncio.Task[None]) -> None:
        """Wait until all these tasks have ended, or until the pod has to end."""
        waiting = set(running)
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(self.ending.wait())
            while waiting and not ending.done():
                done, _ = await asyncio.wait({ending, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
            ending.cancel()

    async def report(self) -> None:
        """Write the pod's status, if it has changed."""
        ready = all(each.ready for each in self._containers) and not self.ending.is_set()
        ended = [each.status for each in self._containers]
        phase = "Running" if None in ended else "Failed" if any(ended) else "Succeeded"
        status = {
            "phase": phase,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "hostIP": "10.244.0.1",
            "containerStatuses": [each.told() for each in self._containers],
            "conditions": [
                {"type": kind, "status": "True" if so else "False"}
                for kind, so in (
                    ("PodScheduled", True),
                    ("Initialized", True),
                    ("ContainersReady", ready),
                    ("Ready", ready),
                )
            ],
        }
        before = self._kubelet.objects.get("pods", *self.name)
        if before is None or {**before.get("status", {}), **status} == before.get("status"):
            return
        await self._kubelet.objects.patch_status("pods", self._pod, status)

    async def _until_there(self) -> dict[str, Path] | None:
        """Wait until all volumes of the pod have their sources.

        Return the path of each source by its path in the pod; None if the pod has to end before.
        """
        while not self.ending.is_set():
            if (mounts := self._mounts()) is not None:
                return mounts
            await pace(0.02, "the period in which a kubelet looks for the sources of volumes")
        return None

    def _mounts(self) -> dict[str, Path] | None:
        spec = self._pod["spec"]
        sources: dict[str, Path] = {}
        folder = self._kubelet.folder / "pods" / self._pod["metadata"]["uid"] / "volumes"
        for volume in spec.get("volumes") or ():
            source = folder / volume["name"]
            source.mkdir(parents=True, exist_ok=True)
            match volume:
                case {"configMap": {"name": name} as asked}:
                    found = self._kubelet.objects.get("configmaps", self.name[0], name)
                    if found is None and not asked.get("optional"):
                        return None
                    for key, text in ((found or {}).get("data") or {}).items():
                        (source / key).write_text(text)
                case {"secret": {"secretName": name} as asked}:
                    found = self._kubelet.objects.get("secrets", self.name[0], name)
                    if found is None and not asked.get("optional"):
                        return None
                    for key, text in ((found or {}).get("data") or {}).items():
                        (source / key).write_bytes(base64.b64decode(text))
                case {"persistentVolumeClaim": {"claimName": name}}:
                    if name not in self._kubelet.claims:
                        return None
                    source = self._kubelet.claims[name]
            sources[volume["name"]] = source
        mounts = {
            each["mountPath"]: sources[each["name"]] / each.get("subPath", "")
            for container in (*(spec.get("initContainers") or ()), *spec["containers"])
            for each in container.get("volumeMounts") or ()
        }
        mounts["/etc/hosts"] = self._kubelet.hosts
        mounts["/etc/resolv.conf"] = self._kubelet.nameservers
        if spec.get("automountServiceAccountToken", True):
            mounts[SERVICE_ACCOUNT] = self._service_account(folder)
        for kept in {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}:
            if not kept.is_relative_to("/usr"):
                mounts.setdefault(str(kept), kept)
        return mounts

    def _service_account(self, folder: Path) -> Path:
        account = folder / "service-account"
        account.mkdir(parents=True, exist_ok=True)
        namespace, spec = self.name[0], self._pod["spec"]
        (account / "namespace").write_text(namespace)
        (account / "token").write_text(
            f"system:serviceaccount:{namespace}:{spec.get('serviceAccountName') or 'default'}"
        )
        (account / "ca.crt").write_text(Path(self._kubelet.authority).read_text() if self._kubelet.authority else "-")
        return account

    def field(self, path: str) -> str:
        """Return the value of a field of the downward API, such as `status.podIP`."""
        metadata = self._pod["metadata"]
        if quoted := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
            return metadata.get(quoted[1], {}).get(quoted[2], "")
        return {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": self._kubelet.node,
            "spec.serviceAccountName": self._pod["spec"].get("serviceAccountName", "default"),
            "status.podIP": self._address,
            "status.hostIP": "10.244.0.1",
        }[path]

    def value(self, variable: Object) -> str:
        match variable:
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                return self.field(path)
            case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                secret = self._kubelet.objects.get("secrets", self.name[0], name) or {}
                return base64.b64decode(secret.get("data", {}).get(key, "")).decode()
            case {"valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}:
                return ((self._kubelet.objects.get("configmaps", self.name[0], name) or {}).get("data") or {}).get(
                    key, ""
                )
            case _:
                return variable.get("value", "")

    @property
    def network(self) -> Network:
        return self._kubelet.network


class _Container:
    def __init__(self, pod: _Pod, sandbox: Sandbox, spec: Object, logs: Path, *, restarts: bool) -> None:
        self._pod = pod
        self._sandbox = sandbox
        self._spec = spec
        self._log = logs / f"{pod.name[1]}.{spec['name']}.log"
        self._restarts = restarts
        self.process: asyncio.subprocess.Process | None = None
        self.ready = False
        self.status: int | None = None  # exit status of a container that has ended and is not started again
        self._count = 0
        self._stopping = False
        self._ports = {each["name"]: each["containerPort"] for each in spec.get("ports") or () if "name" in each}

    async def run(self) -> None:
        """Run the container until it has ended and is not started again."""
        while not self._stopping:
            self.process = await self._sandbox.start(self._command(), self._environment(), self._log)
            async with asyncio.TaskGroup() as tasks:
                probing = tasks.create_task(self._probe())
                code = await self.process.wait()
                probing.cancel()
            self.ready = False
            if self._stopping:
                return
            if not self._restarts:
                self.status = code
                return
            self._count += 1
            await self._pod.report()
            await pace(min(RESTART_SECONDS * 2 ** min(self._count - 1, 5), 10), "the back-off before a restart")

    async def stop(self, grace: float) -> None:
        """Run the `preStop` hook, then send SIGTERM. If the container has not ended after `grace` seconds, send SIGKILL."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(grace):
                await self._hook((self._spec.get("lifecycle") or {}).get("preStop") or {})
                self._signal(signal.SIGTERM)
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    async def _hook(self, hook: Object) -> None:
        match hook:
            case {"sleep": {"seconds": seconds}}:
                await pace(seconds, "the hook of the pod sleeps")
            case {"exec": {"command": command}}:
                await self._execute(command)

    def kill(self) -> None:
        self._stopping = True
        self._signal(signal.SIGKILL)

    async def end(self) -> None:
        self.kill()
        if self.process is not None:
            await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the first process of the container; SIGKILL goes to all of its processes."""
        if self.process is None or self.process.returncode is not None:
            return
        if number is signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def told(self) -> Object:
        state: Object = (
            {"running": {}}
            if self.status is None
            else {"terminated": {"exitCode": self.status, "reason": "Error" if self.status else "Completed"}}
        )
        return {
            "name": self._spec["name"],
            "image": self._spec.get("image", ""),
            "imageID": "",
            "ready": self.ready,
            "started": self.status is None,
            "restartCount": self._count,
            "state": state,
        }

    async def _probe(self) -> None:
        """Wait for the startup probe; then set `ready` by the readiness probe, and kill a container whose liveness probe fails often.

        The liveness probe runs only if the container has a startup probe, too.
        """
        if startup := self._spec.get("startupProbe"):
            while not await self._asked(startup):
                await pace(_period(startup) / 4, "the period of the probe, shortened")
        readiness, liveness = self._spec.get("readinessProbe"), self._spec.get("livenessProbe")
        failures = 0
        while True:
            ready = readiness is None or await self._asked(readiness)
            if ready is not self.ready:
                self.ready = ready
                await self._pod.report()
            if liveness is not None and self._spec.get("startupProbe") is not None:
                failures = 0 if await self._asked(liveness) else failures + 1
                if failures >= liveness.get("failureThreshold", 3):
                    self._signal(signal.SIGKILL)
                    return
            await pace(_period(readiness or liveness or {}) / (1 if self.ready else 4), "the period of the probe")

    async def _asked(self, probe: Object) -> bool:
        return await succeeds(probe, self._sandbox.address, self._ports, self._pod.network, self._execute)

    async def _execute(self, command: list[str]) -> int:
        process = await self._sandbox.start(_of_this_checkout(command), self._environment(), self._log)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _environment(self) -> dict[str, str]:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": "/tmp",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
        }
        for each in self._spec.get("env") or ():
            environment[each["name"]] = _expanded(self._pod.value(each), environment)
        return environment

    def _command(self) -> list[str]:
        given = [*(self._spec.get("command") or ["fleet"]), *(self._spec.get("args") or ())]
        environment = self._environment()
        return _of_this_checkout([_expanded(each, environment) for each in given])


def _of_this_checkout(command: list[str]) -> list[str]:
    return [*FLEET, *command[1:]] if command[0] == "fleet" else command


def _expanded(text: str, environment: Mapping[str, Any]) -> str:
    """Expand `$(NAME)` as Kubernetes does; unknown names stay as they are."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: str(environment.get(found[1], found[0])), text)


def _period(probe: Object) -> float:
    return min(probe.get("periodSeconds", 10), LONGEST_PERIOD_SECONDS)
