"""Connections that have not proved a secret yet: which one is closed for a new one when there are too many."""

from kvstore.net.unproven_connections import UnprovenConnections


def test_oldest_connection_gives_way_when_full():
    connections: UnprovenConnections[int] = UnprovenConnections(3)
    assert [connections.add(each, "a") for each in range(5)] == [None, None, None, 0, 1]
    assert len(connections) == 3


def test_proven_connections_make_room():
    connections: UnprovenConnections[int] = UnprovenConnections(2)
    connections.add(1, "a")
    connections.add(2, "a")
    connections.discard(1)
    connections.discard(1)
    assert connections.add(3, "a") is None
    assert connections.add(4, "a") == 2


def test_address_with_most_connections_gives_way():
    connections: UnprovenConnections[int] = UnprovenConnections(4)
    connections.add(0, "the oldest of all, alone at its address")
    for each in range(1, 4):
        connections.add(each, "flood")
    assert [connections.add(each, "flood") for each in range(4, 40)] == list(range(1, 37))
    assert connections.add(40, "another") == 37
