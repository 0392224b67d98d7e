"""Settings of the SSD tier that cannot be obeyed are refused by name."""

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
def test_the_message_begins_with_the_field(fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SsdSettings(**{"directories": ("/a",), **fields})


def test_the_least_that_is_named_is_enough():
    with pytest.raises(ValueError, match="use at least") as refused:
        SsdSettings(directories=("/a", "/b"), capacity_bytes=1 << 20)
    least = int(str(refused.value).partition("use at least ")[2].partition(",")[0])

    SsdSettings(directories=("/a", "/b"), capacity_bytes=least)


def test_a_file_occupies_more_than_its_size():
    assert footprint(128 << 20) == (129 << 20)
    assert footprint(64 << 10) == (96 << 10)
