"""Settings of a store node."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.eviction.policies import PolicyName
from kvstore.net.addresses import check_listen_address
from kvstore.pool.extents import PAGE_BYTES
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsAccess, MetricsTls
from kvstore.tiers.file_mapping import HugePages
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.ssd.settings import SsdSettings
from kvstore.tracing.settings import TracingSettings

AnyTier = SsdSettings | PeerSettings | RedisSettings | S3Settings
"""Settings of a backing tier; the field `kind` says which class it is."""


class NixlUse(StrEnum):
    AUTO = "auto"  # NIXL is offered if this host has an RDMA device, on which NIXL is faster than TCP
    NEVER = "never"
    REQUIRE = "require"  # NIXL is offered on every host; if it cannot be used, the node does not start


TenantSalt = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class StoreSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one node. A wrong field raises a `ValueError` that names it."""

    store_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Name of the node in the cluster; it stays the same over restarts."""

    listen: tuple[str, ...]
    """Addresses of the control plane: ``unix:/path`` or ``host:port``; with port 0, the system chooses the port."""

    shm_socket: str = ""
    """Path of the Unix socket at which processes of this host get the pool's memory and make frequent calls. Empty: no
    shared memory, and all calls use gRPC.
    """

    data_listen: str = ""
    """``host:port`` of the TCP data plane, over which clients on other hosts move bytes. Empty: no TCP data plane."""

    nixl: NixlUse = NixlUse.AUTO
    """Let clients read and write the pool by NIXL. UCX, which moves NIXL's data, has no authentication, so only trusted
    hosts may reach its ports."""

    credentials: Credentials = Credentials()
    """Credentials that clients have to prove. Without them, a node listens beyond loopback only if `insecure` is set."""

    capacity_bytes: Annotated[int, Meta(ge=PAGE_BYTES)] = 256 << 20
    """Size of the pool in memory, all of which is allocated at the start. 256 MiB hold 2,048 blocks of 128 KiB, for
    example.
    """

    eviction: PolicyName = "lru"
    """Eviction policy of the pool; see `kvstore.eviction.policies`."""

    prefill_tokens_per_second: Annotated[float, Meta(gt=0)] = 2000
    """Assumed prefill speed of a model's workers, for the policy "hazard". It is used until the workers report their
    speed by the max wait of their look-ups. Workers also assume 2,000 until they have measured their speed. The value
    matters only if several models share a node, or if only some blocks are in a backing tier too. Otherwise it changes
    the values of all blocks alike, so their order of eviction stays the same.
    """

    memory_bytes_per_second: Annotated[float, Meta(gt=0)] = 5e9
    """Assumed speed at which clients read the pool, for the policy "hazard". A node cannot measure it, because clients
    on its host read the mapped memory themselves. One core copies about 5e9 bytes per second and computes their
    checksum.
    """

    max_lease_seconds: Annotated[float, Meta(ge=0.001, le=3600)] = 30
    """Maximum time that a match may pin blocks; clients shorten longer leases to this time. A reader that has died pins
    blocks no longer than this. 30 s are enough for a request that waits in the queue of an engine before it reads its
    blocks.
    """

    reservation_seconds: Annotated[float, Meta(ge=0.001, le=3600)] = 10
    """Maximum time from a reservation to its publication. Writing a block takes milliseconds. A writer that has died
    keeps the reserved space no longer than this.
    """

    max_leases: Annotated[int, Meta(ge=1)] = 65_536
    """Maximum number of leases, session pins and write reservations of all clients at a time; further ones are refused.
    It limits the harm of a client that never releases its leases."""

    max_hold_seconds: Annotated[float, Meta(ge=0.001, le=86_400)] = 600
    """Maximum duration of a session pin, which keeps the blocks of a session that waits for a tool or a person. Clients
    shorten longer pins to this time."""

    max_held_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Share of the pool that all session pins together may keep; further blocks are not pinned. With a quarter, waiting
    sessions leave enough room for running ones.
    """

    tenant_quota_bytes: Annotated[int, Meta(ge=0)] = 0
    """Quota of each tenant: the maximum number of bytes of its blocks in the pool. If a new block would exceed it, other
    blocks of this tenant are evicted, in the order of `eviction`. 0: no limit. Chains without a salt belong to no tenant
    and have no quota.
    """

    tenant_quotas: dict[TenantSalt, Annotated[int, Meta(ge=0)]] = {}
    """Quotas of single tenants in bytes, which replace `tenant_quota_bytes` for these tenants. The key is the tenant's salt
    in 64 hexadecimal digits. 0: no limit."""

    huge_pages: HugePages = HugePages.AUTO
    """Use of huge pages, usually of 2 MiB, for the pool; they save page tables and TLB misses. See `HugePages`."""

    max_namespaces: Annotated[int, Meta(ge=1)] = 256
    """Maximum number of open namespaces: one for each model with its weights, merged adapter, data type and block size.
    Engines with different layouts or numbers of ranks share a namespace, and so do the LoRA adapters that engines load.
    For a further one, the longest unused namespace without blocks is closed. If all hold blocks, it is refused.
    """

    tiers: tuple[AnyTier, ...] = ()
    """Backing tiers in the order in which they are asked: the fastest first."""

    metrics_listen: str = ""
    """``host:port`` of the node's Prometheus metrics. Empty: no port for metrics. The call Stats of the control plane
    returns the node's counters in any case."""

    metrics_access: MetricsAccess = MetricsAccess()
    """Access to the metrics of `metrics_listen`."""

    metrics_tls: MetricsTls = MetricsTls()
    """TLS of `metrics_listen`."""

    tracing: TracingSettings = TracingSettings()
    """Traces of the calls to this node. These settings say where the spans are sent; routers decide which requests are traced."""

    watch_queue: Annotated[int, Meta(ge=1)] = 1024
    """Maximum number of messages that wait for a slow watcher before its stream is cut."""

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen: at least one address is needed")
        for index, address in enumerate(self.listen):
            check_listen_address(f"listen[{index}]", address, or_unix=True)
        kinds = [tier.__struct_config__.tag for tier in self.tiers]
        for index, kind in enumerate(kinds):
            if kind in kinds[:index]:
                raise ValueError(
                    f"tiers[{index}]: there is a tier of kind {kind} already; give that one more directories or peers"
                )
        for field in ("data_listen", "metrics_listen"):
            check_listen_address(field, getattr(self, field), optional=True)
