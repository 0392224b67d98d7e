"""Worker registry: all workers and stores that a router knows, with reservations and cache contents."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import ModelName, RequestId, StoreId, WorkerId
from fleet.core.requests import IMAGES, AnswerParsers, ModelCard
from fleet.core.roles import KvPath, Role
from fleet.core.work import KvCleared, KvEvent, KvRemoved, KvStored, WorkerDescription
from fleet.router.kv_index.peer_prompts import (
    MAX_ANNOUNCED_PROMPTS,
    MAX_SENT_PROMPTS,
    PlacedPrompt,
    PromptAnnouncements,
)
from fleet.router.kv_index.prefix_index import (
    CacheComparison,
    Knowledge,
    PrefixIndex,
    StoreNamespace,
    engine_cache_holder,
    keys_of,
    store_tier_holder,
)
from fleet.router.messages import ReservationTotals, StoreChanged
from fleet.router.placement.candidate_table import CandidateTable, WorkerSizes, max_requests
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.lora import listed_loras
from fleet.router.state.snapshot import PoolSnapshot, StoreSnapshot, WorkerSnapshot
from fleet.router.state.worker_table import RegisteredWorker, WorkerTable

UNKNOWN_PACE = 1e-6
"""Seconds per prompt token that `cache_seconds` assumes for a worker if no prefill of its model was measured. So the results still order
the workers by the sizes of their caches."""


class WorkerRegistry:
    """Keeps all known workers and stores in the order in which they joined, so that a replay gives the same decisions."""

    def __init__(self, settings: RouterSettings):
        self._settings = settings
        self.workers: dict[WorkerId, RegisteredWorker] = {}  # other objects read this dict, but must not change it
        self.tables: dict[ModelName, WorkerTable] = {}
        self._stores: dict[StoreNamespace, list[str]] = {}  # for each store namespace, the tiers known to hold blocks
        # the reservations of each peer router, by worker
        self._by_peer: dict[str, Mapping[WorkerId, ReservationTotals]] = {}
        self._cards: tuple[ModelCard, ...] | None = (
            # The cards are kept, because each request needs them. None: they are computed again, because workers have changed.
            None
        )
        self.index = PrefixIndex()
        self.prompts = PromptAnnouncements()  # collects the prompts to announce to peer routers
        self._announced_prompts = self.prompts if settings.replicas_listen else None
        # For each peer router, the worker of each announced prompt by the prompt's number.
        self._peer_prompts: dict[str, dict[int, WorkerId]] = {}
        # prompts that peers have sent to workers that this router does not know yet, each with the instant at which it was sent
        self._early_prompts: deque[tuple[PlacedPrompt, Nanos]] = deque(maxlen=MAX_SENT_PROMPTS)
        self._no_workers = WorkerTable(settings, self.index)
        self.get = self.workers.get
        """Return the worker with this id; None if it is unknown or has left."""

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self.workers.values())

    def __getitem__(self, worker_id: WorkerId) -> RegisteredWorker:
        return self.workers[worker_id]

    def serving(self, model: ModelName) -> list[RegisteredWorker]:
        return list(self.tables.get(model, self._no_workers).workers.values())

    def join(
        self,
        description: WorkerDescription,
        address: str,
        knowledge: Knowledge = Knowledge.EXACT,
        assumed_for: Nanos | None = None,
    ) -> None:
        worker_id = description.worker_id
        assert worker_id not in self.workers, worker_id
        self.index.add(engine_cache_holder(worker_id), capacity=description.kv_blocks)
        if (pool := self.tables.get(description.model)) is None:
            pool = self.tables[description.model] = WorkerTable(self._settings, self.index, self._announced_prompts)
            pool.set_peer_reservations(list(self._by_peer.values()))
        worker = RegisteredWorker(
            description, address, pool, max_requests(description, self._settings), knowledge, assumed_for
        )
        self.workers[worker_id] = worker
        pool.join(worker)
        self._cards = None

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a worker, together with its reservations and blocks."""
        model = self.workers.pop(worker_id).description.model
        self._cards = None
        pool = self.tables[model]
        pool.leave(worker_id)
        if not pool.workers:
            del self.tables[model]
        self.index.remove(engine_cache_holder(worker_id))

    def tune(self, settings: RouterSettings) -> None:
        """Apply changed settings to all workers, such as the limit of requests on each worker."""
        self._settings = settings
        for pool in self.tables.values():
            pool.tune(settings)

    def reserve(self, live: LiveRequest, worker_id: WorkerId, prefill_tokens: int, now: Nanos) -> RegisteredWorker:
        """Reserve capacity for a request on a worker that has to compute `prefill_tokens` tokens of the prompt. Return the worker."""
        worker = self.workers[worker_id]
        keys = live.keys(worker.description.block_tokens)
        expected = live.arrived.expected_tokens
        if expected:
            expected = max(0, expected - len(live.sent))
        worker.reservations.reserve(live.id, keys, live.prompt_tokens, prefill_tokens, now, expected_tokens=expected)
        if not (live.arrived.external or live.arrived.only_end):
            worker.first_tokens.reserved(live.id, worker.requests, worker.reservations.blocks, now)
        if live.arrived.adapter is not None:
            worker.reserve_adapter(live.arrived.adapter.name)
        live.reserved_on.append(worker_id)
        return worker

    def release(self, live: LiveRequest, worker_id: WorkerId, now: Nanos) -> None:
        """Release the capacity that a request has reserved on a worker."""
        worker = self.workers[worker_id]
        worker.reservations.release(live.id)
        worker.first_tokens.released(live.id, worker.requests, worker.reservations.blocks, now)
        if live.arrived.adapter is not None:
            worker.release_adapter(live.arrived.adapter.name)
        live.reserved_on.remove(worker_id)

    def drain(self, worker_id: WorkerId) -> None:
        """Record that a worker drains, so that it gets no new requests."""
        self._cards = None
        self.tables[self.workers[worker_id].description.model].drain(worker_id)

    def paths_changed(self, worker_id: WorkerId, kv_paths: tuple[KvPath, ...], store_id: StoreId | None) -> None:
        """Record that the KV paths or the store of a worker have changed to these values."""
        worker = self.workers[worker_id]
        worker.description = structs.replace(worker.description, kv_paths=kv_paths, store_id=store_id)
        self.tables[worker.description.model].describe()

    def resume(self, worker_id: WorkerId) -> None:
        """Record that a worker no longer drains, so that it gets requests again."""
        self._cards = None
        self.tables[self.workers[worker_id].description.model].resume(worker_id)

    def cache_changed(self, worker_id: WorkerId, events: Iterable[KvEvent]) -> None:
        holder = engine_cache_holder(worker_id)
        for event in events:
            match event:
                case KvStored():
                    self.index.stored(holder, keys_of(event.hashes))
                case KvRemoved():
                    self.index.removed(holder, keys_of(event.hashes))
                case KvCleared():
                    self.index.cleared(holder)

    def cache_assumed(self, worker_id: WorkerId, stored: Iterable[int], removed: Collection[int]) -> None:
        holder = engine_cache_holder(worker_id)
        if removed:  # removals come first, because they make room for the additions
            self.index.removed(holder, removed)
        self.index.stored(holder, stored)

    def store_changed(self, event: StoreChanged) -> None:
        name = StoreNamespace(event.store_id, event.fingerprint)
        tiers = self._stores.setdefault(name, [])
        if event.reset:
            for tier in tiers:
                self.index.cleared(store_tier_holder(*name, tier))
        holder = store_tier_holder(*name, event.tier)
        if event.stored and event.tier not in tiers:
            self.index.add(holder, capacity=self._settings.max_store_blocks)
            tiers.append(event.tier)
        if event.tier in tiers:
            self.index.stored(holder, keys_of(event.stored))
            self.index.removed(holder, keys_of(event.removed))
        for tier in [tier for tier in tiers if not self.index.held_by(store_tier_holder(*name, tier))]:
            self.index.remove(store_tier_holder(*name, tier))
            tiers.remove(tier)
        if not tiers:
            del self._stores[name]

    def known_blocks(self) -> int:
        """Return the number of distinct blocks that workers and stores are known or assumed to hold."""
        return len(self.index) + sum(len(pool.assumed) for pool in self.tables.values())

    def worth_trying(self, model: ModelName) -> bool:
        """Return False if trying queued requests of this model is useless, because all answering workers are at their limits."""
        pool = self.tables.get(model)
        return pool is None or pool.has_room()

    def has_room(self, worker_id: WorkerId) -> bool:
        """Return True if a worker is known and has fewer requests, of all routers together, than its limit."""
        worker = self.workers.get(worker_id)
        return worker is not None and self.tables[worker.description.model].has_room_on(worker_id)

    def seconds_to_first_token(self, model: ModelName, now: Nanos) -> float:
        """Estimate how many seconds a request of this model waits in its worker's engine after it has left the queue (`WorkerTable`)."""
        return self.tables.get(model, self._no_workers).seconds_to_first_token(now)

    def sizes(self, model: ModelName) -> WorkerSizes:
        """Return the context lengths and cache capacities of the workers of a model."""
        return self.tables.get(model, self._no_workers).topology.sizes

    def set_peer_reservations(self, peer: str, booked: Mapping[WorkerId, ReservationTotals]) -> list[RegisteredWorker]:
        """Replace the reservations of a peer router by `booked`. Return the workers on which the peer has fewer requests than before."""
        before = self._by_peer.get(peer, {})
        if booked:
            self._by_peer[peer] = booked
        else:
            self._by_peer.pop(peer, None)
        for pool in self.tables.values():
            pool.set_peer_reservations(list(self._by_peer.values()))
        return [
            self.workers[worker_id]
            for worker_id, was in before.items()
            if worker_id in self.workers and (worker_id not in booked or booked[worker_id].requests < was.requests)
        ]

    def note_peer_prompts(self, peer: str, placed: Iterable[PlacedPrompt], over: Iterable[int], now: Nanos) -> None:
        """Record the prompts that a peer router has sent to workers (`placed`), and forget the finished ones, whose numbers are in `over`.

        `fleet.router.kv_index.peer_prompts` explains peer prompts.
        """
        worker_by_number = self._peer_prompts.setdefault(peer, {})
        for number in over:
            if (worker := self.get(worker_by_number.pop(number, WorkerId("")))) is not None:
                worker.peer_prompts.remove(peer, number)
        for each in placed:
            if (worker := self.get(each.worker_id)) is None:
                if not each.number:
                    self._early_prompts.append((each, Nanos(now - each.age_ms * MILLISECOND)))
                continue
            if not each.number:
                worker.assume_peer_prompt(each.keys, Nanos(now - each.age_ms * MILLISECOND), now)
            elif each.number not in worker_by_number and len(worker_by_number) < MAX_ANNOUNCED_PROMPTS:
                worker_by_number[each.number] = each.worker_id
                worker.peer_prompts.add(peer, each.number, each.keys)

    def meet_early_prompts(self, worker_id: WorkerId, now: Nanos) -> None:
        """Record the prompts that peer routers had sent to a worker before this router knew the worker."""
        if not self._early_prompts:
            return
        worker, others = self.workers[worker_id], deque[tuple[PlacedPrompt, Nanos]](maxlen=MAX_SENT_PROMPTS)
        for prompt, sent_at in self._early_prompts:
            if prompt.worker_id == worker_id:
                worker.assume_peer_prompt(prompt.keys, sent_at, now)
            else:
                others.append((prompt, sent_at))
        self._early_prompts = others

    def assumed_prompts(self, now: Nanos) -> list[PlacedPrompt]:
        """Return the latest `MAX_SENT_PROMPTS` prompts that workers are assumed to have cached. The latest one is last."""
        found = [prompt for worker in self for prompt in worker.assumed_prompts(now, MAX_SENT_PROMPTS)]
        return sorted(found, key=lambda each: -each.age_ms)[-MAX_SENT_PROMPTS:]

    def forget_peer_prompts(self, peer: str) -> None:
        """Forget the unfinished prompts of a peer router that has left."""
        for number, worker_id in self._peer_prompts.pop(peer, {}).items():
            if (worker := self.get(worker_id)) is not None:
                worker.peer_prompts.remove(peer, number)

    def booked(self) -> dict[WorkerId, ReservationTotals]:
        """Return the sums of this router's reservations on each worker; workers without reservations are left out."""
        return {
            worker_id: ReservationTotals(
                worker.reservations.prefill_tokens, worker.reservations.blocks, len(worker.reservations)
            )
            for worker_id, worker in self.workers.items()
            if len(worker.reservations)
        }

    def candidate_table(self, live: LiveRequest) -> CandidateTable:
        """Return the candidate table for a request: the workers of its model with what they hold of its prompt."""
        return self.tables.get(live.arrived.model, self._no_workers).candidate_table(live, self._stores)

    def check(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        """Assert that prefix index, tables and reservations agree with each other and with the live requests."""
        self.index.check()
        reserved: dict[RequestId, list[WorkerId]] = {}
        for worker in self:
            worker.reservations.check()
            assert worker.first_tokens.unanswered <= len(worker.reservations)
            worker.assumed.check()
            worker.accuracy.check()
            adapters = [requests[request_id].arrived.adapter for request_id in worker.reservations]
            assert worker.adapters_reserved == Counter(adapter.name for adapter in adapters if adapter is not None)
            for request_id in worker.reservations:
                reserved.setdefault(request_id, []).append(worker.description.worker_id)
        for live in requests.values():
            assert sorted(live.reserved_on) == sorted(reserved.pop(live.id, [])), live
        assert not reserved, reserved
        for table in self.tables.values():
            table.check()
        assert self._cards is None or self._cards == tuple(self._new_cards())

    # Methods that only return what the registry knows:

    def cards(self) -> tuple[ModelCard, ...]:
        """Return a card for each model and each LoRA adapter for which at least one worker can answer requests.

        The longest context among the model's workers is the card's maximum length of a request.
        """
        if self._cards is None:
            self._cards = tuple(self._new_cards())
        return self._cards

    def _new_cards(self) -> list[ModelCard]:
        cards: list[ModelCard] = []
        adapters = listed_loras(worker.description for worker in self if not worker.draining)
        for model, pool in self.tables.items():
            present = [worker for worker in pool.workers.values() if not worker.draining]
            answering = [worker.description for worker in present if worker.decodes]
            if not answering:
                continue
            longest = max(answering, key=lambda description: description.max_model_len)
            cards.append(
                ModelCard(
                    name=model,
                    max_model_len=longest.max_model_len,
                    block_tokens=longest.block_tokens,
                    workers=len(pool.workers),
                    parsers=_parsers(answering),
                    pooling=longest.pooling,
                    takes_images=any(IMAGES in each.sampling_fields for each in answering),
                    limits_reasoning=all("thinking_tokens" in each.description.sampling_fields for each in present),
                )
            )
            card = cards[-1]
            for name, (parent, adapter) in adapters.items():  # an adapter with the name of a model is left out
                workers = sum(adapter in description.adapters for description in answering)
                if parent == model and workers and name not in self.tables:
                    cards.append(
                        structs.replace(card, name=name, parent=model, revision=adapter.revision, workers=workers)
                    )
        return cards

    def pools(self) -> tuple[PoolSnapshot, ...]:
        pools: dict[tuple[ModelName, Role], list[WorkerSnapshot]] = {}
        for worker in self:
            worker_id, model = worker.description.worker_id, worker.description.model
            cached = self.index.held_by(engine_cache_holder(worker_id)) + len(worker.assumed)
            elsewhere = self.tables[model].booked_elsewhere(worker_id)
            pools.setdefault((model, worker.description.role), []).append(worker.snapshot(cached, elsewhere))
        return tuple(
            PoolSnapshot(model=model, role=role, workers=tuple(workers)) for (model, role), workers in pools.items()
        )

    def paces(self) -> Iterator[tuple[WorkerId, int, float]]:
        """Yield, for each answering worker, its id, its number of requests of all routers, and its seconds per prompt token.

        If the worker itself has no measurement, the seconds are the mean of the workers of its model; 0: unknown.
        """
        for pool in self.tables.values():
            yield from pool.paces()

    def cache_seconds(self) -> dict[WorkerId, float]:
        """Estimate for each worker how many seconds it would take to compute again the blocks that only this worker caches.

        If a store holds a block too, only the cost of loading it counts, which follows from `store_hit_credit`. Blocks that a worker is
        only assumed to cache all count in full.
        """
        workers = {each.description.worker_id: engine_cache_holder(each.description.worker_id) for each in self}
        alike = 0
        for holder in workers.values():
            alike |= self.index.bit(holder)
        elsewhere = max(0.0, 1.0 - self._settings.store_hit_credit)
        paces = {worker_id: pace for table in self.tables.values() for worker_id, pace in table.prompt_paces()}
        found = {}
        for worker_id, holder in workers.items():
            worker = self.workers[worker_id]
            blocks = self.index.lost_blocks(holder, alike, elsewhere) + len(worker.assumed)
            found[worker_id] = blocks * worker.description.block_tokens * (paces.get(worker_id, 0.0) or UNKNOWN_PACE)
        return found

    def recent(self) -> dict[tuple[ModelName, Knowledge], tuple[int, int, CacheComparison]]:
        """Return three values for each model and each kind of knowledge that the router has of its workers' caches.

        The values are the number of workers, the number of those whose caches drift, and the sums of their latest comparisons.
        """
        found: dict[tuple[ModelName, Knowledge], tuple[int, int, CacheComparison]] = {}
        for worker in self:
            accuracy = worker.accuracy
            key = (worker.description.model, accuracy.knowledge)
            workers, drifting, lately = found.get(key, (0, 0, CacheComparison()))
            found[key] = (workers + 1, drifting + accuracy.drifting, lately + accuracy.recent)
        return found

    def stores(self) -> tuple[StoreSnapshot, ...]:
        return tuple(
            StoreSnapshot(
                store_id=store_id,
                fingerprint=name,
                tier=tier,
                blocks=self.index.held_by(store_tier_holder(store_id, name, tier)),
            )
            for (store_id, name), tiers in self._stores.items()
            for tier in tiers
        )


def _parsers(descriptions: Iterable[WorkerDescription]) -> AnswerParsers | None:
    """Return the parsers for a model's answers; None if there are none. Parsers that run in the engine are preferred."""
    named = [each.parsers for each in descriptions if each.parsers is not None]
    return next((each for each in named if each.in_engine), named[0] if named else None)
