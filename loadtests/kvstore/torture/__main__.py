"""Supervisor of the torture test: starts all processes, kills (SIGKILL) and stops (SIGSTOP) some at random, and reports the findings.

The docstring of the package has the rules.
"""

import argparse
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loadtests.kvstore.nodes import ROOT, NodeFailed, StoreNode, environment, merged
from loadtests.kvstore.torture import leaks
from loadtests.kvstore.torture.client import TortureOrders
from loadtests.kvstore.torture.redis_server import RedisServer

CLIENTS = 4
CAPACITY_BYTES = 16 << 20
BLOCK_BYTES = (8192, 65536, 20008)  # two pages, many pages, and a size that is no multiple of a page
CHAINS = 40
CHAIN_BLOCKS = 24
LEASE_SECONDS = 2.0
RESERVATION_SECONDS = 1.0
# The tier is only twice as large as the pool, so that it is always full and removes segments all the time.
SSD_SIZES = {
    "capacity_bytes": 32 << 20,
    "segment_bytes": 2 << 20,
}
KILL_EVERY_SECONDS = 2.0  # mean time between two harms: a kill or a stop of one process
HARMS = (
    "kill a client",
    "kill a client",
    "kill a client",
    "kill the node",
    "kill the node",
    "stop a client",
    "stop the node",
)
LONG_STOP_SECONDS = 8.0  # longer than any deadline plus the watchdog's grace; no other harm happens during this stop
STOP_SECONDS = (LONG_STOP_SECONDS, 0.2, 3.0)  # durations of stops, used in turn
PATIENCE = 4  # a run lasts at most so many times `--seconds`; on busy machines, restarts of the node take long
END_SECONDS = 30.0  # time limit for clients to finish their calls
SETTLE_SECONDS = 8.0  # time limit for leases, reservations and stalled connections (5 s) to end
SHOWN = 10  # maximum number of findings of each kind that are shown
LOOK_SECONDS = 0.5  # seconds between two checks of disk and memory

NODE_SETTINGS: dict[str, Any] = {
    "capacity_bytes": CAPACITY_BYTES,
    "max_lease_seconds": LEASE_SECONDS,
    "max_hold_seconds": LEASE_SECONDS,
    "reservation_seconds": RESERVATION_SECONDS,
}

log = logging.getLogger("torture")


@dataclass
class TortureFindings:
    """Findings of a run. Several threads add to it: to lists by `append`, which is atomic, and to numbers under the lock."""

    operations: int = 0
    kills: int = 0
    wrong_bytes: int = 0
    leaks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # unexpected exceptions, as text
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def clean(self) -> bool:
        return not (self.wrong_bytes or self.leaks or self.hangs or self.errors)


