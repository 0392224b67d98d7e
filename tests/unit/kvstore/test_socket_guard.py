"""Full gRPC port: which connection is closed for a new one."""

from kvstore.net.socket_guard import GuardedConnection, select_displaced

MOST = 10
PER_ADDRESS = 8


def a_connection(
    port: int, *, address: str = "10.0.0.1", busy: bool = False, called: bool = False, seen_at: float = 0, silent_ms=0
) -> GuardedConnection:
    return GuardedConnection(
        peer=(address, port), busy=busy, called=called or busy, seen_at=seen_at, silent_ms=silent_ms
    )


def displaced_ports(connections: list[GuardedConnection]) -> list[int]:
    return [each.peer[1] for each in select_displaced(connections, MOST, PER_ADDRESS)]


def test_nothing_gives_way_in_a_port_that_is_not_full():
    several = [a_connection(port, address=f"10.0.0.{port % 2}") for port in range(MOST)]

    assert displaced_ports(several) == []


def test_one_address_makes_room_among_its_own_connections():
    many = [a_connection(port, seen_at=port) for port in range(PER_ADDRESS + 1)]

    assert displaced_ports([a_connection(99, address="10.0.0.2"), *many]) == [0]


def test_address_with_most_connections_gives_way_in_a_full_port():
    few = [a_connection(port, address="10.0.0.2") for port in range(100, 105)]
    many = [a_connection(port, seen_at=port) for port in range(7)]

    assert displaced_ports([*few, *many]) == [0, 1]


def test_connections_without_calls_give_way_before_idle_ones():
    idle = [a_connection(port, called=True) for port in range(PER_ADDRESS)]
    silent = a_connection(50, seen_at=9)

    assert displaced_ports([*idle, silent]) == [50]


def test_longest_silence_gives_way_among_those_seen_at_once():
    together = [a_connection(port, silent_ms=port) for port in range(PER_ADDRESS + 2)]

    assert displaced_ports(together) == [9, 8]


def test_busy_connections_never_give_way():
    busy = [a_connection(port, busy=True) for port in range(MOST + 5)]

    assert displaced_ports(busy) == []
