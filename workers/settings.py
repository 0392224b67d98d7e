"""Settings of a worker process: the structs with their fields and defaults; `fleet.config` loads them."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from fleet.core.discovery import Discovery
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import MAX_VECTOR_NUMBERS
from fleet.core.roles import KvPath, Role
from fleet.hardware.latency.linear import EngineLatency, Speedup
from kvstore.net.addresses import check_listen_address, host_port, unix_path
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess, MetricsTls
from kvstore.service.settings import StoreSettings
from kvstore.tracing.settings import TracingSettings
from workers.ports import KvLayout
from workers.watchdog import WatchdogSettings

Positive = Annotated[int, Meta(ge=1)]


class VllmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the embedded vLLM engine."""

    kv_cache_gib: Annotated[float, Meta(gt=0)] = 1
    """Host memory for the KV cache of a CPU engine, for all its ranks together; on accelerators set
    `extra_args.gpu_memory_utilization`."""

    dtype: str = "auto"
    """Data type of the model, by vLLM's name. With float32, the tokens of an answer do not depend on the other requests of the batch."""

    enforce_eager: bool = True
    """True if the engine captures no graphs and compiles nothing. It then starts faster, but runs slower if its kernels
    are short."""

    omp_threads: Annotated[int, Meta(ge=1)] = 1
    """Threads of each rank of a CPU engine; the default is 1, so that a prefill and a decode engine can share two cores."""

    keeps_forms: bool = True
    """True if the engine supports structured output: JSON schemas, regular expressions and grammars. It then loads the
    model's tokenizer as well, and compiles the schemas, expressions and grammars of clients. If off, requests with
    structured output are refused."""

    direct_checksums: Literal["auto", "on", "off"] = "auto"
    """Checksums of the blocks that move between engines by the KV path direct. The prefill engine sends them with the
    handoff; the decode engine counts blocks that arrive with another checksum, and computes them again. auto: on for
    CPU engines; off for accelerators, whose blocks would have to be copied to host memory for the check."""

    extra_args: dict[str, Any] = {}
    """Any other argument of vLLM's `AsyncEngineArgs`; it overrides the fields above. If neither `max_num_batched_tokens` nor
    `performance_mode` is given here, Fleet limits the steps of a CPU engine with one rank and a model that generates from
    text: to 256 tokens, or to twice `max_running` if that is more (exceptions: `workers.engines.vllm.launch.step_tokens`)."""


class SimulatedSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the simulated engine, which runs no model, but computes tokens that depend on every byte of its KV."""

    latency: EngineLatency = EngineLatency()
    """The durations of prefills, decode steps and transfers."""

    speedup: Speedup = 1.0
    """Factor by which every latency is divided; large values make tests fast."""

    kv_blocks: Positive = 4096
    """Number of KV blocks that fit into the engine's memory."""

    bytes_per_token: Annotated[int, Meta(ge=8)] = 64
    """KV bytes of one token; small by default (the tiny Llama model that the project builds has 4096). The number must be a
    multiple of 8, because they are divided among the 4 heads of each of the 2 layers."""

    tensor_parallel: Literal[1, 2, 4] = 1
    """Number of ranks that share the heads. More ranks make the engine no faster, but each has memory of its own."""

    kv_layout: KvLayout = "HND"
    """The layout of blocks in a rank's memory. Engines that differ in the layout or in the number of ranks can
    share blocks only through the store, which converts them."""

    seed: Annotated[int, Meta(ge=0)] = 0
    """Number that stands for the weights: engines with different seeds compute different KV and different tokens."""

    vocab_size: Annotated[int, Meta(ge=2)] = 4096
    """Number of tokens in the vocabulary, if `model_dir` has no config.json."""

    eos_token_ids: tuple[int, ...] = (2,)
    """The end-of-sequence tokens, if `model_dir` has no config.json."""

    eos_probability: Annotated[float, Meta(ge=0, lt=1)] = 0.002
    """The probability that a token ends the sequence; with the default, an answer has 500 tokens on average."""

    max_batched_tokens: Positive = 2048
    """Maximum number of tokens in one step, of answers and prompts together; long prompts take several steps (chunked
    prefill)."""

    load_timeout_ms: Positive = 2000
    """Maximum wait of a request for blocks from the store or a prefill engine; after this time the blocks are computed."""

    publish_timeout_ms: Positive = 2000
    """After its tokens are computed, a prefill waits at most this time until its blocks are in the store. This is also
    the limit of each write in the background."""

    adapter_load_ms: Annotated[float, Meta(ge=0)] = 50.0
    """The time to load a LoRA adapter: tens of megabytes from a nearby file system."""

    start_ms: Annotated[float, Meta(ge=0)] = 0.0
    """The time that the engine takes to start, like real engines that load weights. `speedup` does not divide it."""

    vector_size: Annotated[int, Meta(ge=1, le=MAX_VECTOR_NUMBERS)] = 64
    """Dimensions of the embeddings of a worker with the task embed."""

    hang_file: str = ""
    """A fault for tests: while a file with this path exists, the engine hangs in its next step. Empty: never."""

    direct_listen: str = "127.0.0.1:0"
    """Address at which decode engines fetch blocks: host:port (port 0: any free port) or unix:path."""

    direct_lease_ms: Positive = 30_000
    """Time for which a prefill engine keeps handed-off blocks for a decode engine, which otherwise computes them again.
    vLLM's NIXL connector has the same default."""

    def __post_init__(self) -> None:
        if self.bytes_per_token % 8:
            raise ValueError(f"bytes_per_token: {self.bytes_per_token} is not a multiple of 8")
        if any(not 0 <= eos < self.vocab_size for eos in self.eos_token_ids):
            raise ValueError(f"eos_token_ids: {self.eos_token_ids} are not all within the vocabulary")
        if len(set(self.eos_token_ids)) >= self.vocab_size:
            raise ValueError("eos_token_ids: no other token is left in the vocabulary")


class ModelTask(StrEnum):
    """Task of a worker's model; `WorkerSettings.task` describes the values."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


class GroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker group: one engine on several hosts, with a process on each (`workers.rank_rendezvous`)."""

    nodes: Annotated[int, Meta(ge=2, le=64)]
    """The number of processes, one on each node."""

    rank: Annotated[int, Meta(ge=0)] = 0
    """The rank of this process. Rank 0 leads, registers and serves requests; routers and clients never connect to the other
    ranks. All ranks must have the same settings, except those that belong to one process, such as its rank, its id and
    its addresses (`workers.rank_rendezvous.common_settings_digest`)."""

    leader: Annotated[str, Meta(min_length=1)]
    """host:port at which the other ranks find rank 0."""

    listen: str = ""
    """host:port at which the first rank listens for the other ranks; empty: `leader`. Whoever can connect there can
    take part, and engines trust each other, so only the group's own nodes should reach it."""

    engine_ports: tuple[Annotated[int, Meta(ge=1, le=65_535)], ...] = ()
    """Two ports of the first rank's host, at which the engine's processes find each other (`workers.rank_rendezvous.ENGINE_PORTS`);
    empty: any free ports."""

    join_timeout_ms: Positive = 600_000
    """Maximum time that each rank waits until all ranks have joined; then its process ends with an error. Before, nodes may
    have to be created, and container images fetched."""

    silence_ms: Annotated[int, Meta(ge=100)] = 15_000
    """A rank that sends nothing for this time counts as lost. If the group had formed, all its ranks then end, so that their
    supervisors start them again."""

    def __post_init__(self) -> None:
        if self.rank >= self.nodes:
            raise ValueError(f"rank: {self.rank} is not below the number of nodes, {self.nodes}; ranks count from 0")
        for name, address in (("leader", self.leader), ("listen", self.listen or self.leader)):
            try:
                host_port(address)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if len(self.engine_ports) not in {0, 2} or len(set(self.engine_ports)) != len(self.engine_ports):
            raise ValueError("engine_ports: give two different ports, or none")


