"""Traffic of the leaderboard: recorded and random sessions, with prompts as chains of blocks."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.recording.agentic_traces import TraceSession, TraceTurn
from kvstore.eviction.trace_replay import TraceRequest

BLOCK_TOKENS = 64  # tokens per block of random prompts
MIX = 0x9E3779B97F4A7C15  # odd, so that consecutive numbers become distinct keys that look like hashes


class RouterTraffic(Struct, frozen=True, kw_only=True):
    """Sessions of requests, each with the instant at which it begins; `at` changes the rate of requests."""

    name: str
    block_tokens: int
    sessions: Sequence[TraceSession]  # sorted by the instant at which they begin

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return (_begin(self.sessions[-1]) - _begin(self.sessions[0])) / SECOND

    def in_order(self) -> Iterator[TraceRequest]:
        """Yield all requests, session by session."""
        return (turn.request for session in self.sessions for turn in session.turns)

    def traffic(self) -> Iterator[TraceSession]:
        """Return the sessions for the simulator."""
        return iter(self.sessions)

    def at(self, rate: float) -> "RouterTraffic":
        """Return the same sessions at another rate of requests per second."""
        factor = self.requests / self.seconds / rate
        first = _begin(self.sessions[0])
        moved = [TraceSession(each.turns, Nanos(round((_begin(each) - first) * factor))) for each in self.sessions]
        return structs.replace(self, sessions=moved)

    def half(self, number: int) -> "RouterTraffic":
        """Return the first half of the sessions (0), for tuning, or the second half (1), for reporting."""
        middle = len(self.sessions) // 2
        return structs.replace(self, sessions=self.sessions[:middle] if number == 0 else self.sessions[middle:])


def _begin(session: TraceSession) -> Nanos:
    assert session.begins is not None, "sessions of a workload say when they begin"
    return session.begins


def recorded(name: str, requests: Sequence[TraceRequest], block_tokens: int) -> RouterTraffic:
    """Return a trace in which each request arrives at its recorded time."""
    sessions = []
    for each in requests:
        full = each.prompt_tokens // block_tokens
        chain = tuple([_key(block) for block in each.chain[:full]])
        request = TraceRequest(Nanos(0), max(1, each.prompt_tokens), chain, max(1, each.output_tokens), each.session)
        sessions.append(TraceSession((TraceTurn(request),), each.arrival))
    return RouterTraffic(name=name, block_tokens=block_tokens, sessions=sessions)


def unique(requests: int, seed: int) -> RouterTraffic:
    """Return requests whose prompts have no common blocks."""
    keys = count(1)
    return _made("unique", seed, requests, lambda chance: [_turn(_new(keys, chance.randint(8, 56)), chance)])


def shared_prefixes(requests: int, seed: int, *, groups: int, skew: float, opening: int, own: int) -> RouterTraffic:
    """Return prompts in groups with a shared prefix; the frequency of group n is proportional to n to the power of -`skew`.

    Args:
        requests: Number of requests.
        seed: Seed of the workload.
        groups: Number of groups.
        skew: Exponent; 0: all groups are equally frequent.
        opening: Blocks of a group's prefix.
        own: Blocks of the rest of each prompt.
    """
    keys = count(1)
    openings = [_new(keys, opening) for _ in range(groups)]
    weights = list(accumulate(1 / (number + 1) ** skew for number in range(groups)))

    def ask(chance: random.Random) -> list[TraceTurn]:
        (chosen,) = chance.choices(openings, cum_weights=weights)
        return [_turn(chosen + _new(keys, own), chance)]

    return _made(f"shared-{groups}" + (f"-zipf-{skew:g}" if skew else ""), seed, requests, ask)


def hot_prefix(requests: int, seed: int) -> RouterTraffic:
    """Return requests with a long prefix: on average, half of them have the same prefix, and each other one a prefix of its own."""
    keys = count(1)
    opening = _new(keys, 64)

    def ask(chance: random.Random) -> list[TraceTurn]:
        return [_turn((opening if chance.random() < 0.5 else _new(keys, 24)) + _new(keys, 8), chance)]

    return _made("hot", seed, requests, ask)


def conversations(requests: int, seed: int, *, groups: int = 64, turns: int = 6) -> RouterTraffic:
    """Return conversations that begin with one of several prefixes and grow turn by turn, a second on average after each answer."""
    keys = count(1)
    openings = [_new(keys, 32) for _ in range(groups)]

    def talk(chance: random.Random) -> list[TraceTurn]:
        chain = chance.choice(openings)
        talked: list[TraceTurn] = []
        for number in range(turns):
            chain = chain + _new(keys, 4)
            turn = _turn(chain, chance, pause=chance.expovariate(1.0))
            talked.append(structs.replace(turn, after=(number - 1,)) if number else structs.replace(turn, gap=Nanos(0)))
            chain = chain + _new(keys, turn.request.output_tokens // BLOCK_TOKENS)
        return talked

    return _made("conversations", seed, requests // turns, talk)


def _made(name: str, seed: int, sessions: int, ask: Callable[[random.Random], list[TraceTurn]]) -> RouterTraffic:
    chance = random.Random(seed)
    at = 0.0
    made = []
    for number in range(sessions):
        at += chance.expovariate(1.0)
        turns = ask(chance)
        if len(turns) > 1:
            turns = [structs.replace(turn, request=_of_session(turn.request, number + 1)) for turn in turns]
        made.append(TraceSession(tuple(turns), Nanos(round(at * SECOND))))
    return RouterTraffic(name=name, block_tokens=BLOCK_TOKENS, sessions=made)


def _of_session(request: TraceRequest, number: int) -> TraceRequest:
    return TraceRequest(request.arrival, request.prompt_tokens, request.chain, request.output_tokens, number)


def _turn(chain: tuple[int, ...], chance: random.Random, *, pause: float = 0.0) -> TraceTurn:
    tokens = len(chain) * BLOCK_TOKENS + chance.randrange(1, BLOCK_TOKENS)
    answer = min(1024, 1 + int(chance.expovariate(1 / 160)))
    return TraceTurn(TraceRequest(Nanos(0), tokens, chain, answer), gap=Nanos(round(pause * SECOND)))


def _new(keys: Iterator[int], blocks: int) -> tuple[int, ...]:
    return tuple(_key(next(keys)) for _ in range(blocks))


def _key(number: int) -> int:
    return (number * MIX) & 0xFFFF_FFFF_FFFF_FFFF
