"""What the routers are given to do.

Every scenario but one sends prompts that were never sent before, so that no cache of a router or worker flatters anybody.
A round ends with its requests or with its seconds, whichever comes first; requests on their way are then waited for.
"""

import msgspec
from msgspec import Struct


class PrefixSharing(Struct, frozen=True, kw_only=True):
    """Conversations: prompts that begin with what many have in common, and grow from turn to turn."""

    groups: int = 64
    """Openings, a system prompt say; conversations choose among them at random."""

    opening_tokens: int = 2048
    turn_tokens: int = 256
    turns: int = 6


class RouterScenario(Struct, frozen=True, kw_only=True):
    name: str
    prompt_tokens: int
    """As the tiny model's tokenizer counts them."""

    concurrency: int
    """Keep-alive connections, each with one request at a time."""

    workers: int = 2
    answer_tokens: int = 1
    gap_seconds: float = 0.0
    """Between the tokens of an answer."""

    requests: int = 1_000_000
    seconds: float = 1.5
    delayed_acknowledgements: bool = False
    """Whether the client's system may put TCP's acknowledgements off, as it does unless told otherwise. A router that writes the head of an
    answer apart from its first event then waits up to 40 ms, idly: that is told by the scenario of the latency, and would
    leave nothing to measure in the others."""

    sharing: PrefixSharing | None = None
    """None: every prompt is new."""

    cache_blocks: int = 0
    """Blocks of text that each worker remembers; 0: it does not look at prompts at all."""

    prefill_seconds_a_block: float = 0.0
    """How long a worker computes for each block that it does not remember, one request after the other."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        RouterScenario(name="prompt-128", prompt_tokens=128, concurrency=32),
        RouterScenario(name="prompt-2k", prompt_tokens=2048, concurrency=32),
        RouterScenario(name="prompt-16k", prompt_tokens=16_384, concurrency=16, seconds=2.0),
        RouterScenario(
            name="streams-64",
            prompt_tokens=128,
            concurrency=64,
            answer_tokens=256,
            gap_seconds=0.005,
            requests=64,
            seconds=30,
        ),
        RouterScenario(name="ttft-1", prompt_tokens=128, concurrency=1, seconds=1.0, delayed_acknowledgements=True),
        # Four workers remember a quarter of all openings each, and the conversations that run: whoever spreads openings
        # over all workers loses them, and whoever sends too much to one makes it the busiest.
        RouterScenario(
            name="prefix-sharing",
            prompt_tokens=0,
            concurrency=32,
            workers=4,
            requests=2000,
            seconds=60,
            sharing=PrefixSharing(),
            cache_blocks=1024,
            prefill_seconds_a_block=0.000_2,
        ),
        RouterScenario(name="memory", prompt_tokens=16_384, concurrency=16, requests=5000, seconds=120),
    )
}


def quick(scenario: RouterScenario) -> RouterScenario:
    """The same in a fraction of the time, for seeing that everything runs; too short for figures to quote."""
    return msgspec.structs.replace(
        scenario,
        requests=min(scenario.requests, 200),
        seconds=min(scenario.seconds, 5.0),
        answer_tokens=min(scenario.answer_tokens, 16),
    )
