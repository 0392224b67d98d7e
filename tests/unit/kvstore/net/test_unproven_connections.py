"""Unproven connections: which one gives way to a new one."""

from kvstore.net.unproven_connections import UnprovenConnections


def test_oldest_connection_gives_way_when_full():
    newcomers: UnprovenConnections[int] = UnprovenConnections(3)
    assert [newcomers.add(each, "a") for each in range(5)] == [None, None, None, 0, 1]
    assert len(newcomers) == 3


def test_proven_connections_make_room():
    newcomers: UnprovenConnections[int] = UnprovenConnections(2)
    newcomers.add(1, "a")
    newcomers.add(2, "a")
    newcomers.discard(1)
    newcomers.discard(1)
    assert newcomers.add(3, "a") is None
    assert newcomers.add(4, "a") == 2


def test_address_with_most_connections_gives_way():
    newcomers: UnprovenConnections[int] = UnprovenConnections(4)
    newcomers.add(0, "the oldest of all, alone at its address")
    for each in range(1, 4):
        newcomers.add(each, "flood")
    assert [newcomers.add(each, "flood") for each in range(4, 40)] == list(range(1, 37))
    assert newcomers.add(40, "another") == 37
