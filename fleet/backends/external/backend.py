"""External backend: an OpenAI-compatible server as a worker of the router.

Rules:

1. To the router, a server is a worker that runs whole requests. It joins when it answers a health check. It leaves when
   it fails several health checks in a row, and answers no request in this time either.
2. A server that cannot be reached, or fails `TRIPS` requests in a row, gets no new requests (it drains) and leaves when
   its running requests have ended. It returns when it answers a health check. After failed requests, it first has to wait
   for the end of a pause. If the first request after its return fails too, the server leaves again, and the next pause is
   twice as long, up to `LONGEST_PAUSE_SECONDS`.
   Failed requests alone never remove the only server of a model, or more than half of its servers. Otherwise a request
   that no server can handle could remove all servers.
3. Exactly one event ends each request: it has finished, it was rejected, or its server left. For a cancelled request
   there is no such event. A connection that has carried requests before may be closed before any byte of an answer. Then
   the server has probably closed it while it was idle, and the request is sent again over a new connection.
4. The router gets the progress of requests as from Fleet's own workers, but with the approximate number of tokens
   instead of the token ids.
5. A server without KV events is assumed to cache the prompts that were sent to it (`fleet.router.kv_index`). The cache
   of a server with KV events is known from the first event after the server joined, or from the oldest event that it
   can send again. If events cannot be used, an alert names the problem (`fleet.backends.kv_events.health`), and placement
   relies on the other events alone.
6. If the settings name the tokenizer of a server, the tokenizer check compares it with the server's own tokenizer
   before the server joins. If the two differ, the server joins nevertheless, and an error is logged, because the
   server's KV events then describe blocks that no request can use.
7. A server that answers health checks but sends no content of answers leaves rotation: it gets no new requests. The
   rules of `silence.py` decide when. The wait of a request that its client cancelled counts, too. The server stays a
   worker, so the router still assumes the same cache when the server returns.
8. If the settings have no key for a server, the server gets the client's key. If the connection is unencrypted and
   leads to another host, the client's key is left out, unless the settings allow it (`insecure`). This is logged
   once for each server.
9. If this router has no socket left, no server is blamed. A request waits for a socket at most until its connection
   timeout, and is then rejected. A health check that cannot be sent counts neither as answered nor as failed.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from fleet.backends.external.followed_cache import KvEventFollower
from fleet.backends.external.health import ListedModel, ServerHealth, try_request
from fleet.backends.external.http_client import (
    OUT_OF_SOCKETS,
    BackendUnreachable,
    ServerAddress,
    connection_failure_cause,
)
from fleet.backends.external.passages import ServerLost, ServerPassage
from fleet.backends.external.running_time import RunningTime
from fleet.backends.external.silence import (
    AbandonRequest,
    EndHold,
    ForgetTrial,
    HoldBack,
    OutstandingRequest,
    ReturnToRotation,
    SendTrial,
    SilenceDetector,
    TakeOutOfRotation,
)
from fleet.backends.external.upstream import LEARNED_FIRST_BYTES, AnswerHeads, Upstream, UpstreamUsage
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
from fleet.frontend.openai.passage import Passage
from fleet.frontend.openai.relay import RelayedRequest
from fleet.frontend.openai.relayed_paths import COMPLETIONS, PLACED
from fleet.frontend.text.tokenizer_check import TokenizerMatch
from fleet.router.kv_index.prefix_index import Knowledge
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

# Number of failed requests in a row after which a server gets no new ones, if enough other servers of its model remain (rule 2). Envoy's
# outlier detection has the same default.
TRIPS = 5
# Number of failed health checks in a row, without an answer to any request in between, after which a server leaves.
MISSES = 3
# Pause before a server returns that failed `TRIPS` requests in a row for the first time (rule 2).
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SEARCH_SECONDS = 0.25  # longest time between two health checks of a server that takes no new requests
# Seconds after which the router closes an idle connection. A burst of requests leaves idle connections, and a server
# may never close them.
IDLE_SECONDS = 60.0
OUT_OF_SOCKETS_SECONDS = 0.05  # pause before a request asks for a socket again (rule 9)
RETRY_AFTER_MS = 1000
NO_SOCKET = "this router has no socket left for it; raise its limit of open files, or retry later"
TOKEN = 0  # stands for each token in reports of progress, because external servers send no token ids
# Minimum time between two silence checks of a server, for each request that runs on it: with 10 requests it is 10 times as long. A check
# takes 2 µs for each request. This and the next limit do not apply while the silence detector is not `calm`.
PROBE_INTERVAL = MILLISECOND // 2
PROBE_INTERVAL_IN_PROGRESS = SECOND  # minimum time between two silence checks of a server that sends content of answers

_STOP = Finish.STOP  # reading a module variable is three to ten times as fast as reading the enum attribute

Hear = Callable[[WorkerEvent], None]
"""Function that gives a worker's event to the router (`RouterServer.hear`). The router handles the event before the function returns.
But while the router is handling another event, it handles the new event after that one."""


class ExternalBackend:
    """Sends requests to one external server, and watches its health. Reports the progress of the requests and the state of the server.

    Implements `fleet.backends.external.upstream.UpstreamOwner`.
    """

    # If an object has more than 30 attributes, CPython reads them slowly, unless they are slots.
    __slots__ = (
        "_address",
        "_cache",
        "_can_spare",
        "_clock",
        "_compared_tokens",
        "_connect_timeout_seconds",
        "_failures",
        "_health",
        "_hear",
        "_idle",
        "_incarnations",
        "_look",
        "_looked_at",
        "_not_before",
        "_openings",
        "_own_time",
        "_passes_keys",
        "_pause_seconds",
        "_taking",
        "_tasks",
        "_tells_cached",
        "_trial",
        "_trial_path",
        "_was_active",
        "_withholds_keys",
        "_works",
        "asked",
        "first_bytes",
        "heads",
        "joined",
        "more_first_bytes",
        "passing",
        "says_done",
        "settings",
        "silence",
        "worker_id",
        "write_batcher",
    )

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
        self.says_done: set[str] = set()
        self.passing = 0
        """The number of running passages (`passages.py`) to this server."""

        self.first_bytes: list[tuple[Nanos, Nanos, int, bool]] = []
        self.more_first_bytes = 0
        self.write_batcher = write_batcher or WriteBatcher()
        self._compared_tokens = settings.compared_tokens
        self.joined = False
        self.asked = asyncio.Event()
        """Set once the first health check has ended: the server has joined, or did not answer."""
        self._connect_timeout_seconds = connect_timeout_seconds
        self._clock = clock
        self._hear: Hear
        self._tasks: asyncio.TaskGroup
        self._taking = False  # True if the server takes new requests
        self._incarnations = 0
        self._works: dict[RequestId, Upstream | asyncio.Task[None]] = {}
        self._idle: list[Upstream] = []
        # True if the server has sent content of an answer, or has answered a passage, since the last health check.
        self._was_active = False
        self._looked_at = Nanos(0)  # time of the last silence check of all running requests
        # Number of failed requests since the last finished one; `TRIPS` - 1 after a suspension because of failed requests (rule 2).
        self._failures = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._not_before = Nanos(0)
        self._look = asyncio.Event()  # set to check the health now, without waiting for the next regular check
        self._cache = KvEventFollower(settings, clock)
        self._tells_cached = False
        self._address = ServerAddress.of(settings.url, settings.api_key)
        self._passes_keys = not settings.api_key and not settings.withholds_keys
        # True if clients' keys are left out (rule 8) and this was not logged yet.
        self._withholds_keys = not settings.api_key and settings.withholds_keys
        self._health = ServerHealth(settings, self._address, connect_timeout_seconds, codec)
        self._openings = {path: self._address.opening(b"POST", path.encode()) for path in PLACED}

    @property
    def passed_over(self) -> Counter[SkipReason]:
        """The number of published blocks that the router could not use since it last connected to the events, by reason."""
        return self._cache.passed_over

    @property
    def alert(self) -> KvEventAlert | None:
        """The present problem with the server's KV events. None: there is no problem, or the server has no KV events."""
        return self._cache.alert

    @property
    def tokenises(self) -> TokenizerMatch:
        """The result of the tokenizer check: whether the server and the router tokenize the sample texts equally."""
        return self._health.tokenises

    @property
    def taking(self) -> bool:
        """True if the server takes new requests."""
        return self._taking

    @property
    def running(self) -> int:
        """The number of placed requests that run on this server."""
        return len(self._works)

    # Methods that the router calls

    def start(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """Send a request to the server.

        Raises:
            WorkerUnreachable: The server takes no requests now.
        """
        if not self._taking:
            raise WorkerUnreachable(self.worker_id)
        if self._cache.followed and (keys := relayed.keys.get(self._compared_tokens)):
            self._cache.sent(keys, work_id)
        idle = self._idle
        while idle:
            # The connection that was used last is used again, so that surplus connections stay idle and are closed
            # (`IDLE_SECONDS`).
            upstream = idle.pop()
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
                self._tell_first_bytes(now)
                self.silence.abandoned(self._outstanding(work_id, work, relayed, now), now)
            work.drop()
        elif work is not None:
            work.cancel()
        self._leave_when_done()

    async def model_objects(self) -> list[ListedModel]:
        """Return the models that the server lists; an empty list if it has not joined, does not answer, or has no list."""
        return await self._health.model_objects() if self.joined else []

    async def carry(self, passage: Passage, *, may_move: bool) -> bool:
        """Pass a request on to the server while the request still arrives, and pass the answer to the client.

        Args:
            passage: The request.
            may_move: True if another server may answer when this one answers 404.

        Returns:
            True if the request is over; False if the caller has to pass it to another server.

        Raises:
            BackendUnreachable: The server cannot be reached; nothing was sent.
            RequestRejected: The server sent no complete answer, the request's body did not arrive, or no socket was left.
            ClientDisconnected: The client has closed its connection.
        """
        address = self._address
        opening = address.opening(passage.method.encode(), passage.path.encode("latin-1") + passage.query)
        if self._passes_keys:
            opening += passage.credentials
        elif self._withholds_keys and passage.credentials:
            self._log_withheld_key()
        carried = ServerPassage(passage, address, opening, self.settings.silence_timeout_seconds)
        self.passing += 1
        try:
            answered = await carried.run(self._connect_timeout_seconds, may_move=may_move)
        except ServerLost as error:
            log.warning("passage failed", extra={"worker": self.worker_id, "path": passage.path, "cause": str(error)})
            raise RequestRejected(Reason.WORKER_LOST, f"worker {self.worker_id}: {error}") from error
        except OSError as error:
            cause = connection_failure_cause(error)
            if error.errno in OUT_OF_SOCKETS:
                raise RequestRejected(Reason.QUEUE_FULL, NO_SOCKET, retry_after_ms=RETRY_AFTER_MS) from error
            log.warning("worker unreachable", extra={"worker": self.worker_id, "cause": cause})
            self._suspend()
            self._leave_when_done()
            raise BackendUnreachable(f"worker {self.worker_id}: it cannot be reached: {cause}") from error
        finally:
            self.passing -= 1
        self._was_active = True
        return answered

    async def run(self, hear: Hear) -> None:
        """Check the server's health until cancelled, and then close all connections to it. `hear` gets all events about the server."""
        self._hear = hear
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._watch()
        finally:
            self._close()

    def look(self, now: Nanos) -> bool:
        """Report the state of all running requests to the silence detector; `now` is running time (`running_time.py`).

        While some requests make progress, the requests are checked only once a second, because only silence must be
        noticed soon. The more requests run, the less often they are checked, so that checks take at most a hundredth
        of the processor. But while the silence detector is not `calm`, each call is a check.

        Returns:
            True if `decide` has to be called.
        """
        silence, works = self.silence, self._works
        began, continues = self._tell_first_bytes(now), self._answers_progress(now)
        pause = len(works) * PROBE_INTERVAL
        if continues:
            silence.progressed(now)
        if began or continues:
            self._was_active = True
            pause = max(pause, PROBE_INTERVAL_IN_PROGRESS)
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

    def _answers_progress(self, now: Nanos) -> bool:
        """Return True if some answer has made progress since it was last checked. Do not check the answers after the first such one."""
        for work in self._works.values():
            if isinstance(work, Upstream) and not work.quiet and work.spoke:
                work.quiet_for(now)
                return True
        return False

    def decide(self, now: Nanos, siblings: "Sequence[ExternalBackend]") -> None:
        """Let the silence detector decide about this server, and carry out its commands (rule 7).

        Args:
            now: The current running time.
            siblings: The other servers of the same model that take requests.
        """
        judged = self._taking or self.silence.out or self.silence.held
        silences = [each.silence for each in siblings] if judged else []
        for command in self.silence.decide(now, silences, spare=self._can_spare(self)):
            match command:
                case SendTrial():
                    self._trial = self._tasks.create_task(self._try(now))
                case ForgetTrial():
                    self._stop_asking()
                case TakeOutOfRotation(why=why):
                    self._stop_taking(why)
                case HoldBack():
                    self._taking = False
                    log.info("worker held back until it answers a trial request", extra={"worker": self.worker_id})
                    self._hear(WorkerDraining(worker_id=self.worker_id))
                case EndHold() | ReturnToRotation():
                    if self.joined:
                        self._taking = True
                        log.info("worker resumed", extra={"worker": self.worker_id})
                        self._hear(WorkerResumed(worker_id=self.worker_id))
                    self._look.set()
                case AbandonRequest(work_id=work_id, why=why):
                    self._give_up(work_id, why)
                case _:
                    assert_never(command)

    def _tell_first_bytes(self, now: Nanos) -> bool:
        """Tell the silence detector which answers have begun since the last check. Return True if there were any.

        `now` is running time.
        """
        first_bytes, lost = self.first_bytes, self._own_time.lost
        if not first_bytes:
            return False
        for sent_at, first_byte_at, size, streams in first_bytes:
            waited = Nanos(max(0, first_byte_at - lost - sent_at))
            self.silence.answered(sent_at, waited, size, streams=streams)
        first_bytes.clear()
        if self.more_first_bytes:
            self.silence.answered_more(now, self.more_first_bytes)
            self.more_first_bytes = 0
        return True

    def _outstanding(
        self, work_id: RequestId, work: Upstream, relayed: RelayedRequest, now: Nanos
    ) -> OutstandingRequest:
        progressed = not work.quiet
        return OutstandingRequest(
            work_id=work_id,
            sent_at=work.sent_at,
            size=len(relayed.body),
            streams=relayed.streams,
            begun=work.spoke,
            passed_on=work.begun,
            progressed=progressed,
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
        """Send a trial request and report its outcome to the silence detector."""
        settings = self.settings
        trial = await try_request(self._address, self._trial_path, settings.model, settings.silence_timeout_seconds)
        now = self._own_time.of(self._clock.now())
        self.silence.trial_ended(now, Nanos(now - began_at), trial)

    def _stop_asking(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
            self._trial = None

    # Methods that connections call (`UpstreamOwner`)

    def spoke(self, upstream: Upstream, relayed: RelayedRequest) -> None:
        if len(self.first_bytes) < LEARNED_FIRST_BYTES:
            self.first_bytes.append((upstream.sent_at, self._clock.now(), len(relayed.body), relayed.streams))
        else:
            self.more_first_bytes += 1

    def advanced(self, work_id: RequestId, tokens: int) -> None:
        self._step(work_id, tokens, None)

    def finished(self, upstream: Upstream, work_id: RequestId, tokens: int, *, reusable: bool) -> None:
        self._was_active = True
        self._failures = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        del self._works[work_id]
        if self._cache.followed:
            self._cache.filled(work_id)
        if (usage := upstream.usage()) is not None:
            self._compare(work_id, usage)
        if reusable:
            self._idle.append(upstream)
        self._step(work_id, tokens, _STOP)
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

    # Sending requests

    def _send(self, upstream: Upstream, work_id: RequestId, relayed: RelayedRequest) -> None:
        self._works[work_id] = upstream
        upstream.sent_at = Nanos(self._clock.now() - self._own_time.lost)
        upstream.turn = self.silence.answers + len(self._works)
        if self._withholds_keys and relayed.credentials:
            self._log_withheld_key()
        upstream.begin(
            work_id,
            relayed,
            b"%s%s%scontent-length: %d\r\n\r\n"
            % (
                self._openings[relayed.path]
                if not relayed.query
                else self._address.opening(b"POST", relayed.path.encode() + relayed.query),
                relayed.head,
                relayed.credentials if self._passes_keys else b"",
                len(relayed.body),
            ),
        )

    def _log_withheld_key(self) -> None:
        """Log, once for each server, that keys of clients are not passed on to it (rule 8)."""
        self._withholds_keys = False
        log.warning(
            "client keys not passed on",
            extra={
                "worker": self.worker_id,
                "cause": f"they would cross the network to {self._address.host} in the clear",
                "remedy": "use https in openai_workers.url, set openai_workers.api_key, or set"
                " openai_workers.insecure = true on a network that nobody else is on",
            },
        )

    async def _dial(self, work_id: RequestId, relayed: RelayedRequest) -> None:
        """Send a request over a new connection (rule 9)."""
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
                relayed.give_up(RequestRejected(Reason.QUEUE_FULL, NO_SOCKET, retry_after_ms=RETRY_AFTER_MS))
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
        """Report to the router how many tokens of a prompt the server had cached.

        vLLM omits a count of 0. So once a server has sent a count, an answer without one counts as 0.
        """
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

    # Health checks

    async def _watch(self) -> None:
        misses = 0
        while True:
            was_active = self._listen()
            self._close_idle()
            healthy = True if was_active and self._taking else await self._health.healthy()
            if healthy:
                misses = 0
                if not self.joined and self._clock.now() >= self._not_before and not self.silence.out:
                    await self._health.compare_tokenizers()
                    self._join()
            elif was_active:
                # The server has sent a part of an answer meanwhile, so the failed health check does not count.
                misses = 0
            elif healthy is not None:
                misses += 1
                if self.joined and misses >= MISSES:
                    self._lose()
                elif misses == MISSES:  # log once; the server may start later, or the setting `url` may be wrong
                    context = {"worker": self.worker_id, "url": self.settings.url, "cause": self._health.cause}
                    log.warning("worker does not answer; it joins when it does", extra=context)
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
            # no other worker has this fingerprint, because no other worker can use the blocks of this server
            fingerprint=f"openai/{self.worker_id}",
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
            self._failures = TRIPS - 1  # one more failure takes the server out again (rule 2)
            self._not_before = Nanos(self._clock.now() + int(self._pause_seconds * SECOND))
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
            self._suspend()

    def _suspend(self, why: str = "it fails requests") -> None:
        """Stop sending new requests to the server. The caller then has to call `_leave_when_done`.

        If a failed request is the reason, its rejection must be reported to the router before `_leave_when_done`.
        """
        if self._taking:
            self._stop_taking(why)

    def _stop_taking(self, why: str) -> None:
        context = {"worker": self.worker_id, "running": len(self._works), "cause": why}
        log.warning("worker suspended", extra=context)
        if self._taking:  # otherwise the router knows already that the server takes no requests
            self._taking = False
            self._hear(WorkerDraining(worker_id=self.worker_id))

    def _leave_when_done(self) -> None:
        if self.joined and not self._taking and not self._works and not (self.silence.out or self.silence.held):
            self._left()

    def _lose(self) -> None:
        """Drop all running requests and report that the server has left, because it does not answer any more."""
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
        """Return True if the server has sent content of an answer, or has answered a passage, since the last call."""
        was_active, self._was_active = self._was_active, False
        return was_active

    def _close_idle(self) -> None:
        """Close connections that have been idle for `IDLE_SECONDS`."""
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
