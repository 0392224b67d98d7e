"""What a worker process is told, field by field; `fleet.config` loads it and nothing else defines it."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fleet.core.discovery import Discovery
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.hardware.latency.linear import EngineLatency
from kvstore.net.addresses import host_port, unix_path
from kvstore.security.credentials import Credentials
from kvstore.service.settings import StoreSettings
from workers.kv_layout import KvLayout
from workers.watchdog import WatchdogSettings

Positive = Annotated[int, Meta(ge=1)]


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the embedded vLLM engine."""

    kv_cache_gib: Annotated[float, Meta(gt=0)] = 1
    """Host memory for the KV cache of a CPU engine, all its ranks together; accelerators take
    `extra_args.gpu_memory_utilization`."""

    dtype: str = "auto"
    """As vLLM names it; float32 gives the same tokens whatever the batch."""

    enforce_eager: bool = True
    """No graph capture and no compilation: starts faster, runs slower where kernels are short."""

    omp_threads: Annotated[int, Meta(ge=1)] = 1
    """Threads of one CPU engine; 1, so that a prefill and a decode engine can share two cores."""

    keeps_forms: bool = True
    """Whether answers can be bound to a schema, an expression or a grammar. For that the engine loads the model's tokenizer as
    well, and clients may have it compile what they wrote; off, such requests are refused."""

    extra_args: dict[str, Any] = {}
    """Anything else that vLLM's `AsyncEngineArgs` takes; it overrides what the fields above set."""


class SimulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the engine that computes nothing but keeps honest books."""

    latency: EngineLatency = EngineLatency()
    """How long prefills, decode steps and transfers take."""

    speedup: Annotated[float, Meta(gt=0)] = 1.0
    """Divides every latency; large values make tests fast."""

    kv_blocks: Positive = 4096
    """Blocks of the engine's own cache."""

    bytes_per_token: Annotated[int, Meta(ge=8)] = 64
    """KV of one token; light by default (the tiny Llama model has 4096). A multiple of 8: 2 layers of 4 heads."""

    tensor_parallel: Literal[1, 2, 4] = 1
    """Ranks that the heads are shared out among. They take no less time, but each has memory of its own."""

    kv_layout: KvLayout = "HND"
    """How blocks lie in a rank's memory. Engines of other layouts and numbers of ranks share blocks through the store."""

    seed: Annotated[int, Meta(ge=0)] = 0
    """Stands for the weights: engines with different seeds compute different KV and different tokens."""

    vocab_size: Annotated[int, Meta(ge=2)] = 4096
    """Used when `model_dir` has no config.json."""

    eos_token_ids: tuple[int, ...] = (2,)
    """Used when `model_dir` has no config.json."""

    eos_probability: Annotated[float, Meta(ge=0, lt=1)] = 0.002
    """Chance of each token to be an end of sequence; 500 tokens is a common length of answers."""

    max_batched_tokens: Positive = 2048
    """Prompt tokens that one step computes at most; longer prompts take several (chunked prefill)."""

    load_timeout_ms: Positive = 2000
    """How long admission waits for blocks from elsewhere before it computes them."""

    publish_timeout_ms: Positive = 2000
    """How long the finish of a prefill waits for its blocks to be in the store."""

    adapter_load_ms: Annotated[float, Meta(ge=0)] = 50.0
    """How long it takes to load an adapter: tens of megabytes from a file system near by."""

    start_ms: Annotated[float, Meta(ge=0)] = 0.0
    """The time that the engine takes to start, as real ones do that load weights. `speedup` does not divide it."""

    hang_file: str = ""
    """A fault for tests: while a file of this path exists, the engine hangs in its next step and in all after it. Empty: never."""

    direct_listen: str = "127.0.0.1:0"
    """Where decode engines fetch blocks: host:port (0: any) or unix:path."""

    direct_lease_ms: Positive = 30_000
    """How long handed-off blocks wait to be fetched; vLLM's NIXL connector has the same default."""

    def __post_init__(self) -> None:
        if self.bytes_per_token % 8:
            raise ValueError(f"bytes_per_token: {self.bytes_per_token} is not a multiple of 8")
        if any(not 0 <= eos < self.vocab_size for eos in self.eos_token_ids):
            raise ValueError(f"eos_token_ids: {self.eos_token_ids} are not all within the vocabulary")
        if len(set(self.eos_token_ids)) >= self.vocab_size:
            raise ValueError("eos_token_ids: no other token is left in the vocabulary")


class GroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a worker whose one engine is spread over several nodes, with a process on each: see `workers.rank_rendezvous`."""

    nodes: Annotated[int, Meta(ge=2, le=64)]
    """Processes, one a node."""

    rank: Annotated[int, Meta(ge=0)] = 0
    """Of this one. The first (0) leads: it serves requests, and nothing is seen of the others. Everything else they are told alike."""

    leader: Annotated[str, Meta(min_length=1)]
    """host:port where the others find the first."""

    listen: str = ""
    """host:port where the first listens for them; empty: `leader`. Whoever can connect there can take part, and engines trust
    each other: only the group's own nodes should reach it."""

    engine_ports: tuple[Annotated[int, Meta(ge=1, le=65_535)], ...] = ()
    """Two of the first's host, at which the engine's own ranks find each other; empty: any that are free."""

    join_timeout_ms: Positive = 600_000
    """How long all are waited for: nodes may have to be made, and images brought there."""

    silence_ms: Annotated[int, Meta(ge=100)] = 15_000
    """Who says nothing for so long is taken to be gone, and the whole group ends, to be started anew."""

    def __post_init__(self) -> None:
        if self.rank >= self.nodes:
            raise ValueError(f"rank: {self.rank} is none of {self.nodes} nodes, which are counted from 0")
        for name, address in (("leader", self.leader), ("listen", self.listen or self.leader)):
            try:
                host_port(address)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if len(self.engine_ports) not in {0, 2} or len(set(self.engine_ports)) != len(self.engine_ports):
            raise ValueError("engine_ports: names two different ports, or none")


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one worker process."""

    worker_id: Annotated[WorkerId, Meta(min_length=1, max_length=128)]
    """Unique in the cluster; stays the same when the process restarts."""

    role: Role = Role.BOTH

    engine: str = "vllm"
    """Name of an entry point in the group `workers.engines`."""

    model_dir: str = ""
    """Hugging Face folder; or a repository of the hub, as in Qwen/Qwen3-0.6B, with @revision after it if it is not to be the newest.
    The simulated engine reads only its config.json, and only where there is one."""

    hub: HubSettings = HubSettings()
    """Where a repository in `model_dir` is fetched from, and kept."""

    model: Annotated[ModelName, Meta(min_length=1)]
    """The name under which clients ask for it."""

    listen: str = "127.0.0.1:0"
    """Where routers connect: host:port (0: any) or unix:path."""

    credentials: Credentials = Credentials()
    """The credentials that routers prove at `listen` where it is no Unix socket: the secret in `secret_file`, which the worker proves to them as well;
    with `certificate` and `key` there is TLS, and with `authority` routers have to show a certificate. Beyond loopback one of
    both is needed, unless `insecure` says that nobody else is on that network."""

    control_listen: str = ""
    """Where operators connect: gRPC with the Worker service, health and reflection; unix:path, or host:port with `control_credentials`.
    Empty: nowhere."""

    control_credentials: Credentials = Credentials()
    """The credentials that callers of `control_listen` over TCP have to prove: the secret in `secret_file`, or a certificate signed by `authority`
    (with `certificate` and `key` of this end). Default: what `registry_credentials` say, since the routers' secret is a proof among
    the cluster's own. Without either, and without `insecure`, the worker refuses to listen over TCP, because whoever reaches the port
    could end it (`Drain`). Health and reflection need no proof."""

    advertise: str = ""
    """Address that routers dial, where it differs from `listen` (0.0.0.0, address translation)."""

    registry: str = ""
    """Control address of a router, whose registry takes the worker: host:port or unix:/path. A name that stands for several routers
    means all of them. Empty: the worker registers with none."""

    registry_credentials: Credentials = Credentials()
    """Proof to the registry, where it is no Unix socket, that this is a worker of the cluster: the routers' secret, or a certificate. They
    protect `control_listen` too, where `control_credentials` say nothing."""

    name_wait_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """The time for which a worker waits for another process that holds its `worker_id` to go; then it ends with an error. A router takes a process
    for gone within 10 s (its lease), so a minute is enough for a predecessor, and a second worker of the same name is soon seen."""

    discovery: Discovery | None = None
    """Where the worker publishes itself for all routers that look there, besides `registry` or in its place; absent: nowhere."""

    store: str = ""
    """gRPC address of the KV store node, unix:path or host:port; empty: no store, or the one of `embedded_store`."""

    embedded_store: StoreSettings | None = None
    """A KV store node in this process, which goes when the worker goes; it needs a unix: address in `listen`, by which this
    worker and all others of the host may use it. For a host with one worker; several are better off with a node of its own."""

    store_credentials: Credentials = Credentials()
    """What proves to a store node on another host that this worker may use it."""

    hold_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120
    """How long at most the store keeps the blocks of a session from eviction after a request of it has ended; the node's
    `max_hold_seconds` counts where it is shorter, and all its holds together keep `max_held_share` of its memory. 0: not at
    all. In the public trace of coding agents, nine in ten pauses are shorter than 129 s."""

    kv_paths: tuple[KvPath, ...] = ()
    """Ways in which this worker can hand over or fetch blocks, the preferred one first."""

    block_tokens: Positive = 32
    """Tokens a block; vLLM on CPUs needs a multiple of 32."""

    max_model_len: Positive = 4096
    """Prompt plus answer, tokens."""

    max_running: Positive = 16
    """Requests in one batch."""

    prefill_speed: Annotated[float, Meta(gt=0)] = 1.0
    """Of its hardware at computing prompts, in proportion to the other workers of its model: twice as fast is 2."""

    decode_speed: Annotated[float, Meta(gt=0)] = 1.0
    """Likewise at generating."""

    labels: tuple[str, ...] = ()
    """That a request may ask for, such as a zone or a licence."""

    generation: Annotated[str, Meta(max_length=128)] = ""
    """Version of what is deployed. A prompt that one worker computes is decoded by one of the same generation, so that during a
    rolling update new workers never read blocks of old ones, nor the other way round."""

    adapters: dict[ModelName, str] = {}
    """Folder by name of the adapters (LoRA) that it may load when work for them comes; clients ask for them as for models.
    Workers of one model that have an adapter of the same name should have the same one."""

    adapter_slots: Positive = 4
    """Adapters that are loaded at a time, each with memory of its own on the device."""

    max_waiting: Annotated[int, Meta(ge=0)] = 256
    """Requests that wait for a place in the batch; more are refused with QUEUE_FULL."""

    stream_buffer: Annotated[int, Meta(ge=16)] = 1024
    """Messages that wait for a slow router; one more and its stream is cut. At 400 steps a second, 2.5 s of them."""

    load_interval_ms: Annotated[int, Meta(ge=10, le=500)] = 100
    """Load is reported on change, at most this often; deadlines, a drain's too, are checked as often."""

    heartbeat_ms: Annotated[int, Meta(ge=10)] = 1000
    """Load is reported at least this often."""

    watchdog: WatchdogSettings = WatchdogSettings()
    """When an engine that makes no progress is taken to hang."""

    drain_timeout_ms: Annotated[int, Meta(ge=0)] = 30_000
    """How long running requests may go on after SIGTERM; Kubernetes kills after 30 s by default."""

    evacuate_bytes: Annotated[int, Meta(ge=0)] = 8 << 30
    """What a worker that drains has brought at most to where other workers read it, warm blocks that are worth most first: to the tier
    of its store that nodes share (Redis, S3); where the store is its own, else to the store's peers or disk. It ends with
    `drain_timeout_ms` at the latest, and delays no answer. 0: nothing."""

    group: GroupSettings | None = None
    """Where its engine is spread over several nodes: which of them this is; absent: it has one."""

    vllm: VllmSettings = field(default_factory=VllmSettings)

    simulated: SimulatedSettings = field(default_factory=SimulatedSettings)

    def __post_init__(self) -> None:
        if not self.engine:
            raise ValueError("engine: is empty; name one of the installed engines")
        if len(set(self.kv_paths)) != len(self.kv_paths):
            raise ValueError(f"kv_paths: {', '.join(self.kv_paths)} names a path twice")
        if self.embedded_store is not None:
            self._check_embedded(self.embedded_store)
        if KvPath.STORE in self.kv_paths and not self.store_address:
            raise ValueError(
                "kv_paths: 'store' needs the address of a KV store node in `store`, or a node in `embedded_store`"
            )
        if self.role is Role.PREFILL and not self.kv_paths:
            raise ValueError("kv_paths: a prefill worker without a way to hand its blocks over is of no use")
        if self.model in self.adapters or "" in self.adapters:
            raise ValueError("adapters: each needs a name of its own, and not the model's")
        if self.heartbeat_ms < self.load_interval_ms:
            raise ValueError("heartbeat_ms: must not be below load_interval_ms")
        self._check_control()

    @property
    def control_proof(self) -> Credentials:
        """The credentials that callers of `control_listen` have to prove: `control_credentials`, or `registry_credentials` where these say nothing."""
        return self.registry_credentials if self.control_credentials == Credentials() else self.control_credentials

    @property
    def store_address(self) -> str:
        """Of the node that this worker uses, be it its own or another; empty: none."""
        if self.embedded_store is None:
            return self.store
        return next(filter(unix_path, self.embedded_store.listen), "")

    def _check_control(self) -> None:
        """Refuse a control port at which nobody is asked for a proof; on loopback too, which all users of the machine reach.

        A further rank of a group serves nothing but health there, which needs no proof.
        """
        proof = self.control_proof
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        leads = self.group is None or not self.group.rank
        if self.control_listen and leads and not unix_path(self.control_listen) and not asks:
            raise ValueError(
                f"control_listen: whoever reaches {self.control_listen} could end the worker: set"
                " control_credentials.secret_file, or certificate, key and authority, or listen at unix:/path;"
                " control_credentials.insecure = true is for networks that nobody else is on"
            )

    def _check_embedded(self, node: StoreSettings) -> None:
        if self.store:
            raise ValueError("embedded_store: `store` names another node; a worker has one, so leave one of them out")
        if not self.store_address:
            raise ValueError("embedded_store.listen: needs a unix: address, by which this worker uses its node")
        for name in ("listen", "control_listen"):
            if (own := unix_path(getattr(self, name))) and own in (*map(unix_path, node.listen), node.shm_socket):
                raise ValueError(f"{name}: {own} is a socket of `embedded_store`; give the worker another")
