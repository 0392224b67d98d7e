"""Router settings: the options of a router. The text of an option also says why it has its default."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from fleet.core.discovery import Discovery
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName
from fleet.net.settings import KIB, MIB, ClientTlsSettings, GrpcSettings, HttpSettings
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.images import ImageSettings
from fleet.router.settings.overflow import OverflowSettings
from fleet.router.tenants import TenantSettings
from kvstore.net.addresses import check_listen_address, is_plain_hop, refuse_credentials, refuse_plain_key, unix_path
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import Sha256Hex
from kvstore.tracing.settings import TracingSettings


class SelectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of `Select` in the gRPC service `fleet.v1.Selection`: for the leases on workers that it gives, and its wait for a worker."""

    max_lease_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 60_000
    """The longest lease in milliseconds; a request for a longer one is refused. Each report of the caller renews the lease, so a lease need
    not be longer than the pause between two reports. The capacity that a dead caller has reserved is free again when its leases end."""

    max_wait_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 60_000
    """The longest wait of `Select` in milliseconds while all workers are busy; a request for a longer wait is refused."""

    caller_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of a model's places (batch sizes times `oversubscribe`) that all leases of one caller together may hold. With `oversubscribe` 2,
    half of the places are as many as all batches together: one caller can keep the workers busy, and requests of others still find a
    place. Each caller may always hold one lease."""

    max_leases: Annotated[int, Meta(ge=1, le=1 << 20)] = 65_536
    """Maximum number of leases of all callers together; further selections are rejected. Each lease takes about 2 KB."""


Degree = Annotated[int, Meta(ge=1, le=1 << 20)]


class ProfileSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware, model and engine of one kind of worker."""

    model: Annotated[str, Meta(min_length=1)]
    """Folder of the model with its Hugging Face config.json, or the path of that file."""

    gpu: Annotated[str, Meta(min_length=1)]
    """Short name of the GPU, as listed by `fleet hardware list`."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """The engine of the workers. The predicted step times use the efficiencies that were measured with this engine."""

    tp: Degree = 1
    """Tensor parallelism: number of GPUs that split the attention heads and the dense layers among them."""

    pp: Degree = 1
    """Pipeline parallelism: number of stages into which the layers are divided."""

    dp: Degree = 1
    """Data parallelism of the attention: number of groups of `tp` GPUs that compute the attention of different requests."""

    ep: Degree = 1
    """Expert parallelism: 1 (each GPU has a slice of every expert), or `tp` times `dp` (each GPU has whole experts)."""

    step_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] = 8192
    """Maximum number of prompt tokens that the engine computes in one step."""


PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]

COMPARED_TOKENS = 64
"""Minimum number of tokens of the pieces in which a prompt is compared with earlier prompts, if the server does not report its cache block
by block. Smaller pieces would cost memory and time without any use."""


ENDPOINT = r"^(tcp://([^*:\s]+|\[[^\]\s]+\]):[0-9]{1,5}|ipc://\S+)?$"
"""Pattern of a ZeroMQ endpoint to which the router connects, or of an empty text. A wildcard host (``*``) is not allowed, because only a
listener can use it."""


ExternalPath = Annotated[str, Meta(pattern=r"^/([^*?#\s]*|([^*?#\s]*/)?\*)$")]

DEFAULT_EXTERNAL_PATHS = (
    "/v1/*",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/v2/embed",
)
"""Default of `external_paths`, the paths of external servers that clients may reach: the API of OpenAI, and the paths outside of ``/v1`` by
which clients use vLLM."""


class OpenAiWorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks the OpenAI API and knows nothing of Fleet, such as vLLM, llama.cpp or a hosted service."""

    worker_id: Annotated[str, Meta(min_length=1)]
    """The name of the server in metrics, logs and explanations; each server needs a name of its own."""

    url: str
    """URL of the server: ``http://host:port`` or ``https://host``, with the path before ``/v1`` if there is one."""

    model: Annotated[str, Meta(min_length=1)]
    """The model name that clients send, and under which the server knows the model."""

    tokenizer: str = ""
    """Hugging Face folder or repository of the server's model. The router tokenizes prompts with it, to find the beginning that a prompt has
    in common with prompts in the server's cache. Empty: the router compares the text instead; `kv_events` needs a tokenizer."""

    block_tokens: PositiveInt = 16
    """The server's block size in tokens. Without `kv_events`, prompts are compared in pieces of at least 64 tokens. If they are compared as
    text, 4 bytes count as a token."""

    kv_blocks: PositiveInt = 100_000
    """Number of blocks that the server's prefix cache can hold; the router never assumes that more are cached."""

    max_running: PositiveInt = 256
    """Maximum number of requests in one batch of the server. The default is vLLM's."""

    adapters: tuple[Annotated[ModelName, Meta(min_length=1)], ...] = ()
    """LoRA adapters that the server serves, by the names that clients send in place of a model name."""

    api_key: str = ""
    """Bearer token for the server, instead of the client's token; empty: the client's token is passed on, over http to another host
    only with `insecure`."""

    insecure: bool = False
    """Allow sending `api_key` or the clients' tokens over http, without encryption, to another host. If off, a router that would send an
    `api_key` in this way does not start, and clients' tokens are left out of requests to this server. Set this only for networks to which
    nobody else has access."""

    kv_events: Annotated[str, Meta(pattern=ENDPOINT)] = ""
    """ZeroMQ endpoint where vLLM or SGLang publishes its KV events (``tcp://host:port``). With an endpoint, `block_tokens` must be the
    server's own block size (SGLang: ``--page-size``). Empty: prompts that were sent to the server are assumed to be cached."""

    kv_events_replay: Annotated[str, Meta(pattern=ENDPOINT)] = ""
    """Endpoint where the server repeats its KV events (vLLM's `replay_endpoint`). Empty: the router does not know the blocks that the server
    cached before the router connected to it, and after a lost event it forgets all blocks of the server."""

    cache_ttl_seconds: PositiveSeconds = 600.0
    """Without `kv_events`: how long a prompt is assumed to be cached after it was sent."""

    health_path: Annotated[str, Meta(pattern="^/")] = "/health"
    """Path of the health check. The router asks for it while it receives nothing else from the server. It asks a server without such a path
    for ``/v1/models``."""

    probe_seconds: PositiveSeconds = 2.0
    """Pause between two health checks; it is at most 0.25 s while the server gets no new requests. The time limit for an answer is this
    setting, or `RouterSettings.connect_timeout_seconds` if that is longer."""

    silence_factor: Annotated[float, Meta(ge=1, le=1000)] = 8.0
    """Silence limit, as a multiple of the expected time to the first byte. This expected time is the one within which 95 % of the server's
    first bytes came. A server with waiting requests that sends no byte for longer than this limit leaves rotation, if it has not answered a
    trial request either, and another server of its model works. The trial request is sent after twice the expected time. The default is
    eight, so that neither a load that doubles twice nor an uncached prompt counts as a hang."""

    silence_floor_seconds: Annotated[float, Meta(ge=0.01, le=3600)] = 1.0
    """Silences shorter than this never count as a hang, however fast a server was before. The default is longer than garbage collection, a
    busy core or a retransmission take (some hundreds of milliseconds), and not longer than clients wait before they give up."""

    silence_timeout_seconds: PositiveSeconds = 600.0
    """The upper limit of silence: a request that has got no byte for this time ends on this server, however slow the server was before. It
    starts on another server if its client has got no part of the answer. The limit also applies before the server's first answer, for
    example while it loads its model. The default is ten minutes, because model loads and long answers in one piece take minutes."""

    silence_cut_seconds: PositiveSeconds = 30.0
    """Time without a byte after which an answer that has begun ends, if the server has not answered a trial request either; at least the
    silence limit. No other server can continue an answer that has begun, so a server that was only stopped for a moment gets this time to
    go on. The time also applies to a request that no other server can take."""

    trial_requests: bool = True
    """True if a silent server is asked for a completion of one token, on a separate connection and with `api_key`. If off, a server leaves
    rotation when about three requests have waited too long for a byte, and returns after a pause to be tried with clients' requests."""

    def __post_init__(self) -> None:
        refuse_credentials("url", self.url, "api_key")
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:  # the port is invalid, or no resolver would accept the name
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ValueError(f"url: {self.url!r} must be http://host:port or https://host:port")
        if any(not " " < character < "\x7f" for character in self.url + self.api_key):
            raise ValueError("url and api_key: only printable ASCII without spaces is allowed")
        if self.api_key and not self.insecure:
            refuse_plain_key("url", self.url, "api_key", "insecure")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay: needs kv_events")
        if not self.kv_events and self.kv_blocks * self.block_tokens < COMPARED_TOKENS:
            raise ValueError(
                f"kv_blocks: {self.kv_blocks} of {self.block_tokens} tokens are less than {COMPARED_TOKENS} tokens"
            )
        if self.kv_events and not self.tokenizer:
            raise ValueError("kv_events: needs tokenizer, since they name blocks by their tokens")

    @property
    def withholds_keys(self) -> bool:
        """True if clients' keys are left out of requests to this server, because they would cross the network without encryption."""
        return not self.insecure and is_plain_hop(self.url)

    @property
    def compared_tokens(self) -> int:
        """The number of tokens in each of the pieces in which prompts are compared with the server's cache."""
        return self.block_tokens if self.kv_events else max(self.block_tokens, COMPARED_TOKENS)

    @property
    def compared_blocks(self) -> int:
        """The capacity of the server's cache, as a number of pieces of `compared_tokens` tokens."""
        return self.kv_blocks * self.block_tokens // self.compared_tokens


