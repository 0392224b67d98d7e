"""Continuation of answers inside vLLM, with vLLM's own requests and samplers but without an engine."""

import warnings
from types import SimpleNamespace

import pytest

from fleet.core.requests import Choice, Sampling
from fleet.core.work import Start
from tests.support.workers.engine_driver import an_attempt, fresh_prompt
from workers.engines.vllm.requests import GENERATED, replayed_tokens, sampling_params, token_ids

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm._custom_ops")  # loads the kernels of the sampler
    from vllm.v1.request import Request
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from workers.engines.vllm import continuation

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

VOCABULARY = 500
PROMPT_TOKENS, BEGUN = 12, 3


def begun(**fields) -> Start:
    """Return the continuation of an answer that has three tokens."""
    sampling = Sampling(**{"max_tokens": 5, "frequency_penalty": 0.5, **fields})
    return an_attempt(fresh_prompt(PROMPT_TOKENS + BEGUN), sampling=sampling, generated_tokens=BEGUN)


def a_request(start: Start) -> Request:
    """Return what vLLM's engine makes of an attempt."""
    return Request("r", token_ids(start)[:-BEGUN], sampling_params(start, {}), None)


def test_limits_are_those_of_the_whole_answer():
    start = begun(min_tokens=2, max_tokens=5)

    params = sampling_params(start, {})

    assert (params.min_tokens, params.max_tokens) == (5, 8)
    assert params.extra_args == {GENERATED: token_ids(start)[-BEGUN:]}
    assert sampling_params(begun(min_tokens=0), {}).min_tokens == 0


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0, "seed": 4}, {"logprobs": 2}])
def test_begun_answer_without_state_is_a_part_of_the_prompt(fields):
    start = begun(frequency_penalty=0.0, **fields)

    params = sampling_params(start, {})

    assert replayed_tokens(start) == 0
    assert (params.max_tokens, params.extra_args) == (5, None)


def test_replayed_tokens_are_output_of_the_request():
    start = begun()
    request = a_request(start)

    continuation.replay(request)

    assert list(request.output_token_ids) == token_ids(start)[-BEGUN:]
    assert list(request.all_token_ids) == token_ids(start)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (PROMPT_TOKENS, BEGUN)


def test_other_requests_stay_as_they_are():
    start = an_attempt(fresh_prompt(PROMPT_TOKENS), sampling=Sampling(seed=3))
    request = Request("r", token_ids(start), sampling_params(start, {}), None)
    stats = request.prefill_stats

    continuation.replay(request)

    assert (request.num_output_tokens, request.prefill_stats) == (0, stats)


class Grammars:
    """Records what a grammar is given, and the tokens of the request at that time."""

    def __init__(self, refuses: int | None = None):
        self.accepted: list[tuple[list[int], int]] = []
        self.refuses = refuses

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        self.accepted.append((tokens, request.num_output_tokens))
        return len(self.accepted) != self.refuses


def replayed(request: Request, grammars: Grammars) -> tuple[bool, set[str]]:
    """Let a scheduler with these grammars replay a request; return whether it goes on, and what has failed."""
    scheduler = SimpleNamespace(structured_output_manager=grammars, grammar_compile_error_reqs=set())
    return continuation.replay_with_grammar(scheduler, request), scheduler.grammar_compile_error_reqs


def test_grammar_accepts_the_begun_answer_token_by_token():
    start = begun(form=Choice(("a", "b")))
    request, grammars = a_request(start), Grammars()
    continuation.replay(request)
    assert request.num_output_tokens == 0, "the grammar is not compiled yet"

    assert replayed(request, grammars) == (True, set())

    assert grammars.accepted == [([token], number) for number, token in enumerate(token_ids(start)[-BEGUN:], 1)]
    assert list(request.all_token_ids) == token_ids(start)
    assert replayed(request, grammars) == (True, set())
    assert len(grammars.accepted) == BEGUN, "once is enough"


def test_answer_that_the_grammar_refuses_ends_with_an_error():
    request = a_request(begun(form=Choice(("a", "b"))))
    continuation.replay(request)

    assert replayed(request, Grammars(refuses=2)) == (False, {"r"})


@pytest.mark.parametrize("noise", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [1, 2, 37])
def test_generator_is_advanced_as_the_sampler_does(noise, times):
    sampler = TopKTopPSampler(use_fp64_gumbel=noise is torch.float64)
    sampled, advanced = torch.Generator(), torch.Generator()
    for generator in (sampled, advanced):
        generator.manual_seed(11)
    for _ in range(times):
        sampler(torch.zeros(1, VOCABULARY), {0: sampled}, None, None)

    continuation.draw(advanced, times, vocab_size=VOCABULARY, noise=noise)

    assert torch.equal(advanced.get_state(), sampled.get_state())


@pytest.mark.parametrize("noise", [torch.float32, torch.float64])
def test_draw_for_a_part_of_a_prompt_is_taken_back(noise):
    sampler = TopKTopPSampler(use_fp64_gumbel=noise is torch.float64)
    answer = [5, 6]
    plain, rewound = [continuation.RewindableGenerator(11, answer, VOCABULARY, noise) for _ in range(2)]
    for _ in range(3):
        sampler(torch.zeros(1, VOCABULARY), {0: rewound}, None, None)
        rewound.set_offset(rewound.get_offset() - 4)  # as vLLM does it

    assert torch.equal(rewound.get_state(), plain.get_state())

    sampler(torch.zeros(1, VOCABULARY), {0: plain}, None, None)
    answer.append(7)
    assert torch.equal(continuation.RewindableGenerator(11, answer, VOCABULARY, noise).get_state(), plain.get_state())
