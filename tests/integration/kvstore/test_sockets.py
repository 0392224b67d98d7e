"""Tests of sockets in a folder shared by several nodes that start at once or one after another."""

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import StoreNotStarted
from kvstore.net import unix_sockets as sockets
from tests.support.kvstore.builders import a_short_folder

pytestmark = pytest.mark.integration


@pytest.fixture
def path() -> Iterator[Path]:
    """Return the path of a socket that a killed node left."""
    with a_short_folder() as folder:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{folder}/m")
        yield folder / "m"


def test_socket_is_not_removed_while_a_node_binds(path, monkeypatch):
    monkeypatch.setattr(sockets, "ALONE_SECONDS", 0.05)
    left = sockets.identity(str(path))
    other = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    with pytest.raises(StoreNotStarted, match=r"^shm_socket: .* is locked by another process"):
        sockets.listen("shm_socket", str(path))

    assert sockets.identity(str(path)) == left
    os.close(other)
    with sockets.listen("shm_socket", str(path)), sockets.connect(str(path), 1.0):
        assert [each.name for each in path.parent.iterdir()] == ["m"], "the lock left a file"


def test_ended_node_leaves_the_socket_of_its_successor(path):
    with sockets.listen("shm_socket", str(path)):
        own = sockets.identity(str(path))
        path.unlink()
        with sockets.listen("shm_socket", str(path)) as successor:
            sockets.remove(str(path), own)

            assert path.exists()
            sockets.remove(str(path), sockets.identity(str(path)))
            assert not path.exists()
            sockets.remove(str(path), own)  # a second call does nothing
            assert successor.fileno() >= 0
