"""Tests of embeddings, reranking and scores on Fleet's own workers, with OpenAI's client and a simulated engine."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import grpc
import httpx
import numpy as np
import openai
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from fleet.backends.workers.streams import WorkerStreams
from fleet.client import AsyncClient, Client, InvalidRequest, VectorResult
from fleet.client.errors import error_of
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import PoolingModel, PoolingTask
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.generation import Generation
from fleet.frontend.grpc.service import GrpcFrontend
from fleet.frontend.openai.service import open_http_frontend
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.settings import GrpcSettings, HttpSettings
from fleet.router.messages import WorkerEvent, WorkerJoined
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from fleet.router.tenants import Tenants, TenantSettings
from fleet.v1 import inference_pb2 as pb
from fleet.v1.inference_pb2_grpc import InferenceStub
from tests.support.waiting import until
from tests.support.workers.simulated_clusters import a_router_for, simulated_worker
from tests.support.workers.worker_processes import WorkerProcess, a_worker_process
from workers.settings import ModelTask

pytestmark = pytest.mark.integration

KEY = "sk-vectors"
SIZE = 64  # dimensions of the simulated engine's embeddings


class VectorCluster:
    """A router with workers, and its HTTP port."""

    def __init__(
        self, router: RouterServer, url: str, tenants: Tenants, registry: CollectorRegistry, grpc_address: str
    ) -> None:
        self.router = router
        self.url = url
        self.grpc_address = grpc_address
        self.tenants = tenants
        self.registry = registry
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)

    async def post(self, path: str, body: dict, key: str = KEY) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{self.url}{path}", json=body, headers={"authorization": f"Bearer {key}"})


@asynccontextmanager
async def a_cluster(
    folder: Path, model_dir: Path, *tasks: ModelTask, model: str = "tiny", requests_per_minute: float = 0.0
) -> AsyncIterator[VectorCluster]:
    async with AsyncExitStack() as stack:
        told = [
            simulated_worker(
                task=task,
                worker_id=WorkerId(f"w{number}"),
                model=ModelName(model),
                model_dir=str(model_dir),
                max_model_len=512,
            )
            for number, task in enumerate(tasks)
        ]
        processes = [await stack.enter_async_context(a_worker_process(folder, each)) for each in told]
        router = await stack.enter_async_context(a_router_for(*processes, store=""))
        yield await stack.enter_async_context(a_port(router, model_dir, model, requests_per_minute))


@asynccontextmanager
async def a_port(
    router: RouterServer, model_dir: Path, model: str, requests_per_minute: float
) -> AsyncIterator[VectorCluster]:
    clock, registry, threads = SystemClock(), CollectorRegistry(), TokenizerThreads()
    digest = sha256(KEY.encode()).hexdigest()
    acme = TenantSettings(api_key_sha256=(digest,), requests_per_minute=requests_per_minute)
    tenants = Tenants({"acme": acme}, clock.now())
    generation = Generation(
        router,
        {ModelName(model): load_codec(model_dir)},
        clock=clock,
        tenants=tenants,
        tenant_secret=b"secret",
        metrics=RouterProcessMetrics(registry),
        threads=threads,
    )
    async with (
        open_http_frontend("127.0.0.1:0", HttpSettings(), generation, registry, clock) as http,
        GrpcFrontend.open("127.0.0.1:0", generation, clock, max_held_bytes=1 << 26, limits=GrpcSettings()) as grpc_port,
    ):
        cluster = VectorCluster(router, f"http://{http.address}", tenants, registry, grpc_port.address)
        async with cluster.client:
            yield cluster
    threads.close()


@pytest.fixture
async def embedding(tmp_path, model_dir):
    async with a_cluster(tmp_path, model_dir, ModelTask.EMBED, ModelTask.EMBED) as cluster:
        yield cluster


@pytest.fixture
async def scoring(tmp_path, model_dir):
    async with a_cluster(tmp_path, model_dir, ModelTask.CLASSIFY) as cluster:
        yield cluster


async def test_text_gives_its_unit_vector_with_usage(embedding):
    answer = await embedding.client.embeddings.create(model="tiny", input="once upon a time")
    again = await embedding.client.embeddings.create(model="tiny", input="once upon a time", encoding_format="float")
    other = await embedding.client.embeddings.create(model="tiny", input="once upon a tide")

    vector = answer.data[0].embedding
    assert len(vector) == SIZE
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert again.data[0].embedding == pytest.approx(vector, abs=1e-7)  # the client asks for base64 by default
    assert other.data[0].embedding != pytest.approx(vector, abs=0.01)
    tokens = (await embedding.post("/tokenize", {"prompt": "once upon a time"})).json()["count"]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "tiny", "embedding")


async def test_list_keeps_its_order_and_uses_all_workers(embedding):
    texts = [f"text number {number}" for number in range(150)]

    answer = await embedding.client.embeddings.create(model="tiny", input=texts, extra_body={"request_id": "list"})
    alone = await embedding.client.embeddings.create(model="tiny", input=texts[140])

    assert [each.index for each in answer.data] == list(range(150))
    assert answer.data[140].embedding == pytest.approx(alone.data[0].embedding, abs=1e-7)
    placed = {embedding.router.explain(f"list-{number}").placements[-1].decode for number in range(1, 150)}
    assert placed == {"w0", "w1"}
    assert set(answer.fleet["workers"]) == placed
    assert len(alone.fleet["workers"]) == 1


async def test_token_ids_give_the_vector_of_their_text(embedding):
    ids = (await embedding.post("/tokenize", {"prompt": "once upon a time"})).json()["tokens"]

    text = await embedding.client.embeddings.create(model="tiny", input="once upon a time")
    one = await embedding.client.embeddings.create(model="tiny", input=ids)
    several = await embedding.client.embeddings.create(model="tiny", input=[ids[:2], ids])

    assert one.data[0].embedding == text.data[0].embedding == several.data[1].embedding
    assert several.usage.prompt_tokens == len(ids) + 2


async def test_dimensions_cut_the_vector_to_unit_length(embedding):
    whole = await embedding.client.embeddings.create(model="tiny", input="abc")
    cut = await embedding.client.embeddings.create(model="tiny", input="abc", dimensions=8)

    first = np.asarray(whole.data[0].embedding[:8])
    assert cut.data[0].embedding == pytest.approx(list(first / np.linalg.norm(first)), abs=1e-6)


async def test_base64_holds_little_endian_floats(embedding):
    body = {"model": "tiny", "input": "abc"}
    text = (await embedding.post("/v1/embeddings", {**body, "encoding_format": "base64"})).json()
    numbers = (await embedding.post("/v1/embeddings", body)).json()

    decoded = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4").tolist()
    assert decoded == numbers["data"][0]["embedding"]


async def test_rerank_orders_documents_by_cosine(embedding):
    body = {"query": "a fox", "documents": ["a dog", {"text": "a fox"}, "a hen"], "top_n": 2}
    answers = [(await embedding.post(path, body)).json() for path in ("/rerank", "/v1/rerank", "/v2/rerank")]

    first, second = answers[0]["results"]
    assert (first["index"], first["document"]) == (1, {"text": "a fox"})
    assert first["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert second["relevance_score"] < 0.9
    assert [each["results"] for each in answers[1:]] == [answers[0]["results"]] * 2
    bare = (await embedding.post("/rerank", {**body, "return_documents": False})).json()
    assert set(bare["results"][0]) == {"index", "relevance_score"}


async def test_cross_encoder_scores_each_pair(scoring):
    score = await scoring.post("/v1/score", {"text_1": "a fox", "text_2": ["a dog", "a hen"]})
    rerank = await scoring.post("/v1/rerank", {"query": "a fox", "documents": ["a dog", "a hen"]})

    scores = [each["score"] for each in score.json()["data"]]
    assert scores[0] != scores[1]
    assert all(0 <= each <= 1 for each in scores)
    ranked = {each["index"]: each["relevance_score"] for each in rerank.json()["results"]}
    assert [ranked[0], ranked[1]] == scores
    assert [each["relevance_score"] for each in rerank.json()["results"]] == sorted(scores, reverse=True)


async def test_classes_of_an_input_have_a_label_and_numbers(scoring):
    several = (await scoring.post("/classify", {"model": "tiny", "input": ["a fox", "a hen"]})).json()
    single = (await scoring.post("/classify", {"input": "a hen"})).json()

    assert [each["index"] for each in several["data"]] == [0, 1]
    assert several["data"][1] == {**single["data"][0], "index": 1}
    assert several["data"][0]["probs"] != several["data"][1]["probs"]
    assert (single["data"][0]["label"], single["data"][0]["num_classes"]) == ("LABEL_0", 1)
    assert single["usage"]["prompt_tokens"] == single["usage"]["total_tokens"] > 0


async def test_pooling_gives_what_the_task_of_the_model_gives(embedding):
    vector = (await embedding.post("/v1/embeddings", {"input": "a fox", "dimensions": 8})).json()["data"][0]
    pooled = (await embedding.post("/pooling", {"input": "a fox", "dimensions": 8, "task": "embed"})).json()["data"]

    assert pooled == [{"index": 0, "object": "pooling", "data": vector["embedding"]}]


async def test_pooling_of_a_classifier_gives_its_classes(scoring):
    classes = (await scoring.post("/classify", {"input": "a fox"})).json()["data"][0]["probs"]

    assert (await scoring.post("/pooling", {"input": "a fox"})).json()["data"][0]["data"] == classes


async def test_score_takes_lists_of_one_length(scoring):
    both = await scoring.post("/score", {"queries": ["a", "b"], "documents": ["c", "d"]})
    single = await scoring.post("/score", {"queries": "b", "documents": "d"})

    assert both.json()["data"][1]["score"] == single.json()["data"][0]["score"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], "a"]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [2, 99_999]]}, "input[1][1]"),
        ("/v1/embeddings", {"input": ["a", "word " * 600]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "fleet": {"tenants": "x"}}, "fleet.tenants"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/pooling", {"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ("/pooling", {"messages": [], "input": "a"}, "messages"),
        ("/classify", {"input": ["a"]}, "model"),
        ("/classify", {"input": []}, "input"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_1"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
    ],
)
async def test_wrong_request_is_refused_by_field(path, body, param, embedding):
    answer = await embedding.post(path, {"model": "tiny", **body})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_embeddings_of_a_classifier_are_refused(scoring):
    answer = await scoring.post("/v1/embeddings", {"model": "tiny", "input": "a"})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "model: 'tiny' has the task classify, and this needs embed: use /classify, /v1/score, /v1/rerank, /pooling, "
        "or pooling over gRPC"
    )


async def test_embeddings_of_a_generating_model_are_refused(tmp_path, model_dir):
    async with a_cluster(tmp_path, model_dir, ModelTask.AUTO) as cluster:
        answers = [
            await cluster.post("/v1/embeddings", {"model": "tiny", "input": "a"}),
            await cluster.post("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["a"]}),
        ]
        unknown = await cluster.post("/v1/embeddings", {"model": "other", "input": "a"})

    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "'tiny' generates text" in answer.json()["error"]["message"]
    assert unknown.status_code == 404


async def test_wrong_key_is_refused(embedding):
    answers = [
        await embedding.post("/v1/embeddings", {"model": "tiny", "input": "a"}, key="sk-wrong"),
        await embedding.post("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}, key="sk-wrong"),
    ]

    assert [answer.status_code for answer in answers] == [401, 401]


async def test_prompts_count_for_tenant_and_metrics(embedding):
    await embedding.client.embeddings.create(model="tiny", input=["once upon", "a time"])
    usage = embedding.tenants.usage()["acme"]
    counted = embedding.registry.get_sample_value

    assert usage.requests == 2
    assert usage.prompt_tokens == counted("fleet_prompt_tokens_total", {"model": "tiny"}) > 4
    assert counted("fleet_requests_total", {"model": "tiny", "outcome": "stop", "placement": "aggregated"}) == 2
    assert counted("fleet_completion_tokens_total", {"model": "tiny"}) == usage.answer_tokens == 0


async def test_rate_limit_holds_for_prompts(tmp_path, model_dir):
    async with a_cluster(tmp_path, model_dir, ModelTask.EMBED, requests_per_minute=2) as cluster:
        first = await cluster.post("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})
        second = await cluster.post("/v1/embeddings", {"model": "tiny", "input": "c"})

    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert second.status_code == 429


async def test_late_request_ends_at_its_deadline(tmp_path, model_dir):
    hang = tmp_path / "hang"
    async with AsyncExitStack() as stack:
        settings = simulated_worker(task=ModelTask.EMBED, model_dir=str(model_dir))
        settings = structs.replace(settings, simulated=structs.replace(settings.simulated, hang_file=str(hang)))
        hang.touch()
        process = await stack.enter_async_context(a_worker_process(tmp_path, settings))
        router = await stack.enter_async_context(a_router_for(process, store=""))
        cluster = await stack.enter_async_context(a_port(router, model_dir, "tiny", 0))

        answer = await cluster.post("/v1/embeddings", {"input": "a", "fleet": {"timeout_ms": 300}})

        assert answer.status_code == 504
        await until(lambda: cluster.router.status().active == 0)
        hang.unlink()


async def test_lost_worker_is_replaced_by_another(tmp_path, model_dir):
    hang = tmp_path / "hang"
    async with AsyncExitStack() as stack:
        told = [
            simulated_worker(task=ModelTask.EMBED, model_dir=str(model_dir), worker_id=WorkerId(name))
            for name in ("lost", "other")
        ]
        hanging = structs.replace(told[0].simulated, hang_file=str(hang))
        told[0] = structs.replace(told[0], simulated=hanging)
        hang.touch()
        processes: list[WorkerProcess] = [
            await stack.enter_async_context(a_worker_process(tmp_path, each)) for each in told
        ]
        router = await stack.enter_async_context(a_router_for(*processes, store=""))
        cluster = await stack.enter_async_context(a_port(router, model_dir, "tiny", 0))
        texts = [f"text {number}" for number in range(12)]
        asking = asyncio.ensure_future(cluster.client.embeddings.create(model="tiny", input=texts))
        await until(lambda: router.booked().get(WorkerId("lost")) is not None)

        processes[0].kill()
        answer = await asking

        assert [each.index for each in answer.data] == list(range(12))
        assert router.status().counters.retried > 0


async def test_worker_with_another_task_is_not_used(tmp_path, model_dir, caplog):
    async with AsyncExitStack() as stack:
        told = [
            simulated_worker(task=task, model_dir=str(model_dir), worker_id=WorkerId(task.value))
            for task in (ModelTask.EMBED, ModelTask.GENERATE)
        ]
        processes = [await stack.enter_async_context(a_worker_process(tmp_path, each)) for each in told]
        streams = WorkerStreams(RouterSettings(), addresses=[process.address for process in processes])
        joined: list[WorkerEvent] = []
        running = asyncio.ensure_future(streams.run(joined.append))
        try:
            await until(lambda: "worker stream ended" in caplog.messages)
        finally:
            running.cancel()

    assert sum(isinstance(each, WorkerJoined) for each in joined) == 1
    (cause,) = {record.cause for record in caplog.records if record.message == "worker stream ended"}
    assert "its model tiny has the task" in cause


async def test_client_of_grpc_gets_the_vectors_of_http(embedding):
    texts = [f"text number {number}" for number in range(150)]
    over_http = await embedding.client.embeddings.create(model="tiny", input=texts)

    async with AsyncClient(embedding.grpc_address, api_key=KEY) as client:
        found = await client.embed(texts)
        short, ids = await client.embed(["rain", [7, 8, 9]], dimensions=8, pin="w1")
        [card] = await client.models()

    assert [each.vector for each in found] == [pytest.approx(each.embedding, abs=1e-7) for each in over_http.data]
    assert sum(each.prompt_tokens for each in found) == over_http.usage.prompt_tokens
    assert {each.worker_id for each in found} == {"w0", "w1"}
    assert (len(short.vector), short.worker_id) == (8, "w1")
    assert (len(ids.vector), ids.prompt_tokens, ids.model) == (8, 3, "tiny")
    assert card.pooling == PoolingModel(task=PoolingTask.EMBED)


async def test_blocking_client_of_grpc_gets_vectors(embedding):
    def embed() -> tuple[VectorResult, ...]:
        with Client(embedding.grpc_address, api_key=KEY, resume_seconds=5) as client:
            return client.embed([f"text number {number}" for number in range(100)], timeout_seconds=60)

    found = await asyncio.to_thread(embed)

    assert [np.linalg.norm(each.vector) for each in found] == [pytest.approx(1, abs=1e-5)] * 100
    assert len({each.vector for each in found}) == 100


async def test_client_of_grpc_gets_the_numbers_of_classes(scoring):
    over_http = (await scoring.post("/classify", {"input": ["rain", "sun"]})).json()["data"]

    async with AsyncClient(scoring.grpc_address, api_key=KEY) as client:
        found = await client.classify(["rain", "sun"])
        with pytest.raises(InvalidRequest, match="has the task classify, and this needs embed"):
            await client.embed(["rain"])

    assert [list(each.vector) for each in found] == [pytest.approx(each["probs"], abs=1e-7) for each in over_http]


async def test_failed_text_fails_the_list_and_cancels_the_rest(embedding):
    async with AsyncClient(embedding.grpc_address, api_key=KEY) as client:
        with pytest.raises(InvalidRequest, match="text: must not be empty"):
            await client.embed(["rain", "", *(f"text number {number}" for number in range(200))])
        no_lists = ("rain", [3], [None], 5, [b"rain"], {"rain": 1}, (each for each in ("rain", "sun")))
        for wrong in (*no_lists, [[1.5]], [["x"]], ["rain", [3, None]], [np.array([1.5])]):
            with pytest.raises(InvalidRequest, match="texts: must be a list of texts"):
                await client.embed(wrong)
        for dimensions in (-1, "x"):
            with pytest.raises(InvalidRequest, match=r"pooling\.dimensions: "):
                await client.embed(["rain"], dimensions=dimensions)
        with pytest.raises(InvalidRequest, match="its task is embed"):
            await client.complete("rain")
        await until(lambda: embedding.router.status().active == 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])}, "chat.messages"),
        ({"text": "x", "sampling": pb.Sampling(temperature=0.5)}, "sampling"),
        ({"text": "x", "stop": ["END"]}, "stop"),
        ({"text": "x", "bad_words": ["rain"]}, "bad_words"),
        ({"text": "x", "include_stop_string": True}, "include_stop_string"),
        ({"text": "x", "show_special_tokens": True}, "show_special_tokens"),
        ({"text": "x", "parsing": pb.AnswerParsing()}, "parsing"),
        ({"text": "x", "placement": pb.PLACEMENT_DISAGGREGATED}, "placement"),
        ({"text": "x", "kv_path": pb.KV_PATH_STORE}, "kv_path"),
        ({"text": "x", "resumable": True}, "resumable"),
        ({"token_ids": pb.TokenIds(ids=[7, 8]), "first": 3}, "pooling.first_tokens"),
        ({"text": "x", "dimensions": SIZE + 1}, "pooling.dimensions"),
    ],
)
async def test_field_of_generated_answers_is_refused_with_a_vector(embedding, fields, named):
    given = dict(fields)
    pooling = pb.Pooling(task="embed", first_tokens=given.pop("first", 0), dimensions=given.pop("dimensions", 0))
    async with grpc.aio.insecure_channel(embedding.grpc_address) as channel:
        stub = InferenceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(pooling=pooling, **given), metadata=(("authorization", f"Bearer {KEY}"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [_ async for _ in call]

    error = error_of(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == named
