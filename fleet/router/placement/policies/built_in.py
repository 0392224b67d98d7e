"""Built-in policies by name, and the filters, scorers and pickers that they consist of."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fleet.core.errors import ConfigurationRefused
from fleet.router.placement.policies.baselines import (
    ConsistentHash,
    LeastLoaded,
    PowerOfTwo,
    RequestsScorer,
    RoundRobin,
    SessionFilter,
    Sticky,
    Uniform,
)
from fleet.router.placement.policies.composed import Composed, PolicyCatalog
from fleet.router.placement.policies.operating_price import PriceScorer
from fleet.router.placement.policies.pipeline import Fleet, FleetCost, HeadroomFilter, Lowest, Softmax, TwoChoices
from fleet.router.placement.policies.published.aibrix import Aibrix
from fleet.router.placement.policies.published.dynamo import Dynamo, DynamoCost
from fleet.router.placement.policies.published.infera import Infera
from fleet.router.placement.policies.published.llm_d import LlmD, LlmDKvUse, LlmDPrefix, LlmDQueue
from fleet.router.placement.policies.published.mooncake import Mooncake, MooncakeTime
from fleet.router.placement.policies.published.preble import Preble
from fleet.router.placement.policies.published.smg import Smg
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings

DEFAULT = "fleet"
# Maximum absolute value of a parameter of a policy: even products of several parameters and the tokens of a prompt are then finite.
LARGEST = 1e24

BUILT_IN = PolicyCatalog(
    policies={
        DEFAULT: Fleet,
        "round_robin": RoundRobin,
        "random": Uniform,
        "p2c": PowerOfTwo,
        "least_loaded": LeastLoaded,
        "consistent_hash": ConsistentHash,
        "sticky": Sticky,
        "dynamo": Dynamo,
        "mooncake": Mooncake,
        "llm_d": LlmD,
        "aibrix": Aibrix,
        "smg": Smg,
        "infera": Infera,
        "preble": Preble,
        "composed": Composed,
    },
    filters={"session": SessionFilter, "headroom": HeadroomFilter},
    scorers={
        "fleet": FleetCost,
        "dynamo": DynamoCost,
        "mooncake": MooncakeTime,
        "queue": LlmDQueue,
        "kv": LlmDKvUse,
        "prefix": LlmDPrefix,
        "requests": RequestsScorer,
        "price": PriceScorer,
    },
    pickers={"lowest": Lowest, "softmax": Softmax, "two_choices": TwoChoices},
)


def parameters(settings: RouterSettings) -> dict[str, Any]:
    """Return the parameters of the policy that the settings name.

    Some parameters of the default policy are also fields of `RouterSettings`, with the same names. If the policy's own parameters do not
    contain them, the values of these fields are used.
    """
    table = settings.policies.get(settings.policy, {})
    if settings.policy != DEFAULT:
        return table
    shared = {name: getattr(settings, name) for name in Fleet.__struct_fields__ if hasattr(settings, name)}
    return shared | table


def check_numbers(value: Any, name: str = "") -> None:
    """Refuse parameters with numbers that could make a cost infinite or NaN, because the router would crash on such a cost.

    Args:
        value: All parameters of a policy, or a single value in them.
        name: The path of the value, for the message; empty for all parameters.

    Raises:
        ValueError: A number is too large or not finite; the message begins with its path.
    """
    inner: Iterable[tuple[Any, Any]] = ()
    match value:
        case float() | int() if not -LARGEST <= value <= LARGEST:
            raise ValueError(f"{name}: must be a number from -{LARGEST:g} to {LARGEST:g}")
        case Mapping():
            inner = value.items()
        case list() | tuple():
            inner = enumerate(value)
        case _:
            pass
    for key, each in inner:
        check_numbers(each, f"{name}.{key}" if name else str(key))


def policy(name: str, parameters: Mapping[str, Any], catalogue: PolicyCatalog = BUILT_IN) -> PlacementPolicy:
    """Make a new policy from its name and its parameters.

    Args:
        name: The name of a policy in the catalog.
        parameters: The fields of the policy, as they are written in the settings.
        catalogue: The known policies and parts.

    Raises:
        ConfigurationRefused: There is no such policy, or it does not accept these parameters.
    """
    if (kind := catalogue.policies.get(name)) is None:
        raise ConfigurationRefused(f"router.policy: {name!r} is not one of {', '.join(catalogue.policies)}")
    try:
        check_numbers(parameters)
        plugin = msgspec.convert(dict(parameters), kind)
        return plugin.of(catalogue) if isinstance(plugin, Composed) else plugin.policy()
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigurationRefused(f"router.policies.{name}: {error}") from error
