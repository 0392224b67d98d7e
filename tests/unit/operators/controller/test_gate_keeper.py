"""Gate keeper: which group of pods loses its scheduling gates next."""

import msgspec

from fleet.core.clock import Nanos
from fleet.net.kubernetes.views import Pod
from operators.controller.gate_keeper import OPENING, STALE, TURN, GateKeeper
from operators.controller.reconcile import OpenGate, Remove
from operators.keys import deployment_key
from operators.manifests.names import GATE, GATED
from operators.observed.gates import GatedGroup, gated_group

ONE, TWO = deployment_key("ns", "one"), deployment_key("ns", "two")
START = Nanos(0)


def closed(name, *, begun=False):
    return GatedGroup(name, (f"{name}-0", f"{name}-1"), begun=begun)


def opened(name):
    return tuple(OpenGate(f"{name}-{rank}") for rank in (0, 1))


def a_pod(name, *, node="", gates=(), gated="true"):
    annotations = {GATED: gated} if gated else {}
    spec = {"nodeName": node, "schedulingGates": [{"name": each} for each in gates]}
    return msgspec.convert({"metadata": {"name": name, "uid": name, "annotations": annotations}, "spec": spec}, Pod)


def test_first_group_passes_and_second_waits():
    keeper = GateKeeper()

    assert keeper.decide(ONE, [closed("a")], [], START) == opened("a")
    assert keeper.decide(TWO, [closed("b")], [], START) == (), "no cache shows yet that a is open"
    assert keeper.waits(TWO)

    assert keeper.decide(TWO, [closed("b")], [a_pod("a-0")], START) == (), "a is open and has no node"
    keeper.decide(ONE, [GatedGroup("a", (), begun=True)], [], START)
    placed = [a_pod("a-0", node="n"), a_pod("b-0", gates=[GATE]), a_pod("other", gated="")]
    assert keeper.decide(TWO, [closed("b")], placed, START) == opened("b")


def test_groups_of_one_deployment_pass_one_by_one():
    keeper = GateKeeper()

    assert keeper.decide(ONE, [closed("a"), closed("b")], [], START) == opened("a")
    assert keeper.decide(ONE, [GatedGroup("a", (), begun=True), closed("b")], [a_pod("a-0")], START) == ()
    assert keeper.decide(ONE, [GatedGroup("a", (), begun=True), closed("b")], [], START) == opened("b")


def test_groups_pass_in_the_order_in_which_they_came():
    keeper = GateKeeper()
    passing = [a_pod("x-0")]
    keeper.decide(TWO, [closed("b")], passing, START)
    keeper.decide(ONE, [closed("a")], passing, START)

    assert keeper.decide(ONE, [closed("a")], [], START) == ()
    assert keeper.decide(TWO, [closed("b")], [], START) == opened("b")


def test_group_that_has_begun_goes_on_at_once():
    keeper = GateKeeper()

    assert keeper.decide(ONE, [closed("a", begun=True)], [a_pod("x-0")], START) == opened("a")


def test_group_without_nodes_is_removed_only_if_others_wait():
    keeper = GateKeeper()
    unplaced = GatedGroup("a", (), begun=True, unplaced=True)

    assert keeper.decide(ONE, [unplaced], [], START) == ()
    keeper.decide(TWO, [closed("b")], [a_pod("a-0")], START)
    assert keeper.decide(ONE, [unplaced], [], START) == (Remove("StatefulSet", "a"),)


def test_deployment_that_is_gone_or_silent_holds_nobody_up():
    keeper = GateKeeper()
    keeper.decide(ONE, [closed("a")], [a_pod("x-0")], START)
    assert keeper.decide(TWO, [closed("b")], [], START) == ()
    assert keeper.decide(TWO, [closed("b")], [], STALE) == opened("b")

    keeper = GateKeeper()
    keeper.decide(ONE, [closed("a")], [a_pod("x-0")], START)
    keeper.forget(ONE)
    assert keeper.decide(TWO, [closed("b")], [], START) == opened("b")


def test_pods_of_others_are_not_waited_for():
    foreign = a_pod("x-0", node="", gates=["example.com/quota"], gated="")

    assert GateKeeper().decide(ONE, [closed("a")], [foreign], START) == opened("a")


def test_group_with_a_foreign_gate_waits_and_blocks_nobody():
    keeper = GateKeeper()
    pods = [a_pod(f"a-{rank}", gates=[GATE, "example.com/quota"] if rank else [GATE]) for rank in (0, 1)]
    held = gated_group("a", pods, unplaced=False)

    assert keeper.decide(ONE, [held], pods, START) == (), "ours opens last"
    assert not keeper.waits(ONE)
    assert keeper.decide(TWO, [closed("b")], pods, START) == opened("b")

    free = gated_group("a", [a_pod(f"a-{rank}", gates=[GATE]) for rank in (0, 1)], unplaced=False)
    keeper.decide(TWO, [GatedGroup("b", (), begun=True)], [], START)
    assert keeper.decide(ONE, [free], [], START) == opened("a")


def test_open_pod_with_a_foreign_gate_blocks_nobody():
    pods = [a_pod("a-0", gates=["example.com/quota"])]

    assert GateKeeper().decide(TWO, [closed("b")], pods, START) == opened("b")


def test_pods_that_no_scheduler_looks_at_block_for_one_turn():
    keeper = GateKeeper()
    pods = [a_pod("a-0"), a_pod("a-1")]

    assert keeper.decide(TWO, [closed("b")], pods, START) == ()
    for now in range(0, TURN, TURN // 10):
        assert keeper.decide(TWO, [closed("b")], pods, Nanos(now)) == ()
    assert keeper.decide(TWO, [closed("b")], pods, TURN) == opened("b")

    made_again = [a_pod("c-0")]
    assert keeper.decide(TWO, [closed("b")], made_again, TURN) == (), "other pods have a turn of their own"


def test_group_whose_gates_stay_closed_goes_to_the_end():
    keeper = GateKeeper()

    assert keeper.decide(ONE, [closed("a")], [], START) == opened("a")
    assert keeper.decide(TWO, [closed("b")], [], START) == ()
    late = Nanos(OPENING - 1)
    assert keeper.decide(ONE, [closed("a")], [], late) == opened("a"), "it is tried again until then"
    assert keeper.decide(TWO, [closed("b")], [], late) == ()
    assert keeper.decide(TWO, [closed("b")], [], OPENING) == opened("b")
    assert keeper.decide(ONE, [closed("a")], [], OPENING) == ()


def test_time_in_which_others_pass_is_no_time_to_open():
    keeper = GateKeeper()
    keeper.decide(ONE, [closed("a")], [], START)
    keeper.decide(TWO, [closed("b")], [], START)
    keeper.decide(ONE, [closed("a")], [a_pod("x-0")], Nanos(1))
    keeper.decide(TWO, [closed("b")], [a_pod("x-0")], Nanos(OPENING - 1))

    assert keeper.decide(TWO, [closed("b")], [], OPENING) == ()
    assert keeper.decide(ONE, [closed("a")], [], OPENING) == opened("a")
