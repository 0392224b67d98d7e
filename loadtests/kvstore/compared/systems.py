"""Compared systems as contestants: for each line of the benchmark, functions that ask the systems for a figure in the line's unit."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from loadtests.environments import SystemDistribution, python_of
from loadtests.kvstore.compared.process import ComparedSystemProcess
from loadtests.kvstore.comparison import Contestant

LMCACHE = "LMCache"
MOONCAKE = "Mooncake"
HERE = Path(__file__).parent
GIGABYTE = 1e9
MICROSECONDS = 1e6
MILLISECONDS = 1e3

LMCACHE_PACKAGES = SystemDistribution(
    name=LMCACHE,
    version="0.5.6",
    steps=(
        # If pip does not find the CPU build, the CUDA build is installed, which also works.
        (("torch==2.13.0+cpu",), ("torch==2.13.0",)),
        (("--no-deps", "lmcache==0.5.6"),),
        (
            (
                "numpy==2.2.6",
                "numba==0.68.1",
                "aiohttp==3.14.5",
                "aiofile==3.12.3",
                "aiofiles==25.1.0",
                "blake3==1.0.11",
                "cachetools==8.0.1",
                "cryptography==50.0.2",
                "msgspec==0.22.0",
                "opentelemetry-api==1.40.0",
                "opentelemetry-sdk==1.40.0",
                "opentelemetry-exporter-otlp==1.40.0",
                "opentelemetry-exporter-prometheus==0.61b0",
                "prometheus_client==0.24.1",
                "psutil==7.2.2",
                "py-cpuinfo==9.0.0",
                "pyyaml==6.0.3",
                "pyzmq==27.3.0",
                "safetensors==0.8.0",
                "sortedcontainers==2.4.0",
            ),
        ),
    ),
)

MOONCAKE_PACKAGES = SystemDistribution(
    name=MOONCAKE,
    version="0.3.13.post1",
    steps=((("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.2.6"),),),
    system="apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4",
)


class ComparedSystems:
    """The compared systems of one benchmark run. Each method returns a contestant for each system, by name."""

    def __init__(self, cache: Path, folder: Path, *, wanted: bool):
        """Begin without processes; a system starts at its first question.

        Args:
            cache: Cache folder for the environments of the systems.
            folder: Folder of this run for the logs and files of the systems.
            wanted: False leaves every line without compared systems.
        """
        self._folder = folder
        self._processes = {
            name: ComparedSystemProcess(
                name, partial(python_of, distribution, cache), HERE / script, folder / f"{name}.log"
            )
            for name, distribution, script in (
                (LMCACHE, LMCACHE_PACKAGES, "lmcache_process.py"),
                (MOONCAKE, MOONCAKE_PACKAGES, "mooncake_process.py"),
            )
            if wanted
        }

    @property
    def versions(self) -> dict[str, str]:
        known = {LMCACHE: LMCACHE_PACKAGES.version, MOONCAKE: MOONCAKE_PACKAGES.version}
        return {name: known[name] for name in self._processes}

    def put(self, block_bytes: int, blocks: int, *, fresh: bool) -> dict[str, Contestant]:
        """Return contestants that write to memory, in GB/s; if `fresh`, the memory was never written to before."""
        return self._speed("put", "seconds", block_bytes, blocks, {"fresh": fresh})

    def get(self, block_bytes: int, blocks: int, *, fresh: bool) -> dict[str, Contestant]:
        """Return contestants that read from memory, in GB/s; if `fresh`, the destination was never written to before."""
        return self._speed("get", "seconds", block_bytes, blocks, {"fresh": fresh})

    def disk_write(self, block_bytes: int, blocks: int, threads: int) -> dict[str, Contestant]:
        """Return contestants that write to disk, in GB/s."""
        return self._speed("disk", "write_seconds", block_bytes, blocks, self._disk(threads))

    def disk_read(self, block_bytes: int, blocks: int, threads: int) -> dict[str, Contestant]:
        """Return contestants that read from disk, in GB/s."""
        return self._speed("disk", "read_seconds", block_bytes, blocks, self._disk(threads))

    def lookup(self, keys: int) -> dict[str, Contestant]:
        """Return contestants that look up keys, in microseconds."""
        return self._figures("lookup", "seconds", MICROSECONDS, {"keys": keys})

    def hashing(self, tokens: int, block_tokens: int) -> dict[str, Contestant]:
        """Return contestants that hash a prompt, in milliseconds."""
        return self._figures("hashing", "seconds", MILLISECONDS, {"tokens": tokens, "block_tokens": block_tokens})

    def restart(self, block_bytes: int, threads: int) -> dict[str, Contestant]:
        """Return contestants that restart, in milliseconds."""
        return self._figures("restart", "seconds", MILLISECONDS, {"block_bytes": block_bytes, **self._disk(threads)})

    def memory(self, keys: int) -> dict[str, Contestant]:
        """Return contestants that measure bytes per key, which equal megabytes per million keys."""
        return self._figures("memory", "bytes", 1, {"keys": keys})

    def close(self) -> None:
        for process in self._processes.values():
            process.end()

    def _disk(self, threads: int) -> dict[str, int | str]:
        return {"folder": str(self._folder / "peer-disk"), "threads": threads}

    def _speed(
        self, do: str, field: str, block_bytes: int, blocks: int, more: Mapping[str, int | str]
    ) -> dict[str, Contestant]:
        def speed(process: ComparedSystemProcess) -> float:
            answer = process.ask(do, block_bytes=block_bytes, blocks=blocks, **more)
            return block_bytes * blocks / GIGABYTE / float(answer[field])

        return {name: partial(speed, process) for name, process in self._processes.items()}

    def _figures(self, do: str, field: str, unit: float, arguments: Mapping[str, int | str]) -> dict[str, Contestant]:
        def figure(process: ComparedSystemProcess) -> float:
            return unit * float(process.ask(do, **arguments)[field])

        return {name: partial(figure, process) for name, process in self._processes.items()}
