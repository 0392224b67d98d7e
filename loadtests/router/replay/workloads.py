"""What clients ask for: recorded requests and made-up ones, with their prompts as chains of blocks."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from kvstore.replay import Request

BLOCK_TOKENS = 64  # of made-up prompts
MIX = 0x9E3779B97F4A7C15  # odd: consecutive numbers become keys that look like hashes, and stay different


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One request."""

    chain: Sequence[int]  # keys of the prompt's full blocks
    prompt_tokens: int
    output_tokens: int
    pause: Nanos = Nanos(0)  # after the end of the turn before


class Session(Struct, frozen=True, kw_only=True):
    """Requests that follow each other; one alone, where nothing is known of others."""

    start: Nanos
    turns: Sequence[Turn]
    name: str = ""


class Workload(Struct, frozen=True, kw_only=True):
    """Requests that come at a rate, which may be stretched."""

    name: str
    block_tokens: int
    sessions: Sequence[Session]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return (self.sessions[-1].start - self.sessions[0].start) / SECOND

    def at(self, rate: float) -> "Workload":
        """The same sessions, so close to each other that so many requests come a second."""
        factor = self.requests / self.seconds / rate
        first = self.sessions[0].start
        return Workload(
            name=self.name,
            block_tokens=self.block_tokens,
            sessions=[
                Session(start=Nanos(round((each.start - first) * factor)), turns=each.turns, name=each.name)
                for each in self.sessions
            ],
        )

    def half(self, number: int) -> "Workload":
        """The first half of the sessions (0), for tuning, or the second (1), for reporting."""
        middle = len(self.sessions) // 2
        chosen = self.sessions[:middle] if number == 0 else self.sessions[middle:]
        return Workload(name=self.name, block_tokens=self.block_tokens, sessions=chosen)


def recorded(name: str, requests: Sequence[Request], block_tokens: int) -> Workload:
    """A trace: every request comes when it came, whatever became of the one before."""
    sessions = []
    for each in requests:
        full = each.prompt_tokens // block_tokens
        turn = Turn(
            chain=tuple(_key(block) for block in each.chain[:full]),
            prompt_tokens=max(1, each.prompt_tokens),
            output_tokens=max(1, each.output_tokens),
        )
        sessions.append(Session(start=each.arrival, turns=(turn,), name=f"s{each.session}" if each.session else ""))
    return Workload(name=name, block_tokens=block_tokens, sessions=sessions)


def unique(requests: int, seed: int) -> Workload:
    """Prompts that have nothing in common."""
    keys = count(1)
    return _made("unique", seed, requests, lambda chance: [_turn(_new(keys, chance.randint(8, 56)), chance)])


def shared_prefixes(requests: int, seed: int, *, groups: int, skew: float, opening: int, own: int) -> Workload:
    """Prompts of groups that begin alike; group number n is asked for in proportion to n to the power of minus `skew`.

    Args:
        requests: How many.
        seed: Of everything.
        groups: Openings.
        skew: 0: all groups are equal.
        opening: Blocks of what a group has in common.
        own: Blocks of what each prompt has for itself.
    """
    keys = count(1)
    openings = [_new(keys, opening) for _ in range(groups)]
    weights = list(accumulate(1 / (number + 1) ** skew for number in range(groups)))

    def ask(chance: random.Random) -> list[Turn]:
        (chosen,) = chance.choices(openings, cum_weights=weights)
        return [_turn(chosen + _new(keys, own), chance)]

    return _made(f"shared-{groups}" + (f"-zipf-{skew:g}" if skew else ""), seed, requests, ask)


def hot_prefix(requests: int, seed: int) -> Workload:
    """Half of all requests begin with the same long opening, the others with one that nobody else has."""
    keys = count(1)
    opening = _new(keys, 64)

    def ask(chance: random.Random) -> list[Turn]:
        return [_turn((opening if chance.random() < 0.5 else _new(keys, 24)) + _new(keys, 8), chance)]

    return _made("hot", seed, requests, ask)


def conversations(requests: int, seed: int, *, groups: int = 64, turns: int = 6) -> Workload:
    """Conversations that begin with one of several openings, and grow by each question and answer; somebody thinks for a second in between."""
    keys = count(1)
    openings = [_new(keys, 32) for _ in range(groups)]

    def talk(chance: random.Random) -> list[Turn]:
        chain = chance.choice(openings)
        talked = []
        for _ in range(turns):
            chain = chain + _new(keys, 4)
            turn = _turn(chain, chance, pause=chance.expovariate(1.0))
            talked.append(turn)
            chain = chain + _new(keys, turn.output_tokens // BLOCK_TOKENS)
        return talked

    return _made("conversations", seed, requests // turns, talk)


def _made(name: str, seed: int, sessions: int, ask: Callable[[random.Random], list[Turn]]) -> Workload:
    chance = random.Random(seed)
    at = 0.0
    made = []
    for number in range(sessions):
        at += chance.expovariate(1.0)
        turns = ask(chance)
        made.append(Session(start=Nanos(round(at * SECOND)), turns=turns, name=f"s{number}" if len(turns) > 1 else ""))
    return Workload(name=name, block_tokens=BLOCK_TOKENS, sessions=made)


def _turn(chain: tuple[int, ...], chance: random.Random, *, pause: float = 0.0) -> Turn:
    return Turn(
        chain=chain,
        prompt_tokens=len(chain) * BLOCK_TOKENS + chance.randrange(1, BLOCK_TOKENS),
        output_tokens=min(1024, 1 + int(chance.expovariate(1 / 160))),
        pause=Nanos(round(pause * SECOND)),
    )


def _new(keys: Iterator[int], blocks: int) -> tuple[int, ...]:
    return tuple(_key(next(keys)) for _ in range(blocks))


def _key(number: int) -> int:
    return (number * MIX) & 0xFFFF_FFFF_FFFF_FFFF
