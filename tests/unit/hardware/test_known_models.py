"""Known models by repository: their sizes are those that their authors state."""

from collections import Counter

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number
from fleet.hardware.known_models import known_models, model_by_repository, model_from_config
from tests.support.sim.model_configs import GPT_OSS, LLAMA_70B


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_stated_parameters(name):
    entry = known_models()[name]
    assert model_from_config(entry.config).model.parameters == pytest.approx(entry.parameters, rel=0.01)


def test_no_repository_is_listed_twice():
    every = Counter(
        each.lower() for entry in known_models().values() for listed in entry.repositories.values() for each in listed
    )
    assert max(every.values()) == 1


@pytest.mark.parametrize(
    ("repository", "weights", "experts", "context"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", Number.BF16, Number.BF16, 131072),
        ("META-LLAMA/llama-3.3-70b-instruct", Number.BF16, Number.BF16, 131072),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", Number.FP8, Number.FP8, 131072),
        ("openai/gpt-oss-120b", Number.BF16, Number.FP4, 131072),
        ("deepseek-ai/DeepSeek-R1", Number.FP8, Number.FP8, 163840),
        ("nvidia/DeepSeek-R1-FP4", Number.FP4, Number.FP4, 163840),
    ],
)
def test_repository_determines_data_type_of_weights(repository, weights, experts, context):
    found = model_by_repository(repository)
    assert (found.model.precision.weights, found.model.precision.experts, found.context) == (weights, experts, context)


def test_similar_repository_name_is_unknown():
    assert model_by_repository("somebody/Llama-3.3-70B-Instruct") is None
    assert model_by_repository("llama-3.3-70b") is None


def test_config_gives_longest_context_also_in_text_part():
    assert model_from_config(LLAMA_70B).context == 0
    assert model_from_config(LLAMA_70B | {"max_position_embeddings": 8192}).context == 8192
    assert model_from_config({"text_config": GPT_OSS | {"max_position_embeddings": 4096}}).context == 4096
    with pytest.raises(ConfigurationRefused, match="max_position_embeddings must be a whole number"):
        model_from_config(LLAMA_70B | {"max_position_embeddings": "long"})
