"""Client process of the torture test: its threads use the store as workers and broken workers do, and check every byte that they read.

The supervisor starts this process with `TortureOrders` as its argument. The process prints what it did and found, one JSON object per
line, and ends when its standard input ends.
"""

import gc
import json
import os
import random
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray
from kvstore.client.store_client import SLOWEST_BYTES_PER_SECOND, StoreClient
from kvstore.errors import StoreUnreachable
from kvstore.messages import Match
from kvstore.namespace import KvNamespace
from kvstore.v1 import blocks_pb2 as pb
from kvstore.v1 import blocks_pb2_grpc as pb_grpc
from loadtests.kvstore.torture.content import ExpectedContent, chain
from loadtests.kvstore.torture.watchdog import CallWatchdog

CALL_SECONDS = 0.5  # `call_timeout_seconds` of every store client
CONNECT_SECONDS = 2.0
REPORT_SECONDS = 0.1
HANDED_OVER = 16  # maximum number of matches in the mailbox for each namespace
VOID = 0xEE  # byte that fills the destinations before a read, so that bytes that were not copied are noticed


class TortureOrders(Struct, frozen=True, kw_only=True):
    """Orders of the supervisor to one client."""

    seed: int  # seed of the content, the same for all clients
    number: int  # number of this client, the seed of its decisions
    address: str  # address of the node's control plane
    shm_socket: str
    data_address: str
    mailbox: str  # folder in which clients leave matches for each other
    block_bytes: tuple[int, ...]  # block sizes; each has its own namespace
    chains: int
    chain_blocks: int
    longest_pause_seconds: float  # 1.5 times the longest lease, so that a lease may end during a pause
    threads: int = 2


def namespaces(block_bytes: Sequence[int]) -> list[KvNamespace]:
    """Return a namespace for each block size; blocks have the same names in all of them, but different bytes."""
    return [
        KvNamespace(
            model=f"torture-{index}",
            revision="r1",
            dtype="float32",
            block_tokens=32,
            layers=1,
            kv_heads=1,
            head_dim=8,
            block_bytes=size,
        )
        for index, size in enumerate(block_bytes)
    ]


