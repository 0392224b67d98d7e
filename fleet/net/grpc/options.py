"""Channel and server options of all gRPC connections."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Maximum size of a message between parts of Fleet. A prompt of a million tokens has 4 MiB; messages with KV events are
far smaller.
"""

PING_TIMEOUT_MS: Final = 3_500

PING_TIMEOUT: Final = (
    # Since release 1.60, the library has a separate setting for the time in which an idle connection must answer a
    # ping; its default is a minute. Older releases have only the keepalive timeout.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
)
"""Options that close a connection whose peer leaves a ping unanswered for `PING_TIMEOUT_MS`."""

_KEEPALIVE: Final = (
    # A hung peer (SIGSTOP, pulled cable) is noticed within eight seconds, if no heartbeat notices it sooner:
    # 4.5 seconds until the next ping, and 3.5 seconds for its answer.
    ("grpc.keepalive_time_ms", 4_500),
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
"""Options for callers that reconnect by themselves: the channel shares no connection, so gRPC's backoff after another
channel's failure does not delay their next attempt.
"""

BLOCKING_CHANNEL_OPTIONS: Final = (*CHANNEL_OPTIONS, ("grpc.enable_retries", 0))
"""Options for channels of `grpc` instead of `grpc.aio`: gRPC's own retries are off. With retries, release 1.85 sometimes loses
two of the three completion events of a streaming call whose connection fails. The thread that reads the stream then waits for ever,
beyond the call's deadline. This was measured while a server restarted: in 1 of about 120 failed calls with retries, and in
none of 1,450 without them.
"""

LONGEST_REQUEST_BYTES: Final = 9 << 20
"""Maximum size of a message that a server reads.

It exceeds `fleet.net.grpc.calls.MAX_REQUEST_BYTES`: a message between the two sizes gets a typed error. The server rejects a
larger message as soon as its length is known, before the message takes memory.
"""

_SERVER: Final = (
    # By default, the library rejects calls at random when more than a thousand wait to start. Each waiting call takes
    # about 15 KiB, even if it was cancelled, so with these limits a client can occupy about a quarter of a GiB.
    ("grpc.server.max_pending_requests", 8_192),
    ("grpc.server.max_pending_requests_hard_limit", 16_384),
    ("grpc.max_concurrent_streams", 8_192),  # maximum number of calls at a time on each connection
    ("grpc.max_receive_message_length", LONGEST_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # This minimum is far below the clients' keepalive time, because a busy machine may read two pings shortly after each other.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    *_KEEPALIVE,
)

SERVER_OPTIONS: Final = (*_SERVER, ("grpc.so_reuseport", 0))
"""With these options, binding a port that is in use is an error."""

SHARED_SERVER_OPTIONS: Final = (*_SERVER, ("grpc.so_reuseport", 1))
"""With these options several processes listen on one port, and the kernel spreads connections over them."""


def frontend_server_options(*, shared: bool, connection_seconds: float) -> tuple[tuple[str, int], ...]:
    """Return the options of a server for clients and gateways.

    A client is asked to reconnect after `connection_seconds`; 0 sets no limit.
    """
    options = SHARED_SERVER_OPTIONS if shared else SERVER_OPTIONS
    if not connection_seconds:
        return options
    return (*options, ("grpc.max_connection_age_ms", round(connection_seconds * 1000)))
