"""Known models: finds the sizes of a model by the name of its repository, so that no config file is needed.

The file `known_models.toml` contains the table of models.
"""

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
"""Key in `KnownModel.repositories` for repositories whose weights have the data type that `KnownModel.config`
states."""


class SizedModel(Struct, frozen=True, kw_only=True):
    """Holds the sizes of a model and its maximum context length."""

    model: ModelSizes
    context: int
    """Maximum number of tokens of prompt and answer together, or 0 if it is unknown."""


class KnownModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds one entry of `known_models.toml`: a model and its repositories."""

    parameters: float  # number of parameters that the model's authors state
    repositories: Mapping[Literal["config", "bf16", "fp8", "fp4", "int4"], tuple[str, ...]]
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return all known models by their short names in the table, such as ``llama-3.1-8b``."""
    text = resources.files(__package__).joinpath("known_models.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, KnownModel])


def model_by_repository(repository: str) -> SizedModel | None:
    """Return the model in a repository, or None if the repository is unknown. Upper and lower case are equal, as on Hugging Face."""
    return _by_repository().get(repository.lower())


def model_from_config(config: Mapping[str, Any], name: str = "") -> SizedModel:
    """Return the model that the content of a `config.json` describes.

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
