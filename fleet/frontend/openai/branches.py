"""Branches: the answers of one HTTP request that wants several answers, or one answer with details such as token ids.

Rules:

1. A request has one branch for each of the ``n`` (or ``best_of``) answers to each prompt. To the router, a branch is a
   request of its own; the first one has the id of the client's request.
2. The first branch of a prompt is its lead. The other branches start when the lead has its first token, so they find the
   blocks of the prompt in the cache of the lead's worker. The prompt is tokenized once, and its tokens are charged once.
3. If a branch fails, the others are cancelled, and the request fails with the error of that branch.
4. Answer `i` to prompt `p` has the index ``p * n + i`` in the list `choices`. Branch `i` has the seed of the request plus
   `i`, as in vLLM. Of ``best_of`` answers, the ``n`` with the highest mean log probability per token are returned, the best
   first.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import assert_never

import msgspec
from msgspec import Struct, structs

from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName
from fleet.core.requests import (
    TOKEN_BYTES,
    Admitted,
    CallDelta,
    Delta,
    Finished,
    GenerateRequest,
    KvPhase,
    Logprobs,
    Prompt,
    Sampling,
    TextPrompt,
    TokenBytes,
    Usage,
)
from fleet.core.system_clock import unix_seconds
from fleet.frontend.generation import Generation, PromptPace
from fleet.frontend.openai.answers import (
    DONE,
    MIN_LOGPROB,
    AnswerFormatter,
    ChoicePlace,
    CompletionFormatter,
    Json,
    count_entries,
    encode,
    fleet_object,
    usage_chunk,
    usage_object,
)
from fleet.frontend.openai.requests import Details, OpenAiRequest, most_image_bytes, numbered_request_id
from fleet.net.http.exchange import EVENT_STREAM, Exchange, rate_limit_headers
from fleet.net.status_codes import rename_field

NO_TOKEN = None
"""The first entry in a prompt's list of log probabilities, because the first token has no log probability."""


class Branch(Struct, frozen=True, kw_only=True):
    """One branch: the request to the router for one of the answers."""

    prompt: int  # index of the prompt that this branch answers
    number: int  # index among the answers to the same prompt; 0 is the lead
    request: GenerateRequest


class PromptTokens(Struct):
    """The tokens and log probabilities of a prompt, which its lead branch brings.

    Before that, both are empty. `logprobs` stays empty if the client does not request the log probabilities of the prompt.
    """

    tokens: TokenBytes = b""
    logprobs: tuple[Logprobs, ...] = ()  # one entry for each token except the first

    @property
    def ids(self) -> list[int]:
        return list(memoryview(self.tokens).cast("I"))

    def token_logprobs(self, most: int) -> list[Logprobs | None]:
        """Return one entry for each prompt token, with at most `most` alternative tokens; the first entry is None."""
        cut = [structs.replace(each, top_ids=each.top_ids[:most], top=each.top[:most]) for each in self.logprobs]
        return [NO_TOKEN, *cut]


