"""Resumed answer: goes on with an answer that began at another router, or at this router on a connection that was lost.

Rules:

1. The known tokens are replayed: they are decoded to text again, but this text is not sent, because the client has it. The
   text of an answer does not depend on how its tokens are cut into steps. So the answer continues correctly even if it was
   cut within a character, a word or a possible stop string.
2. The router's machine continues the answer as after the loss of a worker: the known tokens become a part of the prompt. An
   answer that cannot be continued exactly is refused.
3. If the client has more tokens than this router knows, the missing tokens are generated again and dropped. This is only done
   for greedy sampling, which gives the same tokens, and only if no worker parses the answer.
4. If the client already has the last token or the stop string of the answer, nothing is generated.
5. With `Resume.from_start`, the caller of this module itself leaves out what the client has. Then nothing is dropped here: the known
   part is returned as the first part of the answer. The router needs the text of this part. So the resumption is refused if a worker
   parses the answer. It is also refused if, in the known part, text follows a tool call or reasoning follows text: the known part is
   one `Delta`, which cannot express where the kind of content changes.
"""

from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import Self

from msgspec import Struct, structs

from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.core.requests import Delta, Finish, KvPhase, Resume, Sampling
from fleet.core.work import Progress
from fleet.frontend.resume_tokens import FIELD, ResumeClaims
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.parsed_answer import EngineParsedAnswer, TemplateParsedAnswer
from fleet.router.messages import Complete

Answer = AnswerText | EngineParsedAnswer | TemplateParsedAnswer


class ResumedAnswer(Struct, kw_only=True):
    """Continues one answer: knows which part the client has, and how many tokens must be generated again."""

    resume: Resume
    claims: ResumeClaims
    is_free: bool  # True if the resumption is not charged (`resume_tokens`, rule 3)
    to_skip: int = 0  # number of tokens still to be generated again and dropped
    known: Delta | None = None  # the known part of the answer; `replay` sets it if `Resume.from_start` is true (rule 5)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The known tokens: the beginning of the answer, from the client or from the worker that kept them."""
        return self.resume.token_ids

    def check(
        self, sampling: Sampling, prompt: bytes, vocab_size: int, *, in_engine: bool, is_kept: bool, is_greedy: bool
    ) -> None:
        """Check that the resume token and the known tokens fit the request, and compute `to_skip`.

        Args:
            sampling: Sampling parameters for the engine.
            prompt: Digest of the request's model and prompt, and of the fields that decide which text the answer has.
            vocab_size: Size of the vocabulary; all token ids must be smaller.
            in_engine: Whether the worker parses the answer.
            is_kept: Whether workers have kept the tokens, because the client keeps none.
            is_greedy: Whether the client has asked for temperature 0.

        Raises:
            RequestRejected: INVALID_ARGUMENT if the request differs from the first one or its tokens are wrong; WORKER_LOST if the
                answer cannot be resumed (rules 3 and 5).
        """
        resume = self.resume
        if self.claims.prompt != prompt:
            raise invalid(
                FIELD,
                "is for another model or prompt, or for another value of stop, min_tokens, stop_token_ids, ignore_eos, skip_special_tokens"
                " or the choice of tools; send the same request as before",
            )
        if len(resume.token_ids) > sampling.max_tokens or resume.position > sampling.max_tokens:
            raise invalid("resume.token_ids", "names more tokens than max_tokens allows")
        if resume.token_ids and max(resume.token_ids) >= vocab_size:
            raise invalid("resume.token_ids", f"must be less than the size of the vocabulary, {vocab_size}")
        if in_engine and (resume.from_start or (is_kept and resume.position)):
            # It is not known which part of the parsed answer the client has.
            raise RequestRejected(
                Reason.WORKER_LOST,
                "an answer that a worker parses cannot be resumed over this API; send the request again",
            )
        self.to_skip = max(0, resume.position - len(resume.token_ids))
        if self.to_skip and (not is_greedy or in_engine):
            raise RequestRejected(
                Reason.WORKER_LOST,
                f"of the {resume.position} tokens that the client has, only {len(resume.token_ids)} are known here, and only"
                " greedy answers (temperature 0) that no worker parses can be generated again; send the request as a new one, without"
                " last-event-id or a resume token",
            )
        if resume.from_start:
            self.to_skip = 0

    def replay(self, answer: Answer) -> None:
        """Bring a new `answer` into the state after the known tokens, by adding these tokens to it.

        Raises:
            RequestRejected: WORKER_LOST; one `Delta` cannot express the order of the known parts (rule 5).
        """
        if isinstance(answer, EngineParsedAnswer):
            resume = self.resume
            answer.resume(len(resume.token_ids), resume.text, resume.reasoning, resume.calls)
        else:
            parts = _add(answer, self.token_ids)
            if self.resume.from_start:
                if not _in_order(parts):
                    raise RequestRejected(
                        Reason.WORKER_LOST,
                        "an answer with text after a tool call, or with reasoning after text, cannot be resumed over this API;"
                        " send the request again",
                    )
                self.known = Delta(
                    text="".join([each.text for each in parts]),
                    token_ids=self.token_ids,
                    reasoning="".join([each.reasoning for each in parts]),
                    calls=tuple(chain.from_iterable(each.calls for each in parts)),
                )

    def end(self, answer: Answer, sampling: Sampling) -> Finish | None:
        """Return why the answer has ended with the known tokens; None if more tokens must be generated (rule 4)."""
        known = self.token_ids
        if answer.stopped or (known and known[-1] in sampling.stop_token_ids):
            return Finish.STOP
        return Finish.LENGTH if len(known) >= sampling.max_tokens else None

    def skip(self, answer: Answer, progress: Progress) -> Progress:
        """Remove tokens that the client already has from the beginning of `progress`, and add them to `answer`.

        Return the progress with the other tokens, possibly none.
        """
        dropped = progress.token_ids[: self.to_skip]
        self.to_skip -= len(dropped)
        assert not isinstance(answer, EngineParsedAnswer)
        _add(answer, dropped)
        return structs.replace(
            progress, token_ids=progress.token_ids[len(dropped) :], logprobs=progress.logprobs[len(dropped) :]
        )


def _add(answer: AnswerText | TemplateParsedAnswer, token_ids: Sequence[int]) -> list[Delta]:
    parts: list[Delta] = []
    for token_id in token_ids:
        if answer.stopped:
            break
        if isinstance(answer, AnswerText):
            parts.append(answer.add((token_id,), ()))
        else:
            parts.append(answer.take(Progress(request_id=answer.request_id, token_ids=(token_id,))))
    return parts


def _in_order(parts: Sequence[Delta]) -> bool:
    """Return whether the parts have their reasoning first, then their text, and then their tool calls."""
    latest = 0
    for part in parts:
        kinds = [kind for kind, content in enumerate((part.reasoning, part.text, part.calls)) if content]
        if kinds:
            if kinds[0] < latest:
                return False
            latest = kinds[-1]
    return True


class EndedAnswer:
    """Replaces the router's stream if an answer needs no further tokens: yields `Complete` immediately."""

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
