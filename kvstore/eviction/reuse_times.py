"""Reuse times: learns for each class of blocks how much time passes between a use of a block and its next use.

Rules:

1. The age of a block, the time since its last use, is divided into buckets whose width grows with the age. Each class
   and bucket has two sums: the blocks that reached the bucket unused (at risk), and the blocks among them whose next
   use fell into the bucket. The second sum divided by the first is the hazard of the bucket. Blocks that have not been
   used again yet are thus observations too (this is the Kaplan-Meier estimator, for each class).
2. A block is followed from each use to its next use, also after its eviction, while the policy remembers it. Blocks of
   a class that were used within `COHORT` are counted together.
3. The fewer observations a class has, the more its hazard is pulled towards the hazard of all classes with the same
   number of uses. That second hazard is pulled towards the hazard of all blocks, and the hazard of all blocks towards a
   prior. The prior falls with the age, so that without observations the longest unused block has the least value. Each
   pull has the weight of `PRIOR` runs (consecutive blocks of a chain, `kvstore.eviction.hazard`), because the blocks of
   a run are used again together and are therefore one observation. To convert runs to blocks, the size of a run is
   averaged over all blocks, not over all runs (Kish's effective sample size). This average is about 10 to 100 blocks
   for chats, and several hundred for agents, whose prompts contain their whole history.
4. The value of a block is the highest value of this quotient over all later ages: the probability that the block is
   used before that age, divided by the expected time until its use or until that age, whichever is earlier. (This is
   the Gittins index; Beckmann, Chen and Cidon, "LHD", NSDI 2018, evict by the same quotient.) The value may grow with
   the age: for instance, no user answers within a second.
5. The value of a block is at least that of a block with fewer uses at the same age. The beginning of a chain has at
   least as many uses as its end, but without this rule, noise could cause the beginning to be evicted first.
6. Observations lose half of their weight after `HALF_LIFE`.
"""

from bisect import bisect_right
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import SECOND, Nanos

USES = (2, 3, 4, 6, 9, 16)
"""Lower bounds of the classes by number of uses. The class before the first bound has the blocks that were used
once."""

COHORT = Nanos(1 * SECOND)
PRIOR = 10.0
"""Weight of a prior hazard, as a number of runs (rule 3). Values from 3 to 30 are equally good for chats; for agents, the
lower ones of these values are worse."""

HALF_LIFE = Nanos(12 * 3600 * SECOND)
"""Half-life of the observations. It must be much longer than the widest relevant bucket (rule 1). A block is counted as
at risk when it enters a bucket, and as used only later. With a short half-life, the first count would have faded when
the second one is made."""

BELIEF_SECONDS = 30.0
"""Parameter of the prior hazard (rule 3), in seconds. The prior assumes that half of the blocks are used again within
three times this number of seconds."""


def _edges() -> tuple[int, ...]:
    """Return the ages in nanoseconds at which buckets begin (rule 1): 0, 1 s, 2 s, and so on up to about a day.

    Each age after 1 s is 1.3 times the age before it, plus 0.7 s.
    """
    seconds = [0.0, 1.0]
    while seconds[-1] < 86_400:
        seconds.append(seconds[-1] * 1.3 + 0.7)
    return tuple(round(each * SECOND) for each in seconds)


EDGES = _edges()
BUCKETS = len(EDGES)
WIDTHS = np.diff(np.array(EDGES)) / SECOND  # widths of the buckets in seconds
LATER = np.triu(np.ones((BUCKETS, BUCKETS), dtype=bool), 1)  # LATER[i, j] is True if bucket j is later than bucket i
SUREST = 0.95  # maximum hazard of a bucket (rule 1); a hazard of 1 would claim that no block stays unused for longer
BELIEF = 1 - np.sqrt(
    (np.array(EDGES) / SECOND + BELIEF_SECONDS) / (np.array([*EDGES[1:], 2 * EDGES[-1]]) / SECOND + BELIEF_SECONDS)
)

Floats = NDArray[np.float64]


