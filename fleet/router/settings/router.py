"""What operators may set about a router; each default says where it comes from."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from fleet.core.discovery import Discovery
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName
from fleet.net.settings import KIB, MIB, GrpcSettings, HttpSettings
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.profiles import ProfileSettings
from fleet.router.settings.selection import SelectionSettings
from fleet.router.tenants import TenantSettings
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]

COMPARED_TOKENS = 64
"""Where it is not known to the block what a server holds, finer pieces than these cost memory and time and tell nothing."""


ENDPOINT = r"^(tcp://([^*:\s]+|\[[^\]\s]+\]):[0-9]{1,5}|ipc://\S+)?$"
"""Of ZeroMQ, to connect to: no wildcards, which engines listen on."""


class OpenAiWorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks the OpenAI API and knows nothing of Fleet, such as vLLM, llama.cpp or a hosted one."""

    worker_id: Annotated[str, Meta(min_length=1)]
    """Its name in metrics and explanations."""

    url: str
    """``http://host:port`` or ``https://host``, with what comes before ``/v1`` if anything does."""

    model: Annotated[str, Meta(min_length=1)]
    """The name under which clients ask for its model, and under which it knows it."""

    tokenizer: str = ""
    """Hugging Face folder or repository of its model, so that prompts are compared token by token; empty: by pieces of text."""

    block_tokens: PositiveInt = 16
    """The server's block size. Without `kv_events` at least 64 tokens (of text: 4 bytes each) are compared at once."""

    kv_blocks: PositiveInt = 100_000
    """Blocks that its prefix cache holds; more are never believed to be there."""

    max_running: PositiveInt = 256
    """Requests in one batch (vLLM's default)."""

    adapters: tuple[Annotated[ModelName, Meta(min_length=1)], ...] = ()
    """Adapters (LoRA) that it serves, by the names under which clients ask for them, as for models."""

    api_key: str = ""
    """Sent to it as a bearer token, in place of what the client sent; empty: what the client sent is passed on."""

    kv_events: Annotated[str, Meta(pattern=ENDPOINT)] = ""
    """ZeroMQ endpoint where vLLM or SGLang publishes its KV events (``tcp://host:port``); empty: what was sent there is
    believed to be cached. `block_tokens` must then be its own block size (SGLang: ``--page-size``)."""

    kv_events_replay: Annotated[str, Meta(pattern=ENDPOINT)] = ""
    """Where it repeats them (its `replay_endpoint`); empty: what it had cached before it joined is not known."""

    cache_ttl_seconds: PositiveSeconds = 600.0
    """Without `kv_events`: how long a prompt is believed to be cached after it was sent."""

    health_path: Annotated[str, Meta(pattern="^/")] = "/health"
    """Asked while nothing else is heard from it. A server that has no such path is asked for ``/v1/models``."""

    probe_seconds: PositiveSeconds = 2.0
    """Between two of these questions, and for an answer."""

    silence_factor: Annotated[float, Meta(ge=1, le=1000)] = 8.0
    """A server that gives no byte for so many times as long as its past explains, though it owes some, is out of rotation once it has not
    answered a trial request either. The past is the time below which 95 % of its first bytes came. Eight, since a load that doubles twice
    and a prompt that nobody has cached are no hang; a trial request is sent after twice the time."""

    silence_floor_seconds: Annotated[float, Meta(ge=0.01, le=3600)] = 1.0
    """Shorter silences are never taken for a hang, however quick a server was before: a collection of garbage, a busy core or a
    retransmission on the network last for some hundreds of milliseconds. Clients give up after a second or more."""

    silence_timeout_seconds: PositiveSeconds = 600.0
    """The ceiling: a request of which nothing is heard for so long has failed, whatever the past explains and even if nobody has
    answered yet, as when a server loads its model at the first request. Model loads and long answers in one piece take minutes."""

    silence_cut_seconds: PositiveSeconds = 30.0
    """An answer that has begun, and a request that no other server can take, ends after so long without a byte, if the server has not
    answered a trial request either. Nobody can go on with such an answer, and a server that was stopped for a moment may."""

    trial_requests: bool = True
    """True if a server that looks silent is asked for a completion of one token, on a connection of its own and with `api_key`. Without
    that, three silent requests put it out of rotation, and clients' requests find out whether it is back."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:  # of the port, or of a name that no resolver would take
            usable = False
        if not usable or parts.query or parts.fragment or parts.username:
            raise ValueError(f"url: {self.url!r} must be http://host:port or https://host:port")
        if any(not " " < character < "\x7f" for character in self.url + self.api_key):
            raise ValueError("url and api_key: only printable ASCII without spaces is allowed")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay: needs kv_events")
        if not self.kv_events and self.kv_blocks * self.block_tokens < COMPARED_TOKENS:
            raise ValueError(
                f"kv_blocks: {self.kv_blocks} of {self.block_tokens} tokens are less than {COMPARED_TOKENS} tokens"
            )
        if self.kv_events and not self.tokenizer:
            raise ValueError("kv_events: needs tokenizer, since they name blocks by their tokens")

    @property
    def compared_tokens(self) -> int:
        """Tokens that are compared at once."""
        return self.block_tokens if self.kv_events else max(self.block_tokens, COMPARED_TOKENS)

    @property
    def compared_blocks(self) -> int:
        """The server's cache, in pieces of so many tokens."""
        return self.kv_blocks * self.block_tokens // self.compared_tokens


