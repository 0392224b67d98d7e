"""How our gRPC connections behave, the same on both sides."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 << 20
"""A prompt of a million tokens has 4 MiB; chunks of KV events stay far below."""

PING_TIMEOUT_MS: Final = 5_000

PING_TIMEOUT: Final = (
    # The library waits this long for the answer to a ping that checks an idle transport. Its default is a minute, and since 1.60 or so
    # the keepalive timeout does not shorten it. Older releases know only the keepalive timeout.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
)
"""Milliseconds for which a peer may leave a ping unanswered before the connection is closed."""

_KEEPALIVE: Final = (
    # A peer that hangs (SIGSTOP, pulled cable) is noticed within ten seconds where no heartbeat says it sooner: five until the
    # next ping, five for its answer.
    ("grpc.keepalive_time_ms", 5_000),
    *PING_TIMEOUT,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit
)

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *_KEEPALIVE,
)

SEPARATE_CHANNEL_OPTIONS: Final = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""For whoever dials again by itself: a broken connection must not make the next attempt wait for gRPC's own back-off."""

LONGEST_REQUEST_BYTES: Final = 9 << 20
"""What a server takes in at all, above `fleet.net.grpc.calls.MAX_REQUEST_BYTES`: up to here what is too large is told so in
our words, and beyond the library refuses it before the memory is taken."""

_SERVER: Final = (
    # The library refuses calls at random, without a word, where more than a thousand begin before it takes them up. Each takes
    # some 15 KiB until then, also when it was cancelled at once, so a client can bring about a quarter of a GiB.
    ("grpc.server.max_pending_requests", 8_192),
    ("grpc.server.max_pending_requests_hard_limit", 16_384),
    ("grpc.max_concurrent_streams", 8_192),  # of one connection
    ("grpc.max_receive_message_length", LONGEST_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),  # below the client's keepalive time
    *_KEEPALIVE,
)

SERVER_OPTIONS: Final = (*_SERVER, ("grpc.so_reuseport", 0))
"""A port in use is an error."""

SHARED_SERVER_OPTIONS: Final = (*_SERVER, ("grpc.so_reuseport", 1))
"""Several processes listen on one port, and the kernel spreads connections over them."""


def frontend_server_options(*, shared: bool, connection_seconds: float) -> tuple[tuple[str, int], ...]:
    """Of a server for gateways, whose connections last as long as those of clients.

    Args:
        shared: Whether other processes may listen on the same port.
        connection_seconds: How long a connection lasts before the client is asked to make another, give or take a tenth; calls that
            run go on. 0: for as long as the client likes.
    """
    options = SHARED_SERVER_OPTIONS if shared else SERVER_OPTIONS
    if not connection_seconds:
        return options
    return (*options, ("grpc.max_connection_age_ms", round(connection_seconds * 1000)))
