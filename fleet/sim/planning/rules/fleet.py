"""Fleet: runs Fleet's production planner as a scaling rule; the planner knows the simulated engines' step times."""

from fleet.core.clock import SECOND
from fleet.core.errors import ConfigurationRefused
from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.open_loop import EngineReplica
from fleet.hardware.latency.step_model import StepModel
from fleet.planner.machine import PlannerMachine
from fleet.planner.rule_settings import PlannerRuleSettings
from fleet.planner.sizing.capacity import PoolEngine, StepCapacity
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.planning.rule_context import RuleContext


class FleetRule(PlannerRuleSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the rule of Fleet's production planner (`fleet.planner.machine`)."""

    def open(self, context: RuleContext) -> PlannerMachine:
        """Create the planner's machine.

        Raises:
            ConfigurationRefused: The pools serve only one phase, or their minimum sizes exceed the budget.
        """
        engines = {name: pool_engine(profile) for name, profile in context.profiles.items()}
        try:
            return PlannerMachine(self, context.pools, context.goals, StepCapacity(engines), context.budget)
        except (
            ValueError
        ) as error:  # it names a field of the planner: in a scenario, only the roles are outside of [planner]
            section = "" if str(error).startswith("pools: ") else "planner."
            raise ConfigurationRefused(f"{section}{error}") from error


def pool_engine(profile: PoolProfile) -> PoolEngine:
    """Return step times, limits and KV transfer times of a pool's replicas as the production planner expects them."""
    assert isinstance(profile.times, StepModel), "pools of scenarios have step models"
    limits = profile.limits
    return PoolEngine(
        engine=EngineReplica(
            step=profile.times,
            client=BenchmarkClient(front=profile.front / SECOND, front_token=profile.front_per_token / SECOND),
            capacity_tokens=limits.kv_blocks * limits.block_tokens,
            most_running=limits.max_running,
            budget_tokens=limits.step_tokens,
        ),
        transfer_base=profile.link_latency / SECOND,
        transfer_token=profile.kv_bytes_per_token / profile.bandwidth,
    )
