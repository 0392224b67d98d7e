"""Load test of the operator with many deployments: `python -m loadtests.kube.operator_scale --deployments 200`.

The API server for tests runs in its own process with nodes that run pods (`tests/support/kube`); the operator runs in this one. Each deployment
has four roles of one replica: two pairs of prefill and decode. The test measures the time until all deployments are Ready, the
operator's CPU and memory, and its writes of child objects, status and events. Then it measures a change of all deployments, and a
scale change of one child object on the idle operator.

The memory is the peak of this process, minus the memory of the modules that an operator does not load (the clients and the API server of
the tests). The records of requests are counted in another process, so that they do not add to this peak.

The API server is written in Python, too, and takes most of the time. So the report has the CPU times of the API server and of the
operator. For a scale change, it has the CPU time of the operator until the operator has nothing left to do; this figure depends less on
the load of the machine than the elapsed time. With `--before DIR`, another checkout of Fleet and this checkout are measured in turn,
`--rounds` times, and the medians of both are printed.
"""

import argparse
import asyncio
import collections
import concurrent.futures
import json
import multiprocessing
import multiprocessing.connection
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from fleet.core.system_clock import SystemClock, utc_now
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.client import open_api_client
from fleet.net.kubernetes.leader import LeaseLeader, LeaseSettings
from fleet.net.kubernetes.views import CustomObject
from loadtests.kube.memory import highest_mib
from operators.controller.control_secrets import ControlSecrets
from operators.observed.observe import conditions_of
from operators.probes.evidence import Probe, ProbeCompletion
from operators.server import Operator
from operators.settings import OperatorSettings
from operators.telemetry import OperatorMetrics
from tests.support.kube.api.running import RunningApiServer, an_api_server
from tests.support.kube.clients import Api
from tests.support.kube.nodes import Nodes
from tests.support.kube.operator import IMAGES, a_deployment, install

ROLES = tuple({"name": f"{kind}-{pair}", "type": kind} for pair in ("a", "b") for kind in ("prefill", "decode"))
ROOT = Path(__file__).parents[2]
SECONDS = 900
SCALINGS = 10
ANSWER_SECONDS = 0.05
ASK_CPU = "processor time"


class DelayedProbes:
    """Probe sender that sends nothing, and answers each probe after `ANSWER_SECONDS`, the time that a real answer takes."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, probe: Probe) -> ProbeCompletion:
        self.asked += 1
        await asyncio.sleep(ANSWER_SECONDS)
        return ProbeCompletion(handed=probe.pair)


def serve(pipe: multiprocessing.connection.Connection) -> None:
    nodes = Nodes()
    nodes.pause = 0.2
    with an_api_server(beside=nodes.run) as server:
        pipe.send(server.url)
        while pipe.recv() == ASK_CPU:
            pipe.send(cpu())


async def measure(
    server: RunningApiServer, server_cpu: Callable[[], float], count: int, folder: Path
) -> dict[str, Any]:
    lease = LeaseSettings(namespace="default")
    settings = OperatorSettings(images=IMAGES, identity="measured", lease=lease, namespaces=("default",))
    stop = asyncio.Event()
    async with open_api_client(str(server.kubeconfig(folder)), "fleet-operator/measured") as cluster:
        clock = SystemClock()
        leader = LeaseLeader(cluster, lease, "default", "measured", clock, utc_now)
        clients = DelayedProbes()
        secrets = ControlSecrets(cluster, "default", settings.control_secret, lease.owner)
        operator = Operator(
            settings,
            cluster,
            None,
            leader,
            clock,
            utc_now,
            OperatorMetrics(CollectorRegistry()),
            clients,
            secrets=secrets,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(operator.run(stop))
            found: dict[str, Any] = {"deployments": count, "roles": len(ROLES)}
            for name, spec in (("made", {}), ("changed", {"routing": {"policy": "round_robin"}})):
                clients.asked, before = 0, server_cpu()
                found[name] = await change(server, operator, count, spec)
                found[name] |= {"probes": clients.asked, "server_cpu_seconds": round(server_cpu() - before, 1)}
            scaled = [await scale(server, operator, at) for at in range(min(count, SCALINGS))]
            found["scale_change_ms"] = round(1000 * statistics.median(seconds for seconds, _ in scaled))
            found["scale_change_operator_cpu_ms"] = round(1000 * statistics.median(used for _, used in scaled), 1)
            found["memory_mib"] = highest_mib() - await asyncio.to_thread(modules_mib)
            stop.set()
    return found


def modules_mib() -> int:
    """Return the MiB of memory of the modules that this load test loads and an operator does not."""
    sizes = []
    for module in ("operators.process", __spec__.name):
        script = f"import {module}; from loadtests.kube.memory import highest_mib; print(highest_mib())"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        sizes.append(int(done.stdout))
    return sizes[1] - sizes[0]


def counted(url: str) -> tuple[collections.Counter[str], ...]:
    """Return three counts of the operator's writes: by kind of write, by child object, and by deployment for status writes."""
    requests = RunningApiServer(url).requests()
    writes = collections.Counter(
        "status"
        if "/status" in each["resource"]
        else each["resource"]
        if each["resource"] in ("events", "leases")
        else "children"
        for each in requests
        if each["agent"].startswith("fleet-operator") and each["verb"] in ("create", "update", "patch", "delete")
    )
    per_child = collections.Counter(
        str((each["resource"], each["name"]))
        for each in requests
        if each["agent"].startswith("fleet-operator") and each["verb"] == "patch" and "/status" not in each["resource"]
    )
    per_status = collections.Counter(
        each["name"] for each in requests if each["resource"] == "disaggdeployments/status"
    )
    return writes, per_child, per_status


