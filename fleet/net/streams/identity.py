"""Identity of streams of frames over TCP: certificates, a secret, or both, on both ends. Streams over Unix sockets need none.

Rules:

1. `certificate` and `key` make a listener speak TLS. With `authority` it asks callers for certificates as well. A caller speaks TLS
   where it has an `authority`, and shows its own certificate where it is asked.
2. With `secret_file` both ends prove that they know the secret, over TLS or not (`fleet.net.streams.proof`).
3. A stream is protected when both ends prove something: the secret, or certificates of the authority. Nobody listens unprotected
   where strangers can connect, unless `insecure` says that there are none.
4. A handshake that fails is explained on both ends. Event loops end such a connection before the alert has left, which would
   tell the peer why; `DiagnosedTls` lets the alert leave first and remembers the failure.
"""

import ssl
from typing import Any, Self

from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from kvstore.errors import BadCredentials
from kvstore.net.addresses import is_local, unix_path
from kvstore.net.frames import HEAD
from kvstore.security import channels as access
from kvstore.security.authentication import AuthenticationKey, Purpose
from kvstore.security.credentials import Credentials
from kvstore.security.tls_diagnosis import PLAIN, explain


class StreamIdentity(Struct, frozen=True, kw_only=True):
    """Identity of one end of streams: how it proves who it is, and what it asks of the other end."""

    field: str
    """The settings that it was made of; messages begin with it."""

    tls: ssl.SSLContext | None = None
    """None: connections are not encrypted."""

    key: AuthenticationKey | None = None
    """Derived from the secret that both ends prove; None: neither proves one."""

    certified: bool = False
    """True if both ends show certificates."""

    insecure: bool = False
    """True if strangers are known not to be there."""

    @property
    def protects(self) -> bool:
        """True if both ends prove who they are."""
        return self.key is not None or self.certified

    @property
    def is_open(self) -> bool:
        """True if streams begin without any handshake."""
        return self.key is None and self.tls is None

    def require(self, listen_field: str, listen: str, *, on_loopback: bool) -> None:
        """Refuse an address where a stranger could come in (rule 3).

        Args:
            listen_field: The setting that holds the address.
            listen: ``host:port`` or ``unix:/path``.
            on_loopback: Whether other users of this machine count as strangers.

        Raises:
            ConfigurationRefused: The address is not protected, or is none.
        """
        if self.protects or self.insecure or unix_path(listen):
            return
        try:
            if is_local(listen) and not on_loopback:
                return
        except ValueError as error:
            raise ConfigurationRefused(f"{listen_field}: {error}") from error
        who = "other users of this machine" if is_local(listen) else "other hosts"
        raise ConfigurationRefused(
            f"{listen_field}: {listen} is open to {who}: set {self.field}.secret_file, or certificate, key and authority, or use a "
            f"Unix socket, or set {self.field}.insecure = true on a network that nobody else is on"
        )


OPEN_IDENTITY = StreamIdentity(field="")
"""Neither secret nor certificate."""


def worker_identity(field: str, credentials: Credentials) -> StreamIdentity:
    """Read what a listener proves.

    Args:
        field: Of the settings; messages begin with it.
        credentials: The certificate and key of this end; with an authority, callers have to show a certificate of it.

    Raises:
        ConfigurationRefused: A file cannot be used, or fields contradict each other.
    """
    if not credentials.certificate and credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: certificates are looked at within TLS: set certificate and key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if credentials.key else None
    return _identity(field, credentials, context)


def router_identity(field: str, credentials: Credentials) -> StreamIdentity:
    """Read what a caller proves.

    Args:
        field: Of the settings; messages begin with it.
        credentials: The authority that signs the listeners' certificates, and what this end shows where they ask.

    Raises:
        ConfigurationRefused: A file cannot be used, or fields contradict each other.
    """
    if credentials.certificate and not credentials.authority:
        raise ConfigurationRefused(f"{field}.authority: is needed to know a listener's certificate")
    return _identity(field, credentials, ssl.create_default_context() if credentials.authority else None)


def _identity(field: str, credentials: Credentials, context: ssl.SSLContext | None) -> StreamIdentity:
    try:
        secret = access.load(credentials).secret
    except BadCredentials as error:
        raise ConfigurationRefused(f"{field}{str(error).removeprefix('credentials')}") from error
    if context is not None:
        context.sslobject_class = _DiagnosedHandshake
        try:
            if credentials.certificate:
                context.load_cert_chain(credentials.certificate, credentials.key)
            if credentials.authority:
                context.load_verify_locations(credentials.authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise ConfigurationRefused(f"{field}: a file cannot be used: {error}") from error
    return StreamIdentity(
        field=field,
        tls=context,
        key=AuthenticationKey(secret, Purpose.STREAMS) if secret else None,
        certified=bool(credentials.certificate and credentials.authority),
        insecure=credentials.insecure,
    )


class DiagnosedTls(ssl.SSLContext):
    """TLS of one connection, whose handshake tells how it failed (rule 4).

    Attributes:
        failure: Of the handshake; None while it has not failed.
    """

    def __new__(cls, shared: ssl.SSLContext, farewell: bytes = b"") -> Self:  # noqa: ARG004 - of `__init__`
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, shared: ssl.SSLContext, farewell: bytes = b"") -> None:
        """Behave as `shared` does; nothing of this context itself is used.

        Args:
            shared: Made by `worker_identity` or `router_identity`.
            farewell: A payload for peers that do not speak TLS, in place of the alert that they would not understand.
        """
        self._shared = shared
        self._farewell = HEAD.pack(len(farewell)) + farewell if farewell else b""
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
        """Remember a failure, once."""
        if self.failure is None:
            self.failure = error
            if error.reason in PLAIN and self._outgoing is not None and self._farewell:
                self._outgoing.read()
                self._outgoing.write(self._farewell)


class _DiagnosedHandshake(ssl.SSLObject):
    watch: DiagnosedTls | None = None

    def do_handshake(self) -> None:
        if self.watch is not None and self.watch.failure is not None:
            raise ssl.SSLWantReadError  # until the peer has left, or the deadline of the handshake is there
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.watch is not None:
                self.watch.failed(error)
            if self.watch is None or "ALERT" in (error.reason or ""):
                raise  # the peer knows already
            raise ssl.SSLWantReadError from error  # has the event loop send what there is: the alert


def tls_failure_cause(error: BaseException, field: str) -> str:
    """Return why a stream did not come about or ended, with the setting to look at where TLS is the reason.

    Args:
        error: As the event loop told it.
        field: Of the credentials of this end.
    """
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
