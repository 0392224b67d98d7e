"""Tests of the list of refused peers: its length is limited, and its entries expire."""

from fleet.core.clock import SECOND, Nanos
from fleet.membership.compatibility import MOST_REFUSED, REFUSED_FOR, IncompatiblePeers, Link


class HandClock:
    """A clock that the test moves."""

    def __init__(self):
        self.at = Nanos(0)

    def now(self):
        return self.at


def names(peers):
    return [each.name for each in peers.present()]


def test_refused_peer_is_shown_until_it_is_accepted():
    peers = IncompatiblePeers(HandClock())
    peers.refused(Link.WORKER, "w", "upgrade it")
    peers.refused(Link.REGISTRY, "w", "upgrade it")
    peers.accepted(Link.WORKER, "w")
    (peer,) = peers.present()
    assert (peer.link, peer.name, peer.cause) == (Link.REGISTRY, "w", "upgrade it")


def test_refusals_are_logged_once_a_minute_with_their_number():
    clock = HandClock()
    peers = IncompatiblePeers(clock)
    logged = []
    for second in range(0, 131, 5):
        clock.at = Nanos(second * SECOND)
        logged.append((second, peers.refused(Link.REGISTRY, "w", "upgrade it")))
        peers.present()  # reading the list does not change the count
    assert [each for each in logged if each[1]] == [(0, 1), (60, 12), (120, 12)]
    assert peers.refused(Link.REGISTRY, "w", "upgrade the router") == 3
    assert peers.refused(Link.REGISTRY, "other", "upgrade it") == 1
    peers.accepted(Link.REGISTRY, "w")
    assert peers.refused(Link.REGISTRY, "w", "upgrade the router") == 1


def test_peer_that_does_not_try_again_is_forgotten():
    clock = HandClock()
    peers = IncompatiblePeers(clock)
    peers.refused(Link.PEER, "gone", "x")
    clock.at = Nanos(REFUSED_FOR - SECOND)
    peers.refused(Link.PEER, "there", "x")
    assert names(peers) == ["gone", "there"]
    clock.at = REFUSED_FOR
    assert names(peers) == ["there"]


def test_list_of_refused_peers_is_bounded():
    peers = IncompatiblePeers(HandClock())
    for number in range(MOST_REFUSED + 5):
        peers.refused(Link.WORKER, f"w{number}", "x")
    assert len(names(peers)) == MOST_REFUSED
    assert names(peers)[0] == "w5"
