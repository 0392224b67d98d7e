"""Model task: guesses the task of a model from the architecture names in its folder, without loading vLLM.

`fleet up` uses the guess. A worker with vLLM uses it only for models that generate tokens, and otherwise asks vLLM
(`workers.engines.vllm.pooling`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.core.errors import ConfigurationRefused
from workers.settings import ModelTask

GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
CLASSIFYING = ("Classification", "ClassificationModel")
EMBEDDING = ("ForTextEncoding", "EmbeddingModel", "Model")
"""Endings by which vLLM recognises the architecture names of embedding models. They count only for names without an ending
of `GENERATING` or `CLASSIFYING`, because "LMHeadModel" also ends with "Model"."""

SENTENCE_TRANSFORMERS = "modules.json"
"""vLLM takes the model of a folder with this file as an embedding model, even if its architecture could generate tokens."""


def task_of_folder(folder: Path) -> ModelTask:
    """Return the task of the model in a folder.

    Raises:
        ConfigurationRefused: The folder's config.json cannot be read, or is not JSON.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"{path}: is not a model's configuration: {error}") from error
    return task_of_config(config if isinstance(config, dict) else {}, folder)


def task_of_config(config: Mapping[str, Any], folder: Path) -> ModelTask:
    """Return the task of the model in `folder`, whose config.json has the content `config`.

    If the architecture is unknown, the model counts as one that generates tokens.
    """
    names = [str(each) for each in config.get("architectures") or ()]
    if (folder / SENTENCE_TRANSFORMERS).exists():
        return ModelTask.EMBED
    if any(each.endswith(GENERATING) for each in names):
        return ModelTask.GENERATE
    if any(each.endswith(CLASSIFYING) for each in names):
        return ModelTask.CLASSIFY
    return ModelTask.EMBED if any(each.endswith(EMBEDDING) for each in names) else ModelTask.GENERATE
