from hashlib import sha256

from msgspec import structs

from fleet.cli.up import OWN_TENANT, with_own_key
from fleet.local.settings import Topology
from fleet.router.tenants import TenantSettings

ACME = TenantSettings(api_key_sha256=(sha256(b"key").hexdigest(),), weight=2)


def with_tenants(**tenants: TenantSettings) -> Topology:
    topology = Topology()
    return structs.replace(topology, router=structs.replace(topology.router, tenants=tenants))


def test_own_requests_get_a_key_where_clients_need_one():
    topology, key = with_own_key(with_tenants(acme=ACME))

    assert topology.router.tenants["acme"] == ACME
    assert topology.router.tenants[OWN_TENANT].api_key_sha256 == (sha256(key.encode()).hexdigest(),)
    assert len(key) >= 32
    assert with_own_key(with_tenants(acme=ACME))[1] != key


def test_nothing_changes_where_clients_need_no_key():
    for topology in (Topology(), with_tenants(acme=TenantSettings(weight=2))):
        assert with_own_key(topology) == (topology, "")
