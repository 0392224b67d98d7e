"""Model configs: reads the sizes of a model from its config file, which may be given by its path or by its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.models import ModelSizes, read_model

CONFIG = "config.json"
MOST_BYTES = 16 << 20
"""Maximum length of a config file; those of models have less than 1 MiB. A device such as /dev/zero has no end."""

QUANTIZATION = "hf_quant_config.json"
"""Name of the file that NVIDIA's checkpoints have instead of the field `quantization_config`."""


def read_model_config(path: Path) -> ModelSizes:
    """Read the sizes of a model from its config file; `path` is this file, or the model's folder.

    If the config has no field `quantization_config`, the file `QUANTIZATION` beside it is read too, if it exists.

    Raises:
        ConfigurationRefused: A file cannot be read or is not JSON, or the model is not supported; the message names the
            file, and the field if one is wrong.
    """
    file = path / CONFIG if path.is_dir() else path
    config = _object(file)
    beside = file.with_name(file.name.replace(CONFIG, QUANTIZATION))
    if "quantization_config" not in config and beside != file and beside.exists():
        config = {**config, "quantization_config": _object(beside).get("quantization", {})}
    try:
        return read_model(config, path.resolve().name if path.is_dir() else file.stem)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{file}: {error}") from error


def _object(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ConfigurationRefused(f"{file}: has more than {MOST_BYTES >> 20} MiB, and so is no config of a model")
        content = msgspec.json.decode(text)
    except OSError as error:
        raise ConfigurationRefused(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:  # RecursionError: the file nests thousands of brackets
        raise ConfigurationRefused(f"{file}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationRefused(f"{file}: must be a JSON object")
    return content
