"""Elastic pools: simulated pools that start and drain replicas until they have the wanted number.

Rules:

1. A replica occupies its GPUs from the beginning of its start to the end of its drain.
2. A pool that shrinks first cancels replicas that are starting, the newest first. Then it drains the replicas whose
   caches have the lowest values. The value of a cache is the time to compute again those of its blocks that no other
   worker caches. Among equal values, the replica with the fewest requests drains first.
3. A drain cannot be undone. If a replica still has requests after `drain_limit`, it ends anyway, and other workers
   continue these requests.
4. A new replica waits until there are GPUs for it. If several pools wait, they get GPUs in the order of their names.
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
    """Settings of an elastic pool: its profile, the variation of its start durations, and the time limit of a drain."""

    profile: PoolProfile
    """Profile of the pool's workers. `workers` is the number of replicas at the beginning; `start_time` is the mean duration of a start."""

    start_spread: float = 0.0
    """Variation of start durations, as a share of the mean: with 0.2, each is drawn uniformly from 0.8 to 1.2 times the mean."""

    drain_limit: Nanos
    """Maximum duration of a drain. After this time the replica ends, even if it still has requests."""


class PoolState(Struct, frozen=True, kw_only=True):
    """Numbers of replicas of one pool. They are valid from the instant `at` until the instant `at` of the pool's next state."""

    at: Nanos
    wanted: int
    starting: int
    ready: int
    draining: int

    @property
    def held(self) -> int:
        """Number of replicas that occupy GPUs: starting, ready and draining ones."""
        return self.starting + self.ready + self.draining


class _Replicas:
    """The replicas of one pool, grouped into starting, serving and draining ones."""

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
    """Starts and drains workers so that each pool reaches its wanted number of replicas. The first workers must be up already."""

    def __init__(
        self,
        kernel: Kernel,
        cluster: SimulatedCluster,
        pools: Sequence[ElasticPool],
        *,
        random: Random,
        gpus: int | None = None,
    ) -> None:
        """Begin with the workers that the profiles state; `gpus` limits the GPUs of all pools together (None: no limit)."""
        self._kernel, self._cluster, self._random, self._gpus = kernel, cluster, random, gpus
        self._pools = {pool.profile.name: _Replicas(pool) for pool in sorted(pools, key=lambda each: each.profile.name)}
        cluster.left = self._left
        for name in self._pools:
            self._note(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def resize(self, name: str, replicas: int) -> None:
        """Set the wanted number of replicas of a pool. Surplus workers stop or drain now; missing ones start as soon as GPUs are free."""
        assert replicas >= 0, replicas
        self._pools[name].wanted = replicas
        self._work()

    def state(self, name: str) -> PoolState:
        """Return the present state of a pool."""
        return self._pools[name].history[-1]

    def lacks_room(self, name: str) -> bool:
        """Return True if a pool has fewer replicas than it wants, because the missing ones wait for free GPUs."""
        pool = self._pools[name]
        return len(pool.starting) + len(pool.up) < pool.wanted

    def history(self, name: str) -> Sequence[PoolState]:
        """Return all states of a pool since the beginning, in the order of time."""
        return self._pools[name].history

    def pool_of(self, worker_id: WorkerId) -> str | None:
        """Return the name of a worker's pool; None if the worker is not a serving replica, because it starts, drains or has left."""
        return next((name for name, pool in self._pools.items() if worker_id in pool.up), None)

    def gpu_seconds(self, name: str, begin: Nanos, end: Nanos) -> float:
        """Return the GPU-seconds that a pool occupied between two instants."""
        pool = self._pools[name]
        ends = [*(state.at for state in pool.history[1:]), end]
        held = 0
        for state, until in zip(pool.history, ends, strict=True):
            held += state.held * max(0, min(until, end) - max(state.at, begin))
        return held * pool.pool.profile.gpus / SECOND

    def check(self) -> None:
        """Assert that all draining replicas are up and drain in the cluster, and that the limit on GPUs is kept."""
        for pool in self._pools.values():
            for worker_id in pool.draining:
                worker = self._cluster.get(worker_id)
                assert worker is not None, worker_id
                assert worker.leaves, worker_id
        assert self._gpus is None or self._held_gpus() <= self._gpus, self._held_gpus()

    def _held_gpus(self) -> int:
        return sum(pool.held * pool.pool.profile.gpus for pool in self._pools.values())

    def _work(self) -> None:
        """Bring each pool nearer to its wanted number: cancel or drain surplus replicas, and start missing ones while GPUs are free."""
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
                # Start replicas only in the next event, because the cluster calls this function while it removes a worker.
                self._kernel.after(0, self._work)
                return

    def _note(self, name: str) -> None:
        """Record the present state of a pool in its history, if the state has changed. Replace an earlier state of the same instant."""
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
    """Return the value of the cache of each worker in `among`, in seconds.

    The value is the time that it takes to compute again those blocks of the worker that no other worker in `workers` caches.
    """
    copies = Counter(name for worker in workers for name in worker.engine.names())
    values = {}
    for worker in among:
        limits, times = worker.profile.limits, worker.profile.times
        alone = sum(copies[name] == 1 for name in worker.engine.names())
        step = limits.step_tokens
        values[worker.id] = alone * limits.block_tokens / step * times.seconds(step, 0.5 * step * step, 0, 0)
    return values