class CollectedAnswer:
    """Collects the parts of one answer until it is complete."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.reasoning: list[str] = []
        self.calls: list[CallDelta] = []
        self.finished: Finished | None = None

    @property
    def score(self) -> float:
        """The mean log probability per token; `best_of` returns the answers with the highest score."""
        return sum(max(each.chosen, MIN_LOGPROB) for each in self.logprobs) / max(1, len(self.logprobs))


class BranchedAnswers:
    """Runs all branches of one HTTP request and sends their answers to the client."""

    def __init__(
        self,
        generation: Generation,
        parsed: OpenAiRequest,
        formatter_type: type[AnswerFormatter],
        exchange: Exchange,
        authorization: str,
    ) -> None:
        assert parsed.details is not None
        self._generation = generation
        self._parsed = parsed
        self._details: Details = parsed.details
        self._formatter_type = formatter_type
        self._exchange = exchange
        self._authorization = authorization
        self._created = int(unix_seconds())
        self._prompts = [PromptTokens() for _ in range(1 + len(self._details.more_prompts))]
        self._limits: tuple[tuple[str, str], ...] = ()
        self._model = ModelName("")
        self._answers: dict[tuple[int, int], CollectedAnswer] = {}
        self._writers: dict[tuple[int, int], ChoiceWriter] = {}

    async def serve(self) -> None:
        """Run all branches and answer the HTTP request.

        Raises:
            RequestRejected: A branch failed and all others have ended, the images cannot be fetched (`Generation.with_images`), or the
                API key is wrong or the tenant's limit too low for so many branches (`Generation.check_count`).
        """
        request, details = self._parsed.request, self._details
        field = "prompt" if details.more_prompts else "n" if details.n == details.best_of else "best_of"
        self._generation.check_count(request, self._authorization, details.best_of * len(self._prompts), field)
        if not request.remote_images:
            await self._serve_prompts()
            return
        most_bytes = most_image_bytes(details)
        async with self._generation.with_images(request, self._authorization, most_bytes) as with_images:
            self._parsed = structs.replace(self._parsed, request=with_images)
            await self._serve_prompts()

    async def _serve_prompts(self) -> None:
        prompts: Sequence[Prompt] = (self._parsed.request.prompt, *self._details.more_prompts)
        pace = PromptPace()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, prompt in enumerate(prompts):
                    await pace.before(prompt)
                    tasks.create_task(self._serve_prompt(number, prompt))
        except ExceptionGroup as group:
            raise first_error(group) from None
        if self._parsed.stream:
            self._end_stream()
            return
        content = await self._generation.format_answer(self._whole, self._entries())
        headers = (("x-request-id", self._parsed.request.id), *self._limits)
        self._exchange.respond(HTTPStatus.OK, content, headers=headers)

    async def _serve_prompt(self, number: int, prompt: Prompt) -> None:
        lead = self._branch(number, 0, prompt)
        if self._details.best_of == 1:
            await self._run(lead, None)
            return
        async with asyncio.TaskGroup() as tasks:
            began = asyncio.Event()
            tasks.create_task(self._run(lead, began))
            await began.wait()
            for other in range(1, self._details.best_of):
                tasks.create_task(self._run(self._branch(number, other, prompt), None))

    def _branch(self, prompt_number: int, number: int, prompt: Prompt) -> Branch:
        request, details = self._parsed.request, self._details
        branch_id = prompt_number * details.best_of + number
        return Branch(
            prompt=prompt_number,
            number=number,
            request=structs.replace(
                request,
                id=numbered_request_id(request.id, branch_id, self._generation.serves),
                prompt=prompt,
                sampling=self._sampling(number),
                truncate_prompt=None if number else request.truncate_prompt,
                sibling=number > 0,
                tokens=self._prompts[prompt_number].tokens if number else b"",
                leads=number == 0 and details.best_of > 1,
            ),
        )

    def _sampling(self, number: int) -> Sampling:
        sampling, details = self._parsed.request.sampling, self._details
        changes: dict[str, object] = {}
        if number and sampling.seed is not None:
            changes["seed"] = (sampling.seed + number) % 2**64
        if number and sampling.prompt_logprobs is not None:
            # Only the lead gets the log probabilities of the prompt. To get them, an engine has to compute every prompt
            # token, but the other branches shall use cached blocks.
            changes["prompt_logprobs"] = None
        if details.best_of > details.n and sampling.logprobs is None:
            changes["logprobs"] = 0
        return structs.replace(sampling, **changes) if changes else sampling

    async def _run(self, branch: Branch, began: asyncio.Event | None) -> None:
        """Serve one branch. Set the event `began` at its first token, or at its end if it has none."""
        try:
            async with aclosing(self._generation.generate(branch.request, self._authorization)) as events:
                async for event in events:
                    match event:
                        case Admitted():
                            self._admitted(branch, event)
                        case Delta():
                            if event.prompt_logprobs:
                                self._prompts[branch.prompt].logprobs = event.prompt_logprobs
                            await self._delta(branch, event)
                            if began is not None:
                                began.set()
                        case Finished():
                            await self._finished(branch, event)
                            if began is not None:
                                began.set()
                        case _:
                            assert_never(event)
        except RequestRejected as refused:
            if not self._details.more_prompts:
                raise
            name = f"prompt[{branch.prompt}]"
            raise rename_field(refused, {"text": name, "token_ids": name}) from refused

    def _admitted(self, branch: Branch, admitted: Admitted) -> None:
        self._model = admitted.model
        self._limits = rate_limit_headers(admitted.allowance)
        prompt = self._prompts[branch.prompt]
        if branch.number == 0:
            prompt.tokens = admitted.tokens
        key = branch.prompt, branch.number
        self._answers[key] = CollectedAnswer(branch)
        if self._parsed.stream:
            self._writers[key] = ChoiceWriter(self, branch)

    async def _delta(self, branch: Branch, delta: Delta) -> None:
        key = branch.prompt, branch.number
        answer = self._answers[key]
        answer.token_ids += delta.token_ids
        if not self._parsed.stream:
            answer.texts.append(delta.text)
            answer.logprobs += delta.logprobs
            answer.reasoning.append(delta.reasoning)
            answer.calls += delta.calls
            return
        write = partial(self._writers[key].delta, delta, len(answer.token_ids))
        entries = count_entries(0, len(delta.prompt_logprobs), self._parsed.request.sampling.prompt_logprobs)
        if chunk := await self._generation.format_answer(write, entries):
            await self._send(chunk)

    async def _finished(self, branch: Branch, finished: Finished) -> None:
        key = branch.prompt, branch.number
        answer = self._answers[key]
        answer.finished = finished
        if self._parsed.stream:
            await self._send(self._writers[key].end(finished, answer.token_ids))
        else:
            answer.texts.append(finished.text)

    # Methods that `ChoiceWriter` calls.

    @property
    def parsed(self) -> OpenAiRequest:
        return self._parsed

    def formatter(self, index: int, *, detailed: bool) -> AnswerFormatter:
        place = ChoicePlace(index, alone=False, detailed=detailed)
        token_text = _named_by_id if self._details.token_names else self._generation.token_text
        return self._formatter_type(self._parsed, self._model, token_text, self._created, place)

    def prompt(self, number: int) -> PromptTokens:
        return self._prompts[number]

    def prompt_text(self, number: int) -> str:
        """Return the text of a prompt for an answer with `echo`, in which the prompt comes first."""
        if self._details.token_ids:
            return ""  # as in vLLM, the answer has the prompt's token ids instead
        given = (self._parsed.request.prompt, *self._details.more_prompts)[number]
        if isinstance(given, TextPrompt) and self._parsed.request.truncate_prompt is None:
            return given.text
        return self._generation.prompt_text(self._model, self._prompts[number].tokens)

    # Sending the answers.

    async def _send(self, chunk: bytes) -> None:
        headers = (
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),
            ("x-request-id", self._parsed.request.id),
            *self._limits,
        )
        self._exchange.send(chunk, content_type=EVENT_STREAM, headers=headers)
        await self._exchange.drained()

    def _end_stream(self) -> None:
        formatter = self.formatter(0, detailed=False)
        head = formatter.head if isinstance(formatter, CompletionFormatter) else formatter.head | CHUNK
        usage = usage_chunk(self._parsed, head, self._usage())
        self._exchange.send(usage + DONE, content_type=EVENT_STREAM, last=True)

    def _entries(self) -> int:
        """Return how much work it is to format all answers, with the log probabilities of prompts (`count_entries`)."""
        sampling, details = self._parsed.request.sampling, self._details
        answers = self._answers.values()
        prompts = count_entries(0, sum(len(each.logprobs) for each in self._prompts), sampling.prompt_logprobs)
        return prompts * details.best_of + count_entries(
            sum(len(each.token_ids) for each in answers), sum(len(each.logprobs) for each in answers), sampling.logprobs
        )

    def _whole(self) -> bytes:
        """Return all answers as one object."""
        details = self._details
        choices: list[msgspec.Raw] = []
        outside: Json = {}
        kv: list[KvPhase] = []
        token_ids: list[list[int]] = []
        for index, answer in enumerate(self._best()):
            assert answer.finished is not None
            choice = self._choice(index, answer)
            prompt = self._prompts[answer.branch.prompt]
            of_prompt: Json = {}
            if details.prompt_logprobs:
                of_prompt["prompt_logprobs"] = self._prompt_logprobs(prompt)
            if details.token_ids:
                of_prompt["prompt_token_ids"] = prompt.ids
                choice["token_ids"] = answer.token_ids
            if self._formatter_type is CompletionFormatter:  # as in vLLM, each choice of a completion has `of_prompt`
                choice |= of_prompt
            else:
                outside |= of_prompt
            choices.append(msgspec.Raw(encode(choice)))  # the encoded choice takes less memory than its objects
            kv += answer.finished.kv
            token_ids.append(answer.token_ids)
        formatter = self.formatter(0, detailed=False)
        is_completion = isinstance(formatter, CompletionFormatter)
        return encode(
            {
                **formatter.head,
                "object": "text_completion" if is_completion else "chat.completion",
                "choices": choices,
                "usage": usage_object(self._usage()),
                **outside,
                "fleet": fleet_object(self._parsed, kv, token_ids if len(token_ids) > 1 else token_ids[0]),
            }
        )

    def _choice(self, index: int, answer: CollectedAnswer) -> Json:
        assert answer.finished is not None
        text, token_ids = "".join(answer.texts), answer.token_ids
        logprobs: list[Logprobs | None] = list(answer.logprobs)
        wanted = self._parsed.request.sampling.logprobs
        if self._details.echo:
            prompt = self._prompts[answer.branch.prompt]
            text = self.prompt_text(answer.branch.prompt) + text
            if wanted is not None:
                token_ids, logprobs = [*prompt.ids, *token_ids], [*prompt.token_logprobs(wanted), *logprobs]
        formatter = self.formatter(index, detailed=False)
        reasoning = "".join(answer.reasoning)
        return formatter.choice(text, token_ids, logprobs, answer.finished, reasoning, answer.calls)

    def _best(self) -> Iterator[CollectedAnswer]:
        """Yield the answers to return, in the order of the list `choices`."""
        details = self._details
        for prompt in range(len(self._prompts)):
            answers = [self._answers[prompt, number] for number in range(details.best_of)]
            if details.best_of > details.n:
                answers.sort(key=lambda answer: -answer.score)
            yield from answers[: details.n]

    def _usage(self) -> Usage:
        """Return the usage of all branches together; the tokens of a prompt are counted once, in its lead."""
        ends = [answer.finished.usage for answer in self._answers.values() if answer.finished is not None]
        return Usage(
            prompt_tokens=sum(each.prompt_tokens for each in ends),
            completion_tokens=sum(each.completion_tokens for each in ends),
            cached_tokens=sum(each.cached_tokens for each in ends),
            reasoning_tokens=sum(each.reasoning_tokens for each in ends),
        )

    def _prompt_logprobs(self, prompt: PromptTokens) -> list[Mapping[str, Json] | None]:
        """Return vLLM's field `prompt_logprobs`: for each prompt token a mapping by token id, for the first token null."""
        prompt_logprobs: list[Mapping[str, Json] | None] = [None]
        for token_id, token in zip(prompt.ids[1:], prompt.logprobs, strict=True):
            entries = {
                other: (logprob, rank)
                for rank, (other, logprob) in enumerate(zip(token.top_ids, token.top, strict=True), start=1)
            }
            # The rank of a prompt token that is not among the most likely tokens is not known.
            entries.setdefault(token_id, (token.chosen, None))  # type: ignore[arg-type]  # None is the unknown rank
            prompt_logprobs.append(
                {
                    str(other): {
                        "logprob": max(logprob, MIN_LOGPROB),
                        "rank": rank,
                        "decoded_token": self._generation.token_text(self._model, other),
                    }
                    for other, (logprob, rank) in entries.items()
                }
            )
        return prompt_logprobs


