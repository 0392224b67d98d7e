"""Blocks in an S3-compatible object store, one object each under ``prefix/namespace/name``.

Rules:

1. A request moves one block, several are made at a time, and nothing is tried again behind the caller's back, but what met
   a kept connection that the store had closed: that once. Blocks are far below the size from which multipart uploads pay.
2. An object is written whole or not at all, and only where there is none yet, as far as the store can do that
   (``If-None-Match: *``). What is read is judged by `kvstore.tiers.records`; what it rejects is replaced.
3. To find out how long a prefix is there costs requests. Chains are written from the start and no object store evicts
   from the start, so that it is searched for: `parallel` HEADs at a time narrow it down by that factor, three rounds for
   thousands of blocks, one for a chain that is there as a whole. A hole in it shows when the blocks are fetched.
   What was seen of late, there or missing, is not asked about again.
4. What has to go is decided by the bucket's lifecycle rules, not here.
5. A call that is cut short answers with what it got; one that got nothing has failed.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta

from kvstore.buffers import ByteArray
from kvstore.clock import SECOND, Clock, Nanos, nanos, seconds
from kvstore.errors import StoreNotStarted, TierFailed
from kvstore.messages import GONE, BlockKey, Fetched, Outcome, TierStatus
from kvstore.ports import Codec
from kvstore.recent import Recent
from kvstore.tiers.gate import Gate
from kvstore.tiers.records import HEAD_BYTES, Records, Standing
from kvstore.tiers.settings import TierSettings
from kvstore.tiers.tally import Tally

MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
THERE_ALREADY = frozenset({"412", "PreconditionFailed"})
BEING_WRITTEN = frozenset({"409", "ConditionalRequestConflict"})
UNCONDITIONAL_ONLY = frozenset({"501", "NotImplemented"})
FULL = frozenset({"507", "EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
"""Error codes, of the store or of HTTP."""

FIELDS = {"ParamValidationError": "bucket", "InvalidRegionError": "region", "ProfileNotFound": "profile"}
"""Of the settings, by the library's error that finds them wrong."""

WAITS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""For a connection, and again for an answer to begin. The library wants to know once for all requests of a client, so
that there is a client for each; a request is made with the longest that is at most half of the time left."""

CHUNK_BYTES = 1 << 20  # received before the deadline is looked at again
SEEN_KEYS = 1 << 16
DISCARD_WITHIN = Nanos(2 * SECOND)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class S3Settings(TierSettings, frozen=True, kw_only=True, tag="s3"):
    """Where to keep blocks. Credentials come from the places where the AWS tools look for them."""

    bucket: Annotated[str, Meta(min_length=3, max_length=255)]
    """Must exist. The credentials need s3:ListBucket on it, and GetObject, PutObject and DeleteObject in it."""

    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*$", max_length=128)] = "fleet"
    """What all object keys begin with, so that several deployments can share a bucket."""

    endpoint_url: str = ""
    """``http(s)://host[:port]`` of a store other than Amazon's. Empty: Amazon's, of the region."""

    region: str = ""
    """Empty: what the credentials' profile says."""

    profile: str = ""
    """Of the AWS configuration files. Empty: the default one."""

    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name stands in URLs. Many other stores want "path"."""

    ca_file: str = ""
    """Certificates to trust, PEM. Empty: the usual ones."""

    parallel: Annotated[int, Meta(ge=1, le=256)] = 16
    """Requests at a time. One gets about 50 to 100 MB/s from Amazon's store; 16 fill a 10 Gbit/s link."""

    start_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """For the look at the bucket at the start. A store that does not answer by then is used once it does."""

    known_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """For how long a block that was seen counts as there. Objects go rarely, and a wrong guess costs one fetch."""

    missing_seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """For how long a block that was missing counts as missing. Short, because others write."""

    def __post_init__(self) -> None:
        if not self.endpoint_url:
            return
        try:
            url = urlsplit(self.endpoint_url)
            has_place = bool(url.hostname) and url.port != 0
        except ValueError as error:
            raise ValueError("endpoint_url: its port is not a number, or its brackets do not match") from error
        if url.scheme not in ("http", "https") or not has_place:
            raise ValueError("endpoint_url: must be http://host[:port] or https://…")
        if "@" in url.netloc:
            raise ValueError("endpoint_url: must hold no credentials")


