"""Production servers on a virtual loop and the simulation make the same decisions, to the nanosecond."""

import gc
from random import Random

import pytest
from msgspec import structs

from fleet.app.agreement.comparison import first_difference, served, simulated
from fleet.app.agreement.production_world import keys_from_tokens, tokens_from_keys
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.recording.agentic_traces import TraceSession, TraceTurn
from fleet.sim.cluster.faults import NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.cluster.node_store import StoreProfile
from fleet.sim.cluster.store_tiers import TierProfile
from fleet.sim.workload.clients import ClosedClients, OpenClients, SessionClients
from kvstore.eviction.trace_replay import TraceRequest
from kvstore.messages import POOL_TIER
from tests.support.sim.worlds import BLOCK, a_plan, a_pool

REQUESTS = 80


def requests(count=REQUESTS, rate=20.0, seed=1):
    """Yield requests whose prompts begin with one of four prefixes, at random instants and with random lengths."""
    luck = Random(seed)
    beginnings = [tuple(luck.randrange(1 << 62) for _ in range(6 + index)) for index in range(4)]
    instant = 0
    for _ in range(count):
        instant += 1 + int(luck.expovariate(rate) * SECOND)
        rest = tuple(luck.randrange(1 << 62) for _ in range(luck.randrange(1, 25)))
        chain = luck.choice(beginnings) + rest
        tokens = len(chain) * BLOCK + luck.randrange(BLOCK)
        yield TraceRequest(Nanos(instant), tokens, chain, luck.randrange(1, 150), luck.randrange(1, 10))


def sessions(count=20, seed=2):
    """Yield conversations in which each later turn follows the answer to an earlier turn after a random pause."""
    luck = Random(seed)
    for _ in range(count):
        turns, chain = [], tuple(luck.randrange(1 << 62) for _ in range(8))
        for number in range(4):
            chain += tuple(luck.randrange(1 << 62) for _ in range(luck.randrange(1, 12)))
            request = TraceRequest(
                Nanos(0), len(chain) * BLOCK + luck.randrange(BLOCK), chain, luck.randrange(1, 100), 7
            )
            after = (number - 1,) if number != 2 else (0,)  # the second and the third turn both follow the first
            turns.append(TraceTurn(request, after if number else (), Nanos(luck.randrange(1, SECOND))))
        yield TraceSession(tuple(turns))


def seconds(at):
    return Nanos(int(at * SECOND) + 17)


def lost(worker, at):
    return WorkerLost(at=seconds(at), worker=WorkerId(worker), down=SECOND)


def node_lost(node, at):
    return NodeLost(at=seconds(at), node=StoreId(node), down=SECOND)


def cut(worker, at, lasting):
    return NetworkCut(at=seconds(at), worker=WorkerId(worker), lasting=seconds(lasting))


def flip(worker, at, role):
    return RoleFlip(at=seconds(at), worker=WorkerId(worker), role=role)


def pairs(*faults):
    return a_plan(a_pool(Role.PREFILL, 2), a_pool(Role.DECODE, 2), remote_prefill_min_tokens=200, faults=faults)


def three(*faults, **limits):
    return a_plan(a_pool(workers=3, **limits), faults=faults)


STORE = StoreProfile(
    tiers=(
        TierProfile(name=POOL_TIER, blocks=300),
        TierProfile(name="ssd", blocks=2000, read_bandwidth=3e9, write_bandwidth=2e9, latency=Nanos(100_003)),
    ),
    block_bytes=16_000.0,
    block_tokens=BLOCK,
)
PLANS = {
    "one pool": three(),
    "prefill and decode": pairs(),
    "a worker dies": three(lost("both-1", 3.0)),
    "workers of a pair die": pairs(lost("decode-1", 3.0), lost("prefill-0", 4.0)),
    "a queue and refusals": a_plan(a_pool(workers=2, max_running=1, kv_blocks=120), max_queued=3, oversubscribe=1.0),
    "users who wait": structs.replace(three(), clients=ClosedClients(users=7, think_seconds=0.0137, ramp_seconds=0.5)),
    "deadlines": structs.replace(
        a_plan(a_pool(workers=2, max_running=2)),
        clients=OpenClients(deadline_seconds=0.2, retries=1, retry_seconds=0.3),
    ),
    "a slow worker": three(WorkerSlow(at=seconds(2.0), worker=WorkerId("both-0"), factor=3.0, lasting=SECOND)),
    "a worker changes its role": pairs(RoleFlip(at=seconds(2.0), worker=WorkerId("prefill-0"), role=Role.DECODE)),
    "a busy worker changes its role": pairs(flip("decode-1", 1.13, Role.PREFILL)),
    "a worker changes its role and back while it drains, and once more": pairs(
        flip("decode-0", 2.278, Role.PREFILL),
        flip("decode-0", 2.291, Role.DECODE),
        flip("decode-0", 2.342, Role.PREFILL),
    ),
    "a short cut of the network": three(cut("both-1", 2.0, lasting=1.7)),
    "cuts of both kinds of workers": pairs(cut("decode-0", 2.0, lasting=1.1), cut("prefill-1", 2.5, lasting=0.9)),
    "a worker dies while it is cut off": three(cut("both-1", 2.0, lasting=2.3), lost("both-1", 2.4)),
    "a node dies": a_plan(structs.replace(a_pool(workers=3), gpus_per_node=1), faults=(node_lost("both-node-1", 3.0),)),
    "a node dies with its store": structs.replace(
        a_plan(
            structs.replace(a_pool(Role.PREFILL, 2), gpus_per_node=1),
            structs.replace(a_pool(Role.DECODE, 2), gpus_per_node=1),
            remote_prefill_min_tokens=200,
            faults=(node_lost("decode-node-1", 2.0), node_lost("prefill-node-0", 3.5)),
        ),
        store=STORE,
    ),
    "conversations": structs.replace(three(), clients=SessionClients(users=6)),
    "conversations and a store": structs.replace(pairs(), clients=SessionClients(users=6), store=STORE),
    "a store that dies": structs.replace(
        pairs(StoreLost(at=seconds(2.0), node="prefill-node-0", down=SECOND), lost("decode-1", 3.0)), store=STORE
    ),
}


