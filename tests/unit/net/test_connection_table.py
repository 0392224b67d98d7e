"""Connection table: admission and displacement of connections."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.net.connection_limits import (
    GRACE_SECONDS,
    ORDER_SECONDS,
    ConnectionAdmission,
    ConnectionSlot,
    ConnectionTable,
    WaitingFor,
    client_key,
)


class Clients:
    """A connection table, and the slots of its connections by name."""

    def __init__(self, most: int, share: float = 1.0) -> None:
        self.table: ConnectionTable[str] = ConnectionTable(most, share)
        self.slots: dict[str, ConnectionSlot[str]] = {}
        self.now = 1000.0

    def admit(self, *names: str, address: str = "a") -> None:
        for name in names:
            assert self.displaced_by(name, address) is None

    def displaced_by(self, name: str, address: str = "a") -> str | None:
        """Admit a new connection, and return the name of the connection that was closed for it; None if none was."""
        admission = self.table.admit(name, address, self.now)
        assert admission.slot is not None
        self.slots[name] = admission.slot
        return admission.displaced

    def is_refused(self, name: str, address: str = "a") -> bool:
        return self.table.admit(name, address, self.now) == ConnectionAdmission()

    def mark_waiting(self, name: str, group: WaitingFor) -> None:
        self.table.mark_waiting(self.slots[name], group, self.now)

    def pass_time(self, seconds: float = GRACE_SECONDS) -> None:
        self.now += seconds

    def serves(self, *names: str) -> None:
        for name in names:
            self.slots[name].served = True


def test_newcomer_is_admitted_while_there_is_room():
    clients = Clients(2)

    clients.admit("one", "two")

    assert (len(clients.table), clients.table.displaced, clients.table.refused) == (2, 0, 0)


def test_full_table_displaces_the_longest_silent():
    clients = Clients(3)
    clients.admit("one", "two", "three")

    assert clients.displaced_by("four", "b") == "one"
    assert clients.displaced_by("five", "b") == "two"
    assert clients.table.displaced == 2


@pytest.mark.parametrize("seed", range(5))
def test_groups_give_way_in_their_order(seed):
    groups = list(WaitingFor)
    random.Random(seed).shuffle(groups)
    clients = Clients(len(groups))
    clients.admit(*(group.name for group in groups))
    for group in groups:
        clients.mark_waiting(group.name, group)
    clients.pass_time()

    displaced = []
    for number in map(str, range(len(groups))):
        displaced.append(clients.displaced_by(number))
        clients.serves(number)

    assert displaced == [group.name for group in WaitingFor]


def test_longest_idle_gives_way_not_the_longest_connected():
    clients = Clients(2)
    clients.admit("one", "two")
    for name in ("one", "two", "one"):
        clients.pass_time(ORDER_SECONDS)
        clients.serves(name)
        clients.mark_waiting(name, WaitingFor.IDLE)

    assert clients.displaced_by("three") == "two"


def test_connection_served_again_at_once_keeps_its_turn():
    clients = Clients(2)
    clients.admit("one", "two")
    for name in ("one", "two", "one"):
        clients.serves(name)
        clients.mark_waiting(name, WaitingFor.IDLE)

    assert clients.displaced_by("three") == "one"


def test_waiting_twice_in_a_group_keeps_the_turn():
    clients = Clients(2)
    clients.admit("one", "two")
    for name in ("one", "two", "one"):
        clients.mark_waiting(name, WaitingFor.HEAD)

    assert clients.displaced_by("three") == "one"


@pytest.mark.parametrize("young", [WaitingFor.SILENT, WaitingFor.CLOSING, WaitingFor.HEAD])
def test_idle_is_displaced_before_a_young_connection(young):
    clients = Clients(3)
    clients.admit("idle", "later idle")
    clients.mark_waiting("idle", WaitingFor.IDLE)
    clients.pass_time(0.1)
    clients.mark_waiting("later idle", WaitingFor.IDLE)
    clients.pass_time(0.1)
    clients.admit("young")
    clients.mark_waiting("young", young)

    assert clients.displaced_by("four") == "idle"
    clients.serves("four")
    clients.pass_time(GRACE_SECONDS)
    assert clients.displaced_by("five") == "young"


def test_newcomers_of_a_burst_do_not_displace_each_other():
    clients = Clients(100)
    idle = [f"idle {number}" for number in range(100)]
    clients.admit(*idle)
    for name in idle:
        clients.mark_waiting(name, WaitingFor.IDLE)
    clients.pass_time(0.002)

    displaced = [clients.displaced_by(f"new {number}") for number in range(100)]

    assert displaced == idle
    assert clients.displaced_by("one too many") == "new 0"


def test_longer_silent_is_displaced_before_shorter_idle():
    clients = Clients(2)
    clients.admit("busy", "silent")
    for _ in range(4):
        clients.pass_time(0.1)
        clients.serves("busy")
        clients.mark_waiting("busy", WaitingFor.IDLE)

    assert clients.displaced_by("three") == "silent"


def test_incomplete_body_outlasts_a_burst_of_newcomers():
    clients = Clients(3)
    clients.admit("body")
    clients.mark_waiting("body", WaitingFor.BODY)
    clients.pass_time(10)
    clients.admit("one", "two")

    assert [clients.displaced_by(name) for name in ("three", "four", "five")] == ["one", "two", "three"]


def test_served_connections_never_give_way():
    clients = Clients(2)
    clients.admit("one", "two")
    clients.serves("one", "two")

    assert clients.is_refused("three", "b")
    assert (len(clients.table), clients.table.refused) == (2, 1)
    clients.mark_waiting("two", WaitingFor.IDLE)
    assert clients.displaced_by("three", "b") == "two"


def test_address_over_its_share_displaces_only_its_own():
    clients = Clients(4, share=0.5)
    clients.admit("old", address="b")
    clients.admit("one", "two")
    clients.mark_waiting("one", WaitingFor.IDLE)
    clients.pass_time()

    assert clients.displaced_by("three") == "two"
    clients.pass_time()
    assert clients.displaced_by("four") == "three"


def test_address_with_all_served_at_its_share_is_refused():
    clients = Clients(4, share=0.5)
    clients.admit("one", "two")
    clients.serves("one", "two")

    assert clients.is_refused("three")
    clients.admit("three", address="b")


def test_address_share_is_free_after_connections_end():
    clients = Clients(4, share=0.5)
    clients.admit("one", "two")
    clients.serves("one", "two")
    for _ in range(2):
        clients.table.remove(clients.slots["one"])

    clients.admit("three")
    clients.table.check()


def test_displaced_connection_has_no_effect_any_more():
    clients = Clients(1)
    clients.admit("one")
    assert clients.displaced_by("two") == "one"

    clients.serves("one")
    clients.mark_waiting("one", WaitingFor.IDLE)
    clients.table.remove(clients.slots["one"])

    clients.table.check()
    assert len(clients.table) == 1
    assert clients.displaced_by("three") == "two"


def assert_fair(displaced: ConnectionSlot[int], others: list[ConnectionSlot[int]], now: float) -> None:
    """Assert that no other connection from the same address had to be displaced first."""
    assert not displaced.served
    owing = (WaitingFor.SILENT, WaitingFor.CLOSING, WaitingFor.HEAD)
    alike = [each for each in others if not each.served and each.address is displaced.address]
    late = [each for each in alike if each.group in owing and now - each.since >= GRACE_SECONDS]
    idle = [each for each in alike if each.group is WaitingFor.IDLE]
    if now - displaced.since < GRACE_SECONDS:
        assert not late
        assert not [each for each in idle if each.since < displaced.since]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "serves", "remove", "pass", *WaitingFor]), st.integers(0, 11), st.sampled_from("abc")
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 6), st.sampled_from([0.2, 0.5, 0.9, 1.0]))
def test_table_is_consistent_after_any_history(operations, most, share):
    table: ConnectionTable[int] = ConnectionTable(most, share)
    slots: dict[int, ConnectionSlot[int]] = {}
    now = 0.0
    for operation, client, address in operations:
        slot = slots.get(client)
        if operation == "pass":
            now += client / 10
        elif operation == "admit":
            if slot is not None:
                continue
            admission = table.admit(client, address, now)
            if admission.displaced is not None:
                assert_fair(slots.pop(admission.displaced), list(slots.values()), now)
            if admission.slot is not None:
                slots[client] = admission.slot
            else:
                alike = [each for each in slots.values() if len(slots) == most or each.address.name == address]
                assert alike
                assert all(each.served for each in alike)
        elif slot is None:
            continue
        elif operation == "serves":
            slot.served = True
        elif operation == "remove":
            table.remove(slots.pop(client))
        else:
            table.mark_waiting(slot, operation, now)
        table.check()
        assert len(table) == len(slots)


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
def test_client_key_groups_addresses_of_one_client(peername, address):
    assert client_key(peername) == address
