"""TLS diagnosis: finds out why a TLS connection fails, and names the file or setting that has to be corrected.

Rules:

1. gRPC only reports "Socket closed" to a client whose certificate is refused, and "Deadline Exceeded" to a client that
   waits until the node is ready (`wait_for_ready`). After such a failure, `diagnose` connects once more with Python's TLS
   and describes what is wrong.
2. `explain` describes an exception of Python's TLS, on a client or on a server.
3. Both functions only describe, and admit no peer. If a connection is made to read a certificate without verifying it,
   no request is sent on this connection.
4. A diagnosis makes at most three connections, one after the other. Each step of a connection takes at most the
   timeout.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.errors import reason
from kvstore.net.addresses import host_port
from kvstore.security.credentials import Credentials

TIMEOUT_SECONDS = 1.0
GRPC = ("h2",)
"""Application protocols (ALPN) that gRPC servers require; servers of other protocols ignore them."""

NO_CHECK_TIME = 0x200000  # OpenSSL's flag X509_V_FLAG_NO_CHECK_TIME, for which Python has no name
NOT_YET_VALID, EXPIRED, WRONG_HOST, WRONG_IP = 9, 10, 62, 64  # OpenSSL's numbers of these errors (X509_V_ERR_…)
UNKNOWN_ISSUER = (2, 18, 19, 20, 21)

PLAIN = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"}
)
"""OpenSSL's names of the errors that it reports when the peer has sent bytes that are not TLS."""

ALERTS = {
    "CERTIFICATE_REQUIRED": "it asks for a certificate",
    "UNKNOWN_CA": "the certificate shown is not signed by its authority",
    "CERTIFICATE_EXPIRED": "the certificate shown has expired",
    "CERTIFICATE_REVOKED": "the certificate shown is revoked",
    "UNSUPPORTED_CERTIFICATE": "the certificate shown is not for this use",
    "CERTIFICATE_UNKNOWN": "it does not accept the certificate shown",
    "BAD_CERTIFICATE": "it does not accept the certificate shown",
    "DECRYPT_ERROR": "it does not accept the certificate shown",
    "ACCESS_DENIED": "it does not accept the certificate shown",
    "HANDSHAKE_FAILURE": "no version or cipher is common to both ends, or it asks for a certificate",
    "PROTOCOL_VERSION": "no version of TLS is common to both ends",
    "NO_APPLICATION_PROTOCOL": "it speaks another protocol over TLS",
    "UNRECOGNIZED_NAME": "it has no certificate for that name",
}  # fmt: skip - the names of the alerts are those of RFC 8446, section 6.2


