"""What clients ask for, and what they have to get."""

import random
from collections.abc import Iterator

from msgspec import Struct

from fleet.core.requests import TOKEN_BYTES, Sampling
from loadtests.router.soak.answers import AnswerOracle

WORDS = range(64, 4000)  # token ids of prompts: ordinary ones
OPENINGS = 24
OPENING_TOKENS = (64, 768)
OWN_TOKENS = (8, 320)
ANSWER_TOKENS = (8, 40)
SESSIONS = 200
GREEDY = 0.7  # of all wishes
SAMPLED = 0.15  # the rest draws by a seed, whose state no other worker has
LEAVES = 0.03  # of all clients, in the middle of their answer


class SoakRequest(Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...]
    over_http: bool
    session: str
    leaves_after: int | None  # tokens; None: the client stays

    @property
    def survives(self) -> bool:
        """Whether an answer that has begun goes on when its worker is lost."""
        return self.sampling.stateless


def wishes(chance: random.Random, oracle: AnswerOracle) -> Iterator[SoakRequest]:
    """Without end: prompts that begin like others and end like none, over both fronts."""
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
    if kind < GREEDY + SAMPLED:  # numbers that protobuf's 32 bits hold exactly: the engine draws by every bit of them
        return Sampling(max_tokens=length, temperature=0.75, top_p=0.875, ignore_eos=True)
    return Sampling(max_tokens=length, temperature=0.75, seed=chance.randrange(1 << 31), ignore_eos=True)
