"""Settings of tracing, which routers, workers and store nodes share."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from kvstore.net.addresses import refuse_credentials, refuse_plain_key

Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class TracingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces in the format of OpenTelemetry (OTLP). They need the package fleet-serving with its extra `tracing`."""

    endpoint: str = ""
    """URL of the collector, such as ``http://127.0.0.1:4317`` for gRPC or ``http://127.0.0.1:4318/v1/traces`` for HTTP. With ``https``
    the connection is encrypted. Empty: nothing is traced."""

    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC, or over HTTP with protobuf."""

    headers: dict[str, str] = {}
    """Headers of each export, such as a key of the collector."""

    headers_file: str = ""
    """File with further headers, such as a mounted Kubernetes Secret. It has one line ``name: value`` for each header, is
    read at the start, and must not repeat a header of `headers`. Empty: no file."""

    insecure: bool = False
    """Allow sending the headers (`headers` and `headers_file`) over http, without encryption, to another host. Set this only
    for networks to which nobody else has access."""

    certificate: str = ""
    """File with the certificate of the authority (CA) that signed the certificate of a collector with ``https``; empty:
    the authorities that the machine trusts are used."""

    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the requests without a `traceparent` that are traced. The trace id decides whether a request is traced,
    so that all routers decide alike."""

    follow_clients: bool = True
    """True if the `traceparent` of a client says whether its request is sampled. If false, `sample_ratio` decides, and the
    client's trace id is kept."""

    keep_errors: bool = True
    """True if requests that fail are traced even if they are not sampled. A cancellation by the client does not count
    as a failure. A request that was rejected before its answer began does not count either, if its reason is
    `draining`, or if it got HTTP 4xx for another reason than `kv_mismatch`. Requests whose deadline passed before their
    first token are traced only if they were slow, or if fewer than half of `most_waiting` requests wait for the
    collector."""

    slow_first_token_seconds: Seconds = 10.0
    """Requests whose first token takes longer than this are traced even if they are not sampled. 0: no request is
    traced for this reason. The default is the longest latency target for a first token in common use."""

    slow_seconds: Seconds = 60.0
    """Requests that take longer than this in total are traced even if they are not sampled. 0: no request is traced for
    this reason. Common answers of 500 tokens take up to half of the default."""

    baggage: tuple[Annotated[str, Meta(min_length=1, max_length=128)], ...] = ()
    """Keys of the header `baggage` that become attributes of the request's span, such as ``session.id``. Other keys are
    ignored."""

    export_seconds: Annotated[float, Meta(ge=0.01, le=60)] = 1.0
    """Pause between two exports. Each export sends the spans that have ended since the last one."""

    timeout_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    """Time limit for one export, including its retries. Spans that the collector has not taken by then are dropped and
    counted."""

    most_waiting: Annotated[int, Meta(ge=1, le=1 << 20)] = 2048
    """Maximum number of ended requests (on workers: ended attempts; on store nodes: ended calls) whose spans wait for
    the collector. Each takes a few KB. The spans of further requests are dropped and counted."""

    def __post_init__(self) -> None:
        if not self.endpoint:
            return
        refuse_credentials("endpoint", self.endpoint, "headers_file")
        parts = urlsplit(self.endpoint)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ValueError(f"endpoint: {self.endpoint!r} must be http://host:port or https://host:port")
        if self.protocol == "grpc" and parts.path not in ("", "/"):
            raise ValueError(f"endpoint: {self.endpoint!r} has a path, which gRPC does not use; leave it out")
        if self.certificate and parts.scheme != "https":
            raise ValueError("certificate: is for https, and `endpoint` says http; change one of them")
        names = set()
        for name, value in self.headers.items():
            if not is_header(name, value):
                raise ValueError(f"headers: {name!r} and its value must be printable ASCII")
            if name.lower() in names:
                raise ValueError(
                    f"headers: {name!r} is there twice, since case does not count; leave out one of the two"
                )
            names.add(name.lower())
        if (self.headers or self.headers_file) and not self.insecure:
            field = "headers" if self.headers else "headers_file"
            refuse_plain_key("endpoint", self.endpoint, field, "insecure")

    @property
    def is_on(self) -> bool:
        return bool(self.endpoint)


def is_header(name: str, value: str) -> bool:
    """Return whether a header can be sent: printable ASCII, and a name without spaces."""
    return bool(name) and " " not in name and (name + value).isascii() and (name + value).isprintable()
