"""Links of the simulated cluster: how transfers share their bandwidth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.kernel import Kernel

A, B, C, D = (WorkerId(name) for name in "abcd")
NO_LATENCY = Nanos(0)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(1)


@pytest.fixture
def network(kernel: Kernel) -> Network:
    network = Network(kernel)
    for worker in (A, B, C, D):
        network.join(worker, 100.0)
    return network


class Arrivals(dict[str, float]):
    def note(self, kernel: Kernel, name: str):
        return lambda: self.__setitem__(name, kernel.now() / SECOND)


def test_single_transfer_uses_whole_link_after_latency(kernel, network):
    came = Arrivals()
    network.send(A, B, 200.0, Nanos(SECOND), came.note(kernel, "one"))
    kernel.run()
    assert came == {"one": pytest.approx(3.0)}
    assert network.moved_bytes == 200.0


def test_transfers_of_one_sender_share_its_link(kernel, network):
    came = Arrivals()
    network.send(A, B, 100.0, NO_LATENCY, came.note(kernel, "short"))
    network.send(A, C, 200.0, NO_LATENCY, came.note(kernel, "long"))
    kernel.run()
    assert came == {"short": pytest.approx(2.0), "long": pytest.approx(3.0)}


def test_transfers_to_one_receiver_share_its_link(kernel, network):
    came = Arrivals()
    network.send(A, C, 100.0, NO_LATENCY, came.note(kernel, "from a"))
    network.send(B, C, 100.0, NO_LATENCY, came.note(kernel, "from b"))
    network.send(A, D, 0.001, Nanos(10 * SECOND), came.note(kernel, "later"))
    kernel.run()
    assert came == {"from a": pytest.approx(2.0), "from b": pytest.approx(2.0), "later": pytest.approx(10.0, abs=0.001)}


def test_transfers_on_other_links_keep_their_speed(kernel, network):
    came = Arrivals()
    network.send(A, B, 100.0, NO_LATENCY, came.note(kernel, "one"))
    network.send(C, D, 100.0, NO_LATENCY, came.note(kernel, "other"))
    kernel.run()
    assert came == {"one": pytest.approx(1.0), "other": pytest.approx(1.0)}


@pytest.mark.parametrize("gone", [A, B])
def test_transfers_of_lost_worker_never_arrive(kernel, network, gone):
    came = Arrivals()
    network.send(A, B, 100.0, NO_LATENCY, came.note(kernel, "lost"))
    network.send(A, B, 100.0, Nanos(2 * SECOND), came.note(kernel, "not begun"))
    kernel.at(Nanos(SECOND // 2), lambda: network.leave(gone))
    kernel.run()
    assert came == {}


def test_lost_receiver_frees_bandwidth(kernel, network):
    came = Arrivals()
    network.send(A, B, 100.0, NO_LATENCY, came.note(kernel, "lost"))
    network.send(A, C, 100.0, NO_LATENCY, came.note(kernel, "kept"))
    kernel.at(Nanos(SECOND), lambda: network.leave(B))
    kernel.run()
    assert came == {"kept": pytest.approx(1.5)}


def test_lost_transfer_calls_its_callback(kernel, network):
    lost: list[str] = []
    network.send(A, B, 100.0, NO_LATENCY, lambda: lost.append("came"), lambda: lost.append("under way"))
    network.send(A, B, 100.0, Nanos(2 * SECOND), lambda: lost.append("came"), lambda: lost.append("not begun"))
    kernel.at(Nanos(SECOND // 2), lambda: network.leave(A))
    kernel.run()
    assert lost == ["under way", "not begun"]


def test_transfer_over_several_links_gets_smallest_share(kernel, network):
    disk, bus = LinkName("disk"), LinkName("bus")
    network.open(disk, 50.0)
    network.open(bus, 100.0)
    came = Arrivals()
    assert network.seconds((disk, bus), 100.0, Nanos(SECOND)) == pytest.approx(3.0)
    network.carry((disk, bus), 100.0, NO_LATENCY, came.note(kernel, "from disk"))
    network.carry((bus,), 100.0, NO_LATENCY, came.note(kernel, "from memory"))
    kernel.run()
    assert came == {"from disk": pytest.approx(2.0), "from memory": pytest.approx(2.0)}
    assert network.seconds((LinkName("closed"),), 1.0, NO_LATENCY) is None


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_busy_link_carries_its_bandwidth(sizes):
    """Start several transfers over a link at once: together they take as long as one after the other."""
    kernel, came = Kernel(1), Arrivals()
    network = Network(kernel)
    link = LinkName("lane")
    network.open(link, 1e9)
    for number, size in enumerate(sizes):
        network.carry((link,), size, NO_LATENCY, came.note(kernel, str(number)))
    kernel.run()
    assert max(came.values()) == pytest.approx(sum(sizes) / 1e9, rel=1e-6, abs=1e-7)
    ends = sorted(came, key=lambda name: came[name])
    assert [sizes[int(name)] for name in ends] == sorted(sizes)