MORE = {"a queue and refusals": ("refuse",), "deadlines": ("refuse", "cancel")}
"""For some cases, verbs that their decision log has in addition to those of every log."""


@pytest.mark.parametrize("name", PLANS)
def test_production_and_simulation_decide_the_same(name):
    plan = PLANS[name]

    offered = sessions if isinstance(plan.clients, SessionClients) else requests

    there, here = served(plan, offered()), simulated(plan, offered())

    difference = first_difference(there.lines, here.lines)
    assert difference is None, (there.lines[difference : difference + 3], here.lines[difference : difference + 3])
    assert there.ended == here.ended
    assert len(here.ended) == REQUESTS
    verbs = {"place", "book", "send", "complete", *MORE.get(name, ())}
    assert {line.split()[1] for line in here.lines} == verbs


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        pytest.param(2, [flip("decode-0", 1.7095886759043317, Role.BOTH)], id="work that is on its way is rejected"),
        pytest.param(55, [flip("decode-0", 2.981824803545701, Role.PREFILL)], id="an idle worker leaves at once"),
        pytest.param(
            34,
            [flip("decode-1", 2.547285523171508, Role.PREFILL), flip("decode-1", 2.5583492103777115, Role.DECODE)],
            id="a request arrives before it has joined again",
        ),
    ],
)
def test_requests_during_a_role_change_are_decided_alike(seed, faults):
    plan = pairs(*faults)

    there, here = served(plan, requests(seed=seed)), simulated(plan, requests(seed=seed))

    difference = first_difference(there.lines, here.lines)
    assert difference is None, (there.lines[difference : difference + 3], here.lines[difference : difference + 3])


def test_decision_log_has_costs_reservations_and_handoffs():
    lines = [line.partition(" ")[2] for line in simulated(PLANS["prefill and decode"], requests(40)).lines]
    pair = next(line for line in lines if " with prefill-" in line and "/6" in line)
    assert " prompt_long_uncached, compute " in pair
    assert pair.count("=") == 4  # cost and hits of the prefill and of the decode candidates
    work = next(line for line in lines if line.startswith("send ") and ", of which " in line)
    assert " from prefill-" in work
    assert any(line.startswith("book decode-") and "1 requests" in line for line in lines)
    assert any(line.startswith("book prefill-") and line.endswith(": nothing") for line in lines)


def test_delay_of_a_nanosecond_shows_in_the_log():
    plan = three()
    later = structs.replace(plan, message_delay=Nanos(plan.message_delay + 1))
    some = simulated(plan, requests(10)).lines
    assert first_difference(some, simulated(later, requests(10)).lines) is not None
    assert first_difference(some, some[:-1]) == len(some) - 1


def test_prompts_match_their_block_keys_and_contain_answers():
    keys = (0, 1, (1 << 64) - 2, 12345)
    tokens = tokens_from_keys(keys, BLOCK, 4 * BLOCK + 5)
    assert len(tokens) == 4 * (4 * BLOCK + 5)
    assert keys_from_tokens(tokens, BLOCK, b"") == keys
    assert keys_from_tokens(tokens + bytes(4 * 40), BLOCK, b"") == keys
    assert keys_from_tokens(tokens_from_keys((), BLOCK, 3), BLOCK, b"") == ()


def test_aborted_run_leaves_no_pending_tasks():
    def interrupted():
        yield from requests(20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served(pairs(), interrupted())
    gc.collect()  # warnings about pending tasks and coroutines fail the test
