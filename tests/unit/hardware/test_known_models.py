"""Models that are known by their repositories: as large as their makers say."""

from collections import Counter

import pytest

from fleet.core.errors import ConfigurationRefused
from fleet.hardware.gpus import Number
from fleet.hardware.known_models import known, model_by_repository, model_from_config
from tests.support.sim.model_configs import GPT_OSS, LLAMA_70B


@pytest.mark.parametrize("name", known())
def test_a_known_model_has_as_many_parameters_as_its_makers_say(name):
    entry = known()[name]
    assert model_from_config(entry.config).model.parameters == pytest.approx(entry.parameters, rel=0.01)


def test_no_repository_is_listed_twice():
    every = Counter(
        each.lower() for entry in known().values() for listed in entry.repositories.values() for each in listed
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
def test_a_repository_says_how_weights_are_stored(repository, weights, experts, context):
    found = model_by_repository(repository)
    assert (found.model.precision.weights, found.model.precision.experts, found.context) == (weights, experts, context)


def test_a_repository_that_only_looks_alike_is_not_known():
    assert model_by_repository("somebody/Llama-3.3-70B-Instruct") is None
    assert model_by_repository("llama-3.3-70b") is None


def test_a_config_says_what_its_model_takes_at_once_also_the_text_part_of_one():
    assert model_from_config(LLAMA_70B).context == 0
    assert model_from_config(LLAMA_70B | {"max_position_embeddings": 8192}).context == 8192
    assert model_from_config({"text_config": GPT_OSS | {"max_position_embeddings": 4096}}).context == 4096
    with pytest.raises(ConfigurationRefused, match="max_position_embeddings must be a whole number"):
        model_from_config(LLAMA_70B | {"max_position_embeddings": "long"})
