"""Certificate files of one end of TLS: certificate, key and authority. Renewed files are read again.

Rules:

1. When the content of the files is needed, the files are first checked for changes, but at most once in `look_seconds`.
   Handshakes after a renewal therefore use the new certificate. Open connections are not interrupted.
2. If changed files cannot be used, this is logged once, and the earlier content stays in use. Files cannot be used if
   one is missing, empty, too large, a pipe or not PEM, if the key belongs to another certificate, or if the certificate
   has expired or is not valid yet. Files that are being written can look like this, so they are checked again until
   they can be used.
3. When the files are checked, the log warns of a certificate that ends within `warning_seconds`, at most once a day.
4. All classes here may be used by several threads.
"""

import asyncio
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Never

from cryptography import x509
from msgspec import Struct
from prometheus_client.core import Metric

from kvstore.clock import Clock, nanos
from kvstore.errors import BadCredentials
from kvstore.metric_definitions import GaugeDefinition, MetricDefinition
from kvstore.security.credentials import Credentials
from kvstore.system_clock import MonotonicClock, unix_seconds

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 20  # maximum size of a certificate file; a bundle of all public authorities has about 250 KiB
LOOK_SECONDS = 1.0
WATCH_SECONDS = 10.0
DAY_SECONDS = 86_400.0
WARNING_SECONDS = 14 * DAY_SECONDS
"""The log warns of a certificate that ends within this time. Certificates are usually renewed 30 days before their end,
so a warning means that a renewal has failed."""

CERTIFICATE_END = GaugeDefinition(
    "fleet_tls_certificate_end_timestamp_seconds",
    "End of the certificate in use that a section of the settings names, in Unix time",
    ("setting",),
)
RENEWAL_REFUSED = GaugeDefinition(
    "fleet_tls_renewal_refused",
    "1 while the files that a section of the settings names cannot be used and the former content stays in use",
    ("setting",),
    "0 or 1",
)
METRICS: Sequence[MetricDefinition] = (CERTIFICATE_END, RENEWAL_REFUSED)
"""Metrics that every process with certificates has under the same names, so that one alert covers all processes."""


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, as an opener for Python's `open`; if the file is a pipe, do not wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _say_nothing(_level: int, _message: str, **_more: object) -> None:
    """Do nothing. This function takes the place of the log if `logs` is false."""


class PemContent(Struct, frozen=True, kw_only=True):
    """Content of the certificate files. The content is empty for a file that the settings do not name."""

    certificate: bytes = b""
    key: bytes = b""
    authority: bytes = b""

    def __repr__(self) -> str:
        return "PemContent(…)"  # the key is a secret


