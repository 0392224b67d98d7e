"""Rank rendezvous: which ranks may join a group, and when the group ends."""

import msgspec
import pytest

from fleet.core.clock import SECOND, Nanos
from workers.rank_rendezvous import Begin, Join, RankRefused, RankRendezvous, common_settings_digest, engine_group
from workers.settings import GroupSettings, WorkerSettings

NOW = Nanos(1000 * SECOND)


def a_group(**fields):
    return GroupSettings(**{"nodes": 3, "leader": "leader.pods:7000", "join_timeout_ms": 60_000} | fields)


def a_worker(**fields):
    return msgspec.convert(
        {"worker_id": "w", "model": "m", "group": {"nodes": 2, "leader": "h:1"}} | fields, WorkerSettings
    )


def joining(rank, nodes=3, alike="same"):
    return Join(rank=rank, nodes=nodes, alike=alike)


def a_roll(*ranks, begun=False, **fields):
    roll = RankRendezvous(a_group(**fields), "same", NOW)
    for rank in ranks:
        assert roll.join(joining(rank)) is None
    if begun:
        roll.begin()
    roll.check()
    return roll


def test_group_is_complete_when_all_other_ranks_have_joined():
    roll = a_roll(2)
    assert (roll.complete, roll.missing) == (False, (1,))

    assert roll.join(joining(1)) is None

    assert (roll.complete, roll.missing) == (True, ())


def test_rank_may_leave_and_rejoin_while_the_group_forms():
    roll = a_roll(1)
    roll.gone(1, "has ended")

    assert roll.fault(NOW) is None
    assert roll.join(joining(1)) is None
    assert roll.join(joining(1)) is None, "its newest process counts"
    assert roll.missing == (2,)


def test_rank_lost_after_forming_ends_the_group():
    roll = a_roll(1, 2, begun=True)
    assert roll.fault(NOW) is None

    roll.gone(2, "has ended")
    roll.gone(1, "has said nothing for 15 s")

    roll.check()
    assert roll.fault(NOW) == "rank 2 of its group has ended"
    answer = roll.join(joining(2))
    assert isinstance(answer, RankRefused)
    assert answer.again, "it is one of the next group's"


def test_ranks_may_leave_after_the_orderly_end():
    roll = a_roll(1, 2, begun=True)

    roll.end()
    roll.gone(1, "has ended")

    roll.check()
    assert roll.fault(NOW) is None


def test_missing_rank_is_named_after_the_timeout():
    roll = a_roll(2)

    assert roll.fault(Nanos(NOW + 60 * SECOND - 1)) is None
    fault = roll.fault(Nanos(NOW + 60 * SECOND))
    assert fault == "of its group of 3 nodes, rank 1 did not come within 60 s"
    assert a_roll(1, 2).fault(Nanos(NOW + 60 * SECOND)) is None, "all are there"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (joining(0), "rank 0 of 3 does not belong to the 2 ranks of this leader"),
        (joining(3), "rank 3 of 3 does not belong to the 2"),
        (joining(1, nodes=4), "rank 1 of 4 does not belong to the 2"),
        (joining(1, alike="other"), "rank 1 has other settings than its leader"),
    ],
)
def test_rank_of_another_group_is_refused_for_good(asked, said):
    roll = a_roll()

    refused = roll.join(asked)

    assert isinstance(refused, RankRefused)
    assert said in refused.why
    assert not refused.again
    assert roll.missing == (1, 2)


def test_only_common_settings_change_the_digest():
    leader = common_settings_digest(a_worker())
    own = {
        "worker_id": "other",
        "listen": "0.0.0.0:1",
        "advertise": "10.0.0.2:1",
        "control_listen": "0.0.0.0:2",
        "control_credentials": {"insecure": True},
        "group": {"nodes": 2, "rank": 1, "leader": "other:1", "listen": "0.0.0.0:3"},
        "simulated": {"direct_listen": "10.0.0.2:3"},
    }

    assert common_settings_digest(a_worker(**own)) == leader
    for other in ({"max_model_len": 5}, {"vllm": {"extra_args": {"tensor_parallel_size": 2}}}, {"generation": "b"}):
        assert common_settings_digest(a_worker(**own, **other)) != leader


@pytest.mark.parametrize(("address", "leader"), [("10.0.0.1", "10.0.0.1:7000"), ("fd00::1", "[fd00::1]:7000")])
def test_engine_gets_the_leaders_ip_address(address, leader):
    group = engine_group(a_group(rank=1), Begin(address=address, ports=(5, 6)))

    assert (group.leader, group.engine_ports, group.rank) == (leader, (5, 6), 1)
