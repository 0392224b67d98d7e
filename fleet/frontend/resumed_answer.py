"""Resumed answer: how an answer goes on that another router has begun, or this one on a connection that was lost.

Rules:

1. The known tokens are replayed: they become text again, which the client has and does not get twice. What an answer's
   tokens mean does not depend on how they are cut into steps, so the text goes on within a character, a word or a
   possible stop string.
2. The router's machine goes on with the known tokens as after the death of a worker: they become a part of the prompt, and
   whatever cannot be continued exactly is refused.
3. If the client has more tokens than are known here, the missing ones are generated again and dropped. Only greedy
   sampling gives the same ones.
4. An answer whose last token or stop string the client already has is not generated any further.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct, structs

from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.core.requests import Finish, KvPhase, Resume, Sampling
from fleet.core.work import Progress
from fleet.frontend.resume_tokens import FIELD, ResumeClaims
from fleet.frontend.text.answer_text import AnswerText
from fleet.frontend.text.parsed_answer import EngineParsedAnswer, TemplateParsedAnswer
from fleet.router.messages import Complete

Answer = AnswerText | EngineParsedAnswer | TemplateParsedAnswer


class ResumedAnswer(Struct, kw_only=True):
    """The part of one answer that the client has."""

    resume: Resume
    claims: ResumeClaims
    is_free: bool  # the request and its prompt were charged before
    to_skip: int = 0  # tokens that are still to be generated again and dropped

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The known tokens."""
        return self.resume.token_ids

    def check(self, sampling: Sampling, prompt: bytes, vocab_size: int, *, in_engine: bool) -> None:
        """Check what the client sent against its request.

        Args:
            sampling: The engine's sampling parameters.
            prompt: The digest of the request's model and prompt.
            vocab_size: Token ids must be smaller.
            in_engine: The worker parses the answer.

        Raises:
            RequestRejected: INVALID_ARGUMENT, or WORKER_LOST if the tokens cannot be generated again.
        """
        resume = self.resume
        if self.claims.prompt != prompt:
            raise invalid(FIELD, "is for another model or prompt; send the same request as before")
        if len(resume.token_ids) > sampling.max_tokens or resume.position > sampling.max_tokens:
            raise invalid("resume.token_ids", f"are more than max_tokens, {sampling.max_tokens}")
        if resume.token_ids and max(resume.token_ids) >= vocab_size:
            raise invalid("resume.token_ids", f"must be less than the size of the vocabulary, {vocab_size}")
        self.to_skip = max(0, resume.position - len(resume.token_ids))
        if self.to_skip and (sampling.temperature != 0 or in_engine):
            raise RequestRejected(
                Reason.WORKER_LOST,
                f"of the {resume.position} tokens that the client has, this router knows {len(resume.token_ids)}, and only"
                " greedy answers (temperature 0) that no worker parses can be generated again; send the request again",
            )

    def replay(self, answer: Answer) -> None:
        """Bring a new answer to where the known tokens end."""
        if isinstance(answer, EngineParsedAnswer):
            resume = self.resume
            answer.resume(len(resume.token_ids), resume.text, resume.reasoning, resume.calls)
        else:
            _add(answer, self.token_ids)

    def end(self, answer: Answer, sampling: Sampling) -> Finish | None:
        """Return how a replayed answer has ended; None if it goes on (rule 4)."""
        known = self.token_ids
        if answer.stopped or (known and known[-1] in sampling.stop_token_ids):
            return Finish.STOP
        return Finish.LENGTH if len(known) >= sampling.max_tokens else None

    def skip(self, answer: Answer, progress: Progress) -> Progress:
        """Drop the tokens that the client has; return the progress with the others, which may be none."""
        dropped = progress.token_ids[: self.to_skip]
        self.to_skip -= len(dropped)
        assert not isinstance(answer, EngineParsedAnswer)
        _add(answer, dropped)
        return structs.replace(
            progress, token_ids=progress.token_ids[len(dropped) :], logprobs=progress.logprobs[len(dropped) :]
        )


def _add(answer: AnswerText | TemplateParsedAnswer, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if answer.stopped:
            return
        if isinstance(answer, AnswerText):
            answer.add((token_id,), ())
        else:
            answer.take(Progress(request_id=answer.request_id, token_ids=(token_id,)))


class EndedAnswer:
    """Stands for the router's stream of an answer that needs no further tokens: it completes at once."""

    kv: tuple[KvPhase, ...] = ()
    cached_tokens = 0

    def __init__(self, request_id: RequestId, finish: Finish) -> None:
        self._complete: Complete | None = Complete(request_id=request_id, finish=finish, kv=(), cached_tokens=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Complete:
        if self._complete is None:
            raise StopAsyncIteration
        complete, self._complete = self._complete, None
        return complete
