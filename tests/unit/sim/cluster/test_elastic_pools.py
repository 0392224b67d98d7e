"""Pools of a simulated cluster that grow, start up, drain and shrink."""

from functools import partial
from random import Random

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.sim.cluster.elastic_pools import ElasticPool, ElasticPools
from fleet.sim.cluster.faults import WorkerLost
from fleet.sim.kernel import Kernel
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan, a_pool, a_world

START = 2  # seconds


class Elastic:
    """A simulated cluster with one elastic pool, and requests that arrive at different instants."""

    def __init__(
        self, workers: int = 2, *, drain: float = 60.0, spread: float = 0.0, gpus: int | None = None, **limits
    ):
        profile = a_pool(workers=workers, **limits)
        self.kernel = Kernel(1)
        self.world, self.ended = a_world(self.kernel, a_plan(profile))
        pool = ElasticPool(profile=profile, start_spread=spread, drain_limit=Nanos(round(drain * SECOND)))
        self.pools = ElasticPools(self.kernel, self.world.cluster, [pool], random=Random(1), gpus=gpus)

    def run(self, seconds: float) -> None:
        until = Nanos(round(seconds * SECOND))
        self.kernel.run(until)
        self.kernel.skip(until)
        self.pools.check()

    def send(self, at: float, output: int = 40, name: int = 0, prompt: int = 64) -> None:
        arrival = Nanos(round(at * SECOND))
        request = TraceRequest(arrival, prompt, tuple(1000 * name + place for place in range(prompt // BLOCK)), output)
        self.kernel.at(arrival, partial(self.world.send, request))

    def counts(self) -> tuple[int, int, int, int]:
        state = self.pools.state("both")
        return state.wanted, state.starting, state.ready, state.draining

    @property
    def up(self) -> list[str]:
        return [worker.id for worker in self.world.cluster]


def test_new_replicas_serve_after_their_start():
    elastic = Elastic(workers=1)

    elastic.pools.resize("both", 3)

    assert elastic.counts() == (3, 2, 1, 0)
    elastic.run(START - 0.01)
    assert elastic.up == ["both-0"]
    elastic.run(START + 0.01)
    assert elastic.counts() == (3, 0, 3, 0)
    for number in range(30):
        elastic.send(START + 0.02 + number * 1e-4, name=number)
    elastic.kernel.run()
    assert len(elastic.ended) == 30
    assert all(worker.engine.generated_tokens for worker in elastic.world.cluster), "all replicas got requests"
    elastic.world.check()


def test_start_times_are_drawn_within_the_spread():
    elastic = Elastic(workers=0, spread=0.5)

    elastic.pools.resize("both", 40)
    elastic.kernel.run()

    joined = [state.at / SECOND for state in elastic.pools.history("both") if state.ready]
    assert len(set(joined)) == 40
    assert START * 0.5 <= min(joined) < START * 0.7
    assert START * 1.3 < max(joined) <= START * 1.5 + 0.01


def test_drained_replica_finishes_its_streams_and_leaves():
    elastic = Elastic(workers=2)
    for number in range(8):
        elastic.send(0.01 + number * 1e-4, output=400, name=number)
    elastic.run(0.5)

    elastic.pools.resize("both", 1)

    assert elastic.counts() == (1, 0, 1, 1)
    [drained] = [worker for worker in elastic.world.cluster if worker.leaves]
    held = drained.engine.held
    assert held
    for number in range(8, 16):
        elastic.send(0.6 + number * 1e-4, output=10, name=number)
    elastic.run(0.7)
    assert drained.engine.held <= held, "it takes no new request"
    elastic.kernel.run()
    assert elastic.counts() == (1, 0, 1, 0)
    assert len(elastic.ended) == 16
    assert not [each for each in elastic.ended if each.refused]
    assert elastic.world.machine.snapshot().counters.retried == 0, "no stream was moved"
    elastic.world.check()


def test_drain_ends_at_its_limit_and_requests_go_on_elsewhere():
    elastic = Elastic(workers=2, drain=1.0)
    for number in range(4):
        elastic.send(0.01 + number * 1e-4, output=2000, name=number)
    elastic.run(0.5)

    elastic.pools.resize("both", 1)
    elastic.run(1.6)

    assert elastic.counts() == (1, 0, 1, 0)
    elastic.kernel.run()
    assert {each.output_tokens for each in elastic.ended} == {2000}
    assert elastic.world.machine.snapshot().counters.retried > 0
    elastic.world.check()


def test_shrinking_cancels_starting_replicas_first():
    elastic = Elastic(workers=2)
    elastic.pools.resize("both", 5)
    elastic.run(1.0)

    elastic.pools.resize("both", 2)

    assert elastic.counts() == (2, 0, 2, 0)
    elastic.kernel.run()
    assert elastic.up == ["both-0", "both-1"]
    assert elastic.pools.gpu_seconds("both", Nanos(0), Nanos(10 * SECOND)) == pytest.approx(2 * 10 + 3 * 1.0)


def test_worker_whose_cache_is_worth_least_drains():
    elastic = Elastic(workers=3)
    engines = {worker.id: worker.engine for worker in elastic.world.cluster}
    elastic.send(0.1, name=1, prompt=320)
    elastic.run(1.0)
    [first] = [name for name, engine in engines.items() if engine.names()]
    elastic.send(1.1, name=2, prompt=160)
    elastic.run(2.0)
    held = {name: len(engine.names()) for name, engine in engines.items()}
    assert sorted(held.values()) == [0, 10, 20], "the requests went to two workers"

    elastic.pools.resize("both", 1)

    assert elastic.up == [first]


def test_replicas_wait_for_gpus_until_a_drain_ends():
    elastic = Elastic(workers=2, gpus=2)
    for number in range(4):
        elastic.send(0.01 + number * 1e-4, output=400, name=number)
    elastic.run(0.5)

    elastic.pools.resize("both", 1)
    elastic.pools.resize("both", 2)

    assert elastic.counts() == (2, 0, 1, 1)
    assert elastic.pools.lacks_room("both")
    elastic.kernel.run()
    assert elastic.counts() == (2, 0, 2, 0)
    assert max(state.held for state in elastic.pools.history("both")) == 2


def test_draining_worker_that_dies_has_no_successor():
    elastic = Elastic(workers=2)
    for number in range(4):
        elastic.send(0.01 + number * 1e-4, output=400, name=number)
    elastic.run(0.5)
    elastic.pools.resize("both", 1)
    [drained] = [worker.id for worker in elastic.world.cluster if worker.leaves]

    elastic.world.fail(WorkerLost(at=Nanos(SECOND * 6 // 10), worker=WorkerId(drained), down=Nanos(0)))
    elastic.kernel.run()

    assert elastic.counts() == (1, 0, 1, 0)
    assert drained not in elastic.up
    assert len(elastic.ended) == 4
    elastic.world.check()


def test_prefill_worker_keeps_blocks_of_handoffs_while_it_drains():
    profiles = [structs.replace(a_pool(role, workers=2), bandwidth=1e5) for role in (Role.PREFILL, Role.DECODE)]
    kernel = Kernel(1)
    world, ended = a_world(kernel, a_plan(*profiles, remote_prefill_min_tokens=1))
    limit = Nanos(60 * SECOND)
    pools = ElasticPools(
        kernel,
        world.cluster,
        [ElasticPool(profile=profile, drain_limit=limit) for profile in profiles],
        random=Random(1),
    )
    for number in range(6):
        request = TraceRequest(Nanos(0), 160, tuple(1000 * number + place for place in range(10)), 20)
        kernel.at(number + 1, partial(world.send, request))
    kernel.run(Nanos(SECOND // 10))

    pools.resize("prefill", 1)

    assert pools.state("prefill").draining == 1
    kernel.run()
    assert pools.state("prefill").held == 1
    assert world.machine.snapshot().counters.disaggregated == len(ended) == 6
    world.check()
