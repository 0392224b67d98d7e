"""Redis backend: keeps blocks in a Redis or Valkey server, under keys ``prefix:namespace digest:block hash``.

Rules:

1. Any number of nodes may use one server. A value is written as a whole or not at all, and if two nodes write one block,
   either value is right. `kvstore.tiers.remote_records` verifies each value. A bad value is read again over new
   connections.
2. The server decides what to evict (`maxmemory-policy` and `ttl_seconds`). A full server that may not evict refuses
   blocks; this counts as a refusal and not as a failure.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from kvstore.clock import Clock, Nanos
from kvstore.errors import StoreNotStarted
from kvstore.messages import CORRUPT, GONE, BlockKey, FetchResult
from kvstore.ports import Codec
from kvstore.tiers.redis.connections import RedisConnections, RedisConnector
from kvstore.tiers.redis.resp import RedisErrorReply, RedisPipeline, request, request_with
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.remote import BackendHealth, BlockRead, BlockWrite, RemoteTier
from kvstore.tiers.remote_records import HEAD_BYTES, FramedRecord, RecordFramer, RemoteKeyState
from kvstore.tiers.second_reading import ReadingsDiffer, ReadingVerdict, judge
from kvstore.tiers.statistics import TierStatistics

FIND_BLOCKS = 256  # maximum number of blocks that `find` and `holds` look up in one round trip
# Maximum length in bytes of a value that a server accepts by default (proto-max-bulk-len). Longer ones are not sent.
VALUE_BYTES = 512 << 20


def open_redis(
    settings: RedisSettings, *, codecs: Callable[[bytes], Codec], clock: Clock
) -> "RemoteTier[RedisBackend]":
    """Make a tier on a Redis server; it connects to the server when a call needs a connection.

    Raises:
        StoreNotStarted: The client library is not installed, the password cannot be read, or the URL has an invalid
            option.
    """
    try:
        connections = RedisConnections(settings, RedisConnector(settings, clock), clock)
    except ImportError as error:
        raise StoreNotStarted("kind: redis needs its client: pip install 'fleet-serving[redis]'") from error
    except OSError as error:
        raise StoreNotStarted(f"password_file: {settings.password_file}: {error.strerror}") from error
    statistics = TierStatistics("redis")
    return RemoteTier(
        RedisBackend(settings, connections, RecordFramer(codecs, statistics), statistics), statistics, clock
    )


class RedisBackend:
    """The `TierBackend` for a Redis server. Made by `open_redis`."""

    def __init__(
        self, settings: RedisSettings, connections: RedisConnections, records: RecordFramer, statistics: TierStatistics
    ):
        self._settings = settings
        self._connections = connections
        self._records = records
        self._statistics = statistics

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:  # noqa: ARG002 - blocks of any length fit
        return self._records.knows(key)

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        def count_leading(pipe: RedisPipeline) -> int:
            for start in range(0, len(keys), FIND_BLOCKS):
                there = self._are_held(pipe, keys[start : start + FIND_BLOCKS])
                if not all(there):
                    return start + there.index(False)
            return len(keys)

        return self._connections.turn(count_leading, deadline)

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        def ask(pipe: RedisPipeline) -> list[bool]:
            steps = range(0, len(keys), FIND_BLOCKS)
            return [each for start in steps for each in self._are_held(pipe, keys[start : start + FIND_BLOCKS])]

        return self._connections.turn(ask, deadline)

    def put(self, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        self._connections.turn(lambda pipe: self._put(pipe, work, there), deadline)

    def get(self, work: Mapping[int, BlockRead], answers: dict[int, FetchResult], deadline: Nanos) -> None:
        self._connections.turn(lambda pipe: self._get(pipe, list(work.items()), answers), deadline)

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:
        try:
            return judge(partial(self._reading, key, deadline), partial(self._records.proof, key, block_bytes))
        except _NotAString:
            with self._connections.fresh(deadline) as pipe:
                pipe.send([request(b"TYPE", self._name(key))])
                return ReadingVerdict.UNSURE if pipe.status() in (b"string", b"none") else ReadingVerdict.CORRUPT

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        def delete(pipe: RedisPipeline) -> None:
            pipe.send([request(b"DEL", *(self._name(key) for key in keys))])
            pipe.status()

        self._connections.turn(delete, deadline)

    def health(self) -> BackendHealth:
        return BackendHealth()

    def close(self) -> None:
        self._connections.close()

    # The methods below use the connection `pipe`, which no other thread uses at the same time.

    def _are_held(self, pipe: RedisPipeline, keys: Sequence[BlockKey]) -> list[bool]:
        heads = zip(keys, self._heads(pipe, keys), strict=True)
        return [self._records.key_state(key, head) is RemoteKeyState.HELD for key, head in heads]

    def _heads(self, pipe: RedisPipeline, keys: Sequence[BlockKey]) -> list[bytes]:
        """Return the first `HEAD_BYTES` bytes of each key's value; empty if there is no value, or if it is not a string."""
        last = b"%d" % (HEAD_BYTES - 1)
        pipe.send([b"".join(request(b"GETRANGE", self._name(key), b"0", last) for key in keys)])
        heads = []
        for _ in keys:
            head = b""
            try:
                value = pipe.value()
            except RedisErrorReply as error:
                _require_only_wrong_type(error)
            else:
                if value is not None:
                    if value.left > HEAD_BYTES:
                        raise ValueError(f"the server sent {value.left} bytes; at most {HEAD_BYTES} were asked for")
                    found = bytearray(value.left)
                    value.fill(memoryview(found))
                    value.skip()
                    head = bytes(found)
            heads.append(head)
        return heads

    def _put(self, pipe: RedisPipeline, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool]) -> None:
        missing = []
        heads = self._heads(pipe, list(work))
        for (key, write), head in zip(work.items(), heads, strict=True):
            match self._records.key_state(key, head, write.block.nbytes):
                case RemoteKeyState.HELD:
                    there[key] = True
                case RemoteKeyState.FREE:
                    missing.append(key)
                case RemoteKeyState.NEWER:
                    there[key] = False
                    self._statistics.count(refused=1)
        in_flight: deque[tuple[BlockKey, int]] = deque()
        in_flight_bytes = 0
        full = False
        for key in missing:
            framed = None if full else self._records.frame(key, work[key].block, work[key].crc32c)
            if framed is None or framed.nbytes > VALUE_BYTES:
                there[key] = False
                self._statistics.count(refused=1)
                continue
            while in_flight and in_flight_bytes + framed.nbytes > self._settings.in_flight_bytes:
                in_flight_bytes -= in_flight[0][1]
                full |= not self._read_put_reply(pipe, *in_flight.popleft(), there)
            self._send(pipe, key, framed)
            in_flight.append((key, framed.nbytes))
            in_flight_bytes += framed.nbytes
        for key, nbytes in in_flight:
            self._read_put_reply(pipe, key, nbytes, there)

    def _send(self, pipe: RedisPipeline, key: BlockKey, framed: FramedRecord) -> None:
        ttl = round(self._settings.ttl_seconds * 1000)
        expiry = (b"PX", b"%d" % max(ttl, 1)) if self._settings.ttl_seconds else ()
        before, after = request_with(framed.nbytes, b"SET", self._name(key), after=expiry)
        pipe.send([before + framed.head, framed.payload.data, after])

    def _read_put_reply(self, pipe: RedisPipeline, key: BlockKey, nbytes: int, there: dict[BlockKey, bool]) -> bool:
        """Read the reply to a write, and enter it into `there`. Return False if the server is full, otherwise True."""
        try:
            pipe.status()
        except RedisErrorReply as error:
            if error.code != "OOM":
                raise
            there[key] = False
            self._statistics.count(refused=1)
            return False
        there[key] = True
        self._statistics.count(bytes_written=nbytes)
        return True

    def _get(self, pipe: RedisPipeline, work: list[tuple[int, BlockRead]], answers: dict[int, FetchResult]) -> None:
        window = max(1, self._settings.in_flight_bytes // max(wanted.into.nbytes for _, wanted in work))
        sent = 0
        for done, (index, wanted) in enumerate(work):
            if sent < len(work) and sent - done <= window // 2:
                until = min(done + window, len(work))
                pipe.send([b"".join(request(b"GET", self._name(each.key)) for _, each in work[sent:until])])
                sent = until
            try:
                value = pipe.value()
            except RedisErrorReply as error:
                _require_only_wrong_type(error)
                self._records.corrupt(wanted.key, str(error))
                answers[index] = CORRUPT
                continue
            if value is None:
                answers[index] = GONE
                continue
            answers[index] = self._records.take(wanted.key, value, wanted.into)
            value.skip()  # after the answer was recorded, because skipping a value that is too long may take until the deadline

    @contextmanager
    def _reading(self, key: BlockKey, deadline: Nanos) -> Iterator["ValueReading | None"]:
        name = self._name(key)
        with self._connections.fresh(deadline) as pipe:
            pipe.send([request(b"EXISTS", name) + request(b"STRLEN", name)])
            is_there = int(pipe.status()) > 0
            try:
                length = int(pipe.status())
            except RedisErrorReply as error:
                _require_only_wrong_type(error)
                raise _NotAString from error
            yield ValueReading(pipe, name, length) if is_there else None

    def _name(self, key: BlockKey) -> bytes:
        return f"{self._settings.key_prefix}:{key.digest.hex()}:{key.name.hex()}".encode()


def _require_only_wrong_type(error: RedisErrorReply) -> None:
    """Raise the error again, unless its meaning is that the value of the key is not a string."""
    if error.code != "WRONGTYPE":
        raise error


class _NotAString(Exception):
    """The value of the key is not a string, so another program has written it."""


class ValueReading:
    """Reads ranges of a Redis value, for `kvstore.tiers.second_reading`."""

    def __init__(self, pipe: RedisPipeline, name: bytes, length: int):
        self._pipe = pipe
        self._name = name
        self.length = length

    def read(self, start: int, stop: int) -> bytes:
        self._pipe.send([request(b"GETRANGE", self._name, b"%d" % start, b"%d" % (stop - 1))])
        value = self._pipe.value()
        if value is None or value.left != stop - start:
            raise ReadingsDiffer(f"the answer does not hold the bytes {start} to {stop}")
        into = bytearray(stop - start)
        value.fill(memoryview(into))
        value.skip()
        return bytes(into)
