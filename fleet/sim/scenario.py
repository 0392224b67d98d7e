"""Scenarios: what a simulation is of, as an operator writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from fleet.config import load
from fleet.core.roles import Role
from fleet.hardware.sharding import MEMORY_SHARE
from fleet.router.settings.router import RouterSettings
from fleet.sim.results.outcomes import Slo
from fleet.sim.workload.clients import ClientSection, ClosedClients, OpenClients, SessionClients
from fleet.sim.workload.traffic import DrawnWorkload, RecordedWorkload, Workload
from kvstore.eviction.policies import PolicyName

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]
Bandwidth = Annotated[float, Meta(ge=1, le=1e15)]
Microseconds = Annotated[float, Meta(ge=0, le=1e9)]
FileName = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]+$")]


class EngineSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All engines; defaults are vLLM's where it has any."""

    backend: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Whose measured efficiencies count."""

    block_tokens: Positive = 512
    """Of a KV block; that of the trace."""

    max_running: Positive = 256
    """Sequences in one batch."""

    step_tokens: Positive = 8192
    """Tokens of one step: prompts come in chunks of what the running sequences leave of it."""

    memory_share: Share = MEMORY_SHARE
    """Of a GPU's memory that weights, activations and KV take."""

    start_seconds: Seconds = 120.0
    """From starting a worker to its first request: loading weights and capturing graphs."""


class SimulatedPoolSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    name: Annotated[str, Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    """In results; empty: role and GPU."""

    role: Role = Role.BOTH
    gpu: Annotated[str, Meta(min_length=1)]
    """Short name: `fleet hardware list`."""

    gpus: Positive
    """All together; each worker takes as many as its parallelism says."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    ep: Positive = 1

    dollars_per_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """One GPU; by default the list price that comes with the profile."""


class SimulatedStoreSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV store on every node; without this section there is none."""

    memory_gib: Annotated[float, Meta(gt=0, le=1e9)]
    """Of a node's memory, the pool."""

    policy: PolicyName = "lru"
    """Which blocks go first, in all tiers."""

    ssd_gib: Gib = 0.0
    """Of a node's disks; 0: none."""

    ssd_read_bandwidth: Bandwidth = 6.8e9
    ssd_write_bandwidth: Bandwidth = 4.0e9
    ssd_latency_us: Microseconds = 100.0
    """Bytes a second of all disks of a node together; the defaults are about one data-centre disk of PCIe 4 by its data sheet."""

    ssd_admission: Literal["all", "reuse"] = "reuse"
    """Which blocks are written to disk: all, or those that were seen before."""

    remote_gib: Gib = 0.0
    """Of one store for all nodes (Redis, S3, a file system); 0: none."""

    remote_bandwidth: Bandwidth = 10e9
    remote_latency_us: Microseconds = 500.0
    """Bytes a second that one node reads from it, and as many that it writes."""


class WorkerFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="worker"):
    """A worker dies, and is started again."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    """Pool's name, a dash, a number from 0."""

    down_seconds: Seconds = 10.0
    """Until it is started again."""

    start_seconds: Seconds | None = None
    """That it then takes; by default `engine.start_seconds`."""


class NodeFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="node"):
    """A node dies with its workers and its store's memory, and is started again."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    """Pool's name, `-node-`, a number from 0; a pool's workers fill nodes of `gpus_per_node`."""

    down_seconds: Seconds = 60.0


class SlowFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="slow"):
    """A worker takes `factor` times as long for each step."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    factor: Annotated[float, Meta(ge=1e-3, le=1e6)] = 3.0
    lasting_seconds: Seconds = 60.0


class CutFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cut"):
    """Nothing passes between a worker and the router."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    lasting_seconds: Seconds = 10.0


class StoreFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="store"):
    """The store of a node dies with what it had in memory, and is started again."""

    at_seconds: Seconds
    node: Annotated[str, Meta(min_length=1)]
    down_seconds: Seconds = 10.0


class RoleFlipFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="flip"):
    """A worker drains, and goes on in another role."""

    at_seconds: Seconds
    worker: Annotated[str, Meta(min_length=1)]
    role: Role


FaultSection = WorkerFault | NodeFault | SlowFault | CutFault | StoreFault | RoleFlipFault
"""What happens to a cluster."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation."""

    model: FileName
    """Folder with a Hugging Face config.json, or that file, relative to the scenario's file."""

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
    """From router to worker or back."""

    verbatim_answers: bool = False
    """Whether the next turn of a conversation repeats the answer before it token by token, so that its blocks are found in a
    cache. A trace does not say; where thoughts are dropped, or answers edited, it is not so."""

    def __post_init__(self) -> None:
        names = [pool_name(pool) for pool in self.pools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"pools[{index}].name: {name!r} is also that of pools[{names.index(name)}]")
        if not any(pool.role is not Role.PREFILL for pool in self.pools):
            raise ValueError("pools: prefill workers need workers of role decode or both to hand over to")
        deadline_ms = 1000 * self.clients.deadline_seconds
        if 0 < deadline_ms < self.slo.ttft_ms:
            raise ValueError(
                f"slo.ttft_ms: {self.slo.ttft_ms:g} is more than clients.deadline_seconds: nobody would wait so long"
            )
        if (
            isinstance(self.clients, SessionClients)
            and not self.clients.users
            and isinstance(self.workload, RecordedWorkload)
        ):
            raise ValueError("clients.users: 0 needs sessions that say when they begin, which a trace does not")


def read_scenario(path: Path, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario in a TOML file, with some of its fields changed.

    Raises:
        ConfigurationRefused: It cannot be read; names file and field.
    """
    return load(path, Scenario, changes)


def pool_name(pool: SimulatedPoolSection) -> str:
    return pool.name or f"{pool.role.value}-{pool.gpu}"


def scaled(scenario: Scenario, load: float) -> Scenario:
    """The same with so many times the load: the rate of arrivals, or of clients that wait for answers their number."""
    clients, workload = scenario.clients, scenario.workload
    if users := waiting_users(scenario):
        return structs.replace(scenario, clients=structs.replace(clients, users=max(1, round(users * load))))
    if isinstance(workload, DrawnWorkload):
        return structs.replace(scenario, workload=structs.replace(workload, rate=workload.rate * load))
    return structs.replace(scenario, workload=structs.replace(workload, speed=workload.speed * load))


def waiting_users(scenario: Scenario) -> int:
    """Clients that wait for answers before they send more; 0: they come at a rate."""
    return scenario.clients.users if isinstance(scenario.clients, ClosedClients | SessionClients) else 0
