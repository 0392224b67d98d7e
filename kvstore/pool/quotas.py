"""What the blocks of one tenant may occupy, and which of them go first. Pure.

Rules:

1. A tenant is known by the salt of its chains. Blocks without a salt belong to no tenant and have no quota.
2. Space is charged in whole pages from the reservation on, and credited when the place is free again.
3. An account has an eviction policy of its own, of the same kind as the node's, over this tenant's blocks only: over
   its quota a tenant makes room for itself, in the order in which the node would have chosen among its blocks. The
   node's policy knows the blocks too; where the pool is full, whoever has the oldest block loses it.
4. An account without blocks is forgotten when there are too many, the longest unused first, and its counters with it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping

from kvstore.messages import TenantStats
from kvstore.ports import Eviction

MAX_ACCOUNTS = 1024
"""That may be remembered without a block: counters of tenants that have just gone. Those with blocks are never forgotten."""


class TenantAccount:
    """One tenant's. Only the machine changes it."""

    __slots__ = ("bytes", "evicted", "eviction", "hits", "limit_bytes", "misses", "refused", "tenant")

    def __init__(self, tenant: bytes, limit_bytes: int, eviction: Eviction):
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
    """All accounts of a node."""

    def __init__(
        self,
        make_eviction: Callable[[int], Eviction],
        *,
        default_bytes: int = 0,
        by_tenant: Mapping[bytes, int] | None = None,
    ):
        """No accounts yet.

        Args:
            make_eviction: A policy for a space of that many bytes, as the node's own.
            default_bytes: Quota of a tenant that is not named; 0: none.
            by_tenant: Quotas by salt; 0: none.
        """
        self._make_eviction = make_eviction
        self._default_bytes = default_bytes
        self._by_tenant = dict(by_tenant or {})
        self._accounts: dict[bytes, TenantAccount] = {}  # longest unused first

    def account(self, tenant: bytes) -> TenantAccount | None:
        """The account of a tenant; None when it has no quota. It counts as used."""
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
        for tenant in empty[: MAX_ACCOUNTS // 2]:  # half at a time: not a search at each new tenant
            del self._accounts[tenant]