class Thresholds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be changed while a router runs; from the next request on the new value counts."""

    remote_prefill_min_tokens: Annotated[int, Meta(ge=0)] = 512
    """Prompt tokens that a decode worker would have to compute from which on a prefill worker does it instead.

    A chunk of prefill that long delays every stream of the decode worker by about one whole step, while the hand-off
    costs a few milliseconds; from there on the hand-off is the lesser evil."""

    oversubscribe: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """Requests given to a worker, over its batch size. Above 1, so that a batch refills without a round trip; a request
    that waits here instead can still be placed better, or be refused in time."""

    max_queued: Annotated[int, Meta(ge=0)] = 1024
    """Requests that wait when every worker is at its limit; with one more, the last of the tenant that has most waiting
    is refused with `queue_full`."""

    max_queue_seconds: PositiveSeconds = 10.0
    """A request that would wait longer is refused at once: in the queue, at the pace at which others have been leaving it, and in the
    lane of the worker that was chosen, at the pace at which that computes prompts. Ten seconds are the longest common goal for a first
    token, so whoever waits longer misses any. In `loadtests/studies/conversation.toml`, whose goals are 10 s and 100 ms, 16 H100 can take
    2.5 requests a second. Offered 1.35, 1.75 and 2.7 times as many they meet the goals of so many a second; the last column has how
    many of 12,031 are refused at half the load that they can take::

        seconds   1.35  1.75  2.7   refused
        5         2.68  2.84  3.63  29
        10        2.44  2.66  3.60  1
        20        2.26  2.48  3.18  0
        no limit  0.52  0.06  0.04  0

    Raise it where clients would rather wait than try again, as those of batch jobs."""

    priority_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """What a step of priority is worth in waiting: a request goes before those of one step less that came up to so much
    earlier. Very much makes priority strict, 0 makes it nothing."""

    size_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """By how much each thousand prompt tokens put a request back in the queue. 0: first come, first served."""


class RouterSettings(Thresholds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    router_id: Annotated[str, Meta(min_length=1)] = "router"
    """Told to workers; two routers of one cluster must differ."""

    http_listen: str = "127.0.0.1:8000"
    """host:port of the OpenAI API, health and metrics; port 0 takes a free one."""

    http: HttpSettings = HttpSettings()
    """Limits of the HTTP front."""

    health_listen: str = ""
    """host:port of a listener of its own for probes and metrics (``/health``, ``/live``, ``/metrics``), with limits of its own, so that no
    number of clients at `http_listen` can shut out those who look after the router. It asks for no key: keep it off the public
    side. Empty: health and metrics are on `http_listen` only, where they are in any case."""

    grpc: GrpcSettings = GrpcSettings()
    """Limits of connections at `grpc_listen`, and as many again at `kserve_listen`."""

    share_ports: bool = False
    """Whether other router processes may listen on the same ports (SO_REUSEPORT): the kernel spreads connections over them.
    Without it a port in use is an error."""

    replicas_listen: str = ""
    """The address at which other routers of the cluster tell this one what they have booked: ``unix:/path``, or host:port with
    `replicas_credentials`. Empty: there are no others."""

    replicas: tuple[str, ...] = ()
    """`replicas_listen` of the others."""

    replicas_credentials: Credentials = Credentials()
    """The credentials of routers towards each other over TCP, the same on all of them: the secret in `secret_file`, or certificates signed by
    `authority`, each router with a `certificate` and `key` of its own. Without either, a host:port is refused, on loopback too, unless
    `insecure` says that nobody else is on that network. Unix sockets need none."""

    grpc_listen: str = "127.0.0.1:50051"
    """host:port of the gRPC API for clients."""

    grpc_max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 1024 * MIB
    """Bytes that the messages of all requests at `grpc_listen` may take, from the first byte to the end of the answer, and as many again
    those at `kserve_listen`; `http.max_held_bytes` is the same over HTTP. Beyond that messages above 64 KiB are refused; shorter ones
    have 256 MiB of their own."""

    connection_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """How long a client's connection lasts before the client is asked to make another; what runs on it goes on, and clients do it
    by themselves. Behind an address that stands for several routers, clients are so spread over those there are; shorter than the
    time between taking a router out of that address and ending it, no client ever meets one that ends. 0: as long as the client likes."""

    drain_timeout_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 10_000
    """How long answers that are being streamed may go on after SIGTERM."""

    control_listen: str = ""
    """Control port: ``unix:/path``, or host:port with `control_credentials`. Here workers register and operators ask (the registry,
    `fleet.v1.Cluster` and `fleet.v1.Selection`), which no API key covers; it is never the clients' port. Empty: a Unix socket that only
    the router's own user can reach, and whose path follows from `grpc_listen`, so that commands find it (`fleet status --address`)."""

    control_credentials: Credentials = Credentials()
    """The credentials that callers of `control_listen` over TCP have to prove: the secret in `secret_file`, or a certificate signed by `authority`
    (with `certificate` and `key` of this router). `insecure`: nothing, for networks where everybody is trusted."""

    selection: SelectionSettings = SelectionSettings()
    """Limits of what callers of `fleet.v1.Selection` may hold."""

    discovery: Discovery | None = None
    """Where workers are found besides those that register here; absent: nowhere."""

    kserve_listen: str = ""
    """host:port of the Open Inference Protocol over gRPC, for clients of KServe and Triton, who expect it on port 8001; empty:
    it is not served."""

    endpoint_picker: EndpointPickerSettings | None = None
    """Tells gateways of the Gateway API Inference Extension where each request goes (Envoy's `ext_proc`); absent: it does not."""

    models: dict[ModelName, str] = {}
    """Folder with tokenizer and chat template, or a repository of the Hugging Face Hub (as in Qwen/Qwen3-0.6B, with @revision after it
    if it is not to be the newest), by served model name. Of a repository the tokenizer and the configuration are fetched."""

    hub: HubSettings = HubSettings()
    """Where repositories in `models`, and in `tokenizer` of `openai_workers`, are fetched from, and kept."""

    openai_workers: tuple[OpenAiWorkerSettings, ...] = ()
    """Servers that are workers as they are, each doing whole requests: the router passes bytes on."""

    store: str = ""
    """gRPC address of the KV store node (``unix:/path`` or host:port); empty: there is none."""

    store_credentials: Credentials = Credentials()
    """What proves to a store node on another host that this router may watch it."""

    worker_credentials: Credentials = Credentials()
    """Proofs on the streams to workers on other hosts: `secret_file` is the workers' secret, which both ends prove; `authority` signs the
    workers' certificates, for TLS; `certificate` and `key` are shown to workers that ask."""

    tenant_secret: str = ""
    """Key of the salts that keep tenants' blocks apart; equal on all routers of a cluster."""

    prompt_secret: str = ""
    """What routers of a cluster have in common that tell each other which prompts they have sent to servers without `kv_events`:
    names of blocks follow from it, so that no client can make up two prompts with the same. Empty: `tenant_secret` is; if that is
    empty too, only the processes of one `fleet serve router --processes` have something in common."""

    prefer_direct: bool = False
    """Send blocks from engine memory to engine memory where both ways are open. Off: on CPUs the store is faster and
    steadier, and what went through it can be used again by everybody."""

    tenants: dict[str, TenantSettings] = {}
    """Keys, shares and limits by tenant. Where one has a key, every request needs one."""

    tenants_redis: str = ""
    """URL of the Redis or Valkey (``redis://host:port/0``, ``unix:///path``) in which several routers keep their
    tenants' limits together; empty: routers that `replicas` names, and the processes of one command, count together, and each other
    router counts for itself."""

    retry_after_ms: PositiveInt = 1000
    """The hint in refusals that a retry may undo."""

    max_attempts: PositiveInt = 3
    """Placements of one request: more failures than two in a row are the request's fault, not the workers'."""

    running_request_blocks: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """What a request on a worker costs there besides its blocks, in blocks: its share of each decode step."""

    engine_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Credit for a block in the engine's own cache, in blocks of prefill."""

    store_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 0.75
    """Credit for a block that has to be loaded from the store (NVIDIA Dynamo's weight of a host cache hit)."""

    lower_tier_hit_credit: Annotated[float, Meta(ge=0, le=1e9)] = 0.5
    """Credit for a block that the store has to fetch from below its memory first: SSD, Redis, another node."""

    prefill_window_tokens: Annotated[int, Meta(ge=0)] = 8192
    """How far ahead a worker gets prompts: while it has fewer tokens than that to compute, which is one step of vLLM on a large
    GPU. What is beyond waits in the router, in the worker's lane, where those of higher priority and shorter ones go first. 0: all
    go at once, and are computed as they come."""

    prefill_size_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """By how much each thousand tokens that have to be computed put a prompt back in its lane. A prompt of 30,000 tokens then
    lets those of a thousand go first that come up to about five minutes later, which is seldom needed: a lane is empty most of
    the time. 0: first come, first served."""

    conversion_cost: Annotated[float, Meta(ge=0, le=1e9)] = 0.1
    """What a block from the store costs a worker that has to convert it, since its layout or number of ranks differs from
    the store's, in blocks of prefill. A core converts at half the speed of a copy or faster: a block of 32 tokens of an
    8-billion model, 4 MB, at 6 GB/s takes a tenth of what its prefill takes at 5,000 tokens a second."""

    learn_remote_prefill: bool = False
    """Learn from hand-offs and prefills from how many tokens on another worker computes a prompt, in place of
    `remote_prefill_min_tokens`; until eight hand-offs have been measured, prompts of 64 tokens and more are handed over. Off: the
    answer then depends on what was measured before, which a test of a cluster may not want."""

    policy: Annotated[str, Meta(min_length=1)] = "fleet"
    """How workers are chosen: a name that `fleet router policies` lists."""

    policies: dict[str, dict[str, Any]] = {}
    """Parameters by policy; only those of the chosen one are looked at."""

    policy_budget_ms: Annotated[float, Meta(gt=0, le=1e6)] = 5.0
    """For one decision of a policy from outside this package: after that, the default policy decides. Ours take
    some ten microseconds; a request should not notice which one it was."""

    session_affinity: Literal["off", "soft", "hard"] = "soft"
    """Whether requests of a session go where its last one went: never for that reason, as far as the policy likes it, or
    always; then a request whose worker is gone is refused, once."""

    session_ttl_seconds: PositiveSeconds = 600.0
    """How long an idle session is remembered: longer than people take to answer, shorter than caches keep what is unused."""

    max_sessions: PositiveInt = 100_000
    """Sessions that are remembered, about 300 bytes each; the one idle longest goes first."""

    max_store_blocks: PositiveInt = 2_000_000
    """Blocks of a store namespace that the index follows in each tier, about 250 bytes each; more are served but not seen."""

    explained_requests: PositiveInt = 1024
    """Latest requests whose placement can be explained, about 150 bytes a worker each."""

    profiles: dict[str, ProfileSettings] = {}
    """What is known of workers beforehand, by the beginnings of their names ("" for all): first tokens and gaps are then predicted,
    corrected by what workers do, and compared with it (metrics `fleet_prediction_…`, `fleet_worker_drifts`). Empty: nothing is predicted."""

    record: str = ""
    """File to which everything is written that this router hears and decides, for `fleet sim replay`: without the content of
    prompts and answers, with the names of requests, tenants and sessions. Empty: nothing is written."""

    record_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """MiB after which a recording ends; its beginning is kept. A MiB holds about 350 requests of 500 tokens in and 20 out, or 45 of
    8,000 and 200."""

    heartbeat_timeout_seconds: PositiveSeconds = 3.0
    """A worker that sends nothing for so long is lost; workers report their load each second."""

    connect_timeout_seconds: PositiveSeconds = 5.0
    """From dialling a worker to its description."""

    max_reconnect_seconds: PositiveSeconds = 2.0
    """Longest pause between two attempts to reach a worker that is still a member; the first pause is 50 ms."""

    catch_up_seconds: Annotated[float, Meta(ge=0, le=20)] = 5.0
    """How long a router that starts waits at most to hear of the workers that are there, before it says that it is ready and,
    where it shares its ports, before it takes connections."""

    @property
    def counts_limits_without_redis(self) -> bool:
        """True if routers that do not tell each other would each give tenants all they may have."""
        return not self.tenants_redis and any(tenant.is_limited for tenant in self.tenants.values())

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; the message begins with the field."""
        self._check_control()
        first: dict[str, int] = {}
        tokenizers: dict[str, tuple[str, bool]] = {}
        for index, worker in enumerate(self.openai_workers):
            where = f"openai_workers[{index}]"
            if (other := first.setdefault(worker.worker_id, index)) != index:
                raise ValueError(f"{where}.worker_id: {worker.worker_id!r} is already openai_workers[{other}]")
            if taken := {*self.models, *(each.model for each in self.openai_workers)}.intersection(worker.adapters):
                raise ValueError(f"{where}.adapters: {min(taken)!r} is a model")
            if worker.model in self.models:
                raise ValueError(f"{where}.model: {worker.model!r} is in `models`, whose workers are Fleet's own")
            reading = (worker.tokenizer, bool(worker.kv_events))
            if tokenizers.setdefault(worker.model, reading) != reading:
                raise ValueError(f"{where}: workers of one model need the same tokenizer, and all or none kv_events")

    def _check_control(self) -> None:
        """Refuse a control port at which nobody is asked who he is; loopback too, which all users of the machine reach."""
        proof = self.control_credentials
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        if self.control_listen and not unix_path(self.control_listen) and not asks:
            raise ValueError(
                f"control_listen: whoever reaches {self.control_listen} could register workers and change thresholds: set"
                " control_credentials.secret_file, or certificate, key and authority, or listen at unix:/path;"
                " control_credentials.insecure = true is for networks that nobody else is on"
            )
