"""The workers that a router knows: what they are, what is booked on them, what they hold."""

from collections.abc import Iterable, Iterator

from fleet.ids import ModelName, StoreId, WorkerId
from fleet.requests import ModelCard
from fleet.roles import KvPath, Role
from fleet.router.bookings import WorkerBookings
from fleet.router.index import Holder, PrefixIndex, engine_cache, keys_of, store_namespace
from fleet.router.live import LiveRequest
from fleet.router.messages import StoreChanged
from fleet.router.placement import Standing, limit
from fleet.router.settings import RouterSettings
from fleet.router.snapshot import PoolSnapshot, StoreSnapshot, WorkerSnapshot
from fleet.work import Description, KvCleared, KvEvent, KvRemoved, KvStored, Load
from kvstore.messages import POOL_TIER


class KnownWorker:
    """One incarnation of a worker."""

    def __init__(self, description: Description, address: str, request_limit: int):
        self.description = description
        self.address = address
        self.request_limit = request_limit
        self.draining = False
        self.load = Load(running=0, waiting=0, kv_blocks_used=0)
        self.bookings = WorkerBookings(description.block_tokens)

    @property
    def decodes(self) -> bool:
        return self.description.role is not Role.PREFILL

    def snapshot(self, cached_blocks: int) -> WorkerSnapshot:
        return WorkerSnapshot(
            worker_id=self.description.worker_id,
            state="draining" if self.draining else "serving",
            engine=self.description.engine,
            address=self.address,
            running=self.load.running,
            waiting=self.load.waiting,
            kv_blocks_used=self.load.kv_blocks_used,
            kv_blocks=self.description.kv_blocks,
            cached_blocks=cached_blocks,
            booked_requests=len(self.bookings),
            booked_blocks=self.bookings.blocks,
            booked_prefill_tokens=self.bookings.prefill_tokens,
        )


class Roster:
    """All known workers and stores. Order is that of joining, everywhere, so that histories replay."""

    def __init__(self, settings: RouterSettings):
        self._settings = settings
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._by_model: dict[ModelName, dict[WorkerId, KnownWorker]] = {}
        self._stores: dict[tuple[StoreId, str], list[str]] = {}  # tiers of a namespace that hold something
        self.index = PrefixIndex()

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(self._workers.values())

    def get(self, worker_id: WorkerId) -> KnownWorker | None:
        return self._workers.get(worker_id)

    def __getitem__(self, worker_id: WorkerId) -> KnownWorker:
        return self._workers[worker_id]

    def serving(self, model: ModelName) -> list[KnownWorker]:
        return list(self._by_model.get(model, {}).values())

    def join(self, description: Description, address: str) -> None:
        worker_id = description.worker_id
        assert worker_id not in self._workers, worker_id
        worker = KnownWorker(description, address, limit(description, self._settings))
        self._workers[worker_id] = worker
        self._by_model.setdefault(description.model, {})[worker_id] = worker
        self.index.add(engine_cache(worker_id), capacity=description.kv_blocks)

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a worker, with its bookings and blocks."""
        model = self._workers.pop(worker_id).description.model
        del self._by_model[model][worker_id]
        if not self._by_model[model]:
            del self._by_model[model]
        self.index.remove(engine_cache(worker_id))

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

    def store_changed(self, event: StoreChanged) -> None:
        name = (event.store_id, event.fingerprint)
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
        usable = [worker for worker in self.serving(model) if worker.decodes and not worker.draining]
        return not usable or any(len(worker.bookings) < worker.request_limit for worker in usable)

    def standings(self, live: LiveRequest) -> list[Standing]:
        """All workers of a request's model, as they stand for it."""
        prompt_tokens = live.prompt_tokens
        overlaps: dict[int, dict[Holder, int]] = {}
        standings = []
        for worker in self._by_model.get(live.arrived.model, {}).values():
            description, bookings = worker.description, worker.bookings
            keys = live.keys(description.block_tokens)
            if (leading := overlaps.get(description.block_tokens)) is None:
                leading = overlaps[description.block_tokens] = self.index.longest(keys)
            engine = leading.get(engine_cache(description.worker_id), 0)
            stored = below = 0
            if description.store_id is not None and KvPath.STORE in description.kv_paths:
                namespace = (description.store_id, description.fingerprint)
                for tier in self._stores.get(namespace, ()):
                    blocks = leading.get(store_namespace(*namespace, tier), 0)
                    stored, below = (blocks, below) if tier == POOL_TIER else (stored, max(below, blocks))
            standings.append(
                Standing(
                    description=description,
                    draining=worker.draining,
                    failed=(description.worker_id, description.incarnation) in live.failed_on,
                    backlog_tokens=bookings.prefill_tokens,
                    active_blocks=bookings.blocks,
                    new_blocks=bookings.additional_blocks(keys, prompt_tokens),
                    requests=len(bookings),
                    engine_blocks=engine,
                    store_blocks=max(0, stored - engine),
                    below_blocks=max(0, below - max(engine, stored)),
                )
            )
        return standings

    # Views.

    def cards(self) -> tuple[ModelCard, ...]:
        """Models that some worker takes requests for; the longest of its workers says how long a request may be."""
        cards = []
        for model, workers in self._by_model.items():
            answering = [worker.description for worker in workers.values() if worker.decodes and not worker.draining]
            if not answering:
                continue
            longest = max(answering, key=lambda description: description.max_model_len)
            cards.append(
                ModelCard(
                    name=model,
                    max_model_len=longest.max_model_len,
                    block_tokens=longest.block_tokens,
                    workers=len(workers),
                )
            )
        return tuple(cards)

    def pools(self) -> tuple[PoolSnapshot, ...]:
        pools: dict[tuple[ModelName, Role], list[WorkerSnapshot]] = {}
        for worker in self:
            pool = (worker.description.model, worker.description.role)
            cached = self.index.held_by(engine_cache(worker.description.worker_id))
            pools.setdefault(pool, []).append(worker.snapshot(cached))
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
