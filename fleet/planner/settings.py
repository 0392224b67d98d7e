"""Settings of a planner: define its goals, its pools, its demand source, and the target of its plans."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleet.core.ids import ModelName
from fleet.hardware.gpus import gpus
from fleet.hardware.latency.linear import EngineLatency, Speedup
from fleet.planner.decisions import PlanBudget, PlanGoals, PlannedPool, check_energy, check_limits, check_roles
from fleet.planner.messages import PoolName
from fleet.planner.rule_settings import IntervalSeconds, PlannerRuleSettings
from kvstore.net.addresses import (
    check_http_url,
    check_listen_address,
    host_port,
    refuse_credentials,
    refuse_plain_key,
    unix_path,
)
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess, MetricsTls

Text = Annotated[str, Meta(min_length=1)]


class FolderTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """Target of plans: a folder in which an orchestrator (`fleet up`, or your own) reads plans and reports pools."""

    folder: Text
    """Path of the folder."""


class EtcdTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """Target of plans: two keys in etcd, by which your own orchestrator reads plans and reports the pools."""

    endpoints: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """host:port of one or several members of the etcd cluster; the next one is asked if one does not answer."""

    prefix: Text = "/fleet/scaling/"
    """Prefix of the keys `plan` and `report`."""

    credentials: Credentials = Credentials()
    """TLS: `authority` signs etcd's certificate; `certificate` and `key` belong to the program that connects to etcd. If
    none of them is set, TLS is off."""

    def __post_init__(self) -> None:
        _check_addresses("endpoints", self.endpoints)


class KubernetesTarget(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kubernetes"
):
    """Target of plans: the RoleScalers of a DisaggDeployment.

    The planner needs the verb get on disaggdeployments, and list and patch on rolescalers.
    """

    deployment: Text
    """Name of the DisaggDeployment."""

    namespace: Text = "default"
    """Namespace of the DisaggDeployment."""

    kubeconfig: str = ""
    """Kubeconfig file; empty: the service account of the pod."""


Target = FolderTarget | EtcdTarget | KubernetesTarget


class PlanConnectorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a settings file that names only the target of plans."""

    connector: Target


Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class PlannerMode(StrEnum):
    """Modes of a planner: what happens with its decisions."""

    OFF = "off"
    """No decision is made; demand is still collected."""

    SHADOW = "shadow"
    """Plans are made and shown, and their predictions are compared with measurements, but no plan is applied."""

    ACTIVE = "active"
    """Plans are applied."""


class RouterDemandSettings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="routers"
):
    """Demand source: the control ports of all routers of the model."""

    addresses: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """Control addresses: host:port, or unix:/path."""

    connections: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of router processes behind each address (`fleet serve router --processes N`). The planner opens a connection to
    each process."""

    credentials: Credentials = Credentials()
    """Credentials that the planner proves to routers over TCP; they must fit the routers' `control_credentials`."""

    stale_seconds: Seconds = 5.0
    """Maximum time without a report of a router. After it, the planner keeps all numbers of replicas until the router
    reports again."""

    def __post_init__(self) -> None:
        _check_addresses("addresses", [each for each in self.addresses if not unix_path(each)])


class MetricsDemandSettings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="metrics"
):
    """Demand source: the pages /metrics of all routers, for planners that cannot reach the routers' control ports.

    This source has no sample of requests for rehearsals.
    """

    urls: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """Pages with metrics, such as http://router:8000/metrics."""

    key_file: str = ""
    """File with the access key for the pages (`metrics_access` of the routers); empty: no key is sent. The file is read
    before each query."""

    insecure: bool = False
    """Allow sending the key over http, without encryption, to other hosts. Set this only for networks to which nobody
    else has access."""

    every_seconds: IntervalSeconds = 5.0
    """Pause between two queries of a page."""

    stale_seconds: Seconds = 15.0
    """Maximum time without an answer of a page. After it, the planner keeps all numbers of replicas until the page answers
    again."""

    def __post_init__(self) -> None:
        for index, url in enumerate(self.urls):
            refuse_credentials(f"urls[{index}]", url, "key_file")
            check_http_url(f"urls[{index}]", url)
            if self.key_file and not self.insecure:
                refuse_plain_key(f"urls[{index}]", url, "key_file", "insecure")
        if self.stale_seconds <= self.every_seconds:
            raise ValueError(
                f"stale_seconds: {self.stale_seconds:g} must exceed every_seconds ({self.every_seconds:g}),"
                " or every page would be out of date before the next one"
            )


