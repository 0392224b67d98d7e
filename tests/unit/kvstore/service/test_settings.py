"""Invalid settings of a node."""

import msgspec
import pytest

from kvstore.service.settings import StoreSettings

SSD = {"kind": "ssd", "directories": ["/tmp/a"], "capacity_bytes": 1 << 30}


def test_second_tier_of_one_kind_is_refused():
    told = {"store_id": "s", "listen": ["unix:/tmp/s"], "capacity_bytes": 1 << 20, "tiers": [SSD, SSD]}
    with pytest.raises(msgspec.ValidationError, match=r"tiers\[1\]: there is a tier of kind ssd already"):
        msgspec.convert(told, StoreSettings)
