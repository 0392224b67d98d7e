"""What operators may set about a router; each default says where it comes from."""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.ids import ModelName
from kvstore.credentials import Credentials

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0)]


class RouterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    router_id: Annotated[str, Meta(min_length=1)] = "router"
    """Told to workers; two routers of one cluster must differ."""

    http_listen: str = "127.0.0.1:8000"
    """host:port of the OpenAI API, health and metrics; port 0 takes a free one."""

    grpc_listen: str = "127.0.0.1:50051"
    """host:port of the gRPC API, and of the registry where workers announce themselves."""

    models: dict[ModelName, str] = {}
    """Folder with tokenizer and chat template, by served model name."""

    store: str = ""
    """gRPC address of the KV store node (``unix:/path`` or host:port); empty: there is none."""

    store_credentials: Credentials = Credentials()
    """What proves to a store node on another host that this router may watch it."""

    tenant_secret: str = ""
    """Key of the salts that keep tenants' blocks apart; equal on all routers of a cluster."""

    remote_prefill_min_tokens: Annotated[int, Meta(ge=0)] = 512
    """Prompt tokens that a decode worker would have to compute from which on a prefill worker does it instead.

    A chunk of prefill that long delays every stream of the decode worker by about one whole step, while the hand-off
    costs a few milliseconds; from there on the hand-off is the lesser evil."""

    prefer_direct: bool = False
    """Send blocks from engine memory to engine memory where both ways are open. Off: on CPUs the store is faster and
    steadier, and what went through it can be used again by everybody."""

    oversubscribe: Annotated[float, Meta(gt=0)] = 2.0
    """Requests given to a worker, over its batch size. Above 1, so that a batch refills without a round trip; a request
    that waits here instead can still be placed better, or be refused in time."""

    max_queued: Annotated[int, Meta(ge=0)] = 1024
    """Requests that wait when every worker is at its limit; with one more, the last of the tenant that has most waiting
    is refused with `queue_full`."""

    max_queue_seconds: PositiveSeconds = 60.0
    """A request that would wait longer, at the pace at which others have been leaving the queue, is refused at once."""

    priority_seconds: Annotated[float, Meta(ge=0)] = 10.0
    """What a step of priority is worth in waiting: a request goes before those of one step less that came up to so much
    earlier. Very much makes priority strict, 0 makes it nothing."""

    size_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """By how much each thousand prompt tokens put a request back in the queue. 0: first come, first served."""

    tenant_weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
    """Shares of the prompt tokens computed while requests wait, by tenant; who is not named has 1."""

    retry_after_ms: PositiveInt = 1000
    """The hint in refusals that a retry may undo."""

    max_attempts: PositiveInt = 3
    """Placements of one request: more failures than two in a row are the request's fault, not the workers'."""

    running_request_blocks: Annotated[float, Meta(ge=0)] = 1.0
    """What a request on a worker costs there besides its blocks, in blocks: its share of each decode step."""

    engine_hit_credit: Annotated[float, Meta(ge=0)] = 1.0
    """Credit for a block in the engine's own cache, in blocks of prefill."""

    store_hit_credit: Annotated[float, Meta(ge=0)] = 0.75
    """Credit for a block that has to be loaded from the store (NVIDIA Dynamo's weight of a host cache hit)."""

    lower_tier_hit_credit: Annotated[float, Meta(ge=0)] = 0.5
    """Credit for a block that the store has to fetch from below its memory first: SSD, Redis, another node."""

    max_store_blocks: PositiveInt = 2_000_000
    """Blocks of a store namespace that the index follows in each tier, about 250 bytes each; more are served but not seen."""

    explained_requests: PositiveInt = 1024
    """Latest requests whose placement can be explained."""

    heartbeat_timeout_seconds: PositiveSeconds = 3.0
    """A worker that sends nothing for so long is lost; workers report their load each second."""

    connect_timeout_seconds: PositiveSeconds = 5.0
    """From dialling a worker to its description."""

    max_reconnect_seconds: PositiveSeconds = 2.0
    """Longest pause between two attempts to reach a worker that is still a member; the first pause is 50 ms."""
