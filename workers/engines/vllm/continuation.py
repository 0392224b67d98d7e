"""Continuation: lets vLLM continue an answer of another engine as if vLLM had generated the earlier tokens itself.

Rules:

1. As the prompt, vLLM gets only the client's prompt. The earlier tokens of the answer are in the sampling parameters
   (`workers.engines.vllm.requests.GENERATED`). The limits in the sampling parameters, such as `max_tokens`, apply to the
   whole answer.
   Requests without earlier tokens are not changed.
2. In the scheduler's process, the earlier tokens become output of the request before vLLM schedules the request for the
   first time, as after a preemption (`replay`). The limits then count these tokens. A grammar accepts the tokens one by
   one, because the reasoning may end at any of them.
3. In the model's process, vLLM's model runner V2 gets all tokens of a request whenever the request is scheduled anew,
   so penalties and forbidden sequences include the earlier tokens. Its random numbers depend only on the seed and the
   position. The runner V1 keeps a record of each request, and this module adds the earlier tokens to the record. If the
   record has a random generator, the generator has to draw once for each earlier token.
4. V1 also draws a number after each chunk of a long prompt, and then takes the draw back. torch's generators for CPUs
   cannot take a draw back, so one request with a seed would end the engine. This module replaces these generators by
   ones that can (`RewindableGenerator`).
5. vLLM has no extension points for grammars and for the records of V1. Fleet's connector therefore wraps two of vLLM's
   methods when it is made in the process that calls them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_input_batch import InputBatch

from workers.engines.vllm.requests import GENERATED

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


def _generated(params: "SamplingParams | None") -> Sequence[int]:
    return () if params is None or not params.extra_args else params.extra_args.get(GENERATED, ())


# The following functions run in the process of the scheduler.


def replay(request: "Request") -> None:
    """Add the earlier tokens of the answer to a new request.

    If the request has a grammar, `replay_with_grammar` adds them later.
    """
    if not (tokens := _generated(request.sampling_params)):
        return
    request.prefill_stats = None  # dropped, because vLLM asserts that no more tokens are cached than the prompt has
    if not request.use_structured_output:
        request.append_output_token_ids(list(tokens))


def replay_with_grammar(scheduler: Any, request: "Request") -> bool:
    """Add those earlier tokens of the answer that the request does not have yet, once its grammar has been compiled.

    Returns:
        True if the request may go on. If the grammar refuses the tokens, the scheduler ends the request with an error.
    """
    for token in _generated(request.sampling_params)[request.num_output_tokens :]:
        request.append_output_token_ids(token)
        if not scheduler.structured_output_manager.accept_tokens(request, [token]):
            scheduler.grammar_compile_error_reqs.add(request.request_id)
            return False
    return True


def install_in_scheduler() -> None:
    """Wrap a method of this process's vLLM scheduler, so that it adds earlier tokens once a grammar is compiled."""
    handle = Scheduler._handle_blocked_waiting_request  # noqa: SLF001 - vLLM has no public way (rule 5)
    if hasattr(handle, "replays"):
        return

    def _handle_blocked_waiting_request(scheduler: Any, request: "Request") -> bool:
        return handle(scheduler, request) and replay_with_grammar(scheduler, request)

    _handle_blocked_waiting_request.replays = True  # type: ignore[attr-defined]
    Scheduler._handle_blocked_waiting_request = _handle_blocked_waiting_request  # noqa: SLF001 - vLLM has no public way (rule 5)


# The following functions run in the process of the model.


def install_in_batches(config: "VllmConfig") -> None:
    """Wrap a method of vLLM's batches in this process, so that they include the earlier tokens of answers.

    Only model runner V1 has such batches.
    """
    add = InputBatch.add_request
    if hasattr(add, "replays"):
        return
    noise = torch.float64 if config.model_config.use_fp64_gumbel else torch.float32

    def add_request(batch: Any, request: "CachedRequestState") -> int:
        if not request.output_token_ids:
            request.output_token_ids.extend(_generated(request.sampling_params))
            if request.generator is not None:
                request.generator = _advanced(request, batch.vocab_size, noise)
        index: int = add(batch, request)
        return index

    add_request.replays = True  # type: ignore[attr-defined]
    InputBatch.add_request = add_request


def _advanced(request: "CachedRequestState", vocab_size: int, noise: torch.dtype) -> torch.Generator:
    """Return the random generator of a request with a seed, after it has drawn for the earlier tokens of the answer."""
    generator: torch.Generator = request.generator
    if generator.device.type == "cpu":
        return RewindableGenerator(generator.initial_seed(), request.output_token_ids, vocab_size, noise)
    draw(generator, len(request.output_token_ids), vocab_size=vocab_size, noise=noise)
    return generator


class RewindableGenerator(torch.Generator):  # type: ignore[misc]  # torch's types are not read
    """A random generator for CPUs that can take back its last draw, by the methods that vLLM uses on accelerators."""

    def __new__(cls, *_: object) -> Self:
        made: Self = super().__new__(cls)
        return made

    def __init__(self, seed: int, answer: Sequence[int], vocab_size: int, noise: torch.dtype) -> None:
        """Begin after one draw for each token of `answer`.

        The generator keeps the list `answer`, to which vLLM later appends the tokens of the request. So `set_offset` always
        returns to the position after the last token.
        """
        super().__init__()
        self._seed, self._answer, self._vocab_size, self._noise = seed, answer, vocab_size, noise
        self.set_offset(0)

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002 - vLLM only ever passes the offset before the last draw
        self.manual_seed(self._seed)
        draw(self, len(self._answer), vocab_size=self._vocab_size, noise=self._noise)


def draw(generator: torch.Generator, times: int, *, vocab_size: int, noise: torch.dtype) -> None:
    """Advance a request's random generator as far as vLLM 0.32 does to sample a number of tokens.

    The rules are those of vLLM's `v1/sample/ops/topk_topp_sampler.py`.

    On CPUs, the sampler draws one integer for a token, from which its kernel computes the noise. On accelerators, and
    on CPUs with 64-bit noise, it draws one random number for each token of the vocabulary (a row). An accelerator's
    generator is a counter, and each row advances it equally.

    Args:
        generator: The generator of a seeded request.
        times: The number of tokens that were sampled.
        vocab_size: The number of tokens in the vocabulary, which is the length of a row.
        noise: The data type of the random numbers by which vLLM samples (`use_fp64_gumbel`).
    """
    if generator.device.type == "cpu" and noise is torch.float32:
        torch.randint(0, 2**31, (times,), generator=generator, dtype=torch.long)
        return
    row = torch.empty(vocab_size, dtype=noise, device=generator.device)
    if generator.device.type != "cuda":
        for _ in range(times):
            row.exponential_(generator=generator)
        return
    before = generator.get_offset()
    row.exponential_(generator=generator)
    generator.set_offset(before + times * (generator.get_offset() - before))
