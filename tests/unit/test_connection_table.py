"""The connection table of a port: who is admitted, and who gives way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.adapters.connection_table import ConnectionTable, Waiting, counted_address


def a_table(*clients: str, most: int | None = None, share: float = 1.0, address: str = "a") -> ConnectionTable[str]:
    table: ConnectionTable[str] = ConnectionTable(len(clients) if most is None else most, share)
    for client in clients:
        assert table.admit(client, address).admitted
    return table


def test_newcomer_is_admitted_while_there_is_room():
    table = a_table("one", most=2)

    admission = table.admit("two", "a")

    assert admission.admitted
    assert admission.displaced is None
    assert (len(table), table.displaced, table.refused) == (2, 0, 0)


def test_full_table_gives_up_the_longest_silent():
    table = a_table("one", "two", "three")

    assert table.admit("four", "b").displaced == "one"
    assert table.admit("five", "b").displaced == "two"
    assert table.displaced == 2


@pytest.mark.parametrize("seed", range(5))
def test_groups_give_way_in_their_order(seed):
    groups = list(Waiting)
    random.Random(seed).shuffle(groups)
    table = a_table(*(group.name for group in groups))
    for group in groups:
        table.waits(group.name, group)

    displaced = []
    for number in range(len(groups)):
        displaced.append(table.admit(str(number), "a").displaced)
        table.serves(str(number))

    assert displaced == [group.name for group in Waiting]


def test_longest_idle_gives_way_not_the_longest_connected():
    table = a_table("one", "two")
    for client in ("one", "two", "one"):
        table.serves(client)
        table.waits(client, Waiting.IDLE)

    assert table.admit("three", "a").displaced == "two"


def test_waiting_twice_in_a_group_keeps_the_place():
    table = a_table("one", "two")
    table.waits("one", Waiting.HEAD)
    table.waits("two", Waiting.HEAD)
    table.waits("one", Waiting.HEAD)

    assert table.admit("three", "a").displaced == "one"


def test_served_connections_never_give_way():
    table = a_table("one", "two")
    table.serves("one")
    table.serves("two")

    admission = table.admit("three", "b")

    assert not admission.admitted
    assert (len(table), table.refused) == (2, 1)


def test_address_over_its_share_displaces_only_its_own():
    table = a_table("old", most=4, share=0.5, address="b")
    for client in ("one", "two"):
        table.admit(client, "a")
    table.waits("one", Waiting.IDLE)

    assert table.admit("three", "a").displaced == "two"
    assert table.admit("four", "a").displaced == "three"


def test_address_with_all_served_at_its_share_is_refused():
    table = a_table("one", "two", most=4, share=0.5)
    table.serves("one")
    table.serves("two")

    assert not table.admit("three", "a").admitted
    assert table.admit("three", "b").admitted


def test_share_is_free_again_when_connections_end():
    table = a_table("one", "two", most=4, share=0.5)
    table.serves("one")
    table.serves("two")
    table.remove("one")
    table.remove("one")

    assert table.admit("three", "a").admitted
    table.check()


def test_who_was_displaced_is_forgotten():
    table = a_table("one")
    table.admit("two", "a")

    table.waits("one", Waiting.IDLE)
    table.serves("one")
    table.remove("one")

    table.check()
    assert len(table) == 1


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["admit", "serves", "remove", *Waiting]), st.integers(0, 11), st.sampled_from("abc")),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 6), st.sampled_from([0.2, 0.5, 0.9, 1.0]))
def test_table_is_consistent_after_any_history(operations, most, share):
    table: ConnectionTable[int] = ConnectionTable(most, share)
    present: set[int] = set()
    served: set[int] = set()
    for operation, client, address in operations:
        if operation == "admit":
            if client in present:
                continue
            admission = table.admit(client, address)
            assert admission.displaced not in served
            if admission.admitted:
                present.add(client)
            present.discard(admission.displaced)
        elif operation == "serves":
            table.serves(client)
            served |= {client} & present
        elif operation == "remove":
            table.remove(client)
            present.discard(client)
            served.discard(client)
        else:
            table.waits(client, operation)
            served.discard(client)
        table.check()
        assert len(table) == len(present)


@pytest.mark.parametrize(
    ("peername", "address"),
    [
        (("10.0.0.1", 4711), "10.0.0.1"),
        (("::ffff:10.0.0.1", 4711, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "20010db800010002/64"),
        (("2001:db8:1:2::1", 4711, 0, 0), "20010db800010002/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80000000000000/64"),
        (("::1", 4711, 0, 0), "0/64"),
        ("", ""),
        ("/run/fleet.sock", ""),
        (None, ""),
    ],
)
def test_address_is_what_one_client_has(peername, address):
    assert counted_address(peername) == address
