"""Identity of a peer on a frame stream over TCP: certificates, a secret, or both. Streams over Unix sockets need none.

Rules:

1. With `certificate` and `key` a listener speaks TLS; with `authority` it also requires certificates from callers. A
   caller speaks TLS if it has an `authority`, and shows its own certificate on request.
2. With `secret_file` both peers prove that they know the secret, with or without TLS (`fleet.net.streams.proof`).
3. A stream is protected if both peers prove the secret or show certificates of the authority. A listener does not start
   unprotected on an address that other hosts can reach, unless `insecure` is set. Some listeners may be unprotected on a
   loopback address; they log a warning that all users of the machine can connect.
4. A failed handshake is explained to both peers. By itself, an event loop closes such a connection before the TLS alert
   is sent. `DiagnosedTls` makes it send the alert first, and remembers the failure.
"""

import logging
import ssl
from collections.abc import Callable
from typing import Any, Self

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import BadCredentials
from kvstore.net.addresses import is_local, unix_path
from kvstore.security import channels as access
from kvstore.security.authentication import AuthenticationKey, Purpose
from kvstore.security.certificates import CertificateFiles, RenewedContext
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import PLAIN, explain

log = logging.getLogger(__name__)


class StreamIdentity(Struct, frozen=True, kw_only=True):
    """The identity of one peer on a stream: what it proves to the other peer, and what it requires from that peer."""

    field: str
    """The settings field of the credentials, for error messages."""

    context: RenewedContext | None = None
    """The TLS context, which follows renewed certificates; None means no encryption."""

    certificates: CertificateFiles | None = None
    """The certificate files; None if the settings name none."""

    key: AuthenticationKey | None = None
    """The key from the shared secret; None if no secret is proven."""

    certified: bool = False
    """True if both peers have to show certificates, because `certificate` and `authority` are set."""

    insecure: bool = False
    """True if the settings accept unprotected streams, because only trusted programs can reach the network."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for the next handshake; None: the stream is not encrypted."""
        return None if self.context is None else self.context.current

    @property
    def protects(self) -> bool:
        """Return whether both peers prove their identity."""
        return self.key is not None or self.certified

    @property
    def is_open(self) -> bool:
        """Return whether streams start without a handshake."""
        return self.key is None and self.context is None

    def require(self, listen_field: str, listen: str, *, on_loopback: bool) -> None:
        """Refuse an unprotected address that other hosts can reach (rule 3).

        With `on_loopback`, a loopback address is refused too, because other users of this machine can reach it. Without
        `on_loopback`, a loopback address only causes a warning.

        Raises:
            ConfigurationRefused: The address is unprotected or malformed.
        """
        if self.protects or self.insecure or unix_path(listen):
            return
        try:
            if is_local(listen) and not on_loopback:
                log.warning(
                    "port open to all users of this machine",
                    extra={
                        "setting": listen_field,
                        "address": listen,
                        "remedy": f"set {self.field}.secret_file, or listen at unix:/path; {self.field}.insecure = true says that it is meant",
                    },
                )
                return
        except ValueError as error:
            raise ConfigurationRefused(f"{listen_field}: {error}") from error
        who = "other users of this machine" if is_local(listen) else "other hosts"
        raise ConfigurationRefused(
            f"{listen_field}: {listen} is open to {who}: set {self.field}.secret_file, or certificate, key and authority, or use a "
            f"Unix socket, or set {self.field}.insecure = true on a network that nobody else is on"
        )


OPEN_IDENTITY = StreamIdentity(field="")
"""Identity without a secret and without a certificate."""


def worker_identity(field: str, credentials: Credentials) -> StreamIdentity:
    """Return the identity of a listener, such as a worker. With `authority`, callers must show a certificate signed by it.

    Raises:
        ConfigurationRefused: A file cannot be used, or fields contradict each other.
    """
    if not credentials.certificate and credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: needs TLS: set certificate and key")
    return _identity(field, credentials, _listening_context if credentials.key else None)


