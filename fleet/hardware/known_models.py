"""Known models: sizes of models by the name of their repository, so that no config is needed. They are in `known_models.toml`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number
from fleet.hardware.models import ModelSizes, Precision, read_model

AS_CONFIG = "config"
"""Key for repositories whose `config.json` states the data type of the weights."""


class SizedModel(Struct, frozen=True, kw_only=True):
    """A model and its longest context."""

    model: ModelSizes
    context: int
    """Most tokens of prompt and answer together; 0: unknown."""


class KnownModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the table."""

    parameters: float  # number of parameters that the model's authors state
    repositories: Mapping[Literal["config", "bf16", "fp8", "fp4", "int4"], tuple[str, ...]]
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return all known models by a short name."""
    text = resources.files(__package__).joinpath("known_models.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, KnownModel])


def model_by_repository(repository: str) -> SizedModel | None:
    """Return the model in a repository, or None if it is unknown. As on Hugging Face, case is ignored."""
    return _by_repository().get(repository.lower())


def model_from_config(config: Mapping[str, Any], name: str = "") -> SizedModel:
    """Return the model of a `config.json`.

    Raises:
        ConfigurationRefused: A field is missing or invalid; the message names it.
    """
    model = read_model(config, name)
    inner = config.get("text_config", config)
    context = inner.get("max_position_embeddings", 0)
    if not isinstance(context, int) or isinstance(context, bool) or context < 0:
        raise ConfigurationRefused(f"{model.name}: max_position_embeddings must be a whole number")
    return SizedModel(model=model, context=context)


@cache
def _by_repository() -> Mapping[str, SizedModel]:
    found: dict[str, SizedModel] = {}
    for name, each in known_models().items():
        as_config = model_from_config(each.config, name)
        for stored, repositories in each.repositories.items():
            sized = as_config
            if stored != AS_CONFIG:
                precision = Precision(weights=Number(stored), experts=Number(stored))
                sized = msgspec.structs.replace(
                    as_config, model=msgspec.structs.replace(as_config.model, precision=precision)
                )
            found |= {repository.lower(): sized for repository in repositories}
    return found
