"""S3 backend: keeps each block as one object in an S3-compatible object store.

The key of an object is ``prefix/namespace digest/block hash``, with digest and hash in hex.

Rules:

1. Each request is about one block, and several requests run at a time. A request is repeated only once, and only if it
   was sent on an idle connection that the server had closed. There are no multipart uploads, because blocks are too small
   to gain from them.
2. An object is written as a whole or not at all. If the server supports ``If-None-Match: *``, an object is written only
   if its key has none yet. An object that this node cannot use is replaced, unless it has a newer format.
   `kvstore.tiers.remote_records` verifies each object. A bad object is read again over new connections, and removed
   only if its stored bytes are bad.
3. `find` assumes that no block after a missing one is stored, because chains are written from their start. It therefore
   searches for the length of the stored prefix: each round sends up to `parallel` HEAD requests and divides the range of
   possible lengths by that number. Three rounds are enough for thousands of blocks, and one for a complete chain. A
   missing block in the middle is noticed when the blocks are fetched. No request is sent for a block that was found or
   missing a short time ago (`kvstore.tiers.s3.sightings`). `holds` does not use these results.
4. The bucket's lifecycle rules decide what is evicted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from kvstore.clock import Clock, Nanos, nanos, seconds
from kvstore.errors import StoreNotStarted, TierFailed
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult
from kvstore.ports import Codec
from kvstore.tiers.daemon_threads import DaemonThreads
from kvstore.tiers.remote import BackendHealth, BlockRead, BlockWrite, RemoteTier
from kvstore.tiers.remote_records import HEAD_BYTES, RecordFramer, RemoteKeyState
from kvstore.tiers.s3.clients import S3Body, S3Clients, error_code
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.s3.sightings import S3Sightings, leading
from kvstore.tiers.second_reading import ReadingsDiffer, ReadingVerdict, judge
from kvstore.tiers.statistics import TierStatistics

MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
THERE_ALREADY = frozenset({"412", "PreconditionFailed"})
BEING_WRITTEN = frozenset({"409", "ConditionalRequestConflict"})
UNCONDITIONAL_ONLY = frozenset({"501", "NotImplemented"})
FULL = frozenset({"507", "EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
"""Error codes or HTTP statuses with which an object store refuses an object, because the store is full or the object is
too large."""

Name = TypeVar("Name")
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def open_s3(settings: S3Settings, *, codecs: Callable[[bytes], Codec], clock: Clock) -> "RemoteTier[S3Backend]":
    """Make a tier in a bucket. The object store need not answer yet; the tier uses it from its first answer on.

    Raises:
        StoreNotStarted: The client library is not installed, or a setting is wrong, such as the bucket, the region or the
            credentials. The message begins with the name of the setting.
    """
    try:
        clients = S3Clients(settings)
    except ImportError as error:
        raise StoreNotStarted("kind: s3 needs its client: pip install 'fleet-serving[s3]'") from error
    clients.check_bucket()
    return tier_with(settings, clients, codecs=codecs, clock=clock)


def tier_with(
    settings: S3Settings, clients: S3Clients, *, codecs: Callable[[bytes], Codec], clock: Clock
) -> "RemoteTier[S3Backend]":
    """Make a tier as `open_s3` does, but do not check the bucket first."""
    statistics = TierStatistics("s3")
    return RemoteTier(
        S3Backend(settings, clients, RecordFramer(codecs, statistics), statistics, clock), statistics, clock
    )


class S3Backend:
    """The `TierBackend` for a bucket. Made by `open_s3`."""

    def __init__(
        self, settings: S3Settings, clients: S3Clients, records: RecordFramer, statistics: TierStatistics, clock: Clock
    ):
        self._settings = settings
        self.clients = clients
        self._records = records
        self._statistics = statistics
        self._clock = clock
        self.sightings = S3Sightings(nanos(settings.known_seconds), nanos(settings.missing_seconds))
        self._conditional = True
        self.threads = DaemonThreads("kvstore-s3", settings.parallel)

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:  # noqa: ARG002 - blocks of any length fit
        return self._records.knows(key)

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        return leading(
            len(keys), self._settings.parallel, lambda indices: self._found([keys[i] for i in indices], deadline)
        )

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Return which blocks are stored. Blocks of suspect objects (`S3Sightings.suspect`) count as missing."""
        there = {key: False for key in keys if self.sightings.is_suspect(key)}
        self._each({key: key for key in keys if key not in there}, self._exists, there, deadline)
        return [there[key] for key in keys]

    def put(self, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        now = self._clock.now()
        there.update((key, True) for key in work if self.sightings.is_there(key, now))
        missing = {key: (key, write) for key, write in work.items() if key not in there}
        self._each(missing, partial(self._put, deadline=deadline), there, deadline)

    def get(self, work: Mapping[int, BlockRead], answers: dict[int, FetchResult], deadline: Nanos) -> None:
        self._each(work, partial(self._get, deadline=deadline), answers, deadline)

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:
        verdicts: dict[BlockKey, ReadingVerdict] = {}
        self._each(
            {key: key}, partial(self._read_twice, block_bytes=block_bytes, deadline=deadline), verdicts, deadline
        )
        verdict = verdicts[key]
        if verdict in (ReadingVerdict.SOUND, ReadingVerdict.GONE):
            self._note_sighting(key, is_there=verdict is ReadingVerdict.SOUND)
        return verdict

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        for key in keys:
            self.sightings.suspect(key)
        self._each({key: key for key in keys}, self._delete, {}, deadline)

    def health(self) -> BackendHealth:
        return BackendHealth()

    def close(self) -> None:
        self.threads.close()
        self.clients.close()

    def _found(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Return which blocks are stored; a block that was found or missing lately is not looked up again (rule 3)."""
        now = self._clock.now()
        recalled = {key: self.sightings.recall(key, now) for key in keys}
        there = {key: is_there for key, is_there in recalled.items() if is_there is not None}
        self._each({key: key for key in recalled if key not in there}, self._exists, there, deadline)
        return [there[key] for key in keys]

    # The methods below make one or a few requests for one object.

    def _exists(self, client: Any, key: BlockKey) -> bool:
        try:
            client.head_object(Bucket=self._settings.bucket, Key=self._name(key))
        except self.clients.client_error as error:
            if error_code(error) not in MISSING:
                raise
            return self._note_sighting(key, is_there=False)
        return self._note_sighting(key, is_there=True)

    def _put(self, client: Any, item: tuple[BlockKey, BlockWrite], *, deadline: Nanos) -> bool:
        key, write = item
        framed = self._records.frame(key, write.block, write.crc32c)
        if framed is None:
            return False
        conditional = self._conditional
        if self.sightings.is_suspect(key):  # a conditional put (rule 2) would not replace the existing object
            key_state = self._records.key_state(key, self._head(client, key, deadline), write.block.nbytes)
            if key_state is not RemoteKeyState.FREE:
                return key_state is RemoteKeyState.HELD
            conditional = False
        body = bytearray(framed.nbytes)
        body[:HEAD_BYTES] = framed.head
        body[HEAD_BYTES:] = framed.payload.data
        condition = {"IfNoneMatch": "*"} if conditional else {}
        try:
            client.put_object(Bucket=self._settings.bucket, Key=self._name(key), Body=body, **condition)
        except self.clients.client_error as error:
            code = error_code(error)
            if code in UNCONDITIONAL_ONLY and conditional:
                self._conditional = False
                return self._put(client, item, deadline=deadline)
            if code in FULL:
                self._statistics.count(refused=1)
                return False
            if code in BEING_WRITTEN:
                return False
            if code not in THERE_ALREADY:
                raise
        else:
            self._statistics.count(bytes_written=len(body))
        return self._note_sighting(key, is_there=True)

    def _get(self, client: Any, wanted: BlockRead, *, deadline: Nanos) -> FetchResult:
        key = wanted.key
        try:
            answer = client.get_object(Bucket=self._settings.bucket, Key=self._name(key))
        except self.clients.client_error as error:
            if error_code(error) not in MISSING:
                raise
            self._note_sighting(key, is_there=False)
            return GONE
        with S3Body(answer, self._clock, deadline) as body:
            fetched = self._records.take(key, body, wanted.into)
        if fetched.outcome is BlockOutcome.MOVED:
            self._note_sighting(key, is_there=True)
        elif fetched.outcome is BlockOutcome.CORRUPT:
            self.sightings.forget(key)  # the stored object may be undamaged: the damage can have happened in transit
        else:
            self.sightings.suspect(key)
        return fetched

    def _head(self, client: Any, key: BlockKey, deadline: Nanos) -> bytes:
        """Return the first `HEAD_BYTES` bytes of an object, or all bytes of a shorter one; empty if it is missing."""
        where = f"bytes=0-{HEAD_BYTES - 1}"
        try:
            answer = client.get_object(Bucket=self._settings.bucket, Key=self._name(key), Range=where)
        except self.clients.client_error as error:
            if error_code(error) not in MISSING | {"416", "InvalidRange"}:
                raise
            return b""
        with S3Body(answer, self._clock, deadline) as body:
            head = bytearray(min(body.left, HEAD_BYTES))
            body.fill(memoryview(head))
            return bytes(head)

    def _read_twice(self, _: Any, key: BlockKey, *, block_bytes: int, deadline: Nanos) -> ReadingVerdict:
        """Return the verdict of `judge` about a block. Each reading has a new client instead of the shared one."""
        return judge(partial(self._reading, key, deadline), partial(self._records.proof, key, block_bytes))

    @contextmanager
    def _reading(self, key: BlockKey, deadline: Nanos) -> Iterator["ObjectReading | None"]:
        with self.clients.fresh(seconds(deadline - self._clock.now())) as client:
            if client is None:
                raise TierFailed(f"{self._place}: too little time is left")
            try:
                head = client.head_object(Bucket=self._settings.bucket, Key=self._name(key))
            except self.clients.client_error as error:
                if error_code(error) not in MISSING:
                    raise
                yield None
                return
            ask = partial(client.get_object, Bucket=self._settings.bucket, Key=self._name(key))
            yield ObjectReading(ask, int(head["ContentLength"]), self._clock, deadline)

    def _delete(self, client: Any, key: BlockKey) -> bool:
        client.delete_object(Bucket=self._settings.bucket, Key=self._name(key))
        return True

    def _note_sighting(self, key: BlockKey, *, is_there: bool) -> bool:
        self.sightings.note(key, self._clock.now(), is_there=is_there)
        return is_there

    # The methods below make requests for several objects at the same time.

    def _each(
        self,
        items: Mapping[Name, Item],
        act: Callable[[Any, Item], Answer],
        answers: dict[Name, Answer],
        deadline: Nanos,
    ) -> None:
        """Make a request for each item, several at a time, and enter the results into `answers`.

        Raises:
            TierFailed: One or more requests failed.
        """
        failure = self._run(items, act, answers, deadline)
        if failure is None:
            return
        try:
            raise failure
        finally:
            del failure  # breaks a reference cycle that would keep the library's sockets open

    def _run(
        self,
        items: Mapping[Name, Item],
        act: Callable[[Any, Item], Answer],
        answers: dict[Name, Answer],
        deadline: Nanos,
    ) -> BaseException | None:
        """Do the work of `_each`. Return the last failure instead of raising it; None if no request failed."""
        attempts: dict[Name, Future[Answer]] = {}
        failure: BaseException | None = None
        for name, item in items.items():
            try:
                attempts[name] = self.threads.submit(self._attempt, act, item, deadline)
            except RuntimeError:
                failure = TierFailed(f"{self._place}: the tier is closed")
                break
        for name, attempt in attempts.items():
            try:  # wait for all attempts, because they use the caller's buffers
                error = attempt.exception()
            except CancelledError:
                failure = TierFailed(f"{self._place}: the tier was closed")
                continue
            if error is None:
                answers[name] = attempt.result()
            else:
                failure = error
        return failure

    def _attempt(self, act: Callable[[Any, Item], Answer], item: Item, deadline: Nanos) -> Answer:
        for is_last in (False, True):
            client = self.clients.within(seconds(deadline - self._clock.now()))
            if client is None:
                raise TierFailed(f"{self._place}: too little time is left")
            try:
                return act(client, item)
            except self.clients.errors as error:
                # Only a request on an idle connection that the server had closed is sent again, and only once (rule 1).
                if is_last or not isinstance(error, self.clients.connection_closed):
                    raise TierFailed(f"{self._place}: {error}") from error
        raise AssertionError("unreachable")

    def _name(self, key: BlockKey) -> str:
        return f"{self._settings.prefix}/{key.digest.hex()}/{key.name.hex()}"

    @property
    def _place(self) -> str:
        return f"{self._settings.endpoint_url or 's3:/'}/{self._settings.bucket}"


class ObjectReading:
    """Reads ranges of an object, for `kvstore.tiers.second_reading`."""

    def __init__(self, ask: Callable[..., Any], length: int, clock: Clock, deadline: Nanos):
        self._ask = ask
        self._clock = clock
        self._deadline = deadline
        self.length = length

    def read(self, start: int, stop: int) -> bytes:
        answer = self._ask(Range=f"bytes={start}-{stop - 1}")
        with S3Body(answer, self._clock, self._deadline) as body:
            expected = f"bytes {start}-{stop - 1}/{self.length}"
            if body.left != stop - start or answer.get("ContentRange") != expected:
                raise ReadingsDiffer(f"{answer.get('ContentRange')} instead of {expected}")
            into = bytearray(stop - start)
            body.fill(memoryview(into))
            return bytes(into)
