"""Settings of a KV store node."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from kvstore.eviction.policies import PolicyName
from kvstore.net.addresses import host_port, unix_path
from kvstore.pool.extents import PAGE_BYTES
from kvstore.security.credentials import Credentials
from kvstore.tiers.file_mapping import HugePages
from kvstore.tiers.peer.settings import PeerSettings
from kvstore.tiers.redis.settings import RedisSettings
from kvstore.tiers.s3.settings import S3Settings
from kvstore.tiers.ssd.settings import SsdSettings

AnyTier = SsdSettings | PeerSettings | RedisSettings | S3Settings
"""Settings of a tier below a node's memory, told apart by their `kind`."""


class NixlUse(StrEnum):
    AUTO = "auto"  # where this host has a fabric that it is faster on than TCP
    NEVER = "never"
    REQUIRE = "require"  # the node does not start without


TenantSalt = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class StoreSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node is told. Refused as a whole when a field is wrong (`ValueError` names it)."""

    store_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Name of the node in the cluster; stays the same over restarts."""

    listen: tuple[str, ...]
    """Addresses of the control plane: ``unix:/path`` or ``host:port``; port 0 lets the system choose."""

    shm_socket: str = ""
    """Path of the Unix socket that hands out the pool to processes of this host, and takes their calls. Empty: no shared
    memory, and calls go by gRPC."""

    data_listen: str = ""
    """``host:port`` of the TCP data plane. Empty: none."""

    nixl: NixlUse = NixlUse.AUTO
    """Whether clients may read and write the pool by NIXL. UCX authenticates nobody: keep strangers off its ports."""

    credentials: Credentials = Credentials()
    """What clients have to prove; beyond loopback a node does not listen without."""

    capacity_bytes: Annotated[int, Meta(ge=PAGE_BYTES)] = 256 << 20
    """Size of the pool in memory; all of it is taken at the start. 256 MiB: 2,048 blocks of the built-in model."""

    eviction: PolicyName = "lru"
    """Which blocks of the pool go first; see `kvstore.eviction.policies`."""

    prefill_tokens_per_second: Annotated[float, Meta(gt=0)] = 2000
    """What the policy "hazard" takes for the speed of a model's workers until these tell it by the patience of their look-ups.
    2,000: what they believe themselves before they have measured. It matters where models share a node."""

    memory_bytes_per_second: Annotated[float, Meta(gt=0)] = 5e9
    """How fast clients read the pool, for the same policy; a node cannot see it, since they map its memory. 5e9: a copy with
    its checksum by one core."""

    max_lease_seconds: Annotated[float, Meta(ge=0.001, le=3600)] = 30
    """Longest time that a match may pin blocks. Covers a prefill that queues; a reader that died pins no longer."""

    reservation_seconds: Annotated[float, Meta(ge=0.001, le=3600)] = 10
    """Longest time from a reservation to its publication. A block takes milliseconds; a writer that died holds its
    space no longer than this."""

    max_leases: Annotated[int, Meta(ge=1)] = 65_536
    """Leases and reservations at a time, so that a client that never releases cannot exhaust the node."""

    max_hold_seconds: Annotated[float, Meta(ge=0.001, le=86_400)] = 600
    """Longest time that a session may hold its blocks while it waits for a tool or a person."""

    max_held_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Part of the pool that holds may keep, all together; what exceeds it is refused. A quarter: waiting sessions
    must not leave the running ones without room."""

    tenant_quota_bytes: Annotated[int, Meta(ge=0)] = 0
    """What the blocks of one tenant may occupy; beyond it, its own oldest make room. 0: no limit. Chains without a salt
    belong to no tenant and have no quota."""

    tenant_quotas: dict[TenantSalt, Annotated[int, Meta(ge=0)]] = {}
    """Exceptions from `tenant_quota_bytes`: bytes by the tenant's salt, in 64 hexadecimal digits. 0: no limit."""

    huge_pages: HugePages = HugePages.AUTO
    """Whether the pool lies in pages of 2 MiB, which saves page tables and misses of the TLB."""

    max_namespaces: Annotated[int, Meta(ge=1)] = 256
    """Open at a time: one for each model, with its weights, the adapter merged into them, its dtype and the size of its blocks. The
    layout and ranks of engines, and adapters that they load, need none of their own."""

    tiers: tuple[AnyTier, ...] = ()
    """Below the pool, in the order in which they are asked: the fastest first."""

    metrics_listen: str = ""
    """``host:port`` where Prometheus finds the node's metrics. Empty: nowhere; the control plane tells them in any case."""

    watch_queue: Annotated[int, Meta(ge=1)] = 1024
    """Messages that may wait for a slow watcher before its stream is cut."""

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen: at least one address is needed")
        for index, address in enumerate(self.listen):
            if not unix_path(address):
                _require_host_port(f"listen[{index}]", address)
        kinds = [tier.__struct_config__.tag for tier in self.tiers]
        for index, kind in enumerate(kinds):
            if kind in kinds[:index]:
                raise ValueError(
                    f"tiers[{index}]: there is a tier of kind {kind} already; give that one more directories or peers"
                )
        for field in ("data_listen", "metrics_listen"):
            if address := getattr(self, field):
                _require_host_port(field, address)


def _require_host_port(field: str, address: str) -> None:
    try:
        host_port(address)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
