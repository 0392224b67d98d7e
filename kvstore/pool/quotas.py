"""Tenant quotas: the maximum number of bytes that the blocks of one tenant may occupy in the pool.

Rules:

1. The salt of a chain identifies the tenant. Blocks without a salt belong to no tenant and have no quota.
2. The space of a block is charged to the block's tenant in whole pages, from the reservation until the place is free.
3. Each account has an eviction policy of its own, of the same kind as the node's, for the tenant's blocks only. If a
   new block would exceed the quota, this policy chooses which of the tenant's other blocks are evicted. The node's
   policy knows these blocks too: in a full pool, it chooses among the blocks of all tenants.
4. When there are too many accounts (`MAX_ACCOUNTS`), accounts without blocks are forgotten with their counters, the
   longest unused ones first.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping

from kvstore.eviction.policy import EvictionPolicy
from kvstore.messages import BlockKey, TenantStats

MAX_ACCOUNTS = 1024
"""If there are at least this many accounts, up to half as many are forgotten before another account is made. Accounts
with blocks are never forgotten, so there may be more accounts than this."""


class TenantAccount:
    """Counts the bytes that one tenant's blocks occupy, and the tenant's hits, misses, evictions and refused blocks.

    Only the pool machine changes an account.
    """

    __slots__ = ("bytes", "evicted", "eviction", "hits", "limit_bytes", "misses", "refused", "tenant")

    def __init__(self, tenant: bytes, limit_bytes: int, eviction: EvictionPolicy[BlockKey]):
        self.tenant = tenant
        self.limit_bytes = limit_bytes
        self.eviction = eviction
        self.bytes = 0
        self.hits = self.misses = self.evicted = self.refused = 0

    @property
    def stats(self) -> TenantStats:
        return TenantStats(
            tenant=hashlib.sha256(self.tenant).hexdigest()[:16],
            bytes=self.bytes,
            quota_bytes=self.limit_bytes,
            hits=self.hits,
            misses=self.misses,
            evicted=self.evicted,
            refused=self.refused,
        )


class TenantQuotas:
    """Holds the accounts of a node's tenants.

    `by_tenant` maps a tenant's salt to its quota in bytes. Other tenants have the quota `default_bytes`. A quota of 0
    means that the tenant has no quota, so only the size of the pool limits its blocks.
    """

    def __init__(
        self,
        make_eviction: Callable[[int], EvictionPolicy[BlockKey]],
        *,
        default_bytes: int = 0,
        by_tenant: Mapping[bytes, int] | None = None,
    ):
        self._make_eviction = make_eviction
        self._default_bytes = default_bytes
        self._by_tenant = dict(by_tenant or {})
        self._accounts: dict[bytes, TenantAccount] = {}  # by the tenant's salt, the longest unused account first

    def account(self, tenant: bytes) -> TenantAccount | None:
        """Return the account of a tenant and mark it as used; None if `tenant` is empty or has no quota."""
        if not tenant or not (limit_bytes := self._by_tenant.get(tenant, self._default_bytes)):
            return None
        account = self._accounts.pop(tenant, None)
        if account is None:
            self._forget_empty_ones()
            account = TenantAccount(tenant, limit_bytes, self._make_eviction(limit_bytes))
        self._accounts[tenant] = account
        return account

    def __iter__(self) -> Iterator[TenantAccount]:
        return iter(self._accounts.values())

    def _forget_empty_ones(self) -> None:
        if len(self._accounts) < MAX_ACCOUNTS:
            return
        empty = [tenant for tenant, account in self._accounts.items() if not account.bytes]
        for tenant in empty[: MAX_ACCOUNTS // 2]:  # remove many at once, so that the search above is rare
            del self._accounts[tenant]
