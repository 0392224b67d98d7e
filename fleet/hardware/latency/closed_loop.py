"""What a benchmark client measures at an engine: time to the first token and a token's time, at fixed concurrency.

Measurements of engines that are public were taken like that: so many clients, each sending its next prompt when it has its
answer, all starting at once, a fixed number of requests in all. What such a client sees is not a step's time:

1. In a client's turn the engine makes every other client's prefill too. With `b` running, a turn takes b prefills and one
   decode step a token; what is left after the first token, shared out among the tokens, is the time per token.
2. All prompts of the first wave come at once and wait for each other. The mean over all waves has their wait divided by the
   number of waves.
3. Who finds no room for its KV waits for a whole turn of another one.

Arithmetic only, as in `steps`; all times are seconds.
"""

from msgspec import Struct

from fleet.hardware.latency.step_model import StepModel, pairs


class BenchmarkClient(Struct, frozen=True, kw_only=True):
    """How a benchmark asked, and what lies between its clock and the engine's."""

    waves: float = 10.0  # requests in all, in units of the concurrency
    mean_length: float = 1.0  # of prompts and answers, as a share of what is written
    front: float = 0.0  # before the engine sees a request, and after it has answered
    front_token: float = 0.0  # a prompt token's share in that
    late_slots: float = 0.0  # clients that wait although there is room: engines that free a slot too late


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
    """What a client sees at an engine that mixes prefills with decoding.

    Args:
        step: Of one attention group.
        client: What it adds.
        concurrency: Requests under way at once, of the group.
        prompt_tokens: Of each, and nothing of it cached.
        answer_tokens: Of each.
        capacity_tokens: KV that the group can hold.
        budget_tokens: Most prompt tokens in one step.
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
    """What a client sees where some engines make prefills and others decode.

    Args:
        prefill: Of one attention group that makes prefills.
        decode: Of one that decodes.
        client: What it adds.
        concurrency: Requests under way at once, of all groups together.
        prefill_groups: Groups of the one kind, all workers together.
        decode_groups: Of the other.
        prompt_tokens: Of each, and nothing of it cached.
        answer_tokens: Of each.
        capacity_tokens: KV that one decoding group can hold.
        budget_tokens: Most prompt tokens in one step.
        transfer: Of one prompt's KV.
    """
    prompt, answer = client.mean_length * prompt_tokens, client.mean_length * answer_tokens
    context = prompt + 0.5 * answer
    running = _most(1.0, _least(concurrency / decode_groups, capacity_tokens / context))
    tpot = decode.seconds(0.0, 0.0, running, running * context)
    chunks = _chunks(prompt, budget_tokens)
    own = chunks * prefill.seconds(prompt / chunks, pairs(prompt, 0.0) / chunks, 0.0, 0.0)
    queued = _most(concurrency / prefill_groups, 1.0)
    full = prefill.seconds(budget_tokens, budget_tokens * 0.5 * prompt, 0.0, 0.0) * prompt / budget_tokens
    behind = _most(0.0, queued * full - own - answer * tpot)  # the prefill engines are what limits the rate
    burst = 0.5 * (queued - 1.0) * full / client.waves
    first = own + client.front + client.front_token * prompt + transfer
    return ClientMeasurement(ttft=first + burst + behind, tpot=tpot)


def _prefill(step: StepModel, prompt: float, budget: float, running: float, context: float) -> float:
    """All chunks of one prompt, each along with the decoding of the others."""
    chunks = _chunks(prompt, budget)
    return chunks * step.seconds(prompt / chunks, pairs(prompt, 0.0) / chunks, running - 1.0, (running - 1.0) * context)


def _chunks(prompt: float, budget: float) -> float:
    """As a smooth number, at least one."""
    return _most(prompt / budget, 1.0)


def _least(left: float, right: float) -> float:
    return 0.5 * (left + right - abs(left - right))


def _most(left: float, right: float) -> float:
    return 0.5 * (left + right + abs(left - right))
