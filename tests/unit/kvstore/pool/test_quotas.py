"""Tenant quotas: tenants share no blocks, and a tenant over its quota evicts its own blocks."""

from kvstore.block import chain, tenant_salt
from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.pool import quotas as accounts
from kvstore.pool.quotas import TenantQuotas
from tests.support.kvstore.builders import BLOCK_BYTES, LEASE, MachineDriver, a_chain, a_namespace

ONE, TWO = b"1" * 32, b"2" * 32


def a_store(quota_blocks: int = 3, blocks: int = 8, **by_tenant: int) -> MachineDriver:
    """Return a store of `blocks` blocks in which each tenant may have `quota_blocks`, or its number in `by_tenant`."""
    quotas = TenantQuotas(
        lambda _: LruEviction(),
        default_bytes=quota_blocks * BLOCK_BYTES,
        by_tenant={name.encode() * 32: count * BLOCK_BYTES for name, count in by_tenant.items()},
    )
    return MachineDriver(blocks, quotas=quotas, max_held_bytes=blocks * BLOCK_BYTES)


def test_tenants_with_different_salts_share_no_block():
    store = a_store(8)
    tokens = bytes(4 * 32 * 6)
    mine, yours, everyones = (chain(tokens, 32, salt=tenant_salt(b"secret", tenant)) for tenant in ("me", "you", ""))

    store.hold(mine, tenant=ONE)

    assert len(mine) == 6
    assert store.look(mine) == 6
    assert store.look(yours) == store.look(everyones) == 0
    assert not set(mine) & (set(yours) | set(everyones))


def test_tenant_over_quota_evicts_only_its_own_blocks():
    store = a_store(quota_blocks=3, blocks=8)
    theirs, nobodys = a_chain(2, "theirs"), a_chain(2, "nobodys")
    store.hold(nobodys)
    store.hold(theirs, tenant=TWO)
    store.hold(a_chain(3, "old"), tenant=ONE)

    assert store.hold(a_chain(2, "new"), tenant=ONE) == 2

    assert store.look(a_chain(3, "old")) == 1, "the end of the chain goes first"
    assert store.look(theirs) == store.look(nobodys) == 2, "blocks of others stay although they are older"
    assert store.machine.stats().bytes == 7 * BLOCK_BYTES
    store.machine.check()


def test_tenant_with_its_quota_in_use_is_refused():
    store = a_store(quota_blocks=3, blocks=8)
    store.hold(a_chain(2, "theirs"), tenant=TWO)
    store.hold(a_chain(3, "old"), tenant=ONE)
    store.match(a_chain(3, "old"), tenant=ONE)

    reservation = store.reserve(a_chain(2, "new"), tenant=ONE)

    assert (len(reservation.reserved), reservation.refused) == (0, 2)
    assert store.look(a_chain(2, "theirs")) == 2
    assert {row.refused for row in store.machine.stats().tenants} == {0, 2}
    store.machine.check()


def test_reserved_blocks_count_for_the_quota():
    store = a_store(quota_blocks=3)
    store.reserve(a_chain(2, "a"), tenant=ONE)

    assert store.reserve(a_chain(2, "b"), owner="other", tenant=ONE).refused == 1


def test_a_chain_longer_than_the_quota_keeps_its_beginning():
    store = a_store(quota_blocks=3)

    assert store.hold(a_chain(5), tenant=ONE) == 3
    assert store.hold(a_chain(5), tenant=ONE) == 0, "the chain must not evict its own beginning"
    assert store.look(a_chain(5)) == 3
    store.machine.check()


def test_block_larger_than_the_quota_evicts_nothing():
    store = a_store(quota_blocks=3)
    big = a_namespace(model="big", block_bytes=4 * BLOCK_BYTES)
    store.machine.open(big, Nanos(0))
    store.hold(a_chain(3), tenant=ONE)

    reservation = store.machine.reserve(big.digest, a_chain(1), owner="w", lease=LEASE, now=Nanos(0), tenant=ONE)

    assert reservation.refused == 1
    assert store.look(a_chain(3)) == 3


def test_full_pool_evicts_the_oldest_block_of_any_tenant():
    store = a_store(quota_blocks=6, blocks=8)
    store.hold(a_chain(4, "old"), tenant=ONE)
    store.hold(a_chain(4, "young"), tenant=TWO)

    assert store.hold(a_chain(2, "new"), tenant=TWO) == 2

    assert (store.look(a_chain(4, "old")), store.look(a_chain(4, "young"))) == (2, 4)
    store.machine.check()


def test_used_blocks_of_a_tenant_stay():
    store = a_store(quota_blocks=4, blocks=8)
    old, young = a_chain(2, "old"), a_chain(2, "young")
    store.hold(old, tenant=ONE)
    store.hold(young, tenant=ONE)
    store.release(store.match(old).lease_id)

    store.hold(a_chain(2, "new"), tenant=ONE)

    assert (store.look(old), store.look(young)) == (2, 0)


def test_a_named_tenant_has_its_own_quota_or_none():
    store = a_store(quota_blocks=2, blocks=10, a=4, b=0)

    assert store.hold(a_chain(5, "x"), tenant=b"a" * 32) == 4
    assert store.hold(a_chain(5, "y"), tenant=b"b" * 32) == 5
    assert store.hold(a_chain(5, "z"), tenant=b"c" * 32) == 2


def test_chains_without_a_salt_have_no_quota():
    store = a_store(quota_blocks=1)

    assert store.hold(a_chain(5)) == 5
    assert store.machine.stats().tenants == ()


def test_statistics_identify_a_tenant_without_its_salt():
    store = a_store()
    store.hold(a_chain(2), tenant=ONE)
    store.match(a_chain(3), tenant=ONE)

    (row,) = store.machine.stats().tenants

    assert (row.bytes, row.quota_bytes, row.hits, row.misses) == (2 * BLOCK_BYTES, 3 * BLOCK_BYTES, 2, 1)
    assert len(row.tenant) == 16
    assert row.tenant not in (ONE.hex()[:16], ONE.decode()[:16])


def test_abandoned_space_is_credited_to_its_tenant():
    store = a_store(quota_blocks=3)
    store.reserve(a_chain(3, "lost"), tenant=ONE)
    store.machine.expire(Nanos(10**12))

    assert store.hold(a_chain(3, "new"), now=10**12, tenant=ONE) == 3
    store.machine.check()


def test_only_tenants_without_blocks_are_forgotten(monkeypatch):
    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 4)
    store = a_store()
    store.hold(a_chain(1), tenant=ONE)

    for number in range(20):
        store.match(a_chain(1), tenant=bytes([number]) * 32)

    rows = store.machine.stats().tenants
    assert len(rows) <= 4
    assert sum(row.bytes for row in rows) == BLOCK_BYTES
    store.machine.check()
