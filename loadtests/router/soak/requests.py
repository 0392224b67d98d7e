"""Requests of a soak test, with their expected answers."""

import random
from collections.abc import Iterator

from msgspec import Struct

from fleet.client.requests import Options
from fleet.core.requests import TOKEN_BYTES, Sampling
from workers.engines.simulated.answer_oracle import AnswerOracle

WORDS = range(64, 4000)  # token ids of which prompts are made; none of them is a special token
OPENINGS = 24
OPENING_TOKENS = (64, 768)
OWN_TOKENS = (8, 320)
ANSWER_TOKENS = (8, 40)
SESSIONS = 200
GREEDY = 0.7  # share of all requests that decode greedily
SAMPLED = 0.15  # share of all requests that sample without a seed; the rest has a seed
LEAVES = 0.03  # share of clients that cancel in the middle of their answer


class SoakRequest(Struct, frozen=True, kw_only=True):
    """One request with its expected answer."""

    prompt: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...]
    over_http: bool
    session: str
    leaves_after: int | None = None  # number of tokens after which the client cancels; None: it does not
    options: Options = {}  # more options of the gRPC client


def soak_requests(chance: random.Random, oracle: AnswerOracle) -> Iterator[SoakRequest]:
    """Yield requests without end, for HTTP and gRPC. Each prompt is one of `OPENINGS` shared prefixes and random tokens after it."""
    openings = [_some(chance, OPENING_TOKENS) for _ in range(OPENINGS)]
    while True:
        prompt = chance.choice(openings) + _some(chance, OWN_TOKENS)
        length = chance.randint(*ANSWER_TOKENS)
        sampling = _sampling(chance, length)
        yield SoakRequest(
            prompt=prompt,
            sampling=sampling,
            expected=oracle.answer(b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in prompt), sampling),
            over_http=chance.random() < 0.5,
            session=f"s{chance.randrange(SESSIONS)}" if chance.random() < 0.3 else "",
            leaves_after=chance.randrange(1, length) if chance.random() < LEAVES else None,
        )


def _some(chance: random.Random, tokens: tuple[int, int]) -> tuple[int, ...]:
    return tuple(chance.choice(WORDS) for _ in range(chance.randint(*tokens)))


def _sampling(chance: random.Random, length: int) -> Sampling:
    kind = chance.random()
    if kind < GREEDY:
        return Sampling(max_tokens=length, temperature=0.0, ignore_eos=True)
    if kind < GREEDY + SAMPLED:
        # 32-bit floats represent these numbers exactly. The worker gets them as 32-bit floats, and the answer depends on every bit.
        return Sampling(max_tokens=length, temperature=0.75, top_p=0.875, ignore_eos=True)
    return Sampling(max_tokens=length, temperature=0.75, seed=chance.randrange(1 << 31), ignore_eos=True)
