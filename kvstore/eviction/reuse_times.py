"""Reuse times: how long after a use the next use of a block comes, learned for each class of blocks.

Rules:

1. The age of a block, the time since its last use, is divided into buckets whose width grows with the age. Each class
   and bucket has two sums: blocks that reached the bucket unused (at risk), and those among them whose next use fell
   into it. Their quotient is the hazard. Blocks that are still unused therefore count as much as others, and nothing
   has to end before it counts (the Kaplan-Meier estimator, with classes).
2. A block is followed from its use to its next one, held or not, while its policy remembers it. Blocks of a class that
   were used within `COHORT` are counted together.
3. The hazard of a class with few observations is drawn to that of all classes with as many uses. That one is drawn to
   the hazard of all blocks, and this to a prior that falls with the age, under which the longest unused block is worth
   least. Each prior has the weight of `PRIOR` runs. Blocks of one run return together and are one observation, so a run
   has the size that the average block sees (Kish's effective sample size): some tens of blocks for chats, hundreds for
   agents, which carry their whole history.
4. The value of holding a block is the best that holding it until some later age would bring: the probability of its use
   by then over the expected time in its place. (This is Gittins' index; Beckmann, Chen and Cidon, "LHD", NSDI 2018,
   evict by the same quotient.) The value may grow with the age, because nobody answers within a second.
5. A block with more uses is worth no less than one with fewer uses at the same age. Otherwise noise would evict the
   beginning of a chain before its end.
6. Observations lose half of their weight after `HALF_LIFE`.
"""

from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import SECOND, Nanos

USES = (2, 3, 4, 6, 9, 16)
"""Lower bounds of the classes by uses; the class before the first bound holds blocks that were used once."""

COHORT = Nanos(1 * SECOND)
PRIOR = 10.0  # runs; 3 to 30 perform alike on chat, and fewer lose to LRU on agents, whose runs are few and long
HALF_LIFE = Nanos(12 * 3600 * SECOND)
"""Half-life of the observations. It is long compared with the widest bucket that matters, because blocks are counted as at
risk when they enter a bucket.
"""

BELIEF_SECONDS = 30.0
"""Parameter of the prior: half of the blocks are used again after three times as long."""


def _edges() -> tuple[int, ...]:
    """Return the ages at which buckets begin: 0, 1 and 2 s, then in steps of about 30 % up to a day."""
    seconds = [0.0, 1.0]
    while seconds[-1] < 86_400:
        seconds.append(seconds[-1] * 1.3 + 0.7)
    return tuple(round(each * SECOND) for each in seconds)


EDGES = _edges()
BUCKETS = len(EDGES)
WIDTHS = np.diff(np.array(EDGES)) / SECOND  # seconds
LATER = np.triu(np.ones((BUCKETS, BUCKETS), dtype=bool), 1)  # [from, to]
SUREST = 0.95  # highest hazard
BELIEF = 1 - np.sqrt(
    (np.array(EDGES) / SECOND + BELIEF_SECONDS) / (np.array([*EDGES[1:], 2 * EDGES[-1]]) / SECOND + BELIEF_SECONDS)
)

Floats = NDArray[np.float64]


class ReuseCohort:
    """Blocks of one class that were used at about the same time and not since."""

    __slots__ = ("alive", "bucket", "of", "used_at")

    def __init__(self, of: int, used_at: Nanos):
        self.of = of  # number of the class
        self.used_at = used_at
        self.bucket = 0  # the last bucket in which they were counted as at risk
        self.alive = 0  # blocks that were neither used again nor forgotten


