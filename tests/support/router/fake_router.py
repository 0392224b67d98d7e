"""Fake router server whose answers the test writes; it passes tests/contract/router/test_router.py."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from msgspec import structs

from fleet.core.clock import Nanos
from fleet.core.demand_reports import ModelDemand, SampledRequest, WorkerLoad
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, KvPhase, Logprobs, ModelCard
from fleet.core.roles import Phase
from fleet.core.work import ParsedDelta, Progress
from fleet.router.messages import Arrived, Complete, StartedOver
from fleet.router.placement.decision import Decision
from fleet.router.server import AnswerKeyChanged
from fleet.router.settings.router import Thresholds
from fleet.router.state.snapshot import Explanation, PoolSnapshot, RemotePrefillSnapshot, RouterCounters, RouterSnapshot
from tests.support.builders import BLOCK_TOKENS, MODEL, a_kv_report
from tests.support.waiting import pace, turns


def a_model_card(**fields: object) -> ModelCard:
    defaults = {"name": MODEL, "max_model_len": 4096, "block_tokens": BLOCK_TOKENS, "workers": 1}
    return ModelCard(**{**defaults, **fields})  # type: ignore[arg-type]


class FakeRouter:
    """Gives every request the same answer, `step` tokens at a time."""

    def __init__(
        self,
        answer: Sequence[int] = (),
        *,
        cards: Sequence[ModelCard] = (a_model_card(),),
        step: int = 1,
        image_tokens: int = 0,
    ) -> None:
        self.answer = list(answer)
        self.cards = tuple(cards)
        self.step = step
        self.image_tokens = image_tokens  # number of tokens by which images make each prompt longer
        self.logprobs: Sequence[Logprobs] = ()  # one for each token of the answer
        # Sent with the first tokens, if the request asks for them; empty: every token of the prompt gets the same value.
        self.prompt_logprobs: Sequence[Logprobs] = ()
        self.parsed: Sequence[ParsedDelta] = ()  # one for each step
        self.refuse: RequestRejected | None = None  # raised when the stream is opened
        self.break_after: int | None = None  # number of steps after which the stream fails with WORKER_LOST
        self.breaks: set[str] = set()  # ids of the requests that `break_after` concerns; empty: all requests
        self.in_turn: Sequence[tuple[Sequence[int], Sequence[Logprobs]]] = ()  # one answer for each request, in order
        self.start_over_after: int | None = None  # number of steps after which the stream starts over, only once
        self.bug: Exception | None = None  # raised by the stream's iterator
        # Number of steps after which the attempt fails and another worker continues the answer.
        self.retry_after: int | None = None
        self.searches = 0  # number of searches for kept tokens
        self.search_turns = 0  # turns of the event loop that a search for kept tokens takes
        self.kept: dict[int, list[int]] = {}  # the tokens that workers keep, by the answer's key
        self.hold_after: int | None = None  # number of steps after which the stream waits for `release`
        self.release = asyncio.Event()
        self.pause_seconds = 0.0  # pause between two steps
        self.cached_blocks = 0  # number of cached blocks of each prompt
        self.refused = 0
        self.submitted: list[Arrived] = []
        self.completed: list[RequestId] = []
        self.cancelled: list[RequestId] = []
        self.explanations: dict[RequestId, Explanation] = {}
        self.decided: dict[RequestId, tuple[Decision, ...]] = {}
        self.queued_for: float | None = None  # seconds
        self.in_force = Thresholds()
        self.measured = RemotePrefillSnapshot(learned=False, handoffs=0, handoff_seconds=0.0, workers=())
        self.changed = asyncio.Event()
        self.steps_taken = 0
        self.demanded: tuple[ModelDemand, ...] = ()

    async def tokens(self, key: int, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that workers keep under an answer key, as `AnswerSearch` does; empty if none are kept."""
        self.searches += 1
        await turns(self.search_turns)
        return tuple(self.kept.get(key, ())[:most])

    def models(self) -> tuple[ModelCard, ...]:
        return self.cards

    def status(self) -> RouterSnapshot:
        return RouterSnapshot(
            pools=tuple(PoolSnapshot(model=card.name, role="both", workers=()) for card in self.cards),  # type: ignore[arg-type]
            stores=(),
            active=len(self.submitted) - len(self.completed) - len(self.cancelled),
            queued=0,
            index_blocks=0,
            index_overflowed=0,
            counters=RouterCounters(completed=len(self.completed)),
        )

    def cache_seconds(self) -> dict[WorkerId, float]:
        return {}

    def explain(self, request_id: RequestId) -> Explanation | None:
        return self.explanations.get(request_id)

    def decisions(self, request_id: RequestId) -> tuple[Decision, ...]:
        return self.decided.get(request_id, ())

    def queue_seconds(self, request_id: RequestId) -> float | None:
        return self.queued_for

    def fingerprint(self, request_id: RequestId) -> str:
        return "weights" if self.submitted else ""

    def demand(self) -> tuple[Nanos, tuple[ModelDemand, ...], tuple[WorkerLoad, ...]]:
        return Nanos(0), self.demanded, ()

    def recent_requests(self, after: int) -> tuple[int, tuple[SampledRequest, ...]]:
        return after, ()

    def turned_away(self, model: ModelName) -> None:
        self.demanded = (*self.demanded, ModelDemand(model=model, arrivals=1, refused=1))

    def thresholds(self) -> Thresholds:
        return self.in_force

    def tune(self, thresholds: Thresholds) -> None:
        self.in_force = thresholds

    def remote_prefill(self) -> RemotePrefillSnapshot:
        return self.measured

    def submit(self, arrived: Arrived) -> "FakeStream":
        return FakeStream(self, arrived)

    async def until(self, what: object, count: int = 1) -> None:
        """Wait until `what`, a collection of this router such as `submitted`, has at least `count` entries."""
        async with asyncio.timeout(60):
            while len(what) < count:  # type: ignore[arg-type]
                self.changed.clear()
                await self.changed.wait()


