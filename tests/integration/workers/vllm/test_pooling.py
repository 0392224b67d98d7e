"""Tests of pooling models in vLLM workers: the vectors are those of plain vLLM."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.requests import Finish, PairForm, Pooling, PoolingModel, PoolingTask
from fleet.core.work import Progress, Rejected, Start
from fleet.frontend.text.codec import load_codec
from fleet.local.tiny_model import build_tiny_model
from tests.support.builders import a_start, token_bytes, token_ids
from tests.support.workers.pooling_models import LONGEST, build_bert_embedder, build_bert_scorer
from tests.support.workers.vllm_engines import hosted, vllm_worker
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.pooling import with_task
from workers.settings import ModelTask, WorkerSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

PROMPTS = ([2, 17, 30, 3], [2, *range(20, 80), 3], [2, *[9, 8, 7] * 60, 3])
PAIRS = (("grey roofs", "rain falls on roofs"), ("the lazy dog", "a quick fox"), ("rain", "over the dog"))
PLAIN_SECONDS = 400


class Models:
    def __init__(self, folder: Path) -> None:
        self.embedder = build_bert_embedder(folder / "embedder")
        self.scorer = build_bert_scorer(folder / "scorer")
        self.llama = build_tiny_model(folder / "llama")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("pooling-models"))


@pytest.fixture(scope="module")
def plain(built: Models, tmp_path_factory: pytest.TempPathFactory) -> list[list]:
    """Return what plain vLLM computes: embeddings of the two embedding models, and scores of the pairs."""
    folder = tmp_path_factory.mktemp("plain")
    cases = [
        {"model": str(built.embedder), "tokens": PROMPTS},
        {"model": str(built.llama), "tokens": PROMPTS},
        {"model": str(built.scorer), "pairs": PAIRS},
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.support.workers.plain_vllm", folder / "cases.json", folder / "answers.json"]
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=PLAIN_SECONDS, check=False)
    assert ended.returncode == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "answers.json").read_text())


def a_worker(model: Path, **fields) -> WorkerSettings:
    return structs.replace(vllm_worker(model), max_model_len=LONGEST, **fields)


IDS = count()


def an_attempt(tokens: bytes, **pooling) -> Start:
    pooling = {"task": PoolingTask.EMBED, **pooling}
    return a_start(request_id=f"p{next(IDS)}", tokens=tokens, pooling=Pooling(**pooling))


@pytest.fixture(scope="module")
def engines(built: Models) -> Iterator:
    embedder, scorer = a_worker(built.embedder), a_worker(built.scorer)
    llama = a_worker(built.llama, task=ModelTask.EMBED)
    with hosted(embedder, scorer, llama) as running:
        yield running


def vectors(engines, place: int, starts: list[Start]) -> list[np.ndarray]:
    driver = engines.engines[place]

    async def serve() -> list[Progress | Rejected]:
        driver.submit(*starts)
        return [await driver.end_of(start) for start in starts]

    ends = engines.run(serve())
    assert all(isinstance(end, Progress) and end.finish is Finish.STOP for end in ends), ends
    return [np.frombuffer(end.vector, "<f4") for end in ends]


def test_model_folder_tells_the_task(engines):
    assert [driver.engine.facts.pooling for driver in engines.engines] == [
        PoolingModel(task=PoolingTask.EMBED),
        PoolingModel(task=PoolingTask.CLASSIFY, pairs=PairForm.SEPARATED),
        PoolingModel(task=PoolingTask.EMBED),
    ]


@pytest.mark.parametrize("place", [0, 2], ids=["encoder", "converted"])
def test_embeddings_are_those_of_plain_vllm(place, engines, plain):
    expected = plain[0 if place == 0 else 1]

    found = vectors(engines, place, [an_attempt(token_bytes(ids)) for ids in PROMPTS])

    for vector, numbers in zip(found, expected, strict=True):
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(vector, numbers, atol=1e-5)


def test_scores_of_pairs_are_those_of_plain_vllm(built, engines, plain):
    codec = load_codec(built.scorer)
    pairs = [codec.encode_pair(*pair) for pair in PAIRS]
    starts = [an_attempt(tokens, task=PoolingTask.CLASSIFY, first_tokens=first) for tokens, first in pairs]

    found = [vector.item() for vector in vectors(engines, 1, starts)]

    assert found == pytest.approx(plain[2], abs=1e-5)
    untyped = [an_attempt(tokens, task=PoolingTask.CLASSIFY) for tokens, _ in pairs]
    assert [vector.item() for vector in vectors(engines, 1, untyped)] != pytest.approx(found, abs=1e-3)


def test_longest_prompt_fills_the_context(engines):
    ids = [5 + number % 90 for number in range(LONGEST)]

    (vector,) = vectors(engines, 0, [an_attempt(token_bytes(ids))])

    assert np.isfinite(vector).all()


def test_dimensions_are_refused_by_name(engines):
    driver = engines.engines[0]
    start = an_attempt(token_bytes(PROMPTS[0]), dimensions=8)

    async def serve() -> Progress | Rejected:
        driver.submit(start)
        return await driver.end_of(start)

    end = engines.run(serve())

    assert isinstance(end, Rejected)
    assert (end.reason, end.field) == (Reason.INVALID_ARGUMENT, "pooling.dimensions")


def test_cancelled_attempt_ends_as_cancelled(engines):
    driver = engines.engines[2]
    starts = [an_attempt(token_bytes([number + 1, *range(200)])) for number in range(64)]

    async def cancel() -> list[Progress | Rejected]:
        driver.submit(*starts)
        driver.engine.cancel(starts[-1].request_id)
        ends = [await driver.end_of(start) for start in starts]
        await driver.idle()
        return ends

    ends = engines.run(cancel())

    assert [end.finish for end in ends] == [Finish.STOP] * 63 + [Finish.CANCELLED]


def test_generating_model_keeps_its_task(built, tmp_path):
    assert with_task(a_worker(built.llama), tmp_path).task is ModelTask.GENERATE


def test_classifier_refuses_a_store_by_name(built, tmp_path):
    vllm_launch.prepare_environment(a_worker(built.scorer), tmp_path)
    with pytest.raises(ConfigurationRefused, match="store: a worker with the task classify"):
        with_task(a_worker(built.scorer, store="unix:/nowhere"), tmp_path)


def test_tokens_of_the_two_texts_are_told_apart(built):
    tokens, first = load_codec(built.scorer).encode_pair("grey roofs", "rain falls")
    ids = token_ids(tokens)

    assert ids[first - 1] == 3  # the separator after the first text
    assert ids[0] == 2
    assert 0 < first < len(ids)
