"""KV event follower: reads the KV events of an external backend and finds out whether they can be trusted.

Rule 5 of `backend.py` describes how the router uses the result.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from fleet.backends.kv_events.health import ADVICE, EventHealth, KvEventAlert
from fleet.backends.kv_events.stream import EventStreamCounters, read_events
from fleet.backends.kv_events.translator import KvEventTranslator, SkipReason
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.frontend.openai.prompt_keys import ALGORITHM, client_salt
from fleet.router.messages import KvChanged
from fleet.router.settings.router import OpenAiWorkerSettings

log = logging.getLogger(__name__)

# Time after which missing KV events count as a problem: the server has computed new prompts, but has published nothing since
# (`fleet.backends.kv_events.health`, rule 1). vLLM publishes new blocks one engine step and 0.1 s after it has computed them.
EVENT_PATIENCE = Nanos(10 * SECOND)
# A server is expected to publish blocks only of prompts with at least this many blocks. A shorter prompt might fill no
# block in the engine, because the router counts bytes instead of tokens if it has no tokenizer for the server.
LONG_PROMPT_BLOCKS = 4
# Number of a server's long prompts that are remembered; a prompt that is not among them counts as new.
REMEMBERED_PROMPTS = 4096


class KvEventFollower:
    """Follows the KV events of one server while the server is joined."""

    def __init__(self, settings: OpenAiWorkerSettings, clock: Clock) -> None:
        """Create the follower; it connects when `follow` is called."""
        self.followed = False
        self.alert: KvEventAlert | None = None  # the present problem with the events; None: there is none
        self._settings = settings
        self._clock = clock
        self._worker_id = WorkerId(settings.worker_id)
        self._task: asyncio.Task[None] | None = None
        self._prompts: dict[int, None] = {}  # the remembered prompts, each by the key of its last block
        # Running attempts with long and new prompts, whose blocks the server has to publish.
        self._filling: set[RequestId] = set()
        self._begin()

    @property
    def passed_over(self) -> Counter[SkipReason]:
        """The number of published blocks that the router could not use since it last connected to the events, by reason."""
        return self._books.passed_over

    def follow(self, tasks: asyncio.TaskGroup, hear: Callable[[KvChanged], None]) -> None:
        """Start to read the events and pass them to `hear`, until `stop` is called."""
        self.followed = True
        self._task = tasks.create_task(self._read(hear))

    def stop(self) -> None:
        """Stop reading events, because the server has left."""
        self.followed = False
        self.alert = None
        self._filling.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def sent(self, keys: tuple[int, ...], work_id: RequestId) -> None:
        """Note a prompt that was sent to the server. If the prompt is long and new, expect that the server publishes its blocks.

        Long means at least `LONG_PROMPT_BLOCKS` blocks; new means that the prompt is not among the remembered ones.
        """
        if len(keys) < LONG_PROMPT_BLOCKS or keys[-1] in self._prompts:
            return
        if len(self._prompts) == REMEMBERED_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[keys[-1]] = None
        self._filling.add(work_id)

    def filled(self, work_id: RequestId) -> None:
        """Note that an attempt has finished, so the blocks of its prompt must be published soon."""
        if work_id in self._filling:
            self._filling.remove(work_id)
            self._events.filled(self._clock.now())

    def forget(self, work_id: RequestId) -> None:
        """Note that an attempt was cancelled or failed, so that its blocks are not expected any more."""
        self._filling.discard(work_id)

    def judge(self) -> None:
        """Update `alert`, and log each change: once when the events have a problem, and once when it is gone."""
        alert = self._events.alert(self._clock.now())
        if alert is self.alert:
            return
        self.alert = alert
        context = {"worker": self._worker_id, "url": self._settings.url}
        if alert is None:
            log.info("KV events are valid again", extra=context)
            return
        size = self._books.published_block_tokens
        log.error(
            "KV events cannot be used: %s",
            ADVICE[alert],
            extra={**context, "alert": alert, **({"its_block_tokens": size} if size else {})},
        )

    async def _read(self, hear: Callable[[KvChanged], None]) -> None:
        from zmq.error import ZMQError  # noqa: PLC0415 - zmq is an optional dependency

        settings = self._settings
        while True:
            self._begin()
            try:
                async for events in read_events(
                    settings.kv_events, settings.kv_events_replay, self._books, self._counters
                ):
                    if events:
                        hear(KvChanged(worker_id=self._worker_id, events=tuple(events)))
            except ZMQError as error:
                log.error("no KV events", extra={"worker": self._worker_id, "cause": str(error)})  # noqa: TRY400 - expected
            hear(KvChanged(worker_id=self._worker_id, events=(self._books.clear(),)))
            await asyncio.sleep(settings.probe_seconds)

    def _begin(self) -> None:
        """Replace the translator, the counters and the health rules by new ones that know nothing yet."""
        self._books = KvEventTranslator(
            block_tokens=self._settings.block_tokens,
            algorithm=ALGORITHM,
            capacity=self._settings.kv_blocks,
            salt_of=client_salt,
        )
        self._counters = EventStreamCounters()
        self._events = EventHealth(self._books, self._counters, EVENT_PATIENCE)
