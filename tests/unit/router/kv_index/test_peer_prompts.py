"""Peer prompts: requests that begin alike go to one worker, whichever routers they use."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from fleet.router.kv_index import peer_prompts
from fleet.router.kv_index.peer_prompts import (
    MAX_ANNOUNCED_KEYS,
    MIN_ANNOUNCED_TOKENS,
    PlacedPrompt,
    PromptAnnouncements,
    marks,
    with_peer_prompts,
)
from fleet.router.kv_index.prefix_index import ChainHolder, Knowledge, RadixTree
from fleet.router.messages import PeerLeft, PeerPlaced, PeerReserved
from tests.support.builders import a_joined_worker, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

GREEDY = Sampling(temperature=0.0, max_tokens=8)
W = WorkerId("w")
WORKERS = tuple((f"w{number}", Role.BOTH) for number in range(16))


class Told(RouterMachineDriver):
    """One of several routers, which announces its prompts to the others."""

    def tell(self, *others: RouterMachineDriver) -> None:
        name = str(id(self))
        placed, over = self.machine.prompts.news()
        for other in others:
            other.send(PeerPlaced(replica=name, placed=tuple(placed), over=tuple(over)))
            other.send(PeerReserved(replica=name, booked=self.machine.booked()))

    def place(self, name: str, tokens: bytes) -> tuple[Dispatch, int]:
        """Place a prompt; return the dispatch and the prompt tokens to compute."""
        work = the(Dispatch, self.send(an_arrival(request_id=name, tokens=tokens, sampling=GREEDY)))
        (placed,) = self.machine.explain(RequestId(name)).placements
        return work, placed.prefill_tokens


def routers(count: int, *workers: tuple[str, Role], **settings) -> list[Told]:
    listening = {"replicas_listen": "unix:r"} if count > 1 else {}
    return [Told(*(workers or WORKERS), seed=seed, **listening, **settings) for seed in range(count)]


def believing(count: int, workers: int) -> list[Told]:
    """Return routers with the same workers, which do not report their caches."""
    found = [Told(seed=seed, policy="smg", replicas_listen="unix:r" if count > 1 else "") for seed in range(count)]
    for router in found:
        for number in range(workers):
            joined = a_joined_worker(f"w{number}", Role.BOTH, block_tokens=64)
            fields = {"knowledge": Knowledge.APPROXIMATE, "believed_for": Nanos(600 * SECOND)}
            router.send(type(joined)(description=joined.description, address=joined.address, **fields))
    return found


def others_of(one: Told, among: Sequence[Told]) -> list[Told]:
    return [other for other in among if other is not one]


# Bursts.


@pytest.mark.parametrize(("count", "own"), [(1, 0), (1, 64), (2, 0), (2, 64), (4, 0)])
def test_prompt_is_computed_once_across_routers(count, own):
    """Send eight siblings of 4,000 tokens before any engine reports. Without announcements, each router would let one compute it."""
    several = routers(count)
    full = []
    for number in range(8):
        router = several[number % count]
        _, tokens = router.place(f"r{number}", a_prompt(4000 - own) + a_prompt(own, first=10_000 * (number + 1)))
        full.append(tokens > 2000)
        router.tell(*others_of(router, several))

    assert full == [True] + 7 * [False]


def test_peers_find_the_prefill_worker_of_a_prompt():
    workers = (*((f"p{number}", Role.PREFILL) for number in range(4)), ("d", Role.DECODE))
    one, other = routers(2, *workers)
    work, _ = one.place("r1", a_prompt(2000))
    one.tell(other)

    assert work.worker_id.startswith("p")
    again, tokens = other.place("r2", a_prompt(2000) + a_prompt(600, first=90_000))
    assert (again.worker_id, tokens) == (work.worker_id, 2600 - 60 * 32)  # 60 of 62 blocks, which the marks prove


@pytest.mark.parametrize("how", ["ended", "cancelled", "left"])
def test_finished_or_orphaned_peer_prompts_do_not_count(how):
    one, other = routers(2)
    work, _ = one.place("r1", a_prompt(2000))
    one.tell(other)
    assert other.place("r2", a_prompt(2000))[0].worker_id == work.worker_id
    other.cancel("r2")

    if how == "left":
        other.send(PeerLeft(replica=str(id(one))))
    else:
        one.step(work, 1, finish=Finish.STOP) if how == "ended" else one.cancel("r1")
        one.tell(other)
        assert one.machine.prompts.latest() == []

    assert other.place("r3", a_prompt(2000))[1] == 2000


def test_rejoined_worker_starts_without_peer_prompts():
    one, other = routers(2, ("w0", Role.BOTH), ("w1", Role.BOTH))
    work, _ = one.place("r1", a_prompt(2000))
    one.tell(other)
    other.leave(work.worker_id)
    other.join(work.worker_id, Role.BOTH, incarnation="2")

    assert other.place("r2", a_prompt(2000))[1] == 2000
    one.step(work, 1, finish=Finish.STOP)
    one.tell(other)


def test_worker_leaving_the_announcing_router_ends_its_prompts():
    one, other = routers(2, ("w0", Role.BOTH))
    one.place("r1", a_prompt(2000))
    one.tell(other)
    one.leave("w0")
    one.tell(other)

    assert other.place("r2", a_prompt(2000))[1] == 2000


def test_short_or_cached_prompts_are_not_announced():
    (alone,) = routers(1)
    one, _ = routers(2)
    for router in (alone, one):
        router.place("short", a_prompt(MIN_ANNOUNCED_TOKENS - 1, first=50_000))
        router.place("r1", a_prompt(2000))
        router.place("r2", a_prompt(2000))  # announced after the first one

    assert alone.machine.prompts.news() == ([], [])
    ((told,), over) = one.machine.prompts.news()
    assert (len(told.keys), over) == (len(marks(range(2000 // 32))), [])


def test_prompt_ended_before_announcement_is_not_announced():
    one, _ = routers(2)
    work, _ = one.place("r1", a_prompt(2000))
    one.step(work, 1, finish=Finish.STOP)

    assert one.machine.prompts.news() == ([], [])


def test_late_peer_gets_known_prompts_then_news():
    one, early, late = routers(3)
    known, _ = one.place("r1", a_prompt(2000))
    one.tell(early)
    brief, _ = one.place("r2", a_prompt(2000, first=5000))
    late.send(PeerPlaced(replica=str(id(one)), placed=tuple(one.machine.prompts.latest())))
    assert late.place("r3", a_prompt(2000))[1] < 2000

    one.step(brief, 1, finish=Finish.STOP)  # it ends before it is announced
    one.step(known, 1, finish=Finish.STOP)
    one.tell(early, late)

    assert late.place("r4", a_prompt(2000, first=5000))[1] == 2000
    assert not any(late.machine.registry[f"w{number}"].peer_prompts.chains() for number in range(len(WORKERS)))


def test_prompt_announced_twice_counts_once():
    one, other = routers(2)
    work, _ = one.place("r1", a_prompt(2000))
    one.tell(other)
    other.send(PeerPlaced(replica=str(id(one)), placed=tuple(one.machine.prompts.latest())))
    one.step(work, 1, finish=Finish.STOP)
    one.tell(other)

    assert other.place("r2", a_prompt(2000))[1] == 2000


def test_announced_prompts_per_router_are_bounded(monkeypatch):
    prompts = PromptAnnouncements()
    monkeypatch.setattr(peer_prompts, "MAX_ANNOUNCED_PROMPTS", 3)
    numbers = [prompts.placed(W, range(number, number + 40)) for number in range(5)]
    assert numbers == [1, 2, 3, None, None]
    prompts.over(2)
    assert prompts.placed(W, range(40)) == 4
    assert [told.number for told in prompts.news()[0]] == [1, 3, 4]

    monkeypatch.setattr("fleet.router.state.worker_registry.MAX_ANNOUNCED_PROMPTS", 3)
    router = routers(2)[0]
    placed = tuple(PlacedPrompt(worker_id=WorkerId("w0"), number=number, keys=(number,)) for number in range(1, 9))
    router.send(PeerPlaced(replica="o", placed=placed))
    assert len(router.machine.registry["w0"].peer_prompts.chains()) == 3


# Marks.


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_marks_find_eight_ninths_of_a_common_prefix(common, one, other):
    first, second = ((*range(common), *range(start, start + more)) for start, more in ((10_000, one), (20_000, other)))
    chains = RadixTree()
    chains.add(ChainHolder(1), marks(first))

    ((depth, mask),) = with_peer_prompts([], chains, second)

    assert mask == 1
    assert depth == common if one == other == 0 else 8 / 9 * common <= depth <= common
    assert len(marks(first)) <= 16 + 8 * 9


def test_own_knowledge_counts_if_it_is_deeper():
    chains = RadixTree()
    for bit, blocks in ((1, 4), (2, 12), (4, 8)):
        chains.add(ChainHolder(bit), marks(range(blocks)))

    assert with_peer_prompts([(6, 0b1001), (10, 0b10)], chains, range(16)) == [(6, 0b1001), (8, 0b100), (12, 0b10)]


# Workers that do not report their caches.


def hit_rate(count: int, *, told: bool = True) -> float:
    """Return the share of cached blocks for 12 conversations of 7 turns on 8 workers; each turn goes to a random router."""
    several = believing(count, 8)
    dice = random.Random(5)
    sent: dict[str, set[bytes]] = {}
    found = blocks = 0
    for turn in range(1, 8):
        for conversation in range(12):
            router = several[dice.randrange(count)]
            prompt = a_prompt(512 * turn, first=1 + 10_000 * conversation)
            work, _ = router.place(f"{conversation}-{turn}", prompt)
            router.step(work, 1, finish=Finish.STOP)
            begins = [prompt[: 256 * end] for end in range(1, 8 * turn + 1)]
            known = sent.setdefault(work.worker_id, set())
            found += sum(begin in known for begin in begins)
            blocks += len(begins)
            known.update(begins)
            if told:
                router.tell(*others_of(router, several))
    return found / blocks


def test_peers_share_assumed_caches():
    alone = hit_rate(1)
    assert alone > 0.7
    assert hit_rate(4, told=False) < alone - 0.15, "so that telling is no accident"

    assert min(hit_rate(2), hit_rate(4)) > alone - 0.01


def test_assumed_cache_outlives_the_announcing_router():
    one, other = believing(2, 4)
    work, _ = one.place("r1", a_prompt(2000))
    one.tell(other)
    other.send(PeerLeft(replica=str(id(one))))

    again, tokens = other.place("r2", a_prompt(2000))
    assert (again.worker_id, tokens) == (work.worker_id, 2000 - 31 * 64)


def test_announcements_keep_beginnings_and_latest_prompts(monkeypatch):
    prompts = PromptAnnouncements()
    prompts.sent(W, range(MAX_ANNOUNCED_KEYS + 5))
    ((told,), _) = prompts.news()
    assert told == PlacedPrompt(worker_id=W, keys=tuple(range(MAX_ANNOUNCED_KEYS)))

    monkeypatch.setattr(peer_prompts, "MAX_SENT_PROMPTS", 2)
    prompts = PromptAnnouncements()
    for number in range(5):
        prompts.sent(W, (number,))
    assert [told.keys for told in prompts.news()[0]] == [(3,), (4,)]
    assert prompts.news() == ([], [])


def test_prompt_without_full_block_is_not_announced():
    one, _ = believing(2, 4)
    one.place("r1", a_prompt(10))

    assert one.machine.prompts.news() == ([], [])
