"""Correction: learns how the measured step times of a worker differ from the predicted ones, and detects drift.

Rules:

1. An engine differs from its hardware profile in two ways. It is slower or faster by a factor, because of clocks,
   kernels, or other programs on the GPU. It also adds a time to every step, for kernel launches or because the host is
   busy. So seconds = `added` + `factor` × seconds that the profile predicts. Steps with prompts and steps that only decode
   need separate corrections, because different limits of the hardware determine their times.
2. This line is fitted by least squares of the relative errors. The weight of a sample halves after `HALF_LIFE` further
   samples. The fit begins with two invented samples, a small and a large step, which match the profile exactly.
   Together they have the weight of `PRIOR` samples.
3. A single step may be slow only because the host paused. So a measured time counts as at most `OUTLIER` times the
   corrected prediction, and as at least the corrected prediction divided by `OUTLIER`.
4. A two-sided cumulative sum of log(measured / corrected prediction) detects drift (Page, Biometrika 41, 1954) after
   `SETTLED` samples. `SLACK` is the error that is tolerated, and `ALARM` is the sum that raises an alarm. With random
   errors of 20 %, there is less than one false alarm in a million steps; a change by 50 % is detected within twenty steps.
5. After an alarm, everything that was learnt before has the weight of only `PRIOR` samples. So the new difference
   from the profile is learnt as fast as the difference at the start.
"""

from collections.abc import Sequence
from math import exp, log

from msgspec import Struct

HALF_LIFE = 200.0
PRIOR = 2.0
OUTLIER = 4.0
SETTLED = 50
SLACK = 0.2
ALARM = 2.5
LONGEST = 1e6  # durations of this many seconds or more are refused (`Correction.observe`)
_KEPT = exp(-log(2.0) / HALF_LIFE)
_SMALL, _LARGE = 0.01, 0.1  # durations in seconds of the two invented steps with which each fit begins (rule 2)


class LearnedCorrection(Struct, frozen=True, kw_only=True):
    """Holds the learnt difference between an engine and its hardware profile."""

    factor: float
    added: float  # seconds that the engine adds to every step
    samples: int
    """Number of steps from which the correction was learnt since the last alarm, or since the beginning if there was none."""

    error: float
    """Typical relative error of corrected times: exp(m) - 1, where m is the moving mean of |log(measured /
    corrected)|."""

    alarms: int
    """Number of drift alarms of this correction so far, for metrics."""


class Correction:
    """Learns the correction for one kind of steps of one engine: steps with prompts, or steps that only decode."""

    def __init__(self) -> None:
        self._alarms = 0
        self._error = 0.0
        self._start(())

    def predict(self, profile: float) -> float:
        """Return the corrected duration in seconds of a step for which the profile predicts `profile` seconds.

        The corrected duration is at least a tenth of `profile`.
        """
        return max(0.1 * profile, self._added + self._factor * profile)

    def observe(self, profile: float, seconds: float) -> bool:
        """Learn from a step for which the profile predicted `profile` seconds, and which took `seconds` seconds.

        Return True if this step raises a drift alarm (rule 4).

        Raises:
            ValueError: One of the two durations is not a positive number below `LONGEST`.
        """
        if not (0.0 < profile < LONGEST and 0.0 < seconds < LONGEST):
            raise ValueError(
                f"a step of {seconds} seconds, predicted as {profile}: both must be above 0 and below a million"
            )
        expected = self.predict(profile)
        seen = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        unexplained = log(seen / expected)
        self._error += (abs(unexplained) - self._error) * max(1.0 / (self._samples + 1), 1.0 / HALF_LIFE)
        self._samples += 1
        self._learn(profile, seen)
        return self._drifted(unexplained)

    @property
    def learnt(self) -> LearnedCorrection:
        return LearnedCorrection(
            factor=self._factor,
            added=self._added,
            samples=self._samples,
            error=exp(self._error) - 1.0,
            alarms=self._alarms,
        )

    def _start(self, known: Sequence[tuple[float, float]]) -> None:
        """Begin the fit again with two invented samples (rule 2).

        `known` has the predicted and the measured seconds of these samples. If `known` is empty, the samples are a small
        and a large step that match the profile exactly.
        """
        self._factor, self._added = 1.0, 0.0
        self._samples = 0
        self._above = self._below = 0.0
        # Sums of a weighted least-squares fit of measured to predicted seconds; the weight of a sample is 1 / profile².
        self._weight = self._profile = self._square = self._seconds = self._product = 0.0
        for profile, seconds in known or ((_SMALL, _SMALL), (_LARGE, _LARGE)):
            self._add(profile, seconds, PRIOR / 2)
        self._fit()

    def _learn(self, profile: float, seconds: float) -> None:
        self._weight *= _KEPT
        self._profile *= _KEPT
        self._square *= _KEPT
        self._seconds *= _KEPT
        self._product *= _KEPT
        self._add(profile, seconds, 1.0)
        self._fit()

    def _add(self, profile: float, seconds: float, count: float) -> None:
        weight = count / (profile * profile)
        self._weight += weight
        self._profile += weight * profile
        self._square += count
        self._seconds += weight * seconds
        self._product += weight * profile * seconds

    def _fit(self) -> None:
        """Fit `factor` and `added` to the samples (rule 1), or only `factor` with an `added` of 0.

        Only `factor` is fitted if all steps had nearly the same length, or if the fit gives a negative `added` or no positive `factor`.
        """
        spread = self._weight * self._square - self._profile * self._profile
        if spread > 1e-3 * self._weight * self._square:
            factor = (self._weight * self._product - self._profile * self._seconds) / spread
            added = (self._seconds - factor * self._profile) / self._weight
            if factor > 0.0 and added >= 0.0:
                self._factor, self._added = factor, added
                return
        self._factor, self._added = self._product / self._square, 0.0

    def _drifted(self, unexplained: float) -> bool:
        if self._samples <= SETTLED:
            return False
        self._above = max(0.0, self._above + unexplained - SLACK)
        self._below = max(0.0, self._below - unexplained - SLACK)
        if max(self._above, self._below) < ALARM:
            return False
        self._alarms += 1
        self._start([(profile, self.predict(profile)) for profile in (_SMALL, _LARGE)])
        return True
