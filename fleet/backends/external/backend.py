"""A foreign server as a worker: what it is to the router, and how requests get there.

Rules:

1. A server is a worker that does whole requests. It joins when it answers a question for its health, and leaves when it
   answers none, while nothing else is heard from it either. An answer to anything is as good as one for its health.
2. Whoever cannot be reached, or fails `TRIPS` requests in a row, gets no new ones (it is draining), and has left when those
   that run there are over. It comes back when it answers for its health, after a pause that doubles as long as it goes on
   failing requests; one more failure then is enough. Of the servers of a model at least half go on whatever requests they
   fail, and the only one does: a request that no server can take would otherwise put all of them out, as often as somebody sends it.
3. Every request that was begun is told of once: as finished, as rejected, or by the server's leaving. One that is cancelled
   is told of no more. Where a connection turns out to have been closed while it was idle, the request is sent again over a
   new one: the server has not seen it.
4. Progress is told as that of engines is, but the tokens are not known, only how many they are, roughly.
5. A server without KV events is believed to hold what was sent there (`fleet.router.kv_index.assumed_cache`). Of one with them it
   is known, from the first event after it joined, or from the oldest one that it repeats. Where something is wrong with its
   events, that is told by name (`fleet.backends.kv_events.health`), and it is placed as one that holds what was heard of it.
6. Before it joins, a server whose tokenizer the settings name is asked what it makes of the golden prompts
   (`fleet.frontend.text.tokenizer_check`); where that is something else, its events name nothing that is ever asked for.
7. A server that answers for its health and gives no content of its answers is out of rotation (`fleet.backends.external.silence` decides), whoever
   ends the requests. It stays a worker meanwhile: what was sent there is still believed to be cached when it is back.
8. A router that has no socket left blames no server: a request waits for one as long as for a connection, and is refused
   then; a question for health that cannot be asked says nothing.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from fleet.backends.external.followed_cache import KvEventFollower
from fleet.backends.external.health import ServerHealth
from fleet.backends.external.http_client import OUT_OF_SOCKETS, ServerAddress, connection_failure_cause
from fleet.backends.external.running_time import RunningTime
from fleet.backends.external.silence import (
    AbandonRequest,
    ForgetTrial,
    OutstandingRequest,
    ReturnToRotation,
    SendTrial,
    SilenceDetector,
    TakeOutOfRotation,
)
from fleet.backends.external.trial import try_request
from fleet.backends.external.upstream import AnswerHeads, Upstream, UpstreamUsage
from fleet.backends.external.write_batcher import WriteBatcher
from fleet.backends.kv_events.health import KvEventAlert
from fleet.backends.kv_events.translator import SkipReason
from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import Incarnation, ModelName, RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Role
from fleet.core.work import LoraAdapter, Progress, Rejected, WorkerDescription
from fleet.frontend.openai.answers import UNKNOWN_MODEL_LENGTH
from fleet.frontend.openai.relay import RelayedRequest
from fleet.frontend.openai.relay_requests import COMPLETIONS, PATHS
from fleet.frontend.text.tokenizer_check import TokenizerMatch
from fleet.router.kv_index.cache_accuracy import Knowledge
from fleet.router.messages import (
    AttemptRejected,
    CacheAged,
    CacheReported,
    WorkerDraining,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
    WorkerStepped,
)
from fleet.router.ports import TextCodec, WorkerUnreachable
from fleet.router.settings.router import OpenAiWorkerSettings

log = logging.getLogger(__name__)

TRIPS = 5  # failures in a row, as hyperscalers' proxies have it (Envoy's outlier detection: 5 answers of 5xx)
MISSES = 3  # questions for its health in a row that a server does not answer
FIRST_PAUSE_SECONDS = 1.0  # of a server that failed too many requests
LONGEST_PAUSE_SECONDS = 30.0
SEARCH_SECONDS = 0.25  # between two questions to a server that is not there; they cost little, waiting for it much
IDLE_SECONDS = 60.0  # of a connection that a burst has left over; servers close them sooner, or never
OUT_OF_SOCKETS_SECONDS = 0.05  # between two attempts then (rule 8)
RETRY_AFTER_MS = 1000
TOKEN = 0  # stands for each that is not known
PROBE_INTERVAL = MILLISECOND // 2  # for each request there, between looks at all; each takes two microseconds
PROBE_INTERVAL_WHILE_HEARD = SECOND  # while some are answered
LEARNED_AT_ONCE = 64  # first bytes that are counted at a look, ten times a second

Hear = Callable[[WorkerEvent], None]
"""`fleet.router.server.RouterServer.hear`."""


class ExternalBackend:
    """One server. Implements `fleet.backends.external.upstream.UpstreamOwner`."""

    def __init__(
        self,
        settings: OpenAiWorkerSettings,
        connect_timeout_seconds: float,
        clock: Clock,
        codec: TextCodec | None = None,
        can_spare: "Callable[[ExternalBackend], bool]" = lambda _: True,
        write_batcher: WriteBatcher | None = None,
        own_time: RunningTime | None = None,
    ) -> None:
        self._can_spare = can_spare
        self._own_time = own_time or RunningTime()
        self.silence = SilenceDetector(settings)
        self._trial: asyncio.Task[None] | None = None
        self._trial_path = COMPLETIONS
        self.worker_id = WorkerId(settings.worker_id)
        self.settings = settings
        self.heads = AnswerHeads()
        self.says_done = False
        self.first_bytes: list[tuple[Nanos, Nanos, int, bool]] = []
        self.write_batcher = write_batcher or WriteBatcher()
        self._compared_tokens = settings.compared_tokens
        self.joined = False
        self.asked = asyncio.Event()
        """Set once it has joined, or has turned out not to be there."""
        self._connect_timeout_seconds = connect_timeout_seconds
        self._clock = clock
        self._hear: Hear
        self._tasks: asyncio.TaskGroup
        self._taking = False  # new requests
        self._incarnations = 0
        self._works: dict[RequestId, Upstream | asyncio.Task[None]] = {}
        self._idle: list[Upstream] = []
        self._heard = False  # since the last look at its health
        self._looked_at = Nanos(0)  # at all of its requests
        self._failures = 0  # in a row
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._not_before = Nanos(0)
        self._look = asyncio.Event()  # now, and not at the next turn
        self._cache = KvEventFollower(settings, clock)
        self._tells_cached = False
        self._address = ServerAddress.of(settings.url, settings.api_key)
        self._health = ServerHealth(settings, self._address, connect_timeout_seconds, codec)
        self._openings = {path: self._address.opening(b"POST", path) for path in PATHS}

    @property
    def passed_over(self) -> Counter[SkipReason]:
        """Blocks that it published and that are not followed, by why."""
        return self._cache.passed_over

    @property
    def alert(self) -> KvEventAlert | None:
        """What is wrong with its KV events."""
        return self._cache.alert

    @property
    def tokenises(self) -> TokenizerMatch:
        """What it made of the golden prompts, beside this router."""
        return self._health.tokenises

    @property
    def taking(self) -> bool:
        """Whether it takes new requests."""
        return self._taking

    # From the router

    def start(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """Send a request.

        Raises:
            WorkerUnreachable: It takes none now.
        """
        if not self._taking:
            raise WorkerUnreachable(self.worker_id)
        if self._cache.followed and (keys := relayed.keys.get(self._compared_tokens)):
            self._cache.sent(keys, work_id)
        idle = self._idle
        while idle:
            upstream = idle.pop()  # the latest: those that are not needed age until somebody closes them
            if upstream.usable:
                self._send(upstream, work_id, relayed)
                return
        self._works[work_id] = self._tasks.create_task(self._dial(work_id, relayed))

    def cancel(self, work_id: RequestId) -> None:
        work = self._works.pop(work_id, None)
        self._cache.forget(work_id)
        if isinstance(work, Upstream):
            if not work.spoke and (relayed := work.relayed) is not None:
                now = self._own_time.of(self._clock.now())
                self._trial_path = relayed.path
                self._tell_first_bytes()
                self.silence.abandoned(self._outstanding(work_id, work, relayed, now), now)
            work.drop()
        elif work is not None:
            work.cancel()
        self._leave_when_done()

    async def run(self, hear: Hear) -> None:
        """Keep looking after the server until cancelled."""
        self._hear = hear
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._watch()
        finally:
            self._close()

    def look(self, now: Nanos) -> bool:
        """Take in how its requests stand; the instants of this and of `decide` are the router's own time.

        While some of them go on, all are looked at once a second only: it is silence that has to be noticed soon. Very many are looked
        at less often, so that looking takes no more than a hundredth of the processor.

        Returns:
            Whether there is something to decide.
        """
        silence, works = self.silence, self._works
        heard = self._tell_first_bytes() or self._hears(now)
        pause = len(works) * PROBE_INTERVAL
        if heard:
            self._heard = True
            silence.heard(now)
            pause = max(pause, PROBE_INTERVAL_WHILE_HEARD)
        if works and now < self._looked_at + pause and silence.calm:
            return False
        self._looked_at = now
        outstanding = [
            self._outstanding(work_id, work, relayed, now)
            for work_id, work in works.items()
            if isinstance(work, Upstream) and (relayed := work.relayed) is not None
        ]
        silence.note(now, outstanding)
        return not silence.settled

    def _hears(self, now: Nanos) -> bool:
        """Say whether some answer that has begun goes on; the first one that does is enough."""
        for work in self._works.values():
            if isinstance(work, Upstream) and not work.quiet and work.spoke:
                work.quiet_for(now)
                return True
        return False

    def decide(self, now: Nanos, siblings: "Sequence[ExternalBackend]") -> None:
        """Do what its silence asks for (rule 7).

        Args:
            now: The instant.
            siblings: The other servers of its model that take requests.
        """
        silences = [each.silence for each in siblings] if self._taking or self.silence.out else []
        for command in self.silence.decide(now, silences, spare=self._can_spare(self)):
            match command:
                case SendTrial():
                    self._trial = self._tasks.create_task(self._try(now))
                case ForgetTrial():
                    self._stop_asking()
                case TakeOutOfRotation(why=why):
                    self._suspend(why)
                case ReturnToRotation():
                    if self.joined:
                        self._taking = True
                        log.info("worker resumed", extra={"worker": self.worker_id})
                        self._hear(WorkerResumed(worker_id=self.worker_id))
                    self._look.set()
                case AbandonRequest(work_id=work_id, why=why):
                    self._give_up(work_id, why)
                case _:
                    assert_never(command)

    def _tell_first_bytes(self) -> bool:
        """Tell what has begun since the last look, if anything has. Of very many the first ones are enough to know how fast it is."""
        first_bytes, lost = self.first_bytes, self._own_time.lost
        if first_bytes:
            for sent_at, first_byte_at, size, streams in first_bytes[:LEARNED_AT_ONCE]:
                waited = Nanos(max(0, first_byte_at - lost - sent_at))
                self.silence.answered(sent_at, waited, size, streams=streams)
            if len(first_bytes) > LEARNED_AT_ONCE:
                sent_at, first_byte_at, _, _ = first_bytes[-1]
                self.silence.answered_more(sent_at, Nanos(first_byte_at - lost), len(first_bytes) - LEARNED_AT_ONCE)
            first_bytes.clear()
            return True
        return False

    def _outstanding(
        self, work_id: RequestId, work: Upstream, relayed: RelayedRequest, now: Nanos
    ) -> OutstandingRequest:
        heard = not work.quiet
        return OutstandingRequest(
            work_id=work_id,
            sent_at=work.sent_at,
            size=len(relayed.body),
            streams=relayed.streams,
            begun=work.spoke,
            passed_on=work.begun,
            heard=heard,
            quiet_for=work.quiet_for(now),
            overtaken=self.silence.answers - work.turn,
            moved=relayed.moved,
        )

    def _give_up(self, work_id: RequestId, why: str) -> None:
        work = self._works.get(work_id)
        if isinstance(work, Upstream) and (relayed := work.relayed) is not None:
            relayed.moved = True
            self._trial_path = relayed.path
            work.fail(why)

    async def _try(self, began_at: Nanos) -> None:
        """Send a trial request, and tell what comes of it."""
        settings = self.settings
        trial = await try_request(self._address, self._trial_path, settings.model, settings.silence_timeout_seconds)
        now = self._own_time.of(self._clock.now())
        self.silence.told(now, Nanos(now - began_at), trial)

    def _stop_asking(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
            self._trial = None

    # From connections

    def spoke(self, upstream: Upstream, relayed: RelayedRequest) -> None:
        self.first_bytes.append((upstream.sent_at, self._clock.now(), len(relayed.body), relayed.streams))

    def advanced(self, work_id: RequestId, tokens: int) -> None:
        self._step(work_id, tokens, None)

    def finished(self, upstream: Upstream, work_id: RequestId, tokens: int, *, reusable: bool) -> None:
        self._heard = True
        self._failures = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        del self._works[work_id]
        if self._cache.followed:
            self._cache.filled(work_id)
        if (usage := upstream.usage()) is not None:
            self._compare(work_id, usage)
        if reusable:
            self._idle.append(upstream)
        self._step(work_id, tokens, Finish.STOP)
        if not self._taking:
            self._leave_when_done()

    def failed(self, work_id: RequestId, reason: Reason, message: str) -> None:
        del self._works[work_id]
        self._cache.forget(work_id)
        log.warning("request failed", extra={"worker": self.worker_id, "request": work_id, "cause": message})
        self._count_failure()
        self._reject(work_id, reason, message)
        self._leave_when_done()

    def stale(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        self._works[work_id] = self._tasks.create_task(self._dial(work_id, relayed))

    def closed(self, upstream: Upstream) -> None:
        if upstream in self._idle:
            self._idle.remove(upstream)

    # Sending

    def _send(self, upstream: Upstream, work_id: RequestId, relayed: RelayedRequest) -> None:
        self._works[work_id] = upstream
        upstream.sent_at = Nanos(self._clock.now() - self._own_time.lost)
        upstream.turn = self.silence.answers + len(self._works)
        own = self._address.authorization
        upstream.begin(
            work_id,
            relayed,
            b"%s%s%scontent-length: %d\r\n\r\n"
            % (
                self._openings[relayed.path],
                relayed.head,
                b"" if own or not relayed.authorization else b"authorization: " + relayed.authorization + b"\r\n",
                len(relayed.body),
            ),
        )

    async def _dial(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """Send over a new connection (rule 8)."""
        loop = asyncio.get_running_loop()
        address = self._address
        upstream: Upstream | None = None
        starved = False
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                while upstream is None:
                    try:
                        starved = False
                        _, upstream = await loop.create_connection(
                            lambda: Upstream(self, self._compared_tokens), address.host, address.port, ssl=address.tls
                        )
                    except OSError as error:
                        if error.errno not in OUT_OF_SOCKETS:
                            raise
                        starved = True
                        await asyncio.sleep(OUT_OF_SOCKETS_SECONDS)
        except (OSError, TimeoutError) as error:
            del self._works[work_id]
            self._cache.forget(work_id)
            if starved:
                log.warning("no socket is left", extra={"worker": self.worker_id, "request": work_id})
                message = "this router has no socket left for it; raise its limit of open files, or retry later"
                relayed.give_up(RequestRejected(Reason.QUEUE_FULL, message, retry_after_ms=RETRY_AFTER_MS))
                return
            cause = f"it cannot be reached: {connection_failure_cause(error)}"
            log.warning("worker unreachable", extra={"worker": self.worker_id, "cause": cause})
            self._reject(work_id, Reason.WORKER_LOST, cause)
            self._suspend()
            self._leave_when_done()
        else:
            self._send(upstream, work_id, relayed)

    def _step(self, work_id: RequestId, tokens: int, finish: Finish | None) -> None:
        progress = Progress(request_id=work_id, token_ids=(TOKEN,) * tokens, finish=finish)
        self._hear(WorkerStepped(worker_id=self.worker_id, progress=(progress,)))

    def _reject(self, work_id: RequestId, reason: Reason, message: str) -> None:
        rejected = Rejected(request_id=work_id, reason=reason, message=f"worker {self.worker_id}: {message}")
        self._hear(AttemptRejected(worker_id=self.worker_id, rejected=rejected))

    def _compare(self, work_id: RequestId, usage: UpstreamUsage) -> None:
        """Tell how much of a prompt it had cached. Who has ever told, and does not, had nothing (vLLM leaves out zeros)."""
        self._tells_cached = self._tells_cached or usage.cached_tokens is not None
        if self._tells_cached:
            self._hear(
                CacheReported(
                    worker_id=self.worker_id,
                    request_id=work_id,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens or 0,
                )
            )

    # Health

    async def _watch(self) -> None:
        misses = 0
        while True:
            heard = self._listen()
            self._close_idle()
            healthy = True if heard and self._taking else await self._health.healthy()
            if healthy:
                misses = 0
                if not self.joined and self._clock.now() >= self._not_before and not self.silence.out:
                    await self._health.compare_tokenizers()
                    self._join()
            elif heard:
                misses = 0  # what runs there goes on
            elif healthy is not None:
                misses += 1
                if self.joined and misses >= MISSES:
                    self._lose()
                elif misses == MISSES:  # once: it may be started later than this router, or its url be wrong
                    told = {"worker": self.worker_id, "url": self.settings.url, "cause": self._health.cause}
                    log.warning("worker does not answer; it joins when it does", extra=told)
            self.asked.set()
            if self.joined:
                self._hear(CacheAged(worker_id=self.worker_id))
            if self._cache.followed:
                self._cache.judge()
            seconds = self.settings.probe_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds if self._taking else min(SEARCH_SECONDS, seconds)):
                    await self._look.wait()
            self._look.clear()

    def _join(self) -> None:
        settings = self.settings
        self._incarnations += 1
        self.joined = self._taking = True
        description = WorkerDescription(
            worker_id=self.worker_id,
            incarnation=Incarnation(f"{self._incarnations}"),
            model=ModelName(settings.model),
            role=Role.BOTH,
            block_tokens=settings.compared_tokens,
            max_model_len=UNKNOWN_MODEL_LENGTH,
            kv_blocks=settings.compared_blocks,
            max_running=settings.max_running,
            fingerprint=f"openai/{self.worker_id}",  # nobody shares blocks with it
            engine="openai",
            adapters=tuple(LoraAdapter(name) for name in settings.adapters),
        )
        log.info("worker joined", extra={"worker": self.worker_id, "url": settings.url})
        knowledge = Knowledge.EXACT if settings.kv_events else Knowledge.APPROXIMATE
        believed_for = None if settings.kv_events else Nanos(int(settings.cache_ttl_seconds * SECOND))
        self._hear(
            WorkerJoined(
                description=description,
                address=settings.url,
                knowledge=knowledge,
                believed_for=believed_for,
            )
        )
        if settings.kv_events:
            self._cache.follow(self._tasks, self._hear)

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures >= TRIPS and self._taking and self._can_spare(self):
            self._failures = TRIPS - 1  # rule 2
            self._not_before = Nanos(self._clock.now() + int(self._pause_seconds * SECOND))
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
            self._suspend()

    def _suspend(self, why: str = "it fails requests") -> None:
        """Take no new requests; who calls this also calls `_leave_when_done`, once all is told."""
        if self._taking:
            self._taking = False
            told = {"worker": self.worker_id, "running": len(self._works), "cause": why}
            log.warning("worker suspended", extra=told)
            self._hear(WorkerDraining(worker_id=self.worker_id))

    def _leave_when_done(self) -> None:
        if self.joined and not self._taking and not self._works and not self.silence.out:
            self._left()

    def _lose(self) -> None:
        """It is gone, and with it what runs there."""
        works = list(self._works.values())
        self._works.clear()
        for work in works:
            if isinstance(work, Upstream):
                work.drop()
            else:
                work.cancel()
        self._left()

    def _left(self) -> None:
        self.joined = self._taking = False
        self.silence.reset()
        self._stop_asking()
        self._cache.stop()
        for upstream in self._idle:
            upstream.drop()
        self._idle.clear()
        log.warning("worker left", extra={"worker": self.worker_id})
        self._hear(WorkerLeft(worker_id=self.worker_id))
        self._look.set()

    def _listen(self) -> bool:
        """Return whether anything was heard since the last time."""
        heard, self._heard = self._heard, False
        return heard

    def _close_idle(self) -> None:
        """Close connections that have not been needed for long."""
        now = self._own_time.of(self._clock.now())
        old = [upstream for upstream in self._idle if upstream.quiet_for(now) >= IDLE_SECONDS * SECOND]
        for upstream in old:
            self._idle.remove(upstream)
            upstream.drop()

    def _close(self) -> None:
        for work in self._works.values():
            if isinstance(work, Upstream):
                work.drop()
        for upstream in self._idle:
            upstream.drop()
        self._works.clear()
        self._idle.clear()
        self._taking = False