class RouterMetricsAccess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access to the metrics of a router, which name its models, workers and tenants."""

    key_sha256: tuple[Sha256Hex, ...] = ()
    """SHA-256 of each key that may read the metrics, in hex (``printf %s KEY | sha256sum``). Scrapers send ``Authorization: Bearer KEY``.
    Keys of tenants give no access to the metrics."""

    ask: bool | None = None
    """True if metrics at `http_listen` need a key. None: they need one if a tenant has a key, or if `key_sha256` is not empty."""

    ask_on_health: bool | None = None
    """True if metrics at `health_listen` need a key. None: they need one if those at `http_listen` do, unless the port is on loopback."""


class AccessRecordSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access records: a file with a JSON object for each request. The file is renamed when it is full."""

    path: str = ""
    """Path of the file with the records. Processes of one router may share it. Empty: there are no records."""

    max_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 100
    """Size in MiB at which the file is renamed: `.1` is added to its name. A record has about 700 bytes without content."""

    kept_files: Annotated[int, Meta(ge=0, le=1000)] = 5
    """Number of renamed files that are kept; older files are removed."""

    content: bool = False
    """Write the text of prompts and answers too. Everybody who may read the file reads what clients wrote."""


class ResumeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How streams survive the death of their router. The routers share the key of resume tokens by `prompt_secret` or `tenant_secret`."""

    token_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 3600
    """Seconds after the beginning of a request for which its resume tokens are accepted. The default is longer than any answer takes."""


class Thresholds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that can be changed while a router runs. A new value applies to all later decisions, also about requests that wait already."""

    remote_prefill_min_tokens: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 512
    """Number of uncached prompt tokens from which on a prefill worker computes the prompt instead of the decode worker.

    A prefill of the default length delays every stream of the decode worker by about one step, while a handoff costs a
    few milliseconds. So longer prompts are better handed over."""

    oversubscribe: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """Maximum number of requests that are placed on a worker, as a multiple of its batch size. With a value above 1, the engine can refill
    its batch without a round trip to the router. But the value should not be large: a request that waits in the router can still be placed
    on a better worker or be rejected in time, and a request that waits in an engine cannot."""

    max_queued: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 1024
    """Maximum number of requests in the admission queue, over all models. If one more comes, the last request of the tenant with the largest
    backlog (prompt tokens, divided by the tenant's weight) is rejected with `queue_full`. Requests that have lost a worker stay."""

    max_queue_seconds: PositiveSeconds = 10.0
    """A request is rejected at once if it would wait longer than this for its first token; its own prefill does not count. Set it to your
    goal for first tokens. Three waits are predicted: in the queue by the departure rate, in the prefill queue of the chosen worker by its
    prefill rate, and in the engine of a full worker by its first tokens per second. A margin for the errors of earlier predictions is
    added, of at most half the limit. Ten seconds is the longest common goal for a first token, so a request that waits longer misses every
    goal. In `loadtests/studies/conversation.toml`, whose goals are 10 s for the first token and 100 ms between tokens, 16 H100 serve 2.5
    requests a second. At 3.3, 4.3 and 6.6 requests a second, 2.45, 2.09 and 1.81 of them meet the goals. With a limit of 5 s, these numbers
    are 2.58, 2.38 and 1.53; with 20 s, they are 2.32, 1.92 and 1.42. At 1.2 requests a second, none of 12,031 requests is rejected; with
    5 s, 13 are rejected. Raise the limit if clients would rather wait than try again, as batch jobs do. Prompts in prefill queues should be
    computed within 80 % of the limit (`fleet.router.state.prefill_order`)."""

    priority_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """Seconds of waiting that one step of priority replaces: a request goes before a request that arrived up to this many seconds earlier,
    if the earlier request has a priority that is lower by one. A very large value makes priorities strict; 0 switches them off."""

    size_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds by which each thousand prompt tokens move a request back in the queue. 0: first come, first served."""


class RouterSettings(Thresholds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    router_id: Annotated[str, Meta(min_length=1)] = "router"
    """Name of this router at workers and peers; two routers of one cluster must have different names.
    A worker keeps one stream for each name, so routers with the same name interrupt each other's requests. Workers and peers write to
    their logs if two routers have the same name."""

    http_listen: str = "127.0.0.1:8000"
    """host:port of the OpenAI API, health and metrics; port 0 takes a free one."""

    http: HttpSettings = HttpSettings()
    """Limits of connections and requests at `http_listen`."""

    health_listen: str = ""
    """host:port of a separate listener for probes and metrics (``/health``, ``/live``, ``/metrics``). It has limits of its own, so that any
    number of clients at `http_listen` cannot shut out probes. Probes need no key, so keep this port off the public network. Empty: health
    and metrics are only on `http_listen`, which always has them."""

    grpc: GrpcSettings = GrpcSettings()
    """Limits of client connections at `grpc_listen`. The same limits apply to `kserve_listen`, whose connections are counted separately."""

    tracing: TracingSettings = TracingSettings()
    """Traces of requests, which the router exports to an OpenTelemetry collector. The settings of workers and store nodes have the same
    section for the spans that they export."""

    images: ImageSettings = ImageSettings()
    """Images that clients name by URLs: whether the router fetches them, and from where."""

    tls: ClientTlsSettings = ClientTlsSettings()
    """TLS of `http_listen`, `grpc_listen` and `kserve_listen`, and of `health_listen` and `endpoint_picker` if this section says so. The
    other ports have credentials of their own."""

    share_ports: bool = False
    """True if other router processes may listen on the same ports (SO_REUSEPORT): the kernel spreads connections over them.
    Otherwise a port in use is an error."""

    replicas_listen: str = ""
    """Address at which this router receives the reservations and other messages of peer routers: ``unix:/path``, or host:port with
    `replicas_credentials`. Empty: there are no peers."""

    replicas: tuple[str, ...] = ()
    """Addresses of the peer routers: the `replicas_listen` of each of them."""

    replicas_name: str = ""
    """host:port with a name that resolves to the addresses of all routers of the cluster, including this one. A headless Service of
    Kubernetes has such a name. The router resolves it every two seconds. If it is set, `replicas_listen` must be the ip:port of this
    router. Empty: the peers are only those in `replicas`."""

    replicas_credentials: Credentials = Credentials()
    """Credentials of routers towards each other over TCP, the same on all of them: the secret in `secret_file`, or certificates signed by
    `authority`, with a `certificate` and `key` for each router. Without either, a host:port is refused, also on loopback, unless
    `insecure` says that nobody else has access to that network. Unix sockets need none."""

    grpc_listen: str = "127.0.0.1:50051"
    """host:port of the gRPC API for clients."""

    grpc_max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 1024 * MIB
    """Memory in bytes for the messages of all requests at `grpc_listen`, from the first byte to the end of the answer, and the same again
    for `kserve_listen`; `http.max_held_bytes` is its counterpart for HTTP. When it is full, complete messages above 64 KiB are
    rejected. Shorter messages may use 256 MiB more. Messages above 64 KiB may use 128 MiB more until they are complete."""

    connection_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """Age of a connection in seconds at which its client is asked to open a new one; running requests go on, and clients reconnect by
    themselves. If several routers are behind one address, this spreads the clients over all routers. To end a router without breaking
    connections, remove it from that address, wait longer than this age, and then end it. 0: no limit."""

    drain_timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 10_000
    """Milliseconds for which running requests may continue after SIGTERM; requests that have not ended by then are rejected."""

    control_listen: str = ""
    """Control port: ``unix:/path``, or host:port with `control_credentials`. It serves the registry, at which workers register,
    `fleet.v1.Cluster` and `fleet.v1.Selection`. No API key protects it, so clients must not reach it. Empty: a Unix socket that only
    the router's own user can reach, with a path derived from `grpc_listen` so that commands find it (`fleet status --address`)."""

    control_credentials: Credentials = Credentials()
    """Credentials that callers of `control_listen` over TCP must prove: the secret in `secret_file`, or a certificate signed by `authority`
    (with `certificate` and `key` of this router). With `insecure`, callers need none; use it only on networks where everybody is trusted."""

    selection: SelectionSettings = SelectionSettings()
    """Limits for callers of the gRPC service `fleet.v1.Selection` at `control_listen`."""

    discovery: Discovery | None = None
    """Directory in which the router finds workers, besides the workers that register at its control port; absent: none."""

    kserve_listen: str = ""
    """host:port of the Open Inference Protocol over gRPC, for clients of KServe and Triton, which expect port 8001; empty:
    it is not served."""

    endpoint_picker: EndpointPickerSettings | None = None
    """Endpoint picker for gateways of the Gateway API Inference Extension (Envoy's `ext_proc`); absent: none."""

    models: dict[ModelName, str] = {}
    """Tokenizer and chat template by served model name: a folder, or a repository of the Hugging Face Hub (such as Qwen/Qwen3-0.6B, with
    ``@revision`` after it unless the newest is meant). Only the tokenizer and the configuration are downloaded."""

    model_defaults: bool = True
    """Use the values in a model's generation_config.json for sampling parameters that a client leaves out: temperature, `top_p`, `top_k`,
    `min_p` and the penalties. vLLM and SGLang do so, too. If off, or without such a value, the defaults of docs/api.md hold. All routers
    of a cluster need the same value, because a stream may be resumed at another router."""

    hub: HubSettings = HubSettings()
    """Where the repositories in `models`, and in `tokenizer` of `openai_workers`, are downloaded from, and where they are kept."""

    openai_workers: tuple[OpenAiWorkerSettings, ...] = ()
    """External servers that speak the OpenAI API. Each of them serves whole requests; the router relays the bytes of their answers."""

    overflow: dict[ModelName, OverflowSettings] = {}
    """Hosted endpoints by model: each takes requests of its model that Fleet's own workers could take only after a long wait, or not at
    all; see docs/router.md."""

    external_paths: tuple[ExternalPath, ...] = DEFAULT_EXTERNAL_PATHS
    """Paths of external servers that clients may reach, with any method: whole paths, or beginnings that end with ``/*``. Completions, chat
    and embeddings are always relayed. Control routes, such as ``/v1/load_lora_adapter``, ``/sleep`` and ``/collective_rpc``, change a server for
    all its clients, so ``/*`` does not cover them: list each one that clients may call by its own name."""

    store: str = ""
    """gRPC address of the KV store node whose blocks the router watches (``unix:/path`` or host:port); empty: there is none."""

    store_credentials: Credentials = Credentials()
    """Credentials that prove to a store node on another host that this router may watch it."""

    worker_credentials: Credentials = Credentials()
    """Credentials on the streams to workers on other hosts: `secret_file` is the workers' secret, which both ends prove; `authority` signs the
    workers' certificates, for TLS; `certificate` and `key` are shown to workers that ask for them."""

    tenant_secret: str = ""
    """Key from which the salts are computed that keep tenants' blocks apart; equal on all routers of a cluster. Without a key, anyone who
    knows a tenant's name can compute its salt."""

    prompt_secret: str = ""
    """Common secret of peer routers that tell each other which prompts they have sent to servers without `kv_events`:
    block names are computed with it, so that no client can construct two prompts with the same name. Empty: `tenant_secret`; if that is
    empty too, only the processes of one `fleet serve router --processes` share a secret. The key of resume tokens is derived from it, too."""

    resume: ResumeSettings = ResumeSettings()
    """How streams go on at another router after the death of their router."""

    prefer_direct: bool = False
    """Prefer the direct KV path, from engine to engine, for a handoff that can use either path. The default is off: on CPUs the store is
    faster and its times vary less, and all workers can reuse blocks that went through the store."""

    tenants: dict[str, TenantSettings] = {}
    """API keys, weights and limits by tenant. If any tenant has a key, every request needs one."""

    tenants_redis: str = ""
    """URL of the Redis or Valkey (``redis://host:port/0``, ``unix:///path``) in which routers share their
    tenants' limits; empty: routers that are peers (`replicas`, `replicas_name`) and the processes of one command count together, and every
    other router counts by itself."""

    retry_after_ms: Annotated[int, Meta(ge=1, le=2**32 - 1)] = 1000
    """Retry hint in milliseconds for rejected requests that may succeed later. If a wait was predicted, the hint is the predicted wait, but
    at least this, and at most a minute."""

    max_attempts: PositiveInt = 3
    """Maximum number of placements of one request: after three failed attempts, the request is probably at fault, not the workers."""

    running_request_blocks: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Cost of each request that runs on a worker, in blocks of prefill, in addition to the cost of its blocks. It stands for the request's
    share of each decode step."""

    engine_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Hit credit of a block in the engine's own cache: the cost that it saves, in blocks of prefill."""

    store_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 0.75
    """Hit credit of a block that has to be loaded from the store, in blocks of prefill (NVIDIA Dynamo's weight of a host cache hit)."""

    lower_tier_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 0.5
    """Hit credit of a block that the store first has to fetch from a tier below its memory (SSD, Redis, S3 or another node), in blocks of
    prefill."""

    prefill_window_tokens: Annotated[int, Meta(ge=0)] = 8192
    """Prefill window: a worker is sent prompts only while it has fewer prompt tokens than this to compute. The default is one step of vLLM
    on a large GPU. Further prompts wait in the router's prefill queue, where higher priorities and shorter prompts mostly go first. 0: all
    prompts are sent at once, and the worker computes them in the order in which they come."""

    prefill_size_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """Seconds by which each thousand tokens to compute move a prompt back in the prefill queue. With 10, a prompt of 30,000 tokens
    lets prompts of a thousand tokens go first that arrive up to about five minutes later. This seldom happens: the queue is mostly empty, and
    a prompt goes first that would be late otherwise, if no other one is late then (`fleet.router.state.prefill_order`). 0: first come,
    first served."""

    conversion_cost: Annotated[float, Meta(ge=0, le=1e9)] = 0.1
    """Additional cost, in blocks of prefill, of a block from the store if the worker has to convert it, because the worker's layout or number
    of ranks differs from the store's. A core converts at half the speed of a copy or faster. For example, a block of 32 tokens of a model
    with 8 billion parameters has 4 MB. At 6 GB/s, its conversion takes a tenth of the time of its prefill at 5,000 tokens a second."""

    learn_remote_prefill: bool = False
    """Learn, from measured handoffs and prefills, how many uncached tokens a prompt must have before another worker computes it, and use
    this number instead of `remote_prefill_min_tokens`. Until eight handoffs were measured, prompts with at least 64 uncached tokens (or
    `remote_prefill_min_tokens`, if that is smaller) are handed over. The default is off, because a test of a cluster may need a placement
    that does not depend on earlier measurements."""

    policy: Annotated[str, Meta(min_length=1)] = "fleet"
    """Placement policy: a name that `fleet router policies` lists."""

    policies: dict[str, dict[str, Any]] = {}
    """Parameters of policies, by the name of the policy. Only those of the chosen policy are read. If it is, or has a part, from another
    package, those of the default policy are read too."""

    policy_budget_ms: Annotated[float, Meta(gt=0, le=1e6)] = 5.0
    """The longest time in milliseconds for one decision of a policy that is, or has a part, from another package; if it takes longer, the
    default policy decides. Built-in policies take about ten microseconds; a request does not notice a few milliseconds more."""

    session_affinity: Literal["off", "soft", "hard"] = "soft"
    """How the worker of a session's last request is treated: "off" ignores it, "soft" prefers it as far as the policy does, and "hard"
    requires it. With "hard", the first request after that worker has gone is rejected, and the next one may go to any worker."""

    session_ttl_seconds: PositiveSeconds = 600.0
    """Seconds for which the worker of an idle session is remembered. The default is longer than people take to answer, and shorter than
    caches keep unused blocks."""

    max_sessions: PositiveInt = 100_000
    """Maximum number of sessions whose worker is remembered; each takes about 300 bytes. The session that was idle longest is forgotten
    first."""

    max_store_blocks: PositiveInt = 2_000_000
    """Maximum number of blocks in the prefix index for each tier of a store namespace; each block takes about 250 bytes. Placement does not
    know that the store has further blocks."""

    explained_requests: PositiveInt = 1024
    """Number of latest requests whose placement can be explained (`fleet explain`); each takes about 150 bytes for each worker."""

    profiles: dict[str, ProfileSettings] = {}
    """Profiles of workers, by the beginning of the workers' names ("" for all). With a profile, the router predicts the times of first
    tokens and the gaps between tokens. It corrects its predictions by measurements, and compares the two (metrics `fleet_prediction_…`,
    `fleet_worker_drifts`). Empty: nothing is predicted."""

    access_log: bool = False
    """Write a line to the log for each request that ended or was refused: its id, model and tenant, its outcome, tokens and times,
    without the content of prompts and answers."""

    metrics_access: RouterMetricsAccess = RouterMetricsAccess()
    """Keys that callers of ``/metrics`` need."""

    access_records: AccessRecordSettings = AccessRecordSettings()
    """File with a JSON object for each request that ended or was refused."""

    record: str = ""
    """File for a recording of all events and decisions of this router, for `fleet sim replay`: without the content of
    prompts and answers, with the names of requests, tenants and sessions. Empty: nothing is recorded."""

    record_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Size in MiB at which the recording of `record` ends; nothing is added to the file after that. A MiB holds about 350 requests with 500
    prompt tokens and 20 answer tokens, or 45 requests with 8,000 and 200 tokens."""

    heartbeat_timeout_seconds: PositiveSeconds = 3.0
    """A worker counts as lost when it sends nothing for this time. Workers report their load each second, so the default is the time of
    three reports."""

    connect_timeout_seconds: PositiveSeconds = 5.0
    """The longest time from opening a connection to a worker until its description has arrived; after it, the router closes the connection
    and tries again."""

    max_reconnect_seconds: PositiveSeconds = 2.0
    """Maximum pause between two attempts to reach a worker that is still a member; the first pause is 50 ms."""

    catch_up_seconds: Annotated[float, Meta(ge=0, le=20)] = 5.0
    """The longest time in seconds for which a starting router waits until it has checked each external server once, has the state of the
    processes that share its ports, has read the directory of workers, and has tried once to connect to each worker that is registered or in
    the directory. It does not wait for other peer routers. Until then it does not announce that it is ready and, if it shares its ports,
    accepts no connections. Afterwards it serves with the workers that it knows."""

    @property
    def counts_limits_without_redis(self) -> bool:
        """True if tenants have limits and routers that are not peers would each grant the whole limit, because there is no Redis."""
        return not self.tenants_redis and any(tenant.is_limited for tenant in self.tenants.values())

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other. The message of the error begins with the name of the field."""
        for name in ("http_listen", "grpc_listen"):
            check_listen_address(name, getattr(self, name))
        for name in ("health_listen", "kserve_listen"):
            check_listen_address(name, getattr(self, name), optional=True)
        for name in ("control_listen", "replicas_listen"):
            check_listen_address(name, getattr(self, name), or_unix=True, optional=True)
        self._check_control()
        self._check_redis()
        first: dict[str, int] = {}
        tokenizers: dict[str, tuple[str, bool]] = {}
        for index, worker in enumerate(self.openai_workers):
            where = f"openai_workers[{index}]"
            if (other := first.setdefault(worker.worker_id, index)) != index:
                raise ValueError(f"{where}.worker_id: {worker.worker_id!r} is already openai_workers[{other}]")
            if taken := {*self.models, *(each.model for each in self.openai_workers)}.intersection(worker.adapters):
                raise ValueError(f"{where}.adapters: {min(taken)!r} is a model")
            if worker.model in self.models:
                raise ValueError(
                    f"{where}.model: {worker.model!r} is in `models`, whose workers are Fleet's own; a hosted endpoint may take what they"
                    f" cannot: overflow.{worker.model}"
                )
            reading = (worker.tokenizer, bool(worker.kv_events))
            if tokenizers.setdefault(worker.model, reading) != reading:
                raise ValueError(f"{where}: workers of one model need the same tokenizer, and all or none kv_events")

        for model, hosted in self.overflow.items():
            if unknown := set(hosted.excluded_tenants).difference(self.tenants):
                raise ValueError(f"overflow.{model}.excluded_tenants: {min(unknown)!r} is not in `tenants`")
            if hosted.after_seconds > self.max_queue_seconds:
                raise ValueError(
                    f"overflow.{model}.after_seconds: {hosted.after_seconds:g} is above max_queue_seconds ({self.max_queue_seconds:g}),"
                    " at which requests are refused"
                )

    def _check_redis(self) -> None:
        """Refuse a `tenants_redis` that is not a URL of Redis. The error message does not show the URL, which may contain a password."""
        try:
            url = urlsplit(self.tenants_redis)
            is_usable = url.scheme in ("redis", "rediss", "unix") and url.port != 0
        except ValueError:
            raise ValueError(
                "tenants_redis: its port is no number from 1 to 65535, or its brackets do not match; write the characters"
                " / ? # @ [ ] of a password as %2F, %3F and so on"
            ) from None  # the cause quotes a piece of the password
        if self.tenants_redis and not is_usable:
            raise ValueError("tenants_redis: must be redis://host[:port][/db], rediss://… or unix:///path")

    def _check_control(self) -> None:
        """Refuse a control port without credentials. This also applies to loopback, because all users of the machine can connect to it."""
        proof = self.control_credentials
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        if self.control_listen and not unix_path(self.control_listen) and not asks:
            raise ValueError(
                f"control_listen: whoever reaches {self.control_listen} could register workers and change thresholds: set"
                " control_credentials.secret_file, or certificate, key and authority, or listen at unix:/path;"
                " control_credentials.insecure = true is for networks that nobody else is on"
            )
