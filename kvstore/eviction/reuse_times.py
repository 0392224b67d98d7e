"""How long after a use the next one comes, learnt for each class of blocks while they are used. Pure.

Rules:

1. The span since a block's last use, its age, is cut into buckets whose width grows with the age. For each class and
   bucket two sums are kept: blocks that reached the bucket unused (at risk), and those of them whose next use fell into
   it. Their quotient is the hazard. So what has not been used yet tells as much as what has, and nothing has to be over
   before it counts (the estimator of Kaplan and Meier, with classes).
2. A block is followed from its use to its next one, whether it is still held or not, for as long as its policy remembers
   it. Blocks of a class that were used within `COHORT` are counted together.
3. Of a class that was seen little, the hazard is drawn to that of all classes with as many uses, this to that of all, and
   this to one that falls with the age, under which the longest unused is worth least: each by `PRIOR` runs' worth. Blocks of
   one run come back together and tell one story, so the run that counts is that of the average block (Kish's effective
   sample size): some tens of blocks where people chat, hundreds where agents carry their whole history along.
4. The value of holding a block on is the best that holding it until some later age would bring: the probability of its
   use by then, over the time that it occupies its place until then. (The index of Gittins; Beckmann, Chen and Cidon's
   "LHD", NSDI 2018, evicts by the same quotient.) It may grow with the age, since nobody answers within a second.
5. A block with more uses is worth no less than one with fewer at the same age. Noise would else evict the beginning of
   a chain before its end.
6. What was learnt counts half after `HALF_LIFE`.
"""

from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import SECOND, Nanos

USES = (2, 3, 4, 6, 9, 16)
"""Where classes by uses begin; the first holds blocks that were used once."""

COHORT = Nanos(1 * SECOND)
PRIOR = 10.0  # runs; from 3 to 30 are alike on chat, and less loses to LRU on agents, whose runs are few and long
HALF_LIFE = Nanos(12 * 3600 * SECOND)
"""Long against the widest bucket that matters, because those at risk are counted when they enter it."""

BELIEF_SECONDS = 30.0
"""Of what is believed before anything is known: after three times as long, half of the blocks are used again."""


def _edges() -> tuple[int, ...]:
    """Ages at which buckets begin: 0, 1, 2 s, then in steps of about 30 %, up to a day."""
    seconds = [0.0, 1.0]
    while seconds[-1] < 86_400:
        seconds.append(seconds[-1] * 1.3 + 0.7)
    return tuple(round(each * SECOND) for each in seconds)


EDGES = _edges()
BUCKETS = len(EDGES)
WIDTHS = np.diff(np.array(EDGES)) / SECOND  # seconds
LATER = np.triu(np.ones((BUCKETS, BUCKETS), dtype=bool), 1)  # [from, to]
SUREST = 0.95  # hazard that nothing exceeds
BELIEF = 1 - np.sqrt(
    (np.array(EDGES) / SECOND + BELIEF_SECONDS) / (np.array([*EDGES[1:], 2 * EDGES[-1]]) / SECOND + BELIEF_SECONDS)
)

Floats = NDArray[np.float64]


class ReuseCohort:
    """Blocks of one class that were used at about the same time, and not since."""

    __slots__ = ("alive", "bucket", "of", "used_at")

    def __init__(self, of: int, used_at: Nanos):
        self.of = of  # class
        self.used_at = used_at
        self.bucket = 0  # the last in which they were counted as being at risk
        self.alive = 0  # blocks that are neither used again nor forgotten


class ReuseTimes:
    """See the module. A class is a number of uses and a rhythm, which stands for whatever else is known of a chain."""

    def __init__(self, rhythms: int):
        """Nothing is known yet; every class has its number, `classes` in all."""
        self._rhythms = rhythms
        self.classes = (len(USES) + 1) * rhythms
        self._reused = [[0.0] * BUCKETS for _ in range(self.classes)]
        self._at_risk = [[0.0] * BUCKETS for _ in range(self.classes)]
        self._ageing: list[list[deque[ReuseCohort]]] = [[deque() for _ in EDGES] for _ in range(self.classes)]
        self._values: list[list[float]] = []
        self._surviving: list[list[float]] = []
        self._blocks = self._squares = 0.0  # sums over runs: of their blocks, and of the squares of those
        self._learnt_at = Nanos(0)
        self.learn(self._learnt_at)

    def class_of(self, uses: int, rhythm: int) -> int:
        return bisect_right(USES, uses) * self._rhythms + rhythm

    def used(self, of: int, blocks: int, now: Nanos) -> ReuseCohort:
        """A run of blocks of that class was used just now."""
        self._at_risk[of][0] += blocks
        self._blocks += blocks
        self._squares += blocks * blocks
        ageing = self._ageing[of][0]
        if ageing and now - ageing[-1].used_at < COHORT:
            cohort = ageing[-1]
        else:
            cohort = ReuseCohort(of, now)
            ageing.append(cohort)
        cohort.alive += blocks
        return cohort

    def reused(self, cohort: ReuseCohort, blocks: int, now: Nanos) -> None:
        """Blocks of a cohort are used again."""
        bucket = bisect_right(EDGES, now - cohort.used_at) - 1
        at_risk = self._at_risk[cohort.of]
        for reached in range(cohort.bucket + 1, bucket + 1):  # since values were last brought up to date
            at_risk[reached] += blocks
        self._reused[cohort.of][bucket] += blocks
        cohort.alive -= blocks

    def value(self, of: int, age: int) -> float:
        """Uses a second of the place that such a block occupies (rule 4)."""
        return self._values[of][bisect_right(EDGES, age) - 1]

    def probability(self, of: int, age: int, span: int) -> float:
        """That a block of that class, unused for `age`, is used again within `span` nanoseconds from now."""
        surviving = self._surviving[of]
        now, then = surviving[bisect_right(EDGES, age) - 1], surviving[bisect_right(EDGES, age + span) - 1]
        return 1 - then / now if now else 0.0

    def learn(self, now: Nanos) -> None:
        """Bring values up to date; costs some tenths of a millisecond."""
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
        """Those who have got older reach the next bucket."""
        ageing, at_risk = self._ageing[of], self._at_risk[of]
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
    """Hazards by rule 3; `prior` in blocks."""
    return (reused + prior * to) / (at_risk + prior)


def prospects(hazards: Floats) -> tuple[Floats, Floats]:
    """Share that is still unused at each age, and the value of rule 4 there; all of shape [..., BUCKETS].

    Over ages, the value is the steepest slope from one to a later one, where the expected time in place is on one axis,
    and the probability of a use on the other.
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
