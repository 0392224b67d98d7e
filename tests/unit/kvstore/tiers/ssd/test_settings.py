"""Settings of the SSD tier: an error names the field."""

import pytest

from kvstore.tiers.ssd.settings import SsdSettings, footprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"directories": ()}, "directories: at least one"),
        ({"directories": ("kv",)}, r"directories\[0\]: 'kv' is not an absolute path"),
        ({"directories": ("/a", "/b", "/a")}, "directories: a directory is listed twice"),
        ({"segment_bytes": 100_000}, "segment_bytes: 100000 is not a multiple of 4096"),
        ({"capacity_bytes": 1 << 20, "segment_bytes": 1 << 20}, "capacity_bytes: 1048576 bytes per directory"),
        ({"directories": ("/a", "/b"), "capacity_bytes": 300 << 20}, "capacity_bytes: .* use at least 541"),
    ],
)
def test_settings_error_begins_with_the_field(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SsdSettings(**{"directories": ("/a",), **fields})


def test_least_capacity_in_the_error_message_is_accepted():
    with pytest.raises(ValueError, match="use at least") as refused:
        SsdSettings(directories=("/a", "/b"), capacity_bytes=1 << 20)
    least = int(str(refused.value).partition("use at least ")[2].partition(",")[0])

    SsdSettings(directories=("/a", "/b"), capacity_bytes=least)


def test_footprint_is_larger_than_the_file():
    assert footprint(128 << 20) == (129 << 20)
    assert footprint(64 << 10) == (96 << 10)
