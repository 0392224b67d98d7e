"""Settings of a local cluster: the topology that `fleet up` runs.

`fleet.cli.up` reads them through `fleet.config`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from fleet.core.errors import ConfigurationRefused
from fleet.core.hub import HubSettings
from fleet.core.ids import ModelName
from fleet.core.roles import KvPath, Role
from fleet.planner.decisions import PlanBudget, PlanGoals
from fleet.planner.messages import PoolName
from fleet.planner.settings import (
    FleetRuleSettings,
    GpuEngineSettings,
    LinearEngineSettings,
    LoadRuleSettings,
    PlannerMode,
    RehearsalSettings,
)
from fleet.router.settings.router import RouterSettings
from kvstore.eviction.policies import PolicyName
from kvstore.net.addresses import check_listen_address
from kvstore.security.metrics_access import MetricsAccess, MetricsTls
from kvstore.service.settings import AnyTier
from kvstore.tracing.settings import TracingSettings
from workers.engines.model_task import task_of_folder
from workers.settings import POOLING_TASKS, ModelTask, SimulatedSettings, VllmSettings
from workers.watchdog import WatchdogSettings

Positive = Annotated[int, Meta(ge=1)]

TINY = "tiny"
"""Value of `cluster.model` that stands for the tiny model, which `fleet up` builds itself (`fleet.local.tiny_model`)."""

SIMULATED = "simulated"
"""Value of `cluster.engine` that stands for the simulated engine, which needs no further package."""


CHAT_TEMPLATE = "chat_template.jinja"

Seconds = Annotated[float, Meta(ge=1, le=86_400)]


class SupervisionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for hung and dead processes of `fleet up`.

    A process that a debugger traces never counts as hung. Time in which a process waits for a core does not count as
    silence. After a standstill of the supervisor or of the whole machine, all time limits begin again.
    """

    stopped_seconds: Seconds = 3.0
    """Maximum time for which a process may be stopped by a signal before it is killed and restarted.

    The default allows tools that stop a process for a moment, such as a memory dump. If several routers share a port, a
    stopped router keeps getting its share of new connections, for less than 5 s with the default.
    """

    router_silence_seconds: Seconds = 5.0
    """Time after which a router whose event loop stands still counts as hung. It is then killed and started again.

    An event loop normally makes a turn within milliseconds, because long work runs in threads. With the default, a hung
    router is replaced and serves again within 10 s.
    """

    store_silence_seconds: Seconds = 10.0
    """Time after which a store node whose event loop stands still counts as hung. It is then killed and started again. The loop
    normally has no long pauses, because threads make the calls to backing tiers. While the loop stands still, workers
    compute blocks instead of loading them from the store.
    """

    worker_silence_seconds: Seconds = 30.0
    """Time after which a worker whose event loop stands still counts as hung. It is then killed and started again.

    The default is long, because engines sometimes make long synchronous calls (compiling a grammar, loading a LoRA adapter, garbage
    collection), and because a restart is expensive: the new worker has to load the model. Routers wait less: they send the requests of a
    silent worker elsewhere after `router.heartbeat_timeout_seconds`.
    """

    longest_pause_seconds: Seconds = 30.0
    """Maximum pause before a process that keeps dying is restarted. The first pause is a quarter of a second, and each
    further pause is twice as long. A process that refuses its settings waits for the maximum at once. Each pause is
    shortened at random by up to a half. The maximum in Kubernetes is 300 s, because its nodes serve many users.
    """


class ClusterSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that all processes of the cluster share, such as the model and the engine."""

    model: Annotated[str, Meta(min_length=1)] = TINY
    """The model: a Hugging Face folder, relative to the topology file; or a repository of the hub, such as Qwen/Qwen3-0.6B, with
    @revision appended for another revision than the newest one; or "tiny", a small model that `fleet up` builds itself.
    """

    served_name: str = ""
    """Name under which clients ask for the model; empty: the name of the folder or repository."""

    engine: Annotated[str, Meta(min_length=1)] = "vllm"
    """The engine of all workers: "vllm", "simulated", or another installed entry point of the group `workers.engines`."""

    task: ModelTask = ModelTask.AUTO
    """The task of the model: generate, embed or classify; see `task` of the workers. auto: the model's architecture decides;
    with the simulated engine, auto means generate. A cluster whose model does not generate has only pools of role both, no
    KV paths and no store.
    """

    chat_template: str = ""
    """File with the chat template in Jinja, relative to the topology file; empty: the chat template of the model."""

    tool_call_parser: str = "auto"
    """The parser of tool calls, by vLLM's name. auto: the parser that fits the chat template; empty: none. See
    `tool_call_parser` of the workers."""

    reasoning_parser: str = "auto"
    """The parser of reasoning, by vLLM's name. auto: the parser that fits the chat template; empty: none. See
    `reasoning_parser` of the workers."""

    kv_paths: tuple[KvPath, ...] = (KvPath.STORE,)
    """KV paths from prefill to decode workers, in any order: if both paths are possible, `router.prefer_direct` decides. The
    default is the store alone: the path `direct` uses NIXL, which takes most of a CPU core even when idle, and a machine
    without accelerators cannot spare a core.
    """

    block_tokens: Positive = 32
    """Tokens per KV block; vLLM on CPUs needs a multiple of 32."""

    max_model_len: Positive = 4096
    """Maximum number of tokens of prompt plus answer. If the model's own limit is lower, that limit applies."""

    adapters: dict[ModelName, str] = {}
    """LoRA adapters that every worker may load: the name under which clients ask for each, and its folder, relative to
    the topology file. The simulated engine does not read the folders.
    """

    adapter_slots: Positive = 4
    """Maximum number of LoRA adapters that a worker can have loaded at a time."""

    tls: bool = False
    """If true, `fleet up` makes a certificate authority, and a certificate for the ports for clients and for metrics; both
    are removed with the cluster. For certificates of your own, set `router.tls` and `metrics_tls`."""

    most_workers: Positive = 64
    """Maximum number of workers of all pools together, such as the machine's number of GPUs. Draining workers count too.
    At this number, neither `fleet scale` nor the planner gets a further worker started. `replicas` of the pools may
    exceed it at the start.
    """


class StorePlace(StrEnum):
    """Place of the KV store node."""

    PROCESS = "process"  # a process of its own: blocks survive the end of a worker
    WORKER = "worker"  # in the process of the only worker: one process less, but the blocks are lost with the worker


class StoreSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the cluster's KV store node."""

    place: StorePlace = StorePlace.PROCESS
    """Place of the node: "process" (a process of its own), or "worker" (in the worker's process; needs exactly one worker)."""

    capacity_mib: Positive = 256
    """Memory of the node for blocks, allocated when the node starts. 256 MiB hold 65,000 tokens of the tiny model."""

    eviction: PolicyName = "lru"
    """Eviction policy: which blocks go first when the memory is full."""

    tiers: tuple[AnyTier, ...] = ()
    """Backing tiers (SSD, Redis, S3, other store nodes). A block is looked for in them in the order of this list."""

    metrics_listen: str = ""
    """host:port of the node's /metrics; empty: there is none. The topology's `metrics_access` and `metrics_tls` apply to
    this port."""

    def __post_init__(self) -> None:
        check_listen_address("metrics_listen", self.metrics_listen, optional=True)


class PoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool of equal workers."""

    role: Role
    """The phases of a request that the workers run: prefill, decode, or both."""

    replicas: Annotated[int, Meta(ge=0, le=64)] = 1
    """Number of workers that the cluster starts with."""

    max_running: Positive = 16
    """Maximum number of requests in one batch of a worker."""

    metrics_listen: str = ""
    """host:port of the first worker's /metrics; empty: there is none. Each further worker of the pool, `decode-1` and so
    on, takes the next port, so that a scraper knows the ports of all workers. So no other address of the cluster may
    have one of the `cluster.most_workers` ports from this one on (or `replicas`, if that is more). The topology's
    `metrics_access` and `metrics_tls` apply to these ports."""

    vllm: VllmSettings = VllmSettings()
    """Settings of the engine vllm; other engines ignore them."""

    simulated: SimulatedSettings = SimulatedSettings()
    """Settings of the simulated engine; other engines ignore them."""

    watchdog: WatchdogSettings = WatchdogSettings()
    """Settings of the watchdog, which decides when an engine without progress counts as hung."""

    def __post_init__(self) -> None:
        check_listen_address("metrics_listen", self.metrics_listen, optional=True)


class PlannedPoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and costs of a pool, for the planner."""

    least: Annotated[int, Meta(ge=0, le=64)] = 1
    """Minimum number of workers that the planner gives to the pool."""

    most: Annotated[int, Meta(ge=0, le=64)] | None = None
    """Maximum number of workers that the planner gives to the pool; by default `cluster.most_workers`."""

    gpu: str = ""
    """Short name of the GPU type of the workers, as `fleet hardware list` shows it; empty: the workers have no GPU."""

    gpus: Positive = 1
    """Number of GPUs of one worker. If the engine of the pool has the kind `gpu`, this is its tp x pp x dp."""

    dollars_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Price per hour of one GPU; 0: the price in the price book (`prices`), if there is one. If `gpu` is empty, the price
    per hour of one worker."""

    watts: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Power in watts of one GPU under load, or of one worker without a GPU; 0: the estimate for the GPU type. It counts if
    `rule.settings.minimise` is `energy`."""

    start_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    """Assumed time from the start of a new worker until it serves. The rule `fleet` takes this value as its first estimate;
    each measured start then moves the estimate halfway to the measured time."""

    drain_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """Assumed time from the moment at which a worker is asked to end until it has drained and ended."""


class LocalPlannerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The planner, which changes the sizes of the pools by demand. Without this section there is none."""

    mode: PlannerMode = PlannerMode.SHADOW
    """`off` (no plans are made), `shadow` (plans are made and shown, not applied) or `active` (plans are applied)."""

    goals: PlanGoals
    """Goals for the model: maximum latencies, and the share of requests that must keep them."""

    budget: PlanBudget = PlanBudget()
    """Limits on GPUs, on dollars, and on the ratio of prefill to decode workers."""

    pools: dict[PoolName, PlannedPoolSection] = {}
    """Bounds by pool, such as `decode`; pools that are not named have from 1 to `cluster.most_workers` workers."""

    prices: str = ""
    """Price book: a TOML file with dollars per hour of a GPU by region and GPU type, for pools with a `gpu` whose `dollars_per_hour` is 0.
    A relative path starts from the current folder of `fleet up`. Empty: there is none."""

    region: str = ""
    """Region of the price book; empty: the first region in the book. It needs `prices`."""

    engines: dict[PoolName, LinearEngineSettings | GpuEngineSettings] = {}
    """Engine of each pool, as the planner models it; the rule `fleet` and rehearsals need the engines of all pools. If
    `cluster.engine` is simulated, a pool that is left out has the engine of its section `simulated`."""

    rule: FleetRuleSettings | LoadRuleSettings = FleetRuleSettings()
    """The rule that sizes the pools: `fleet` by models of the pools' engines, or `load` by the number of requests."""

    rehearsal: RehearsalSettings = RehearsalSettings()
    """Settings of the rehearsal, which tries plans in the simulator before they are carried out."""

    score_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 60.0
    """Time in seconds after a plan was carried out, over which latencies and costs are measured and compared with the
    predictions of the plan."""

    metrics_listen: str = ""
    """host:port of the planner's /metrics; empty: there is none."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Settings that say who may read the planner's metrics."""

    history: str = ""
    """File for the records of plans; a relative path starts from the current folder of `fleet up`. Empty: a file in the
    runtime folder, which is removed with the cluster."""

    record: str = ""
    """File for a recording of all decisions, for `fleet plan decide`; a relative path starts from the current folder of
    `fleet up`. Empty: no recording is made."""

    def __post_init__(self) -> None:
        check_listen_address("metrics_listen", self.metrics_listen, optional=True)


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole cluster on one machine, for `fleet up`."""

    cluster: ClusterSection = ClusterSection()
    """Settings that all processes of the cluster share, such as the engine and the model."""

    hub: HubSettings = HubSettings()
    """The hub from which a model is downloaded, and the folder for downloads."""

    router: RouterSettings = RouterSettings()
    """Settings of the router."""

    store: StoreSection = StoreSection()
    """The KV store node."""

    tracing: TracingSettings = TracingSettings()
    """Settings of traces for the router, the workers and the store node; the planner writes none."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Settings that say who may read the metrics of the workers and the store node; `router` and `planner` have settings of their own."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS of the metrics of the workers, the store node and the planner. `cluster.tls` makes a certificate for them too."""

    supervision: SupervisionSettings = SupervisionSettings()
    """When processes that hang are killed, and how processes that have ended are started again."""

    pools: tuple[PoolSection, ...] = (PoolSection(role=Role.PREFILL), PoolSection(role=Role.DECODE))
    """The pools of workers. Default: a prefill and a decode pool, each with one worker."""

    planner: LocalPlannerSection | None = None
    """The planner, which changes the sizes of the pools by demand; absent: there is none."""

    def replicas(self, role: Role) -> int:
        return sum(pool.replicas for pool in self.pools if pool.role is role)

    def __post_init__(self) -> None:
        if self.cluster.engine == SIMULATED:
            from fleet.frontend.text.response_templates import misspelt_parser  # noqa: PLC0415 - only for this engine

            if refused := misspelt_parser(self.cluster.tool_call_parser, self.cluster.reasoning_parser):
                raise ValueError(f"cluster.{refused}")
        if self.replicas(Role.PREFILL) and not self.replicas(Role.DECODE) + self.replicas(Role.BOTH):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")
        if not any(pool.replicas for pool in self.pools):
            raise ValueError("pools: no worker is left to start")
        if self.store.place is StorePlace.WORKER:
            self._check_store_in_worker()
        if self.replicas(Role.PREFILL) and not self.cluster.kv_paths:
            raise ValueError("cluster.kv_paths: prefill workers need a way to hand over blocks: store or direct")
        if self.cluster.tls and self.router.tls.certificate:
            raise ValueError("cluster.tls: makes a certificate, and router.tls.certificate names one; set one of them")
        if self.router.tracing.is_on:
            raise ValueError("router.tracing: all processes of the cluster trace alike; use the section `tracing`")
        if self.router.models or self.router.store:
            raise ValueError("router: `models` and `store` follow from the other sections; leave them out")

    def _check_store_in_worker(self) -> None:
        workers = sum(pool.replicas for pool in self.pools)
        if workers != 1:
            raise ValueError(
                f"store.place: a store in the worker's process is for one worker, and `pools` has {workers}; use 'process'"
            )
        if KvPath.STORE not in self.cluster.kv_paths:
            raise ValueError("store.place: `cluster.kv_paths` has no 'store', so that there would be none")


def model_folder(cluster: ClusterSection, tiny: Path, relative_to: Path) -> Path:
    """Return the folder of a cluster's model.

    Args:
        cluster: Names the model.
        tiny: The folder of the built-in model.
        relative_to: Folder that relative paths start from.

    Raises:
        ConfigurationRefused: The folder does not exist, or lacks `config.json` or `tokenizer.json`.
    """
    if cluster.model == TINY:
        return tiny
    folder = named_folder(cluster, relative_to)
    if not folder.is_dir():
        raise ConfigurationRefused(f"cluster.model: {folder} is not a folder")
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            raise ConfigurationRefused(
                f"cluster.model: {folder} is not a Hugging Face model folder: it has no {needed}"
            )
    return folder


def named_folder(cluster: ClusterSection, relative_to: Path) -> Path:
    """Return the folder that `model` names, which may not exist. Links are resolved, because its last part names the model.

    Raises:
        ConfigurationRefused: The path cannot be resolved.
    """
    try:
        return (relative_to / Path(cluster.model).expanduser()).resolve()
    except (RuntimeError, ValueError) as error:  # an unknown user's home, a loop of links, or a null character
        raise ConfigurationRefused(f"cluster.model: {cluster.model!r} is not a folder: {error}") from error


def for_task(topology: Topology, model_dir: Path) -> Topology:
    """Return the topology, adapted to the task of its model.

    A model that does not generate has only workers of role both, and no KV paths. If no pool has the role both, the
    decode pools get it, and the prefill pools are left out.

    Raises:
        ConfigurationRefused: The topology has pools or LoRA adapters that do not fit the task.
    """
    cluster = topology.cluster
    task = cluster.task
    if task is ModelTask.AUTO:
        task = ModelTask.GENERATE if cluster.engine == SIMULATED else task_of_folder(model_dir)
    if task not in POOLING_TASKS:
        return topology
    pools = topology.pools
    if any(pool.role is Role.BOTH for pool in pools):
        pools = tuple(pool for pool in pools if pool.role is Role.BOTH or pool.replicas)
    else:  # no pool has the role both, as in the default topology
        pools = tuple(structs.replace(pool, role=Role.BOTH) for pool in pools if pool.role is Role.DECODE)
    if any(pool.role is not Role.BOTH for pool in pools) or not pools:
        raise ConfigurationRefused(f"pools: a model with the task {task} has workers of role both")
    if cluster.adapters:
        raise ConfigurationRefused(f"cluster.adapters: a model with the task {task} takes no LoRA adapters")
    return structs.replace(topology, cluster=structs.replace(cluster, task=task, kv_paths=()), pools=pools)


def with_chat_template(folder: Path, template: str, relative_to: Path, runtime: Path) -> Path:
    """Return a folder of the model that has the chat template in the file `template`.

    If `template` is empty, return `folder` itself. If it names a file, make a folder in `runtime` with a copy of this file
    and links to the model's other files.

    Raises:
        ConfigurationRefused: The template cannot be read.
        OSError: The folder in `runtime` cannot be made.
    """
    if not template:
        return folder
    file = (relative_to / Path(template).expanduser()).resolve()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigurationRefused(f"cluster.chat_template: {file}: {error.strerror}") from error
    copy = runtime / "model"
    copy.mkdir()
    for each in folder.iterdir():
        (copy / each.name).symlink_to(each.resolve())
    (copy / CHAT_TEMPLATE).unlink(missing_ok=True)
    (copy / CHAT_TEMPLATE).write_bytes(content)
    return copy


def adapter_folders(cluster: ClusterSection, relative_to: Path) -> dict[ModelName, str]:
    """Return the folders of a cluster's LoRA adapters, by name.

    Raises:
        ConfigurationRefused: The folder of an adapter does not exist, and the engine is not the simulated one.
    """
    folders = {name: (relative_to / Path(folder).expanduser()).resolve() for name, folder in cluster.adapters.items()}
    for name, folder in folders.items():
        if cluster.engine != SIMULATED and not folder.is_dir():
            raise ConfigurationRefused(f"cluster.adapters.{name}: {folder} is not a folder")
    return {name: str(folder) for name, folder in folders.items()}


def served_name(cluster: ClusterSection, folder: Path) -> ModelName:
    """Return the name under which clients ask for the model."""
    if cluster.served_name:
        return ModelName(cluster.served_name)
    return ModelName(TINY if cluster.model == TINY else folder.name)