POOLING_TASKS = (ModelTask.EMBED, ModelTask.CLASSIFY)


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one worker process."""

    worker_id: Annotated[WorkerId, Meta(min_length=1, max_length=128)]
    """The worker's id, which is unique in the cluster. It stays the same when the process restarts."""

    role: Role = Role.BOTH
    """The phases of a request that the worker runs: prefill, decode, or both. With decode it also runs whole requests,
    without a prefill worker (aggregated)."""

    engine: str = "vllm"
    """The engine that runs the model: the name of an entry point in the group `workers.engines`, such as vllm or simulated."""

    model_dir: str = ""
    """A Hugging Face folder; or a repository of the hub such as Qwen/Qwen3-0.6B, with @revision after it for another
    revision than the newest. The simulated engine reads no weights there, only config.json, the tokenizer and the chat
    template, if they exist; for this engine, the field may be empty."""

    hub: HubSettings = HubSettings()
    """The hub from which a repository in `model_dir` is downloaded, and the folder for downloads."""

    model: Annotated[ModelName, Meta(min_length=1)]
    """The model name in clients' requests."""

    tool_call_parser: str = "auto"
    """The parser of tool calls, by vLLM's name, such as hermes or llama3_json. auto: the parser that fits the chat
    template; if none fits, requests with tools are refused. Empty: none. The simulated engine writes calls that the
    router parses, and knows hermes and qwen3_coder."""

    reasoning_parser: str = "auto"
    """The parser of reasoning, by vLLM's name, such as qwen3 or deepseek_r1. auto: the parser that fits the chat template.
    Empty: none, and reasoning is a part of the text."""

    task: ModelTask = ModelTask.AUTO
    """The task of the model: generate (tokens), embed (vectors, for /v1/embeddings), or classify (a number for each class; with
    one class it scores pairs of texts, for /v1/rerank and /v1/score). auto: as vLLM reads it from the model folder; the
    simulated engine generates. A worker that does not generate has the role both, no KV paths, no store and no LoRA adapters."""

    listen: str = "127.0.0.1:0"
    """Address at which routers connect: host:port (port 0: any free port) or unix:path."""

    credentials: Credentials = Credentials()
    """The credentials that routers prove at `listen`, unless it is a Unix socket: the secret in `secret_file`, which the
    worker proves to them as well. With `certificate` and `key` the connection uses TLS, and with `authority` routers
    have to show a certificate. If other hosts can reach `listen`, a secret or an authority is required, unless `insecure`
    states that nobody else is on that network."""

    control_listen: str = ""
    """Address at which administrators connect: gRPC with the Worker service, health and reflection; unix:path, or
    host:port with `control_credentials`. Empty: there is no control port."""

    control_credentials: Credentials = Credentials()
    """The credentials that callers of `control_listen` over TCP have to prove: the secret in `secret_file`, or a
    certificate signed by `authority` (with `certificate` and `key` of this end). Default: `registry_credentials`,
    because only members of the cluster know the routers' secret. Without a secret, an authority or `insecure`, the
    worker refuses to listen over TCP, because any caller could end it (`Drain`). Health and reflection need no
    proof."""

    metrics_listen: str = ""
    """host:port of /metrics, for monitoring that reaches workers; routers export what workers report in any case. Empty:
    there is no such port. The ranks of a group after the first one export only the metrics of this port's
    certificate."""

    metrics_access: MetricsAccess = MetricsAccess()
    """The keys with which the metrics at `metrics_listen` may be read. Without a key or `open`, only a port on loopback answers."""

    metrics_tls: MetricsTls = MetricsTls()
    """The certificate and key for TLS at `metrics_listen`; without them, the port does not use TLS."""

    advertise: str = ""
    """The address that routers dial, if it differs from `listen`, for example because `listen` is 0.0.0.0 or addresses
    are translated. Empty: `listen`."""

    registry: str = ""
    """Control address of a router whose registry takes the worker: host:port or unix:/path. A name that resolves to
    several routers means all of them. Empty: the worker registers with none."""

    registry_credentials: Credentials = Credentials()
    """The proof to the registry, unless it is a Unix socket, that this worker belongs to the cluster: the routers'
    secret, or a certificate. They also protect `control_listen` if `control_credentials` are empty."""

    name_wait_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """Maximum wait for the end of another process with the same `worker_id`. After it the worker ends with an error. A router
    notices the end of a process within 10 s (the lease of the process), so a minute is enough if the other process is this
    worker's own predecessor."""

    discovery: Discovery | None = None
    """The directory in which the worker publishes itself for all routers that read it, besides `registry` or instead of
    it; absent: none."""

    store: str = ""
    """gRPC address of the KV store node, unix:path or host:port; empty: no store, or the one of `embedded_store`."""

    embedded_store: StoreSettings | None = None
    """A KV store node in this process, which ends with the worker. Its own field `listen` needs a unix: address, which
    this worker and all other workers of the host use. An embedded node suits a host with one worker; several workers
    are better off with a separate node."""

    store_credentials: Credentials = Credentials()
    """Credentials by which a store node on another host accepts this worker."""

    hold_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120
    """Maximum time for which the store pins the blocks of a session after one of its requests has ended. The node's
    `max_hold_seconds` applies if it is shorter, and all pins of the node together keep at most `max_held_share` of its
    memory. 0: no pins. In the public trace of coding agents, nine in ten pauses are shorter than 129 s."""

    kv_paths: tuple[KvPath, ...] = ()
    """KV paths by which this worker can hand over or fetch blocks, in any order: if both paths are possible, the router's
    `prefer_direct` decides. Empty: the worker only runs whole requests."""

    block_tokens: Positive = 32
    """Tokens in a block; vLLM on CPUs needs a multiple of 32."""

    max_model_len: Positive = 4096
    """Maximum number of tokens of a prompt and its answer together."""

    max_running: Positive = 16
    """Maximum number of requests in one batch."""

    prefill_speed: Annotated[float, Meta(gt=0)] = 1.0
    """Prefill speed of the worker's hardware, relative to the other workers of its model: 2 means twice as fast."""

    decode_speed: Annotated[float, Meta(gt=0)] = 1.0
    """Decode speed of the worker's hardware, relative to the other workers of its model: 2 means twice as fast."""

    labels: tuple[str, ...] = ()
    """Labels of the worker, such as a zone or a licence. A request that demands a label goes only to workers with this label."""

    generation: Annotated[str, Meta(max_length=128)] = ""
    """The version of the deployment. A prefill and a decode worker form a pair only within one generation. So during a
    rolling update, no decode worker takes over a request from a prefill worker of another version. The generation does
    not limit which blocks a worker loads from the store."""

    adapters: dict[ModelName, str] = {}
    """Folders of the LoRA adapters that the worker may load on demand, by name; clients ask for them as for models.
    Workers of one model should have the same adapter under the same name."""

    adapter_slots: Positive = 4
    """Maximum number of LoRA adapters that are loaded at a time; each uses memory of the device."""

    max_waiting: Annotated[int, Meta(ge=0)] = 256
    """Maximum number of requests that wait for a place in the batch; further requests are refused with QUEUE_FULL."""

    stream_buffer: Annotated[int, Meta(ge=16)] = 1024
    """Maximum number of messages that wait for a slow router; a further message closes the router's stream. An engine with
    400 steps a second fills the default in 2.5 s."""

    kept_answers_mib: Annotated[int, Meta(ge=0, le=1 << 14)] = 64
    """Memory limit in MiB for the tokens of resumable answers that clients get as server-sent events. An answer takes
    400 bytes, and 4 more for each token. Above the limit, answers are forgotten: first those that ended earliest, then
    running ones. 0: none are kept."""

    kept_answers_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """Time for which the tokens of a resumable answer are kept after its end: longer than clients take to come back."""

    load_interval_ms: Annotated[int, Meta(ge=10, le=500)] = 100
    """Minimum time between two load reports, which the worker sends when its load has changed. The deadlines of requests
    and of a drain are checked at the same interval."""

    heartbeat_ms: Annotated[int, Meta(ge=10)] = 1000
    """Maximum time between two load reports: after this time the worker reports its load even if it has not changed."""

    watchdog: WatchdogSettings = WatchdogSettings()
    """Settings of the watchdog, which decides when an engine without progress counts as hung."""

    tracing: TracingSettings = TracingSettings()
    """Traces of the attempts. These settings say where the spans are sent; routers decide which requests are traced."""

    drain_timeout_ms: Annotated[int, Meta(ge=0)] = 30_000
    """Time in which running requests may finish after SIGTERM; then they are aborted, and their routers get a rejection.
    Kubernetes kills a pod 30 s after SIGTERM by default."""

    evacuate_bytes: Annotated[int, Meta(ge=0)] = 8 << 30
    """Maximum number of bytes of warm blocks that a draining worker copies to where other workers read them, the most
    valuable blocks first. They go to the tier of its store that nodes share (Redis, S3). If there is no such tier and the store
    ends with the worker, they go to the store's peers or to its disk. The evacuation ends with `drain_timeout_ms` at
    the latest, and delays no answer. 0: none."""

    group: GroupSettings | None = None
    """The worker group, and the rank of this process in it; absent: the engine runs on one node."""

    vllm: VllmSettings = field(default_factory=VllmSettings)
    """Settings of the engine vllm; other engines ignore them."""

    simulated: SimulatedSettings = field(default_factory=SimulatedSettings)
    """Settings of the simulated engine; other engines ignore them."""

    def __post_init__(self) -> None:
        check_listen_address("listen", self.listen, or_unix=True)
        check_listen_address("control_listen", self.control_listen, or_unix=True, optional=True)
        check_listen_address("metrics_listen", self.metrics_listen, optional=True)
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
            raise ValueError(
                "kv_paths: is empty, but a prefill worker has to hand its blocks over; add 'direct' or 'store'"
            )
        if self.model in self.adapters or "" in self.adapters:
            raise ValueError("adapters: each needs a name of its own that is not the model's")
        if self.heartbeat_ms < self.load_interval_ms:
            raise ValueError("heartbeat_ms: must not be below load_interval_ms")
        if self.task in POOLING_TASKS:
            self.check_pooling(self.task)
        self._check_control()

    @property
    def control_proof(self) -> Credentials:
        """The credentials that protect `control_listen`: `control_credentials`, or if empty, `registry_credentials`."""
        return self.registry_credentials if self.control_credentials == Credentials() else self.control_credentials

    @property
    def engine_host(self) -> str:
        """The host at which engines of other workers find this worker's engine.

        It is the host of `advertise`, or of `listen` if `advertise` is empty; 127.0.0.1 if that is a Unix socket.
        """
        address = self.advertise or self.listen
        return "127.0.0.1" if unix_path(address) else address.rpartition(":")[0]

    @property
    def store_address(self) -> str:
        """The address of the store node that this worker uses, its own or another one; empty: none."""
        if self.embedded_store is None:
            return self.store
        return next(filter(unix_path, self.embedded_store.listen), "")

    def check_pooling(self, task: str) -> None:
        """Refuse settings that make no sense for a worker whose model computes vectors, such as a store.

        Raises:
            ValueError: A setting makes no sense for such a worker; the message names the setting.
        """
        if self.role is not Role.BOTH:
            raise ValueError(
                f"role: {self.role} is for models that generate; a worker with the task {task} has role both"
            )
        for name, value in (
            ("kv_paths", self.kv_paths),
            ("store", self.store),
            ("embedded_store", self.embedded_store),
        ):
            if value:
                raise ValueError(
                    f"{name}: a worker with the task {task} neither hands blocks over nor stores them; leave it out"
                )
        if self.adapters:
            raise ValueError(f"adapters: a worker with the task {task} takes no LoRA adapters; leave them out")

    def _check_control(self) -> None:
        """Refuse a control port over TCP without a proof, even on loopback, because all users of the machine reach it.

        `insecure` allows it. A rank above 0 of a worker group serves only health on this port, which needs no proof.
        """
        proof = self.control_proof
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        leads = self.group is None or not self.group.rank
        if self.control_listen and leads and not unix_path(self.control_listen) and not asks:
            raise ValueError(
                f"control_listen: any caller of {self.control_listen} could end the worker: set"
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
                raise ValueError(f"{name}: {own} is a socket of `embedded_store`; give the worker another one")