class ReuseCohort:
    """Blocks of one class whose last uses were less than `COHORT` apart (rule 2)."""

    __slots__ = ("alive", "bucket", "of", "used_at")

    def __init__(self, of: int, used_at: Nanos):
        self.of = of  # number of the class
        self.used_at = used_at
        self.bucket = 0  # last bucket in which the blocks were counted as at risk (rule 1)
        self.alive = 0  # number of the blocks that were neither used again nor forgotten by the policy


class ReuseTimes:
    """Learns the reuse times of all classes.

    A class is a range of numbers of uses, combined with a rhythm: a number by which the caller separates kinds of
    chains.
    """

    def __init__(self, rhythms: int):
        """Start without observations.

        Classes have the numbers from 0 to `classes` - 1; `rhythms` is the number of rhythms.
        """
        self._rhythms = rhythms
        self.classes = (len(USES) + 1) * rhythms
        self._reused = [[0.0] * BUCKETS for _ in range(self.classes)]
        self._at_risk = [[0.0] * BUCKETS for _ in range(self.classes)]
        self.ageing: list[list[deque[ReuseCohort]]] = [[deque() for _ in EDGES] for _ in range(self.classes)]
        self._values: list[list[float]] = []
        self._surviving: list[list[float]] = []
        # Sums over all used runs (rule 3): number of blocks, and the square of this number. Older runs weigh less
        # (rule 6).
        self._blocks = self._squares = 0.0
        self._learnt_at = Nanos(0)
        self.learn(self._learnt_at)

    def class_of(self, uses: int, rhythm: int) -> int:
        return bisect_right(USES, uses) * self._rhythms + rhythm

    def used(self, of: int, blocks: int, now: Nanos) -> ReuseCohort:
        """Record that a run (rule 3) of `blocks` blocks is used now, and then belongs to class `of`; return its cohort."""
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
        """Record that `blocks` blocks of a cohort are used again now."""
        bucket = bisect_right(EDGES, now - cohort.used_at) - 1
        at_risk = self._at_risk[cohort.of]
        # buckets that the blocks have reached since the cohort was last counted
        for reached in range(cohort.bucket + 1, bucket + 1):
            at_risk[reached] += blocks
        self._reused[cohort.of][bucket] += blocks
        cohort.alive -= blocks

    def value(self, of: int, age: int) -> float:
        """Return the value of a block of class `of` and age `age` in nanoseconds (rule 4).

        The value is a rate: the expected uses of the block per second for which it is kept.
        """
        return self._values[of][bisect_right(EDGES, age) - 1]

    def probability(self, of: int, age: int, span: int) -> float:
        """Return the probability that a block of class `of` and age `age` is used within the next `span` nanoseconds."""
        surviving = self._surviving[of]
        now, then = surviving[bisect_right(EDGES, age) - 1], surviving[bisect_right(EDGES, age + span) - 1]
        return 1 - then / now if now else 0.0

    def learn(self, now: Nanos) -> None:
        """Compute the hazards (rules 1 and 3) and the values (rule 4) again from all observations. This takes some tenths of a millisecond."""
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
        # A block has at least the value of a block with fewer uses at the same age (rule 5).
        self._values = np.maximum.accumulate(values).reshape(-1, BUCKETS).tolist()
        self._surviving = surviving.reshape(-1, BUCKETS).tolist()

    def _age(self, of: int, now: Nanos) -> None:
        """Move the cohorts that have reached their next bucket into it, and count their blocks as at risk in it (rule 1)."""
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
    """Return the hazards of each bucket, pulled towards the hazards `to` (rule 3).

    The pull has the weight of `prior` observed blocks, so it is weaker if more blocks were observed.
    """
    return (reused + prior * to) / (at_risk + prior)


def prospects(hazards: Floats) -> tuple[Floats, Floats]:
    """Return the share of blocks still unused and the value (rule 4) at each age, both of shape [..., BUCKETS].

    To find the value at an age, plot the probability of a use over the expected time until the use. The value is the
    steepest slope from the point of that age to the point of a later age. The last age has no later age; its value is
    half of the value before it.
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