async def change(server: RunningApiServer, operator: Operator, count: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Apply a specification to all deployments, and wait until all are Ready."""
    server.forget_requests()
    before, began = cpu(), time.monotonic()
    generations = await asyncio.to_thread(apply, server, count, spec)
    async with asyncio.timeout(SECONDS):
        while not all(ready(operator, name, generation) for name, generation in generations.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    seconds = time.monotonic() - began
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as counter:
        writes, per_child, per_status = await asyncio.get_running_loop().run_in_executor(counter, counted, server.url)
    return {
        "seconds": round(seconds, 1),
        "operator_cpu_seconds": round(cpu() - before, 1),
        "writes": dict(writes),
        "most_writes_of_a_child": max(per_child.values()),
        "most_writes_of_a_status": max(per_status.values()),
    }


def apply(server: RunningApiServer, count: int, spec: dict[str, Any]) -> dict[str, int]:
    """Apply a specification to all deployments, and return their new generations by name."""
    generations = {}
    with Api(server.url) as api:
        for at in range(count):
            manifest = a_deployment(*ROLES, name=f"dd{at}", **spec)
            path = f"/apis/fleet-serving.io/v1alpha1/namespaces/default/disaggdeployments/dd{at}"
            answer = api.apply(path, manifest, "somebody", force="true")
            generations[f"dd{at}"] = answer.body["metadata"]["generation"]
    return generations


async def scale(server: RunningApiServer, operator: Operator, at: int) -> tuple[float, float]:
    """Change a role's replicas; return the seconds until its child object changes, and the operator's CPU time until it is at rest."""
    roles = (*ROLES[:-1], ROLES[-1] | {"replicas": 2})

    def change_and_wait() -> float:
        with Api(server.url) as api:
            path = f"/apis/fleet-serving.io/v1alpha1/namespaces/default/disaggdeployments/dd{at}"
            deployments = "/apis/apps/v1/namespaces/default/deployments"
            [name] = [
                each["metadata"]["name"]
                for each in api.get(deployments, labelSelector=f"app.kubernetes.io/instance=dd{at}").body["items"]
                if each["metadata"]["labels"]["fleet-serving.io/role"] == "decode-b"
            ]
            began = time.monotonic()
            api.apply(
                path, a_deployment(*roles, name=f"dd{at}", routing={"policy": "round_robin"}), "somebody", force="true"
            )
            while api.get(f"{deployments}/{name}").body["spec"]["replicas"] != 2:
                assert time.monotonic() < began + 60
            return time.monotonic() - began

    # While the change runs in another thread, this thread runs only the operator, so its CPU time is that of the operator.
    used = time.thread_time()
    seconds = await asyncio.to_thread(change_and_wait)
    async with asyncio.timeout(SECONDS):
        while operator.waiting():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return seconds, time.thread_time() - used


def ready(operator: Operator, name: str, generation: int) -> bool:
    custom = operator.store.of(kinds.DISAGG_DEPLOYMENT, CustomObject).get("default", name)
    return custom is not None and any(
        each.type == "Ready" and each.status == "True" and each.observed_generation == generation
        for each in conditions_of(custom)
    )


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(before: Path, deployments: int, rounds: int) -> dict[str, Any]:
    """Measure two checkouts in turn, each time in a new process, and return the medians and all values of each figure."""
    command = [sys.executable, "-m", "loadtests.kube.operator_scale", "--deployments", str(deployments)]
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
    for _ in range(rounds):
        for name, folder in (("before", before), ("now", ROOT)):
            # `python -m` puts the current folder first in the module path, so the checkout in `folder` is measured.
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
            runs[name].append(flat(json.loads(done.stdout)))
    return {
        figure: {
            name: {"median": statistics.median(values), "values": values}
            for name, found in runs.items()
            if (values := [each[figure] for each in found if figure in each])
        }
        for figure in runs["now"][0]
    }


def flat(found: dict[str, Any], path: str = "") -> dict[str, float]:
    """Return nested figures as one dict, whose keys are paths such as `made.seconds`."""
    figures: dict[str, float] = {}
    for name, value in found.items():
        figures |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return figures


def exceeded(found: dict[str, Any], most_mib: int, most_seconds: float, most_scale_ms: int) -> Iterator[str]:
    """Yield a text for each limit that the figures exceed; 0 means no limit.

    If any limit is set, there are fixed limits for the writes of one child object and of one status, too.
    """
    if not (most_mib or most_seconds or most_scale_ms):
        return
    if most_mib and found["memory_mib"] > most_mib:
        yield f"the operator needs {found['memory_mib']} MiB, of {most_mib}"
    if most_seconds and (seconds := found["made"]["seconds"]) > most_seconds:
        yield f"all deployments are Ready after {seconds:g} s, of {most_seconds:g}"
    if most_scale_ms and (milliseconds := found["scale_change_ms"]) > most_scale_ms:
        yield f"a scale change reaches its object after {milliseconds} ms, of {most_scale_ms}"
    for name in ("made", "changed"):
        for what, most in (("child", 1), ("status", 2)):
            if (writes := found[name][f"most_writes_of_a_{what}"]) > most:
                yield f"{name}: {writes} writes of a {what}, of {most}"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--deployments", type=int, default=200)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each with --before (%(default)s)")
    parser.add_argument(
        "--most-mib",
        type=int,
        default=0,
        help="fail above this memory, or with more writes than allowed; 0: no limit",
    )
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=0,
        help="fail if all deployments are Ready later, or with more writes than allowed; 0: no limit",
    )
    parser.add_argument(
        "--most-scale-ms",
        type=int,
        default=0,
        help="fail if a scale change reaches its object later, or with more writes than allowed; 0: no limit",
    )
    arguments = parser.parse_args()
    if arguments.before:
        print(json.dumps(compare(arguments.before.resolve(), arguments.deployments, arguments.rounds), indent=2))
        return
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()

    def server_cpu() -> float:
        ours.send(ASK_CPU)
        seconds: float = ours.recv()
        return seconds

    try:
        server = RunningApiServer(ours.recv())
        install(server)
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(server, server_cpu, arguments.deployments, Path(folder)))
        print(json.dumps(found, indent=2))
        if broken := list(exceeded(found, arguments.most_mib, arguments.most_seconds, arguments.most_scale_ms)):
            sys.exit("\n".join(broken))
    finally:
        ours.send("end")
        process.join(30)


if __name__ == "__main__":
    main()
