"""The workers that a router knows: what they are, what is booked on them, what they hold."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from fleet.ids import ModelName, WorkerId
from fleet.requests import ModelCard
from fleet.roles import Role
from fleet.router.index import Namespace, PrefixIndex, engine_cache, keys_of, store_namespace
from fleet.router.live import LiveRequest
from fleet.router.members import Standings, limit
from fleet.router.messages import Booked, StoreChanged
from fleet.router.pool import KnownWorker, WorkerPool
from fleet.router.settings import RouterSettings
from fleet.router.snapshot import PoolSnapshot, StoreSnapshot, WorkerSnapshot
from fleet.work import Description, KvCleared, KvEvent, KvRemoved, KvStored


class Roster:
    """All known workers and stores. Order is that of joining, everywhere, so that histories replay."""

    def __init__(self, settings: RouterSettings):
        self._settings = settings
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._pools: dict[ModelName, WorkerPool] = {}
        self._stores: dict[Namespace, list[str]] = {}  # tiers that hold something
        self._replicas: dict[str, Mapping[WorkerId, Booked]] = {}  # other routers' bookings
        self.index = PrefixIndex()
        self._nobody = WorkerPool(settings, self.index)

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(self._workers.values())

    def get(self, worker_id: WorkerId) -> KnownWorker | None:
        return self._workers.get(worker_id)

    def __getitem__(self, worker_id: WorkerId) -> KnownWorker:
        return self._workers[worker_id]

    def serving(self, model: ModelName) -> list[KnownWorker]:
        return list(self._pools.get(model, self._nobody).workers.values())

    def join(self, description: Description, address: str) -> None:
        worker_id = description.worker_id
        assert worker_id not in self._workers, worker_id
        self.index.add(engine_cache(worker_id), capacity=description.kv_blocks)
        if (pool := self._pools.get(description.model)) is None:
            pool = self._pools[description.model] = WorkerPool(self._settings, self.index)
            pool.share(list(self._replicas.values()))
        worker = KnownWorker(description, address, pool, limit(description, self._settings))
        self._workers[worker_id] = worker
        pool.join(worker)

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a worker, with its bookings and blocks."""
        model = self._workers.pop(worker_id).description.model
        pool = self._pools[model]
        pool.leave(worker_id)
        if not pool.workers:
            del self._pools[model]
        self.index.remove(engine_cache(worker_id))

    def tune(self, settings: RouterSettings) -> None:
        """Settings have changed."""
        self._settings = settings
        for pool in self._pools.values():
            pool.tune(settings)

    def drain(self, worker_id: WorkerId) -> None:
        """A worker takes no more work."""
        self._pools[self._workers[worker_id].description.model].drain(worker_id)

    def cache_changed(self, worker_id: WorkerId, events: Iterable[KvEvent]) -> None:
        holder = engine_cache(worker_id)
        for event in events:
            match event:
                case KvStored():
                    self.index.stored(holder, keys_of(event.hashes))
                case KvRemoved():
                    self.index.removed(holder, keys_of(event.hashes))
                case KvCleared():
                    self.index.cleared(holder)

    def cache_assumed(self, worker_id: WorkerId, stored: Iterable[int], removed: Collection[int]) -> None:
        holder = engine_cache(worker_id)
        if removed:  # first: it makes the room
            self.index.removed(holder, removed)
        self.index.stored(holder, stored)

    def store_changed(self, event: StoreChanged) -> None:
        name = Namespace(event.store_id, event.fingerprint)
        tiers = self._stores.setdefault(name, [])
        if event.reset:
            for tier in tiers:
                self.index.cleared(store_namespace(*name, tier))
        holder = store_namespace(*name, event.tier)
        if event.stored and event.tier not in tiers:
            self.index.add(holder, capacity=self._settings.max_store_blocks)
            tiers.append(event.tier)
        if event.tier in tiers:
            self.index.stored(holder, keys_of(event.stored))
            self.index.removed(holder, keys_of(event.removed))
        for tier in [tier for tier in tiers if not self.index.held_by(store_namespace(*name, tier))]:
            self.index.remove(store_namespace(*name, tier))
            tiers.remove(tier)
        if not tiers:
            del self._stores[name]

    def worth_trying(self, model: ModelName) -> bool:
        """Whether placing a waiting request can have any other outcome than that it waits on."""
        pool = self._pools.get(model)
        return pool is None or pool.has_room()

    def share(self, replica: str, booked: Mapping[WorkerId, Booked]) -> None:
        """What another router has booked, in place of what it had before."""
        if booked:
            self._replicas[replica] = booked
        else:
            self._replicas.pop(replica, None)
        for pool in self._pools.values():
            pool.share(list(self._replicas.values()))

    def booked(self) -> dict[WorkerId, Booked]:
        """What this router has booked, on workers where that is anything."""
        return {
            worker_id: Booked(worker.bookings.prefill_tokens, worker.bookings.blocks, len(worker.bookings))
            for worker_id, worker in self._workers.items()
            if len(worker.bookings)
        }

    def standings(self, live: LiveRequest) -> Standings:
        """All workers of a request's model, as they stand for it."""
        return self._pools.get(live.arrived.model, self._nobody).standings(live, self._stores)

    def check(self) -> None:
        """Assert that index, bookings and tables agree."""
        self.index.check()
        for worker in self:
            worker.bookings.check()
        for pool in self._pools.values():
            pool.check()

    # Views.

    def cards(self) -> tuple[ModelCard, ...]:
        """Models that some worker takes requests for; the longest of its workers says how long a request may be."""
        cards = []
        for model, pool in self._pools.items():
            answering = [
                worker.description for worker in pool.workers.values() if worker.decodes and not worker.draining
            ]
            if not answering:
                continue
            longest = max(answering, key=lambda description: description.max_model_len)
            cards.append(
                ModelCard(
                    name=model,
                    max_model_len=longest.max_model_len,
                    block_tokens=longest.block_tokens,
                    workers=len(pool.workers),
                )
            )
        return tuple(cards)

    def pools(self) -> tuple[PoolSnapshot, ...]:
        pools: dict[tuple[ModelName, Role], list[WorkerSnapshot]] = {}
        for worker in self:
            worker_id, model = worker.description.worker_id, worker.description.model
            cached = self.index.held_by(engine_cache(worker_id))
            elsewhere = self._pools[model].booked_elsewhere(worker_id)
            pools.setdefault((model, worker.description.role), []).append(worker.snapshot(cached, elsewhere))
        return tuple(
            PoolSnapshot(model=model, role=role, workers=tuple(workers)) for (model, role), workers in pools.items()
        )

    def stores(self) -> tuple[StoreSnapshot, ...]:
        return tuple(
            StoreSnapshot(
                store_id=store_id,
                fingerprint=name,
                tier=tier,
                blocks=self.index.held_by(store_namespace(store_id, name, tier)),
            )
            for (store_id, name), tiers in self._stores.items()
            for tier in tiers
        )