class S3Tier:
    """See `kvstore.ports.BackingTier`, and the module. Made by `open`."""

    name = "s3"
    finds_in_memory = False

    def __init__(
        self, settings: S3Settings, clients: "Clients", *, codecs: Callable[[bytes], Codec], clock: Clock
    ) -> None:
        self._settings = settings
        self._clients = clients
        self._clock = clock
        self._tally = Tally(self.name)
        self._gate = Gate(self._tally, clock)
        self._records = Records(codecs, self._tally)
        self._seen = Sightings(nanos(settings.known_seconds), nanos(settings.missing_seconds))
        self._conditional = True
        self._threads = ThreadPoolExecutor(settings.parallel, thread_name_prefix="kvstore-s3")

    @classmethod
    def open(cls, settings: S3Settings, *, codecs: Callable[[bytes], Codec], clock: Clock) -> Self:
        """A tier in that bucket. A store that does not answer yet is used once it does.

        Args:
            settings: What to use.
            codecs: By namespace digest.
            clock: Of the deadlines.

        Raises:
            StoreNotStarted: The client library is not installed, there are no credentials, or the store answers and
                does not let us use the bucket; names the field.
        """
        try:
            clients = Clients(settings)
        except ImportError as error:
            raise StoreNotStarted("kind: s3 needs its client: pip install 'fleet-serving[s3]'") from error
        clients.look_at_bucket()
        return cls(settings, clients, codecs=codecs, clock=clock)

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        self._gate.require_open()
        known = next((index for index, key in enumerate(keys) if not self._records.knows(key)), len(keys))
        if not known or self._gate.is_late(deadline):
            return 0
        return leading(
            known, self._settings.parallel, lambda indices: self._are_there([keys[i] for i in indices], deadline)
        )

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        self._gate.require_open()
        known = [key for key in keys if self._records.knows(key)]
        there = dict(zip(known, self._are_there(known, deadline), strict=True))
        return [there.get(key, False) for key in keys]

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        self._gate.require_open()
        now = self._clock.now()
        there: dict[BlockKey, bool] = {}
        work: dict[BlockKey, tuple[ByteArray, int]] = {}
        if self._gate.is_late(deadline):
            return [False] * len(keys)
        for key, block, checksum in zip(keys, blocks, checksums, strict=True):
            if not self._records.knows(key):
                there[key] = False
                self._tally.count(refused=1)
            elif self._seen.is_there(key, now):
                there[key] = True
            else:
                work[key] = block, checksum
        written = self._each(list(work.items()), self._put, deadline)
        there.update((key, bool(answer)) for key, answer in zip(work, written, strict=True))
        self._tally.present(key for key, is_there in there.items() if is_there)
        return [there[key] for key in keys]

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[Fetched]:
        self._gate.require_open()
        answers = [GONE] * len(keys)
        work = [(index, key, into[index]) for index, key in enumerate(keys) if self._records.knows(key)]
        missed = []
        if work and not self._gate.is_late(deadline):
            act = partial(self._get, deadline=deadline)
            for (index, key, _), answer in zip(work, self._each(work, act, deadline), strict=True):
                if answer is not None:
                    answers[index] = answer
                    missed += [key] if answer.outcome is not Outcome.MOVED else []
        self._tally.fetched(answers, into)
        self._tally.missed(missed)
        self.discard([key for key, answer in zip(keys, answers, strict=True) if answer.outcome is Outcome.CORRUPT])
        return answers

    def discard(self, keys: Sequence[BlockKey]) -> None:
        if not keys or self._gate.is_closed:
            return
        self._tally.missed(keys)
        for key in keys:
            self._seen.doubt(key)
        try:
            self._each(list(keys), self._delete, Nanos(self._clock.now() + DISCARD_WITHIN))
        except TierFailed:
            return  # counted; what is bad is found bad again

    def gone(self) -> list[BlockKey]:
        return self._tally.gone()

    def held(self) -> list[BlockKey]:
        """Nobody here knows."""
        return []

    def status(self) -> TierStatus:
        return self._tally.status()

    def close(self) -> None:
        self._gate.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # requests under way end by their deadlines
        self._clients.close()

    # One request

    def _are_there(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        now = self._clock.now()
        there = {key: self._seen.recall(key, now) for key in keys}
        unknown = [key for key, is_there in there.items() if is_there is None]
        for key, answer in zip(unknown, self._each(unknown, self._look, deadline), strict=True):
            if answer is None:
                raise TierFailed(f"{self._place}: not all of the blocks could be asked about")
            there[key] = answer
        return [bool(there[key]) for key in keys]

    def _look(self, client: Any, key: BlockKey) -> bool:
        try:
            client.head_object(Bucket=self._settings.bucket, Key=self._name(key))
        except self._clients.Refused as error:
            if code_of(error) not in MISSING:
                raise
            return self._saw(key, is_there=False)
        return self._saw(key, is_there=True)

    def _put(self, client: Any, item: tuple[BlockKey, tuple[ByteArray, int]]) -> bool:
        key, (block, checksum) = item
        framed = self._records.frame(key, block, checksum)
        if framed is None:
            return False
        conditional = self._conditional
        if self._seen.is_doubtful(key):  # rule 2: a conditional put would leave what is there
            standing = self._records.standing(key, self._head(client, key), block.nbytes)
            if standing is not Standing.FREE:
                return standing is Standing.HELD
            conditional = False
        body = bytearray(framed.nbytes)
        body[:HEAD_BYTES] = framed.head
        body[HEAD_BYTES:] = framed.payload.data
        condition = {"IfNoneMatch": "*"} if conditional else {}
        try:
            client.put_object(Bucket=self._settings.bucket, Key=self._name(key), Body=body, **condition)
        except self._clients.Refused as error:
            code = code_of(error)
            if code in UNCONDITIONAL_ONLY and conditional:
                self._conditional = False
                return self._put(client, item)
            if code in FULL:
                self._tally.count(refused=1)
                return False
            if code in BEING_WRITTEN:
                return False
            if code not in THERE_ALREADY:
                raise
        else:
            self._tally.count(bytes_written=len(body))
        return self._saw(key, is_there=True)

    def _get(self, client: Any, item: tuple[int, BlockKey, ByteArray], *, deadline: Nanos) -> Fetched:
        _, key, into = item
        try:
            answer = client.get_object(Bucket=self._settings.bucket, Key=self._name(key))
        except self._clients.Refused as error:
            if code_of(error) not in MISSING:
                raise
            self._saw(key, is_there=False)
            return GONE
        with _Body(answer, self._clock, deadline) as body:
            fetched = self._records.take(key, body, into)
        if fetched.outcome is Outcome.MOVED:
            self._saw(key, is_there=True)
        else:
            self._seen.doubt(key)
        return fetched

    def _head(self, client: Any, key: BlockKey) -> bytes:
        """The first bytes of an object; none where there is no object, or an empty one."""
        where = f"bytes=0-{HEAD_BYTES - 1}"
        try:
            answer = client.get_object(Bucket=self._settings.bucket, Key=self._name(key), Range=where)
        except self._clients.Refused as error:
            if code_of(error) not in MISSING | {"416", "InvalidRange"}:
                raise
            return b""
        with answer["Body"] as body:
            return bytes(body.read(HEAD_BYTES))

    def _delete(self, client: Any, key: BlockKey) -> bool:
        client.delete_object(Bucket=self._settings.bucket, Key=self._name(key))
        return True

    def _saw(self, key: BlockKey, *, is_there: bool) -> bool:
        self._seen.note(key, self._clock.now(), is_there=is_there)
        return is_there

    # Many requests

    def _each(self, items: Sequence[Item], act: Callable[[Any, Item], Answer], deadline: Nanos) -> list[Answer | None]:
        """What came of each; None where the store failed.

        Raises:
            TierFailed: It failed for all of them.
        """
        if not items:
            return []
        try:
            attempts = [self._threads.submit(self._attempt, act, item, deadline) for item in items]
        except RuntimeError as error:
            raise self._gate.refusal() from error
        answers: list[Answer | None] = []
        failure: TierFailed | None = None
        for attempt in attempts:
            try:
                answers.append(attempt.result())
            except TierFailed as error:
                failure = error
                answers.append(None)
            except CancelledError:
                failure = self._gate.refusal()
                answers.append(None)
        if failure is not None:
            self._tally.count(failures=1)
            if not any(answer is not None for answer in answers):
                raise failure
        return answers

    def _attempt(self, act: Callable[[Any, Item], Answer], item: Item, deadline: Nanos) -> Answer:
        for is_last in (False, True):
            client = self._clients.within(seconds(deadline - self._clock.now()))
            if client is None:
                raise TierFailed(f"{self._place}: too little time is left")
            try:
                return act(client, item)
            except self._clients.errors as error:
                if is_last or not isinstance(error, self._clients.Closed):  # rule 1
                    raise TierFailed(f"{self._place}: {error}") from error
        raise AssertionError("unreachable")

    def _name(self, key: BlockKey) -> str:
        return f"{self._settings.prefix}/{key.digest.hex()}/{key.name.hex()}"

    @property
    def _place(self) -> str:
        return f"{self._settings.endpoint_url or 's3:/'}/{self._settings.bucket}"


class Sightings:
    """What was seen in the bucket of late, and which blocks' objects may have to be replaced. Thread-safe, bounded."""

    def __init__(self, known: Nanos, missing: Nanos):
        self._known = known
        self._missing = missing
        self._lock = threading.Lock()
        self._seen: Recent[BlockKey, tuple[bool, Nanos]] = Recent(SEEN_KEYS)
        self._doubtful: Recent[BlockKey, None] = Recent(SEEN_KEYS)

    def note(self, key: BlockKey, now: Nanos, *, is_there: bool) -> None:
        """An object was there, and as good as one can tell, or was not."""
        with self._lock:
            self._doubtful.forget(key)
            self._seen.note(key, (is_there, Nanos(now + (self._known if is_there else self._missing))))

    def doubt(self, key: BlockKey) -> None:
        """What lies there is not usable here, or was to be deleted."""
        with self._lock:
            self._seen.forget(key)
            self._doubtful.note(key, None)

    def recall(self, key: BlockKey, now: Nanos) -> bool | None:
        """Whether it is there; None when that has to be asked."""
        with self._lock:
            is_there, until = self._seen.get(key) or (False, now)
            if key in self._doubtful:
                return False
            return is_there if now < until else None

    def is_there(self, key: BlockKey, now: Nanos) -> bool:
        return self.recall(key, now) is True

    def is_doubtful(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._doubtful


class Clients:
    """The client library, its errors, and its clients by how long they wait."""

    def __init__(self, settings: S3Settings):
        import boto3  # noqa: PLC0415 - an extra; only a node with this tier has it
        from botocore import config, exceptions, parsers  # noqa: PLC0415
        from urllib3 import exceptions as http  # noqa: PLC0415 - comes with it

        self.Refused: type[Exception] = exceptions.ClientError
        self.Closed: type[Exception] = exceptions.ConnectionClosedError
        self.errors: tuple[type[Exception], ...] = (
            exceptions.ClientError,
            exceptions.BotoCoreError,
            parsers.ResponseParserError,
            http.HTTPError,
            OSError,
        )
        self._no_credentials = (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
        )
        self._settings = settings
        self._config = config.Config
        try:
            self._session = boto3.session.Session(
                profile_name=settings.profile or None, region_name=settings.region or None
            )
        except exceptions.BotoCoreError as error:
            raise StoreNotStarted(f"profile: {error}") from error
        self._lock = threading.Lock()
        self._clients: dict[float, Any] = {}

    def look_at_bucket(self) -> None:
        """Refuse what cannot work.

        Raises:
            StoreNotStarted: See `S3Tier.open`.
        """
        bucket = self._settings.bucket
        try:
            self._client(self._settings.start_seconds / 2).head_bucket(Bucket=bucket)
        except self._no_credentials as error:
            raise StoreNotStarted(f"profile: no credentials: {error}") from error
        except self.Refused as error:
            match code_of(error):
                case "404" | "NoSuchBucket":
                    raise StoreNotStarted(f"bucket: {bucket!r} does not exist there; create it first") from error
                case "403" | "AccessDenied":
                    raise StoreNotStarted(
                        f"bucket: no access to {bucket!r}; s3:ListBucket, GetObject, PutObject and DeleteObject are needed"
                    ) from error
                case "301" | "400" | "PermanentRedirect":
                    raise StoreNotStarted(f"region: {bucket!r} is not in {self._settings.region!r}: {error}") from error
                case _:
                    self._not_yet(error)
        except ValueError as error:
            raise StoreNotStarted(f"endpoint_url: {error}") from error
        except self.errors as error:
            if (field := FIELDS.get(type(error).__name__)) is not None:
                raise StoreNotStarted(f"{field}: {error}") from error
            self._not_yet(error)

    def within(self, left_seconds: float) -> Any | None:
        """A client that waits no longer than that in all; None where no client is so quick."""
        waits = [wait for wait in WAITS_SECONDS if wait <= left_seconds / 2]
        return self._client(waits[-1]) if waits else None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, wait_seconds: float) -> Any:
        with self._lock:
            if wait_seconds not in self._clients:
                self._clients[wait_seconds] = self._session.client(
                    "s3",
                    endpoint_url=self._settings.endpoint_url or None,
                    verify=self._settings.ca_file or None,
                    config=self._config(
                        connect_timeout=wait_seconds,
                        read_timeout=wait_seconds,
                        retries={"total_max_attempts": 1},
                        max_pool_connections=self._settings.parallel,
                        tcp_keepalive=True,
                        request_checksum_calculation="when_required",  # values bring their own
                        response_checksum_validation="when_required",
                        s3={"addressing_style": self._settings.addressing, "payload_signing_enabled": False},
                    ),
                )
            return self._clients[wait_seconds]

    def _not_yet(self, error: Exception) -> None:
        log.warning(
            "object store does not answer yet", extra={"bucket": self._settings.bucket, "reason": type(error).__name__}
        )


class _Body:
    """See `kvstore.tiers.records.Incoming`. Its connection is kept when it was taken as a whole."""

    def __init__(self, answer: Any, clock: Clock, deadline: Nanos):
        self._stream = answer["Body"]
        self._clock = clock
        self._deadline = deadline
        self.left: int = answer.get("ContentLength", 0)

    def fill(self, into: memoryview) -> None:
        while len(into):
            left = seconds(self._deadline - self._clock.now())
            if left <= 0:
                raise TimeoutError("the deadline has passed")
            self._stream.set_socket_timeout(left)
            count = self._stream.readinto(into[:CHUNK_BYTES])
            if not count:
                raise ConnectionError("the object ends early")
            self.left -= count
            into = into[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


def leading(count: int, width: int, are_there: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """How many of the first items are there, if whatever is there is there from the start on.

    Args:
        count: Of all items.
        width: Items to ask about at a time.
        are_there: Answers for indices.

    The last item is among the first asked about, so that "all" takes one round.
    """
    low, high = 0, count  # all before `low` are there, none from `high` on
    while low < high:
        steps = min(width, high - low)
        asked = [low + (step * (high - low)) // steps - 1 for step in range(1, steps + 1)]
        for index, is_there in zip(asked, are_there(asked), strict=True):
            if not is_there:
                high = index
                break
            low = index + 1
    return low


def code_of(error: Any) -> str:
    """Of the store's refusal; the HTTP status where it gives none."""
    found: Iterable[Any] = (
        error.response.get("Error", {}).get("Code"),
        error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
    )
    return str(next((code for code in found if code), ""))