class TortureReport:
    """Prints reports for the supervisor to standard output. All threads of the client may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations = 0
        self._reported_at = 0.0

    def operation(self) -> None:
        with self._lock:
            self._operations += 1
            if time.monotonic() - self._reported_at > REPORT_SECONDS:
                self._tell_operations()

    def tell(self, **found: Any) -> None:
        with self._lock:
            self._tell_operations()
            self._print(found)

    def _tell_operations(self) -> None:
        self._print({"operations": self._operations})
        self._operations = 0
        self._reported_at = time.monotonic()

    def _print(self, line: Mapping[str, Any]) -> None:
        print(json.dumps(line), flush=True)


class TortureNamespace:
    """One namespace, with the store client of one thread and the expected content of its blocks."""

    def __init__(self, orders: TortureOrders, namespace: KvNamespace, prefer: Sequence[str]):
        self.namespace = namespace
        self.content = ExpectedContent(namespace)
        self.address = orders.address
        self.prefer = prefer
        self.buffer: ByteArray = np.empty((orders.chain_blocks, namespace.block_bytes), dtype=np.uint8)
        self.client: StoreClient | None = None
        self.matches: deque[Match] = deque(maxlen=8)  # kept longer than their leases

    def transfer_seconds(self, blocks: int) -> float:
        """Return the longest time in seconds that moving this number of blocks may take."""
        return CALL_SECONDS + blocks * self.namespace.block_bytes / SLOWEST_BYTES_PER_SECOND


class TortureThread:
    """One thread of a client process, which performs random operations, each with the weight in `_operations`."""

    def __init__(
        self,
        orders: TortureOrders,
        number: int,
        report: TortureReport,
        watchdog: CallWatchdog,
        stopping: threading.Event,
    ):
        self._orders = orders
        self._rng = random.Random(f"{orders.seed}/{orders.number}/{number}")
        self._report = report
        self._watchdog = watchdog
        self._stopping = stopping
        prefer = [("shm", "tcp"), ("tcp",)][number % 2]
        self._places = [TortureNamespace(orders, namespace, prefer) for namespace in namespaces(orders.block_bytes)]
        self._channel = grpc.insecure_channel(orders.address)
        self._stub = pb_grpc.BlockStoreStub(self._channel)
        self._operations: dict[Callable[[TortureNamespace, StoreClient], None], int] = {
            self._write: 20,
            self._write_slowly: 3,
            self._read: 25,
            self._read_patiently: 10,
            self._read_slowly: 4,
            self._read_without_a_lease: 8,
            self._read_with_an_old_match: 8,
            self._hold: 3,
            self._forget: 4,
            self._hand_over: 3,
            self._take_over: 4,
            self._lie: 3,
            self._condemn_good_blocks: 3,
            self._abandon: 1,
            self._send_garbage: 2,
            self._look_at_stats: 2,
            self._reconnect: 1,
        }

    def run(self) -> None:
        kinds, weights = list(self._operations), list(self._operations.values())
        while not self._stopping.is_set():
            place = self._rng.choice(self._places)
            client = self._client(place)
            if client is None:
                self._stopping.wait(0.05)
                continue
            (operation,) = self._rng.choices(kinds, weights)
            operation(place, client)
            self._report.operation()
        for place in self._places:
            self._close(place)
        self._channel.close()

    # Behaviour of workers

    def _write(self, place: TortureNamespace, client: StoreClient) -> None:
        names = self._names()
        with self._call("write", 2 * CALL_SECONDS + place.transfer_seconds(len(names))):
            client.write(names, [place.content.of(name) for name in names])

    def _read(self, place: TortureNamespace, client: StoreClient) -> None:
        match = self._match(client, self._names(), self._rng.uniform(0.5, 2 * self._orders.longest_pause_seconds))
        self._fetch(place, client, match, self._rng.sample(range(len(match)), self._rng.randint(0, len(match))))
        self._release(client, match)

    def _read_patiently(self, place: TortureNamespace, client: StoreClient) -> None:
        """Read blocks after a match that waits until they are promoted from lower tiers."""
        names, max_wait = self._names(), self._rng.choice([0.05, 0.3, 1.0])
        with self._call("patient match", max_wait + 4 * CALL_SECONDS):
            match = client.match_and_wait(names, lease_seconds=2.0, max_wait_seconds=max_wait)
        self._fetch(place, client, match, range(len(match)))
        self._release(client, match)

    def _hold(self, place: TortureNamespace, client: StoreClient) -> None:  # noqa: ARG002 - the signature of all operations
        session = f"session-{self._rng.randrange(8)}"
        with self._call("hold", CALL_SECONDS):
            client.hold(session, self._names(), seconds=self._orders.longest_pause_seconds)
        if self._rng.random() < 0.5:  # in the other half of the cases, the session pin expires
            with self._call("release a hold", CALL_SECONDS):
                client.release_hold(session)

    def _read_without_a_lease(self, place: TortureNamespace, client: StoreClient) -> None:
        match = self._match(client, self._names(), 0)
        self._pause(0.02)
        self._fetch(place, client, match, range(len(match)))

    def _hand_over(self, place: TortureNamespace, client: StoreClient) -> None:
        match = self._match(client, self._names(), 1.0)
        index = self._places.index(place)
        draft = Path(self._orders.mailbox, f".{os.getpid()}-{threading.get_ident()}")
        draft.write_bytes(msgspec.msgpack.encode(match))
        draft.replace(Path(self._orders.mailbox, f"{index}-{self._rng.randrange(HANDED_OVER)}"))

    def _take_over(self, place: TortureNamespace, client: StoreClient) -> None:
        try:
            letter = Path(self._orders.mailbox, f"{self._places.index(place)}-{self._rng.randrange(HANDED_OVER)}")
            match = msgspec.msgpack.decode(letter.read_bytes(), type=Match)
        except FileNotFoundError:
            return
        self._fetch(place, client, match, range(len(match)))
        self._release(client, match)

    def _look_at_stats(self, place: TortureNamespace, client: StoreClient) -> None:  # noqa: ARG002 - the signature of all operations
        with self._call("stats", CALL_SECONDS):
            client.stats()

    def _reconnect(self, place: TortureNamespace, client: StoreClient) -> None:  # noqa: ARG002 - the signature of all operations
        self._close(place)

    # Behaviour of broken workers

    def _write_slowly(self, place: TortureNamespace, client: StoreClient) -> None:
        names = self._names()
        pauses = 0.0

        def source(index: int) -> ByteArray:
            nonlocal pauses
            if self._rng.random() < 2 / len(names):
                pauses += self._pause(self._orders.longest_pause_seconds / 2)
            return place.content.of(names[index])

        limit = 2 * CALL_SECONDS + place.transfer_seconds(len(names)) + 2 * self._orders.longest_pause_seconds
        with self._call("slow write", limit):
            client.write(names, source)

    def _read_slowly(self, place: TortureNamespace, client: StoreClient) -> None:
        match = self._match(client, self._names(), 0.5)
        for index in range(0, len(match), 4):
            self._pause(0.3)
            self._fetch(place, client, match, range(index, min(index + 4, len(match))))
        self._release(client, match)

    def _read_with_an_old_match(self, place: TortureNamespace, client: StoreClient) -> None:
        if place.matches:
            match = self._rng.choice(place.matches)
            self._fetch(place, client, match, range(len(match)))
        place.matches.append(self._match(client, self._names(), self._rng.choice([0, 0.1, 1.0])))

    def _forget(self, place: TortureNamespace, client: StoreClient) -> None:  # noqa: ARG002 - the signature of all operations
        self._match(client, self._names(), self._orders.longest_pause_seconds)

    def _condemn_good_blocks(self, place: TortureNamespace, client: StoreClient) -> None:
        match = self._match(client, self._names(), 0)
        if not match:
            return
        request = pb.CondemnRequest(
            digest=place.namespace.digest,
            hashes=b"".join(match.names),
            generations=[slot.generation + self._rng.choice([0, 0, 1]) for slot in match.slots],
        )
        self._ask(self._stub.Condemn, request)

    def _lie(self, place: TortureNamespace, client: StoreClient) -> None:
        """Publish a reservation without writing its blocks, with random checksums, so that the slots hold wrong bytes."""
        reservation = self._reserve(place, client)
        if reservation is None:
            return
        request = pb.PublishRequest(
            reservation_id=reservation.reservation_id,
            indices=reservation.indices,
            crc32c=[self._rng.getrandbits(32) for _ in reservation.indices],
            owner="liar",
        )
        self._ask(self._stub.Publish, request)

    def _abandon(self, place: TortureNamespace, client: StoreClient) -> None:
        self._reserve(place, client)

    def _send_garbage(self, place: TortureNamespace, client: StoreClient) -> None:  # noqa: ARG002 - the signature of all operations
        """Send random bytes, some with a valid beginning, to the TCP data plane or to the socket that hands out shared memory."""
        noise = self._rng.randbytes(self._rng.choice([0, 1, 31, 32, 4096]))
        targets: list[tuple[socket.AddressFamily, Any]] = [
            (socket.AF_UNIX, self._orders.shm_socket),
            (socket.AF_INET, _host_port(self._orders.data_address)),
        ]
        family, target = self._rng.choice(targets)
        with socket.socket(family, socket.SOCK_STREAM) as wire:
            wire.settimeout(CALL_SECONDS)
            if self._rng.random() < 0.3:  # let the close reset the connection instead of ending it properly
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                wire.connect(target)
                wire.sendall(self._rng.choice([b"", b"FKV1", b"FKVM", b"FKVC"]) + noise)
                self._pause(0.05)
            except OSError:  # the node is down, or closed the connection
                return

    # Parts of operations

    def _names(self) -> list[BlockHash]:
        """Return the names of a random chain or of its beginning. Low chain numbers, and whole chains, are drawn more often."""
        number = min(int(self._rng.expovariate(4 / self._orders.chains)), self._orders.chains - 1)
        length = min(self._rng.randint(1, 2 * self._orders.chain_blocks), self._orders.chain_blocks)
        return chain(self._orders.seed, number, length)

    def _match(self, client: StoreClient, names: Sequence[BlockHash], lease_seconds: float) -> Match:
        with self._call("match", CALL_SECONDS):
            return client.match(names, lease_seconds=lease_seconds)

    def _release(self, client: StoreClient, match: Match) -> None:
        with self._call("release", CALL_SECONDS):
            client.release(match.lease_id)

    def _fetch(self, place: TortureNamespace, client: StoreClient, match: Match, indices: Sequence[int]) -> None:
        destinations = list(place.buffer[: len(indices)])
        place.buffer[: len(indices)] = VOID
        with self._call("read", 2 * CALL_SECONDS + place.transfer_seconds(len(indices))):
            arrived = client.read(match, list(indices), destinations)
        for index, there, found in zip(indices, arrived, destinations, strict=True):
            if there and (wrong := place.content.wrong_bytes(match.names[index], found)):
                self._report.tell(
                    wrong_bytes=wrong,
                    path=client.path,
                    block_bytes=found.nbytes,
                    thread=threading.current_thread().name,
                )

    def _reserve(self, place: TortureNamespace, client: StoreClient) -> pb.ReserveResponse | None:
        match = self._match(client, self._names()[:1], 0)
        request = pb.ReserveRequest(
            digest=place.namespace.digest,
            hashes=b"".join(self._names()[:4]),
            lease_ms=1000,
            incarnation=match.incarnation,
            owner="liar",
        )
        reservation: pb.ReserveResponse | None = self._ask(self._stub.Reserve, request)
        return reservation

    def _ask(self, call: Callable[..., Any], request: object) -> Any:
        try:
            with self._call("raw call", CALL_SECONDS):
                return call(request, timeout=CALL_SECONDS)
        except grpc.RpcError:
            return None

    def _client(self, place: TortureNamespace) -> StoreClient | None:
        if place.client is None:
            try:
                with self._call("connect", CONNECT_SECONDS):
                    place.client = StoreClient.connect(
                        place.address,
                        place.namespace,
                        timeout_seconds=CONNECT_SECONDS,
                        call_timeout_seconds=CALL_SECONDS,
                        prefer=place.prefer,
                    )
            except StoreUnreachable:
                return None
        return place.client

    def _close(self, place: TortureNamespace) -> None:
        if place.client is not None:
            with self._call("close", CALL_SECONDS):
                place.client.close()
            place.client = None

    def _call(self, name: str, limit_seconds: float) -> Any:
        return self._watchdog.call(name, limit_seconds)

    def _pause(self, longest_seconds: float) -> float:
        pause = self._rng.uniform(0, longest_seconds)
        self._stopping.wait(pause)
        return pause


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _visit(address: str, namespace: KvNamespace, prefer: str) -> None:
    with StoreClient.connect(address, namespace, timeout_seconds=CONNECT_SECONDS, prefer=[prefer]) as client:
        client.stats()


def _come_and_go(orders: TortureOrders, stopping: threading.Event) -> int:
    """Use the store once through every data path, and then return the number of this process's open files."""
    while not stopping.is_set():
        try:
            for namespace in namespaces(orders.block_bytes):
                for prefer in ("shm", "tcp"):
                    _visit(orders.address, namespace, prefer)
        except StoreUnreachable:
            continue
        break
    gc.collect()
    return _open_files()


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=TortureOrders)
    report = TortureReport()
    stopping = threading.Event()
    failed = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        stopping.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    watchdog = CallWatchdog(lambda call, seconds: report.tell(late=call, seconds=round(seconds, 1)))
    files_at_first = _come_and_go(orders, stopping)

    def work(number: int) -> None:
        try:
            TortureThread(orders, number, report, watchdog, stopping).run()
        except Exception:  # noqa: BLE001 - supervisor: every exception of the store is a finding
            report.tell(error=traceback.format_exc())
            failed.set()
            stopping.set()

    threads = [
        threading.Thread(target=work, args=(number,), name=f"worker-{number}") for number in range(orders.threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 5
    while gc.collect() is not None and _open_files() > files_at_first and time.monotonic() < deadline:
        time.sleep(0.05)  # wait, because gRPC closes connections in its own threads
    report.tell(files_at_first=files_at_first, files_at_last=_open_files())
    sys.stdout.flush()
    # A normal end would wait for the daemon thread that reads standard input.
    os._exit(1 if failed.is_set() else 0)


if __name__ == "__main__":
    main()