CHUNK: Json = {"object": "chat.completion.chunk"}


class ChoiceWriter:
    """Writes the events of one choice of a stream."""

    def __init__(self, answers: BranchedAnswers, branch: Branch) -> None:
        details = answers.parsed.details
        assert details is not None
        self._answers = answers
        self._branch = branch
        self._details = details
        self._detailed = details.token_ids or details.continuous_usage
        self._formatter = answers.formatter(branch.prompt * details.n + branch.number, detailed=self._detailed)
        self._echoes = details.echo
        self._tells_prompt = details.token_ids

    def delta(self, delta: Delta, num_tokens: int) -> bytes:
        """Return the events of new tokens; empty if there is nothing to send. `num_tokens` is the length of the answer so far."""
        if not (delta.text or delta.token_ids or delta.prompt_logprobs or delta.reasoning or delta.calls):
            return b""  # the delta is empty: it only reports that the answer has begun
        before = self._begin()
        if self._detailed:
            self._annotate(list(delta.token_ids), num_tokens)
        return before + self._formatter.chunk(delta)

    def end(self, finished: Finished, token_ids: Sequence[int]) -> bytes:
        before = self._begin()
        if self._detailed:
            self._annotate([], len(token_ids))
        return before + self._formatter.last_chunks(finished, token_ids)

    def _begin(self) -> bytes:
        """Return the event that repeats the prompt before the answer; empty without `echo`, or if the event was sent before."""
        if not self._echoes:
            return b""
        self._echoes = False
        number = self._branch.prompt
        prompt, wanted = self._answers.prompt(number), self._answers.parsed.request.sampling.logprobs
        assert isinstance(self._formatter, CompletionFormatter), "chats have no echo"
        if self._detailed:
            self._annotate([], 0)
        logprobs = [] if wanted is None else prompt.token_logprobs(wanted)
        return self._formatter.echo(self._answers.prompt_text(number), prompt.ids if logprobs else (), logprobs)

    def _annotate(self, token_ids: list[int], num_tokens: int) -> None:
        prompt = self._answers.prompt(self._branch.prompt)
        inside: Json = {}
        outside: Json = {}
        if self._details.token_ids:
            inside["token_ids"] = token_ids
        if self._tells_prompt:
            self._tells_prompt = False
            place = inside if isinstance(self._formatter, CompletionFormatter) else outside
            place["prompt_token_ids"] = prompt.ids
        if self._details.continuous_usage:
            size = len(prompt.tokens) // TOKEN_BYTES
            outside["usage"] = {
                "prompt_tokens": size,
                "completion_tokens": num_tokens,
                "total_tokens": size + num_tokens,
            }
        self._formatter.annotate(inside, outside)


def _named_by_id(model: ModelName, token_id: int) -> str:  # noqa: ARG001 - implements `TokenText`
    return f"token_id:{token_id}"


def first_error(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the error to raise for a group: the first rejection, or the first error if the group has no rejection.

    A group without a rejection indicates a bug.
    """
    errors = list(_leaves(group))
    return next((each for each in errors if isinstance(each, RequestRejected)), errors[0])


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    return chain.from_iterable(
        _leaves(each) if isinstance(each, BaseExceptionGroup) else (each,) for each in group.exceptions
    )