class PrometheusDemandSettings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="prometheus"
):
    """Demand source: a Prometheus server that scrapes the routers, or another server with the HTTP API of Prometheus.

    This source has no sample of requests for rehearsals.
    """

    url: Text
    """Address of the server: ``http://host:port``, with the path before ``/api/v1`` if there is one."""

    labels: dict[Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")], str] = {}
    """Labels that select the series of the model's routers, such as `job`; empty: all series of `fleet_demand_…`."""

    routers: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Number of router processes that must report. If fewer report, the planner keeps all numbers of replicas."""

    token_file: str = ""
    """File with a bearer token; empty: no token is sent. The file is read before each query."""

    insecure: bool = False
    """Allow sending the token over http, without encryption, to another host. Set this only for networks to which
    nobody else has access."""

    authority: str = ""
    """File with the authorities (PEM) that sign the server's certificate for https; empty: those of the system."""

    every_seconds: IntervalSeconds = 5.0
    """Pause between two rounds of queries."""

    deadline_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """Maximum time for the answers to all queries of a round. A round that takes longer is dropped."""

    stale_seconds: Seconds = 60.0
    """Maximum age of a router's last sample, and maximum time without a complete round. Beyond either of them, the planner
    keeps all numbers of replicas. The default is the time of four scrapes at the usual interval of 15 seconds."""

    def __post_init__(self) -> None:
        refuse_credentials("url", self.url, "token_file")
        check_http_url("url", self.url)
        if self.token_file and not self.insecure:
            refuse_plain_key("url", self.url, "token_file", "insecure")
        if self.stale_seconds <= self.every_seconds:
            raise ValueError(
                f"stale_seconds: {self.stale_seconds:g} must exceed every_seconds ({self.every_seconds:g}),"
                " or every sample would be out of date before the next one"
            )


class FileElectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """Leader election by a file lock, for planners on one machine or on a common file system with locks (NFS 4)."""

    path: Text
    """Path of the file that the leader locks."""


class EtcdElectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="etcd"):
    """Leader election by a key in etcd. Etcd deletes the key when the leader's etcd lease ends."""

    endpoints: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """Addresses of etcd's servers: host:port."""

    key: Text = "/fleet/planner/leader"
    """Key that the leader holds. Planners of different models need different keys."""

    lease_seconds: Annotated[int, Meta(ge=2, le=3600)] = 10
    """Duration of the leader's etcd lease. If the leader was killed, another planner leads when this lease has ended."""

    credentials: Credentials = Credentials()
    """TLS: `authority` signs etcd's certificate; `certificate` and `key` are the planner's. If none of them is set, TLS
    is off."""

    def __post_init__(self) -> None:
        _check_addresses("endpoints", self.endpoints)


class KubernetesElectionSettings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kubernetes"
):
    """Leader election by a Lease of Kubernetes; the planner needs the verbs get, create and update on leases."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] = "fleet-planner"
    """Name of the Lease."""

    namespace: str = ""
    """Namespace of the Lease; empty: the namespace of the planner's pod."""

    duration_seconds: Annotated[int, Meta(ge=3, le=3600)] = 15
    """Time for which other planners wait for a leader that no longer renews the Lease."""

    kubeconfig: str = ""
    """Kubeconfig file; empty: the service account of the pod."""


class LinearEngineSettings(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"
):
    """Describes an engine whose step times are a linear function (`fleet.hardware.latency.linear`), such as the simulated engine."""

    latency: EngineLatency = EngineLatency()
    """Coefficients of the engine's step times."""

    speedup: Speedup = 1.0
    """Factor by which the engine is faster than `latency` states: every time in `latency` is divided by this factor."""

    max_running: Positive = 16
    """Maximum number of requests in one batch of a replica."""

    kv_tokens: Positive = 131_072
    """Number of tokens whose KV fits into the memory of one replica."""

    step_tokens: Positive = 2048
    """Maximum number of prompt tokens of one step."""

    bytes_per_token: Annotated[float, Meta(ge=0)] = 64.0
    """Bytes of KV of one token."""


class GpuEngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="gpu"):
    """Describes the engine of a pool on GPUs; its step times are estimated from the model and the GPU."""

    model: Text
    """Folder with a Hugging Face config.json, or that file, or the Hugging Face repository of a model in `fleet.hardware.known_models`."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """The engine by whose measured efficiencies on GPUs the step times are estimated."""

    tp: Positive = 1
    """Tensor parallelism, in GPUs."""

    pp: Positive = 1
    """Pipeline parallelism: number of stages."""

    dp: Positive = 1
    """Data parallelism of the attention: number of groups of `tp` GPUs."""
    ep: Positive = 1
    """Expert parallelism: number of GPUs over which whole experts are distributed; 1: every expert is split over the GPUs."""

    max_running: Positive = 256
    """Maximum number of requests in one batch of a replica."""

    step_tokens: Positive = 8192
    """Maximum number of prompt tokens of one step."""


class LoadRuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="load"):
    """Settings of the simple rule, which sizes pools by numbers of requests, as KEDA does, without engine models."""

    requests_per_replica: Annotated[float, Meta(gt=0, le=1e6)]
    """Number of running and waiting requests for which one replica suffices."""

    interval_seconds: IntervalSeconds = 5.0
    """Time between two decisions."""

    cool_down_seconds: Annotated[float, Meta(ge=0, le=1e6)] = 300.0
    """Time for which a lower need must last before a pool shrinks."""


class FleetRuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="fleet"):
    """Choice of Fleet's own rule (`fleet.planner.machine`), which sizes pools by the models of their engines."""

    settings: PlannerRuleSettings = PlannerRuleSettings()
    """Settings of the rule."""


class RehearsalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the rehearsal: a trial of each new plan in the simulator before the plan is applied."""

    enabled: bool = True
    """Rehearse each new plan before it is applied. If off, plans are applied without a rehearsal."""

    limit_seconds: Annotated[float, Meta(gt=0, le=60)] = 10.0
    """Time limit of a rehearsal. A rehearsal that takes longer is aborted, the plan is applied without its result, and
    the record of the plan says so."""

    max_queue_seconds: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """The setting `max_queue_seconds` of the routers: the rehearsal refuses requests that would wait longer, as they do. If it is
    not set, it is that of the router in `fleet up`, and otherwise the default of routers, 10."""


class PlannerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a planner process."""

    model: ModelName
    """Name under which the routers serve the model."""

    mode: PlannerMode = PlannerMode.SHADOW
    """`off` (no decisions), `shadow` (plans are made and shown, but not applied) or `active` (plans are applied)."""

    goals: PlanGoals
    """Latency goals of the model."""

    budget: PlanBudget = PlanBudget()
    """Limits on GPUs, on dollars, and on the ratio of prefill to decode replicas."""

    pools: Annotated[tuple[PlannedPool, ...], Meta(min_length=1)]
    """The pools that the planner sizes. The planner does not change other pools."""

    prices: str = ""
    """Price book: a TOML file with dollars per hour of a GPU by region and GPU type, for pools with a `gpu` whose
    `dollars_per_hour` is 0. Empty: there is none."""
    region: str = ""
    """Region of the price book; empty: the first region in it. It needs `prices`."""

    engines: dict[PoolName, LinearEngineSettings | GpuEngineSettings] = {}
    """Engine of each pool. The rule `fleet` and rehearsals need the engines of all pools."""

    rule: FleetRuleSettings | LoadRuleSettings = FleetRuleSettings()
    """The rule that sizes the pools: `fleet` by models of their engines, or `load` by the number of requests."""

    source: RouterDemandSettings | MetricsDemandSettings | PrometheusDemandSettings
    """Where the planner learns the demand."""

    target: Target
    """Where plans are written."""

    election: FileElectionSettings | EtcdElectionSettings | KubernetesElectionSettings | None = None
    """Election among several planners. Without this setting, active planners that write to the same folder or etcd
    prefix elect a leader by a lock there; any other planner always leads."""

    identity: str = ""
    """Name of this planner in the election; empty: host and process id."""

    listen: str = ""
    """Address of the control port for `fleet plan`: host:port, or unix:/path; empty: a socket of this user on this
    machine."""

    control_credentials: Credentials = Credentials()
    """Credentials that callers have to prove if the control port listens on TCP."""

    metrics_listen: str = ""
    """Address at which the page /metrics is served, as host:port; empty: the page is not served."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Access to the page at `metrics_listen`: holders of a key, everybody, or only programs on this machine."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS files of the port `metrics_listen`. Without a certificate, the port does not speak TLS."""

    history: str = ""
    """File for the records of plans as JSON lines; empty: no file. The file is rotated, so that two files remain."""

    record: str = ""
    """File for a recording that `fleet plan decide` can read; empty: nothing is recorded. A recording contains all plans and
    all decisions, each decision with the demand and the observation from which it was made. Each start begins a new file, and
    keeps the earlier one as `.1`. While another planner is recording to the file, this one records nothing, and logs a
    warning; its recording begins when the other one ends."""

    record_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Size in MiB at which a recording ends; later decisions are not recorded. One MiB holds about an hour with a
    decision every five seconds."""

    rehearsal: RehearsalSettings = RehearsalSettings()
    """Settings of the trial of plans in the simulator before they are applied."""

    score_seconds: Seconds = 60.0
    """Time after the end of a plan over which latencies and costs are measured, and compared with the predictions."""

    def __post_init__(self) -> None:
        check_listen_address("listen", self.listen, or_unix=True, optional=True)
        check_listen_address("metrics_listen", self.metrics_listen, optional=True)
        proof = self.control_credentials
        asks = proof.secret_file or (proof.certificate and proof.authority) or proof.insecure
        if self.listen and not unix_path(self.listen) and not asks:
            raise ValueError(
                f"listen: whoever reaches {self.listen} could read the plans: set control_credentials.secret_file, or certificate, key and"
                " authority, or listen at unix:/path; control_credentials.insecure = true is for networks that nobody else is on"
            )
        names = [pool.name for pool in self.pools]
        for index, pool in enumerate(self.pools):
            if pool.name in names[:index]:
                raise ValueError(f"pools[{index}].name: {pool.name!r} is there twice")
            if pool.least > pool.most:
                raise ValueError(f"pools[{index}].least: {pool.least} is above `most`, {pool.most}")
            if pool.gpu and pool.gpu not in gpus():
                raise ValueError(f"pools[{index}].gpu: {pool.gpu!r} is not one of {', '.join(gpus())}")
            for field in ("gpus", "dollars_per_hour"):
                if not 0 <= getattr(pool, field) < inf:
                    raise ValueError(f"pools[{index}].{field}: {getattr(pool, field)} is not a number of at least 0")
        check_limits(self.pools, self.budget)
        if isinstance(self.rule, FleetRuleSettings):
            check_roles(self.pools)
            if self.rule.settings.minimise == "energy":
                check_energy(self.pools)
        for name in self.engines:
            if name not in names:
                raise ValueError(f"engines.{name}: `pools` has no such pool")
        _check_gpus(self.pools, self.engines)
        if isinstance(self.rule, FleetRuleSettings) and (
            missing := [name for name in names if name not in self.engines]
        ):
            raise ValueError(
                f'engines: has no engine of pool {missing[0]}, which the rule `fleet` needs; or use rule.kind "load"'
            )
        if isinstance(self.rule, LoadRuleSettings):
            _refuse_ratio(self.budget)


def _check_gpus(
    pools: Sequence[PlannedPool], engines: Mapping[PoolName, LinearEngineSettings | GpuEngineSettings]
) -> None:
    """Check that each pool whose engine is of kind `gpu` names its GPU type, and counts the GPUs that its engine takes.

    Budgets and prices depend on this number.
    """
    for index, pool in enumerate(pools):
        engine = engines.get(pool.name)
        if not isinstance(engine, GpuEngineSettings):
            continue
        if not pool.gpu:
            raise ValueError(
                f'pools[{index}].gpu: is needed, because engines.{pool.name} is of kind "gpu"; name one of'
                f" {', '.join(gpus())}"
            )
        taken = engine.tp * engine.pp * engine.dp  # `ep` distributes experts over the same GPUs
        if pool.gpus != taken:
            raise ValueError(
                f"pools[{index}].gpus: {pool.gpus} differs from tp x pp x dp of engines.{pool.name}, which is"
                f" {engine.tp} x {engine.pp} x {engine.dp} = {taken}; correct one of them"
            )


def _refuse_ratio(budget: PlanBudget) -> None:
    """Raise ValueError if a budget bounds the ratio of prefill to decode; the rule `load` would not obey the bound."""
    for field in ("least_ratio", "most_ratio"):
        if getattr(budget, field) is not None:
            raise ValueError(
                f'budget.{field}: the rule `load` keeps no ratio of prefill to decode; leave it out, or set rule.kind = "fleet"'
            )


def _check_addresses(field: str, addresses: Iterable[str]) -> None:
    for address in addresses:
        if "/" in address:
            raise ValueError(f"{field}: {address!r} is neither unix:/path nor host:port; leave out http:// and paths")
        try:
            host_port(address)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
