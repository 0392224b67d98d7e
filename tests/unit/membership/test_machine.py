"""Membership machine: which workers are members, and for how long."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.machine import REMEMBERED_INCARNATIONS, Membership
from fleet.membership.messages import (
    Deregister,
    DirectoryRenewal,
    MemberJoined,
    MemberLeft,
    MembershipTicked,
    MemberUnreachable,
    NameOccupied,
    RecordWithdrawn,
    Register,
    Registration,
    RegistrationSuperseded,
    WorkerStreamClosed,
    WorkerStreamOpened,
)
from fleet.membership.settings import MembershipSettings

START = Nanos(1_000)
LEASE = Nanos(3_000 * MILLISECOND)
WORKER = WorkerId("decode-0")


def a_membership() -> Membership:
    return Membership(MembershipSettings(lease_ms=3_000))


def a_registration(worker: str = WORKER, incarnation: str = "one", address: str = "127.0.0.1:1") -> Register:
    return Register(worker_id=WorkerId(worker), incarnation=Incarnation(incarnation), address=address)


def unreachable(event: Register) -> MemberUnreachable:
    return MemberUnreachable(worker_id=event.worker_id, incarnation=event.incarnation)


def connected(event: Register) -> WorkerStreamOpened:
    return WorkerStreamOpened(worker_id=event.worker_id, incarnation=event.incarnation)


def occupied(wants: Register, holder: Register, lease: Nanos | None) -> NameOccupied:
    return NameOccupied(worker_id=wants.worker_id, incarnation=wants.incarnation, holder=holder.address, lease=lease)


def joined(event: Register) -> MemberJoined:
    return MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)


def test_a_registration_is_announced_once_and_renewed_silently():
    membership = a_membership()

    assert membership.handle(a_registration(), START) == [joined(a_registration())]
    assert membership.handle(a_registration(), START) == []


def test_a_member_that_does_not_renew_leaves_when_its_lease_ends():
    membership = a_membership()
    membership.handle(a_registration(), START)

    assert membership.handle(MembershipTicked(), Nanos(START + LEASE - 1)) == []
    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER)]
    assert membership.members == {}


def test_a_renewal_extends_the_lease():
    membership = a_membership()
    membership.handle(a_registration(), START)
    membership.handle(a_registration(), Nanos(START + LEASE - 1))

    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == []


def test_a_name_is_refused_while_the_lease_of_its_holder_lasts():
    membership = a_membership()
    holder, other = a_registration(), a_registration(incarnation="two", address="127.0.0.1:2")
    membership.handle(holder, START)
    later = Nanos(START + LEASE - 1)

    assert membership.handle(other, START) == [occupied(other, holder, LEASE)]
    assert membership.handle(other, later) == [occupied(other, holder, Nanos(1))]
    assert membership.members == {WORKER: joined(holder)}
    assert membership.handle(other, Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER), joined(other)]


def test_a_new_incarnation_replaces_an_unreachable_one_at_once():
    membership = a_membership()
    membership.handle(a_registration(), START)
    restarted = a_registration(incarnation="two", address="127.0.0.1:2")
    membership.handle(unreachable(a_registration()), START)

    assert membership.handle(restarted, START) == [MemberLeft(worker_id=WORKER), joined(restarted)]


def test_a_live_stream_keeps_the_name_even_after_the_lease():
    membership = a_membership()
    holder, other = a_registration(), a_registration(incarnation="two")
    membership.handle(holder, START)
    membership.handle(connected(holder), START)
    after = Nanos(START + LEASE)

    assert membership.handle(MembershipTicked(), after) == [MemberLeft(worker_id=WORKER)]
    assert membership.handle(other, after) == [occupied(other, a_registration(address=""), None)]
    assert membership.handle(WorkerStreamClosed(worker_id=WORKER), after) == []
    assert membership.handle(other, after) == [joined(other)]


def test_a_member_that_is_reached_again_holds_its_name_again():
    membership = a_membership()
    holder, other = a_registration(), a_registration(incarnation="two")
    membership.handle(holder, START)
    membership.handle(unreachable(holder), START)
    membership.handle(connected(holder), START)

    assert membership.handle(other, START) == [occupied(other, holder, None)]


def test_name_is_free_if_another_process_has_the_address():
    """Let the router reach a restarted worker at the address of the killed one before the restarted worker registers."""
    membership = a_membership()
    membership.handle(a_registration(), START)
    restarted = a_registration(incarnation="two")
    membership.handle(connected(restarted), START)

    assert membership.handle(restarted, START) == [MemberLeft(worker_id=WORKER), joined(restarted)]


def test_news_of_a_former_incarnations_end_free_no_name():
    membership = a_membership()
    holder, other = a_registration(incarnation="two"), a_registration(incarnation="three")
    membership.handle(holder, START)
    membership.handle(unreachable(a_registration()), START)

    assert membership.handle(other, START) == [occupied(other, holder, LEASE)]


def test_a_forwarded_registration_joins_when_the_name_is_free():
    membership = a_membership()
    holder, other = a_registration(), structs.replace(a_registration(incarnation="two"), forwarded=True)
    membership.handle(holder, START)

    assert membership.handle(other, START) == [occupied(other, holder, LEASE)]
    assert membership.handle(unreachable(holder), START) == [MemberLeft(worker_id=WORKER), joined(other)]
    assert membership.handle(holder, START) == [
        RegistrationSuperseded(worker_id=WORKER, incarnation=Incarnation("one"))
    ]


def test_directory_claim_joins_when_the_holder_leaves():
    membership = a_membership()
    holder, other = a_registration(), a_registration(incarnation="two")
    membership.handle(holder, START)

    assert membership.handle(found(other, Nanos(2 * LEASE)), START) == []
    assert membership.handle(unreachable(holder), START) == [], (
        "it has registered here, and the directory's may be old news"
    )
    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER), joined(other)]


def test_a_directory_takes_no_name_from_a_live_stream():
    membership = a_membership()
    holder, other = a_registration(), a_registration(incarnation="two")
    membership.handle(found(holder), START)
    membership.handle(connected(holder), START)

    assert membership.handle(found(other), START) == []
    assert membership.handle(WorkerStreamClosed(worker_id=WORKER), START) == []
    assert membership.handle(unreachable(holder), START) == [MemberLeft(worker_id=WORKER), joined(other)]


def disconnected(event: Register) -> WorkerStreamClosed:
    return WorkerStreamClosed(worker_id=event.worker_id)


def a_draining_stream(holder: Register) -> Membership:
    """Return a membership whose stream to a worker continues, although the directory has lost the worker."""
    membership = a_membership()
    membership.handle(found(holder), START)
    membership.handle(connected(holder), START)
    assert membership.handle(withdrawn(holder), START) == [MemberLeft(worker_id=WORKER)]
    return membership


def test_claim_joins_when_the_stream_without_member_ends():
    holder, other = a_registration(), a_registration(incarnation="two")
    membership = a_draining_stream(holder)

    assert membership.handle(found(other), START) == []
    assert membership.handle(disconnected(holder), START) == [joined(other)]
    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER)]


def test_claim_from_before_the_withdrawal_waits_for_the_stream():
    holder, other = a_registration(), a_registration(incarnation="two")
    membership = a_membership()
    membership.handle(found(holder), START)
    membership.handle(connected(holder), START)

    assert membership.handle(found(other), START) == []
    assert membership.handle(withdrawn(holder), START) == [MemberLeft(worker_id=WORKER)]
    assert membership.handle(disconnected(holder), START) == [joined(other)]


def test_forwarded_claim_joins_when_the_last_stream_ends():
    holder, other = a_registration(), structs.replace(a_registration(incarnation="two"), forwarded=True)
    membership = a_draining_stream(holder)

    assert membership.handle(other, START) == [occupied(other, a_registration(address=""), None)]
    assert membership.handle(disconnected(holder), START) == [joined(other)]


def test_claim_joins_when_the_former_holder_deregisters():
    holder, other = a_registration(), a_registration(incarnation="two")
    membership = a_draining_stream(holder)
    membership.handle(found(other), START)

    assert membership.handle(Deregister(worker_id=WORKER, incarnation=holder.incarnation), START) == [joined(other)]


def test_claim_joins_when_a_stream_reaches_the_claimant():
    holder, other = a_registration(), a_registration(incarnation="two")
    membership = a_draining_stream(holder)
    membership.handle(found(other), START)

    assert membership.handle(connected(other), START) == [joined(other)]


def test_claim_without_member_ends_with_its_lease_or_withdrawal():
    holder, other = a_registration(), a_registration(incarnation="two")
    ended, withdrawn_one = a_draining_stream(holder), a_draining_stream(holder)
    for membership in (ended, withdrawn_one):
        membership.handle(found(other), START)
    withdrawn_one.handle(withdrawn(other), START)

    assert ended.handle(disconnected(holder), Nanos(START + LEASE)) == []
    assert withdrawn_one.handle(disconnected(holder), START) == []


def test_a_claim_that_has_ended_or_was_withdrawn_does_not_join():
    holder, other = a_registration(), a_registration(incarnation="two")
    ended, withdrawn_one = a_membership(), a_membership()
    for membership in (ended, withdrawn_one):
        membership.handle(found(holder, Nanos(2 * LEASE)), START)
        membership.handle(connected(holder), START)
        membership.handle(found(other), START)
        membership.handle(WorkerStreamClosed(worker_id=WORKER), START)
    withdrawn_one.handle(withdrawn(other), START)

    assert ended.handle(unreachable(holder), Nanos(START + LEASE)) == []
    assert withdrawn_one.handle(unreachable(holder), START) == []


def test_replaced_incarnation_cannot_return_or_remove_successor():
    membership = a_membership()
    membership.handle(a_registration(), START)
    membership.handle(unreachable(a_registration()), START)
    membership.handle(a_registration(incarnation="two"), START)

    assert membership.handle(a_registration(), START) == [
        RegistrationSuperseded(worker_id=WORKER, incarnation=Incarnation("one"))
    ]
    assert membership.handle(Deregister(worker_id=WORKER, incarnation=Incarnation("one")), START) == []
    assert membership.members[WORKER].incarnation == "two"


def test_an_incarnation_that_moved_is_announced_again():
    membership = a_membership()
    membership.handle(a_registration(), START)
    moved = a_registration(address="127.0.0.1:9")

    assert membership.handle(moved, START) == [MemberLeft(worker_id=WORKER), joined(moved)]
    assert membership.handle(moved, START) == []


def test_a_deregistration_is_immediate():
    membership = a_membership()
    membership.handle(a_registration(), START)

    assert membership.handle(Deregister(worker_id=WORKER, incarnation=Incarnation("one")), START) == [
        MemberLeft(worker_id=WORKER)
    ]


def found(event: Register, lease: Nanos = LEASE) -> DirectoryRenewal:
    """Return the event that a directory contains the record of a worker."""
    return DirectoryRenewal(
        worker_id=event.worker_id, incarnation=event.incarnation, address=event.address, lease=lease
    )


def withdrawn(event: Register) -> RecordWithdrawn:
    return RecordWithdrawn(worker_id=event.worker_id, incarnation=event.incarnation)


def test_found_worker_is_a_member_for_the_directorys_lease():
    membership = a_membership()
    worker = a_registration()

    assert membership.handle(found(worker, Nanos(2 * LEASE)), START) == [joined(worker)]
    assert membership.handle(MembershipTicked(), Nanos(START + 2 * LEASE - 1)) == []
    assert membership.handle(MembershipTicked(), Nanos(START + 2 * LEASE)) == [MemberLeft(worker_id=WORKER)]


def test_later_of_two_leases_counts():
    membership = a_membership()
    membership.handle(found(a_registration(), Nanos(2 * LEASE)), START)

    assert membership.handle(a_registration(), START) == []
    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == []
    assert membership.handle(MembershipTicked(), Nanos(START + 2 * LEASE)) == [MemberLeft(worker_id=WORKER)]


def told(event: Register, lease: Nanos = LEASE) -> Registration:
    return Registration(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address, lease=lease)


def test_registrations_have_the_rest_of_their_leases():
    """Pass registrations to another router: they keep their remaining leases, so that two routers cannot keep a dead worker for ever."""
    membership, other = a_membership(), a_membership()
    membership.handle(a_registration(), START)
    membership.handle(found(a_registration("found")), START)
    later = Nanos(START + LEASE // 3)

    registrations = membership.registrations(later)
    for event in registrations:
        other.handle(event, later)

    assert registrations == [told(a_registration(), Nanos(START + LEASE - later))]
    assert other.registrations(later) == []
    assert other.handle(MembershipTicked(), Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER)]
    assert membership.registrations(Nanos(START + LEASE)) == []


def test_announcement_of_another_router_extends_no_lease():
    membership = a_membership()
    membership.handle(told(a_registration(), Nanos(1000 * LEASE)), START)

    assert membership.handle(MembershipTicked(), Nanos(START + LEASE)) == [MemberLeft(worker_id=WORKER)]


def test_old_announcement_replaces_and_blocks_no_worker():
    """Let a router that missed a restart announce the old incarnation to a router that knows the new one."""
    old, new = a_registration(incarnation="one"), a_registration(incarnation="two")
    membership = a_membership()
    membership.handle(told(new), START)

    assert membership.handle(told(old), START) == []
    assert membership.handle(new, START) == [], "it renews"
    assert membership.members == {WORKER: joined(new)}


def test_registration_replaces_an_announcement():
    old, new = a_registration(incarnation="one"), a_registration(incarnation="two")
    membership = a_membership()
    membership.handle(told(old), START)
    assert membership.handle(new, START) == [occupied(new, old, LEASE)]
    membership.handle(unreachable(old), START)

    assert membership.handle(new, START) == [MemberLeft(worker_id=WORKER), joined(new)]


def test_old_directory_record_does_not_affect_registered_worker():
    membership = a_membership()
    restarted = a_registration(incarnation="two")
    membership.handle(restarted, START)

    assert membership.handle(found(a_registration()), START) == []
    assert membership.handle(withdrawn(a_registration()), START) == []
    assert membership.handle(withdrawn(restarted), START) == [], "it has registered, so it is there"
    assert membership.handle(restarted, START) == []
    assert membership.members[WORKER] == joined(restarted)


def test_a_lease_from_here_that_ended_protects_nobody():
    membership = a_membership()
    membership.handle(a_registration(), START)
    restarted = a_registration(incarnation="two")

    assert membership.handle(found(restarted), Nanos(START + LEASE)) == [
        MemberLeft(worker_id=WORKER),
        joined(restarted),
    ]


def test_withdrawn_worker_leaves_at_once_unless_replaced():
    membership = a_membership()
    membership.handle(found(a_registration()), START)
    restarted = a_registration(incarnation="two")
    membership.handle(found(restarted), START)

    assert membership.handle(withdrawn(a_registration()), START) == []
    assert membership.handle(withdrawn(restarted), START) == [MemberLeft(worker_id=WORKER)]


workers = st.sampled_from(["a", "b"])
incarnations = st.sampled_from(["1", "2", "3"])
steps = st.lists(
    st.tuples(
        st.builds(a_registration, workers, incarnations, st.sampled_from(["x", "y"]))
        | st.builds(a_registration, workers, incarnations, st.sampled_from(["x", "y"])).map(found)
        | st.builds(a_registration, workers, incarnations, st.sampled_from(["x", "y"])).map(told)
        | st.builds(a_registration, workers, incarnations).map(withdrawn)
        | st.builds(Deregister, worker_id=workers.map(WorkerId), incarnation=incarnations.map(Incarnation))
        | st.builds(a_registration, workers, incarnations).map(unreachable)
        | st.builds(a_registration, workers, incarnations).map(connected)
        | st.builds(a_registration, workers, incarnations).map(lambda each: structs.replace(each, forwarded=True))
        | st.builds(WorkerStreamClosed, worker_id=workers.map(WorkerId))
        | st.just(MembershipTicked()),
        st.integers(0, 2 * LEASE),
    ),
    max_size=30,
)


@given(steps)
def test_the_announcements_always_add_up_to_the_members(steps):
    membership = a_membership()
    announced: dict[WorkerId, MemberJoined] = {}
    now = START
    for event, pause in steps:
        now = Nanos(now + pause)
        for change in membership.handle(event, now):
            match change:
                case MemberJoined():
                    assert change.worker_id not in announced
                    announced[change.worker_id] = change
                case MemberLeft():
                    del announced[change.worker_id]
                case RegistrationSuperseded():
                    assert announced[change.worker_id].incarnation != change.incarnation
                case NameOccupied():
                    assert change.worker_id not in announced or change.lease is None or change.lease > 0
        membership.check()
        assert membership.members == announced

    for worker_id, name in ((WorkerId("a"), "4"), (WorkerId("b"), "5")):  # rule 7: the claim joins whatever came before
        claimant = a_registration(worker_id, name)
        membership.handle(found(claimant), now)
        membership.handle(WorkerStreamClosed(worker_id=worker_id), now)
        held = membership.members[worker_id]
        if held != joined(claimant):
            membership.handle(Deregister(worker_id=worker_id, incarnation=held.incarnation), now)
        assert membership.members[worker_id] == joined(claimant)
        membership.check()
    for late in (now + LEASE, now + 2 * LEASE):  # a claimant joins for the rest of its own lease
        membership.handle(MembershipTicked(), Nanos(late))
    assert membership.members == {}


def test_many_restarts_are_remembered_within_bounds():
    membership = a_membership()
    for number in range(REMEMBERED_INCARNATIONS + 2):
        membership.handle(a_registration(incarnation=str(number)), START)
        membership.handle(unreachable(a_registration(incarnation=str(number))), START)

    assert membership.handle(a_registration(incarnation="1"), START)[0] == RegistrationSuperseded(
        worker_id=WORKER, incarnation=Incarnation("1")
    )
