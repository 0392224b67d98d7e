"""Blocks in a Redis or Valkey server, one value each under ``prefix:namespace:name``: a shelf of `kvstore.tiers.remote`.

Rules:

1. The client library opens connections (address, TLS, credentials, database); what follows goes through
   `kvstore.tiers.resp`. Connections are few, kept, and opened anew after the server was away.
2. Any number of nodes may use one server. A value is written whole or not at all, two writers of one block write the
   same, and what is found is judged by `kvstore.tiers.records`.
3. What has to go is the server's decision (its `maxmemory-policy`, and `ttl_seconds`). A server that is full and may
   not evict refuses blocks, which is no failure.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from msgspec import Meta

from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import StoreNotStarted, TierFailed, reason
from kvstore.messages import CORRUPT, GONE, BlockKey, Fetched
from kvstore.ports import Codec
from kvstore.tiers.records import HEAD_BYTES, Framed, Records, Standing
from kvstore.tiers.remote import Given, RemoteTier, Wanted
from kvstore.tiers.resp import Pipe, Refusal, request, request_with
from kvstore.tiers.settings import TierSettings
from kvstore.tiers.tally import Tally

SCHEMES = ("redis", "rediss", "unix")
URL_OPTIONS = frozenset(
    {
        "db",
        "client_name",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_cert_reqs",
        "ssl_check_hostname",
    }
)  # fmt: skip - the others would change deadlines and replies under this module

FIND_BLOCKS = 256  # asked about in one round trip
VALUE_BYTES = 512 << 20  # that a server takes; its proto-max-bulk-len

Answer = TypeVar("Answer")


class RedisSettings(TierSettings, frozen=True, kw_only=True, tag="redis"):
    """Where to keep blocks. Refused as a whole when a field is wrong (`ValueError` names it, and never shows the URL)."""

    url: str
    """``redis://[user[:password]@]host[:port][/db]``, ``rediss://…`` with TLS, or ``unix:///path[?db=N]``. After the
    ``?`` may come db, client_name, and for TLS ssl_ca_certs, ssl_certfile, ssl_keyfile and their kin."""

    password_file: str = ""
    """File that holds the password, for a URL without one: a Kubernetes secret, say. Read at each connection."""

    key_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")] = "fleet"
    """What all keys begin with, so that several deployments can share a server."""

    ttl_seconds: Annotated[float, Meta(ge=0, le=10 * 365 * 86400)] = 0
    """How long after it was written a block may be used. 0: until the server evicts it."""

    connections: Annotated[int, Meta(ge=1, le=64)] = 4
    """At a time; as many as a node has threads for one tier. A server has one thread, so that more hardly help."""

    in_flight_bytes: Annotated[int, Meta(ge=1 << 16)] = 8 << 20
    """Requested or sent on a connection, and not answered yet (at least one block). Bounds what the server has to buffer."""

    connect_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """For a connection to be there and authenticated; less where the deadline of the call is nearer."""

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.url)
            has_place = bool(url.path if url.scheme == "unix" else url.hostname) and url.port != 0
        except ValueError as error:
            raise ValueError("url: its port is not a number, or its brackets do not match") from error
        if url.scheme not in SCHEMES or not has_place:
            raise ValueError("url: must be redis://host[:port][/db], rediss://… or unix:///path")
        if url.scheme != "unix" and not (url.path.strip("/") or "0").isdecimal():
            raise ValueError("url: the database after the host must be a number")
        if unknown := {name for name, _ in parse_qsl(url.query)} - URL_OPTIONS:
            raise ValueError(f"url: {', '.join(sorted(unknown))} is none of {', '.join(sorted(URL_OPTIONS))}")
        if url.password and self.password_file:
            raise ValueError("password_file: the url holds a password already")

    @property
    def place(self) -> str:
        """The URL without what is secret in it."""
        url = urlsplit(self.url)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    def __repr__(self) -> str:
        return f"RedisSettings({self.place!r}, key_prefix={self.key_prefix!r})"


def open_redis(settings: RedisSettings, *, codecs: Callable[[bytes], Codec], clock: Clock) -> "RemoteTier[RedisShelf]":
    """A tier on that server, which may be away: it is connected to when it is needed.

    Args:
        settings: What to use.
        codecs: By namespace digest.
        clock: Of the deadlines.

    Raises:
        StoreNotStarted: The client library is not installed, or the password cannot be read.
    """
    try:
        dial = _Dial(settings, clock)
    except ImportError as error:
        raise StoreNotStarted("kind: redis needs its client: pip install 'fleet-serving[redis]'") from error
    except OSError as error:
        raise StoreNotStarted(f"password_file: {settings.password_file}: {error.strerror}") from error
    tally = Tally("redis")
    return RemoteTier(RedisShelf(settings, dial, Records(codecs, tally), tally, clock), tally, clock)


class RedisShelf:
    """See `kvstore.tiers.remote`, and the module. Made by `open_redis`."""

    def __init__(
        self, settings: RedisSettings, connect: Callable[[Nanos], Pipe], records: Records, tally: Tally, clock: Clock
    ):
        self._settings = settings
        self._connect = connect
        self._records = records
        self._tally = tally
        self._clock = clock
        self._turns = threading.BoundedSemaphore(settings.connections)
        self._lock = threading.Lock()
        self._idle: list[Pipe] = []
        self._closed = False

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:  # noqa: ARG002 - any length
        return self._records.knows(key)

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        def count_leading(pipe: Pipe) -> int:
            for start in range(0, len(keys), FIND_BLOCKS):
                there = self._there(pipe, keys[start : start + FIND_BLOCKS])
                if not all(there):
                    return start + there.index(False)
            return len(keys)

        return self._exchange(count_leading, deadline)

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        def ask(pipe: Pipe) -> list[bool]:
            steps = range(0, len(keys), FIND_BLOCKS)
            return [each for start in steps for each in self._there(pipe, keys[start : start + FIND_BLOCKS])]

        return self._exchange(ask, deadline)

    def put(self, work: Mapping[BlockKey, Given], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        self._exchange(lambda pipe: self._put(pipe, work, there), deadline)

    def get(self, work: Mapping[int, Wanted], answers: dict[int, Fetched], deadline: Nanos) -> None:
        self._exchange(lambda pipe: self._get(pipe, list(work.items()), answers), deadline)

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        def delete(pipe: Pipe) -> None:
            pipe.send([request(b"DEL", *(self._name(key) for key in keys))])
            pipe.status()

        self._exchange(delete, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for pipe in idle:
            pipe.close()

    # One turn on a connection

    def _there(self, pipe: Pipe, keys: Sequence[BlockKey]) -> list[bool]:
        heads = zip(keys, self._heads(pipe, keys), strict=True)
        return [self._records.standing(key, head) is Standing.HELD for key, head in heads]

    def _heads(self, pipe: Pipe, keys: Sequence[BlockKey]) -> list[bytes]:
        """The first bytes of the values under these keys; empty where there is none."""
        last = b"%d" % (HEAD_BYTES - 1)
        pipe.send([b"".join(request(b"GETRANGE", self._name(key), b"0", last) for key in keys)])
        heads = []
        for _ in keys:
            head = b""
            try:
                value = pipe.value()
            except Refusal as error:
                _require_only_wrong_type(error)
            else:
                if value is not None:
                    found = bytearray(min(value.left, HEAD_BYTES))
                    value.fill(memoryview(found))
                    value.skip()
                    head = bytes(found)
            heads.append(head)
        return heads

    def _put(self, pipe: Pipe, work: Mapping[BlockKey, Given], there: dict[BlockKey, bool]) -> None:
        missing = []
        heads = self._heads(pipe, list(work))
        for (key, given), head in zip(work.items(), heads, strict=True):
            match self._records.standing(key, head, given.block.nbytes):
                case Standing.HELD:
                    there[key] = True
                case Standing.FREE:
                    missing.append(key)
                case Standing.NEWER:
                    there[key] = False
                    self._tally.count(refused=1)
        in_flight: deque[tuple[BlockKey, int]] = deque()
        flying = 0
        full = False
        for key in missing:
            framed = None if full else self._records.frame(key, work[key].block, work[key].crc32c)
            if framed is None or framed.nbytes > VALUE_BYTES:
                there[key] = False
                self._tally.count(refused=1)
                continue
            while in_flight and flying + framed.nbytes > self._settings.in_flight_bytes:
                flying -= in_flight[0][1]
                full |= not self._settle(pipe, *in_flight.popleft(), there)
            self._send(pipe, key, framed)
            in_flight.append((key, framed.nbytes))
            flying += framed.nbytes
        for key, nbytes in in_flight:
            self._settle(pipe, key, nbytes, there)

    def _send(self, pipe: Pipe, key: BlockKey, framed: Framed) -> None:
        ttl = round(self._settings.ttl_seconds * 1000)
        expiry = (b"PX", b"%d" % max(ttl, 1)) if self._settings.ttl_seconds else ()
        before, after = request_with(framed.nbytes, b"SET", self._name(key), after=expiry)
        pipe.send([before + framed.head, framed.payload.data, after])

    def _settle(self, pipe: Pipe, key: BlockKey, nbytes: int, there: dict[BlockKey, bool]) -> bool:
        """Whether the block was written; not, when the server is full."""
        try:
            pipe.status()
        except Refusal as error:
            if error.code != "OOM":
                raise
            there[key] = False
            self._tally.count(refused=1)
            return False
        there[key] = True
        self._tally.count(bytes_written=nbytes)
        return True

    def _get(self, pipe: Pipe, work: list[tuple[int, Wanted]], answers: dict[int, Fetched]) -> None:
        window = max(1, self._settings.in_flight_bytes // max(wanted.into.nbytes for _, wanted in work))
        sent = 0
        for done, (index, wanted) in enumerate(work):
            if sent < len(work) and sent - done <= window // 2:
                until = min(done + window, len(work))
                pipe.send([b"".join(request(b"GET", self._name(each.key)) for _, each in work[sent:until])])
                sent = until
            answers[index] = self._got(pipe, wanted)

    def _got(self, pipe: Pipe, wanted: Wanted) -> Fetched:
        try:
            value = pipe.value()
        except Refusal as error:
            _require_only_wrong_type(error)
            self._records.corrupt(wanted.key, str(error))
            return CORRUPT
        if value is None:
            return GONE
        fetched = self._records.take(wanted.key, value, wanted.into)
        value.skip()
        return fetched

    # Connections

    def _exchange(self, act: Callable[[Pipe], Answer], deadline: Nanos) -> Answer:
        left = seconds(deadline - self._clock.now())
        if not self._turns.acquire(timeout=max(left, 0)):
            raise TierFailed(f"{self._settings.place}: all {self._settings.connections} connections are busy")
        try:
            return self._on_a_connection(act, deadline)
        finally:
            self._turns.release()

    def _on_a_connection(self, act: Callable[[Pipe], Answer], deadline: Nanos) -> Answer:
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._turn(kept, act, deadline)
            except TierFailed:
                if kept.answered or self._clock.now() >= deadline:
                    raise  # else the server has restarted since, or closed what was idle
        return self._turn(self._connect(deadline), act, deadline)

    def _turn(self, pipe: Pipe, act: Callable[[Pipe], Answer], deadline: Nanos) -> Answer:
        in_step = False
        try:
            pipe.begin(deadline)
            answer = act(pipe)
            in_step = True
        except (OSError, ValueError, Refusal) as error:
            raise TierFailed(f"{self._settings.place}: {reason(error)}") from error
        finally:
            with self._lock:
                keep = in_step and not self._closed
                if keep:
                    self._idle.append(pipe)
            if not keep:  # replies that nobody reads would be taken for those of the next requests
                pipe.close()
        return answer

    def _name(self, key: BlockKey) -> bytes:
        return f"{self._settings.key_prefix}:{key.digest.hex()}:{key.name.hex()}".encode()


class _Dial:
    """Opens connections with the client library."""

    def __init__(self, settings: RedisSettings, clock: Clock):
        import redis  # noqa: PLC0415 - an extra; only a node with this tier has it

        self._redis = redis
        self._settings = settings
        self._clock = clock
        try:
            self._connection(1.0)
        except (redis.RedisError, TypeError, ValueError) as error:  # which names the option, not the URL
            raise StoreNotStarted(f"url: an option of it cannot be used: {error}") from error

    def __call__(self, deadline: Nanos) -> Pipe:
        """An authenticated connection.

        Raises:
            TierFailed: There is none by the deadline.
        """
        left = seconds(deadline - self._clock.now())
        timeout_seconds = max(min(left, self._settings.connect_seconds), 0.001)
        try:
            connection = self._connection(timeout_seconds)
            connection.connect()
        except (self._redis.RedisError, OSError) as error:
            raise TierFailed(f"{self._settings.place}: {type(error).__name__}: {error}") from error
        return Pipe(connection._sock, connection.disconnect, self._clock)  # noqa: SLF001 - the library hands it out nowhere

    def _connection(self, timeout_seconds: float) -> Any:
        """One that is not connected yet."""
        options: dict[str, Any] = {"protocol": 2, "retry": None, "socket_timeout": timeout_seconds}
        if self._settings.password_file:
            options["password"] = Path(self._settings.password_file).read_text().strip()
        return self._redis.ConnectionPool.from_url(self._settings.url, **options).make_connection()


def _require_only_wrong_type(error: Refusal) -> None:
    """Something else than a value lies under the key; any other error is the server's state."""
    if error.code != "WRONGTYPE":
        raise error
