"""Composed policy: filters, weighted scorers and a picker that the settings choose among built-in parts and entry points."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.router.placement.policies.pipeline import Pipeline
from fleet.router.policy import Filter, Picker, PolicyPlugin, Scorer

Kind = TypeVar("Kind")


class PolicyCatalog(Struct, frozen=True, kw_only=True):
    """The known plug-ins by name: Structs whose fields are their parameters."""

    policies: Mapping[str, type[PolicyPlugin]] = {}
    filters: Mapping[str, type[Filter]] = {}
    scorers: Mapping[str, type[Scorer]] = {}
    pickers: Mapping[str, type[Picker]] = {}


class PolicyPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name, weight and parameters of a filter, scorer or picker."""

    name: str
    weight: float = 1.0
    """The weight of a scorer; ignored for a filter or a picker."""

    parameters: dict[str, Any] = {}
    """Values of the fields of the filter, scorer or picker; a field without a value here has its default."""


class Composed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that consists of the filters, weighted scorers and picker that the settings name."""

    filters: tuple[PolicyPart, ...] = ()
    scorers: tuple[PolicyPart, ...] = ()
    picker: PolicyPart = PolicyPart(name="lowest")

    def policy(self) -> Pipeline:
        return self.of(PolicyCatalog())

    def of(self, catalogue: PolicyCatalog) -> Pipeline:
        """Return this policy, made of parts from a catalog.

        Raises:
            ConfigurationRefused: There is no such part, or it does not accept these parameters.
        """
        return Pipeline(
            "composed",
            filters=[_made("filters", part, catalogue.filters) for part in self.filters],
            scorers=[(part.name, part.weight, _made("scorers", part, catalogue.scorers)) for part in self.scorers],
            picker=_made("picker", self.picker, catalogue.pickers),
        )


def _made(where: str, part: PolicyPart, known: Mapping[str, type[Kind]]) -> Kind:
    path = f"router.policies.composed.{where}"
    if (kind := known.get(part.name)) is None:
        raise ConfigurationRefused(f"{path}: {part.name!r} is not one of {', '.join(known)}")
    try:
        return msgspec.convert(part.parameters, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigurationRefused(f"{path}.{part.name}: {error}") from error
