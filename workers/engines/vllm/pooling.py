"""Pooling models in vLLM: finds out the task of a model, and translates requests for vectors."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import MAX_VECTOR_NUMBERS, PairForm, PoolingModel, PoolingTask, Vector
from fleet.core.work import Start
from workers.engines.model_task import task_of_config
from workers.engines.vllm import launch as vllm_launch
from workers.settings import POOLING_TASKS, ModelTask, WorkerSettings

if TYPE_CHECKING:
    from vllm import PoolingParams
    from vllm.config import ModelConfig
    from vllm.outputs import PoolingRequestOutput


def with_task(settings: WorkerSettings, scratch: Path) -> WorkerSettings:
    """Return the settings with the model's task, which is read from the model folder if the settings leave it open.

    Raises:
        ConfigurationRefused: vLLM cannot read the model folder, or a setting does not fit the task.
    """
    if settings.task is not ModelTask.AUTO:
        return settings
    config = vllm_launch.read_model_config(settings.model_dir)
    if task_of_config(config, Path(settings.model_dir)) is ModelTask.GENERATE and not _chosen(settings):
        return structs.replace(settings, task=ModelTask.GENERATE)
    args = vllm_launch.engine_args(settings, revision="", scratch=scratch)
    try:
        model = args.create_model_config()
    except (RuntimeError, ValueError) as error:
        raise ConfigurationRefused(f"vllm: {error}") from error
    if model.runner_type != "pooling":
        return structs.replace(settings, task=ModelTask.GENERATE)
    task = ModelTask.CLASSIFY if _classifies(model) else ModelTask.EMBED
    try:
        return structs.replace(settings, task=task)
    except ValueError as error:
        raise ConfigurationRefused(str(error)) from error


def check_tasks(model: PoolingModel, offered: tuple[str, ...]) -> None:
    """Refuse a task that the started engine does not offer.

    Raises:
        ConfigurationRefused: The engine does not offer the task; the message names the tasks that it offers.
    """
    if model.task not in offered:
        raise ConfigurationRefused(f"task: vLLM offers {', '.join(offered)} for this model, and not {model.task}")


def pooling_model(settings: WorkerSettings, config: "ModelConfig") -> PoolingModel | None:
    """Return the description of a pooling model; None if the model generates."""
    if settings.task not in POOLING_TASKS:
        return None
    task = PoolingTask(settings.task)
    return PoolingModel(task=task, pairs=_pair_form(config) if task is PoolingTask.CLASSIFY else PairForm.NONE)


def has_token_types(config: "ModelConfig", tokenizer: object | None) -> bool:
    """Return whether the model takes token types, which tell it to which text of a pair each token belongs.

    As in vLLM's own server, the model's configuration and the tokenizer decide. A model without token types would fail on them.
    """
    types = getattr(config.hf_text_config, "type_vocab_size", 0)
    inputs = getattr(tokenizer, "model_input_names", ("token_type_ids",))
    return isinstance(types, int) and types > 1 and "token_type_ids" in inputs


def pooling_params(start: Start, *, token_types: bool) -> "PoolingParams":
    """Return vLLM's parameters for a request for a vector; `token_types` is the result of `has_token_types` for the model."""
    from vllm import PoolingParams  # noqa: PLC0415 - slow to import

    pooling = start.pooling
    assert pooling is not None
    typed = token_types and pooling.first_tokens
    return PoolingParams(
        task=pooling.task.value,
        dimensions=pooling.dimensions or None,
        use_activation=pooling.activation,
        extra_kwargs={"compressed_token_type_ids": pooling.first_tokens} if typed else None,
    )


def vector_of(output: "PoolingRequestOutput") -> Vector:
    """Return the vector of a finished request.

    Raises:
        ValueError: vLLM failed, or the vector has no numbers, too many, or one that is not finite.
    """
    if output.error is not None:
        raise ValueError(f"the engine gave up: {output.error}")
    numbers = output.outputs.data.detach().float().flatten().numpy()
    if not 0 < len(numbers) <= MAX_VECTOR_NUMBERS:
        raise ValueError(f"the engine gave {len(numbers)} numbers, and 1 to {MAX_VECTOR_NUMBERS} are allowed")
    if not np.isfinite(numbers).all():
        raise ValueError("the engine gave numbers that are not finite")
    return bytes(numbers.astype("<f4").tobytes())


def _chosen(settings: WorkerSettings) -> bool:
    """Return whether `vllm.extra_args` has an argument that may decide the task, so that vLLM has to be asked."""
    return not settings.vllm.extra_args.keys().isdisjoint(("runner", "convert", "hf_overrides"))


def _classifies(model: "ModelConfig") -> bool:
    if model.convert_type == "classify" or model.score_type == "cross-encoder":
        return True
    return str(model.architecture).endswith(("Classification", "ClassificationModel"))


def _pair_form(model: "ModelConfig") -> PairForm:
    """Return how vLLM's own server makes one prompt from a pair of texts for this model.

    Return NONE if the model does not score pairs, or if the router cannot make such a prompt.
    """
    from vllm.model_executor.model_loader import get_model_cls  # noqa: PLC0415 - slow to import
    from vllm.model_executor.models.interfaces import supports_score_template  # noqa: PLC0415

    config = model.hf_config
    if model.score_type != "cross-encoder" or getattr(config, "num_labels", 1) != 1:
        return PairForm.NONE
    if supports_score_template(get_model_cls(model)) or getattr(config, "is_original_qwen3_reranker", False):
        return PairForm.NONE  # such a model needs a template for pairs, which the router does not have
    return PairForm.SEPARATED if model.use_sep_token else PairForm.JOINED