class TortureClient:
    """Starts one client process, and collects its reports as findings."""

    def __init__(self, orders: TortureOrders, findings: TortureFindings, log_file: Path):
        self._findings = findings
        self._orders = orders
        with log_file.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "loadtests.kvstore.torture.client", msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=environment(),
                process_group=0,  # own group: the kernel may send SIGHUP to the whole process group of a stopped process
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self._gone()

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the end of the client, which was asked to end. If it does not end in time, note a hang and kill it."""
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._findings.hangs.append(f"client {self._orders.number} does not end")
            self.process.kill()
        self._gone()

    def _gone(self) -> None:
        self.process.wait(END_SECONDS)
        self._listener.join(END_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # otherwise the client was killed while it wrote the line
                self._note(json.loads(line))

    def _note(self, said: Mapping[str, Any]) -> None:
        findings = self._findings
        with findings.lock:
            findings.operations += said.get("operations", 0)
            findings.wrong_bytes += said.get("wrong_bytes", 0)
        if "wrong_bytes" in said:
            log.error("wrong bytes: client %d: %s", self._orders.number, said)
        if "late" in said:
            findings.hangs.append(f"client {self._orders.number}: {said['late']} runs for {said['seconds']} s")
        if "error" in said:
            findings.errors.append(f"client {self._orders.number}: {said['error']}")
        if said.get("files_at_last", 0) > said.get("files_at_first", 0):
            findings.leaks.append(
                f"client {self._orders.number} has {said['files_at_last']} open files, {said['files_at_first']} at first"
            )


class Torture:
    """Runs the torture test once: starts the processes, harms them, and collects the findings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], rng: random.Random, redis: RedisServer | None):
        self.findings = TortureFindings()
        self._folder = folder
        self._rng = rng
        self._redis = redis
        self._seed = rng.getrandbits(32)
        self._numbers = iter(range(1 << 30))
        self._sockets = folder / "n"
        self._mailbox = folder / "mail"
        for each in (self._sockets, self._mailbox):
            each.mkdir()
        self._node = StoreNode(self._sockets, **settings)
        self._node_files = 0
        self._clients: list[TortureClient] = []
        # The next harms are drawn like cards from a shuffled deck, so that each kind gets its share even in a short run.
        self._deck: list[str] = []
        self._stops = {kind: itertools.cycle(STOP_SECONDS) for kind in ("stop a client", "stop the node")}
        self._named_memory: set[str] = set()
        # For each stopped process, the instant at which it continues, and its process id.
        self._stopped: list[tuple[float, int]] = []
        self._undisturbed_until = 0.0

    def run(self, seconds: float, clients: int, kill_every_seconds: float, least_kills: int) -> TortureFindings:
        """Kill and stop processes for `seconds`; then end all processes.

        With fewer than `least_kills` kills, continue until there are so many, or until `PATIENCE` times `seconds` have passed.
        """
        self._start_node()
        try:
            self._clients = [self._start_client() for _ in range(clients)]
            self._harm(seconds, kill_every_seconds, least_kills)
            self._end_clients()
            self.findings.leaks += leaks.in_node(self._node, self._node_files, SETTLE_SECONDS)
        finally:
            self._end_everybody()
        self.findings.leaks += leaks.after_the_node(self._sockets)
        self.findings.leaks += [f"/dev/shm/{name} was mapped" for name in sorted(self._named_memory)]
        self.findings.errors += _tracebacks(self._node.log())
        return self.findings

    def _harm(self, seconds: float, every_seconds: float, least_kills: int) -> None:
        started = next_look = time.monotonic()
        next_harm = started + every_seconds
        enough, too_long = started + seconds, started + PATIENCE * seconds
        while (now := time.monotonic()) < enough or (self.findings.kills < least_kills and now < too_long):
            self._let_go_on(now)
            self._replace_the_dead()
            if now >= next_harm and now >= self._undisturbed_until:
                next_harm = now + self._rng.uniform(0.2, 1.8) * every_seconds
                self._hurt_somebody(now)
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                self._look_around()
            time.sleep(0.02)
        self._let_go_on(float("inf"))

    def _hurt_somebody(self, now: float) -> None:
        if not self._deck:
            self._deck = [*HARMS, "kill redis"] if self._redis is not None else [*HARMS]
            self._rng.shuffle(self._deck)
        kind = self._deck.pop()
        log.info("%s", kind)
        match kind:
            case "kill a client":
                self._rng.choice(self._clients).kill()
                self.findings.kills += 1
            case "kill the node":
                self._node.kill()
                self.findings.kills += 1
                time.sleep(self._rng.uniform(0, 1))
                self._start_node()
            case "kill redis":
                assert self._redis is not None
                self._redis.kill()
                self.findings.kills += 1
                time.sleep(self._rng.uniform(0, 1))
                self._redis.start()
            case _:
                pid = self._node.pid if kind == "stop the node" else self._rng.choice(self._clients).process.pid
                os.kill(pid, signal.SIGSTOP)  # nobody has waited for this child, so its id is not reused
                pause = next(self._stops[kind])
                self._stopped.append((now + pause, pid))
                if pause == LONG_STOP_SECONDS:
                    self._undisturbed_until = now + pause

    def _let_go_on(self, now: float) -> None:
        for due, pid in list(self._stopped):
            if due <= now:
                self._stopped.remove((due, pid))
                if pid in self._pids():  # otherwise the process was killed while it was stopped
                    os.kill(pid, signal.SIGCONT)

    def _pids(self) -> set[int]:
        return {client.process.pid for client in self._clients if client.alive} | {self._node.pid}

    def _replace_the_dead(self) -> None:
        for index, client in enumerate(self._clients):
            if not client.alive:
                client.kill()  # the process has ended already; this reads its last reports
                self._clients[index] = self._start_client()
        if not self._node.alive:
            self.findings.errors.append(f"the node ended by itself:\n{self._node.log()[-2000:]}")
            self._start_node()

    def _start_client(self) -> TortureClient:
        settings = self._node.settings
        orders = TortureOrders(
            seed=self._seed,
            number=next(self._numbers),
            address=self._node.address,
            shm_socket=settings["shm_socket"],
            data_address=settings["data_listen"],
            mailbox=str(self._mailbox),
            block_bytes=BLOCK_BYTES,
            chains=CHAINS,
            chain_blocks=CHAIN_BLOCKS,
            longest_pause_seconds=1.5 * max(LEASE_SECONDS, RESERVATION_SECONDS),
        )
        return TortureClient(orders, self.findings, self._folder / "clients.log")

    def _start_node(self) -> None:
        self._node.start()
        self._node_files = self._node.open_files()

    def _look_around(self) -> None:
        self._named_memory |= leaks.named_memory(self._pids())
        for tier in self._node.settings.get("tiers", ()):
            if tier["kind"] == "ssd":
                self._look_at_the_disk(tier["directories"], tier["capacity_bytes"])

    def _look_at_the_disk(self, directories: Sequence[str], cap: int) -> None:
        occupied = sum(leaks.occupied_bytes(Path(directory)) for directory in directories)
        if occupied > cap:
            self.findings.leaks.append(f"the SSD tier occupies {occupied} bytes, its cap is {cap}")

    def _end_clients(self) -> None:
        for client in self._clients:
            client.ask_to_end()
        deadline = time.monotonic() + END_SECONDS
        for client in self._clients:
            client.wait(max(0.0, deadline - time.monotonic()))

    def _end_everybody(self) -> None:
        for client in self._clients:
            if client.alive:
                client.kill()
        try:
            self._node.stop()
        except NodeFailed as error:
            self.findings.hangs.append(str(error))


