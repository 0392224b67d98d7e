"""Forecast: predicts the demand for the instant at which a replica that is started now will begin to serve. Pure.

The input is samples of the past demand at equal time steps.

Rules:

1. A forecaster gets one value in each step. For a given horizon (the time ahead), it returns the expected value and an
   upper bound. Both are at least 0.
2. There are four methods: last value; exponentially weighted mean (Brown, 1956); local linear trend by a Kalman filter
   (Harvey, 1989, chapter 4), with a damped slope (Gardner and McKenzie, 1985); additive seasons of a fixed length
   (Holt, 1957; Winters, 1960). The settings choose among them in `fleet.planner.forecasting.history`.
3. `ChosenForecaster` runs several of these methods, and later compares each forecast with the real value (a rolling
   back-test at the same horizon). It changes to the method with the smallest mean absolute error, if this error is below
   that of the present method by more than the share `MARGIN`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil, isfinite, sqrt
from typing import Protocol

from msgspec import Struct

MARGIN = 0.05
"""A method replaces the present method only if its error is smaller by more than this share of the present method's
error."""

MEMORY = 240
"""Number of steps after which the weight of an old sample in a mean has fallen to 1/e."""

UNSEASONAL = 4
"""Number of latest values whose mean is the seasonal forecast until the first season is complete."""

NORMAL = 1.2533
"""Standard deviation of a normal distribution, divided by its mean absolute deviation. The mean absolute error of the forecasts,
multiplied by this factor, is used as their standard error: a single outlier changes it less than a mean of squared errors."""


class Forecast(Struct, frozen=True, kw_only=True):
    mean: float
    upper: float
    """Upper bound: the mean plus one standard error of forecasts at this horizon."""


class Forecaster(Protocol):
    """Port of a forecast method, which learns from one value in each step and forecasts later values."""

    def update(self, value: float) -> None:
        """Learn the value of the next step."""
        ...

    def forecast(self, horizon_seconds: float) -> Forecast:
        """Return the expected value at a time that is this many seconds ahead, and its upper bound."""
        ...


class LastValue:
    """Forecasts that the value stays as it was last; the expected error grows with the square root of the horizon."""

    def __init__(self, step_seconds: float) -> None:
        self._step = step_seconds
        self._last: float | None = None
        self._variance = _Mean()

    def update(self, value: float) -> None:
        if self._last is not None:
            self._variance.add((value - self._last) ** 2)
        self._last = value

    def forecast(self, horizon_seconds: float) -> Forecast:
        return _forecast(self._last or 0.0, sqrt(self._variance.value * max(1.0, horizon_seconds / self._step)))


class WeightedMean:
    """Forecasts that the next value is the exponentially weighted mean of past values."""

    def __init__(self, half_life_steps: float) -> None:
        self._weight = 1.0 - 0.5 ** (1.0 / half_life_steps)
        self._mean: float | None = None
        self._variance = _Mean()

    def update(self, value: float) -> None:
        if self._mean is None:
            self._mean = value
            return
        self._variance.add((value - self._mean) ** 2)
        self._mean += self._weight * (value - self._mean)

    def forecast(self, horizon_seconds: float) -> Forecast:  # noqa: ARG002 - a mean is the same at any horizon
        return _forecast(self._mean or 0.0, sqrt(self._variance.value))


class LocalTrend:
    """Forecasts by a level and a slope, from a Kalman filter; the slope is damped, because trends seldom last long."""

    def __init__(
        self, step_seconds: float, *, level_noise: float = 0.05, slope_noise: float = 0.002, damping: float = 0.99
    ) -> None:
        """Create a filter without samples.

        Args:
            step_seconds: Time between two values.
            level_noise: Variance of the change of the level in one step, relative to the variance of one measurement.
            slope_noise: Variance of the change of the slope in one step, relative to the variance of one measurement.
            damping: Share of the slope that is left after one step.
        """
        self._step = step_seconds
        self._level_noise, self._slope_noise, self._damping = level_noise, slope_noise, damping
        self._level: float | None = None
        self._slope = 0.0
        # covariance matrix of level (l) and slope (s), relative to the variance of one measurement
        self._ll, self._ls, self._ss = 1.0, 0.0, 0.1
        self._measured = _Mean()

    def update(self, value: float) -> None:
        if self._level is None:
            self._level = value
            return
        damping = self._damping
        level, slope = self._level + damping * self._slope, damping * self._slope
        ll = self._ll + 2.0 * damping * self._ls + damping * damping * self._ss + self._level_noise
        ls = damping * self._ls + damping * damping * self._ss
        ss = damping * damping * self._ss + self._slope_noise
        surprise, variance = value - level, ll + 1.0
        self._measured.add(surprise * surprise / variance)
        self._level, self._slope = level + ll / variance * surprise, slope + ls / variance * surprise
        self._ll, self._ls, self._ss = ll - ll * ll / variance, ls - ll * ls / variance, ss - ls * ls / variance

    def forecast(self, horizon_seconds: float) -> Forecast:
        steps = horizon_seconds / self._step
        reach = self._damping * (1.0 - self._damping**steps) / (1.0 - self._damping)
        variance = self._ll + 2.0 * reach * self._ls + reach * reach * self._ss + steps * self._level_noise
        mean = (self._level or 0.0) + reach * self._slope
        return _forecast(mean, sqrt(self._measured.value * max(0.0, variance)))


class Seasonal:
    """Forecasts by the additive seasons of Holt and Winters, without a trend.

    Until the first season is complete, the forecast is the mean of the last `UNSEASONAL` values.
    """

    def __init__(
        self, step_seconds: float, season_seconds: float, *, level_weight: float = 0.05, season_weight: float = 0.3
    ) -> None:
        self._step = step_seconds
        self._level_weight, self._season_weight = level_weight, season_weight
        self._length = max(2, round(season_seconds / step_seconds))
        self._seasons: list[float] = []
        self._first: list[float] = []
        self._level: float | None = None
        self._at = 0
        self._variance = _Mean()

    def update(self, value: float) -> None:
        if not self._seasons:
            self._first.append(value)
            last = self._first[-UNSEASONAL:]
            self._level = sum(last) / len(last)
            if len(self._first) == self._length:
                self._level = sum(self._first) / self._length
                self._seasons = [each - self._level for each in self._first]
            return
        assert self._level is not None
        season = self._seasons[self._at]
        self._variance.add((value - self._level - season) ** 2)
        before = self._level
        self._level += self._level_weight * (value - season - before)
        self._seasons[self._at] += self._season_weight * (value - self._level - season)
        self._at = (self._at + 1) % self._length

    def forecast(self, horizon_seconds: float) -> Forecast:
        level = self._level or 0.0
        if not self._seasons:
            return _forecast(level, sqrt(self._variance.value))
        ahead = max(1, ceil(horizon_seconds / self._step))
        return _forecast(level + self._seasons[(self._at + ahead - 1) % self._length], sqrt(self._variance.value))


class BacktestScore(Struct, frozen=True, kw_only=True):
    """Holds the forecast error of one method in the back-test."""

    method: str
    relative: float
    """Mean absolute error of the forecasts, divided by the mean of the real values."""

    samples: int


class ChosenForecaster:
    """Forecasts by the method that had the smallest error in the back-test so far (rule 3)."""

    def __init__(self, methods: Mapping[str, Forecaster], step_seconds: float, horizon_seconds: float) -> None:
        assert methods, "at least one method"
        self._methods = dict(methods)
        self._step = step_seconds
        self._steps = 1
        self._absolute = {name: _Mean() for name in methods}
        self._mean = _Mean()
        self._made: dict[str, deque[float]] = {}
        self.chosen = next(iter(methods))
        """Name of the method that is used now."""

        self.aim(horizon_seconds)

    def aim(self, horizon_seconds: float) -> None:
        """Set the horizon of the back-test.

        If the number of steps in the horizon changes, forecasts that were not compared yet are dropped; past errors
        are kept. Otherwise nothing changes.
        """
        steps = max(1, round(horizon_seconds / self._step))
        if steps == self._steps and self._made:
            return
        self._steps = steps
        self._made = {name: deque(maxlen=steps) for name in self._methods}

    def update(self, value: float) -> None:
        if not (isfinite(value) and value >= 0.0):
            raise ValueError(f"value: {value} is not a number of at least 0")
        self._mean.add(value)
        for name, method in self._methods.items():
            made = self._made[name]
            if len(made) == self._steps:
                self._absolute[name].add(abs(value - made[0]))
            method.update(value)
            made.append(method.forecast(self._steps * self._step).mean)
        self._choose()

    def forecast(self, horizon_seconds: float) -> Forecast:
        mean = self._methods[self.chosen].forecast(horizon_seconds)
        tested = self._absolute[self.chosen]
        return _forecast(mean.mean, NORMAL * tested.value) if tested.count else mean

    @property
    def error(self) -> float | None:
        """Mean absolute error of the chosen method, divided by the mean of the real values; None before the first comparison."""
        return self._relative(self.chosen) if self._absolute[self.chosen].count else None

    @property
    def scores(self) -> Sequence[BacktestScore]:
        return [
            BacktestScore(
                method=name,
                relative=self._relative(name),
                samples=self._absolute[name].count,
            )
            for name in self._methods
        ]

    def _relative(self, name: str) -> float:
        return self._absolute[name].value / self._mean.value if self._mean.value else 0.0

    def _choose(self) -> None:
        best = min(self._methods, key=lambda name: self._absolute[name].value)
        tested = self._absolute[best]
        if tested.count >= self._steps and tested.value < (1.0 - MARGIN) * self._absolute[self.chosen].value:
            self.chosen = best


class _Mean:
    """Computes a mean.

    The first `MEMORY` samples have equal weights. After that, each new sample lowers the weights of all earlier ones.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, MEMORY)


def _forecast(mean: float, error: float) -> Forecast:
    mean = max(0.0, mean)
    return Forecast(mean=mean, upper=mean + error)
