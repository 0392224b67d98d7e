"""Parts of the torture test: expected content, watchdog, and settings."""

import threading

import numpy as np
import pytest

from loadtests.kvstore.nodes import merged
from loadtests.kvstore.torture import leaks, watchdog
from loadtests.kvstore.torture.client import namespaces
from loadtests.kvstore.torture.content import ExpectedContent, chain


def a_content(block_bytes: int = 4096) -> ExpectedContent:
    return ExpectedContent(namespaces([block_bytes])[0])


@pytest.mark.parametrize("at", [0, 7, 8, 4095])
def test_flipped_bit_is_a_wrong_byte(at):
    (name,) = chain(1, 0, 1)
    found = a_content().of(name)
    found[at] ^= 4

    assert a_content().wrong_bytes(name, found) == 1


def test_expected_bytes_are_not_wrong():
    for name in chain(1, 2, 3):
        assert a_content().wrong_bytes(name, a_content().of(name)) == 0


def test_bytes_of_other_block_are_wrong_everywhere():
    first, second = chain(1, 0, 2)
    torn = a_content().of(first)
    torn[-16:] = a_content().of(second)[-16:]

    assert a_content().wrong_bytes(first, torn) > 8


def test_same_name_has_other_bytes_in_other_namespace():
    (name,) = chain(1, 0, 1)
    here, there = (ExpectedContent(each) for each in namespaces([4096, 4096]))

    assert there.wrong_bytes(name, here.of(name)) > 4000


def test_moved_bytes_are_wrong():
    (name,) = chain(1, 0, 1)
    found = np.roll(a_content().of(name), 64)

    assert a_content().wrong_bytes(name, found) > 0


def test_longer_chain_begins_with_shorter_one():
    assert chain(1, 5, 9)[:4] == chain(1, 5, 4)
    assert chain(1, 5, 4) != chain(2, 5, 4)


def test_late_call_is_reported_once(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.0)
    told = threading.Semaphore(0)
    calls = []

    def late(name: str, seconds: float) -> None:
        calls.append(name)
        told.release()

    watching = watchdog.CallWatchdog(late)
    with watching.call("quick", 60):
        pass

    def wait_until_late(name: str) -> None:
        with watching.call(name, 0.02):
            assert told.acquire(timeout=60)

    with watching.call("slow", 0.02):
        assert told.acquire(timeout=60)
        other = threading.Thread(target=wait_until_late, args=("slow, too",))
        other.start()
        other.join()

    assert calls == ["slow", "slow, too"]


def test_occupied_bytes_include_sub_folders(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a").write_bytes(b"x" * 10_000)
    (tmp_path / "b").write_bytes(b"x" * 10_000)

    assert 20_000 <= leaks.occupied_bytes(tmp_path) <= 40_000


def test_settings_are_merged_by_section():
    assert merged({"a": 1, "s": {"x": 1, "y": 2}}, {"s": {"y": 3}, "b": 4}) == {"a": 1, "s": {"x": 1, "y": 3}, "b": 4}
