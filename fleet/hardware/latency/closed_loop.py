"""Closed loop: computes the TTFT and TPOT that a benchmark with a fixed number of clients measures at an engine.

Public measurements were taken in this way. A fixed number of clients start at the same time. Each client sends its next prompt
when it has received the answer to its previous prompt. The total number of requests is fixed. So the measured times differ
from step times:

1. Between the start and the end of one request, the engine also computes the prompts of all other clients. So with `b`
   running requests, a request takes the time of `b` prefills, and of one decode step for each token of its answer. The
   TPOT is the time after the first token, divided by the number of tokens.
2. A wave is one request of each client. All prompts of the first wave arrive at the same time and wait for each other.
   In the mean over all requests, this wait is divided by the number of waves.
3. If the KV cache has no room for a request, the request waits until another one has ended.

All times are in seconds. As in `step_model`, the formulas do not branch on values, so they also work on arrays.
"""

from msgspec import Struct

from fleet.hardware.latency.step_model import StepModel, pairs


class BenchmarkClient(Struct, frozen=True, kw_only=True):
    """Describes a benchmark: how it sends requests, and which times it measures outside the engine."""

    waves: float = 10.0  # number of requests, divided by the concurrency
    mean_length: float = 1.0  # mean length of prompts and answers, as a share of the stated length
    front: float = 0.0  # seconds of the TTFT outside the engine: before it gets a request, and after the first token
    front_token: float = 0.0  # seconds that each prompt token adds to `front`
    late_slots: float = 0.0  # number of clients that wait only because engines free batch places late


class ClientMeasurement(Struct, frozen=True, kw_only=True):
    ttft: float
    tpot: float


def closed_loop(
    step: StepModel,
    client: BenchmarkClient,
    *,
    concurrency: float,
    prompt_tokens: float,
    answer_tokens: float,
    capacity_tokens: float,
    budget_tokens: float,
) -> ClientMeasurement:
    """Return the TTFT and TPOT in seconds that a client measures at an aggregated engine.

    Args:
        step: Step model of one attention group (`fleet.hardware.sharding`, rule 1).
        client: The benchmark that sends the requests.
        concurrency: Number of clients whose requests go to the group.
        prompt_tokens: Length of each prompt; nothing is cached.
        answer_tokens: Length of each answer.
        capacity_tokens: Tokens of KV that the group can hold.
        budget_tokens: Maximum number of prompt tokens in one step.
    """
    prompt, answer = client.mean_length * prompt_tokens, client.mean_length * answer_tokens
    room = capacity_tokens / (prompt + 0.5 * answer)
    running = _least(concurrency, room)
    context = prompt + 0.5 * answer
    decode = step.seconds(0.0, 0.0, running, running * context)
    prefill = _prefill(step, prompt, budget_tokens, running, context) - decode * _chunks(prompt, budget_tokens)
    turn = running * prefill + answer * decode
    waiting = (concurrency - running) / running * turn + client.late_slots * turn / concurrency
    own = prefill + decode * (0.5 + _chunks(prompt, budget_tokens))
    first = own + client.front + client.front_token * prompt
    burst = 0.5 * (running - 1.0) * prefill / client.waves
    return ClientMeasurement(ttft=first + burst + waiting, tpot=_most((turn - own) / answer, decode))


def closed_loop_disaggregated(
    prefill: StepModel,
    decode: StepModel,
    client: BenchmarkClient,
    *,
    concurrency: float,
    prefill_groups: float,
    decode_groups: float,
    prompt_tokens: float,
    answer_tokens: float,
    capacity_tokens: float,
    budget_tokens: float,
    transfer: float,
) -> ClientMeasurement:
    """Return the TTFT and TPOT in seconds that a client measures with disaggregated serving.

    Args:
        prefill: Step model of one attention group that prefills (`fleet.hardware.sharding`, rule 1).
        decode: Step model of one attention group that decodes.
        client: The benchmark that sends the requests.
        concurrency: Number of clients of all groups together.
        prefill_groups: Number of attention groups of all prefill workers.
        decode_groups: Number of attention groups of all decode workers.
        prompt_tokens: Length of each prompt; nothing is cached.
        answer_tokens: Length of each answer.
        capacity_tokens: Tokens of KV that one decoding group can hold.
        budget_tokens: Maximum number of prompt tokens in one step.
        transfer: Seconds to move one prompt's KV.
    """
    prompt, answer = client.mean_length * prompt_tokens, client.mean_length * answer_tokens
    context = prompt + 0.5 * answer
    running = _most(1.0, _least(concurrency / decode_groups, capacity_tokens / context))
    tpot = decode.seconds(0.0, 0.0, running, running * context)
    chunks = _chunks(prompt, budget_tokens)
    own = chunks * prefill.seconds(prompt / chunks, pairs(prompt, 0.0) / chunks, 0.0, 0.0)
    queued = _most(concurrency / prefill_groups, 1.0)
    full = prefill.seconds(budget_tokens, budget_tokens * 0.5 * prompt, 0.0, 0.0) * prompt / budget_tokens
    # Seconds that a prompt waits because the prefill engines are the bottleneck, or 0 if they are not.
    behind = _most(0.0, queued * full - own - answer * tpot)
    burst = 0.5 * (queued - 1.0) * full / client.waves
    first = own + client.front + client.front_token * prompt + transfer
    return ClientMeasurement(ttft=first + burst + behind, tpot=tpot)


def _prefill(step: StepModel, prompt: float, budget: float, running: float, context: float) -> float:
    """Return the seconds for all chunks of a prompt, in steps that also decode for the other running requests."""
    chunks = _chunks(prompt, budget)
    return chunks * step.seconds(prompt / chunks, pairs(prompt, 0.0) / chunks, running - 1.0, (running - 1.0) * context)


def _chunks(prompt: float, budget: float) -> float:
    """Return the length of a prompt in chunks: a number of at least 1, which is not rounded to a whole number."""
    return _most(prompt / budget, 1.0)


def _least(left: float, right: float) -> float:
    return 0.5 * (left + right - abs(left - right))


def _most(left: float, right: float) -> float:
    return 0.5 * (left + right + abs(left - right))
