"""World: runs the same router machine as production in virtual time, with a simulated cluster and simulated clients.

Rules:

1. Every decision is made by `fleet.router.machine`. The world sends it the events that a router would get. Arrivals of
   requests and the first workers' registrations reach the router without delay. Events of workers and stores reach it
   after a message delay, and commands reach workers after a message delay, too. Messages of one channel between router
   and worker arrive in the order in which they were sent, as on the wire.
2. Generated tokens are not reported one by one, but with the first token of an answer, when it begins a new block, and at its end.
   This suffices, because the instants of first tokens and ends are exact, and the router counts blocks. Tokens that were
   generated before a fault are reported, too.
3. `fleet.sim.cluster` simulates the workers, their network, their stores, and the faults.
4. The time that a request spends outside an engine, for example in HTTP and the tokenizer (`PoolProfile.front`), is only added to the
   latencies that the client sees. It delays no event of the simulation.
5. The digest of a run is a hash of the ends of all requests that were completed or rejected, in the order of these ends. If
   two runs have equal digests, the same requests ended at the same instants with the same results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import assert_never

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import Sampling
from fleet.core.roles import Role
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    CacheDriftChanged,
    CancelAttempt,
    Complete,
    Dispatch,
    Emit,
    Reject,
    RequestCancelled,
    RouterEvent,
    RouterTicked,
    StartedOver,
)
from fleet.router.observer import Observer
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.block_names import AnswerBlockNames, BlankTokens, keys_of
from fleet.sim.cluster.faults import Fault
from fleet.sim.cluster.node_store import StoreProfile
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.cluster.simulated_cluster import SimulatedCluster
from fleet.sim.cluster.worker import MODEL
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel
from fleet.sim.results.outcomes import EndedRequest, TimelineSample
from fleet.sim.virtual_engine import VirtualEngine
from kvstore.eviction.trace_replay import TraceRequest

ENDS_PER_HASH = 256  # number of ended requests whose descriptions are hashed into the digest together


class _ClientView(Struct, kw_only=True, eq=False):
    """State of a live request: what its client has received, and the block names of its prompt and answer."""

    request: TraceRequest
    chain: Sequence[int]
    answer_keys: Sequence[int]
    ended: Callable[[EndedRequest], None]
    first_token: Nanos | None = None
    tokens: int = 0
    tier_tokens: dict[str, int] | None = None  # prompt tokens that were loaded from a store, by tier


class World:
    """Connects a router machine with its clients and its cluster: hands events to the machine, and performs its commands."""

    def __init__(
        self,
        kernel: Kernel,
        pools: Sequence[PoolProfile],
        settings: RouterSettings,
        *,
        seed: int,
        block_tokens: int,
        message_delay: Nanos,
        ended: Callable[[EndedRequest], None],
        policy: PlacementPolicy | None = None,
        record: Observer | None = None,
        store: StoreProfile | None = None,
        verbatim_answers: bool = False,
    ):
        """Create a world in which all workers of the pools have joined already.

        Args:
            kernel: The kernel in whose virtual time the world runs.
            pools: Profiles of the pools, with their numbers of workers.
            settings: Settings of the router.
            seed: Seed of the router's random source.
            block_tokens: Block size of all engines.
            message_delay: One-way delay between router and workers.
            ended: Called with each request that was completed or rejected.
            policy: The policy of the router; None: the policy that the settings name.
            record: Called with each event of the router and the commands that follow from it; or None.
            store: Profile of the store on each node; None: there are no stores.
            verbatim_answers: True if the next prompt of a conversation repeats the answer (`AnswerBlockNames`).
        """
        self._kernel = kernel
        # Keep the explanation of only one request: nothing reads the explanations of ended requests, and each of them
        # needs memory for a candidate table.
        self._machine = RouterMachine(structs.replace(settings, explained_requests=1), Random(seed), policy, keys_of)
        self._block_tokens = block_tokens
        self._answer_names = AnswerBlockNames(block_tokens) if verbatim_answers else None
        self._ended = ended
        self._record = record
        self._digest = blake2b(digest_size=16)
        self._ends: list[str] = []  # descriptions of ended requests that are not in the digest yet
        self._clients: dict[RequestId, _ClientView] = {}
        self._has_deadlines = False
        self._tick: ScheduledEvent | None = None
        self._ticks_at: Nanos | None = None
        self._numbered = 0
        self.finished = 0
        self.last_end = Nanos(0)  # instant of the latest end of a request so far
        serving = [profile for profile in pools if profile.role is not Role.DECODE] or list(pools)
        self._front_base = sum(profile.front for profile in serving) / len(serving)
        self._front_per_token = sum(profile.front_per_token for profile in serving) / len(serving)
        self._cluster = SimulatedCluster(
            kernel,
            self,
            self._handle,
            block_tokens=block_tokens,
            message_delay=message_delay,
            silence=Nanos(round(settings.heartbeat_timeout_seconds * SECOND)),
            store=store,
        )
        for profile in pools:
            self._cluster.begin(profile)

    # Clients.

    def send(
        self,
        request: TraceRequest,
        ended: Callable[[EndedRequest], None] | None = None,
        deadline: Nanos | None = None,
    ) -> RequestId:
        """Send a request now and return its id.

        `ended` is called at the end of the request instead of the world's callback; after `cancel`, neither is called.
        """
        self._has_deadlines = self._has_deadlines or deadline is not None
        self._numbered += 1
        request_id = RequestId(str(self._numbered))
        answer_keys: Sequence[int] = ()
        if self._answer_names is None:
            chain = request.chain[: request.prompt_tokens // self._block_tokens]
        else:
            chain, answer_keys = self._answer_names.named(request)
        keys = {self._block_tokens: chain}
        self._clients[request_id] = _ClientView(
            request=request, chain=chain, answer_keys=answer_keys, ended=ended or self._ended
        )
        arrived = Arrived(
            request_id=request_id,
            model=MODEL,
            tokens=BlankTokens(request.prompt_tokens, keys),
            sampling=_sampling(request.output_tokens),
            session=str(request.session) if request.session else "",
            keys=keys,
            deadline=deadline,
        )
        self._handle(arrived)
        return request_id

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request now. Do nothing if it has ended already."""
        if self._clients.pop(request_id, None) is not None:
            self._handle(RequestCancelled(request_id=request_id))

    @property
    def live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._clients)

    # Requests, as workers see them (`fleet.sim.cluster.worker.SimulatedRequests`).

    def prompt(self, request_id: RequestId) -> _ClientView | None:
        return self._clients.get(request_id)

    def loaded(self, request_id: RequestId, tokens: Mapping[str, int]) -> None:
        if (client := self._clients.get(request_id)) is not None:
            client.tier_tokens = dict(tokens)

    # The router.

    def fail(self, fault: Fault) -> None:
        """Schedule a fault. The fault has no effect if its worker or node does not exist at the instant of the fault."""
        self._cluster.fail(fault)

    def _handle(self, event: RouterEvent) -> None:
        """Send an event to the router, and perform the commands that it returns.

        `fleet.app.agreement` replaces this method, because there the servers of production perform the commands.
        """
        now = self._kernel.instant
        commands = self._machine.handle(event, now)
        if self._record is not None:
            self._record(now, event, commands)
        for command in commands:
            match command:
                case Emit():
                    self._emitted(command, now)
                case Dispatch() | CancelAttempt():
                    # the worker is None if it has died, and WorkerLeft has not reached the router yet
                    if (worker := self._cluster.get(command.worker_id)) is not None:
                        worker.from_router.send(command)
                case StartedOver():
                    self._started_over(command.request_id)
                case Complete():
                    self._over(command.request_id, now, command.cached_tokens, "")
                case Reject():
                    self._over(command.request_id, now, 0, command.reason.value)
                case CacheDriftChanged():
                    pass  # this command only changes metrics
                case _:
                    assert_never(command)
        if self._has_deadlines and (due := self._machine.next_deadline()) != self._ticks_at:
            self._tick_at(due)

    def _tick_at(self, due: Nanos | None) -> None:
        if self._tick is not None:
            cancel(self._tick)
        self._ticks_at = due
        self._tick = None if due is None else self._kernel.at(due, self._ticked)

    def _ticked(self) -> None:
        self._ticks_at = self._tick = None
        self._handle(RouterTicked())

    # Answers, as clients see them.

    def _emitted(self, emit: Emit, now: Nanos) -> None:
        client = self._clients[emit.request_id]
        client.tokens += len(emit.progress.token_ids)
        if client.first_token is None:
            client.first_token = now

    def _started_over(self, request_id: RequestId) -> None:
        self._clients[request_id].tokens = 0

    def _over(self, request_id: RequestId, now: Nanos, cached_tokens: int, refused: str) -> None:
        client = self._clients.pop(request_id)
        request, first_token, end = client.request, client.first_token, now
        self.finished += 1
        self.last_end = now
        if first_token is not None:
            # The time outside an engine is only added to the client's latencies (rule 4).
            front = round(self._front_base + self._front_per_token * request.prompt_tokens)
            first_token, end = Nanos(first_token + front), Nanos(now + front)
        self._note(f"{request_id} {first_token} {now} {client.tokens} {cached_tokens} {refused}\n")
        ended = EndedRequest(
            request_id=request_id,
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=client.tokens,
            cached_tokens=cached_tokens,
            first_token=first_token,
            end=end,
            refused=refused,
            session=request.session,
            max_tokens=request.output_tokens,
            chain=request.chain,
            tier_tokens=client.tier_tokens,
        )
        client.ended(ended)

    # The digest of all ended requests, and values that other modules read.

    def _note(self, end: str) -> None:
        self._ends.append(end)
        if len(self._ends) == ENDS_PER_HASH:
            self._hash_ends()

    def _hash_ends(self) -> None:
        self._digest.update("".join(self._ends).encode())
        self._ends.clear()

    @property
    def digest(self) -> str:
        self._hash_ends()
        return self._digest.hexdigest()

    @property
    def cluster(self) -> SimulatedCluster:
        return self._cluster

    @property
    def moved_bytes(self) -> float:
        return self._cluster.moved_bytes

    @property
    def machine(self) -> RouterMachine:
        return self._machine

    def workers(self) -> Iterator[tuple[PoolProfile, Nanos, VirtualEngine]]:
        """Yield for each worker that was ever up: its profile, the time for which it occupied its GPUs, and its engine.

        The time of a worker that is still up lasts until `last_end`.
        """
        for worker in self._cluster.ever():
            until = self.last_end if worker.until is None else min(worker.until, self.last_end)
            yield worker.profile, Nanos(max(0, until - worker.since)), worker.engine

    def look(self, seconds: float, finished: int) -> TimelineSample:
        """Return a sample of the timeline. `finished` is the number of requests that had ended at the previous sample."""
        cluster, held = self._cluster, self._cluster.held
        return TimelineSample(
            seconds=seconds,
            running=held,
            queued=max(0, len(self._clients) - held),
            kv_share=cluster.kv_share,
            finished=self.finished - finished,
            pools=cluster.pools(),
        )

    def check(self) -> None:
        """Assert that router and cluster are consistent and, if no request is live, that no worker has an attempt or a used block."""
        self._machine.check()
        self._cluster.check(idle=not self._clients)


@lru_cache(4096)
def _sampling(output_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max(1, output_tokens), ignore_eos=True)