class CertificateFiles:
    """Reads the certificate files of one end of TLS connections, and holds the content that is in use."""

    def __init__(
        self,
        *,
        certificate: str = "",
        key: str = "",
        authority: str = "",
        field: str = "credentials",
        authority_field: str = "authority",
        warning_seconds: float = WARNING_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        logs: bool = False,
        clock: Clock | None = None,
        wall_seconds: Callable[[], float] = unix_seconds,
    ) -> None:
        """Read the files.

        Args:
            certificate: PEM file of the certificate and of the intermediate certificates up to the authority; empty:
                none.
            key: PEM file of the certificate's private key.
            authority: PEM file of the authorities that sign the peer's certificates; empty: none.
            field: Name of the settings section that names the files. Messages use it.
            authority_field: Name that the section gives to the field of `authority`. Messages use it.
            warning_seconds: The log warns if the certificate expires within this time.
            look_seconds: Minimum time between two checks whether the files have changed.
            logs: True if renewals, refused renewals and expiring certificates are logged. If several objects read the
                same files, only one of them should log.
            clock: The clock that `look_seconds` refers to; None: the system's.
            wall_seconds: Returns the wall clock's time, in seconds of Unix time.

        Raises:
            BadCredentials: A file cannot be read, is too large, or is a pipe; the message names its field.
        """
        self.field = field
        self._paths = {"certificate": certificate, "key": key, "authority": authority}
        self._names = {"certificate": "certificate", "key": "key", "authority": authority_field}
        self._warning_seconds = warning_seconds
        self._look_interval = nanos(look_seconds)
        self._log = log.log if logs else _say_nothing
        self._clock = clock or MonotonicClock()
        self._wall_seconds = wall_seconds
        self._lock = threading.Lock()
        self._looked_at = self._clock.now()
        self._version = self._file_version()
        self._pem = self._read()
        self._generation = 0
        self._refused = ""  # the last logged refusal (version of the files, and cause); empty if there is none
        self._warned_at = float("-inf")
        self._end = _end_of(self._pem.certificate)
        self._note_end()

    @property
    def pem(self) -> PemContent:
        """The content in use; after a renewal, the new content (rule 1)."""
        return self.latest()[1]

    def latest(self) -> tuple[int, PemContent]:
        """Return the content in use, and a number that is higher after each renewal."""
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at >= self._look_interval:
                self._looked_at = now
                self._renew()
            return self._generation, self._pem

    def look(self) -> bool:
        """Check now whether the files were renewed; return True if their new content is in use from now on."""
        with self._lock:
            self._looked_at = self._clock.now()
            return self._renew()

    def require_usable(self) -> None:
        """Raise BadCredentials if the content in use is unusable, such as a key that belongs to another certificate."""
        self._check(self._pem)

    @property
    def ends_at(self) -> float | None:
        """The end of the certificate in use, in seconds of Unix time; None without a certificate."""
        return None if self._end is None else self._end.timestamp()

    @property
    def renewal_refused(self) -> bool:
        """True while the files have changed and their new content cannot be used."""
        return bool(self._refused)

    def _renew(self) -> bool:
        self._note_end()
        version = self._file_version()
        if version == self._version:
            self._refused = ""
            return False
        try:
            pem = self._read()
            if self._file_version() != version:
                return False  # a file is being written now; the next check reads it again
            self._check(pem)
            self._check_time(pem)
        except BadCredentials as error:
            if (refused := f"{version} {error}") != self._refused:
                self._refused = refused
                self._log(
                    logging.WARNING,
                    "renewed certificate cannot be used, the old one stays",
                    extra={"cause": str(error)},
                )
            return False
        self._pem, self._version, self._refused = pem, version, ""
        self._end, self._warned_at = _end_of(pem.certificate), float("-inf")
        self._generation += 1
        ends = {} if self._end is None else {"ends": self._end.isoformat()}
        self._log(
            logging.INFO,
            "certificate renewed",
            extra={"setting": self.field, "certificate": self._paths["certificate"], **ends},
        )
        self._note_end()
        return True

    def _file_version(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in self._paths.values():
            try:
                state = Path(path).stat() if path else None
            except OSError:
                state = None
            found.append(state and (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))
        return tuple(found)

    def _read(self) -> PemContent:
        return PemContent(**{name: self._content(name, path) for name, path in self._paths.items()})

    def _content(self, name: str, path: str) -> bytes:
        if not path:
            return b""
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                    raise BadCredentials(f"{self._place(name)}: {path} is a pipe, which cannot be read again")
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise BadCredentials(f"{self._place(name)}: {path} cannot be read: {error.strerror}") from error
        if len(content) > MOST_BYTES:
            raise BadCredentials(f"{self._place(name)}: {path} has more than {MOST_BYTES} bytes")
        return content

    def _place(self, name: str) -> str:
        return f"{self.field}.{self._names[name]}"

    def _check(self, pem: PemContent) -> None:
        """Raise BadCredentials if a file has no certificates, or the key belongs to another certificate (rule 2)."""
        if self._paths["certificate"]:
            self._certificates("certificate", pem.certificate)
            try:
                load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem)
            except OSError as error:
                raise BadCredentials(
                    f"{self._place('key')}: {self._paths['key']} is not the private key of {self._paths['certificate']}, or one of them is no PEM file:"
                    f" {error}"
                ) from error
        if self._paths["authority"]:
            self._certificates("authority", pem.authority)

    def _check_time(self, pem: PemContent) -> None:
        """Raise BadCredentials if the certificate has expired or is not valid yet (rule 2)."""
        if not pem.certificate:
            return
        own, now = (
            x509.load_pem_x509_certificates(pem.certificate)[0],
            datetime.fromtimestamp(self._wall_seconds(), UTC),
        )
        if not own.not_valid_before_utc <= now < own.not_valid_after_utc:
            raise BadCredentials(
                f"{self._place('certificate')}: {self._paths['certificate']} is valid from {own.not_valid_before_utc.isoformat()}"
                f" to {own.not_valid_after_utc.isoformat()}, and not now"
            )

    def _certificates(self, name: str, content: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(content)
        except ValueError as error:
            raise BadCredentials(f"{self._place(name)}: {self._paths[name]} holds no certificates: {error}") from error

    def _note_end(self) -> None:
        """Log a warning, at most once a day, if the certificate ends soon or has ended (rule 3)."""
        if self._end is None:
            return
        now = self._wall_seconds()
        remaining = self._end.timestamp() - now
        if remaining > self._warning_seconds or now - self._warned_at < DAY_SECONDS:
            return
        self._warned_at = now
        self._log(
            logging.WARNING,
            "certificate has ended" if remaining <= 0 else "certificate ends soon",
            extra={"setting": self.field, "certificate": self._paths["certificate"], "ends": self._end.isoformat()},
        )


class RenewedContext:
    """Makes TLS contexts of Python's `ssl` with the content of certificate files that is in use."""

    def __init__(self, files: CertificateFiles, prepare: Callable[[], ssl.SSLContext]) -> None:
        """Build the context.

        Args:
            files: The certificate files.
            prepare: Returns a new context without certificates.

        Raises:
            OSError: The content is not PEM, or the key belongs to another certificate (`ssl.SSLError`).
        """
        self._files = files
        self._prepare = prepare
        self._generation, pem = files.latest()
        self._context = self._build(pem)

    @property
    def current(self) -> ssl.SSLContext:
        """The context for the next handshake; after a renewal of the files, a new one."""
        generation, pem = self._files.latest()
        if generation != self._generation:
            self._generation, self._context = generation, self._build(pem)
        return self._context

    def built(self) -> ssl.SSLContext:
        """Return a new context for a caller that changes it, because connections share the context of `current`."""
        return self._build(self._files.pem)

    def _build(self, pem: PemContent) -> ssl.SSLContext:
        context = self._prepare()
        if pem.certificate:
            load_chain(context, pem)
        if pem.authority:
            context.load_verify_locations(cadata=pem.authority.decode("ascii", "ignore"))
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def load_chain(context: ssl.SSLContext, pem: PemContent) -> None:
    """Give a context the certificate and the key, which Python reads from files only.

    Raises:
        OSError: The content is not PEM, or the key has a passphrase or belongs to another certificate.
    """
    with _memory_file(pem.certificate) as certificate, _memory_file(pem.key) as key:
        try:
            # An empty passphrase is passed, because Python would ask for one on the terminal otherwise.
            context.load_cert_chain(certificate, key, password=lambda: b"")
        except ValueError as error:
            raise OSError(str(error)) from error


@contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """Write the content to a file in memory, and yield the path of this file while the context is open."""
    with closing(os.fdopen(os.memfd_create("pem"), "wb")) as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _end_of(certificate: bytes) -> datetime | None:
    try:
        return x509.load_pem_x509_certificates(certificate)[0].not_valid_after_utc
    except ValueError:
        return None


class CertificateWatch:
    """Checks certificate files regularly, even if no connection uses them.

    So the log and the metrics show a certificate that ends soon, and a renewal that cannot be used.
    """

    def __init__(self, several: Sequence[CertificateFiles]) -> None:
        """Create the watch. The caller has to start `run`, and to register the watch with a metrics registry."""
        self._several = several

    @classmethod
    def of(cls, sections: Mapping[str, Credentials], also: Sequence[CertificateFiles] = ()) -> "CertificateWatch":
        """Return a watch of the certificate files that these settings sections name, and of more files.

        Raises:
            BadCredentials: A file cannot be used; the message names its field. The files are checked here, because
                gRPC's library would only report that it cannot bind the address.
        """
        named = [
            CertificateFiles(
                certificate=each.certificate, key=each.key, authority=each.authority, field=section, logs=True
            )
            for section, each in sections.items()
            if each.certificate or each.authority
        ]
        for each in named:
            each.require_usable()
        return cls([*also, *named])

    async def run(self) -> Never:
        """Check the files for renewals every `WATCH_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.look()

    def look(self) -> None:
        """Check all files for renewals, except files that were checked less than `look_seconds` ago (rule 1)."""
        for each in self._several:
            each.latest()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client expects."""
        ends = {(each.field,): each.ends_at for each in self._several}
        yield CERTIFICATE_END.samples({labels: end for labels, end in ends.items() if end is not None})
        yield RENEWAL_REFUSED.samples({(each.field,): float(each.renewal_refused) for each in self._several})
