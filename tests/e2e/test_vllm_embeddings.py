"""Test of `/v1/embeddings` on a vLLM worker of `fleet up`, whose vectors are compared with those of transformers."""

from importlib.util import find_spec

import numpy as np
import openai
import pytest

from tests.support.fleet_processes import fleet_up

if find_spec("vllm") is not None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    from tests.support.workers.pooling_models import build_bert_embedder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch and transformers themselves
]

READY_SECONDS = 300
TEXTS = ["rain falls on grey roofs", "the lazy dog", "a quick brown fox jumps over the rain"]


def vectors_of_transformers(folder) -> np.ndarray:
    """Return the unit vectors of the first token ([CLS]) of each text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        vectors = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0].numpy() for text in TEXTS]
    return np.stack([vector / np.linalg.norm(vector) for vector in vectors])


def test_embeddings_over_http_are_those_of_transformers(tmp_path):
    folder = build_bert_embedder(tmp_path / "embedder")
    options = ("--model", str(folder), "--served-model-name", "bert", "--task", "embed", "--decode", "1")
    with fleet_up(tmp_path, *options, "--vllm-arg", "dtype=float32", engine="vllm", ready_seconds=READY_SECONDS) as up:
        assert up.endpoints["pids"].keys() == {"supervisor", "router", "both-0"}
        with openai.OpenAI(base_url=f"{up.endpoints['http']}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = client.embeddings.create(model="bert", input=TEXTS)
            alone = client.embeddings.create(model="bert", input=TEXTS[1], encoding_format="float")
            with pytest.raises(openai.BadRequestError, match="its task is embed"):
                client.completions.create(model="bert", prompt="rain")
        assert up.end() == 0

    vectors = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(vectors, vectors_of_transformers(folder), atol=1e-5)
    np.testing.assert_allclose(alone.data[0].embedding, vectors[1], atol=1e-6)
    assert answer.model == "bert"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS) * 5
    assert answer.fleet["workers"] == ["both-0"]
