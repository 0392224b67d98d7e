"""S3 clients: makes clients of the library boto3, one for each timeout, and lists the errors that they can raise."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import StoreNotStarted
from kvstore.tiers.s3.settings import S3Settings

FIELDS = {"ParamValidationError": "bucket", "InvalidRegionError": "region", "ProfileNotFound": "profile"}
"""For each of these errors of the library, the name of the setting that causes it."""

WAITS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Timeouts of the clients in seconds. The timeout of a client limits the time to connect, and separately the wait until
the answer begins. The library cannot change it later, so there is one client for each timeout. A request uses the
client with the longest timeout that is at most half of the time left until its deadline."""

CHUNK_BYTES = 1 << 20  # maximum number of bytes of an object that are received between two checks of the deadline

log = logging.getLogger(__name__)


class S3Clients:
    """Makes the clients of one bucket, and keeps one client for each timeout. Thread-safe."""

    def __init__(self, settings: S3Settings):
        import boto3  # noqa: PLC0415 - the library is optional; only a node with this tier needs it
        from botocore import config, exceptions, parsers  # noqa: PLC0415 - boto3 depends on it
        from urllib3 import exceptions as http  # noqa: PLC0415 - botocore depends on it

        self.client_error: type[Exception] = exceptions.ClientError
        self.connection_closed: type[Exception] = exceptions.ConnectionClosedError
        self.errors: tuple[type[Exception], ...] = (
            exceptions.ClientError,
            exceptions.BotoCoreError,
            parsers.ResponseParserError,
            http.HTTPError,
            OSError,
            ValueError,  # the library raises ValueError, TypeError and LookupError on invalid response heads
            TypeError,
            LookupError,
            RecursionError,  # raised if redirects never end
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

    def check_bucket(self) -> None:
        """Check that the bucket can be used. If the object store does not answer, log this and raise nothing.

        Raises:
            StoreNotStarted: A setting is wrong, such as the bucket, the region or the credentials. The message begins
                with the name of the setting.
        """
        bucket = self._settings.bucket
        try:
            self._client(self._settings.start_seconds / 2).head_bucket(Bucket=bucket)
        except self._no_credentials as error:
            raise StoreNotStarted(f"profile: no credentials: {error}") from error
        except self.client_error as error:
            match error_code(error):
                case "404" | "NoSuchBucket":
                    raise StoreNotStarted(f"bucket: {bucket!r} does not exist; create it first") from error
                case "403" | "AccessDenied":
                    raise StoreNotStarted(
                        f"bucket: no access to {bucket!r}; s3:ListBucket, GetObject, PutObject and DeleteObject are needed"
                    ) from error
                case "301" | "400" | "PermanentRedirect":
                    raise StoreNotStarted(f"region: {bucket!r} is not in {self._settings.region!r}: {error}") from error
                case _:
                    self._log_unreachable(error)
        except ValueError as error:
            raise StoreNotStarted(f"endpoint_url: {error}") from error
        except self.errors as error:
            if (field := FIELDS.get(type(error).__name__)) is not None:
                raise StoreNotStarted(f"{field}: {error}") from error
            self._log_unreachable(error)

    def within(self, left_seconds: float) -> Any | None:
        """Return a client whose timeouts add up to at most the given time; None if every client's timeouts are longer."""
        waits = [wait for wait in WAITS_SECONDS if wait <= left_seconds / 2]
        return self._client(waits[-1]) if waits else None

    @contextmanager
    def fresh(self, left_seconds: float) -> Iterator[Any | None]:
        """Yield a client as `within` does, but with its own connections, which are closed when the context ends."""
        waits = [wait for wait in WAITS_SECONDS if wait <= left_seconds / 2]
        if not waits:
            yield None
            return
        with self._lock:
            client = self._make_client(waits[-1])
        try:
            yield client
        finally:
            client.close()

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, wait_seconds: float) -> Any:
        with self._lock:
            if wait_seconds not in self._clients:
                self._clients[wait_seconds] = self._make_client(wait_seconds)
            return self._clients[wait_seconds]

    def _make_client(self, wait_seconds: float) -> Any:
        return self._session.client(
            "s3",
            endpoint_url=self._settings.endpoint_url or None,
            verify=self._settings.ca_file or None,
            config=self._config(
                connect_timeout=wait_seconds,
                read_timeout=wait_seconds,
                retries={"total_max_attempts": 1},
                max_pool_connections=self._settings.parallel,
                tcp_keepalive=True,
                request_checksum_calculation="when_required",  # our values have checksums of their own
                response_checksum_validation="when_required",
                s3={"addressing_style": self._settings.addressing, "payload_signing_enabled": False},
            ),
        )

    def _log_unreachable(self, error: Exception) -> None:
        log.warning("object store unreachable", extra={"bucket": self._settings.bucket, "reason": type(error).__name__})


class S3Body:
    """The `RecordSource` of an object that is being received.

    The library uses the connection again only if the whole object was read.
    """

    def __init__(self, answer: Any, clock: Clock, deadline: Nanos):
        self._stream = answer["Body"]
        self._bytes = self._stream._raw_stream  # noqa: SLF001 - the public `read` waits for all bytes, without a deadline
        self._clock = clock
        self._deadline = deadline
        self.left: int = answer.get("ContentLength", -1)
        if self.left < 0:
            self._stream.close()
            raise ConnectionError("the object store sent no content length")

    def fill(self, into: memoryview) -> None:
        while len(into):
            left = seconds(self._deadline - self._clock.now())
            if left <= 0:
                raise TimeoutError("the deadline has passed")
            self._stream.set_socket_timeout(left)
            came = self._bytes.read1(min(len(into), CHUNK_BYTES))
            if not came:
                raise ConnectionError("the object ended early")
            into[: len(came)] = came
            self.left -= len(came)
            into = into[len(came) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


def error_code(error: Any) -> str:
    """Return the error code of an answer, or its HTTP status if it has no code; empty if it has neither."""
    found: Iterable[Any] = (
        error.response.get("Error", {}).get("Code"),
        error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
    )
    return str(next((code for code in found if code), ""))
