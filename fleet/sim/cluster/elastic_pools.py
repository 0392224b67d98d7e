"""Elastic pools: simulated pools that grow, start up, drain and shrink to the number of replicas that is wanted.

Rules:

1. A replica holds its GPUs from the moment at which it is started until it has left, so also while it starts and drains.
2. A pool that shrinks first cancels the replicas that start, the newest first. Then it drains those whose cache is worth least: the
   seconds that it would take to compute the blocks again that no other worker holds. Among equals, the one with the fewest requests
   drains.
3. A drain is not interrupted. A replica that has not finished at the limit of its drain ends, and its requests continue elsewhere.
4. Replicas wait while there are no GPUs for them, pools in the order of their names.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.sim.cluster.pools import PoolProfile, worker_id_of
from fleet.sim.cluster.simulated_cluster import SimulatedCluster
from fleet.sim.cluster.worker import SimulatedWorker
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel


class ElasticPool(Struct, frozen=True, kw_only=True):
    """A pool and the limits of its changes."""

    profile: PoolProfile
    """Profile of its workers; `workers` is the number at the start, and `start_time` the mean duration of a start."""

    start_spread: float = 0.0
    """Starts are evenly distributed up to this share of the mean below and above it."""

    drain_limit: Nanos
    """Longest drain."""


class PoolState(Struct, frozen=True, kw_only=True):
    """Replicas of one pool from one instant on."""

    at: Nanos
    wanted: int
    starting: int
    ready: int
    draining: int

    @property
    def held(self) -> int:
        """Replicas that hold GPUs."""
        return self.starting + self.ready + self.draining


class _Replicas:
    """Replicas of one pool, by what they do."""

    def __init__(self, pool: ElasticPool) -> None:
        profile = pool.profile
        self.pool = pool
        self.wanted = self.numbered = profile.workers
        self.starting: dict[WorkerId, ScheduledEvent] = {}
        self.up = dict.fromkeys(worker_id_of(profile, number) for number in range(profile.workers))
        self.draining: dict[WorkerId, ScheduledEvent] = {}
        self.history: list[PoolState] = []

    @property
    def held(self) -> int:
        return len(self.starting) + len(self.up) + len(self.draining)


class ElasticPools:
    """All pools of a simulated cluster, whose first workers are there already."""

    def __init__(
        self,
        kernel: Kernel,
        cluster: SimulatedCluster,
        pools: Sequence[ElasticPool],
        *,
        random: Random,
        gpus: int | None = None,
    ) -> None:
        """Begin with the workers that the profiles state; `gpus` limits the GPUs of all pools together."""
        self._kernel, self._cluster, self._random, self._gpus = kernel, cluster, random, gpus
        self._pools = {pool.profile.name: _Replicas(pool) for pool in sorted(pools, key=lambda each: each.profile.name)}
        cluster.left = self._left
        for name in self._pools:
            self._note(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def resize(self, name: str, replicas: int) -> None:
        """Set the wanted number of replicas of a pool, and start or drain workers to reach it."""
        assert replicas >= 0, replicas
        self._pools[name].wanted = replicas
        self._work()

    def state(self, name: str) -> PoolState:
        """Return the present state of a pool."""
        return self._pools[name].history[-1]

    def lacks_room(self, name: str) -> bool:
        """Return whether replicas of a pool wait for GPUs."""
        pool = self._pools[name]
        return len(pool.starting) + len(pool.up) < pool.wanted

    def history(self, name: str) -> Sequence[PoolState]:
        """Return the states of a pool in the order of time."""
        return self._pools[name].history

    def pool_of(self, worker_id: WorkerId) -> str | None:
        """Return the pool of a worker that serves."""
        return next((name for name, pool in self._pools.items() if worker_id in pool.up), None)

    def gpu_seconds(self, name: str, begin: Nanos, end: Nanos) -> float:
        """Return how long GPUs were held between two instants, times their number."""
        pool = self._pools[name]
        ends = [*(state.at for state in pool.history[1:]), end]
        held = 0
        for state, until in zip(pool.history, ends, strict=True):
            held += state.held * max(0, min(until, end) - max(state.at, begin))
        return held * pool.pool.profile.gpus / SECOND

    def check(self) -> None:
        """Assert that the replicas are those of the cluster, and that the limit on GPUs is kept."""
        for pool in self._pools.values():
            for worker_id in pool.draining:
                worker = self._cluster.get(worker_id)
                assert worker is not None, worker_id
                assert worker.leaves, worker_id
        assert self._gpus is None or self._held_gpus() <= self._gpus, self._held_gpus()

    def _held_gpus(self) -> int:
        return sum(pool.held * pool.pool.profile.gpus for pool in self._pools.values())

    def _work(self) -> None:
        """Start and end what can be started and ended now."""
        for name, pool in self._pools.items():
            excess = len(pool.starting) + len(pool.up) - pool.wanted
            for worker_id in list(reversed(pool.starting))[: max(0, excess)]:
                cancel(pool.starting.pop(worker_id))
                excess -= 1
            if excess > 0:
                self._drain(pool, excess)
            self._note(name)
        for name, pool in self._pools.items():
            while self.lacks_room(name) and self._has_room(pool):
                self._start(name, pool)
            self._note(name)

    def _has_room(self, pool: _Replicas) -> bool:
        return self._gpus is None or self._held_gpus() + pool.pool.profile.gpus <= self._gpus

    def _start(self, name: str, pool: _Replicas) -> None:
        profile, spread = pool.pool.profile, pool.pool.start_spread
        number, pool.numbered = pool.numbered, pool.numbered + 1
        lasts = profile.start_time
        if spread:
            lasts = Nanos(round(lasts * (1 + spread * (2 * self._random.random() - 1))))
        event = self._cluster.start(profile, number, lasts, partial(self._joined, name))
        pool.starting[worker_id_of(profile, number)] = event

    def _joined(self, name: str, worker_id: WorkerId) -> None:
        pool = self._pools[name]
        del pool.starting[worker_id]
        pool.up[worker_id] = None
        self._note(name)

    def _drain(self, pool: _Replicas, count: int) -> None:
        present = [worker for worker_id in pool.up if (worker := self._cluster.get(worker_id)) is not None]
        value = _cache_values(list(self._cluster), present)
        present.sort(key=lambda worker: (value[worker.id], worker.engine.held))
        for worker in present[:count]:
            del pool.up[worker.id]
            pool.draining[worker.id] = self._kernel.after(pool.pool.drain_limit, partial(self._cluster.end, worker.id))
            self._cluster.drain(worker.id)

    def _left(self, worker_id: WorkerId) -> None:
        for pool in self._pools.values():
            if (limit := pool.draining.pop(worker_id, None)) is not None:
                cancel(limit)
                self._kernel.after(0, self._work)  # not within the call that made it leave
                return

    def _note(self, name: str) -> None:
        """Add the present state of a pool to its history, if it is another one."""
        pool = self._pools[name]
        state = PoolState(
            at=self._kernel.instant,
            wanted=pool.wanted,
            starting=len(pool.starting),
            ready=len(pool.up),
            draining=len(pool.draining),
        )
        history = pool.history
        if history and history[-1].at == state.at:
            history[-1] = state
        elif not history or _counts(history[-1]) != _counts(state):
            history.append(state)


def _counts(state: PoolState) -> tuple[int, ...]:
    return state.wanted, state.starting, state.ready, state.draining


def _cache_values(workers: Sequence[SimulatedWorker], among: Sequence[SimulatedWorker]) -> dict[WorkerId, float]:
    """Return the seconds that it takes some workers to compute the blocks again that no other worker holds."""
    copies = Counter(name for worker in workers for name in worker.engine.names())
    values = {}
    for worker in among:
        limits, times = worker.profile.limits, worker.profile.times
        alone = sum(copies[name] == 1 for name in worker.engine.names())
        step = limits.step_tokens
        values[worker.id] = alone * limits.block_tokens / step * times.seconds(step, 0.5 * step * step, 0, 0)
    return values