def router_identity(field: str, credentials: Credentials) -> StreamIdentity:
    """Return the identity of a caller, such as a router. With `authority`, listeners must show a certificate signed by it.

    Raises:
        ConfigurationRefused: A file cannot be used, or fields contradict each other.
    """
    if credentials.certificate and not credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: is needed to verify a listener's certificate")
    return _identity(field, credentials, _calling_context if credentials.authority else None)


def _listening_context() -> ssl.SSLContext:
    return diagnosed(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))


def _calling_context() -> ssl.SSLContext:
    return diagnosed(ssl.create_default_context())


def _identity(field: str, credentials: Credentials, prepare: Callable[[], ssl.SSLContext] | None) -> StreamIdentity:
    """Return an identity; `prepare` makes a context without certificates, and is None for a peer without TLS."""
    try:
        loaded = access.load(credentials, field=field)
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error
    secret, context = loaded.secret, None
    if prepare is not None and loaded.certificates is not None:
        try:
            context = RenewedContext(loaded.certificates, prepare)
        except OSError as error:
            raise ConfigurationRefused(f"{field}: a file cannot be used: {error}") from error
    return StreamIdentity(
        field=field,
        context=context,
        certificates=loaded.certificates,
        key=AuthenticationKey(secret, Purpose.STREAMS) if secret else None,
        certified=bool(credentials.certificate and credentials.authority),
        insecure=credentials.insecure,
    )


def diagnosed(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let the handshakes of a TLS context report their failures to `DiagnosedTls` (rule 4), and return the context."""
    context.sslobject_class = _DiagnosedHandshake
    return context


class DiagnosedTls(ssl.SSLContext):
    """TLS context of one connection that remembers why its handshake failed (rule 4).

    Attributes:
        failure: The failure of the handshake; None if there is none.
    """

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(
        self, shared: ssl.SSLContext, plaintext_answer: bytes = b"", on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Create a context that delegates the handshake to the context `shared`.

        Args:
            shared: A context of `diagnosed`.
            plaintext_answer: Answer to peers without TLS, which would not understand an alert.
            on_failure: Called after the first failure; the peer then gets the alert or the plaintext answer.
        """
        self._shared = shared
        self._plaintext_answer = plaintext_answer
        self._on_failure = on_failure
        self._outgoing: ssl.MemoryBIO | None = None
        self.failure: ssl.SSLError | None = None

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = self._shared.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _DiagnosedHandshake)
        made.watch = self
        self._outgoing = outgoing
        return made

    def failed(self, error: ssl.SSLError) -> None:
        """Remember the first failure. If the peer does not speak TLS, replace the alert by the plaintext answer."""
        if self.failure is None:
            self.failure = error
            if error.reason in PLAIN and self._outgoing is not None and self._plaintext_answer:
                self._outgoing.read()
                self._outgoing.write(self._plaintext_answer)
            self._on_failure()


class _DiagnosedHandshake(ssl.SSLObject):
    watch: DiagnosedTls | None = None

    def do_handshake(self) -> None:
        if self.watch is not None and self.watch.failure is not None:
            raise ssl.SSLWantReadError  # makes the handshake wait until the peer disconnects or the time limit ends
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.watch is not None:
                self.watch.failed(error)
            if self.watch is None or "ALERT" in (error.reason or ""):
                raise  # no alert is needed, because the peer knows the cause already
            raise ssl.SSLWantReadError from error  # makes the event loop send the alert


def tls_failure_cause(error: BaseException, field: str) -> str:
    """Return why a stream failed, with the setting under `field` to check if TLS is the cause."""
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    reason: Any = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{explain(error)}: see {field}.authority"
    if "ALERT" in reason:
        return f"{explain(error)}: see {field}.certificate"
    if reason in PLAIN:
        return f"{explain(error)}, and this end does: see {field}"
    return explain(error)