class ReuseTimes:
    """Reuse times of all classes. A class is a number of uses and a rhythm, which stands for other knowledge of the chain."""

    def __init__(self, rhythms: int):
        """Start without observations; the classes are numbered from 0 to `classes - 1`."""
        self._rhythms = rhythms
        self.classes = (len(USES) + 1) * rhythms
        self._reused = [[0.0] * BUCKETS for _ in range(self.classes)]
        self._at_risk = [[0.0] * BUCKETS for _ in range(self.classes)]
        self.ageing: list[list[deque[ReuseCohort]]] = [[deque() for _ in EDGES] for _ in range(self.classes)]
        self._values: list[list[float]] = []
        self._surviving: list[list[float]] = []
        self._blocks = self._squares = 0.0  # sums over runs: number of blocks, and its square
        self._learnt_at = Nanos(0)
        self.learn(self._learnt_at)

    def class_of(self, uses: int, rhythm: int) -> int:
        return bisect_right(USES, uses) * self._rhythms + rhythm

    def used(self, of: int, blocks: int, now: Nanos) -> ReuseCohort:
        """Record that a run of blocks of that class was used now."""
        self._at_risk[of][0] += blocks
        self._blocks += blocks
        self._squares += blocks * blocks
        ageing = self.ageing[of][0]
        if ageing and now - ageing[-1].used_at < COHORT:
            cohort = ageing[-1]
        else:
            cohort = ReuseCohort(of, now)
            ageing.append(cohort)
        cohort.alive += blocks
        return cohort

    def reused(self, cohort: ReuseCohort, blocks: int, now: Nanos) -> None:
        """Record that blocks of a cohort were used again."""
        bucket = bisect_right(EDGES, now - cohort.used_at) - 1
        at_risk = self._at_risk[cohort.of]
        for reached in range(cohort.bucket + 1, bucket + 1):  # buckets reached since the last update
            at_risk[reached] += blocks
        self._reused[cohort.of][bucket] += blocks
        cohort.alive -= blocks

    def value(self, of: int, age: int) -> float:
        """Return the expected uses per second of the place that such a block occupies (rule 4)."""
        return self._values[of][bisect_right(EDGES, age) - 1]

    def probability(self, of: int, age: int, span: int) -> float:
        """Return the probability that a block of that class, unused for `age`, is used within `span` nanoseconds from now."""
        surviving = self._surviving[of]
        now, then = surviving[bisect_right(EDGES, age) - 1], surviving[bisect_right(EDGES, age + span) - 1]
        return 1 - then / now if now else 0.0

    def learn(self, now: Nanos) -> None:
        """Update the values, which costs some tenths of a millisecond."""
        for of in range(self.classes):
            self._age(of, now)
        reused, at_risk = np.array(self._reused), np.array(self._at_risk)
        if now > self._learnt_at:
            kept = 0.5 ** ((now - self._learnt_at) / HALF_LIFE)
            reused *= kept
            at_risk *= kept
            self._reused, self._at_risk = reused.tolist(), at_risk.tolist()
            self._blocks *= kept
            self._squares *= kept
            self._learnt_at = now
        shape = (-1, self._rhythms, BUCKETS)
        prior = PRIOR * (self._squares / self._blocks if self._blocks else 1.0)
        everywhere = _drawn(reused.sum(0), at_risk.sum(0), BELIEF, prior)
        alike = _drawn(reused.reshape(shape).sum(1), at_risk.reshape(shape).sum(1), everywhere, prior)
        hazards = _drawn(reused.reshape(shape), at_risk.reshape(shape), alike[:, np.newaxis], prior)
        surviving, values = prospects(np.minimum(hazards, SUREST))
        self._values = np.maximum.accumulate(values).reshape(-1, BUCKETS).tolist()  # rule 5
        self._surviving = surviving.reshape(-1, BUCKETS).tolist()

    def _age(self, of: int, now: Nanos) -> None:
        """Move the cohorts that have reached the next bucket."""
        ageing, at_risk = self.ageing[of], self._at_risk[of]
        for bucket in range(BUCKETS - 2, -1, -1):
            here, latest = ageing[bucket], now - EDGES[bucket + 1]
            while here and here[0].used_at <= latest:
                cohort = here.popleft()
                if cohort.alive:
                    cohort.bucket = bucket + 1
                    at_risk[bucket + 1] += cohort.alive
                    if bucket + 2 < BUCKETS:
                        ageing[bucket + 1].append(cohort)


def _drawn(reused: Floats, at_risk: Floats, to: Floats, prior: float) -> Floats:
    """Return the hazards by rule 3; `prior` counts blocks."""
    return (reused + prior * to) / (at_risk + prior)


def prospects(hazards: Floats) -> tuple[Floats, Floats]:
    """Return the share that is unused at each age, and the value of rule 4 there; all of shape [..., BUCKETS].

    The value at an age is the steepest slope to a later age, with the expected time in place on one axis and the
    probability of a use on the other.
    """
    surviving = np.ones_like(hazards)
    surviving[..., 1:] = np.cumprod(1 - hazards[..., :-1], axis=-1)
    uses = 1 - surviving
    times = np.zeros_like(hazards)
    times[..., 1:] = np.cumsum(WIDTHS * (surviving[..., :-1] + surviving[..., 1:]) / 2, axis=-1)
    rise = uses[..., np.newaxis, :] - uses[..., :, np.newaxis]
    span = times[..., np.newaxis, :] - times[..., :, np.newaxis]
    slopes = np.divide(rise, span, out=np.zeros_like(rise), where=LATER & (span > 0))
    values = slopes.max(axis=-1)
    values[..., -1] = values[..., -2] / 2
    return surviving, values
