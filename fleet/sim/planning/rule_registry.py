"""Rule registry: the names and parameters of the scaling rules that a replay can run."""

from collections.abc import Mapping

import msgspec

from fleet.core.errors import ConfigurationRefused, split_validation_error
from fleet.sim.planning.rule_context import SimulatedRule
from fleet.sim.planning.rules.chiron import ChironRule
from fleet.sim.planning.rules.dynamo import DynamoRule
from fleet.sim.planning.rules.fleet import FleetRule
from fleet.sim.planning.rules.heteroscale import HeteroScaleRule
from fleet.sim.planning.rules.hpa import HpaRule
from fleet.sim.planning.rules.kpa import KpaRule
from fleet.sim.planning.rules.oracle import OracleRule
from fleet.sim.planning.rules.queueing import QueueingRule
from fleet.sim.planning.rules.sageserve import SageServeRule
from fleet.sim.planning.rules.saturation import SaturationRule
from fleet.sim.planning.rules.slo_law import SloLawRule
from fleet.sim.planning.rules.static import MelangeRule, StaticBestRule, StaticPeakRule
from fleet.sim.planning.rules.tokenscale import TokenScaleRule
from fleet.sim.planning.scenario import Number

RULES: Mapping[str, type[SimulatedRule]] = {
    "fleet": FleetRule,
    "hpa": HpaRule,
    "kpa": KpaRule,
    "dynamo": DynamoRule,
    "llmd_slo": SloLawRule,
    "wva_saturation": SaturationRule,
    "wva_queueing": QueueingRule,
    "sageserve": SageServeRule,
    "chiron": ChironRule,
    "tokenscale": TokenScaleRule,
    "heteroscale": HeteroScaleRule,
    "melange": MelangeRule,
    "static_peak": StaticPeakRule,
    "static_best": StaticBestRule,
    "oracle": OracleRule,
}


def rule_settings(name: str, parameters: Mapping[str, Number] | None = None) -> SimulatedRule:
    """Return the parameters of the rule `name`: the given ones, and the defaults of the others.

    Raises:
        ConfigurationRefused: There is no such rule, it has no such parameter, or a value is invalid.
    """
    kind = RULES.get(name)
    if kind is None:
        raise ConfigurationRefused(f"rules: {name!r} is not one of {', '.join(RULES)}")
    try:
        return msgspec.convert(dict(parameters or {}), kind)
    except msgspec.ValidationError as error:
        cause, path = split_validation_error(error)
        raise ConfigurationRefused(f"planner.parameters.{name}{path}: {cause}") from error