class FakeStream:
    def __init__(self, router: FakeRouter, arrived: Arrived) -> None:
        self._router = router
        self._arrived = arrived
        self._answer: Sequence[int] = router.answer
        self._logprobs = router.logprobs
        self._sent = len(arrived.answered)
        self._steps = 0
        self._finish: Finish | None = None
        self._complete = False
        self._started_over = False
        self.kv: tuple[KvPhase, ...] = ()
        self.cached_tokens = 0
        self._answer_key = arrived.answer_key

    async def __aenter__(self) -> Self:
        if self._router.refuse is not None:
            self._router.refused += 1
            raise self._router.refuse
        if self._router.in_turn:
            answer, self._logprobs = self._router.in_turn[len(self._router.submitted) % len(self._router.in_turn)]
            self._answer = list(answer)
        self._router.submitted.append(self._arrived)
        self._router.changed.set()
        if self._answer_key:
            self._router.kept[self._answer_key] = list(self._arrived.answered)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._router.completed if self._complete else self._router.cancelled
        ended.append(self._arrived.request_id)
        self._router.changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress | StartedOver | AnswerKeyChanged | Complete:
        router = self._router
        if self._complete:
            raise StopAsyncIteration
        if self._finish is not None:
            self._complete = True
            return Complete(
                request_id=self._arrived.request_id,
                finish=self._finish,
                kv=self.kv,
                cached_tokens=self.cached_tokens,
            )
        if router.bug is not None:
            raise router.bug
        if self._steps == router.start_over_after and not self._started_over:
            self._started_over, self._sent = True, 0
            return StartedOver(request_id=self._arrived.request_id)
        if self._steps == router.retry_after and self._answer_key == self._arrived.answer_key != 0:
            known = router.kept[self._answer_key]
            self._answer_key += 1
            router.kept[self._answer_key] = known[:]
            known += [0] * 100  # the lost worker has generated more tokens, which nobody received
            return AnswerKeyChanged(self._answer_key)
        if self._steps == router.break_after and (not router.breaks or self._arrived.request_id in router.breaks):
            raise RequestRejected(Reason.WORKER_LOST, "its worker is gone", retry_after_ms=1500)
        if self._steps == router.hold_after:
            await router.release.wait()
        await pace(router.pause_seconds, "the worker makes a step in this time")
        self._steps += 1
        router.steps_taken += 1
        return self._next()

    def _next(self) -> Progress:
        router, sampling = self._router, self._arrived.sampling
        report = a_kv_report(len(self._arrived.tokens) // TOKEN_BYTES, cached_blocks=router.cached_blocks)
        if router.image_tokens:
            report = structs.replace(report, image_tokens=router.image_tokens)
        self.kv = (KvPhase(phase=Phase.AGGREGATED, worker_id="w1", report=report),)
        self.cached_tokens = report.cached_tokens
        end = min(self._sent + router.step, sampling.max_tokens, len(self._answer))
        tokens = self._answer[self._sent : end]
        for index, token in enumerate(tokens):
            if token in sampling.stop_token_ids and self._sent + index + 1 >= sampling.min_tokens:
                tokens = tokens[: index + 1]
                self._finish = Finish.STOP
                break
        logprobs = self._logprobs[self._sent : self._sent + len(tokens)]
        if not self._logprobs and sampling.logprobs is not None:
            logprobs = [Logprobs(-1.0)] * len(tokens)
        prompt_logprobs: Sequence[Logprobs] = ()
        if not self._sent and sampling.prompt_logprobs is not None:
            alike = [Logprobs(-1.0)] * (len(self._arrived.tokens) // TOKEN_BYTES - 1)
            prompt_logprobs = router.prompt_logprobs or alike
        self._sent += len(tokens)
        if self._answer_key:
            router.kept[self._answer_key] += tokens
        if self._finish is None and self._sent >= min(sampling.max_tokens, len(self._answer)):
            self._finish = Finish.LENGTH
        return Progress(
            request_id=self._arrived.request_id,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
            parsed=router.parsed[self._steps - 1] if router.parsed else None,
        )
