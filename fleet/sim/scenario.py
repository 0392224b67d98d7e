"""Scenario: the TOML file by which a user describes a simulation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from fleet.config import load, read_file
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Role
from fleet.hardware.sharding import MEMORY_SHARE
from fleet.router.settings.router import RouterSettings
from fleet.sim.results.outcomes import Slo
from fleet.sim.workload.clients import ClientSection, ClosedClients, OpenClients, SessionClients
from fleet.sim.workload.drawn import DrawnWorkload
from fleet.sim.workload.traffic import RecordedWorkload, Workload
from kvstore.eviction.policies import PolicyName

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]
Bandwidth = Annotated[float, Meta(ge=1, le=1e15)]
Microseconds = Annotated[float, Meta(ge=0, le=1e9)]
FileName = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]+$")]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of all engines. The defaults of `max_running`, `step_tokens` and `memory_share` come from vLLM."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Engine whose measured efficiencies determine the step times."""

    block_tokens: Positive = 512
    """Number of tokens in a KV block. If the workload is a trace with blocks, this must be the trace's block size."""

    max_running: Positive = 256
    """Maximum number of sequences in one batch."""

    step_tokens: Positive = 8192
    """Maximum number of tokens of one step. Running sequences use one each; prompts are computed in chunks of the remaining tokens."""

    memory_share: Share = MEMORY_SHARE
    """Share of a GPU's memory for weights, activations and KV."""

    start_seconds: Seconds = 120.0
    """Time from the start of a worker until it can serve: loading weights and capturing graphs."""


class SimulatedPoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool: workers with the same role, GPU and parallelism."""

    name: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """Name of the pool in the results; empty: the role, a dash, and the short name of the GPU."""

    role: Role = Role.BOTH
    gpu: Annotated[str, Meta(min_length=1)]
    """Short name of the GPU, from `fleet hardware list`."""

    gpus: Positive
    """Number of GPUs in the whole pool; each worker uses as many as its parallelism needs."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    ep: Positive = 1

    dollars_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """Dollars per hour of one GPU; None: the list price in `fleet.hardware.gpus`, or 0 if none is known."""


class SimulatedStoreSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV store on every node; without this section there is none."""

    memory_gib: Annotated[float, Meta(gt=0, le=1e9)]
    """Memory of the store's pool on each node."""

    policy: PolicyName = "lru"
    """Eviction policy of all tiers."""

    ssd_gib: Gib = 0.0
    """Capacity of all disks of one node together; 0: there are no disks."""

    ssd_read_bandwidth: Bandwidth = 6.8e9
    ssd_write_bandwidth: Bandwidth = 4.0e9
    ssd_latency_us: Microseconds = 100.0
    """Read and write speed of all disks of a node together, in bytes per second, and their latency.

    The defaults are the data-sheet values of one data-centre disk with PCIe 4.
    """

    ssd_admission: Literal["all", "reuse"] = "reuse"
    """Blocks that are written to disk: all, or only those that were offered to it before (`kvstore.hierarchy.admission`)."""

    remote_gib: Gib = 0.0
    """Capacity of one remote store that all nodes share (Redis, S3, a file system); 0: there is none."""

    remote_bandwidth: Bandwidth = 10e9
    remote_latency_us: Microseconds = 500.0
    """Read and write speed between one node and the remote store, in bytes per second, and its latency."""


class WorkerFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="worker"):
    """A worker dies and is started again."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    """Name of the worker: the name of the pool, a dash, and a number from 0."""

    down_seconds: Seconds = 10.0
    """Time from the death of the worker until it is started again."""

    start_seconds: Seconds | None = None
    """Duration of the new start; None: `engine.start_seconds`."""


class NodeFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="node"):
    """A node dies with its workers and its store's memory, and is started again later."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    """Name of the node: the name of the pool, `-node-`, and a number from 0. The workers of a pool fill one node after the other; the kind
    of GPU says how many GPUs a node has."""

    down_seconds: Seconds = 60.0


class SlowFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="slow"):
    """A worker takes `factor` times as long for each step, for `lasting_seconds`."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    factor: Annotated[float, Meta(ge=1e-3, le=1e6)] = 3.0
    lasting_seconds: Seconds = 60.0


class CutFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cut"):
    """The network between a worker and the router is cut: no message passes for `lasting_seconds`."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    lasting_seconds: Seconds = 10.0


class StoreFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="store"):
    """The store of a node dies with its memory, and is started again later."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    down_seconds: Seconds = 10.0


class RoleFlipFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="flip"):
    """A worker drains and continues in another role."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    role: Role


FaultSection = WorkerFault | NodeFault | SlowFault | CutFault | StoreFault | RoleFlipFault


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulation as its TOML file describes it."""

    model: FileName
    """Folder with a Hugging Face config.json, or that file; relative to the folder of the scenario's file."""

    pools: Annotated[tuple[SimulatedPoolSection, ...], Meta(min_length=1)]
    workload: Workload = DrawnWorkload()
    clients: ClientSection = OpenClients()
    engine: EngineSection = EngineSection()
    router: RouterSettings = RouterSettings()
    slo: Slo = Slo()
    store: SimulatedStoreSection | None = None
    faults: tuple[FaultSection, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 1
    message_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.2
    """One-way delay of a message between the router and a worker or store."""

    verbatim_answers: bool = False
    """True if the next turn of a conversation repeats the answer token by token, so that a cache has the answer's blocks.

    Traces do not contain this information. Leave this false if clients change answers before they repeat them, or if
    reasoning is dropped from prompts.
    """

    def __post_init__(self) -> None:
        names = [pool_name(pool) for pool in self.pools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"pools[{index}].name: {name!r} is also the name of pools[{names.index(name)}]")
        if not any(pool.role is not Role.PREFILL for pool in self.pools):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")
        deadline_ms = 1000 * self.clients.deadline_seconds
        if 0 < deadline_ms < self.slo.ttft_ms:
            raise ValueError(
                f"slo.ttft_ms: {self.slo.ttft_ms:g} is more than clients.deadline_seconds: nobody would wait so long"
            )
        recorded = isinstance(self.workload, RecordedWorkload)
        if isinstance(self.clients, SessionClients) and not self.clients.users and recorded:
            raise ValueError("clients.users: 0 needs sessions that say when they begin, which a trace does not")


def read_scenario(path: Path, changes: Mapping[str, Any] | None = None) -> Scenario:
    """Read the scenario in a TOML or JSON file.

    `changes` maps paths of fields to values that replace those of the file, or complement them (`fleet.config.load`).

    Raises:
        ConfigurationRefused: The file cannot be read, or a field is invalid; the message names the file and the invalid field.
            Or the file is the scenario of a replay, with the section `[planner]`.
    """
    content = read_file(path)
    if "planner" in content:
        raise ConfigurationRefused(
            f"{path}: planner: only `fleet plan replay` changes the pools during a run; use it, or remove the section"
        )
    return load(path, Scenario, changes, content=content)


def pool_name(pool: SimulatedPoolSection) -> str:
    return pool.name or f"{pool.role.value}-{pool.gpu}"


def scaled(scenario: Scenario, load: float) -> Scenario:
    """Return the scenario with its load multiplied by `load`: its number of users, if users wait for answers; else its arrival rate.

    Phases become shorter by the same factor, so that the requests of each phase stay the same.
    """
    clients, workload = scenario.clients, scenario.workload
    if users := waiting_users(scenario):
        return structs.replace(scenario, clients=structs.replace(clients, users=max(1, round(users * load))))
    if isinstance(workload, DrawnWorkload):
        phases = tuple(
            structs.replace(each, seconds=each.seconds / load, rate=each.rate * load) for each in workload.phases
        )
        return structs.replace(scenario, workload=structs.replace(workload, rate=workload.rate * load, phases=phases))
    return structs.replace(scenario, workload=structs.replace(workload, speed=workload.speed * load))


def waiting_users(scenario: Scenario) -> int:
    """Return the number of users that wait for answers before they send more; 0 if requests come at a rate."""
    return scenario.clients.users if isinstance(scenario.clients, ClosedClients | SessionClients) else 0
