"""One engine in virtual time: a batch, a prefix cache, and steps that take what the latency model says.

Rules:

1. A step decodes one token for each request that decodes, and computes prompts in order of arrival, `chunk_tokens` of prompt
   and answer together at most. While nothing is prefilled, steps up to the next end of an answer are taken together.
2. A request begins when the batch has a place, the step has room and the memory can keep prompt and answer; until then it and all behind
   it wait. What the cache holds of its prompt is looked up then, as vLLM does it, and held.
3. Blocks of a prompt are in the cache from the end of the step that computed them on. What nobody holds is forgotten when room
   is needed, what was not used for longest first, and of one prompt its end before its beginning.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

from msgspec import Struct

from fleet.clock import MILLISECOND, Nanos
from fleet.hardware.latency import EngineLatency
from fleet.ids import RequestId

A_TOKEN_AND_THE_REST = 2  # the shortest answer that decodes at all


class Device(Struct, frozen=True, kw_only=True):
    """What engines are. By default about an 8-billion model on one H100: 20k prompt tokens a second, 8 ms a step."""

    latency: EngineLatency = EngineLatency(
        prefill_base_ms=2.0,
        prefill_ms_per_token=0.05,
        prefill_ms_per_token_and_context=1e-6,
        step_base_ms=8.0,
        step_ms_per_sequence=0.05,
        step_ms_per_context_token=4e-5,
    )
    kv_tokens: int = 400_000
    max_running: int = 64
    chunk_tokens: int = 2048


class Job(Struct, kw_only=True, eq=False):
    """A request on an engine."""

    id: RequestId  # of the work
    chain: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    computed: int = 0  # prompt tokens that need not be computed any more
    hits: int = 0  # of these, found in the cache
    blocks: int = 0  # that it takes in memory
    shared: int = 0  # leading blocks of the chain that it holds in the cache
    last_step: int = 0


class Told(Struct, frozen=True):
    """What a step, or several, brought."""

    began: Sequence[Job]  # first tokens
    ended: Sequence[Job]
    stored: Sequence[int]
    removed: Sequence[int]


class Engine:
    """Drive it with `add` and `step`; `due` is when the step that runs ends."""

    def __init__(self, device: Device, block_tokens: int):
        self.due: Nanos | None = None
        self.busy = Nanos(0)
        self.computed_tokens = 0
        self._device = device
        self._block_tokens = block_tokens
        self._room = device.kv_tokens // block_tokens  # blocks that nobody has taken
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []  # of the step that runs
        self._decoding: list[tuple[int, int, Job]] = []  # by the step that ends them
        self._context = 0  # tokens of those that decode
        self._steps = 0
        self._jump = 0  # steps until `due`
        self._began: Nanos = Nanos(0)
        self._added = 0
        self._held: dict[int, int] = {}  # requests that hold a block of the cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks that nobody holds, to be forgotten from the front
        self._removed: list[int] = []

    def add(self, job: Job, now: Nanos) -> bool:
        """Take a job; returns whether `due` has changed."""
        self._waiting.append(job)
        if self.due is None:
            self._plan(now)
            return True
        if self._jump > 1:  # the step that runs is the last of those taken together
            each = (self.due - self._began) / self._jump
            done = min(self._jump, int((now - self._began) / each) + 1)
            self._jump, self.due = done, Nanos(self._began + round(done * each))
            return True
        return False

    def step(self) -> Told:
        """What has come at `due`; the next step begins."""
        assert self.due is not None
        now = self.due
        self.busy = Nanos(self.busy + now - self._began)
        self._steps += self._jump
        self._context += self._jump * len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            ended.append(heapq.heappop(self._decoding)[2])
        began: list[Job] = []
        stored: list[int] = []
        for job, tokens in self._chunks:
            self._compute(job, tokens, stored)
            if job.computed == job.prompt_tokens:
                self._prefilling.remove(job)
                began.append(job)
                if job.output_tokens < A_TOKEN_AND_THE_REST:
                    ended.append(job)
                else:
                    job.last_step = self._steps + job.output_tokens - 1
                    heapq.heappush(self._decoding, (job.last_step, self._order(), job))
                    self._context += job.prompt_tokens + 1
        for job in ended:
            if job.output_tokens >= A_TOKEN_AND_THE_REST:
                self._context -= job.prompt_tokens + job.output_tokens
            self._release(job)
        self._plan(now)
        removed, self._removed = self._removed, []
        return Told(began, ended, stored, removed)

    def check(self) -> None:
        """Assert that nothing is held, when nothing runs."""
        assert self.due is None
        assert not self._held
        assert self._room + len(self._idle) == self._device.kv_tokens // self._block_tokens
        assert self._context == 0

    def _plan(self, now: Nanos) -> None:
        device = self._device
        budget = device.chunk_tokens - len(self._decoding)
        self._chunks = []
        for job in self._prefilling:
            if budget > 0:
                budget -= self._take(job, budget)
        while budget > 0 and self._waiting and self._begin(self._waiting[0]):
            job = self._waiting.popleft()
            self._prefilling.append(job)
            budget -= self._take(job, budget)
        self._began = now
        running = len(self._decoding)
        if not self._chunks and not running:
            self.due = None
            return
        self._jump = 1 if self._chunks else self._decoding[0][0] - self._steps
        context = self._context + running * (self._jump - 1) / 2
        prefills = [(tokens, job.computed) for job, tokens in self._chunks]
        milliseconds = self._jump * device.latency.step_ms(prefills, running, int(context))
        self.due = Nanos(now + max(1, round(milliseconds * MILLISECOND)))

    def _take(self, job: Job, budget: int) -> int:
        tokens = min(budget, job.prompt_tokens - job.computed)
        self._chunks.append((job, tokens))
        return tokens

    def _begin(self, job: Job) -> bool:
        """Hold what the cache has, and take room for the rest, if there is any."""
        if len(self._prefilling) + len(self._decoding) >= self._device.max_running:
            return False
        hits = 0
        longest = (job.prompt_tokens - 1) // self._block_tokens  # computing the last token gives the first new one
        for key in job.chain[:longest]:
            if key not in self._held and key not in self._idle:
                break
            hits += 1
        needed = -(-(job.prompt_tokens + job.output_tokens) // self._block_tokens) - hits
        idle_hits = sum(key in self._idle for key in job.chain[:hits])
        if needed > self._room + len(self._idle) - idle_hits:
            assert self._held or self._decoding or self._prefilling, "it fits nobody"
            return False
        for key in job.chain[:hits]:
            self._idle.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        while self._room < needed:
            self._removed.append(self._idle.popitem(last=False)[0])
            self._room += 1
        self._room -= needed
        job.blocks, job.shared, job.hits = needed, hits, hits * self._block_tokens
        job.computed = job.hits
        return True

    def _compute(self, job: Job, tokens: int, stored: list[int]) -> None:
        job.computed += tokens
        self.computed_tokens += tokens
        full = min(len(job.chain), job.computed // self._block_tokens)
        for key in job.chain[job.shared : full]:
            if key in self._held:  # somebody else has computed the same meanwhile: one of the two is dropped
                self._held[key] += 1
                self._room += 1
            elif key in self._idle:
                del self._idle[key]
                self._held[key] = 1
                self._room += 1
            else:
                self._held[key] = 1
                stored.append(key)
            job.blocks -= 1
        job.shared = max(job.shared, full)

    def _release(self, job: Job) -> None:
        self._room += job.blocks
        for key in reversed(job.chain[: job.shared]):
            left = self._held[key] - 1
            if left:
                self._held[key] = left
            else:
                del self._held[key]
                self._idle[key] = None

    def _order(self) -> int:
        self._added += 1
        return self._added
