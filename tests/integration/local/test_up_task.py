"""Tests of `fleet up` for a model that embeds, with the simulated engine."""

import openai
import pytest

from tests.support.fleet_processes import fleet_up

pytestmark = pytest.mark.integration


def test_cluster_with_the_task_embed_serves_embeddings(tmp_path):
    with fleet_up(tmp_path, "--task", "embed", "--decode", "2", "--max-model-len", "9999") as up:
        assert up.endpoints["pids"].keys() == {"supervisor", "router", "both-0", "both-1"}
        url = f"{up.endpoints['http']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            answer = client.embeddings.create(model="tiny", input=["rain", "sun"])
            with pytest.raises(openai.BadRequestError, match="its task is embed"):
                client.completions.create(model="tiny", prompt="rain")

    cut = "fleet: max_model_len: 9999 is more than the model has; requests may have 4096 tokens"
    assert cut in (tmp_path / "up.log").read_text()
    assert [len(each.embedding) for each in answer.data] == [64, 64]
