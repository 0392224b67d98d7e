"""Mixed cluster: each process runs this version of Fleet or the previous one, and clients use the cluster without a pause."""

import itertools
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fleet.client import Client, FleetError, Result
from fleet.core.requests import TOKEN_BYTES, Phase, Sampling, Source
from fleet.net.control.address import control_socket
from tests.support.fleet_processes import start_service, workers_seen
from tests.support.servers.processes import a_free_port
from tests.support.versions.previous_version import environment_of
from tests.support.waiting import eventually, thread_stacks
from workers.engines.simulated.answer_oracle import AnswerOracle
from workers.engines.simulated.model import SimulatedModel

BLOCK_TOKENS = 16
VOCABULARY = 400
PROMPT_TOKENS = 5 * BLOCK_TOKENS + 3  # long enough that a prefill worker is used
ANSWER_TOKENS = 24
STOP_SECONDS = 60.0
SECRET = "a secret that all routers of the cluster have"
ORACLE = AnswerOracle(
    SimulatedModel(
        seed=0, vocab_size=VOCABULARY, eos_token_ids=(2,), eos_probability=0.0, block_bytes=BLOCK_TOKENS * 64
    ),
    BLOCK_TOKENS,
)


class MixedCluster:
    """Runs a store node, two peer routers, and workers. The test names the source tree of each process."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.routers = {name: f"127.0.0.1:{a_free_port()}" for name in ("a", "b")}
        self._peers = {name: f"127.0.0.1:{a_free_port()}" for name in self.routers}
        self._running: dict[str, subprocess.Popen[Any]] = {}
        self._starts = itertools.count()
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)

    def start_store(self, tree: Path) -> None:
        self._start(
            tree, "kvstore", "store", {"store_id": "store", "listen": [self.store], "shm_socket": f"{self.folder}/shm"}
        )

    @property
    def store(self) -> str:
        return f"unix:{self.folder}/store.sock"

    def start_router(self, tree: Path, name: str) -> None:
        others = [address for each, address in self._peers.items() if each != name]
        settings = {
            "router_id": name,
            "grpc_listen": self.routers[name],
            "http_listen": f"127.0.0.1:{a_free_port()}",
            "models": {"tiny": str(self.model_dir)},
            "store": self.store,
            "remote_prefill_min_tokens": 2 * BLOCK_TOKENS,
            "max_reconnect_seconds": 0.2,
            "prompt_secret": SECRET,
            "replicas_listen": self._peers[name],
            "replicas": others,
            "replicas_credentials": {"secret_file": f"{self.folder}/secret"},
        }
        self._start(tree, "router", name, settings)

    def start_worker(self, tree: Path, name: str, role: str, registry: str = "a") -> None:
        settings = {
            "worker_id": name,
            "role": role,
            "engine": "simulated",
            "model": "tiny",
            "listen": f"unix:{self.folder}/{name}.sock",
            "registry": control_socket(self.routers[registry]),
            "store": self.store,
            "kv_paths": ["store"],
            "block_tokens": BLOCK_TOKENS,
            "load_interval_ms": 50,
            "simulated": {
                "eos_probability": 0.0,
                "vocab_size": VOCABULARY,
                "load_timeout_ms": 20_000,
                "publish_timeout_ms": 20_000,
            },
        }
        self._start(tree, "worker", name, settings)

    def stop(self, name: str) -> None:
        """Stop a process by SIGTERM, and wait until it has drained and ended."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) in (0, -signal.SIGTERM), self.log(name)

    def wait_for_workers(self, *names: str) -> None:
        """Wait until both routers know exactly these workers."""
        for address in self.routers.values():
            with Client(address) as client:
                eventually(
                    lambda client=client: _seen(client) == set(names), otherwise=lambda: f"{names}, not {_seen(client)}"
                )

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}-*.log")))

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(STOP_SECONDS)

    def _start(self, tree: Path, part: str, name: str, settings: dict[str, Any]) -> None:
        """Start a process. The caller must have stopped an earlier process of this name."""
        file = self.folder / f"{name}-{next(self._starts):02d}.json"
        where: dict[str, Any] = {"cwd": tree, "env": environment_of(tree)}
        with file.with_suffix(".log").open("w") as log:
            process, endpoints = start_service(part, settings, file, stdout=log, stderr=log, **where)
        self._running[name] = process
        assert endpoints, file.with_suffix(".log").read_text()
        assert f"PYTHONPATH={tree}\0" in Path(f"/proc/{process.pid}/environ").read_text()


def _seen(client: Client) -> set[str]:
    try:
        return workers_seen(client)
    except FleetError:  # the router does not answer yet, because it is starting
        return set()


class Clients:
    """Runs clients in threads. Each sends one request after another, and compares each answer with the exact tokens."""

    def __init__(self, routers: list[str], count: int = 3) -> None:
        self.errors: list[str] = []
        self.answered = 0
        self.handed_over = 0
        """Number of disaggregated answers whose blocks came through the store."""
        self._routers = routers
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(STOP_SECONDS)
            assert not thread.is_alive(), f"a client still waits after {STOP_SECONDS:g} s:\n{thread_stacks()}"

    def wait_for(self, more: int, counted: Callable[[], int], within_seconds: float = 60.0) -> None:
        """Wait until this many more answers were counted; fail at once if a request has failed."""
        target = counted() + more

        def there() -> bool:
            assert not self.errors, self.errors[0]
            return counted() >= target

        eventually(there, within_seconds, lambda: f"{counted()} of {target} answers; {self.answered} in all")

    def _run(self, number: int) -> None:
        first = number % len(self._routers)
        addresses = self._routers[first:] + self._routers[:first]
        sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        with Client(addresses, resume_seconds=60) as client:
            while not self._ended.is_set():
                with self._lock:
                    this = next(self._numbers)
                prompt = _prompt(this)
                expected = ORACLE.answer(b"".join(each.to_bytes(TOKEN_BYTES, "little") for each in prompt), sampling)
                try:
                    result = client.complete(
                        prompt,
                        max_tokens=ANSWER_TOKENS,
                        temperature=0,
                        ignore_eos=True,
                        session=f"s{number}",
                        timeout_seconds=60,
                    )
                except FleetError as error:
                    self.errors.append(f"request {this}: {type(error).__name__}: {error}")
                    return
                if result.token_ids != expected:
                    self.errors.append(f"request {this}: {result.token_ids} instead of {expected}")
                    return
                with self._lock:
                    self.answered += 1
                    self.handed_over += _through_store(result)


def _prompt(number: int) -> list[int]:
    """Return a prompt whose first block differs from those of all other numbers, so that no cache has a block of it."""
    first, second = number % (VOCABULARY - 3), number // (VOCABULARY - 3)
    return [
        3 + first,
        3 + second,
        *(3 + (31 * number + 7 * index) % (VOCABULARY - 3) for index in range(PROMPT_TOKENS)),
    ]


def _through_store(result: Result) -> bool:
    return any(
        phase.phase is Phase.DECODE
        and any(origin.source is Source.STORE and origin.blocks for origin in phase.report.origins)
        for phase in result.kv
    )
