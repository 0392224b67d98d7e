"""Settings of a store node: invalid ones are refused."""

import msgspec
import pytest

from kvstore.service.settings import StoreSettings

SSD = {"kind": "ssd", "directories": ["/tmp/a"], "capacity_bytes": 1 << 30}


def test_second_tier_of_one_kind_is_refused():
    told = {"store_id": "s", "listen": ["unix:/tmp/s"], "capacity_bytes": 1 << 20, "tiers": [SSD, SSD]}
    with pytest.raises(msgspec.ValidationError, match=r"tiers\[1\]: there is a tier of kind ssd already"):
        msgspec.convert(told, StoreSettings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("listen", []),
        ("listen", ["somewhere"]),
        ("listen", ["host:99999"]),
        ("data_listen", "nowhere"),
        ("capacity_bytes", 0),
        ("max_lease_seconds", 0),
        ("reservation_seconds", -1),
        ("store_id", ""),
        ("max_held_share", 1.5),
        ("max_hold_seconds", 0),
        ("tenant_quotas", {"not a salt": 1}),
        ("tenant_quota_bytes", -1),
        ("huge_pages", "sometimes"),
        ("surprise", 1),
    ],
)
def test_invalid_settings_are_refused_by_field(field, value):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({"store_id": "s", "listen": ["unix:/x"], field: value}, StoreSettings)
