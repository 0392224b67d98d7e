"""Scenarios of the router benchmark.

All scenarios but `prefix-sharing` send prompts that were never sent before, so that no cache of a router or worker helps. A round sends
no more requests after its number of requests or its time, whichever comes first; then it waits for the missing answers.
"""

import msgspec
from msgspec import Struct


class PrefixSharing(Struct, frozen=True, kw_only=True):
    """Conversations: prompts that begin with a shared prefix and grow from turn to turn."""

    groups: int = 64
    """Shared prefixes, such as system prompts; conversations choose among them at random."""

    opening_tokens: int = 2048
    turn_tokens: int = 256
    turns: int = 6


class RouterScenario(Struct, frozen=True, kw_only=True):
    name: str
    prompt_tokens: int
    """Length of each prompt, in tokens of the tiny model's tokenizer."""

    concurrency: int
    """Number of keep-alive connections, each with one request at a time."""

    workers: int = 2
    answer_tokens: int = 1
    gap_seconds: float = 0.0
    """Seconds between the tokens of an answer; 0: no pause."""

    requests: int = 1_000_000
    seconds: float = 1.5
    delayed_acknowledgements: bool = False
    """True if the client's system may delay TCP acknowledgements, which is the default of operating systems. A router that writes the
    head of an answer and its first event separately then waits up to 40 ms. The scenario `ttft-1` shows this wait; in the other
    scenarios it would hide all other differences."""

    sharing: PrefixSharing | None = None
    """Shared prefixes; None: every prompt is new."""

    cache_blocks: int = 0
    """Blocks of text in each worker's prefix cache; 0: workers do not read prompts."""

    prefill_seconds_a_block: float = 0.0
    """Seconds that a worker computes for each uncached block. A worker computes its requests one after the other."""


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
        # Each of the four workers can cache a quarter of all prefixes and its running conversations. If a router sends each prefix
        # to all workers, the prefixes are evicted; if it sends too much to one worker, this worker becomes a bottleneck.
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
    """Return a short version of a scenario, which shows that everything runs; its figures must not be quoted."""
    return msgspec.structs.replace(
        scenario,
        requests=min(scenario.requests, 200),
        seconds=min(scenario.seconds, 5.0),
        answer_tokens=min(scenario.answer_tokens, 16),
    )