def _tracebacks(text: str) -> list[str]:
    """Return the tracebacks in a log; of tracebacks with an equal last line, only the first."""
    found: dict[str, str] = {}
    for each in text.split("Traceback (most recent call last):\n")[1:]:
        lines = each.splitlines()
        last = next((index for index, line in enumerate(lines) if not line.startswith(" ")), len(lines))
        found.setdefault(lines[last] if last < len(lines) else "", "\n".join(lines[: last + 1]))
    return [f"in the node's log: {each}" for each in found.values()]


def _settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    content = path.read_bytes()
    found: dict[str, Any] = tomllib.loads(content.decode()) if path.suffix == ".toml" else json.loads(content)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of harm; start and end come on top")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--seed", type=int, help="of a run to repeat; a random one by default")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--kill-every", type=float, default=KILL_EVERY_SECONDS, metavar="SECONDS", help="on average")
    parser.add_argument(
        "--kills", type=int, default=0, metavar="N", help=f"go on until N are killed, {PATIENCE} times as long at most"
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="TOML or JSON, laid over the node's settings")
    parser.add_argument("--ssd", action="store_true", help="with an SSD tier, in a folder of its own")
    parser.add_argument("--redis", action="store_true", help="with a Redis server, which is killed as well")
    parser.add_argument("--folder", type=Path, help="for everything that is written; a temporary one by default")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING if arguments.json else logging.INFO, format="%(message)s"
    )
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=arguments.folder or "/tmp") as name:
        folder = Path(name)
        settings = merged(NODE_SETTINGS, _settings(arguments.settings))
        tiers: list[dict[str, Any]] = []
        if arguments.ssd:
            tiers.append({"kind": "ssd", "keep": "all", "directories": [str(folder / "ssd")], **SSD_SIZES})
        redis = None
        if arguments.redis:
            redis = RedisServer(folder)
            redis.start()
            tiers.append({"kind": "redis", "keep": "all", "url": redis.url})
        if tiers:
            settings = merged({"tiers": tiers}, settings)
        try:
            torture = Torture(folder, settings, random.Random(seed), redis)
            findings = torture.run(arguments.seconds, arguments.clients, arguments.kill_every, arguments.kills)
        finally:
            if redis is not None:
                redis.stop()
    findings.leaks += leaks.children()
    _show(findings, seed, as_json=arguments.json)
    return 0 if findings.clean else 1


def _show(findings: TortureFindings, seed: int, *, as_json: bool) -> None:
    for kind in ("leaks", "hangs", "errors"):
        for text in getattr(findings, kind)[:SHOWN]:
            print(f"{kind}: {text}", file=sys.stderr)
    result = {
        "operations": findings.operations,
        "kills": findings.kills,
        "wrong_bytes": findings.wrong_bytes,
        "leaks": len(findings.leaks),
        "hangs": len(findings.hangs),
        "errors": len(findings.errors),
        "seed": seed,
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(", ".join(f"{value} {key.replace('_', ' ')}" for key, value in result.items()))


if __name__ == "__main__":
    sys.exit(main())
