"""Settings of the Redis tier."""

from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from msgspec import Meta

from kvstore.tiers.settings import TierSettings

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
)  # fmt: skip - other options of the client library are refused, because some change deadlines or replies


class RedisSettings(TierSettings, frozen=True, kw_only=True, tag="redis"):
    """Settings of a tier in Redis or Valkey. A wrong field raises a `ValueError` that names it and never shows the URL."""

    url: str
    """``redis://[user[:password]@]host[:port][/db]``, ``rediss://…`` with TLS, or ``unix:///path[?db=N]``. The query
    may contain `URL_OPTIONS`: db, client_name, and for TLS ssl_ca_certs, ssl_certfile, ssl_keyfile and others."""

    password_file: str = ""
    """File with the password, such as a mounted Kubernetes Secret; only for a `url` without a password. The node reads
    the file for each new connection. Empty: no file."""

    key_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")] = "fleet"
    """Prefix of all keys, so that several deployments can share a server."""

    ttl_seconds: Annotated[float, Meta(ge=0, le=10 * 365 * 86400)] = 0
    """Lifetime of a block after it was written. 0: the block stays until the server evicts it."""

    connections: Annotated[int, Meta(ge=1, le=64)] = 4
    """Maximum number of connections at a time; further calls wait for one of them. A node has four threads for a tier, and
    a server has one thread, so more connections hardly help."""

    in_flight_bytes: Annotated[int, Meta(ge=1 << 16)] = 8 << 20
    """Maximum number of bytes that are requested or sent on a connection before their answers arrive; one block is always
    allowed. This limits the memory that the server needs for buffers."""

    connect_seconds: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """Time limit to connect and authenticate; less if the deadline of the call is nearer."""

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
            raise ValueError("password_file: the url already holds a password; set only one of them")

    @property
    def place(self) -> str:
        """The URL without its credentials."""
        url = urlsplit(self.url)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    def __repr__(self) -> str:
        return f"RedisSettings({self.place!r}, key_prefix={self.key_prefix!r})"
