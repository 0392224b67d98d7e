"""Access to metrics: checks the key that scrapers send as `Authorization: Bearer KEY`.

Metrics name models, workers, tenants and pools. A port that other hosts reach therefore refuses all requests for metrics,
unless the settings name a key or set `open`. Routers have rules of their own (`RouterMetricsAccess` in
`fleet.router.settings.router`), and check keys by the same `MetricsGuard`.
"""

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.net.addresses import is_local

Sha256Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

SCHEME = "bearer "
LONGEST_KEY = 4096
CHALLENGE = ("WWW-Authenticate", "Bearer")
"""Header that an answer with the HTTP status 401 has to contain."""


class MetricsAccess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access to the metrics of a process."""

    key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each key that may read the metrics, in hex (``printf %s KEY | sha256sum``). Scrapers send the header
    ``Authorization: Bearer KEY``."""

    open: bool = False
    """Let everybody who reaches the port read the metrics. If this is false and there is no key, only a port on loopback
    answers."""

    def __post_init__(self) -> None:
        if self.open and self.key_sha256:
            raise ValueError(
                "metrics_access.open: contradicts key_sha256: with a key, only its holders read the metrics"
            )


class MetricsTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of a port for metrics. The files are read again when they change."""

    certificate: str = ""
    """PEM file of the certificate and of the intermediate certificates up to its authority. Empty: the port does not speak
    TLS."""

    key: str = ""
    """PEM file of the certificate's private key."""

    client_authority: str = ""
    """PEM file of authorities, one of which must have signed a scraper's certificate (mTLS). Empty: scrapers need no
    certificate."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("metrics_tls.key: certificate and key go together")
        if self.client_authority and not self.certificate:
            raise ValueError("metrics_tls.client_authority: needs certificate and key")


class MetricsGuard:
    """Decides for each request at one listener whether it may read the metrics."""

    def __init__(self, keys: tuple[str, ...], *, asks: bool) -> None:
        """Create the guard.

        Args:
            keys: SHA-256 of each key, in hex.
            asks: True if each request has to show a key.
        """
        self._keys = frozenset(keys)
        self._asks = asks

    @classmethod
    def of(cls, access: MetricsAccess, listen: str) -> "MetricsGuard":
        """Return the guard of a listener.

        If there are keys, each request has to show one. Without keys, everybody may read the metrics if the address is
        on loopback or `open` is set; otherwise nobody may.
        """
        return cls(access.key_sha256, asks=bool(access.key_sha256) or not (access.open or is_local(listen)))

    def refusal(self, authorization: str) -> str:
        """Return why a request may not read the metrics; empty if it may.

        Args:
            authorization: The header ``Authorization`` of the request; empty if it has none.
        """
        if not self._asks:
            return ""
        if not self._keys:
            return "metrics are closed here: set metrics_access.key_sha256 in the settings, and send that key"
        if not authorization:
            return "metrics need a key: send Authorization: Bearer KEY, with a key of metrics_access.key_sha256"
        scheme, key = authorization[: len(SCHEME)].lower(), authorization[len(SCHEME) :].strip()
        known = scheme == SCHEME and len(key) <= LONGEST_KEY and _digest(key) in self._keys
        return "" if known else "the key is none of metrics_access.key_sha256"


OPEN_METRICS = MetricsGuard((), asks=False)
"""A guard that lets everybody read the metrics."""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