def explain(error: Exception) -> str:
    """Return a text that explains why a handshake failed, from the exception that one end got."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted: {error.verify_message}"
    name = str(getattr(error, "reason", None) or "")
    if name in PLAIN:
        return "the peer does not speak TLS"
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer shows no certificate, and one is asked for"
    for alert, meaning in ALERTS.items():
        if name.endswith(f"ALERT_{alert}"):
            return f"the peer has ended the handshake: {meaning}"
    if isinstance(error, ssl.SSLEOFError | ConnectionError):
        return "the peer has ended the connection during the handshake: it may not speak TLS, or not accept the certificate"
    if isinstance(error, TimeoutError):
        return "the peer has not answered the handshake in time: it may not speak TLS"
    return name.replace("_", " ").lower() or reason(error)


def diagnose_address(address: str, credentials: Credentials, **how: Any) -> str:
    """Return the result of `diagnose` for ``host:port``, and an empty string for other addresses."""
    try:
        host, port = host_port(address)
    except ValueError:
        return ""
    return diagnose(host, port, credentials, **how)


def diagnose(
    host: str,
    port: int,
    credentials: Credentials,
    *,
    field: str = "credentials",
    server_name: str = "",
    protocols: Sequence[str] = GRPC,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> str:
    """Return a text that explains why a client with these credentials gets no TLS connection.

    The result is empty if TLS is not the cause.

    Args:
        host: The server's host name or IP address.
        port: The server's port.
        credentials: The client's credentials. If they name no certificate authority (CA), the client uses no TLS.
        field: Path of the credentials in the settings; the text names fields by it, such as `credentials.authority`.
        server_name: The name that the server's certificate must have; empty: the host.
        protocols: The application protocols that the client offers (ALPN).
        timeout_seconds: Time limit of each step of a connection.
    """
    asked = _TlsProbe(host, port, credentials, field, server_name or host, tuple(protocols), timeout_seconds)
    try:
        return asked.cause()
    except _Unconnected:
        return ""  # the address does not answer at all, so TLS is not the cause


def fault_of_own(credentials: Credentials, *, field: str = "credentials") -> str:
    """Return the reason why peers will reject this process's own certificate.

    Return an empty text if the configured authority (CA) accepts the certificate, if no certificate or no authority is
    configured, or if a file cannot be read.
    """
    if not (credentials.certificate and credentials.authority):
        return ""
    refused = _refusal_of_own(credentials)
    if refused is None:
        return ""
    if refused.verify_code in UNKNOWN_ISSUER:
        return (
            f"{field}.certificate: {credentials.certificate} is not signed by the authority in {credentials.authority}"
        )
    return f"{field}.certificate: {credentials.certificate}: {refused.verify_message}"


class _Unconnected(Exception):
    """Raised if no process listens at the address, or if the process does not answer."""


class _TlsProbe:
    """Makes one diagnosis: connects with different TLS contexts and finds out at which step a connection fails."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        field: str,
        server_name: str,
        protocols: tuple[str, ...],
        timeout_seconds: float,
    ):
        self._host = host
        self._port = port
        self._credentials = credentials
        self._field = field
        self._server_name = server_name
        self._protocols = protocols
        self._timeout_seconds = timeout_seconds
        self._place = f"{host}:{port}"

    def cause(self) -> str:
        if not self._credentials.authority:
            return self._cause_without_tls()
        context, fault = self._context()
        if context is None:
            return fault
        try:
            with self._connection(context) as connection:
                return self._cause_after_handshake(connection)
        except ssl.SSLCertVerificationError as error:
            return self._cause_of_refusal(error)
        except (OSError, ValueError) as error:  # ValueError: the peer ended the connection during the handshake
            if _is_plain(error):
                return f"{self._place} does not speak TLS, and this client does: {self._field}.authority is set"
            return f"{self._place}: {explain(error)}{self._own_certificate() if _is_alert(error) else ''}"

    def _cause_without_tls(self) -> str:
        context = self._bare(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        speaks = f"{self._place} speaks TLS, and this client does not: set {self._field}.authority"
        try:
            with self._connection(context):
                return speaks
        except ssl.SSLError as error:
            return speaks if _is_alert(error) else ""
        except (OSError, ValueError):
            return ""

    def _context(self) -> tuple[ssl.SSLContext | None, str]:
        """Return the TLS context to connect with; if a file is unusable, return None and a text that names the file."""
        files = self._credentials
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(list(self._protocols))
        try:
            context.load_verify_locations(files.authority)
        except (OSError, ssl.SSLError) as error:
            return None, f"{self._field}.authority: {files.authority} holds no certificates: {reason(error)}"
        if not files.certificate:
            return context, ""
        try:
            context.load_cert_chain(files.certificate, files.key)
        except (OSError, ssl.SSLError) as error:
            return None, f"{self._field}.key: {files.key} is not the key of {files.certificate}: {reason(error)}"
        return context, ""

    def _bare(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(list(self._protocols))
        return context

    @contextlib.contextmanager
    def _connection(self, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
        try:
            plain = socket.create_connection((self._host, self._port), self._timeout_seconds)
        except OSError as error:
            raise _Unconnected from error
        with plain, context.wrap_socket(plain, server_hostname=self._server_name) as connection:
            yield connection

    def _cause_after_handshake(self, connection: ssl.SSLSocket) -> str:
        """Return why the server ended the connection after the handshake; an empty text if the connection is still open.

        With TLS 1.3, a server refuses the client's certificate only after the handshake.
        """
        try:
            ended = not connection.recv(1)
        except TimeoutError:
            return ""  # the server waits for a request
        except ssl.SSLError as error:
            return f"{self._place}: {explain(error)}{self._own_certificate()}"
        except ConnectionError:
            ended = True
        if not ended:
            return ""
        return f"{self._place} has ended the connection right after the handshake{self._own_certificate()}"

    def _own_certificate(self) -> str:
        """Return a text about what may be wrong with the client's own certificate; it forms the end of a sentence."""
        files = self._credentials
        if not files.certificate:
            return f"; this client shows no certificate: set {self._field}.certificate and {self._field}.key"
        refused = _refusal_of_own(files)
        if refused is None:
            return (
                f"; {self._field}.certificate: it does not accept {files.certificate}, although {files.authority} does"
            )
        if refused.verify_code in UNKNOWN_ISSUER:
            return (
                f"; {self._field}.certificate: {files.certificate} is not signed by the authority in {files.authority}"
            )
        return f"; {self._field}.certificate: {files.certificate}: {refused.verify_message}"

    def _cause_of_refusal(self, error: ssl.SSLCertVerificationError) -> str:
        """Return why this client refuses the server's certificate."""
        shown = self._shown()
        whose = f"the certificate of {self._place}"
        match error.verify_code:
            case code if code == EXPIRED:
                return f"{whose} expired on {shown.get('notAfter', 'a day before this one')}, or this clock is wrong"
            case code if code == NOT_YET_VALID:
                return f"{whose} is valid from {shown.get('notBefore', 'a later day')}, or this clock is wrong"
            case code if code in (WRONG_HOST, WRONG_IP):
                names = ", ".join(value for _, value in shown.get("subjectAltName", ())) or "no name"
                return f"{whose} is for {names}, not for {self._server_name}"
            case code if code in UNKNOWN_ISSUER:
                issuer = _name(shown.get("issuer", ()))
                signed = f" (it is signed by {issuer})" if issuer else ""
                return f"{whose} is not signed by the authority in {self._credentials.authority}{signed}"
            case _:
                return f"{whose} is not accepted: {error.verify_message}"

    def _shown(self) -> dict[str, Any]:
        """Return the fields of the server's certificate, as Python's `getpeercert` does; empty if it cannot be read.

        Python decodes only a trusted certificate. A first connection therefore reads the certificate without verifying
        it, and a second connection trusts it.
        """
        try:
            pem = self._unverified()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_verify_locations(cadata=pem)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
            context.set_alpn_protocols(list(self._protocols))
            self._show_own(context)
            with self._connection(context) as connection:
                return connection.getpeercert() or {}
        except (OSError, ValueError, _Unconnected):
            return {}

    def _show_own(self, context: ssl.SSLContext) -> None:
        """Add the client's own certificate to the context, so that the server does not log that it is missing."""
        if self._credentials.certificate:
            context.load_cert_chain(self._credentials.certificate, self._credentials.key)

    def _unverified(self) -> str:
        context = self._bare(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self._show_own(context)
        with self._connection(context) as connection:
            return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


def _is_plain(error: Exception) -> bool:
    return str(getattr(error, "reason", None)) in PLAIN


def _is_alert(error: Exception) -> bool:
    return "ALERT" in str(getattr(error, "reason", None))


def _name(parts: Sequence[Sequence[tuple[str, str]]]) -> str:
    return ", ".join(f"{key}={value}" for part in parts for key, value in part)


def _refusal_of_own(files: Credentials) -> ssl.SSLCertVerificationError | None:
    """Return the error with which the client's own authority refuses the client's certificate.

    Return None if the authority accepts the certificate, or if a file cannot be read. The certificate is tested by a
    handshake in memory, without a network connection.
    """
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    shows.check_hostname, shows.verify_mode = False, ssl.CERT_NONE
    try:
        for context in (asking, shows):
            context.load_cert_chain(files.certificate, files.key)
        asking.load_verify_locations(files.authority)
        asking.verify_mode = ssl.CERT_REQUIRED
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (shows.wrap_bio(to_client, to_server), asking.wrap_bio(to_server, to_client, server_side=True))
        for _ in range(FLIGHTS):
            for end in ends:
                _step(end.do_handshake)
    except ssl.SSLCertVerificationError as error:
        return error
    except OSError:
        return None
    return None


FLIGHTS = 4  # number of times that both ends take a step of the handshake in memory; two or three are needed


def _step(act: Callable[[], None]) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):
        act()
