"""Settings of the planner's own scaling rule, `fleet.planner.machine`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleet.planner.decisions import Minimised

ForecastMethod = Literal["chosen", "level", "last", "mean", "trend", "seasonal"]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e6)]
IntervalSeconds = Annotated[float, Meta(ge=0.1, le=3600)]
"""Time between two repetitions of a task. It is at least a tenth of a second, because a shorter one would keep a
core busy."""


class PlannerRuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the rule by which Fleet's planner sizes pools (`fleet.planner.machine`)."""

    interval_seconds: IntervalSeconds = 5.0
    """Time between two decisions."""

    cool_down_seconds: PositiveSeconds = 300.0
    """Time after a growth during which nothing shrinks, and time for which a lower load must last before pools shrink;
    as in Kubernetes' HPA. If replicas start slowly, the first of these times is longer: 1.25 times the time until a new
    replica serves, unless the load has ended."""

    deadband: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Pools shrink only if the smaller pools can still serve the highest rate of the last cool-down plus this share of it."""

    margin: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """When pools grow, they are sized for the expected rate plus this share of it."""

    forecast: ForecastMethod = "chosen"
    """Method of the forecast. `last`, `mean`, `trend` and `seasonal`: always this method. `chosen`: the one of these
    methods that had the smallest error in a back-test. `level`: there is no forecast, only the present rate counts."""

    caution: Annotated[float, Meta(ge=0, le=5)] = 0.25
    """Number of standard errors of the forecast that are added to the forecast rate."""

    season_seconds: Annotated[float, Meta(ge=0, le=1e7)] = 86400.0
    """Time after which the load repeats itself, such as a day, for the forecast method `seasonal`; 0: the load has no
    seasons."""

    step_seconds: Annotated[float, Meta(ge=0.1, le=1e6)] = 15.0
    """Time between two samples of the rate from which the forecast is computed."""

    threshold: Annotated[float, Meta(ge=1, le=10)] = 4.0
    """Number of standard errors by which the latest rates or lengths must differ from their earlier mean to count as
    changed."""

    minimise: Minimised = "dollars"
    """Cost that the rule keeps low: `dollars`, by the prices of the pools, or `energy`, by their power under load (`pools.watts`).
    The dollars of the budget are a limit in both cases."""

    mix_saving: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the cost that another mix of pools must save, so that the planner changes to it."""

    retry_seconds: PositiveSeconds = 600.0
    """Time for which a pool is not made larger after it could not grow, because its replicas found no room or failed, or
    because its number was forbidden or rolled back."""
